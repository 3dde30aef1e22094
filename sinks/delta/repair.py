"""Repair of a Delta table: statistics that exclude rows are replaced by exact ones, and a key is left with one row.

Files are read, and the
log is changed in one version, or in two where Spark commits: one for the statistics, one for the keys. No file is changed in
place. Of a key that an upsert has twice, the newest row by `order_by` stays. Rows of a fold are merged as a MERGE does;
sums, where each message was added once, which the log has to tell. What cannot be told is named and left. A crash leaves the
table as it was before a version, or behind it: files that no entry has are left to a VACUUM.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.table import SUPPORTED_READER_FEATURES

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.sinks.contract.protocol import Repair
from stormproof.sinks.delta import power_loss
from stormproof.sinks.delta.evidence import find_position, totals_at
from stormproof.sinks.delta.features import Committer, TableFacts, choose, refusal
from stormproof.sinks.delta.log import (
    APPLICATION,
    IN_COMMIT,
    REMOVED,
    REPAIRS,
    DeltaLog,
    LogEntry,
    live_adds,
    now_ms,
    removal_of,
)
from stormproof.sinks.delta.rewrite import COMPACTED, folder_in, new_files, put_entry
from stormproof.sinks.delta.spark import KEPT, SparkCommitter
from stormproof.sinks.delta.statistics import exact_statistics, wrong_statistics
from stormproof.sinks.delta.versions import entry_of, is_conflict, may_pass, merge_rows, shown
from stormproof.sinks.prepare.writer import indexed
from stormproof.sinks.rows.by_key import compared_columns, latest_of
from stormproof.sinks.rows.merge_sql import quoted, written_where_held

if TYPE_CHECKING:
    from stormproof.sinks.delta.transactional_table import TransactionalTable

log = logging.getLogger("stormproof.sink")

TRIES_MAX: Final = 5
_FILE: Final = "_stormproof_file"
_ROW: Final = "_stormproof_row"


def repair(ours: TransactionalTable, application: str, *, dry_run: bool) -> Repair:
    """See `SupportsUpkeep`."""
    mended = dict[str, int]()
    for left in reversed(range(TRIES_MAX)):
        committer = _committer(ours, ours.load())
        spark = ours.committers.spark if committer is Committer.SPARK else None
        try:
            with ours.committers.alone_with_lock(committer):
                return _repair_once(ours, application, spark, mended, dry_run=dry_run)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            ours.close()
            if not (left and is_conflict(error)):
                kind = StoreUnavailable if may_pass(error) else SinkRefused
                raise kind(
                    f"{ours.where}: the repair failed, and the table is as it was, or repaired; to see which, or to end it, "
                    f"run it again: {shown(error)}"
                ) from error
    raise AssertionError("unreachable")


def _committer(ours: TransactionalTable, table: DeltaTable) -> Committer:
    """Who is to write: Spark, too, where delta-rs writes rows, but makes no dataset that says in which file a row is."""
    features = table.protocol().reader_features or ()
    if ours.input.is_by_key and not SUPPORTED_READER_FEATURES.issuperset(features):
        return ours.committers.require_served(Committer.SPARK)
    return ours.committers.of_files(table)


def _repair_once(
    ours: TransactionalTable, application: str, spark: SparkCommitter | None, mended: dict[str, int], *, dry_run: bool
) -> Repair:
    """`mended`: the files that have got right statistics already, and those that get them here, with the version."""
    table, log = ours.load(), ours.log
    adds = live_adds(log, table.version())
    wrong, unread = wrong_statistics(log, adds)
    left = [f"{len(unread)} files, such as {unread[0]}: their statistics are not read here"] if unread else []
    plan = _Doubled(ours.input, log, spark)
    if ours.input.is_by_key:
        plan.look(table)
    version, files = max(mended.values(), default=None), sorted({*wrong, *mended})
    done = Repair(version, files, plan.kept.num_rows, plan.rows_gone, [*left, *plan.left])
    if dry_run or not (wrong or plan.rows_gone):
        return done
    # Of the features that have a writer none asks anything of an `add` that has other statistics, and is the same otherwise.
    for found in choose(TableFacts.of(table), SinkMode.APPEND).refused if wrong else ():
        raise SinkRefused(f"{ours.where}: {refusal(found, SinkMode.APPEND)}; nothing was written")
    failpoint("repair.before")
    more = {REPAIRS: application}
    removed = {REMOVED: _off_the_record(log, table, adds, application, plan.rows_gone)} if plan.rows_gone else {}
    if wrong or spark is None:
        version = _put(ours, table, adds, wrong, plan, more if spark else more | removed)
        mended.update(dict.fromkeys(wrong, version))
    if plan.rows_gone and spark is not None:
        version = _put_by_spark(ours, spark, plan, more | removed)
    return replace(done, version=version)


def _put(
    ours: TransactionalTable,
    table: DeltaTable,
    adds: Mapping[str, Mapping[str, Any]],
    wrong: Mapping[str, Any],
    plan: _Doubled,
    more: Mapping[str, str],
) -> int:
    """Put right statistics, and files that are written anew, by an entry of our own."""
    log, names = ours.log, list[str]()
    with new_files(log, table.version(), names):
        written = {name: plan.rewritten(name, adds[name], names) for name in plan.files}
        log.files.sync_folder(log.table)
        failpoint("repair.after_files")
        actions = _actions(log, adds, written, wrong.keys() - written.keys())
        entry = entry_of("WRITE" if written else "COMPUTE STATS", {}, actions, {**more, **_timed(log, table.version())})
        paths = {unquote(action["add"]["path"]) for action in actions if "add" in action}

        def is_it(there: LogEntry) -> bool:
            return REPAIRS in there.info and paths == {file.path for file in there.added}

        version = put_entry(log, table.version(), entry, {*wrong, *written}, is_it)
    _sync(ours, version)
    return version


def _timed(log: DeltaLog, behind: int) -> dict[str, int]:
    """The time that an entry has to have behind one that has it (in-commit timestamps)."""
    before = log.entry(behind)
    at_ms = None if before is None else before.info.get(IN_COMMIT)
    return {} if at_ms is None else {IN_COMMIT: max(now_ms(), at_ms + 1)}


def _put_by_spark(ours: TransactionalTable, spark: SparkCommitter, plan: _Doubled, more: Mapping[str, str]) -> int:
    """Have Spark leave the kept row of each key; it knows what the table's features ask for."""
    ours.close()
    before = ours.narrowed(ours.load(), Committer.SPARK, ours.where).version()
    plan.put(spark, more)
    version = next(entry.version for entry in ours.log.on_from(before + 1) if REPAIRS in entry.info)
    _sync(ours, version)
    return version


