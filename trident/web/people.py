"""Who a request is from, and what that person may do: reader or operator. How the page is set up.

Sessions of browsers, and the one-time tokens that begin them, live in this process's memory alone.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import UsageError


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


SESSION_S: Final = 12 * 3600.0
"""A session ends so long after it began."""
IDLE_S: Final = 2 * 3600.0
"""A session ends when nothing was asked in it for so long."""
SESSIONS_MAX: Final = 1_000
SECRET_BYTES: Final = 32

NewSecret: TypeAlias = Callable[[], str]
"""Makes a secret that cannot be guessed."""


def new_secret() -> str:
    """256 random bits, as text for an address or a cookie."""
    return secrets.token_urlsafe(SECRET_BYTES)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


@dataclass(slots=True)
class _Session:
    user: WebUser
    ends_s: float
    seen_s: float


@dataclass(slots=True)
class LoginSessions:
    """The sessions that one-time tokens began.

    Guarantees: a token begins one session; a session ends `SESSION_S` after it began, or `IDLE_S` after it was last used;
    secrets are kept and compared as digests only, in a time that does not depend on them. Safe for any number of threads.
    """

    clock: Clock
    make: NewSecret = new_secret
    session_s: float = SESSION_S
    idle_s: float = IDLE_S
    on_begun: Callable[[], None] = lambda: None
    """Called after a token was used."""
    _tokens: dict[bytes, WebUser] = field(default_factory=dict[bytes, WebUser])
    _sessions: dict[bytes, _Session] = field(default_factory=dict[bytes, _Session])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, user: WebUser) -> str:
        """A new token, with which somebody may begin a session of this user's once."""
        token = self.make()
        with self._lock:
            self._tokens[_digest(token)] = user
        return token

    def begin(self, token: str) -> str | None:
        """Begin a session with a token: the session's secret. None if the token is unknown, or was used."""
        given, now = _digest(token), self.clock.monotonic_s()
        with self._lock:
            found = [known for known in self._tokens if hmac.compare_digest(known, given)]
            if not found:
                return None
            user, secret = self._tokens.pop(found[0]), self.make()
            self._forget(now)
            while len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[min(self._sessions, key=lambda one: self._sessions[one].seen_s)]
            self._sessions[_digest(secret)] = _Session(user, now + self.session_s, now)
        self.on_begun()
        return secret

    def user_of(self, secret: str) -> WebUser | None:
        """Whose session it is; None if there is none, or it has ended."""
        now = self.clock.monotonic_s()
        with self._lock:
            self._forget(now)
            # Digests of secrets that nobody can guess: how long a look-up of one takes tells nothing about another.
            found = self._sessions.get(_digest(secret))
            if found is None:
                return None
            found.seen_s = now
            return found.user

    def end(self, secret: str) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(_digest(secret), None)

    def _forget(self, now: float) -> None:
        ended = [key for key, one in self._sessions.items() if now >= one.ends_s or now - one.seen_s >= self.idle_s]
        for key in ended:
            del self._sessions[key]


def csrf_of(key: bytes, holder: str) -> str:
    """The token that proves that a form was made by this page for this holder: a session's secret, or a person's name."""
    return hmac.new(key, holder.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def is_csrf_of(key: bytes, holder: str, given: str) -> bool:
    """Whether a form's token is the holder's, in a time that does not depend on it."""
    return hmac.compare_digest(csrf_of(key, holder).encode(), given.encode("utf-8", "replace"))
