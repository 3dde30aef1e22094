"""The live files of a Delta table as its log has them, letter by letter: path, partition values and statistics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

import pyarrow.parquet as pq

from stormproof.core.errors import SinkRefused
from stormproof.sinks.delta.log import DeltaLog

_SIDECARS: Final = "_sidecars"
_PARSED: Final = frozenset({"stats_parsed", "partitionValues_parsed"})
"""What a checkpoint has beside the parts of an `add`."""


def live_adds(log: DeltaLog, version: int) -> dict[str, dict[str, Any]]:
    """The `add` of each file at a version, by its path without escapes.

    Raises:
        SinkRefused: the log does not reach back so far, or its checkpoint is of a form that is not read here.
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
    names = [name for name in log.files.list(log.folder) if name.startswith(f"{version:020}.checkpoint.")]
    if not all(name.endswith(".parquet") for name in names):
        raise SinkRefused(f"{log.table}: its checkpoint {names[0]} is none of Parquet, and is not read here")
    for name in names:
        yield from _adds_in(log, os.path.join(log.folder, name))


def _adds_in(log: DeltaLog, path: str) -> Iterator[dict[str, Any]]:
    with log.files.open(path) as file:
        parquet = pq.ParquetFile(file)
        kept = [name for name in ("add", "sidecar") if name in parquet.schema_arrow.names]
        rows = parquet.read(columns=kept).to_pylist()
    for row in rows:
        add, sidecar = row.get("add"), row.get("sidecar")
        if sidecar is not None:
            yield from _adds_in(log, os.path.join(log.folder, _SIDECARS, sidecar["path"]))
        if add is not None:
            partition, tags = dict(add["partitionValues"] or ()), add.get("tags")
            parsed = _PARSED if add.get("stats") is not None else {"partitionValues_parsed"}
            plain = {name: value for name, value in add.items() if value is not None and name not in parsed}
            yield plain | {"partitionValues": partition} | ({} if tags is None else {"tags": dict(tags)})
