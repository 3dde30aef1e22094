"""How a version of a Delta table outlives a power loss: nobody else syncs the files of a MERGE, nor any log entry."""

from __future__ import annotations

import os

from deltalake import DeltaTable

from stormproof.sinks.delta.evidence import live_files
from stormproof.sinks.delta.log import DeltaLog


def sync_version(log: DeltaLog, version: int) -> None:
    """Sync a version's files, its log entry, and the checkpoint that was made with it; nothing where its entry is gone."""
    entry = log.entry(version)
    if entry is None:
        return
    files, folders = log.files, {log.table}
    for file in entry.added:
        path = log.local_path(file.path)
        if path is None:
            continue
        try:
            files.sync(path)
        except FileNotFoundError:
            continue  # removed since by a later version; whether the live ones are there was looked at
        folders.add(os.path.dirname(path))
    files.sync(log.entry_path(version))
    for path in (log.checkpoint_path(version), os.path.join(log.folder, "_last_checkpoint")):
        if files.stat(path) is not None:
            files.sync(path)
    for folder in (*sorted(folders), log.folder):
        files.sync_folder(folder)


def sync_versions(log: DeltaLog, first: int, last: int) -> None:
    """Sync these versions, those of other writers, too: a log with a hole cannot be read, and they may have rewritten our
    rows.
    """
    for version in range(first, last + 1):
        sync_version(log, version)


def sync_checkpoints(log: DeltaLog, table: DeltaTable, checkpoints: list[int], *, live: bool) -> None:
    """Sync checkpoints that stand for entries which a clean-up took, and the table's `live` files where asked."""
    files = log.files
    for checkpoint in checkpoints:
        files.sync(log.checkpoint_path(checkpoint))
    for path in live_files(table) if live else ():
        local = log.local_path(path)
        if local is not None:
            files.sync(local)
    files.sync_folder(log.table)
    files.sync_folder(log.folder)
