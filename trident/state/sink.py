"""StateSink: a state as a sink, which the driver commits from a batch's prepared files; the ready-made updaters of maps."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import pyarrow as pa

from stormproof.core.base.arguments import require_object, require_path
from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import CannotTell, Json, SinkRefused, StoreUnavailable, TopologyError, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.base.process import kept_from_forks
from stormproof.core.contract.fold import AnyFold, Fold
from stormproof.core.contract.schema import can_be_key
from stormproof.core.contract.sink import APPEND_AND_FOLD, EVERY_FOLD, SinkInput, SinkMode, TableKey
from stormproof.core.contract.source import SourceKind
from stormproof.core.postgres.database import Database
from stormproof.core.storage.protocol import absolute
from stormproof.sinks.contract.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitDecision,
    CommitResult,
    EvidenceReport,
    Held,
    PreparedTransaction,
    Sink,
    SinkIdentity,
    SupportsTakeTable,
    decide,
)
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.prepare.staging import StagedSession, prepared_batches, require_files
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.sinks.rows.by_key import require_unique_keys
from stormproof.sinks.rows.comparison import Comparison, Progress, ReadRecord, SupportsCompareRows
from stormproof.sinks.rows.limits import ColumnLimit, Limits
from stormproof.trident.state.map import MERGES, Backing, check_map_columns
from stormproof.trident.state.matrix import (
    SupportsBacking,
    SupportsEvidence,
    SupportsLastTxid,
    SupportsRowCheck,
    SupportsTable,
    require_served,
    require_state,
)
from stormproof.trident.state.protocol import (
    MapState,
    Merge,
    State,
    StateContext,
    StateFactory,
    StateKind,
    StateUpdater,
)


@dataclass(frozen=True, slots=True)
class MapUpdater:
    """Merges every row into the map's value for its key.

    With `each_once` each key comes once in a txid, as after a grouping: rows are then written as they are read.
    """

    each_once: bool = False

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        """Merge the rows."""
        cast("MapState", state).multi_update(rows, each_once=self.each_once)


@dataclass(frozen=True, slots=True)
class MapSetter:
    """Sets the map's value for each row's key; the last row of a key wins, in the order of tasks and rows."""

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        """Set the values."""
        cast("MapState", state).multi_put(rows)


STAGING_FOLDER = Path(".stormproof", "staging")
ROWS_AT_ONCE = 64 * 1024


class StateSink(Sink):
    """A state as a topology's sink: `stream.into(StateSink("totals", OpaqueMap(open_store)))`.

    Without an `updater` the state is a map, and each row is merged into its key's value: by `merges`, or else by the folds
    of a persistent aggregate. `keys` names the key columns where the stream has none of its own; a key may then come several
    times in a batch.

    Guarantee:
        Under exactly-once a txid brings the same rows however often it comes, since they are read from its prepared files:
        file by file in path order, in record batches of at most 65,536 rows.

    Not guaranteed:
        That a store without a fence refuses a driver that was paused in a commit while another driver took over.

    Threads: a description, which any number of threads and topologies may share; each run opens a session of its own.
    Forks: one may use it, and opens its own.
    """

    def __init__(
        self,
        name: str,
        factory: StateFactory,
        *,
        updater: StateUpdater | None = None,
        keys: tuple[str, ...] = (),
        merges: Mapping[str, Merge] | None = None,
        staging: str | Path | None = None,
        database: Database | None = None,
    ) -> None:
        where = f"state {name!r}"
        require_state(name, factory, updater=updater, keys=keys, merges=merges)
        if staging is not None:
            require_path(where, "staging", staging)
        if database is not None:
            require_object(where, "database", database, Database, "Database.from_url('postgresql://...')")
        self._name = name
        self._factory = factory
        self._updater = updater
        self._keys = tuple(keys)
        self._merges = dict(merges or {})
        self._staging = None if staging is None else absolute(staging)
        self._database = database

    @classmethod
    def described(cls, address: SinkAddress, factory: StateFactory) -> StateSink:
        """The state that the ledger describes, over a factory made of its description."""
        return cls(address.name, factory, keys=address.input.keys, staging=address.files)

    @property
    def name(self) -> str:
        """Unique within a topology."""
        return self._name

    @property
    def target(self) -> str:
        """Where the state is, for people."""
        return self._factory.target

    @property
    def factory(self) -> StateFactory:
        """What opens the state."""
        return self._factory

    @property
    def kind(self) -> StateKind:
        """What the state promises about a txid that comes again."""
        return self._factory.kind

    @property
    def is_map(self) -> bool:
        """Whether each row is merged into its key's value, and not brought in by a user's updater."""
        return self._updater is None

    @property
    def modes(self) -> frozenset[SinkMode]:
        """Append and fold: it takes a stream's rows and an aggregate's, and its updater decides what becomes of them."""
        return APPEND_AND_FOLD

    @property
    def fold_kinds(self) -> frozenset[type[AnyFold]]:
        """All: `check` says which of them its state cannot merge."""
        return EVERY_FOLD

    @property
    def may_lose_files(self) -> bool:
        """It may: only the state itself, once it is open, can tell that it does not."""
        return True

    def description(self, input_: SinkInput) -> dict[str, Json]:
        """What the ledger keeps of it for an audit without the topology's code; a user's own store needs that code."""
        own = self._factory.description(self._database) if isinstance(self._factory, SupportsTable) else {}
        return {**own, "keys": [*self.keys_of(input_)]}

    def table_key(self) -> TableKey | None:
        """The state's table by its name, where the factory knows one."""
        return self._factory.table_key(self._database) if isinstance(self._factory, SupportsTable) else None

    def find_table(self) -> TableKey | None:
        """The state's table by the store's answer, where the factory can ask it."""
        return self._factory.find_table(self._database) if isinstance(self._factory, SupportsTable) else None

    def files_in(self, input_: SinkInput) -> str:
        """The staging folder."""
        return absolute(STAGING_FOLDER / self._name) if self._staging is None else self._staging

    def placed(self, database: Database, staging: str) -> StateSink:
        """This state with the run's database and a folder below `staging`, where it names none itself."""
        return StateSink(
            self._name,
            self._factory,
            updater=self._updater,
            keys=self._keys,
            merges=self._merges,
            staging=os.path.join(staging, self._name) if self._staging is None else self._staging,
            database=database if self._database is None else self._database,
        )

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where the state cannot take such rows, or cannot serve the guarantee with any source."""
        where = f"state {self._name!r}"
        schema, keys = input_.schema, self.keys_of(input_)
        for key in keys:
            if key not in schema.names:
                raise TopologyError(f"{where}: no column {key!r}; there are {', '.join(schema.names)}", field=key)
            if not can_be_key(schema.field(key).type):
                raise TopologyError(f"{where}: column {key!r} is {schema.field(key).type}, which cannot be a key")
        for name, fold in input_.folds.items():
            if not isinstance(fold, Fold):
                raise TopologyError(
                    f"{where}: column {name!r} is folded as the {fold}, and a state folds column by column; use a sink: "
                    ".persistent_aggregate(...) without state, and .into(PostgresSink(...)) or .into(DeltaSink(...))",
                    field=name,
                )
        if self._updater is None:
            check_map_columns(schema, keys, list(self._merges_of(input_)), where)
        if isinstance(self._factory, SupportsRowCheck):
            self._factory.check(schema, where)
        self.check_sources({"any": SourceKind.TRANSACTIONAL}, guarantee)

    def check_sources(self, sources: Mapping[str, SourceKind], guarantee: Guarantee) -> None:
        """Raise TopologyError where source and state together cannot serve the guarantee; see `matrix`."""
        require_served(sources, self.kind, guarantee, name=self._name, target=self.target)

    def context(self, identity: SinkIdentity, input_: SinkInput, epoch: int | None, *, create: bool) -> StateContext:
        """What the state is made for."""
        return StateContext(
            identity,
            input_.schema,
            self.keys_of(input_),
            self._merges_of(input_),
            plain_folds(input_),
            epoch=epoch,
            create=create and epoch is not None,
            database=self._database,
            folder=self._staging,
        )

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> StateSession:
        """Make the state, and fence older epochs out where its store can."""
        session = self._session(self.context(identity, input_, epoch, create=create), input_)
        session.state()
        return session

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> StateSession:
        """Open for reading only."""
        return self._session(self.context(identity, input_, None, create=False), input_)

    def keys_of(self, input_: SinkInput) -> tuple[str, ...]:
        """The key columns of such rows."""
        return self._keys or input_.keys

    def _merges_of(self, input_: SinkInput) -> dict[str, Merge]:
        ready = {name: MERGES[fold.value] for name, fold in plain_folds(input_).items() if fold.value in MERGES}
        return {**ready, **self._merges}

    def _session(self, context: StateContext, input_: SinkInput) -> StateSession:
        # After a grouping each key comes once in a batch: its rows are written as they are read.
        once = self._updater is None and bool(input_.keys) and context.keys == input_.keys
        updater = MapUpdater(each_once=once) if self._updater is None else self._updater
        return StateSession(self._factory, context, updater, self.files_in(input_), once, self.target)


def plain_folds(input_: SinkInput) -> dict[str, Fold]:
    """The folds that look at their own column alone; `StateSink.check` refuses others."""
    return {name: fold for name, fold in input_.folds.items() if isinstance(fold, Fold)}


@dataclass(frozen=True, slots=True)
class StateReader:
    """Opens a state in an executor, for reading. Picklable."""

    factory: StateFactory
    context: StateContext

    def open(self) -> State:
        """Open the state, for reading only."""
        return self.factory.make(self.context.reading())

    def limits(self, state: State) -> Limits:
        """What the state can hold, as its store is now."""
        keys = [ColumnLimit(f.name, str(f.type), not_null=True) for f in self.context.key_schema]
        return Limits((*keys, *(state.backing.limits.columns if isinstance(state, SupportsBacking) else ())))


@dataclass(frozen=True, slots=True)
class StateWriter(FileWriter):
    """The writer of a state's rows; bolts may use a `StateReader`. Where a row does not fit, and the state may have come to
    take more since the run began, it is asked again.
    """

    for_bolts: StateReader | None = None

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """See `FileWriter`."""
        found = FileWriter.check(self, rows)
        if not found or self.for_bolts is None or not any(limit.may_grow for limit in self.limits.columns):
            return found
        state = self.for_bolts.open()
        try:
            return self.for_bolts.limits(state).check(rows)
        finally:
            state.close()


@dataclass(eq=False)
class StateSession(StagedSession):
    """A state opened by one driver. After an error the state is opened anew: nothing that it remembers is trusted."""

    factory: StateFactory
    context: StateContext
    updater: StateUpdater
    staging: str
    unique_keys: bool
    target: str
    _state: State | None = None

    @property
    def where(self) -> str:
        """The state, in messages."""
        return f"state {self.context.identity.sink!r} ({self.target})"

    def state(self) -> State:
        """The state, opened where it is not open."""
        if self._state is None:
            self._state = self.factory.make(self.context)
        return self._state

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self.context.identity

    @property
    def tells_position(self) -> bool:
        """Whether the state can say which txid it took last; where it cannot, the ledger alone knows."""
        return isinstance(self.state(), SupportsEvidence | SupportsLastTxid)

    @property
    def table_id(self) -> str:
        """What tells this store from another of the same name; by the target where the state does not say."""
        state = self.state()
        return state.table_id if isinstance(state, SupportsEvidence) else f"state/{self.target}"

    @property
    def store_key(self) -> TableKey:
        """The store under the state, as far as it is known; else the state object itself."""
        backing = self._backing()
        known = None if backing is None else backing.record.store_key
        return ("object", id(backing or self.state())) if known is None else known

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder; bolts may use a `StateReader`."""
        reader = StateReader(self.factory, self.context.reading())
        return StateWriter(self.identity.sink, self.staging, reader.limits(self.state()), for_bolts=reader)

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to it, where the state remembers them."""
        state = self.state()
        return state.other_incarnations() if isinstance(state, SupportsEvidence) else ()

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Mark the state's table as this life's, where its store has such marks; see the protocol."""
        backing = self._backing()
        return () if backing is None else backing.record.claim(accepted)

    def release(self) -> bool:
        """Remove that mark."""
        backing = self._backing()
        return backing is not None and backing.record.release()

    def held(self) -> Held | None:
        """The last transaction by the state's own record; None also where it keeps no record (`tells_position`)."""
        state = self.state()
        if isinstance(state, SupportsEvidence):
            return state.held()
        if isinstance(state, SupportsLastTxid):
            last = state.last_txid()
            return None if last is None else Held(last, None)
        return None

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Have the state take one transaction, unless it holds it already by its own record."""
        try:
            return self._commit(transaction, checked=checked)
        except OSError as error:  # a lost connection, a timeout, a full disk
            self.close()
            raise StoreUnavailable(
                f"{self.where}, txid {transaction.txid}: {type(error).__name__}: {error}; the txid comes again"
            ) from error
        except BaseException:
            self.close()
            raise

    def _commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        where, txid, state = f"{self.where}, txid {transaction.txid}", transaction.txid, self.state()
        held = self._holding(transaction) if checked else None
        if held is not None:
            backing = self._backing()
            if backing is not None:
                backing.keep_held()
            return replace(ALREADY_HELD, at=held.at)
        require_files(self.staging, transaction.files, where=where, digests=True)
        counted = sum(file.rows for file in transaction.files)
        if counted != transaction.rows:
            raise SinkRefused(f"{where}: {counted} rows in the prepared files instead of {transaction.rows}")
        if self.unique_keys:
            keys = self.context.keys
            read = partial(prepared_batches, self.staging, transaction.files, keys)
            require_unique_keys(read, transaction.rows, keys, where)
        if isinstance(state, SupportsEvidence):
            state.announce(transaction, checked=checked)
        with kept_from_forks():
            state.begin_commit(txid)
        failpoint("state.after_begin")
        schema = self.context.schema
        for rows in prepared_batches(self.staging, transaction.files, schema.names, ROWS_AT_ONCE):
            with kept_from_forks():
                self.updater.update(state, _as(rows, schema))
        failpoint("state.after_rows")
        with kept_from_forks():
            state.commit(txid)
        failpoint("state.after_commit")
        return APPLIED

    def _holding(self, transaction: PreparedTransaction) -> Held | None:
        """The state's own record of this very transaction; None: it does not hold it.

        Raises:
            PositionMismatch: it holds neither this transaction nor the one before it.
        """
        if not self.tells_position:
            return None
        held = self.held()
        if held is not None and held.txid == transaction.txid and held.digest is None:
            return held  # a txid's rows never change once they are prepared, and only prepared ones come here
        return held if decide(self.identity, transaction, held) is CommitDecision.SKIP else None

    def restore_lost(self, transaction: PreparedTransaction) -> str | None:
        """Have the state undo a commit of which a power loss took files; see the protocol."""
        backing = self._backing()
        if backing is None or not backing.may_lose_files:
            return None
        held = backing.record.held()
        if held is None or held.txid != transaction.txid:
            return None
        where = f"{self.where}, txid {transaction.txid}"
        require_files(self.staging, transaction.files, where=where, digests=True)  # it is written again from these
        return backing.record.restore_lost(transaction)

    def count_rows(self, limit: int) -> int:
        """How many keys the state's table holds, counted no further than to `limit`."""
        return self._table().count_rows(limit)

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Make the table that is there the state's own; see `SupportsTakeTable`."""
        self._table().take_table(last)

    def _table(self) -> SupportsTakeTable:
        backing = self._backing()
        if backing is None or not isinstance(backing.record, SupportsTakeTable):
            raise UsageError(f"{self.where} is in no table of ours, so there is none to take")
        return backing.record

    def _backing(self) -> Backing | None:
        state = self.state()
        return state.backing if isinstance(state, SupportsBacking) else None

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What the state remembers.

        Raises:
            CannotTell: it remembers nothing.
        """
        state = self.state()
        if isinstance(state, SupportsEvidence):
            return state.evidence(first, last)
        if isinstance(state, SupportsLastTxid):
            return EvidenceReport(self.table_id, (), state.last_txid(), truncated=True)
        raise CannotTell(
            f"{self.where} does not remember which txids it took; what it holds can only be compared by hand",
            sink=self.identity.sink,
        )

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """See `SupportsCompareRows`."""
        backing: object = self._backing()
        if not isinstance(backing, SupportsCompareRows):
            return Comparison(left_out=("its rows: a state of its kind cannot read them back",))
        return backing.compare_rows(read, first, last, progress)

    def close(self) -> None:
        """Close the state."""
        state, self._state = self._state, None
        if state is not None:
            state.close()


def _as(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if rows.schema.equals(schema):
        return rows
    return pa.RecordBatch.from_arrays([pc.cast(rows.column(f.name), f.type) for f in schema], schema=schema)
