"""Rewriting a Delta table's small files into large ones, and the log entry that puts these in their place.

delta-rs rewrites, in a table of its own over links to the files. The entry is put here and not by delta-rs: two compactions
by delta-rs at once take the same files out and both put their rows in, and no error is raised. So a file is replaced only
while it is the table's; files and entry are synced before the entry has its name, so that a power loss takes neither.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction

from stormproof.sinks.delta import power_loss
from stormproof.sinks.delta.log import COMPACTS, IN_COMMIT, DeltaLog, LogEntry, live_adds, now_ms, removal_of
from stormproof.sinks.delta.power_loss import written_for
from stormproof.sinks.delta.statistics import exact_statistics, is_rounded
from stormproof.sinks.delta.versions import OTHERS_CHANGED, entry_of, is_conflict, panics_as_errors
from stormproof.sinks.prepare.writer import as_text

FOLDER: Final = "_stormproof-compact-"
"""Prefix of the folders in which files are rewritten; readers and VACUUM pass over such names."""

COMPACTED: Final = "stormproof_compacted-"
"""Prefix of the names of the new files, by which a start finds those that are lost, and a VACUUM those left over."""

_PARTITION: Final = "_stormproof_partition"
TARGET_BYTES: Final = 100 * 1024 * 1024
PART_BYTES: Final = 8 * 1024 * 1024
LEFT_OVER_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class _Small:
    """A file to rewrite; `path` as the log spells it."""

    path: str
    bytes: int
    rows: int | None
    partition: dict[str, str | None]


def rewrite(log: DeltaLog, table: DeltaTable, application: str, target_bytes: int | None) -> int | None:
    """Rewrite the small files of a loaded table; returns the version that was put, None where there is nothing to do.

    After an error or an interrupt the new files go only where no entry of the log has them, nor can have them later.

    Raises:
        OSError: another writer replaced some of the files meanwhile (see `versions.is_conflict`), or the machine lacks
            something. No row is changed, be the version in the log or not.
        DeltaError: a file cannot be read.
    """
    small = _small_files(table, target_bytes or _target_of(table))
    if not small:
        return None
    with folder_in(log) as folder:
        entry = _rewritten(log, table, small, folder, target_bytes or _target_of(table))
        adds = [action["add"] for action in entry if "add" in action]
        gone = [small[int(unquote(a["remove"]["path"]).removesuffix(".parquet"))] for a in entry if "remove" in a]
        if not gone:
            return None
        _require_rows(adds, gone)
        written = {f"{COMPACTED}{uuid.uuid4().hex}.parquet": os.path.join(folder, unquote(a["path"])) for a in adds}
        adds = [{**add, "path": name} for add, name in zip(adds, written, strict=True)]
        with new_files(log, table.version(), written.keys()):
            _move(log, written)
            return _put(log, table, application, adds, gone)


@contextmanager
def new_files(log: DeltaLog, version: int, names: Collection[str]) -> Generator[None]:
    """Around the writing of files, and of their entry behind `version`: after an error, or an interrupt, they go where no
    entry has them, nor can have them later.
    """
    try:
        yield
    except BaseException as error:
        if is_conflict(error) or _is_never_put(log, version, names):
            for name in names:
                log.files.remove(os.path.join(log.table, name))
        raise


def _is_never_put(log: DeltaLog, after: int, names: Collection[str]) -> bool:
    """Whether no version behind `after` has the files, nor can have them later: a store may carry out a PUT late."""
    later = (log.entry(version) for version in log.versions() if version > after)
    return log.files.is_local and not any(_adds(entry, names) for entry in later)


def _adds(entry: LogEntry | None, names: Collection[str]) -> bool:
    return entry is not None and any(file.path in names for file in entry.added)


def _target_of(table: DeltaTable) -> int:
    told = table.metadata().configuration.get("delta.targetFileSize", "")
    return int(told) if told.isdigit() else TARGET_BYTES


def _small_files(table: DeltaTable, target_bytes: int) -> list[_Small]:
    """Files below the size, of partitions that have more than one of them."""
    actions = table.get_add_actions(flatten=True)
    columns = table.metadata().partition_columns
    values = {name: _texts(actions.column(f"partition.{name}")) for name in columns}
    paths, sizes = actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist()
    rows = actions.column("num_records").to_pylist()
    by_partition: dict[tuple[str | None, ...], list[_Small]] = defaultdict(list)
    for at, (path, size, number) in enumerate(zip(paths, sizes, rows, strict=True)):
        if size < target_bytes and "://" not in path and not path.startswith("file:"):
            partition = {name: values[name][at] for name in columns}
            by_partition[tuple(partition.values())].append(_Small(path, size, number, partition))
    return [file for files in by_partition.values() if len(files) > 1 for file in files]


def _texts(values: Any) -> list[str | None]:
    """A partition column's values as the log spells them."""
    found: list[str | None] = as_text(pa.chunked_array(values).combine_chunks()).to_pylist()
    return found


