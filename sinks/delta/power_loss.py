"""What a power loss leaves of a Delta table: how a version is synced against it, how torn log entries and checkpoints are
recognised and put aside, and how files of a MERGE are written, so that a block which was lost from one can be found.

Neither delta-rs nor Spark syncs a MERGE's files or a log entry; we sync an entry after delta-rs has put it there (one that
is written here is synced before it gets its name). A power loss in between may leave the entry's name with none or some of
its bytes. Readers differ then: delta-rs takes an empty entry for a version without changes, and an entry that ends between
two actions for a whole one. No writer writes an entry in parts under its name (each links or renames a finished file). So
nobody who syncs entries has ever confirmed a torn one, and nothing in it can be kept.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import ColumnProperties, DeltaTable, WriterProperties

from stormproof.core.base.errors import SinkRefused
from stormproof.core.storage.files import files_at
from stormproof.sinks.contract.protocol import SinkProblem
from stormproof.sinks.delta.log import (
    APPLICATION,
    COMPACTS,
    LAST_CHECKPOINT,
    REPAIRS,
    ROWS,
    SUPERSEDED,
    DeltaLog,
    checksum_of,
    live_files,
    with_user_metadata,
)

log = logging.getLogger("stormproof.sink")

ASIDE: Final = ".stormproof-torn-"
"""Prefix of the names of files that were put aside; readers of a log ignore such names."""


def tear(entry: bytes) -> str | None:
    """What is missing of a log entry; None where it is whole.

    An entry of ours is whole if it has its transaction identifier, which is written last, and as many files as it says.
    By Spark the identifier comes first, and a MERGE may add files again that it did not write: it has at least as many
    as it says, and an append has as many rows. A compaction adds and removes as many files as it says.
    Another writer's entry counts as whole if it is not empty and each of its lines can be read.
    """
    if not entry.strip():
        return "it is empty"
    actions: list[dict[str, Any]] = []
    for number, line in enumerate(entry.splitlines(), 1):
        try:
            actions.append(json.loads(line))
        except ValueError:
            return f"line {number} is cut short"
    info: dict[str, Any] = with_user_metadata(next((a["commitInfo"] for a in actions if "commitInfo" in a), {}))
    if COMPACTS in info:
        return _tear_of_compaction(info, actions)
    if APPLICATION not in info and REPAIRS not in info:
        return None
    if "userMetadata" in info:
        return _tear_of_spark(info, [a["add"] for a in actions if "add" in a])
    if APPLICATION not in info:
        return None  # a repair, which was synced before it had its name
    if not any(a["txn"].get("appId") == info[APPLICATION] for a in actions if "txn" in a):
        return "it ends before its transaction identifier"
    added = [a["add"] for a in actions if "add" in a]
    told = (info.get("operationMetrics") or {}).get("num_target_files_added")
    if told is not None and int(told) != len(added):
        return f"it adds {len(added)} of {told} files"
    rows = [json.loads(add.get("stats") or "{}").get("numRecords") for add in added]
    if not added and SUPERSEDED in info:
        return None  # an upsert whose rows all came late adds nothing
    if told is None and None not in rows and sum(rows) != int(info[ROWS]):
        return f"it adds {sum(rows)} of {info[ROWS]} rows"
    return None


def _tear_of_spark(info: dict[str, Any], added: list[dict[str, Any]]) -> str | None:
    metrics = info.get("operationMetrics") or {}
    told = int(metrics.get("numTargetFilesAdded", 0))
    if len(added) < told:
        return f"it adds {len(added)} of {told} files"
    rows = [json.loads(add.get("stats") or "{}").get("numRecords") for add in added]
    if info.get("operation") == "WRITE" and None not in rows and sum(rows) != int(info[ROWS]):
        return f"it adds {sum(rows)} of {info[ROWS]} rows"
    return None


def _tear_of_compaction(info: dict[str, Any], actions: list[dict[str, Any]]) -> str | None:
    """delta-rs and Spark name the metrics differently."""
    metrics: dict[str, Any] = info.get("operationMetrics") or {}
    for what, names in (
        ("add", ("numFilesAdded", "numAddedFiles")),
        ("remove", ("numFilesRemoved", "numRemovedFiles")),
    ):
        told = next((int(metrics[name]) for name in names if name in metrics), None)
        found = sum(what in action for action in actions)
        if told is not None and told != found:
            return f"it {what}s {found} of {told} files"
    return None


def require_whole(delta_log: DeltaLog, where: str) -> None:
    """Refuse to read a table whose newest log entry is not whole.

    Raises:
        SinkRefused: names the entry and what is missing of it.
    """
    torn = _newest_torn(delta_log) if delta_log.files.is_local else None
    if torn is not None:
        raise SinkRefused(
            f"{where}: {torn[0]} is torn, as a power loss leaves it: {torn[1]}; nobody can read the table as it is. The "
            "topology's next start puts the entry aside and goes on from the version before",
            problem=SinkProblem.FILE_LOST,
            files=[torn[0]],
        )


def put_torn_aside(delta_log: DeltaLog, where: str) -> tuple[str, ...]:
    """Take a torn newest entry, and a torn last checkpoint, out of the log; returns their names.

    They stay in the folder under other names. The table no longer holds what such an entry committed: a batch of ours is
    committed again from its prepared files.

    Raises:
        SinkRefused: more than the newest entry is lost, which was then no commit of ours; nothing was changed.
    """
    files = delta_log.files
    if not files.is_local or files.stat(delta_log.folder) is None:
        return ()
    # Of two drivers that start at once, one must not put aside the entry that the other has written in its place.
    with files.locked(delta_log.folder):
        # Under the lock a torn entry stays torn, since nobody can write another one of its version.
        torn = _newest_torn(delta_log)
        versions = delta_log.versions()
        if torn is not None:
            versions.pop()
        wrong = _hole(delta_log, versions)
        if wrong is not None:
            raise SinkRefused(
                f"{where}: {wrong}: more than the newest version was lost, which was another writer's and is not in any "
                "prepared file; nothing was written. Restore the table's folder from a backup, then start again",
                problem=SinkProblem.FILE_LOST,
                files=[wrong],
            )
        aside = [] if torn is None else [os.path.basename(torn[0])]
        aside += _torn_checkpoint(delta_log, versions)
        for name in aside:
            kept = f"{ASIDE}{name}-{uuid.uuid4().hex[:8]}"
            files.rename(os.path.join(delta_log.folder, name), os.path.join(delta_log.folder, kept))
            # Hadoop keeps a checksum beside each file that Spark wrote, and would refuse another file of its name.
            files.remove(checksum_of(os.path.join(delta_log.folder, name)))
            log.warning("%s: %s was torn by a power loss; it is %s now", where, name, kept)
        if aside:
            files.sync_folder(delta_log.folder)
    return tuple(aside)


def _newest_torn(delta_log: DeltaLog) -> tuple[str, str] | None:
    versions = delta_log.versions()
    return _torn(delta_log, versions[-1]) if versions else None


def _torn(delta_log: DeltaLog, version: int) -> tuple[str, str] | None:
    path = delta_log.entry_path(version)
    try:
        with delta_log.files.open(path) as file:
            wrong = tear(file.read())
    except FileNotFoundError:
        return None
    return None if wrong is None else (path, wrong)


def _hole(delta_log: DeltaLog, versions: list[int]) -> str | None:
    """What is missing or torn among the newest entries that are to stay.

    A power loss did not take an entry that is missing at or below a checkpoint: the checkpoint replaces it, and a clean-up
    removes such entries in any order, and may be interrupted.
    """
    tail = delta_log.tail(versions[-1]) if versions else []
    behind = versions[0] < tail[0] if tail else False
    if behind and not any(tail[0] - 1 <= checkpoint <= tail[-1] for checkpoint in delta_log.checkpoints(of_all=True)):
        return f"{delta_log.entry_path(tail[0] - 1)} is missing"
    torn = _torn(delta_log, versions[-1]) if versions else None
    return None if torn is None else f"{torn[0]} is torn: {torn[1]}"


def _torn_checkpoint(delta_log: DeltaLog, versions: list[int]) -> list[str]:
    """The newest checkpoint, if it cannot be read or its version's entry is lost; and the file that names the last
    checkpoint, if that checkpoint does not stay.

    The log is read from its entries without them. A checkpoint whose entry is lost would make its version count, while
    nothing says what that version was.
    """
    names: list[str] = []
    checkpoints = delta_log.checkpoints()
    newest = max(checkpoints, default=None)
    if (
        newest is not None
        and versions
        and newest == versions[-1] + 1
        and _readable_without(newest, checkpoints, versions)
    ):
        names.append(os.path.basename(delta_log.checkpoint_path(newest)))
        checkpoints -= {newest}
        newest = max(checkpoints, default=None)
    if newest is not None and unreadable(delta_log.checkpoint_path(newest)) is not None:
        names.append(os.path.basename(delta_log.checkpoint_path(newest)))
    try:
        with delta_log.files.open(os.path.join(delta_log.folder, LAST_CHECKPOINT)) as file:
            hint = json.loads(file.read())
    except FileNotFoundError:
        return names
    except ValueError:
        return [*names, LAST_CHECKPOINT]
    if not isinstance(hint, dict) or "version" not in hint:
        return [*names, LAST_CHECKPOINT]
    if "parts" in hint or "v2Checkpoint" in hint:
        return names  # a kind of checkpoint that only other writers make
    named = delta_log.checkpoint_path(int(hint["version"]))
    if os.path.basename(named) in names or delta_log.files.stat(named) is None:
        names.append(LAST_CHECKPOINT)
    return names


def _readable_without(checkpoint: int, checkpoints: frozenset[int], versions: list[int]) -> bool:
    """Whether the entries before it go back without a gap, to an older checkpoint or to the first version."""
    start = max((c for c in checkpoints if c < checkpoint), default=-1)
    return set(range(start + 1, checkpoint)) <= set(versions)


def unreadable(path: str, rows: int | None = None) -> str | None:
    """Why a Parquet file cannot be read to its end; None where it can. Decodes the whole file, batch by batch.

    A power loss may leave a file with its full size, and zeros in place of some blocks. Most such damage does not decode.
    Spark writes a checksum with each page, and the rest does not match it; delta-rs writes none: `lost_block` finds it.
    """
    read = 0
    try:
        with (
            files_at(path).open_native(path) as opened,
            pq.ParquetFile(opened, page_checksum_verification=True) as file,
        ):
            for batch in file.iter_batches():
                read += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        return str(error).splitlines()[0]
    return None if rows is None or rows == read else f"it has {read} rows instead of {rows}"


BLOCK_BYTES: Final = 4096
"""The page size of Linux, which is what its page cache writes at once; also the default block size of file systems."""

MERGED_FILES: Final = WriterProperties(compression="SNAPPY", statistics_truncate_length=64)
"""With these settings an undamaged file practically never has a block of zeros, whatever the table's rows are.

