"""`web`: the page, on a port of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stormproof.core.base.errors import UsageError
from stormproof.core.base.extras import required
from stormproof.core.start.settings import Settings
from stormproof.trident.cli.loading import import_plugins
from stormproof.trident.cli.output import json_line, note, printed, say
from stormproof.trident.web.mount import web_app
from stormproof.trident.web.people import LOOPBACK, Identify, ProxyHeaders


def serve_page(
    *,
    host: str,
    port: int,
    read_only: bool,
    allow_host: Sequence[str] | None,
    user_header: str | None,
    proxy: Sequence[str] | None,
    operator: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Serve the page until it is interrupted, and print where it is.

    Raises:
        MachineUnfit: the extra is missing.
        UsageError: the port is taken, or the options do not fit together.
    """
    for module in ("starlette", "jinja2", "uvicorn"):
        required(module, "web", "stormproof web")
    from stormproof.trident.web.server import Served, is_loopback, listening, serve

    identify = _identity(user_header, proxy or (), operator or ())
    settings = Settings()
    import_plugins(settings.plugins)
    own = () if host in ("0.0.0.0", "::") else (host,)  # noqa: S104 - compared
    names = list(dict.fromkeys((*(allow_host or ()), *own, *LOOPBACK)))
    app = web_app(settings, identify=identify, read_only=read_only, hosts=names)
    bound = listening(host, port)
    if not is_loopback(host):
        note(
            f"the page listens on {host}, for other machines, too, and speaks plain HTTP: put a proxy with TLS before it"
        )

    def tell(served: Served) -> None:
        if as_json:
            printed(json_line(served))
        elif served.token is None:
            say(f"{served.address}  (who you are is said by the proxy's header {user_header})")
        else:
            say(f"{served.url}")
            say("  opens the page once; another address follows when it was used. Ctrl-C ends the page.")
        sys.stdout.flush()

    serve(app, bound, names, tell)


def _identity(user_header: str | None, proxies: Sequence[str], operators: Sequence[str]) -> Identify | None:
    if user_header is None:
        if proxies or operators:
            raise UsageError("--proxy and --operator belong to --user-header, which names the header of a proxy")
        return None
    return ProxyHeaders(user_header, tuple(proxies), frozenset(operators))
