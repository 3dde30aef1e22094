"""The page's safe base: who is let in, from where, with which headers; and that a refused request changes nothing."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Mount
from support.web import HOME, OPERATOR, READER, client, inert_faults, nothing_answers, page, post, signed_in, token_of

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import UsageError
from stormproof.trident.web import render
from stormproof.trident.web.app import ROUTES, app_of
from stormproof.trident.web.mount import WebApp
from stormproof.trident.web.people import IDLE_S, SESSION_S, ProxyHeaders, WebOptions, WebRole, WebUser
from stormproof.trident.web.shield import BODY_MAX, HEADERS
from stormproof.trident.web.visit import Route, Visit

REFUSED = (401, 403)
WHO: dict[str, WebUser | None] = {"nobody": None, "reader": READER, "operator": OPERATOR}


def as_user(user: WebUser | None, **options: Any) -> WebOptions:
    return WebOptions(lambda _: user, **options)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("route", [route for route in ROUTES if route.role is not None], ids=lambda one: one.name)
def test_each_route_lets_in_the_roles_that_it_needs_and_no_other(route: Route, who: str) -> None:
    user = WHO[who]
    browser = client(page(as_user(user)))
    answer = (
        browser.get(route.path)
        if route.method == "GET"
        else post(browser, route.path, token="" if user is None else None)
    )
    assert route.role is not None
    may = user is not None and user.role.may(route.role)
    assert (answer.status_code in REFUSED) is not may, answer.status_code
    if not may:
        assert answer.status_code == (401 if user is None else 403)


@pytest.mark.parametrize("route", [one for one in ROUTES if one.role is WebRole.OPERATOR], ids=lambda one: one.name)
def test_a_page_that_is_read_only_has_no_operators(route: Route) -> None:
    browser = client(page(as_user(OPERATOR, read_only=True)))
    answer = browser.get(route.path) if route.method == "GET" else post(browser, route.path)
    assert answer.status_code == 403


def test_every_address_is_in_the_table_once() -> None:
    assert len({route.name for route in ROUTES}) == len({(route.path, route.method) for route in ROUTES}) == len(ROUTES)
    assert [one.path for one in ROUTES if one.role is None] == ["/enter"]


FORGED: dict[str, Mapping[str, str]] = {
    "another origin": {"origin": "https://evil.example"},
    "another port": {"origin": "http://localhost:9999"},
    "no origin's name": {"origin": "null"},
    "a broken origin": {"origin": "http://[::1"},
    "a cross-site form": {"sec-fetch-site": "cross-site"},
    "another site of the same name": {"sec-fetch-site": "same-site"},
}


class Counter:
    """A route that changes something, and how often it did."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self, visit: Visit) -> Response:
        self.times += 1
        return Response(visit.form.get("why", ""))


def counting(user: WebUser | None = OPERATOR) -> tuple[Counter, Any]:
    counter = Counter()
    routes = (*ROUTES, Route("count", "/count", counter, WebRole.OPERATOR, "POST"))
    return counter, client(WebApp(*app_of(nothing_answers, as_user(user), ManualClock(), routes=routes)))


@pytest.mark.parametrize("headers", FORGED.values(), ids=list(FORGED))
def test_a_form_of_another_site_is_refused_though_it_has_the_token(headers: Mapping[str, str]) -> None:
    counter, browser = counting()
    assert post(browser, "/count", headers=headers).status_code == 403
    assert counter.times == 0


WITHOUT_ORIGIN: dict[str, Mapping[str, str]] = {
    "nothing else": {},
    "another site's address": {"referer": "https://evil.example/"},
    "the page's own address": {"referer": "http://localhost:8420/decide"},
    "the browser's word": {"sec-fetch-site": "same-origin"},
}


@pytest.mark.parametrize("headers", WITHOUT_ORIGIN.values(), ids=list(WITHOUT_ORIGIN))
def test_a_request_without_an_origin_changes_nothing(headers: Mapping[str, str]) -> None:
    counter, browser = counting()
    answer = browser.post("/count", headers={"x-csrf-token": token_of(browser), **headers})
    assert (answer.status_code, counter.times) == (403, 0)
    assert "The request has no Origin" in answer.text


@pytest.mark.parametrize("token", ["", "0" * 64, "x", "\u00e9\ud7ff"])
def test_a_form_without_the_pages_token_is_refused(token: str) -> None:
    counter, browser = counting()
    assert post(browser, "/count", token=token).status_code == 403
    assert counter.times == 0


