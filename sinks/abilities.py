"""What a sink may support beyond `Sink` and `SinkSession`, where the caller has to know before it acts.

Each is asked for by `isinstance`. An ability whose absence has a natural answer (nothing, None) is a method with that
default in the protocol instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stormproof.core.sink import SinkInput
from stormproof.sinks.protocol import PreparedTransaction, SinkIdentity


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """One row that the table refuses: its file, its number there, the row as JSON, and why. No SQLSTATE: it was dropped."""

    file: str
    row: int
    text: str
    sqlstate: str | None
    error: str


def warning_of(found: Sequence[str]) -> str:
    """What it means that the table may refuse rows, for the log and for `doctor`."""
    return (
        f"its table can refuse rows when they are committed ({'; '.join(found)}). A row that it refuses blocks its batch; "
        "stormproof ledger skip TOPOLOGY TXID SINK --rows then gives up the refused rows alone. Better check in the "
        "topology what the table checks"
    )


@runtime_checkable
class SupportsTakeTable(Protocol):
    """A session that can be told, by a person's word, that the table of its name is the one it writes to."""

    def count_rows(self, limit: int) -> int:
        """How many rows the table holds, counted no further than to `limit`."""
        ...

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Take this table for the sink's own, holding `last` (None: no txid) from here on.

        Where it holds less by its own record, an empty transaction of that txid and digest stands for what is missing.
        May be repeated.

        Raises:
            PositionMismatch: it holds a later txid.
        """
        ...


@runtime_checkable
class SupportsSkipRows(Protocol):
    """A session whose table refuses rows one by one: it can commit a batch without those (``ledger skip --rows``)."""

    def commit_without_refused(self, transaction: PreparedTransaction) -> Sequence[RefusedRow]:
        """Commit all rows but those that the table refuses; returns these."""
        ...

    def close(self) -> None:
        """Let connections go."""
        ...


@runtime_checkable
class SupportsOperate(Protocol):
    """A sink that a command can open for a batch whose driver has stopped, under that driver's epoch."""

    def operate(self, identity: SinkIdentity, input_: SinkInput, epoch: int, staging: str) -> SupportsSkipRows:
        """Open it; fences nobody."""
        ...
