"""A transaction's states and the moves between them; the causes, decisions and events that the ledger records."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NewType

TxId = NewType("TxId", int)
Attempt = NewType("Attempt", int)
Epoch = NewType("Epoch", int)


class TxnState(StrEnum):
    """Where one batch stands.

    `OPEN`: messages leased, content not fixed. `PREPARED`: content fixed and durable; only ever rolled forward. `BLOCKED`:
    prepared, and a sink refuses it for good. `COMMITTED`: every sink holds it and its messages are confirmed. `ABORTED`:
    its messages went back. `ABANDONED`: in flight at a crash under at-most-once; no message goes back.
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
"""Under exactly-once `COMMITTED` is reached only from `PREPARED`; the other guarantees have no prepared state."""


class ComponentKind(StrEnum):
    """What a component of a topology is, in the ledger's counts; append-only."""

    SPOUT = "spout"
    OPERATION = "operation"
    BOLT = "bolt"
    AGGREGATE = "aggregate"
    JOIN = "join"
    SINK = "sink"
    ACKER = "acker"


class TxnCause(StrEnum):
    """Why a batch is blocked, was aborted or was abandoned; append-only. The prose is in its `reason`."""

    EVERY_MESSAGE_FAILED = "every_message_failed"
    """Nothing was written; each message waits for its retry, was returned, or is a dead letter."""
    DRIVER_ENDED = "driver_ended"
    """It was in flight when its driver ended."""
    JOB_FAILED = "job_failed"
    UNVERIFIED = "unverified"
    MOOT = "moot"
    """It ran again without its failed messages as often as allowed, and went back in parts."""
    SINK_REFUSED = "sink_refused"
    FILE_LOST = "file_lost"
    """A sink refused it, because a prepared or committed file is missing or damaged."""
    TABLE_GONE = "table_gone"
    """A sink refused it, because there is no table of the sink's name."""
    TOO_MANY_REJECTS = "too_many_rejects"
    """A sink's table refuses the rows of more of its messages than may be rejected."""


class OperatorAction(StrEnum):
    """An operator's decision, as an `operator` event records it; append-only. The prose is in its `reason`."""

    RETRY = "retry"
    SKIP = "skip"
    """Give up the batch's rows at one sink."""
    SKIP_ROWS = "skip_rows"
    """Give up only those rows of the batch that a sink refuses."""
    ADOPT = "adopt"
    """Let the topology write beside the rows of another life."""
    ADOPT_TABLE = "adopt_table"
    """Take the table that is there now for the sink's."""
    ACCEPT_LOSS = "accept_loss"
    """Let the sink go on in a table that lacks rows of committed txids; or, without a sink, accept what a server lost."""
    RELEASE_TABLE = "release_table"
    ACCEPT_CHANGE = "accept_change"
    """Let the topology go on with a changed graph."""
    ADOPT_STREAM = "adopt_stream"
    """Go on from another micro-batch of a streaming query than the next."""
    ADOPT_QUEUE = "adopt_queue"
    """Bind the queue to another server or timeline."""
    RETRY_REJECT = "retry_reject"
    """Open a rejected message again, for the sinks that rejected it."""
    DROP_REJECT = "drop_reject"
    """Give a rejected message up at a sink."""
    PAUSE = "pause"
    """Have the driver open no more batches, and later ones, too, until `resume`."""
    RESUME = "resume"
    DRAIN = "drain"
    """Have the driver open no new messages, and end once none is pending."""
    STOP = "stop"
    """Have the driver end after the batches in flight."""
    COMPACT = "compact"
    """Write a table's many small files into few large ones."""
    VACUUM = "vacuum"
    """Remove the files that a table no longer needs."""
    REPAIR = "repair"
    """Replace a table's statistics that exclude rows, and leave one row of each key."""


class SinkOutcome(StrEnum):
    """How a batch's part for one sink ended; append-only."""

    APPLIED = "applied"
    ALREADY_HELD = "already_held"
    """The sink held it already: a duplicate was suppressed."""
    HELD_UNFINISHED = "held_unfinished"
    """It was found in the sink after the batch had been given up."""
    SKIPPED = "skipped"
    """An operator gave it up: its rows are rejects, which the sink never holds."""


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
    """A message went back with a failed one with which it shares a tuple; no failure is counted."""
    DEAD_LETTER = "dead_letter"
    REPLAY = "replay"
    SUPPRESSED = "suppressed"
    ATTEMPT_FAILED = "attempt_failed"
    TAKE_OVER = "take_over"
    RECOVERY = "recovery"
    BLOCKED = "blocked"
    OPERATOR = "operator"
    REJECT = "reject"
    """A message whose rows a sink does not hold, since its table refuses one of them; or, without a message, such a row."""
    DROPPED = "dropped"
    """A sink's table took a batch without those rows that its own triggers drop; `detail` has their number."""
    LATE_COMMIT = "late_commit"
    """A sink holds a batch that had been given up: a suspended driver wrote it after all."""
    GRAPH = "graph"
    """The topology's graph or its sinks changed from one run to the next."""
    SCHEMA_CHANGED = "schema_changed"
    """A sink changed its table's columns for a batch (``schema_contract="evolve"``)."""
    VALUES_DISCARDED = "values_discarded"
    """A sink stored NULL for values that do not fit (``schema_contract="discard_value"``); the detail counts them."""
    HALVED = "halved"
    STOPPED = "stopped"
    START_REFUSED = "start_refused"
    """A start failed at a sink: its table is gone, is another one, or cannot hold the rows."""


class RejectState(StrEnum):
    """What became of a rejected message at a sink; append-only."""

    OPEN = "open"
    """Nobody has decided."""
    RETRYING = "retrying"
    """An operator had it opened again, and no batch with it has been committed since."""
    RETRIED = "retried"
    """It was opened again, and the batch was committed: the sink holds its rows, or rejected them anew."""
    DROPPED = "dropped"
    """An operator gave it up at this sink."""


class Verdict(StrEnum):
    """What a run of `audit verify` found in what it looked at; append-only."""

    CLEAN = "clean"
    """All was compared and agrees."""
    VIOLATION = "violation"
    CANNOT_TELL = "cannot_tell"
    """Nothing is wrong as far as the evidence goes, and some of the evidence is gone."""
    NOT_COMPARED = "not_compared"
    """All that was compared agrees, and of the tables that were to be read some rows or values were not compared."""
