"""A dead letter: a message that failed too often, with its payload and everything that happened to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stormproof.core.errors import Json


class Disposal(StrEnum):
    """What an operator decided about a dead letter."""

    REQUEUE = "requeue"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message that is handed out no more, until an operator requeues it; `history` has one entry a failure.

    `disposal`, `by`, `why` and `disposed_at` are None while nobody has decided about it. A requeued message that fails
    to death again is a further dead letter: the earlier one stays as it was.
    """

    id: int
    origin: int
    shown_id: str
    subscription: str
    payload: bytes
    reason: str
    error: str
    times_opened: int
    times_failed: int
    history: tuple[dict[str, Json], ...]
    dead_at: datetime
    disposal: Disposal | None = None
    by: str | None = None
    why: str | None = None
    disposed_at: datetime | None = None
