"""`Site`: what all requests of one page share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from stormproof.core.clock import Clock
from stormproof.trident.web.decide.proposals import Proposals
from stormproof.trident.web.options import WebOptions
from stormproof.trident.web.reading import LedgerReader
from stormproof.trident.web.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Site:
    """Options, clock, sessions, the way to the ledger, and the addresses of the routes, by name."""

    options: WebOptions
    clock: Clock
    reader: LedgerReader
    sessions: Sessions
    paths: Mapping[str, str]
    proposals: Proposals
    """Decisions that were shown, and wait for a confirmation or were acted on."""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What every template may use."""

    def path_of(self, name: str) -> str:
        """A route's address, below the mount."""
        return self.paths[name]

    def cookie_name(self, request: Request) -> str:
        """The session's cookie. Cookies are shared by all ports of a host: each page has one of its own."""
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        return f"stormproof_{port}"
