"""A map in a Delta table: key, value, previous value and txid in columns of their own; a txid is one version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from pyarrow.dataset import dataset

from stormproof.core.arguments import require_path
from stormproof.core.compute import pc
from stormproof.core.errors import Json, SinkRefused, TopologyError
from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput, TableKey
from stormproof.sinks.abilities import SupportsTakeTable
from stormproof.sinks.delta.folds import quoted
from stormproof.sinks.delta.locate import key_of_path, locate
from stormproof.sinks.delta.log import APPLICATION
from stormproof.sinks.delta.merged import MERGED_FILES
from stormproof.sinks.delta.session import HOOKS, DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.table import check_types, require_table
from stormproof.sinks.limits import Limits
from stormproof.sinks.protocol import PreparedTransaction, SinkIdentity
from stormproof.trident.state.checks import as_state_kind
from stormproof.trident.state.map import Backing, StoredMap, make_map, stored_schema
from stormproof.trident.state.protocol import StateContext, StateKind

_PLACE: Final = "stormproof_place"
_LARGE: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


class DeltaBacking(DeltaSession, Backing):
    """A map's rows in a Delta table. What a txid writes is gathered, and merged into the table in one version."""

    def __init__(self, path: str, *, identity: SinkIdentity, input_: SinkInput, epoch: int, reading: bool) -> None:
        super().__init__(path, "", identity=identity, input_=input_, epoch=epoch, reading=reading)
        self._keys = pa.schema([input_.schema.field(name) for name in input_.keys])
        self._stored = pa.schema([f for f in input_.schema if f.name not in input_.keys])
        self._begun: tuple[PreparedTransaction, bool] | None = None
        self._pending: list[pa.RecordBatch] = []

    @property
    def table(self) -> SupportsTakeTable:
        """This one."""
        return self

    @property
    def limits(self) -> Limits:
        """What the table's columns can hold."""
        return self._limits

    @property
    def may_lose_files(self) -> bool:
        """As for every MERGE."""
        return True

    def require_own(self) -> None:
        """Refuse a table whose newest map is another topology's."""
        mine = self._identity
        for entry in self._log.back_from(self._load().version()):
            match str(entry.info.get(APPLICATION, "")).split("/"):
                case ["stormproof", mine.topology, _, mine.sink]:
                    return
                case ["stormproof", topology, _, sink]:
                    raise SinkRefused(
                        f"{self._where}: the table holds state {sink!r} of topology {topology!r}; a map has one writer: "
                        "use another table"
                    )
                case _:
                    continue

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Look whether the table can be written to; nothing is."""
        where = f"{self._where}, txid {transaction.txid}"
        table = self._load()
        require_table(table, self._input, where)
        self._position(table, same_table=checked)
        self._begun, self._pending = (transaction, checked), []

    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """What the table holds of these keys, at its newest version."""
        names = self._keys.names
        wanted = pa.Table.from_batches([keys]).append_column(_PLACE, pa.array(range(keys.num_rows), pa.int64()))
        field, values = pc.field(names[0]), pc.unique(keys.column(0))
        large = _LARGE.get(values.type)
        if large is not None:
            # delta-rs writes text as string_view, with which Arrow cannot compare a file's statistics: none are used.
            field, values = field.cast(large), pc.cast(values, large)
        first = field.isin(values)
        # Its files as they are: such a table has no partitions, deletion vectors or renamed columns (`require_table`).
        files = dataset(self._load().file_uris(), schema=self._input.schema, format="parquet")
        found = files.to_table(filter=first)
        joined = wanted.join(found, names, join_type="left outer").sort_by(_PLACE).select(self._stored.names)
        batches = joined.combine_chunks().to_batches()
        if not batches:
            return _empty(self._stored)
        return batches[0].cast(self._stored)

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch) -> None:
        """Gather the rows; each key comes once in a txid."""
        self._pending.append(pa.RecordBatch.from_arrays([*keys.columns, *stored.columns], schema=self._input.schema))

    def end(self) -> None:
        """Merge what was gathered, with the transaction identifier: all or nothing of the txid."""
        assert self._begun is not None
        transaction, checked = self._begun
        self.commit(transaction, checked=checked)
        self._begun, self._pending = None, []

    def _require_prepared(self, table: DeltaTable, transaction: PreparedTransaction, where: str) -> None:
        del transaction  # its files were read already
        require_table(table, self._input, where)

    def _put(self, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties) -> None:
        del transaction
        if not self._pending:  # an empty MERGE commits nothing, not even its identifier
            table.create_write_transaction(
                [], "append", table.schema(), commit_properties=properties, post_commithook_properties=HOOKS
            )
            return
        columns = {quoted(name): f"s.{quoted(name)}" for name in self._input.schema.names}
        (
            table.merge(
                pa.Table.from_batches(self._pending),
                " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in self._input.keys),
                source_alias="s",
                target_alias="t",
                streamed_exec=False,
                writer_properties=MERGED_FILES,
                commit_properties=properties,
                post_commithook_properties=HOOKS,
            )
            .when_matched_update({quoted(name): columns[quoted(name)] for name in self._stored.names})
            .when_not_matched_insert(columns)
            .execute()
        )


class _MapTable(DeltaSink):
    """Makes and opens the table as a sink does, with a map's session."""

    def _session(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, reading: bool) -> DeltaBacking:
        return DeltaBacking(self.target, identity=identity, input_=input_, epoch=epoch, reading=reading)


class DeltaMap:
    """A map in the Delta table in the local folder `path`, made where it is missing; executors can query it.

    Each key's row has the value columns, `txid` and `life` (the incarnation that wrote it), and for an opaque map
    `previous_*` columns with the value before that txid. A txid's keys are held in memory until its commit, which is one
    MERGE; asking for keys reads the whole table, but for the files that the statistics of a first key column of numbers or
    dates rule out.

    Guarantee:
        A txid's keys are there or not, with its identifier in the table's log. Older drivers are refused from the first
        commit of a newer one on.

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
        del database
        return key_of_path(self._path)

    def find_table(self, database: Database | None) -> TableKey:
        """The folder itself, or the place where it would be made."""
        del database
        return locate(self._path, f"DeltaMap({self._path!r})")

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for a column that no Delta table can hold, and for a place that is no local folder."""
        if "://" in self._path:
            raise TopologyError(f"{where}: {self._path!r} is not a local path; only local folders are supported yet")
        check_types(schema, where)

    def description(self, database: Database | None) -> dict[str, Json]:
        """What the ledger keeps of it."""
        del database
        return {"kind": "delta-map", "path": self._path, "state": self._kind.value}

    def make(self, context: StateContext) -> StoredMap:
        """Open the table; a driver makes it where it is missing."""
        stored = stored_schema(context, self._kind)
        schema = pa.schema([*context.key_schema, *stored])
        columns = SinkInput.for_upsert(schema, context.keys)
        table = _MapTable(self._path, name=context.identity.sink)
        if context.epoch is None:
            backing = table.inspect(context.identity, columns)
        else:
            backing = table.open(context.identity, columns, context.epoch, create=context.create)
        assert isinstance(backing, DeltaBacking)
        if context.epoch is not None:
            backing.require_own()
        return make_map(context, self._kind, backing)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
