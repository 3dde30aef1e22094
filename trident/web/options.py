"""How the page is set up."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

from stormproof.trident.web.people import Identify

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
