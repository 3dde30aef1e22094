"""A transaction's states, and the moves between them that are allowed."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NewType

TxId = NewType("TxId", int)
Attempt = NewType("Attempt", int)
Epoch = NewType("Epoch", int)


class TxnState(StrEnum):
    """Where one batch stands.

    `OPEN`: messages leased, nothing fixed. `PREPARED`: content frozen and durable; only ever rolled forward. `BLOCKED`:
    prepared, and a sink refuses it for good. `COMMITTED`: every sink holds it and its messages are confirmed.
    `ABORTED`: its messages went back. `ABANDONED`: in flight at a crash under at-most-once; nothing goes back.
    """

    OPEN = "open"
    PREPARED = "prepared"
    BLOCKED = "blocked"
    COMMITTED = "committed"
    ABORTED = "aborted"
    ABANDONED = "abandoned"

    @property
    def ended(self) -> bool:
        """Whether nothing follows."""
        return not MOVES[self]


MOVES: Final[dict[TxnState, frozenset[TxnState]]] = {
    TxnState.OPEN: frozenset({TxnState.PREPARED, TxnState.COMMITTED, TxnState.ABORTED, TxnState.ABANDONED}),
    TxnState.PREPARED: frozenset({TxnState.BLOCKED, TxnState.COMMITTED}),
    TxnState.BLOCKED: frozenset({TxnState.PREPARED}),
    TxnState.COMMITTED: frozenset(),
    TxnState.ABORTED: frozenset(),
    TxnState.ABANDONED: frozenset(),
}
"""Under exactly-once `COMMITTED` is reached from `PREPARED` alone; the other guarantees have no prepared state."""


class AttemptOutcome(StrEnum):
    """How one try at a batch ended."""

    RUNNING = "running"
    COMPLETE = "complete"
    JOB_FAILED = "job_failed"
    UNVERIFIED = "unverified"
    MOOT = "moot"
    """Messages failed after their tuples had gone on: the batch runs again without them."""
    DEAD = "dead"


class EventKind(StrEnum):
    """What a row of the ledger's `event` table records; append-only."""

    FAILURE = "failure"
    RETURNED = "returned"
    """A message that goes back with one that failed, with which it shares a tuple; no failure is counted."""
    DEAD_LETTER = "dead_letter"
    REPLAY = "replay"
    SUPPRESSED = "suppressed"
    ATTEMPT_FAILED = "attempt_failed"
    TAKE_OVER = "take_over"
    RECOVERY = "recovery"
    BLOCKED = "blocked"
    OPERATOR = "operator"
    REJECT = "reject"
    """A row that a sink does not hold, and why: of a batch that an operator skipped there."""
    LATE_COMMIT = "late_commit"
    """A sink turned out to hold a batch that had been given up: a driver that stood still has written it after all."""
    GRAPH = "graph"
    """The topology's graph or its sinks changed from one run to the next."""
    HALVED = "halved"
    STOPPED = "stopped"
    START_REFUSED = "start_refused"
    """A start ended at a sink whose table is gone, is another one, or cannot hold the rows."""
