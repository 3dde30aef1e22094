"""The contract of states: a state takes each txid's rows between `begin_commit` and `commit`, in txid order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeAlias

import pyarrow as pa

from stormproof.core.contract.fold import Fold
from stormproof.core.contract.source import SourceKind
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import SinkIdentity

__all__ = [
    "MapState",
    "Merge",
    "SourceKind",
    "State",
    "StateContext",
    "StateFactory",
    "StateKind",
    "StateUpdater",
]

Merge: TypeAlias = Callable[[pa.Array, pa.Array], pa.Array]
"""Merges a column: is given the held values and the added ones, two arrays of equal length and type, and returns the new
values, likewise.

NULL on the held side: nothing is held yet. Picklable, and associative: rows of one key may be merged with each other before
they are merged with the held value.
"""


class StateKind(StrEnum):
    """What a state promises where a txid comes again, after an earlier try was cut short at any write."""

    NON_TRANSACTIONAL = "non-transactional"
    """Nothing: rows that come again count again."""
    TRANSACTIONAL = "transactional"
    """The same rows again change nothing more."""
    OPAQUE = "opaque"
    """The rows that come again replace what the earlier try did, be they the same or others."""


@dataclass(frozen=True, slots=True)
class StateContext:
    """What a state is made for: whose it is, and what its rows are. Picklable.

    `schema` is that of the rows that arrive; `keys` names their key columns; `merges` says, for a map, how each of the other
    columns is merged; `folds` are those that the topology's aggregation declared. `create`: the store is made where it is
    not there. `epoch` None: for reading only, so nothing is made and nobody is fenced. `database` and `folder` are the
    run's, for a state that names none itself.
    """

    identity: SinkIdentity
    schema: pa.Schema
    keys: tuple[str, ...] = ()
    merges: Mapping[str, Merge] = field(default_factory=dict[str, Merge])
    folds: Mapping[str, Fold] = field(default_factory=dict[str, Fold])
    epoch: int | None = None
    create: bool = True
    database: Database | None = None
    folder: str | None = None

    @property
    def key_schema(self) -> pa.Schema:
        """The key columns."""
        return pa.schema([self.schema.field(name) for name in self.keys])

    @property
    def value_schema(self) -> pa.Schema:
        """The other columns."""
        return pa.schema([f for f in self.schema if f.name not in self.keys])

    def reading(self) -> StateContext:
        """The same context for reading only, as an executor needs it to answer queries."""
        return replace(self, epoch=None, create=False)


class State(Protocol):
    """Something durable that takes rows txid by txid. It is opened by one driver, and by executors that only read.

    One thread at a time calls it; with several batches in flight not always the one that opened it.
    """

    @property
    def kind(self) -> StateKind:
        """What it promises about a txid that comes again."""
        ...

    def begin_commit(self, txid: int) -> None:
        """Begin a txid; it may be one that was begun before and cut short."""
        ...

    def commit(self, txid: int) -> None:
        """End a txid, of which all rows have come: when this returns they are durable.

        Raises:
            TransientError: whether they are durable is unknown; the txid comes again.
            FatalError: going on could lose or double a row.
        """
        ...

    def close(self) -> None:
        """Close connections. What was begun and not committed may be undone or left: the txid comes again."""
        ...


class MapState(State, Protocol):
    """Values by key, both in Arrow columns. A value whose columns are all NULL counts as absent."""

    @property
    def context(self) -> StateContext:
        """What it was made for."""
        ...

    def multi_get(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The value columns of these keys, row by row; NULLs for a key without a value.

        Between `begin_commit` and `commit` an opaque map returns the values from before this txid.
        """
        ...

    def multi_update(self, rows: pa.RecordBatch, *, each_once: bool = False) -> None:
        """Merge the rows' values into the values of their keys, by the context's `merges`.

        A key may come any number of times in a txid: its rows are merged with each other first, and written at `commit`.
        With `each_once` none of these keys comes again in the txid: they are written at once.
        """
        ...

    def multi_put(self, rows: pa.RecordBatch) -> None:
        """Set the values of these keys; the last of a key's rows in a txid wins."""
        ...


class StateFactory(Protocol):
    """Makes a state where it is needed: in the driver, which commits, and in executors, which read. Picklable."""

    @property
    def kind(self) -> StateKind:
        """What its states promise."""
        ...

    @property
    def target(self) -> str:
        """Where the state is, for people; no secrets."""
        ...

    def make(self, context: StateContext) -> State:
        """Connect; make what is missing if the context says `create`, and fence older epochs out if it has an epoch.

        Raises:
            SinkRefused: the store cannot hold such rows, or belongs to another.
            Fenced: a newer epoch holds it.
            StoreUnavailable: it cannot be reached.
        """
        ...


class StateUpdater(Protocol):
    """Brings a txid's rows into a state: called between `begin_commit` and `commit` with one record batch after the other.

    Whenever a txid comes again, its rows come in the same order and in the same batches. Picklable.
    """

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        """Update the state with these rows."""
        ...
