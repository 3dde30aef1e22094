"""The page's views over a real ledger: each tells what the commands tell, masks payloads, and shows hostile text inert."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from support.command_line import CommandLine
from support.shown import NAME, PAYLOAD, shown_in, sql
from support.web import OPERATOR, READER, Elements, client, inert_faults, page_of, post

from stormproof.core.postgres.database import Database
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.web.app import ROUTES
from stormproof.trident.web.mount import WebApp
from stormproof.trident.web.people import WebOptions, WebUser

pytestmark = pytest.mark.postgres

BLOCKED = "update stormproof.txn set state = 'blocked', cause = 'sink_refused', ended_at = null"


@pytest.fixture
def command(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    """A run with a message that failed once, a dead letter, a reject and a verdict."""
    return shown_in(tmp_path, database, monkeypatch, capsys)


class Page:
    """The page of a ledger, for a person of each role."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._apps: list[WebApp] = []

    def as_(self, user: WebUser = READER) -> TestClient:
        """A browser of this person's."""
        self._apps.append(page_of(self._database, WebOptions(lambda _: user)))
        return client(self._apps[-1])

    def text(self, address: str) -> str:
        """What a reader reads there."""
        return " ".join(" ".join(Elements(self.as_().get(address).text).texts).split())

    def close(self) -> None:
        for app in self._apps:
            app.close()


@pytest.fixture
def page(command: CommandLine, database: Database) -> Iterator[Page]:
    """The page of the ledger of that run."""
    found = Page(database)
    yield found
    found.close()


def every_address(command: CommandLine) -> list[str]:
    """Each view, with each of its objects and some filters."""
    ids = [letter["id"] for letter in command("dead-letters", "list", NAME)["dead_letters"]]
    of = f"topology={NAME}"
    return [
        "/",
        f"/topology?{of}",
        "/batches",
        f"/batches?{of}&state=committed&kind=rejected&since=1d",
        *(f"/batch?{of}&txid={txid}" for txid in (1, 2)),
        "/find",
        "/find?q=none",
        *(f"/{view}?{of}&id={quote(one)}" for one in ids for view in ("message", "failure")),
        "/failures",
        f"/failures?{of}&what=reject&state=any",
        "/failures?error_class=ValueError&limit=1",
        "/replays",
        f"/replays?{of}&span=1h&reason=error",
        "/questions",
        *(f"/question?name={one.name}" for one in QUESTIONS.values() if one.page == "question"),
        f"/question?name=aborted&{of}&txid=1&since=1h&limit=1",
    ]


def every_view_is_shown_and_none_shows_a_payload(command: CommandLine, page: Page) -> None:
    reader, operator = page.as_(), page.as_(OPERATOR)
    addresses = every_address(command)
    assert {one.partition("?")[0] for one in addresses} == {
        route.path for route in ROUTES if route.method == "GET" and route.role is not None
    } - actions()
    for address in addresses:
        for browser in (reader, operator):
            answer = browser.get(address)
            assert answer.status_code == 200, (address, Elements(answer.text).text[-300:])
            assert PAYLOAD not in answer.text, address
            assert inert_faults(answer.text) == [], address


def actions() -> set[str]:
    """Addresses of decisions, which have tests of their own."""
    return {route.path for route in ROUTES if route.name.startswith("decide") or route.name == "confirm"}


def test_a_reader_is_not_told_why_a_batch_is_blocked_since_that_may_quote_a_row(page: Page, database: Database) -> None:
    why = "row (Ada, 41) violates a constraint"
    sql(database, f"{BLOCKED}, reason = '{why}' where txid = 1")
    blocked = (
        "insert into stormproof.event (incarnation, at, kind, txid, error) select incarnation, now(), 'blocked', 1"
    )
    sql(database, f"{blocked}, '{why}' from stormproof.topology")
    for address in (f"/batch?topology={NAME}&txid=1", f"/topology?topology={NAME}", "/question?name=aborted"):
        assert why in page.as_(OPERATOR).get(address).text, address
        assert "Ada" not in page.as_().get(address).text, address
    assert "Ada" not in page.as_(OPERATOR).get("/").text, "its content is one for everybody"
    refused = "select incarnation, now(), 'start_refused', jsonb_build_object('epoch', epoch)"
    sql(
        database,
        f"insert into stormproof.event (incarnation, at, kind, detail, error) {refused}, '{why}' from stormproof.topology",
    )
    assert why in page.as_(OPERATOR).get(f"/topology?topology={NAME}").text
    for address in (f"/topology?topology={NAME}", "/"):
        text = page.as_().get(address).text
        assert ("did not start" in text, "Ada" in text) == (True, False), address


def test_the_overview_says_what_stands(command: CommandLine, page: Page, database: Database) -> None:
    text = page.text("/")
    assert NAME in text
    assert "stopped" in text
    assert "records agree" in text
    assert "Dead letters, undecided 1" in text
    assert "Rejects, undecided 1" in text
    sql(database, f"{BLOCKED}, reason = 'no <table>' where txid = 1")
    text = page.text("/")
    assert "txid 1 is blocked; after the repair: stormproof retry shown 1" in text


