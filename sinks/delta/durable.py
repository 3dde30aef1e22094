"""How a version of a Delta table outlives a power loss: neither delta-rs nor Spark syncs a MERGE's files or a log entry."""

from __future__ import annotations

import os
from itertools import islice
from typing import Final

from deltalake import DeltaTable

from stormproof.sinks.delta.evidence import live_files
from stormproof.sinks.delta.log import APPLICATION, LAST_CHECKPOINT, DeltaLog, checksum_of

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
