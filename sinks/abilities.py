"""What a sink may support beyond `Sink` and `SinkSession`, where the caller has to know it before it acts.

A caller tests for each with `isinstance`. An ability whose absence has a natural answer (nothing, None) is instead a method
of the protocol with that default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stormproof.core.sink import SinkInput
from stormproof.sinks.protocol import CommitResult, PreparedTransaction, SinkIdentity


def warning_of(found: Sequence[str]) -> str:
    """The warning, for the log and for `doctor`, that the table has rules which may refuse rows."""
    return (
        f"its table can refuse rows when they are committed ({'; '.join(found)}). A message with such a row is rejected at "
        "this sink (see: stormproof dead-letters list TOPOLOGY), up to rejects_max_share of the messages; a refused row of "
        "a group rejects the messages of that group. Better check in the topology what the table checks"
    )


@runtime_checkable
class SupportsTakeTable(Protocol):
    """A session that a person can tell to go on in the table that now has its table's name."""

    def count_rows(self, limit: int) -> int:
        """How many rows the table holds, counted no further than to `limit`."""
        ...

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Make this table the sink's own, which holds `last` (None: no txid) from here on. May be repeated.

        Where the table's own record ends before `last`, an empty transaction with the txid and digest of `last` is recorded
        in place of what is missing.

        Raises:
            PositionMismatch: it holds a later txid.
        """
        ...


@runtime_checkable
class SupportsSkipRows(Protocol):
    """A session whose table refuses rows one by one: it can commit a batch without those (``ledger skip --rows``)."""

    def commit_without_refused(self, transaction: PreparedTransaction) -> CommitResult:
        """Commit all messages but those whose rows the table refuses; the result has the rows that are left out.

        A row whose messages are not known is left out alone.
        """
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


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did: the table's version that it made (None: there was nothing to do), and how many files went and
    came. `tries`: how often it was begun, since other writers came first.
    """

    version: int | None
    removed: int
    added: int
    tries: int = 1


@runtime_checkable
class SupportsCompact(Protocol):
    """A session whose table keeps its rows in files, of which small batches leave many small ones."""

    def compact(self, target_bytes: int | None = None) -> Compaction:
        """Write the rows of files below `target_bytes` into fewer files; changes no row and no evidence.

        Raises:
            StoreUnavailable: other writers kept coming first, or the store does not answer; nothing was changed.
            SinkRefused: the table refuses it.
        """
        ...


@runtime_checkable
class SupportsVacuum(Protocol):
    """A session whose table keeps files of earlier versions until somebody removes them."""

    def vacuum(self, retained_hours: int | None = None, *, dry_run: bool = False) -> Sequence[str]:
        """Remove the files that the table let go of so many hours ago (None: as the table says), and no prepared file.
        Returns them; with `dry_run` they stay.

        Raises:
            StoreUnavailable: the store does not answer.
            SinkRefused: the files are needed still, or the table refuses it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did, or would do: the version that it made (None: there was nothing to do, or it was only looked), the
    files whose statistics excluded a row, the keys that came more than once and how many of their rows went, and what was
    left, with the reason.
    """

    version: int | None
    files: Sequence[str]
    doubled_keys: int
    rows_removed: int
    left: Sequence[str]


@runtime_checkable
class SupportsRepair(Protocol):
    """A session whose table keeps statistics of its files, by which readers and merges pass over them."""

    def repair(self, *, dry_run: bool = False) -> Repair:
        """Replace statistics that exclude a row, and leave one row of each key; with `dry_run` say only what is wrong.

        Raises:
            StoreUnavailable: other writers kept coming first, or the store does not answer; nothing was changed.
            SinkRefused: the table cannot be read, or refuses it.
        """
        ...
