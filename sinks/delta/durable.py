"""How a version of a Delta table outlives a power loss: delta-rs syncs neither the files of a MERGE nor any log entry."""

from __future__ import annotations

import os

from deltalake import DeltaTable

from stormproof.sinks.delta.evidence import live_files
from stormproof.sinks.delta.log import DeltaLog


def sync_version(log: DeltaLog, version: int) -> None:
    """Sync a version's files, its log entry, and the checkpoint made with it. Does nothing where the entry is gone."""
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
            continue  # a later version removed it; the live files have been checked
        folders.add(os.path.dirname(path))
    files.sync(log.entry_path(version))
    for path in (log.checkpoint_path(version), os.path.join(log.folder, "_last_checkpoint")):
        if files.stat(path) is not None:
            files.sync(path)
    for folder in (*sorted(folders), log.folder):
        files.sync_folder(folder)


def sync_versions(log: DeltaLog, first: int, last: int) -> None:
    """Sync these versions, also those of other writers: a log with a gap cannot be read, and they may have rewritten our
    rows.
    """
    for version in range(first, last + 1):
        sync_version(log, version)


def sync_checkpoints(log: DeltaLog, table: DeltaTable, checkpoints: list[int], *, live: bool) -> None:
    """Sync checkpoints that replace log entries which a clean-up has removed; with `live` also the table's live files."""
    files = log.files
    for checkpoint in checkpoints:
        files.sync(log.checkpoint_path(checkpoint))
    for path in live_files(table) if live else ():
        local = log.local_path(path)
        if local is not None:
            files.sync(local)
    files.sync_folder(log.table)
    files.sync_folder(log.folder)