Snappy compresses 64 KiB at a time. It looks for repetitions in steps that grow by a 32nd of the bytes it has passed without
one, and it copies a run of zeros uncompressed up to its second look into that run. This copy can be as long as a block only
behind 60,000 bytes without any repetition, and then the run must also be aligned with the file's blocks. The statistics of a
long value are the only other place where zeros could stand, so they are cut.
"""

_NONE: Final = ColumnProperties(statistics_enabled="NONE", dictionary_enabled=False)
_SOME: Final = ColumnProperties(statistics_enabled="PAGE")


def written_for(table: DeltaTable) -> WriterProperties:
    """`MERGED_FILES` for one table, with statistics for those columns alone in which delta-rs takes right ones.

    It leaves NaN out of the bounds of a column, while to Spark NaN is greater than every number: a file with bounds of 1 and
    2 would be passed over for ``x > 5``, and its NaN with it. So a file has no bounds for columns of floating-point numbers,
    and no dictionary: see `sinks.prepare.writer.indexed`.
    Those inside of structs cannot be named one by one: where there are any, no nested column has statistics.
    """
    schema = pa.schema(table.schema().to_arrow())
    floats = [field.name for field in schema if pa.types.is_floating(field.type)]
    nested = any(pa.types.is_nested(field.type) and _has_floats(field.type) for field in schema)
    if not floats and not nested:
        return MERGED_FILES
    plain = {field.name: _SOME for field in schema if not pa.types.is_nested(field.type)} if nested else {}
    return WriterProperties(
        compression="SNAPPY",
        statistics_truncate_length=MERGED_FILES.statistics_truncate_length,
        default_column_properties=_NONE if nested else None,
        column_properties={**plain, **dict.fromkeys(floats, _NONE)},
    )


def _has_floats(kind: pa.DataType) -> bool:
    if not pa.types.is_nested(kind):
        return bool(pa.types.is_floating(kind))
    return any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))


_READ_BYTES: Final = 256 * BLOCK_BYTES


def lost_block(path: str) -> int | None:
    """The offset of the first block of zeros in a file that was written with `MERGED_FILES`: a block that never reached the
    disk. None where there is none.

    Decoding alone would miss it: Snappy stores values that it cannot compress as they are, zeros in their place decode as
    other values, and pages have no checksum. The last block, which is usually shorter, needs no look: it ends with the
    format's name, and a file without its end does not decode.

    In the rare case that an undamaged file has such a block, the cost is one needless `retry`.
    """
    at = 0
    with files_at(path).open(path) as file:
        while part := file.read(_READ_BYTES):
            blocks = np.frombuffer(part, np.uint8, len(part) // BLOCK_BYTES * BLOCK_BYTES).reshape(-1, BLOCK_BYTES)
            lost = np.flatnonzero(~blocks.any(axis=1))
            if lost.size:
                return at + int(lost[0]) * BLOCK_BYTES
            at += len(part)
    return None


TAIL_MAX: Final = 20
"""How many versions `sync_tail` looks at."""

_SIDECARS: Final = "_sidecars"
"""The folder with the parts of checkpoints of Delta's second kind."""


