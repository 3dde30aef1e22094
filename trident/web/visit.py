"""One request of a known person: what was asked, what may be read, and how the answer is made. Its route; what all share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlencode

from markupsafe import Markup, escape
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from stormproof.core.clock import Clock
from stormproof.core.errors import UsageError
from stormproof.trident.web.assets import ASSETS, address
from stormproof.trident.web.decide.proposals import Proposals
from stormproof.trident.web.people import Sessions, WebOptions, WebRole, WebUser
from stormproof.trident.web.reading import LedgerReader
from stormproof.trident.web.render import rendered

if TYPE_CHECKING:
    from stormproof.trident.web.reading import Opened


@dataclass(frozen=True, slots=True)
class Site:
    """Options, clock, sessions, the way to the ledger, and the addresses of the routes, by name."""

    options: WebOptions
    clock: Clock
    reader: LedgerReader
    sessions: Sessions
    paths: Mapping[str, str]
    proposals: Proposals
    """Decisions that were shown, and wait for a confirmation or were acted on."""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What every template may use."""

    def path_of(self, name: str) -> str:
        """A route's address, below the mount."""
        return self.paths[name]

    def cookie_name(self, request: Request) -> str:
        """The session's cookie. Cookies are shared by all ports of a host: each page has one of its own."""
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        return f"stormproof_{port}"


T = TypeVar("T")


@dataclass(slots=True)
class Visit:
    """One request. A handler gets it after all checks; `user` is None only on a route that is for everybody."""

    site: Site
    request: Request
    user: WebUser | None
    csrf: str
    form: QueryParams = field(default_factory=QueryParams)
    """The fields of a POST's form, without its token; `getlist` has all of a name."""

    @property
    def query(self) -> QueryParams:
        """The address's parameters."""
        return self.request.query_params

    @property
    def now(self) -> datetime:
        """The time, in UTC."""
        return self.site.clock.now()

    @property
    def is_operator(self) -> bool:
        """Whether the person may decide, and look at payloads."""
        return self.user is not None and self.user.role.may(WebRole.OPERATOR)

    def text(self, name: str) -> str | None:
        """A parameter; None if it is missing or blank."""
        return self.query.get(name, "").strip() or None

    def required(self, name: str) -> str:
        """A parameter.

        Raises:
            UsageError: it is missing.
        """
        found = self.text(name)
        if found is None:
            raise UsageError(f"the address lacks {name}=")
        return found

    def number(self, name: str, default: int, *, low: int = 0, high: int = 2**63 - 1) -> int:
        """A parameter that is a whole number.

        Raises:
            UsageError: it is none, or out of range.
        """
        given = self.text(name)
        if given is None:
            return default
        if not given.isascii() or not given.isdigit() or not low <= int(given[:20]) <= high:
            raise UsageError(f"{name}={given[:40]!r} is no whole number from {low} to {high}")
        return int(given)

    @property
    def root(self) -> str:
        """The path below which the page is mounted."""
        return str(self.request.scope.get("root_path", ""))

    def link(self, name: str, /, **query: object) -> Markup:
        """The address of a route, below wherever the page is mounted; parameters that are None or empty are left out."""
        kept = {key: str(value) for key, value in query.items() if value is not None and value != ""}
        path = self.root + self.site.path_of(name)
        return escape(f"{path}?{urlencode(kept, errors='replace')}" if kept else path)

    def asset(self, name: str) -> Markup:
        """The address of a script, a style or a picture."""
        return escape(f"{self.root}{ASSETS}{address(name)}")

    def here(self, **changed: object) -> Markup:
        """This address with other parameters: what is None is left out."""
        route: str = self.request.scope["state"]["route"]
        return self.link(route, **{**dict(self.query), **changed})

    async def ask(self, question: Callable[[Opened], T], *key: Hashable, for_s: float | None = None) -> T:
        """A question to the ledger; the answer is shared by all who ask with the same key. See `LedgerReader.ask`."""
        return await self.site.reader.ask(question, key=(question.__qualname__, *key), for_s=for_s)

    def part(self, template: str, /, **values: Any) -> Markup:
        """A part of a page that is the same for everybody: it knows nothing of the person, and may be shared."""
        return Markup(rendered(template, {**self.site.values, "link": self.link, "now": self.now, **values}))  # noqa: S704 - the template has escaped it

    def page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """A page from a template."""
        state = self.request.scope["state"]
        given = {
            **self.site.values,
            "asset": self.asset,
            "link": self.link,
            "here": self.here,
            "csrf": self.csrf,
            "user": self.user,
            "is_operator": self.is_operator,
            "read_only": self.site.options.read_only,
            "poll_s": self.site.options.poll_s,
            "now": self.now,
            "asked": self.values(),
            "route": state["route"],
            "has_session": state.get("session") is not None,
            **values,
        }
        return HTMLResponse(rendered(template, given), status)

    def redirect(self, name: str, /, **query: object) -> Response:
        """Go to another route, after a POST."""
        return RedirectResponse(self.link(name, **query).unescape(), 303)

    def values(self) -> Mapping[str, str]:
        """The address's parameters that are not blank."""
        return {name: value for name, value in self.query.items() if value.strip()}


Handler: TypeAlias = Callable[[Visit], Awaitable[Response]]
"""Answers a request that was let in: host, person, role and, of a POST, origin and token were checked."""


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of `ROUTES`. `role` None: for everybody, also without a session.

    A GET changes nothing. A POST needs the form's token, and an origin that is this page's.
    """

    name: str
    path: str
    handler: Handler
    role: WebRole | None = WebRole.READER
    method: Literal["GET", "POST"] = "GET"
