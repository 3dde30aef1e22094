"""`web_app`: the page as an ASGI application, alone or in a user's own. What it needs is imported when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.extras import required
from stormproof.trident.web.people import LOOPBACK, POLL_S, Identify, WebOptions, WebUser

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from stormproof.core.start.settings import Settings
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


def web_app(
    settings: Settings | None = None,
    *,
    identify: Identify | None = None,
    read_only: bool = False,
    hosts: Sequence[str] = LOOPBACK,
    poll_s: float = POLL_S,
    secret: bytes | None = None,
) -> WebApp:
    """The page as an ASGI application: every topology of a ledger, its batches, messages, failures and decisions.

    Serve it by itself, or mount it below any path of another application. `settings` name the ledger's database (default:
    as the commands find it); the page connects when it is first asked, and says so if it cannot.

    `identify` says who a request is from, by its ASGI scope: a `WebUser` with a name and a role, or None. It may be a
    coroutine function. Mount the page behind whatever signs people in, and read what that left in the scope. Without it,
    the page knows only those who come with an address from `WebApp.offer`, once each.

    `hosts` are the names under which the page answers (by default those of this machine's loopback; "*": any): a request
    under another name is refused, so that no other site can reach the page by a name of its own. `read_only`: nobody is
    more than a reader. `poll_s`: seconds between two looks of an open page. `secret`: signs forms; give the same in each
    process that serves this page. Sessions that a one-time address began are known to one process alone.

    Needs the extra `web`.

    Raises:
        MachineUnfit: the extra is not installed.
        SettingsError: a setting is wrong.
    """
    for module in ("starlette", "jinja2"):
        required(module, "web", "web_app")
    from stormproof.core.start.settings import Settings
    from stormproof.trident.web.app import app_of
    from stormproof.trident.web.reading import open_ledger

    found = settings or Settings()
    options = WebOptions(identify, read_only, tuple(hosts), poll_s)
    if secret is not None:
        options = WebOptions(identify, read_only, tuple(hosts), poll_s, secret)
    return WebApp(*app_of(lambda: open_ledger(found), options, SystemClock()))