def a_batch_is_told_down_to_each_sinks_evidence(command: CommandLine, page: Page) -> None:
    found = command("audit", "txn", NAME, "1")
    text = page.text(f"/batch?topology={NAME}&txid=1")
    (sink,) = found["sinks"]
    assert sink["digest"][:16] in text
    assert f"{sink['sink']}: {sink['outcome'].replace('_', ' ')}, {sink['rows']} rows, as the first" in text
    assert text.index("opened") < text.index("attempt 1 in epoch 1: complete") < text.index("Every sink holds it")
    assert "2 failures" in text


def a_payload_is_shown_to_an_operator_who_asks(command: CommandLine, page: Page) -> None:
    letter = command("dead-letters", "list", NAME)["dead_letters"][0]
    asked = {"topology": NAME, "id": letter["id"]}
    operator, reader = page.as_(OPERATOR), page.as_()
    address = f"/failure?topology={NAME}&id={letter['id']}"
    assert "Show payload" in operator.get(address).text
    assert "Show payload" not in reader.get(address).text
    answer = post(operator, "/failure/payload", asked)
    assert PAYLOAD in answer.text
    assert answer.headers["cache-control"] == "no-store"
    refused = post(reader, "/failure/payload", asked)
    assert (refused.status_code, PAYLOAD in refused.text) == (403, False)
    assert operator.get("/failure/payload").status_code == 405


def a_message_or_a_txid_is_found(command: CommandLine, page: Page) -> None:
    browser = page.as_()
    letter = command("dead-letters", "list", NAME)["dead_letters"][0]
    found = browser.get(f"/find?q={letter['id']}")
    assert (found.status_code, found.headers["location"]) == (303, f"/message?topology={NAME}&id={letter['id']}")
    assert browser.get("/find?q=1").headers["location"] == f"/batch?topology={NAME}&txid=1"
    assert "Neither the ledger nor a source knows" in browser.get("/find?q=zzz").text


def test_batches_are_paged_and_filtered(command: CommandLine, page: Page, database: Database) -> None:
    sql(
        database,
        "insert into stormproof.txn (incarnation, txid, state, guarantee, epoch, attempt, source, position, messages, bytes,"
        " retry, opened_at, prepared_at, ended_at) select incarnation, 1000 + n, 'committed', guarantee, 1, 1, source, '{}',"
        " n, 1, false, now() + make_interval(secs => n), now(), now() + make_interval(secs => n + 1)"
        " from stormproof.topology, generate_series(1, 120) n",
    )
    browser, seen, address = page.as_(), list[int](), f"/batches?topology={NAME}"
    while address:
        links = [dict(a) for tag, a in Elements(browser.get(address).text).found if tag == "a"]
        hrefs = [one["href"] or "" for one in links]
        seen += [int(href.rpartition("=")[2]) for href in hrefs if href.startswith("/batch?")]
        address = next((one["href"] or "" for one in links if one.get("rel") == "next"), "")
    everyone = [txid for (txid,) in sql(database, "select txid from stormproof.txn order by opened_at desc, txid desc")]
    assert seen == everyone
    assert "No batch is like that" in browser.get("/batches?state=abandoned").text
    for wrong in ("state=green", "kind=odd", "cause=none", "after=nowhere", "since=soon"):
        assert browser.get(f"/batches?{wrong}").status_code == 404


def replays_are_drawn_over_time(command: CommandLine, page: Page) -> None:
    (place,) = [a for _, a in Elements(page.as_().get("/replays?span=1h").text).found if "data-chart" in a]
    drawn = json.loads(place["data-chart"] or "")
    (counted,) = command("audit", "replays", NAME, "--group", "reason")["rows"]
    assert [(one["label"], sum(one["values"])) for one in drawn["series"]] == [(counted["reason"], counted["number"])]
    assert len(drawn["times"]) == len(drawn["series"][0]["values"]) >= 60


def what_is_not_there_is_said(command: CommandLine, page: Page) -> None:
    browser = page.as_()
    for address, said in (
        ("/topology?topology=nobody", "knows no topology"),
        (f"/batch?topology={NAME}&txid=999", "has no txid 999"),
        ("/batch?topology=x&txid=one", "no whole number"),
        ("/batch", "lacks topology="),
        (f"/message?topology={NAME}&id=zzz", "ids look like"),
        ("/question?name=odd", "is no question"),
        ("/question?name=attempts&topology=nobody", "knows no topology"),
        ("/nowhere", "there is no page at"),
    ):
        answer = browser.get(address)
        assert answer.status_code == 404, address
        assert said in Elements(answer.text).text, address


def test_the_views_of_one_ledger(command: CommandLine, page: Page) -> None:
    """One run serves those that change nothing."""
    every_view_is_shown_and_none_shows_a_payload(command, page)
    a_batch_is_told_down_to_each_sinks_evidence(command, page)
    a_payload_is_shown_to_an_operator_who_asks(command, page)
    a_message_or_a_txid_is_found(command, page)
    replays_are_drawn_over_time(command, page)
    what_is_not_there_is_said(command, page)