@contextmanager
def folder_in(log: DeltaLog) -> Generator[str]:
    """A folder on the table's file system, or for an object store on this machine's; those that crashes left behind are
    removed.
    """
    if not log.files.is_local:
        with tempfile.TemporaryDirectory(prefix=FOLDER) as folder:
            yield folder
        return
    for name in log.files.list(log.table):
        path = os.path.join(log.table, name)
        if name.startswith(FOLDER) and time.time() - os.stat(path).st_mtime > LEFT_OVER_S:
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER, dir=log.table) as folder:
        yield folder


def _rewritten(
    log: DeltaLog, table: DeltaTable, small: list[_Small], folder: str, target_bytes: int
) -> list[dict[str, Any]]:
    """Have delta-rs compact them in a table of their own; its log entry.

    That table has numbers for the partitions: delta-rs would make folders of their values, which others may have chosen so
    that no folder can have such a name.
    """
    kept = [f for f in table.schema().fields if f.name not in table.metadata().partition_columns]
    plain = Schema(
        [*(Field(f.name, f.type, nullable=f.nullable) for f in kept), Field(_PARTITION, PrimitiveType("integer"))]
    )
    partitions: list[dict[str, str | None]] = []
    adds: list[Any] = []
    for number, file in enumerate(small):
        path = log.local_path(unquote(file.path))
        assert path is not None
        log.files.bring(path, os.path.join(folder, f"{number}.parquet"))
        if not partitions or partitions[-1] != file.partition:  # they come one partition after the other
            partitions.append(file.partition)
        partition = {_PARTITION: str(len(partitions) - 1)}
        adds.append(AddAction(f"{number}.parquet", file.bytes, partition, 0, data_change=True, stats="{}"))
    with panics_as_errors():
        made = DeltaTable.create(folder, plain, partition_by=[_PARTITION])
        made.create_write_transaction(adds, "append", made.schema(), [_PARTITION])
        made = DeltaTable(folder)
        version = made.version()
        made.optimize.compact(target_size=target_bytes, writer_properties=written_for(made))
    if DeltaTable(folder).version() == version:
        return []
    with open(DeltaLog(folder).entry_path(version + 1), "rb") as written:
        entry: list[dict[str, Any]] = [json.loads(line) for line in written]
    rounded = any(is_rounded(field.type) for field in pa.schema(plain.to_arrow()))
    for add in (action["add"] for action in entry if "add" in action):
        add["partitionValues"] = partitions[int(add["partitionValues"][_PARTITION])]
        if rounded:
            add["stats"] = exact_statistics(os.path.join(folder, unquote(add["path"])))
    return entry


def _require_rows(adds: list[dict[str, Any]], gone: list[_Small]) -> None:
    came = sum(int(json.loads(add["stats"])["numRecords"]) for add in adds)
    counted = [file.rows for file in gone]
    if None not in counted and came != (went := sum(n or 0 for n in counted)):
        raise ValueError(f"the new files have {came} rows, the old ones {went}; nothing was put into the table")


