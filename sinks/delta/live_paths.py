"""How a table's log spells what it says of its live files: their paths, and the values of their partitions.

A `remove` that spells a path otherwise removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

from stormproof.core.arrow_compute import pc

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
