"""Delta's statistics of a file that is being written: with them a reader skips the files that hold nothing it looks for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, Final

import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import Json

COLUMNS_MAX: Final = 32
"""Delta's own default for the number of leading columns with statistics."""

TEXT_MAX: Final = 32
"""Longer strings are cut in statistics, as Delta does."""

_HIGHEST_CHARACTER: Final = "\U0010ffff"


class FileStatistics:
    """Delta's statistics of one file, gathered batch by batch.

    Minimum and maximum are kept for columns of integers, strings, dates, and floats without NaN; null counts for every flat
    column. Where statistics are missing, a reader skips fewer files, and never misses a row.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = [
            (i, f.name, _ranged(f.type))
            for i, f in enumerate(schema)
            if i < COLUMNS_MAX and not pa.types.is_nested(f.type)
        ]
        self.rows = 0
        self._nulls: dict[str, int] = {name: 0 for _, name, _ in self._columns}
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._without_range: set[str] = set()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take one batch into account."""
        self.rows += rows.num_rows
        for i, name, ranged in self._columns:
            column = rows.column(i)
            self._nulls[name] += column.null_count
            if not ranged or name in self._without_range or column.null_count == len(column):
                continue
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                # NaN is above every number to Spark, and no number to Arrow.
                self._without_range.add(name)
                continue
            try:
                found: dict[str, Any] = pc.min_max(column).as_py()
            except (ValueError, OverflowError):  # such as a date that Python cannot represent
                self._without_range.add(name)
                continue
            self._low[name] = min(self._low.get(name, found["min"]), found["min"])
            self._high[name] = max(self._high.get(name, found["max"]), found["max"])

    def to_json(self) -> str:
        """The `stats` of an add action."""
        statistics = {
            "numRecords": self.rows,
            "minValues": self._edges(self._low, _lower),
            "maxValues": self._edges(self._high, _upper),
            "nullCount": self._nulls,
        }
        return json.dumps(statistics, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def _edges(self, values: Mapping[str, Any], edge: Callable[[Any], Json]) -> dict[str, Json]:
        found = {name: edge(value) for name, value in values.items() if name not in self._without_range}
        return {name: shown for name, shown in found.items() if shown is not None}


def _ranged(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


def _lower(value: str | int | float | date) -> Json:
    if isinstance(value, str):
        return value[:TEXT_MAX]  # a prefix is never above the whole
    return _edge(value, -0.0)


def _upper(value: str | int | float | date) -> Json:
    if not isinstance(value, str):
        return _edge(value, 0.0)
    if len(value) <= TEXT_MAX:
        return value
    if value[TEXT_MAX] == _HIGHEST_CHARACTER:
        return None
    return value[:TEXT_MAX] + _HIGHEST_CHARACTER


def _edge(value: int | float | date, zero: float) -> Json:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if value else zero  # -0.0 and 0.0 are one value here and two elsewhere
    return value