def _move(log: DeltaLog, written: Mapping[str, str]) -> None:
    """Move the new files into the table's folder, synced. The log says which partition is whose."""
    for name, path in written.items():
        if log.files.is_local:
            log.files.sync(path)
            log.files.rename(path, os.path.join(log.table, name))
        else:
            _upload(log, path, os.path.join(log.table, name))
    log.files.sync_folder(log.table)


def _upload(log: DeltaLog, written: str, to: str) -> None:
    file = log.files.write_new(to, private=False)
    try:
        with open(written, "rb") as source:
            while part := source.read(PART_BYTES):
                file.write(part)
        file.sync()
    finally:
        file.close()


def _put(log: DeltaLog, table: DeltaTable, application: str, adds: list[dict[str, Any]], gone: list[_Small]) -> int:
    ours, new = {unquote(file.path) for file in gone}, {str(add["path"]) for add in adds}
    entry = _entry(application, adds, gone)
    return put_entry(log, table.version(), entry, ours, lambda there: _adds(there, new))


def restore(log: DeltaLog, table: DeltaTable, version: int, metadata: Mapping[str, str]) -> None:
    """RESTORE a table to a version behind which only rows changed, in a version with this metadata.

    Not by delta-rs, which drops the options of another writer's file format.

    Raises:
        ValueError: a file of that version has gone.
        OSError: another writer's version came first, or the machine lacks something.
    """
    newest, at_ms = table.version(), now_ms()
    then, now = live_adds(log, version), live_adds(log, newest)
    back = [add for name, add in then.items() if name not in now]
    paths = [log.local_path(unquote(add["path"])) for add in back]
    if gone := [path for path in paths if path is not None and log.files.stat(path) is None]:
        raise ValueError(f"{gone[0]} is missing")
    removed = [removal_of(add, at_ms) for name, add in now.items() if name not in then]
    added = [{"add": {**add, "dataChange": True}} for add in back]
    power_loss.sync_tail(log, newest)
    entry = entry_of("RESTORE", {"version": str(version)}, [*removed, *added], metadata)
    log.files.put_new(log.entry_path(newest + 1), entry)


def put_entry(
    log: DeltaLog, version: int, entry: bytes, files: Collection[str], is_it: Callable[[LogEntry], bool]
) -> int:
    """Put an entry behind `version`, and behind those of other writers that let these files be; returns its own version.

    `is_it` knows the entry in the log: a store's answer may be lost.

    Raises:
        OSError: another writer took one of the files (see `versions.is_conflict`), or the machine lacks something.
    """
    while True:
        version += 1
        there = log.entry(version)
        if there is None:
            try:
                power_loss.sync_tail(log, version - 1)
                log.files.put_new(log.entry_path(version), entry)
            except OSError:  # whatever the answer was, only the log says whether the entry is there
                there = log.entry(version)
                if there is None:
                    raise
        if there is None or is_it(there):
            log.files.sync_folder(log.folder)
            return version
        is_timed = IN_COMMIT in there.info  # the entry's own time may lie before it
        if there.changes_table or is_timed or any(path in files for path, _ in there.removed):
            raise OSError(f"{OTHERS_CHANGED}: version {version} ({there.operation}) took its files")


def _entry(application: str, adds: list[dict[str, Any]], gone: list[_Small]) -> bytes:
    at_ms = now_ms()
    removed = [
        {
            "remove": {
                "path": file.path,
                "deletionTimestamp": at_ms,
                "dataChange": False,
                "extendedFileMetadata": True,
                "partitionValues": file.partition,
                "size": file.bytes,
            }
        }
        for file in gone
    ]
    added = [
        {"add": {**{k: v for k, v in add.items() if v is not None}, "dataChange": False, "modificationTime": at_ms}}
        for add in adds
    ]
    metrics = {"numFilesAdded": len(adds), "numFilesRemoved": len(gone)}
    more = {"operationMetrics": metrics, COMPACTS: application}
    return entry_of("OPTIMIZE", {"predicate": "[]"}, [*removed, *added], more)
