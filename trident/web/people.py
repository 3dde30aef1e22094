"""Who a request is from, and what that person may do: reader or operator. How the page is set up."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from stormproof.core.errors import UsageError


class WebRole(StrEnum):
    """What a person may do on the page; each role may do what the ones before it may."""

    READER = "reader"
    """Look at everything but payloads."""
    OPERATOR = "operator"
    """Look at payloads, too, and decide."""

    def may(self, needed: WebRole) -> bool:
        """Whether this role is enough where `needed` is."""
        return self is needed or self is WebRole.OPERATOR


@dataclass(frozen=True, slots=True)
class WebUser:
    """A person, as the page's identity says. With an empty `name` each decision asks who takes it."""

    name: str
    role: WebRole


Identify: TypeAlias = Callable[[Mapping[str, Any]], "WebUser | Awaitable[WebUser | None] | None"]
"""Says from an ASGI connection scope who a request is from; None: nobody who may look. May be a coroutine function."""


def at_most(user: WebUser | None, role: WebRole) -> WebUser | None:
    """The person with no more rights than this role's."""
    return user if user is None or role.may(user.role) else replace(user, role=role)


@dataclass(frozen=True, slots=True)
class ProxyHeaders:
    """Who a request is from, by headers that a proxy in front of the page sets.

    Only a request whose peer is one of the `proxies` (addresses, or networks as 10.0.0.0/8) is believed. `operators` are
    the names of those who may decide; everybody else whom the proxy names may look. The proxy must remove the header from
    what its clients send, and nobody else may reach the page's port from a trusted address.
    """

    user_header: str
    proxies: tuple[str, ...]
    operators: frozenset[str]

    def __post_init__(self) -> None:
        if not self.user_header.strip():
            raise UsageError("the name of the header with the user's name is empty")
        if not self.proxies:
            raise UsageError(f"the header {self.user_header} is believed from no address: name the proxy's")
        for proxy in self.proxies:
            _network(proxy)

    def __call__(self, scope: Mapping[str, Any]) -> WebUser | None:
        """The person whom the headers name, if they come from a trusted proxy, and exactly once."""
        peer = scope.get("client")
        if not peer or not _is_in(str(peer[0]), self.proxies):
            return None
        named = [value for name, value in _headers(scope) if name == self.user_header.lower()]
        if len(named) != 1 or not named[0].strip():
            return None
        name = named[0].strip()
        return WebUser(name, WebRole.OPERATOR if name in self.operators else WebRole.READER)


def _headers(scope: Mapping[str, Any]) -> list[tuple[str, str]]:
    raw: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
    return [(name.decode("latin-1").lower(), value.decode("utf-8", "replace")) for name, value in raw]


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise UsageError(f"{text!r} is no address and no network, such as 10.0.0.7 or 10.0.0.0/8") from None


def _is_in(address: str, networks: Iterable[str]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return any((mapped or found) in _network(network) for network in networks)


POLL_S: Final = 5.0
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class WebOptions:
    """How the page is set up; see `web_app`."""

    identify: Identify | None = None
    """None: by one-time tokens and sessions."""
    read_only: bool = False
    """Nobody is more than a reader."""
    hosts: tuple[str, ...] = LOOPBACK
    """Names under which the page answers; "*": any."""
    poll_s: float = POLL_S
    """Seconds between two looks of an open page."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Signs the forms' tokens; the same in each process, where several serve the page."""
