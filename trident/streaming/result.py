"""The result of one call with a micro-batch, or with a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class StreamOutcome(StrEnum):
    """What became of a micro-batch, or of a job, in one call."""

    COMMITTED = "committed"
    ROLLED_FORWARD = "rolled_forward"
    """Its content was fixed before: it was committed from its files, and what was handed in again was discarded."""
    SUPPRESSED = "suppressed"
    """Every sink held it already."""


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one call did. `rows` is how many the micro-batch had, or 0 where it was not read."""

    query: str
    batch: int
    outcome: StreamOutcome
    txids: tuple[int, ...]
    rows: int
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OnceResult:
    """What one `once(frame, key=...)` did. `rows` is how many it wrote: 0 where they were written before."""

    key: str
    outcome: StreamOutcome
    txid: int
    rows: int
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])
