"""What a report is to be of: its topology and time, and how much of each list it has."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

ROWS: Final = 200
"""Rows of each list that a report has unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report is to be of."""

    topology: str
    since: datetime | None = None
    until: datetime | None = None
    rows: int = ROWS
    messages: tuple[str, ...] = ()
    """Messages whose whole history it has."""
    verdict: int | None = None
    """The number of a verdict that was kept; None: the verification is run."""
    payload_digests: bool = False
    """Whether dead letters and rejects have the SHA-256 of their payloads. A short payload can be guessed from it."""