def test_a_token_of_another_person_is_refused() -> None:
    counter, browser = counting()
    other = client(page(WebOptions(lambda _: READER, secret=b"one")))
    assert post(browser, "/count", token=token_of(other)).status_code == 403
    secret = WebOptions(lambda _: OPERATOR, secret=b"two")
    assert token_of(client(page(secret))) != token_of(other)
    assert counter.times == 0


def test_the_pages_own_form_is_taken() -> None:
    """The control of those above."""
    counter, browser = counting()
    assert post(browser, "/count", {"why": "because"}).text == "because"
    sent = {"x-csrf-token": token_of(browser), "origin": HOME}
    assert browser.post("/count", headers=sent).status_code == 200
    assert counter.times == 2


def test_a_form_is_of_one_kind_and_of_a_bounded_length() -> None:
    counter, browser = counting()
    sent = {"x-csrf-token": token_of(browser), "origin": HOME}
    assert browser.post("/count", json={"why": "x"}, headers=sent).status_code == 400
    assert (
        browser.post(
            "/count", content=b"why=%zz&why=\xff", headers={**sent, "content-type": "application/x-www-form-urlencoded"}
        ).status_code
        == 400
    )
    assert browser.post("/count", data={"why": "x" * BODY_MAX}, headers=sent).status_code == 413
    assert browser.get("/count").status_code == 405
    assert counter.times == 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "evil.example:8420",
        "",
        "[::1",
        "localhost:x",
    ],
)
def test_a_host_that_is_not_known_reaches_nothing(host: str) -> None:
    browser = client(page(as_user(OPERATOR)))
    for path in ("/", "/enter?token=x", f"/assets/{render.address('page.css')}"):
        assert browser.get(path, headers={"host": host}).status_code == 421


def test_hosts_that_are_known_are_answered() -> None:
    browser = client(page(as_user(OPERATOR, hosts=("page.example", "::1"))))
    for host in ("page.example", "PAGE.example:8443", "page.example.", "[::1]:8420"):
        assert browser.get("/", headers={"host": host}).status_code == 503
    assert browser.get("/", headers={"host": "localhost"}).status_code == 421
    assert client(page(as_user(OPERATOR, hosts=("*",)))).get("/", headers={"host": "any.example"}).status_code == 503


def test_every_answer_has_the_headers_of_a_strict_page() -> None:
    async def failing(visit: Visit) -> Response:
        raise RuntimeError("secret-7f3a")

    routes = (*ROUTES, Route("fail", "/fail", failing))
    browser = client(WebApp(*app_of(nothing_answers, as_user(OPERATOR), ManualClock(), routes=routes)))
    answers = {
        path: browser.request(method, path, headers=headers)
        for method, path, headers in (
            ("GET", "/", {}),
            ("GET", "/no-such-page", {}),
            ("GET", "/fail", {}),
            ("PUT", "/", {}),
            ("GET", f"/assets/{render.address('htmx.min.js')}", {}),
            ("GET", "/assets/../app.py", {}),
            ("GET", "/enter", {"host": "evil.example"}),
        )
    }
    for path, answer in answers.items():
        assert HEADERS.items() <= dict(answer.headers).items(), path
        assert inert_faults(answer.text) == [] or path.startswith("/assets"), path
    assert answers["/fail"].status_code == 500
    assert "secret-7f3a" not in answers["/fail"].text
    assert "unsafe" not in HEADERS["content-security-policy"]
    kept = [path for path, answer in answers.items() if answer.headers["cache-control"] != "no-store"]
    assert kept == [f"/assets/{render.address('htmx.min.js')}"]


def test_a_token_begins_one_session() -> None:
    app = page()
    address = app.offer(OPERATOR)
    first, second = client(app), client(app)
    assert first.get("/").status_code == 401
    assert first.head(address).status_code == 400
    answer = first.get(address)
    cookie = answer.headers["set-cookie"].lower()
    assert answer.status_code == 200
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/;" in cookie
    assert "secure" not in cookie
    assert first.get("/").status_code == 503  # let in; the ledger does not answer
    assert (second.get(address).status_code, second.get("/").status_code) == (401, 401)
    assert client(app).get("/enter?token=").status_code == 401


