"""The page's application put together: its routes, its assets, and what answers for an address that is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stormproof.core.clock import Clock
from stormproof.core.errors import UsageError
from stormproof.trident.web import assets
from stormproof.trident.web.application import WebApp
from stormproof.trident.web.decide.proposals import Proposals
from stormproof.trident.web.guard import serve
from stormproof.trident.web.options import WebOptions
from stormproof.trident.web.reading import LedgerReader, Opened
from stormproof.trident.web.render import rendered
from stormproof.trident.web.route import Route
from stormproof.trident.web.routes import NAVIGATION, ROUTES
from stormproof.trident.web.sessions import NewSecret, Sessions, new_secret
from stormproof.trident.web.shield import Shield
from stormproof.trident.web.site import Site
from stormproof.trident.web.visit import Visit


def app_of(
    open_: Callable[[], Opened],
    options: WebOptions,
    clock: Clock,
    *,
    secrets: NewSecret = new_secret,
    routes: Sequence[Route] = ROUTES,
    shared_s: float | None = None,
) -> WebApp:
    """The same with its clock, its secrets and its database handed in."""
    reader = LedgerReader(open_, clock) if shared_s is None else LedgerReader(open_, clock, shared_s=shared_s)
    paths = {route.name: route.path for route in routes}
    values: dict[str, Any] = {"nav": NAVIGATION, "topology_name": None}
    site = Site(options, clock, reader, Sessions(clock, secrets), paths, Proposals(clock, secrets), values)
    return WebApp(site, Shield(_router(site, routes), options.hosts, _unexpected))


def _router(site: Site, routes: Sequence[Route]) -> ASGIApp:
    """The routes. Not an application of Starlette's: that would answer what fails before the shield sees it."""
    served = [StarletteRoute(route.path, _endpoint(site, route), methods=[route.method]) for route in routes]
    assets_ = StarletteRoute(f"{assets.ASSETS}{{end:path}}", _asset, methods=["GET"])
    return Router(routes=[assets_, *served], default=_Missing(site), redirect_slashes=False)


def _endpoint(site: Site, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await serve(site, route, request)

    return endpoint


async def _asset(request: Request) -> Response:
    return assets.answer(request.path_params["end"])


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
    del scope
    return HTMLResponse(rendered("unexpected.html", {"number": number}), 500)