def _sync(ours: TransactionalTable, version: int) -> None:
    failpoint("repair.after_log_entry")
    ours.close()
    power_loss.sync_version(ours.log, version)
    failpoint("repair.after_sync")


def _actions(
    log: DeltaLog,
    adds: Mapping[str, Mapping[str, Any]],
    written: Mapping[str, Mapping[str, Any] | None],
    wrong: Iterable[str],
) -> list[dict[str, Any]]:
    """What the entry does: files that are `written` anew take the place of others, of which no row may be left; those that
    are `wrong` get right statistics.
    """
    at_ms, actions = now_ms(), list[dict[str, Any]]()
    for name, new in written.items():
        actions.append(removal_of(adds[name], at_ms))
        if new is not None:
            actions.append({"add": {**new, "modificationTime": at_ms, "dataChange": True}})
    for name in wrong:
        path = log.local_path(name)
        assert path is not None
        stats = exact_statistics(path)
        # Of a file with deleted rows these are bounds, and perhaps not values that are there.
        if adds[name].get("deletionVector"):
            stats = json.dumps({**json.loads(stats), "tightBounds": False})
        actions.append({"add": {**adds[name], "stats": stats, "dataChange": False}})
    return actions


def _off_the_record(
    log: DeltaLog, table: DeltaTable, adds: Mapping[str, Mapping[str, Any]], application: str, gone: int
) -> str:
    """How many of the rows that go the record of the commits has: all, where their keys were inserted twice; none, where a
    commit replaced a row whose file stayed. Empty: it has neither number, so how many rows there must be cannot be told.
    """
    known = totals_at(log, table, find_position(log, table, application), application)
    counted = table.get_add_actions(flatten=True).column("num_records").to_pylist()
    if known is None or known.rows is None or None in counted:
        return ""
    there = sum(counted) - sum((add.get("deletionVector") or {}).get("cardinality", 0) for add in adds.values())
    return {there: str(gone), there - gone: "0"}.get(known.rows, "")


