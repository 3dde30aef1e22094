"""Lets a request in: who it is from, which role the route needs, and whether a form was made by this page."""

from __future__ import annotations

import inspect
import logging
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from stormproof.core.errors import (
    CannotTell,
    MissingRight,
    SettingsError,
    StormproofError,
    TransientError,
    UsageError,
)
from stormproof.trident.web.people import WebRole, WebUser, at_most, csrf_of, is_csrf_of
from stormproof.trident.web.visit import Route, Site, Visit

CSRF_FIELD: Final = "csrf"
CSRF_HEADER: Final = "x-csrf-token"
FIELDS_MAX: Final = 2_000
_log: Final = logging.getLogger("stormproof.web")


class Refused(Exception):
    """A request that is not let in: the answer's status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


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
            _require_same_origin(request)
            visit.form = await _form(request)
            if route.role is not None:
                _require_token(site, request, visit, holder)
        return await route.handler(visit)
    except Refused as refused:
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
        raise Refused(401, why)
    assert route.role is not None
    if not user.role.may(route.role):
        known = "the page was started read-only" if site.options.read_only else f"your role is {user.role.value}"
        raise Refused(403, f"This needs the role {route.role.value}; {known}.")


def _require_same_origin(request: Request) -> None:
    headers = request.headers
    # Every browser names the origin with a POST. Where there is none, a proxy took it away, or it is no browser: whether
    # another site's page sent the request cannot be told.
    origins = headers.getlist("origin")
    if not origins:
        raise Refused(
            403, "The request has no Origin. Send it from the page, by a proxy that leaves the header in place."
        )
    is_own = len(origins) == 1 and _netloc(origins[0]) == headers.get("host", "").lower()
    if not is_own or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refused(403, "The request comes from another site.")


def _netloc(address: str) -> str | None:
    try:
        return urlsplit(address).netloc.lower()
    except ValueError:
        return None


async def _form(request: Request) -> QueryParams:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await request.body()
    if not body:
        return QueryParams()
    if kind != "application/x-www-form-urlencoded":
        raise Refused(400, "A form comes as application/x-www-form-urlencoded.")
    try:
        return QueryParams(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError as error:
        raise Refused(400, "The form cannot be read.") from error


def _require_token(site: Site, request: Request, visit: Visit, holder: str | None) -> None:
    given = request.headers.get(CSRF_HEADER) or visit.form.get(CSRF_FIELD, "")
    if holder is None or not is_csrf_of(site.options.secret, holder, given):
        raise Refused(403, "The form lacks the page's token, or it is of a session that has ended: load the page anew.")
    visit.form = QueryParams([(name, value) for name, value in visit.form.multi_items() if name != CSRF_FIELD])
