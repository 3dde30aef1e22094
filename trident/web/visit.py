"""One request: how it is let in, what was asked, what may be read, and how the answer is made. Its route; what all share.

Who it is from, which role the route needs, and whether a form was made by this page, is checked before its handler runs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode

from markupsafe import Markup, escape
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import (
    CannotTell,
    MissingRight,
    SettingsError,
    StormproofError,
    TransientError,
    UsageError,
)
from stormproof.trident.web.people import LoginSessions, WebOptions, WebRole, WebUser, at_most, csrf_of, is_csrf_of
from stormproof.trident.web.proposals import Proposals
from stormproof.trident.web.reading import LedgerReader
from stormproof.trident.web.render import ASSETS, address, rendered
from stormproof.trident.web.shield import RequestRefused, require_same_origin

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores


@dataclass(frozen=True, slots=True)
class Site:
    """Options, clock, sessions, the way to the ledger, and the addresses of the routes, by name."""

    options: WebOptions
    clock: Clock
    reader: LedgerReader
    sessions: LoginSessions
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

    async def ask(self, question: Callable[[Stores], T], *key: Hashable, for_s: float | None = None) -> T:
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
            **{name: getattr(self, name) for name in ("asset", "link", "here", "csrf", "user", "is_operator", "now")},
            "read_only": self.site.options.read_only,
            "poll_s": self.site.options.poll_s,
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


CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "x-csrf-token"
FIELDS_MAX: Final = 2_000
_log: Final = logging.getLogger("stormproof.web")


async def serve(site: Site, route: Route, request: Request) -> Response:
    """Answer a request of a route, after all checks; what the checks or the handler raise becomes a page that says so.

    Guarantee: the handler runs only for a person whose role the route needs; and of a POST, only if the request comes from
    this page (by its `Origin`, which it must have, and `Sec-Fetch-Site`) and carries the token that this page gave to that
    session or person.
    """
    request.scope["state"] = {**request.scope.get("state", {}), "route": route.name}
    user, holder = await _person(site, request)
    visit = Visit(site, request, user, "" if holder is None else csrf_of(site.options.secret, holder))
    try:
        if route.role is not None:
            _require_role(site, route, user)
        if route.method != "GET":
            require_same_origin(request)
            visit.form = await _form(request)
            if route.role is not None:
                _require_token(site, request, visit, holder)
        return await route.handler(visit)
    except RequestRefused as refused:
        _log.warning("refused %s %s: %s", route.method, route.path, refused.why)
        return visit.page("refused.html", status=refused.status, title=_TITLES[refused.status], why=refused.why)
    except StormproofError as error:
        return failed(visit, error)


_TITLES: Final = {400: "Not understood", 401: "No session", 403: "Not allowed"}


def failed(visit: Visit, error: StormproofError) -> Response:
    """The page that tells of an error: what, and what to do; the page itself goes on."""
    match error:
        case UsageError() if not isinstance(error, SettingsError):
            status, title = 404, "Not found"
        case TransientError():
            status, title = 503, "The ledger does not answer"
        case SettingsError() | MissingRight():
            status, title = 503, "The ledger cannot be read"
        case CannotTell():
            status, title = 500, "The records do not tell"
        case _:
            status, title = 500, "It was refused"
    return visit.page("error.html", status=status, title=title, error=error)


async def _person(site: Site, request: Request) -> tuple[WebUser | None, str | None]:
    """Who the request is from, and for whom its forms' tokens are made."""
    identify = site.options.identify
    if identify is None:
        secret = request.cookies.get(site.cookie_name(request), "")
        user = site.sessions.user_of(secret) if secret else None
        request.scope["state"]["session"] = None if user is None else secret
        holder = None if user is None else f"session {secret}"
    else:
        found = identify(request.scope)
        user = (await found) if inspect.isawaitable(found) else found
        holder = None if user is None else f"person {user.name}"
    return (at_most(user, WebRole.READER) if site.options.read_only else user), holder


def _require_role(site: Site, route: Route, user: WebUser | None) -> None:
    if user is None:
        why = (
            "This browser has no session, or it has ended. Open the one-time address that `stormproof web` printed last."
            if site.options.identify is None
            else "Nobody is named as the one who asks: the page's identity comes from what serves it."
        )
        raise RequestRefused(401, why)
    assert route.role is not None
    if not user.role.may(route.role):
        known = "the page was started read-only" if site.options.read_only else f"your role is {user.role.value}"
        raise RequestRefused(403, f"This needs the role {route.role.value}; {known}.")


async def _form(request: Request) -> QueryParams:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    if not body:
        return QueryParams()
    if kind != "application/x-www-form-urlencoded":
        raise RequestRefused(400, "A form comes as application/x-www-form-urlencoded.")
    try:
        return QueryParams(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError as error:
        raise RequestRefused(400, "The form cannot be read.") from error


def _require_token(site: Site, request: Request, visit: Visit, holder: str | None) -> None:
    given = request.headers.get(CSRF_HEADER) or visit.form.get(CSRF_FIELD, "")
    if holder is None or not is_csrf_of(site.options.secret, holder, given):
        raise RequestRefused(
            403, "The form lacks the page's token, or it is of a session that has ended: load the page anew."
        )
    visit.form = QueryParams([(name, value) for name, value in visit.form.multi_items() if name != CSRF_FIELD])
