"""A map in a Delta table: key, value, previous value and txid in columns of their own; a txid is one version."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from pyarrow.dataset import dataset

from stormproof.core.base.arguments import require_path
from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import Json, SinkRefused, TopologyError
from stormproof.core.contract.sink import SinkInput, TableKey
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import PreparedTransaction
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.delta.compare import compare
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.opening import opening, prepare_table
from stormproof.sinks.delta.power_loss import require_whole
from stormproof.sinks.delta.table import check_types, key_of_path, locate, require_plain_files, require_table
from stormproof.sinks.delta.transactional_table import TransactionalTable
from stormproof.sinks.delta.versions import TableHead, add_files, merge_rows
from stormproof.sinks.rows.comparison import Comparison, Progress, ReadRecord
from stormproof.sinks.rows.content import NOTHING, Content
from stormproof.sinks.rows.limits import Limits
from stormproof.trident.state.map import Backing, StoredMap, change_of, make_map, stored_schema
from stormproof.trident.state.matrix import as_state_kind
from stormproof.trident.state.protocol import StateContext, StateKind
from stormproof.trident.state.sink import StateSink

_PLACE: Final = "stormproof_place"
_LARGE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


class DeltaBacking(Backing):
    """A map's rows in a Delta table. The rows of a txid are gathered, and merged into the table in one version."""

    def __init__(self, path: str, context: StateContext, kind: StateKind) -> None:
        self._keys, self._stored = context.key_schema, stored_schema(context, kind)
        self._input = SinkInput.for_upsert(pa.schema([*self._keys, *self._stored]), context.keys)
        self._begun: tuple[PreparedTransaction, bool] | None = None
        identity, reading = context.identity, context.epoch is None
        with opening(f"sink {identity.sink!r} ({path})", DeltaLog(path), self._input.mode) as where:
            if reading:
                require_whole(DeltaLog(path), where)
            else:
                prepare_table(path, identity, self._input, where, create=context.create)
            self._table = MapTable(
                path,
                identity=identity,
                input_=self._input,
                epoch=context.epoch or 0,
                reading=reading,
                committer="delta-rs",
            )
            if not reading:
                require_plain_files(self._table.load(), where)

    @property
    def record(self) -> TransactionalTable:
        """The table's log."""
        return self._table

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """See `SupportsCompareRows`."""
        return compare(self._table, read, (first, last), progress)

    @property
    def limits(self) -> Limits:
        """What the table's columns can ours."""
        return self._table.limits

    @property
    def may_lose_files(self) -> bool:
        """It may, since its rows are written by MERGE."""
        return True

    def keep_held(self) -> None:
        """Check that the files of the last commit are there, and sync it."""
        self._table.keep_held()

    def require_own(self) -> None:
        """Refuse a table to which another state committed last.

        Raises:
            SinkRefused: names that state and its topology.
        """
        mine = self._table.identity
        for application in self._table.writers():
            match application.split("/"):
                case ["stormproof", mine.topology, _, mine.sink]:
                    return
                case ["stormproof", topology, _, sink]:
                    raise SinkRefused(
                        f"{self._table.where}: the table holds state {sink!r} of topology {topology!r}; a map has one "
                        "writer: use another table"
                    )
                case _:
                    continue

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Check that the table can be written to; nothing is written."""
        table = self._table.load()
        require_table(table, self._input, f"{self._table.where}, txid {transaction.txid}")
        self._table.position(table, same_table=checked)
        self._begun, self._table.gathered, self._table.changed = (transaction, checked), (), NOTHING

    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of these keys at the table's newest version."""
        names = self._keys.names
        wanted = pa.Table.from_batches([keys]).append_column(_PLACE, pa.array(range(keys.num_rows), pa.int64()))
        field, values = pc.field(names[0]), pc.unique(keys.column(0))
        large = _LARGE.get(values.type)
        if large is not None:
            # delta-rs writes text as string_view, which Arrow cannot compare with a file's statistics: the cast avoids them.
            field, values = field.cast(large), pc.cast(values, large)
        first = field.isin(values)
        # The files are read as they are: the checks admit no partitions, deletion vectors or renamed columns.
        files = dataset(self._table.load().file_uris(), schema=self._input.schema, format="parquet")
        found = files.to_table(filter=first)
        joined = wanted.join(found, names, join_type="left outer").sort_by(_PLACE).select(self._stored.names)
        columns = [column.combine_chunks() for column in joined.cast(self._stored).columns]
        return pa.RecordBatch.from_arrays(columns, schema=self._stored)

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch, held: pa.RecordBatch) -> None:
        """Gather the rows; a key comes only once in a txid."""
        self._table.changed += change_of(keys, stored, held)
        rows = pa.RecordBatch.from_arrays([*keys.columns, *stored.columns], schema=self._input.schema)
        self._table.gathered = (*self._table.gathered, rows)

    def end(self) -> None:
        """Merge the gathered rows together with the transaction identifier: all of the txid or nothing."""
        assert self._begun is not None
        transaction, checked = self._begun
        self._table.commit(transaction, checked=checked)
        self._begun, self._table.gathered = None, ()

    def close(self) -> None:
        """Nothing to let go."""
        self._table.close()


