"""The page as an ASGI application: what a user holds. It can be imported without the extra `web`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stormproof.trident.web.people import WebUser

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from stormproof.trident.web.visit import Site


class WebApp:
    """The page. An ASGI application: serve it by itself, or mount it below any path of another one.

    Threads and event loops: any number. Processes: with `identify` any number, if they share a `secret`; sessions of
    one-time tokens are known to one process alone.
    """

    def __init__(self, site: Site, served: ASGIApp) -> None:
        self.site = site
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        await self._served(scope, receive, send)

    def offer(self, user: WebUser) -> str:
        """A path below the page's own that begins a session of this user's once; to be told to nobody else."""
        return f"{self.site.path_of('enter')}?token={self.site.sessions.offer(user)}"

    def close(self) -> None:
        """Close the connections to the ledger. Canaries hand out no further wave."""
        self.site.proposals.close()
        self.site.reader.close()