def sync_version(log: DeltaLog, version: int) -> None:
    """Sync a version's files, its log entry, and the checkpoint made with it. Does nothing where the entry is gone, or in an
    object store, whose answer to each PUT was the sync.
    """
    entry = log.entry(version) if log.files.is_local else None
    if entry is None:
        return
    files, folders = log.files, {log.table}
    vectors = [file.deletion_file for file in entry.added if file.deletion_file is not None]
    for name in (*(file.path for file in entry.added), *vectors, *entry.changes):
        path = log.local_path(name)
        if path is None:
            continue
        try:
            files.sync(path)
        except FileNotFoundError:
            continue  # a later version removed it; the live files have been checked
        if entry.is_by_spark:
            _sync_if_there(log, checksum_of(path))
        folders |= _folders_between(path, log.table)
    files.sync(log.entry_path(version))
    made = [log.checkpoint_path(version), os.path.join(log.folder, LAST_CHECKPOINT)]
    if entry.is_by_spark:
        made = [os.path.join(log.folder, name) for name in _written_with(log, version)]
        folders.add(os.path.join(log.folder, _SIDECARS))
    for path in made:
        _sync_if_there(log, path)
    for folder in (*sorted(folders), log.folder):
        if files.stat(folder) is not None:
            files.sync_folder(folder)