PIECES: Final = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "</title></textarea></pre><svg onload=alert(1)>",
    "{{ 7*7 }}",
    "{% include 'x' %}",
    "javascript:alert(1)",
    "\u202egnp.exe",
    "\u2066\u200b\ufeff",
    "\x1b[31m",
    "Z" + "\u0301" * 40,
    "&#60;script&#62;",
    "--></style>",
    "\U0001f4a5",
    "x" * 4_000,
    "\r\nX-Injected: 1",
    "//evil.example/",
    "data:text/html,<b>",
    "\u2028\u2029",
)


def hostile(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 5)))


def seen(page: str) -> str:
    """All that a person sees of a page; the values of a form's fields are exact, so that they can be sent again."""
    found = Elements(page)
    named = ("title", "aria-label", "alt", "placeholder", "data-l", "data-chart")
    return found.text + "".join(
        value or "" for _, given in found.found for name, value in given.items() if name in named
    )


def test_a_thousand_hostile_texts_are_shown_inert(page: Page, database: Database, seed: int) -> None:
    """Names, errors, reasons, components, payloads, people and rows: in every place where a ledger holds others' text."""
    rng = random.Random(seed)
    texts = [hostile(rng) for _ in range(1_000)]
    evil = "<script>alert(1)</script>\u202e"
    big = "<b>\u202e" + "x" * 1_048_576
    sql(database, "update stormproof.topology set name = %s", evil)
    sql(database, "update stormproof.topology set driver_host = %s, source = %s", texts[0], texts[1])
    sql(database, "update stormproof.topology_sink set sink = %s, target = %s", texts[2], texts[3])
    sql(database, "update stormproof.txn_sink set sink = %s, digest = %s", texts[2], texts[4])
    sql(
        database,
        "update stormproof.graph set description = replace(description::text, 'postgres.numbers', '<i>x')::jsonb",
    )
    sql(database, f"{BLOCKED}, reason = %s where txid = 1", big)
    sql(database, "update stormproof.verdict set by = %s", texts[5])
    sql(
        database,
        "insert into stormproof.event (incarnation, at, kind, action, txid, sink, message, reason, component, error, detail)"
        " select incarnation, now(), kind, action, 1, %s, message, reason, component, error,"
        " jsonb_build_object('by', component, 'why', error) from stormproof.topology,"
        " unnest(%s::text[], %s::text[], %s::text[],"
        " %s::text[], %s::text[], %s::text[]) as given (kind, action, message, reason, component, error)",
        texts[6],
        ["failure", "replay", "operator", "blocked", "reject"] * 100,
        [None, None, "retry", None, None] * 100,
        texts[:500],
        ["error"] * 500,
        texts[500:],
        [*texts[500:999], big],
    )
    sql(
        database,
        "update stormproof.dead_letter set error = 'Evil<b>: ' || %s, payload = %s, source = source",
        big,
        big.encode(),
    )
    sql(database, 'update stormproof.reject set error = %s, "row" = %s, decided_by = null', texts[7], big)
    of = f"topology={quote(evil)}"
    (letter,) = sql(database, "select origin || '-' || id from stormproof.dead_letter")[0]
    (reject,) = sql(database, "select message from stormproof.reject")[0]
    browser = page.as_(WebUser("<script>olaf\u202e", OPERATOR.role))
    addresses = [
        "/",
        f"/topology?{of}",
        f"/batch?{of}&txid=1",
        "/batches",
        "/failures",
        f"/replays?{of}&span=1h",
        f"/find?q={quote(evil)}",
    ]
    addresses += [f"/{view}?{of}&id={one}" for one in (letter, reject) for view in ("message", "failure")]
    addresses += [f"/question?name={one.name}&limit=1000" for one in QUESTIONS.values() if one.page == "question"]
    addresses += [f"/topology?topology={quote(text)}" for text in texts[:200]]
    pages = {address: browser.get(address).text for address in addresses}
    pages["payload"] = post(browser, "/failure/payload", {"topology": evil, "id": letter}).text
    for address, text in pages.items():
        assert inert_faults(text) == [], address
        assert not set(seen(text)) & set("\x00\x1b\u202e\u2066\u200b\ufeff\u2028\u2029"), address
        assert len(text) < 3_000_000, address
    assert "1,048,5" in pages[f"/batch?{of}&txid=1"]
    assert "\u27e8U+202E\u27e9" in pages["payload"]


def test_a_page_without_its_control_would_be_seen() -> None:
    """Negative control of `inert_faults`."""
    for text in PIECES[:5]:
        assert inert_faults(f'<p title="{text}">{text}</p>') != [] or "onfocus" in text
    assert inert_faults("<a href='//evil.example/'>x</a>") != []
    assert inert_faults("<p style='x'>") != []
