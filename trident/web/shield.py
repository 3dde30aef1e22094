"""What holds for every request and every answer: known Host names, a bounded body, and the headers of a strict page.

And for a request that changes something: it comes from the page itself.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_MAX: Final = 8 * 2**20
"""Bytes that a form may have: an edited payload, twice escaped."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: with it a browser sends `Origin: null` with the page's own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_HOST: Final = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::[0-9]{1,5})?")
_log: Final = logging.getLogger("stormproof.web")


class BodyTooLarge(Exception):
    """A request's body is longer than `BODY_MAX`."""


class Shield:
    """An ASGI layer around the page; nothing reaches the page, or leaves it, around this.

    Guarantees: a request whose Host is not one of `hosts` is refused before anything looks at it, so that a name that
    another site points at this address reaches nothing; every answer has `HEADERS`, errors and refusals, too; nothing but
    the assets may be kept by a cache.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], failed: Callable[[Scope, str], Response]) -> None:
        self._app = app
        self._hosts = {host.strip("[]").lower() for host in hosts}
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def guarded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        if not self.knows(Headers(scope=scope).getlist("host")):
            refused = PlainTextResponse(
                "This page does not answer under that name. Name it with --allow-host, or in hosts= of web_app.\n", 421
            )
            await refused(scope, receive, guarded)
            return
        try:
            await self._app(scope, _bounded(receive), guarded)
        except HTTPException as error:  # the router's: an address that does not take this method
            await PlainTextResponse(f"{error.detail}\n", error.status_code)(scope, receive, guarded)
        except BodyTooLarge:
            await PlainTextResponse(f"A form may have {BODY_MAX:,} bytes.\n", 413)(scope, receive, guarded)
        except Exception:
            number = secrets.token_hex(4)
            _log.exception("the page failed, error %s: %s", number, scope["path"])
            if begun:
                raise
            await self._failed(scope, number)(scope, receive, guarded)

    def knows(self, given: list[str]) -> bool:
        """Whether a request may come under its Host header."""
        if len(given) != 1 or _HOST.fullmatch(given[0].strip().lower()) is None:
            return False
        return "*" in self._hosts or _name_of(given[0]) in self._hosts


def _name_of(host: str) -> str:
    """The name of ``name:port``; of an IPv6 address without its brackets. Of what is no host, all of it."""
    host = host.strip().lower()
    found = _HOST.fullmatch(host)
    return host if found is None else (found["six"] or found["name"]).rstrip(".")


def _bounded(receive: Receive) -> Receive:
    read = 0

    async def bounded() -> Message:
        nonlocal read
        message = await receive()
        if message["type"] == "http.request":
            read += len(message.get("body", b""))
            if read > BODY_MAX:
                raise BodyTooLarge
        return message

    return bounded


class RequestRefused(Exception):
    """A request that is not let in: the answer's status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


def require_same_origin(request: Request) -> None:
    """Refuse a request that another site's page may have sent."""
    headers = request.headers
    # Every browser names the origin with a POST. Where there is none, a proxy took it away, or it is no browser: whether
    # another site's page sent the request cannot be told.
    origins = headers.getlist("origin")
    if not origins:
        raise RequestRefused(
            403, "The request has no Origin. Send it from the page, by a proxy that leaves the header in place."
        )
    is_own = len(origins) == 1 and _netloc(origins[0]) == headers.get("host", "").lower()
    if not is_own or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise RequestRefused(403, "The request comes from another site.")


def _netloc(address: str) -> str | None:
    try:
        return urlsplit(address).netloc.lower()
    except ValueError:
        return None
