"""What a state, its factory or its store may support beyond its protocol; a caller tests for it with `isinstance`.

A user's own class need not inherit anything: it supports an ability whose methods it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pyarrow as pa

from stormproof.core.errors import Json
from stormproof.core.postgres.database import Database
from stormproof.core.sink import TableKey
from stormproof.sinks.protocol import EvidenceReport, Held, PreparedTransaction

if TYPE_CHECKING:
    from stormproof.trident.state.map import Backing


@runtime_checkable
class SupportsLastTxid(Protocol):
    """A state that keeps the txid of its last `commit` together with its values: an audit compares it with the ledger."""

    def last_txid(self) -> int | None:
        """The txid of the last commit that it holds; None: it holds none."""
        ...


@runtime_checkable
class SupportsEvidence(Protocol):
    """A state that remembers, as a sink does, what it committed and for which topology."""

    @property
    def table_id(self) -> str:
        """What tells this store from another of the same name."""
        ...

    def held(self) -> Held | None:
        """The last transaction that it holds for this context's identity."""
        ...

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to it."""
        ...

    def adopts(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Announce the transaction of the next `begin_commit`: its digest and rows are kept with the values."""
        ...

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What it remembers of txids from `first` to `last`."""
        ...


@runtime_checkable
class SupportsBacking(Protocol):
    """A map over a store of which more is known than a state says: the limits of its columns, claims, lost files."""

    @property
    def backing(self) -> Backing:
        """What stores its rows."""
        ...


@runtime_checkable
class SupportsTable(Protocol):
    """A factory that knows the table of its states; `database` is the run's, for a factory that names none."""

    def table_key(self, database: Database | None) -> TableKey | None:
        """As `SinkSpec.table_key`: by its name alone."""
        ...

    def find_table(self, database: Database | None) -> TableKey | None:
        """As `Sink.find_table`: by the store's answer."""
        ...

    def description(self, database: Database | None) -> dict[str, Json]:
        """As `Sink.description`; no secrets. Empty: only the topology's own code can open it."""
        ...


@runtime_checkable
class SupportsRowCheck(Protocol):
    """A factory that knows without a connection which columns its store cannot hold."""

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for such a column."""
        ...


@runtime_checkable
class SupportsStoreIdentity(Protocol):
    """A key-value store with an identity, by which two connections to one store are recognised."""

    @property
    def store_identity(self) -> str:
        """Equal for all connections that reach the same keys; for example server, database and key prefix."""
        ...
