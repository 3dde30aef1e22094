"""Log entries of a Delta table that are written here: of a version that only adds files, and what every one of them says.

delta-rs lists the log's folder before and after it writes an entry, which takes a millisecond for each thousand of them. A
version that only adds files, right behind the newest one, needs neither: its entry is put under a name that must be free.
That is Delta's own rule for a commit (PROTOCOL.md of delta-io/delta, "Delta Log Entries"), and nothing that another writer
did can lie between the two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from json import dumps
from typing import Any, Final
from urllib.parse import quote

from deltalake.transaction import AddAction

from stormproof.sinks.delta.log import DeltaLog, Label, now_ms
from stormproof.sinks.delta.newest_version import TableHead

_BY_VERSION: Final[Mapping[int, list[str]]] = {5: ["columnMapping"], 6: ["columnMapping", "identityColumns"]}
_LISTS_FEATURES: Final = 7
"""Writer versions of the protocol: what a version has that does not list its features, and the one that lists them."""
_PLAIN: Final = frozenset(
    {"appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns", "deletionVectors"}
    | {"timestampNtz", "vacuumProtocolCheck"}
)
"""The features that ask nothing of an added file's action, nor of its entry. The rows were checked before."""
_CHECKPOINT_INTERVAL: Final = "delta.checkpointInterval"
_CHECKPOINT_INTERVAL_OF_DELTA_RS: Final = 100
_NAMES: Final = "/="
"""Beside letters, digits, "_", ".", "-" and "~", what a path may have that every writer spells alike."""


def put_next(log: DeltaLog, table: TableHead, files: Sequence[AddAction], label: Label) -> bool:
    """Put the entry of the version behind `table`'s, which adds files and holds the label; whether it was put.

    False, and nothing was written: another writer's version came first, or the version is delta-rs's to write, since the
    table has other features, a checkpoint is due with it, or the log is no longer the one that was loaded.

    Raises:
        OSError: the place refuses, or does not answer. The entry may be there, or arrive yet.
    """
    read = table.version()
    if not is_ours(table, [file.path for file in files]) or log.files.stat(log.entry_path(read)) is None:
        return False
    try:
        log.files.put_new(log.entry_path(read + 1), _adding(table, files, label))
    except FileExistsError:
        return False
    return True


def is_ours(table: TableHead, paths: Iterable[str]) -> bool:
    """Whether, by the table and these paths, the version behind `table`'s that adds the files may be put here."""
    checkpoint_is_due = (table.version() + 2) % _checkpoint_interval(table) == 0
    return has_plain_features(table) and not checkpoint_is_due and all(quote(p, safe=_NAMES) == p for p in paths)


def entry_of(operation: str, parameters: Mapping[str, str], actions: Iterable[Any], more: Mapping[str, Any]) -> bytes:
    """A log entry: its `commitInfo`, with `more` in it, and the other actions.

    Raises:
        UnicodeEncodeError: a text has half of a surrogate pair, for which the log would be unreadable.
    """
    info = {
        "timestamp": now_ms(),
        "operation": operation,
        "operationParameters": dict(parameters),
        "engineInfo": "stormproof",
        **more,
    }
    # Without a line's end at the end: a power loss that takes it leaves a whole entry, and every other part is torn.
    return "\n".join(_compact(action) for action in ({"commitInfo": info}, *actions)).encode()


def _adding(table: TableHead, files: Sequence[AddAction], label: Label) -> bytes:
    adds = [
        {
            "add": {
                "path": file.path,
                "partitionValues": file.partition_values,
                "size": file.size,
                "modificationTime": file.modification_time,
                "dataChange": file.data_change,
                "stats": file.stats,
            }
        }
        for file in files
    ]
    identifiers = [
        {"txn": {"appId": one.app_id, "version": one.version, "lastUpdated": one.last_updated}}
        for one in label.identifiers()
    ]
    parameters = {"mode": "Append", "partitionBy": _compact(table.metadata().partition_columns)}
    return entry_of("WRITE", parameters, [*adds, *identifiers], label.metadata)


def _compact(value: Any) -> str:
    """As JSON without spaces, like the entries of other writers."""
    return dumps(value, ensure_ascii=False, separators=(",", ":"))


def has_plain_features(table: TableHead) -> bool:
    """Whether none of the table's features asks anything of an added file's action, nor of its entry."""
    return not other_features(table)


def other_features(table: TableHead) -> list[str]:
    """The features of the table that may ask something of an added file's action, or of its entry."""
    protocol = table.protocol()
    version = protocol.min_writer_version
    if version > _LISTS_FEATURES:
        return [f"writer version {version}"]
    if version == _LISTS_FEATURES:
        return sorted({*(protocol.writer_features or ())} - _PLAIN)
    return _BY_VERSION.get(version, [])


def _checkpoint_interval(table: TableHead) -> int:
    """How many versions lie between two checkpoints; 1, which leaves each of them to delta-rs, where that cannot be read."""
    asked = table.metadata().configuration.get(_CHECKPOINT_INTERVAL)
    if asked is None:
        return _CHECKPOINT_INTERVAL_OF_DELTA_RS
    return int(asked) if asked.isdecimal() and int(asked) > 0 else 1
