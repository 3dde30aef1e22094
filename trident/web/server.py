"""The page on a port of its own, as `stormproof web` serves it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvicorn

from stormproof.core.base.errors import UsageError
from stormproof.trident.web.mount import WebApp
from stormproof.trident.web.people import WebRole, WebUser


@dataclass(frozen=True, slots=True)
class Served:
    """Where the page is, and with which one-time token. `url` begins a session once."""

    address: str
    token: str | None
    url: str
    read_only: bool


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: a free one.

    Raises:
        UsageError: the port is taken, or this machine has no such address.
    """
    try:
        ((family, kind, protocol, _, place), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen()  # whoever is told the address may come before the server takes connections
    except OSError as error:
        raise UsageError(
            f"the page cannot listen on {host} port {port}: {error.strerror or error}; name another --port, or 0 for a free "
            "one",
            host=host,
            port=port,
        ) from error
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(bound: socket.socket, names: Sequence[str]) -> str:
    """The page's address, for people: by the bound address, or by the first name where that is every address."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = next((name for name in names if name not in ("*", "::1")), "localhost")
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def serve(app: WebApp, bound: socket.socket, names: Sequence[str], tell: Callable[[Served], None]) -> None:
    """Serve the page until SIGINT or SIGTERM. `tell` is called with an address at the start; and with a new one each time a
    one-time token was used, so that another browser can come.
    """
    address = address_of(bound, names)
    read_only = app.site.options.read_only

    def offered() -> Served:
        if app.site.options.identify is not None:
            return Served(address, None, address, read_only)
        role = WebRole.READER if read_only else WebRole.OPERATOR
        token = app.site.sessions.offer(WebUser("", role))
        return Served(address, token, f"{address}enter?token={token}", read_only)

    app.site.sessions.on_begun = lambda: tell(offered())
    config = uvicorn.Config(
        app, log_config=None, access_log=False, proxy_headers=False, server_header=False, lifespan="off", ws="none"
    )
    tell(offered())
    try:
        uvicorn.Server(config).run(sockets=[bound])
    finally:
        app.close()
        bound.close()