def test_a_session_over_tls_has_a_cookie_that_needs_it() -> None:
    app = page()
    answer = client(app, "https://localhost").get(app.offer(OPERATOR))
    assert "secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(("steps", "step_s"), [(1, IDLE_S), (int(SESSION_S // 3600), 3600)], ids=["idle", "whole"])
def test_a_session_ends(steps: int, step_s: float) -> None:
    clock = ManualClock()
    app = page(clock=clock)
    browser = signed_in(app, OPERATOR)
    for _ in range(steps):
        assert browser.get("/").status_code == 503
        clock.advance(step_s)
    assert browser.get("/").status_code == 401


def test_a_person_leaves_and_is_out_though_the_cookie_was_kept() -> None:
    app = page()
    browser = signed_in(app, OPERATOR)
    kept = dict(browser.cookies)
    assert post(browser, "/leave").status_code == 200
    browser.cookies.update(kept)
    assert browser.get("/").status_code == 401


def test_a_proxys_header_is_believed_from_the_proxy_alone() -> None:
    who = ProxyHeaders("X-User", ("10.1.0.0/16", "::1"), frozenset({"olaf"}))

    def asked(peer: str | None, *headers: tuple[str, str]) -> WebUser | None:
        raw = [(name.lower().encode(), value.encode()) for name, value in headers]
        return who({"client": None if peer is None else (peer, 1), "headers": raw})

    assert asked("10.1.2.3", ("X-User", "olaf")) == WebUser("olaf", WebRole.OPERATOR)
    assert asked("::ffff:10.1.2.3", ("x-user", "rita")) == WebUser("rita", WebRole.READER)
    for peer in ("10.2.0.1", "127.0.0.1", "unix", None):
        assert asked(peer, ("X-User", "olaf")) is None
    assert asked("::1", ("X-User", "rita"), ("X-User", "olaf")) is None
    assert asked("::1", ("X-User", " ")) is None
    assert asked("::1") is None
    for wrong in (("", ("::1",)), ("X-User", ()), ("X-User", ("nowhere",))):
        with pytest.raises(UsageError):
            ProxyHeaders(wrong[0], tuple(wrong[1]), frozenset())


def test_a_mounted_page_stays_below_its_path() -> None:
    async def identify(scope: Mapping[str, Any]) -> WebUser | None:
        return WebUser(scope["state"]["name"], WebRole.READER) if "state" in scope else None

    class Named:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app({**scope, "state": {"name": "<b>rita"}}, receive, send)

    app = Starlette(routes=[Mount("/mounted", Named(page(WebOptions(identify))))])
    text = client(app).get("/mounted/").text
    assert "&lt;b&gt;rita" in text
    assert inert_faults(text) == []
    addresses = [part.partition('"')[0] for part in text.replace('src="', 'href="').split('href="')[1:]]
    assert all(one.startswith(("/mounted/", "#")) or not one for one in addresses), addresses
    own = page()
    mounted = client(Starlette(routes=[Mount("/mounted", own)]))
    answer = mounted.get(f"/mounted{own.offer(OPERATOR)}")
    assert "path=/mounted;" in answer.headers["set-cookie"].lower()
    assert mounted.get("/mounted/").status_code == 503


def test_a_ledger_that_does_not_answer_is_said_and_the_page_stays() -> None:
    answer = client(page(as_user(READER))).get("/")
    assert answer.status_code == 503
    assert "The ledger does not answer" in answer.text
    assert "postgresql://db/none does not answer" in answer.text
    assert 'aria-label="Views"' in answer.text


VENDORED = tomllib.loads(render.asset("vendored.toml").decode())


@pytest.mark.parametrize("name", VENDORED)
def test_a_vendored_file_is_what_its_package_has(name: str) -> None:
    assert hashlib.sha256(render.asset(name)).hexdigest() == VENDORED[name]["sha256"]


def test_every_vendored_script_has_its_licence_beside_it() -> None:
    kinds = {one["package"] for one in VENDORED.values() if one["path"].endswith((".js", ".css"))}
    assert kinds == {one["package"] for one in VENDORED.values() if one["path"] == "LICENSE"}
    assert b"(v1.6.32)" in render.asset("uplot.min.js")[:80]
    assert b'version:"2.0.11"' in render.asset("htmx.min.js")


def test_a_reader_on_another_port_has_another_cookie() -> None:
    app = page()
    browser = client(app, HOME.replace("8420", "8421"))
    browser.get(app.offer(READER))
    assert list(browser.cookies) == ["stormproof_8421"]
