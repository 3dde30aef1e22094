"""What a table's log says of its live files: their sizes and `add` actions, how their paths are spelled, the values of
their partitions. A `remove` that spells a path otherwise removes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused
from stormproof.sinks.delta.log import DeltaLog

_KEPT: Final = r"^(?:[A-Za-z0-9!$&'()+,./:;=@_~-]|%(?:2[0235A]|3[CEF]|5[B-E]|60|7[BCD]|[89A-F][0-9A-F]))*$"
"""Paths that a `remove` of delta-rs repeats letter by letter. It decodes each path, and encodes all but these letters."""
_OUTSIDE: Final = r"^(?:/|[A-Za-z][A-Za-z0-9+.-]*:)"
"""Paths that are absolute, or URLs."""


def respelled_paths(table: DeltaTable, most: int = 3) -> tuple[str, ...]:
    """Paths of live files below the folder that a `remove` of delta-rs would spell otherwise, `most` of them at most."""
    paths = _paths(table)
    kept = pc.or_(pc.match_substring_regex(paths, _KEPT), _are_outside(paths))
    return tuple(paths.filter(pc.invert(kept)).slice(0, most).to_pylist())


def paths_outside(table: DeltaTable, most: int = 3) -> tuple[str, ...]:
    """Paths of live files that lead out of the table's folder, `most` of them at most."""
    paths = _paths(table)
    return tuple(paths.filter(_are_outside(paths)).slice(0, most).to_pylist())


def unzoned_values(table: DeltaTable, columns: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Values of these partition columns, timestamps, that name no zone, `most` of them at most. Spark writes them so with
    ``spark.databricks.delta.write.utcTimestampPartitionValues=false``, in the zone of its session, which is not on record.
    """
    values = {value[name] for name in columns for value in table.partitions()}
    return tuple(sorted(value for value in values if value and not value.endswith("Z")))[:most]


def _are_outside(paths: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.match_substring_regex(paths, _OUTSIDE)


def _paths(table: DeltaTable) -> pa.ChunkedArray:
    """As the log spells them."""
    return pa.chunked_array(table.get_add_actions().column("path")).cast(pa.string())


_SIDECARS: Final = "_sidecars"
_PARSED: Final = frozenset({"stats_parsed", "partitionValues_parsed"})
"""What a checkpoint has beside the parts of an `add`."""


def live_adds(log: DeltaLog, version: int) -> dict[str, dict[str, Any]]:
    """The `add` of each file at a version, by its path without escapes.

    Raises:
        SinkRefused: the log does not reach back so far.
    """
    since = max((at for at in log.checkpoints(of_all=True) if at <= version), default=-1)
    found = {unquote(add["path"]): add for add in _of_checkpoint(log, since)} if since >= 0 else {}
    for number in range(since + 1, version + 1):
        try:
            with log.files.open(log.entry_path(number)) as file:
                actions = [json.loads(line) for line in file if line.strip()]
        except FileNotFoundError:
            raise SinkRefused(f"{log.table}: version {number} is not in the log any more") from None
        for action in actions:
            if "remove" in action:
                found.pop(unquote(action["remove"]["path"]), None)
        for action in actions:
            if "add" in action:
                found[unquote(action["add"]["path"])] = action["add"]
    return found


def _of_checkpoint(log: DeltaLog, version: int) -> Iterator[dict[str, Any]]:
    for name in log.files.list(log.folder):
        if name.startswith(f"{version:020}.checkpoint."):
            yield from _adds_in(log, os.path.join(log.folder, name))


def _adds_in(log: DeltaLog, path: str) -> Iterator[dict[str, Any]]:
    with log.files.open(path) as file:
        rows = _of_parquet(file) if path.endswith(".parquet") else [json.loads(line) for line in file if line.strip()]
    for row in rows:
        add, sidecar = row.get("add"), row.get("sidecar")
        if sidecar is not None:
            yield from _adds_in(log, os.path.join(log.folder, _SIDECARS, sidecar["path"]))
        if add is not None:
            partition, tags = dict(add["partitionValues"] or ()), add.get("tags")
            parsed = _PARSED if add.get("stats") is not None else {"partitionValues_parsed"}
            plain = {name: value for name, value in add.items() if value is not None and name not in parsed}
            yield plain | {"partitionValues": partition} | ({} if tags is None else {"tags": dict(tags)})


def _of_parquet(file: BinaryIO) -> list[dict[str, Any]]:
    parquet = pq.ParquetFile(file)
    kept = [name for name in ("add", "sidecar") if name in parquet.schema_arrow.names]
    found: list[dict[str, Any]] = parquet.read(columns=kept).to_pylist()
    return found


def removal_of(add: Mapping[str, Any], at_ms: int) -> dict[str, Any]:
    """The action that removes a live file, whose rows go with it or are in another one."""
    kept = {name: add[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in add}
    gone = {**kept, "deletionTimestamp": at_ms, "dataChange": True, "extendedFileMetadata": True}
    return {"remove": gone}


def live_files(table: DeltaTable) -> dict[str, int]:
    """The files that a table's newest version lists, with their sizes."""
    actions = table.get_add_actions(flatten=True)
    paths = map(unquote, actions.column("path").to_pylist())
    return dict(zip(paths, actions.column("size_bytes").to_pylist(), strict=True))
