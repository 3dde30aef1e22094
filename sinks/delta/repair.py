"""Repair of a Delta table: statistics that exclude rows are replaced by exact ones, and a key is left with one row.

Files are read, and the log is changed in one version; no file is changed in place. Of a key that an upsert has twice, the
newest row by `order_by` stays. Rows of a fold are merged where each message was added once, which the log has to tell.
What cannot be told is named and left.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused, StoreUnavailable
from stormproof.core.folds import Fold
from stormproof.core.sink import SinkInput, SinkMode
from stormproof.sinks.abilities import Repair
from stormproof.sinks.delta import durable
from stormproof.sinks.delta.bounds import exact_statistics, wrong_statistics
from stormproof.sinks.delta.entries import entry_of, has_plain_features
from stormproof.sinks.delta.failures import is_conflict, may_pass, shown
from stormproof.sinks.delta.folds import quoted
from stormproof.sinks.delta.live_adds import live_adds
from stormproof.sinks.delta.log import APPLICATION, REMOVED, REPAIRS, DeltaLog, LogEntry, now_ms
from stormproof.sinks.delta.position import find_position, totals_at
from stormproof.sinks.delta.rewrite import COMPACTED, put_entry
from stormproof.sinks.latest import compared_columns, latest_of
from stormproof.sinks.writer import with_statistics

if TYPE_CHECKING:
    from stormproof.sinks.delta.hold import TableHold

TRIES_MAX: Final = 5
_FILE: Final = "_stormproof_file"
_ROW: Final = "_stormproof_row"
_MERGED: Final = {Fold.SUM: "sum", Fold.MIN: "min", Fold.MAX: "max"}


def repair(hold: TableHold, application: str, *, dry_run: bool) -> Repair:
    """See `SupportsRepair`."""
    for left in reversed(range(TRIES_MAX)):
        committer = hold.committers.of_files(hold.load())
        try:
            with hold.committers.alone_with_lock(committer):
                return _repair_once(hold, application, dry_run=dry_run)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            hold.close()
            if not (left and is_conflict(error)):
                kind = StoreUnavailable if may_pass(error) else SinkRefused
                raise kind(f"{hold.where}: it cannot be repaired, and is as it was: {shown(error)}") from error
    raise AssertionError("unreachable")


def _repair_once(hold: TableHold, application: str, *, dry_run: bool) -> Repair:
    table, log = hold.load(), hold.log
    adds = live_adds(log, table.version())
    wrong, unread = wrong_statistics(log, adds)
    left = [f"{len(unread)} files, such as {unread[0]}: their statistics are not read here"] if unread else []
    plan = _Doubled(hold.input, log)
    if hold.input.is_by_key:
        plan.look(table)
    done = Repair(None, sorted(wrong), plan.kept.num_rows, plan.rows_gone, [*left, *plan.left])
    if dry_run or not (wrong or plan.rows_gone):
        return done
    if not has_plain_features(table):
        raise SinkRefused(
            f"{hold.where}: the table has features of which an entry of ours may not know what to write; have Spark write "
            f"these files again (OPTIMIZE, or REORG): {', '.join(sorted(wrong)[:5]) or 'those with doubled keys'}"
        )
    written = {name: plan.rewritten(name, adds[name]) for name in plan.files}
    at_ms, actions = now_ms(), list[dict[str, Any]]()
    for name, new in written.items():
        actions.append({"remove": _removed(adds[name], at_ms)})
        if new is not None:
            actions.append({"add": {**new, "modificationTime": at_ms, "dataChange": True}})
    for name in wrong.keys() - written.keys():
        path = log.local_path(name)
        assert path is not None
        actions.append({"add": {**adds[name], "stats": exact_statistics(path), "dataChange": False}})
    log.files.sync_folder(log.table)
    more = {REPAIRS: application}
    if written:
        more[REMOVED] = _off_the_record(log, table, application, plan.rows_gone)
    entry = entry_of("WRITE" if written else "COMPUTE STATS", {}, actions, more)
    paths = {unquote(action["add"]["path"]) for action in actions if "add" in action}

    def is_it(there: LogEntry) -> bool:
        return REPAIRS in there.info and paths == {file.path for file in there.added}

    version = put_entry(log, table.version(), entry, {*wrong, *written}, is_it)
    hold.close()
    durable.sync_version(log, version)
    return replace(done, version=version)


def _off_the_record(log: DeltaLog, table: DeltaTable, application: str, gone: int) -> str:
    """How many of the rows that go the record of the commits has: all, where their keys were inserted twice; none, where a
    commit replaced a row whose file stayed. Empty: it has neither number, so how many rows there must be cannot be told.
    """
    known = totals_at(log, table, find_position(log, table, application), application)
    counted = table.get_add_actions(flatten=True).column("num_records").to_pylist()
    if known is None or known.rows is None or None in counted:
        return ""
    there = sum(counted)
    return {there: str(gone), there - gone: "0"}.get(known.rows, "")


def _removed(add: Mapping[str, Any], at_ms: int) -> dict[str, Any]:
    kept = {name: add[name] for name in ("path", "partitionValues", "size") if name in add}
    return {**kept, "deletionTimestamp": at_ms, "dataChange": True, "extendedFileMetadata": True}


class _Doubled:
    """The rows of keys that a table has more than once, and what becomes of them."""

    def __init__(self, input_: SinkInput, log: DeltaLog) -> None:
        self._input, self._log = input_, log
        self.left: list[str] = []
        self._rows = self.kept = pa.table({_FILE: pa.array([], pa.string()), _ROW: pa.array([], pa.int64())})

    @property
    def rows_gone(self) -> int:
        """How many of them go."""
        return int(self._rows.num_rows - self.kept.num_rows)

    @property
    def files(self) -> list[str]:
        """Those that are written anew."""
        return sorted(set(self._rows.column(_FILE).to_pylist())) if self.rows_gone else []

    def look(self, table: DeltaTable) -> None:
        """Find them, and decide which stay."""
        rows, input_ = self._of_doubled_keys(table), self._input
        if not rows.num_rows:
            return
        is_fold = input_.mode is SinkMode.FOLD
        found = latest_of(rows, input_.keys, () if is_fold else compared_columns(input_))
        if (why := self._untold(rows, table.version())) is not None:
            self.left.append(f"{len(found.first)} keys that come more than once: {why}")
            return
        self._rows = rows
        self.kept = self._merged(rows, found.first) if is_fold else rows.take(pa.array(found.last))

    def _of_doubled_keys(self, table: DeltaTable) -> pa.Table:
        """All rows of the keys that come more than once, each with its file and its number in it."""
        keys, schema = list(self._input.keys), self._input.schema
        names = ", ".join(map(quoted, keys))
        # Without a WHERE: where there is one, DataFusion takes equal bounds of a file for the value of all of its rows.
        asked = f"SELECT {names} FROM t GROUP BY {names} HAVING count(*) > 1"
        read = pa.table(QueryBuilder().register("t", table).execute(asked))
        doubled = pa.table(
            {key: pc.cast(read.column(at), schema.field(key).type) for at, key in enumerate(keys)}
        ).drop_null()
        fields = pa.schema([*schema, pa.field(_FILE, pa.string()), pa.field(_ROW, pa.int64())])
        found = [fields.empty_table()]
        dataset = table.to_pyarrow_dataset() if doubled.num_rows else None
        for fragment in () if dataset is None else dataset.get_fragments():
            rows = fragment.to_table(columns=schema.names, schema=dataset.schema)  # type: ignore[union-attr]
            rows = pa.table([pc.cast(c, f.type) for c, f in zip(rows.columns, schema, strict=True)], schema=schema)
            numbered = rows.select(keys).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
            chosen = pa.array(np.sort(numbered.join(doubled, keys, join_type="left semi").column(_ROW).to_numpy()))
            files = pa.array([unquote(fragment.path)] * len(chosen), pa.string())
            found.append(rows.take(chosen).append_column(_FILE, files).append_column(_ROW, chosen))
        return pa.concat_tables(found)

    def _untold(self, rows: pa.Table, newest: int) -> str | None:
        """Why it cannot be told which row is right; None: it can."""
        folds = self._input.folds
        if not folds:
            return None if self._input.order_by else "without order_by no row of them is the newest"
        if self._input.lineage is not None or not all(
            isinstance(fold, Fold) and fold in _MERGED for fold in folds.values()
        ):
            return "rows of such a fold are not merged here"
        if any(pa.types.is_floating(c.type) and pc.any(pc.is_nan(c)).as_py() for c in rows.columns):
            return "a NaN is among their values"
        if Fold.SUM in folds.values() and not self._added_once(newest):
            return "the log does not tell that each message was added to one row of its key"
        return None

    def _added_once(self, newest: int) -> bool:
        """Whether every row of every MERGE since the table was made was inserted, or changed one row, and no more."""
        if self._log.tail(newest)[:1] != [0]:
            return False
        for entry in filter(None, map(self._log.entry, range(newest + 1))):
            ours = entry.ours(str(entry.info.get(APPLICATION)))
            if ours is not None and ours.rows and (entry.operation != "MERGE" or ours.superseded):
                return False
            if (entry.changes_rows or entry.restored_to is not None) and not entry.is_stormproofs:
                return False
        return True

    def _merged(self, rows: pa.Table, first: Any) -> pa.Table:
        """The first row of each key with the folds of all."""
        folds, keys = self._input.folds, list(self._input.keys)
        wide = rows
        for name in folds:
            wide = wide.set_column(wide.column_names.index(name), name, _widened(rows.column(name)))
        asked = [(name, _MERGED[fold]) for name, fold in folds.items() if isinstance(fold, Fold)]
        merged = wide.group_by(keys, use_threads=False).aggregate([*asked, (_ROW, "count")])
        kept = rows.take(pa.array(first))
        for name, how in asked:
            field = kept.schema.field(name)
            column = pc.cast(merged.column(f"{name}_{how}"), field.type)
            kept = kept.set_column(kept.column_names.index(name), field, column)
        return kept

    def rewritten(self, name: str, add: Mapping[str, Any]) -> dict[str, Any] | None:
        """A file without the rows that go, as an `add`; None: no row is left."""
        log, path = self._log, self._log.local_path(name)
        assert path is not None
        with log.files.open(path) as file:
            content = pq.ParquetFile(file).read()
        mine, kept = (rows.filter(pc.equal(rows.column(_FILE), name)) for rows in (self._rows, self.kept))
        others = np.setdiff1d(np.arange(content.num_rows), mine.column(_ROW).to_numpy())
        changed = content.take(kept.column(_ROW))
        for column in self._input.folds:
            at = content.column_names.index(column)
            field = content.schema.field(at)
            changed = changed.set_column(at, field, pc.cast(kept.column(column), field.type))
        content = pa.concat_tables([content.take(pa.array(others)), changed])
        if not content.num_rows:
            return None
        new = os.path.join(log.table, f"{COMPACTED}{uuid.uuid4().hex}.parquet")
        made = pa.BufferOutputStream()
        statistics: Any = with_statistics(content.schema)
        pq.write_table(content, made, compression="snappy", write_statistics=statistics)
        bytes_ = made.getvalue()
        to = log.files.write_new(new, private=False)
        try:
            to.write(memoryview(bytes_))
            to.sync()
        finally:
            to.close()
        told = {"path": os.path.basename(new), "partitionValues": add["partitionValues"], "size": bytes_.size}
        return {**told, "stats": exact_statistics(new)}


def _widened(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers in a type that holds the sum of any of them: a sum that does not fit its column is an error, then."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.decimal128(38, 0))
    return column.cast(pa.decimal128(38, column.type.scale)) if pa.types.is_decimal(column.type) else column
