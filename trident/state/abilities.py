"""What a state, its factory or its store may support beyond what `protocol` asks of each; asked for by `isinstance`.

A user's own classes need not inherit anything: what they have of these, they support.
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
    """A state that remembers the txid of its last `commit`, with its values: an audit can hold it to that."""

    def last_txid(self) -> int | None:
        """The txid of the last commit that it holds; None: of none."""
        ...


@runtime_checkable
class SupportsEvidence(Protocol):
    """A state that remembers what it committed, and for whom, as a sink does."""

    @property
    def table_id(self) -> str:
        """What tells this store from another of the same name."""
        ...

    def held(self) -> Held | None:
        """The last transaction that it holds for this context's identity."""
        ...

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives of this topology's name that committed to it."""
        ...

    def adopts(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """The next `begin_commit` is this transaction's: its digest and rows are kept with the values."""
        ...

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What it remembers of txids from `first` to `last`."""
        ...


@runtime_checkable
class SupportsBacking(Protocol):
    """A map over a store of which more is known than a state tells: its columns' limits, claims, lost files."""

    @property
    def backing(self) -> Backing:
        """Where its rows are stored."""
        ...


@runtime_checkable
class SupportsTable(Protocol):
    """A factory that knows which table its states are in; `database` is what a run has, for one that names none itself."""

    def table_key(self, database: Database | None) -> TableKey | None:
        """As `SinkSpec.table_key`: by its name alone."""
        ...

    def find_table(self, database: Database | None) -> TableKey | None:
        """As `Sink.find_table`: by what the store says."""
        ...

    def description(self, database: Database | None) -> dict[str, Json]:
        """As `Sink.description`; no secrets. Empty: only the topology's own code can open it."""
        ...


@runtime_checkable
class SupportsRowCheck(Protocol):
    """A factory that knows, without a connection, which rows its store cannot hold."""

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for such a column."""
        ...


@runtime_checkable
class SupportsStoreIdentity(Protocol):
    """A key-value store that says which one it is, so that two connections to it are known for one store."""

    @property
    def store_identity(self) -> str:
        """Equal for all that read and write the same keys: server, database and prefix of the keys, say."""
        ...
