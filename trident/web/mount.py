"""`web_app`: the page for a user's own ASGI application. What it needs is imported when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.machine_faults import required
from stormproof.trident.web.people import LOOPBACK, POLL_S, Identify, WebOptions

if TYPE_CHECKING:
    from stormproof.core.start.settings import Settings
    from stormproof.trident.web.application import WebApp


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
    return app_of(lambda: open_ledger(found), options, SystemClock())