class MapTable(TransactionalTable):
    """The table of a map, with the rows that a txid has written, in memory."""

    gathered: Sequence[pa.RecordBatch] = ()
    changed: Content = NOTHING

    def check_rows(self, table: TableHead, transaction: PreparedTransaction, where: str) -> None:
        """Check that the table can hold them; the transaction's files have been checked already."""
        require_table(table, self.input, where, "delta-rs")
        require_plain_files(table, where)

    def change(self, table: DeltaTable, transaction: PreparedTransaction) -> Content:
        """By what was read of the keys that the rows are of."""
        return self.changed

    def put(self, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties) -> None:
        """Merge them; without rows the version holds its transaction identifier alone."""
        if self.gathered:
            merge_rows(table, pa.Table.from_batches(self.gathered), self.input, properties)
        else:
            add_files(table, (), properties)


class DeltaMap:
    """A map in the Delta table in the local folder `path`, made where it is missing; executors can query it.

    Each key's row has the value columns, `txid` and `life` (the incarnation that wrote it), and for an opaque map
    `previous_*` columns with the value before that txid. A txid's rows are held in memory until its commit, which is one
    MERGE. A query reads the whole table, except for files that the statistics of the first key column rule out; it needs
    to be a column of numbers or dates for that.

    Guarantee:
        All of a txid's keys are written together with its identifier in the table's log, or none. Older drivers are refused
        from the first commit of a newer driver on.

    Threads: a description, which any number of threads and topologies may share; each run opens a session of its own.
    Forks: one may use it, and opens its own.
    """

    def __init__(self, path: str | os.PathLike[str], kind: StateKind | str = StateKind.OPAQUE) -> None:
        require_path("DeltaMap", "path", path)
        text = os.fspath(path)
        self._path = text if "://" in text else str(Path(text).absolute())
        self._kind = as_state_kind(kind, f"DeltaMap({text!r})")
        if self._kind is StateKind.NON_TRANSACTIONAL:
            raise TopologyError(
                f"DeltaMap({self._path!r}): a map that is committed in one version is never less than transactional; "
                "choose 'transactional' or 'opaque'"
            )

    @property
    def kind(self) -> StateKind:
        """What it promises about a txid that comes again."""
        return self._kind

    @property
    def target(self) -> str:
        """The table's folder."""
        return self._path

    def table_key(self, database: Database | None) -> TableKey:
        """The folder's path."""
        return key_of_path(self._path)

    def find_table(self, database: Database | None) -> TableKey:
        """The folder itself, or the place where it would be made."""
        return locate(self._path, f"DeltaMap({self._path!r})")

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for a column that no Delta table can ours, and for a place that is no local folder."""
        if "://" in self._path:
            raise TopologyError(f"{where}: {self._path!r} is not a local path; only local folders are supported yet")
        check_types(schema, where)

    def description(self, database: Database | None) -> dict[str, Json]:
        """What the ledger keeps of it."""
        return {"kind": "delta-map", "path": self._path, "state": self._kind.value}

    def make(self, context: StateContext) -> StoredMap:
        """Open the table; a driver makes it where it is missing."""
        backing = DeltaBacking(self._path, context, self._kind)
        if context.epoch is not None:
            backing.require_own()
        return make_map(context, self._kind, backing)


def described(address: SinkAddress) -> StateSink:
    """The state of a ledger's description."""
    return StateSink.described(address, DeltaMap(address.text("path"), address.text("state")))
