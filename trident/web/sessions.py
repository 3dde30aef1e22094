"""Sessions of browsers, and the one-time tokens that begin them. Both live in this process's memory alone."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from stormproof.core.clock import Clock
from stormproof.trident.web.people import WebUser

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
class Sessions:
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