class _Doubled:
    """The rows of keys that a table has more than once, and what becomes of them."""

    def __init__(self, input_: SinkInput, log: DeltaLog, spark: SparkCommitter | None) -> None:
        self._input, self._log, self._spark = input_, log, spark
        self.left: list[str] = []
        self._fields: Mapping[str, pa.Field] = {}
        self._rows = self.kept = pa.table({_FILE: pa.array([], pa.string()), _ROW: pa.array([], pa.int64())})

    @property
    def rows_gone(self) -> int:
        """How many of them go."""
        return int(self._rows.num_rows - self.kept.num_rows)

    @property
    def files(self) -> list[str]:
        """Those that are written anew here."""
        is_here = self.rows_gone and self._spark is None
        return sorted(set(self._rows.column(_FILE).to_pylist())) if is_here else []

    def look(self, table: DeltaTable) -> None:
        """Find them, and decide which stay."""
        self._fields = {field.name: field for field in pa.schema(table.schema().to_arrow())}
        input_ = self._input
        rows = self._of_doubled_keys(table) if self._spark is None else self._asked_of(self._spark)
        if not rows.num_rows:
            return
        is_fold = input_.mode is SinkMode.FOLD
        found = latest_of(rows, input_.keys, () if is_fold else compared_columns(input_))
        if (why := self._untold(table)) is not None:
            self.left.append(f"{len(found.first)} keys that come more than once: {why}")
            return
        self._rows = rows
        self.kept = self._merged(rows) if is_fold else rows.take(pa.array(found.last))

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
            files = pa.array([fragment.path] * len(chosen), pa.string())
            found.append(rows.take(chosen).append_column(_FILE, files).append_column(_ROW, chosen))
        return pa.concat_tables(found)

    def _asked_of(self, spark: SparkCommitter) -> pa.Table:
        """The same as Spark reads it; the numbers are those of the rows among these."""
        schema = self._input.schema
        with folder_in(self._log) as folder:
            spark.write_doubled(self._input, _FILE, os.path.join(folder, "rows"))
            read = pq.read_table(os.path.join(folder, "rows"))
        columns = [pc.cast(read.column(field.name), field.type) for field in schema]
        numbers = pa.array(range(read.num_rows), pa.int64())
        return pa.table([*columns, read.column(_FILE), numbers], names=[*schema.names, _FILE, _ROW])

    def put(self, spark: SparkCommitter, metadata: Mapping[str, str]) -> None:
        """Have Spark put the rows that are kept in the place of all of them, in one version.

        Raises:
            OSError: another writer changed some of them meanwhile (see `versions.is_conflict`); nothing was written.
        """
        is_kept = pc.is_in(self._rows.column(_ROW), self.kept.column(_ROW).combine_chunks())
        told = [
            rows.append_column(KEPT, pa.array([kept] * rows.num_rows, pa.bool_()))
            for rows, kept in ((self.kept, True), (self._rows.filter(pc.invert(is_kept)), False))
        ]
        with folder_in(self._log) as folder:
            known = os.path.join(folder, "known.parquet")
            pq.write_table(pa.concat_tables(told), known)
            spark.leave_kept(self._input, _FILE, known, metadata)

    def _untold(self, table: DeltaTable) -> str | None:
        """Why it cannot be told which row is right; None: it can."""
        folds = self._input.folds
        if not folds:
            return None if self._input.order_by else "without order_by no row of them is the newest"
        if Fold.OWN in folds.values():
            return "rows of a fold by a function are merged by its state alone"
        if moved := {*table.metadata().partition_columns}.intersection(written_where_held(self._input)):
            return f"the table is partitioned by {moved.pop()}, which is no key"
        if Fold.SUM in folds.values() and not self._added_once(table.version()):
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

    def _merged(self, rows: pa.Table) -> pa.Table:
        """The first row of each key with the others folded into it, one after the other and in the order of their txids."""
        lineage, keys = self._input.lineage, list(self._input.keys)
        if lineage is not None and lineage.txid is not None:
            rows = rows.sort_by(lineage.txid)
        with tempfile.TemporaryDirectory(prefix="stormproof-repair-") as folder:
            made = DeltaTable.create(folder, rows.schema, configuration={"delta.dataSkippingNumIndexedCols": "0"})
            while rows.num_rows:
                first = latest_of(rows, keys, ()).first
                others = np.setdiff1d(np.arange(rows.num_rows), first)
                if made.version() == 0:
                    write_deltalake(made, rows.take(pa.array(first)), mode="append")
                else:
                    merge_rows(
                        made,
                        rows.take(pa.array(first)).select(self._input.schema.names),
                        self._input,
                        CommitProperties(),
                    )
                made, rows = DeltaTable(folder), rows.take(pa.array(others))
            found = made.to_pyarrow_table()
        return pa.table([pc.cast(found.column(f.name), f.type) for f in rows.schema], schema=rows.schema)

    def rewritten(self, name: str, add: Mapping[str, Any], names: list[str]) -> dict[str, Any] | None:
        """A file without the rows that go, as an `add`; None: no row is left. Its name is put among `names` first."""
        log, path = self._log, self._log.local_path(name)
        assert path is not None
        with log.files.open(path) as file:
            read = pq.ParquetFile(file).read()
        # delta-rs writes texts and bytes as views, which Arrow cannot take apart.
        fields = [self._fields.get(field.name, field) for field in read.schema]
        content = pa.table(
            [pc.cast(column, f.type) for column, f in zip(read.columns, fields, strict=True)], pa.schema(fields)
        )
        mine, kept = (rows.filter(pc.equal(rows.column(_FILE), name)) for rows in (self._rows, self.kept))
        others = np.setdiff1d(np.arange(content.num_rows), mine.column(_ROW).to_numpy())
        changed = content.take(kept.column(_ROW))
        for column in written_where_held(self._input) if self._input.folds else ():
            at = content.column_names.index(column)
            field = content.schema.field(at)
            changed = changed.set_column(at, field, pc.cast(kept.column(column), field.type))
        content = pa.concat_tables([content.take(pa.array(others)), changed])
        if not content.num_rows:
            return None
        names.append(f"{COMPACTED}{uuid.uuid4().hex}.parquet")
        new = os.path.join(log.table, names[-1])
        made = pa.BufferOutputStream()
        columns: Any = indexed(content.schema)
        pq.write_table(content, made, compression="snappy", write_statistics=columns, use_dictionary=columns)
        bytes_ = made.getvalue()
        to = log.files.write_new(new, private=False)
        try:
            to.write(memoryview(bytes_))
            to.sync()
        finally:
            to.close()
        told = {"path": names[-1], "partitionValues": add["partitionValues"], "size": bytes_.size}
        return {**told, "stats": exact_statistics(new)}
