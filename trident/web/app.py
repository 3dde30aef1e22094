"""The page's application put together: its routes, how a session begins and ends, and the answer to any other address."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import UsageError
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.web import render
from stormproof.trident.web.people import LoginSessions, NewSecret, WebOptions, WebRole, new_secret
from stormproof.trident.web.proposals import Proposals
from stormproof.trident.web.reading import LedgerReader
from stormproof.trident.web.render import rendered
from stormproof.trident.web.shield import RequestRefused, Shield
from stormproof.trident.web.views import batch, decisions, failures, questions, topology
from stormproof.trident.web.visit import Route, Site, Visit, serve


async def enter(visit: Visit) -> Response:
    """Exchange a token for a session's cookie. The page then goes on by itself: a redirect would not have the cookie yet."""
    if visit.request.method != "GET":
        raise RequestRefused(400, "A token is used by GET.")
    token = visit.query.get("token", "")
    secret = visit.site.sessions.begin(token) if token and visit.site.options.identify is None else None
    if secret is None:
        raise RequestRefused(
            401,
            "This address was used, or is none of this page's. `stormproof web` printed another one when it was used.",
        )
    answer = visit.page("entered.html")
    answer.set_cookie(
        visit.site.cookie_name(visit.request),
        secret,
        max_age=int(visit.site.sessions.session_s),
        path=visit.request.scope.get("root_path") or "/",
        secure=visit.request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return answer


async def leave(visit: Visit) -> Response:
    """End the session."""
    secret = visit.request.scope["state"].get("session")
    if secret is not None:
        visit.site.sessions.end(secret)
    answer = visit.page("left.html")
    answer.delete_cookie(visit.site.cookie_name(visit.request), path=visit.request.scope.get("root_path") or "/")
    return answer


VIEWS: Final = (
    Route("overview", "/", topology.overview),
    Route("topology", "/topology", topology.topology),
    Route("batches", "/batches", batch.batches),
    Route("batch", "/batch", batch.batch),
    Route("find", "/find", batch.find),
    Route("message", "/message", batch.message),
    Route("failures", "/failures", failures.failures),
    Route("failure", "/failure", failures.failure),
    Route("payload", "/failure/payload", failures.payload, role=WebRole.OPERATOR, method="POST"),
    Route("replays", "/replays", questions.replays),
    Route("questions", "/questions", questions.questions),
    Route("question", "/question", questions.question),
)
ENTRANCE: Final = (
    Route("enter", "/enter", enter, role=None),
    Route("leave", "/leave", leave, method="POST"),
)
ROUTES: Final[tuple[Route, ...]] = (*VIEWS, *decisions.ROUTES, *ENTRANCE)
"""An address is in it once. Whoever adds a view or an action adds a line to one of the tuples."""


@dataclass(frozen=True, slots=True)
class Tab:
    """A view in the page's head, and the routes that belong to it."""

    label: str
    route: str
    covers: frozenset[str]


NAVIGATION: Final = (
    Tab("Overview", "overview", frozenset({"overview", "topology"})),
    Tab("Batches", "batches", frozenset({"batches", "batch"})),
    Tab("Failures", "failures", frozenset({"failures", "failure", "payload"})),
    Tab("Replays", "replays", frozenset({"replays"})),
    Tab("Questions", "questions", frozenset({"questions", "question"})),
)


def app_of(
    open_: Callable[[], Stores],
    options: WebOptions,
    clock: Clock,
    *,
    secrets: NewSecret = new_secret,
    routes: Sequence[Route] = ROUTES,
    shared_s: float | None = None,
) -> tuple[Site, ASGIApp]:
    """What a page consists of, with its clock, its secrets and its database handed in."""
    reader = LedgerReader(open_, clock) if shared_s is None else LedgerReader(open_, clock, shared_s=shared_s)
    paths = {route.name: route.path for route in routes}
    values: dict[str, Any] = {"nav": NAVIGATION, "topology_name": None}
    site = Site(options, clock, reader, LoginSessions(clock, secrets), paths, Proposals(clock, secrets), values)
    return site, Shield(_router(site, routes), options.hosts, _unexpected)


def _router(site: Site, routes: Sequence[Route]) -> ASGIApp:
    """The routes. Not an application of Starlette's: that would answer what fails before the shield sees it."""
    served = [StarletteRoute(route.path, _endpoint(site, route), methods=[route.method]) for route in routes]
    assets_ = StarletteRoute(f"{render.ASSETS}{{end:path}}", _asset, methods=["GET"])
    return Router(routes=[assets_, *served], default=_Missing(site), redirect_slashes=False)


def _endpoint(site: Site, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await serve(site, route, request)

    return endpoint


async def _asset(request: Request) -> Response:
    return render.answer(request.path_params["end"])


class _Missing:
    """An address that is none: said to those only who may look at the page."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await serve(self._site, Route("missing", "", _missing), Request(scope, receive))
        await answer(scope, receive, send)


async def _missing(visit: Visit) -> Response:
    raise UsageError(f"there is no page at {visit.request.url.path}")


def _unexpected(scope: Scope, number: str) -> Response:
    return HTMLResponse(rendered("unexpected.html", {"number": number}), 500)