def _folders_between(path: str, table: str) -> set[str]:
    """The folders from a file's up to its table's: each holds the name of the next one. Of a file elsewhere, its own."""
    found, top = {os.path.dirname(path)}, os.path.normpath(table)
    above = os.path.relpath(os.path.dirname(path), top).split(os.sep)
    if above[0] in (os.curdir, os.pardir):
        return found
    return {os.path.join(top, *above[:depth]) for depth in range(1, len(above) + 1)}


def _written_with(log: DeltaLog, version: int) -> list[str]:
    """What Spark writes into the log's folder with a version: checksums, checkpoints of any kind and their parts."""
    number, names = f"{version:020}.", log.files.list(log.folder)
    made = [name for name in names if name.removeprefix(".").startswith((number, LAST_CHECKPOINT))]
    if any(name.startswith(f"{number}checkpoint.") for name in names):
        made += [os.path.join(_SIDECARS, name) for name in log.files.list(os.path.join(log.folder, _SIDECARS))]
    return made


def _sync_if_there(log: DeltaLog, path: str) -> None:
    if log.files.stat(path) is not None:
        log.files.sync(path)


def sync_versions(log: DeltaLog, first: int, last: int) -> None:
    """Sync these versions, also those of other writers: a log with a gap cannot be read, and they may have rewritten our
    rows.
    """
    for version in range(first, last + 1):
        sync_version(log, version)


def sync_tail(log: DeltaLog, version: int) -> None:
    """Sync this version and those before it, back to one with a commit of ours, which synced those before it.

    To be done before an entry is put behind it that is synced before it gets its name: in a power loss it must not outlive
    them. At most `TAIL_MAX` versions: the system writes older ones by itself.
    """
    if not log.files.is_local:
        return
    first = version
    for entry in islice(log.back_from(version), TAIL_MAX):
        first = entry.version
        if APPLICATION in entry.info:
            break
    sync_versions(log, first, version)


def sync_checkpoints(log: DeltaLog, table: DeltaTable, checkpoints: list[int], *, live: bool) -> None:
    """Sync checkpoints that replace log entries which a clean-up has removed; with `live` also the table's live files."""
    files = log.files
    if not files.is_local:
        return
    for checkpoint in checkpoints:
        files.sync(log.checkpoint_path(checkpoint))
    for path in live_files(table) if live else ():
        local = log.local_path(path)
        if local is not None:
            files.sync(local)
    files.sync_folder(log.table)
    files.sync_folder(log.folder)
