"""The page in this process: clients of each role, with sessions, tokens and the headers that a browser sends."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from typing import Any, Final

from starlette.testclient import TestClient
from starlette.types import ASGIApp

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.web.app import app_of
from stormproof.trident.web.mount import WebApp
from stormproof.trident.web.people import WebOptions, WebRole, WebUser
from stormproof.trident.web.reading import open_ledger

HOME: Final = "http://localhost:8420"
READER: Final = WebUser("rita", WebRole.READER)
OPERATOR: Final = WebUser("olaf", WebRole.OPERATOR)
ADDRESSES: Final = ("href", "src", "action", "formaction", "hx-get", "hx-post", "xlink:href", "poster", "data")
_TOKEN: Final = re.compile(r'<meta name="csrf-token" content="([0-9a-f]{64})">')


def nothing_answers() -> Stores:
    """A ledger that cannot be reached."""
    raise StoreUnavailable("the database postgresql://db/none does not answer")


def page(
    options: WebOptions | None = None, clock: Clock | None = None, open_: Callable[[], Stores] = nothing_answers
) -> WebApp:
    """The page; each read is done anew."""
    return WebApp(*app_of(open_, options or WebOptions(), clock or SystemClock(), shared_s=0))


def page_of(database: Database, options: WebOptions | None = None, clock: Clock | None = None) -> WebApp:
    """The page of a real ledger."""
    settings = Settings(database_url=database.adbc_uri)
    return page(options, clock, lambda: open_ledger(settings))


def client(app: ASGIApp, home: str = HOME) -> TestClient:
    """A browser without a session."""
    return TestClient(app, base_url=home, follow_redirects=False)


def signed_in(app: WebApp, user: WebUser) -> TestClient:
    """A browser with a session of this person's."""
    browser = client(app)
    assert browser.get(app.offer(user)).status_code == 200
    return browser


def token_of(browser: TestClient) -> str:
    """The token that the page gave to this browser's forms."""
    found = _TOKEN.search(browser.get("/no-such-page").text)
    assert found is not None
    return found[1]


def post(
    browser: TestClient,
    path: str,
    fields: Mapping[str, Any] | None = None,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send a form as a browser does: with the page's token and its origin, unless others are given."""
    sent = {"origin": str(browser.base_url).rstrip("/"), "sec-fetch-site": "same-origin", **(headers or {})}
    given = {**(fields or {}), "csrf": token_of(browser) if token is None else token}
    return browser.post(path, data=given, headers=sent)


class Elements(HTMLParser):
    """A document's elements with their attributes, and its text, as a browser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self.texts)

    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        """The elements and the names of their attributes, in order."""
        return [(tag, tuple(attributes)) for tag, attributes in self.found]


def inert_faults(text: str) -> list[str]:
    """What in a document could run, load from elsewhere, or style itself: nothing of that is ever in a page."""
    faults: list[str] = []
    for tag, attributes in Elements(text).found:
        if tag in ("iframe", "object", "embed", "base", "applet", "style", "audio", "video", "template"):
            faults.append(f"<{tag}>")
        if tag == "script" and not (attributes.get("src") or "").startswith(("/assets/", "/mounted/assets/")):
            faults.append(f"<script {attributes}>")
        for name, value in attributes.items():
            if name.startswith("on") or name in ("style", "srcdoc") or name.startswith(("hx-on", "data-hx-on")):
                faults.append(f"<{tag} {name}={value!r}>")
            if name in ADDRESSES and not re.match(r"(/(?!/)|#|(data:,)?$)", value or ""):
                faults.append(f"<{tag} {name}={value!r}>")
    return faults
