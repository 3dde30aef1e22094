"""Delta's statistics of a file that is being written: with them a reader skips the files that hold nothing it looks for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import pc
from stormproof.sinks.rows.limits import is_string, plain

COLUMNS_MAX: Final = 32
"""Delta's own default for the number of leading columns with statistics; a field of a struct counts as a column."""

TEXT_MAX: Final = 32
"""Longer strings are cut in statistics, as Delta does."""

_HIGHEST_CHARACTER: Final = "\U0010ffff"
_MILLISECOND: Final = timedelta(milliseconds=1)
_CUT: Final = _MILLISECOND - timedelta.resolution
_LAST: Final = datetime.max - _CUT  # noqa: DTZ901 - it is compared with timestamps without a zone

Edge: TypeAlias = str | int | float | Decimal | date | datetime


class FileStatistics:
    """Delta's statistics of one file, gathered batch by batch.

    Minimum and maximum are kept for columns of integers, decimals, floats, strings, dates, timestamps and booleans, and for
    such fields of structs; null counts for these and for bytes.

    Guarantee:
        No value of the file is below its minimum or above its maximum. Strings are cut to 32 characters and timestamps to
        milliseconds, downwards for the minimum and upwards for the maximum.

    A file with a NaN has null counts alone: NaN is above every number to Spark, and no number to Arrow. So has one with a
    value that Python cannot represent. One missing bound beside others would not do: a dataset of delta-rs (`to_pandas` with
    filters) takes it for "no value matches", and would lose rows.
    """

    def __init__(self, schema: pa.Schema, columns_max: int | None = COLUMNS_MAX) -> None:
        self.rows = 0
        leaves = (leaf for i, f in enumerate(schema) for leaf in _leaves(f, i))
        self._leaves = [*islice(leaves, columns_max)]

    def add(self, rows: pa.RecordBatch) -> None:
        """Take one batch into account."""
        self.rows += rows.num_rows
        for leaf in self._leaves:
            leaf.add(rows)

    def to_json(self) -> str:
        """The `stats` of an add action."""
        nulls = _tree((leaf.names, str(leaf.nulls)) for leaf in self._leaves)
        if any(leaf.boundless for leaf in self._leaves):
            return f'{{"numRecords":{self.rows},"nullCount":{nulls}}}'
        found = [leaf for leaf in self._leaves if leaf.low is not None]
        low = _tree((leaf.names, _shown(_lower(leaf.low))) for leaf in found)
        high = _tree((leaf.names, _shown(_upper(leaf.high))) for leaf in found)
        return f'{{"numRecords":{self.rows},"minValues":{low},"maxValues":{high},"nullCount":{nulls}}}'

    def excluded_by(self, statistics: str) -> list[str]:
        """The columns, and fields of structs, of which a file's statistics exclude a value or a NULL that was found.

        A timestamp's bounds are of the millisecond, as Delta has it: its greatest value is less than one above.
        """
        told: dict[str, Any] = json.loads(statistics or "{}", parse_float=Decimal)
        low, high, nulls = (told.get(name) or {} for name in ("minValues", "maxValues", "nullCount"))
        return [
            leaf.shown for leaf in self._leaves if leaf.is_outside(low, high) or leaf.counts_wrong(nulls, self.rows)
        ]


@dataclass(slots=True)
class _Leaf:
    """A column, or a field of a struct at any depth: where it is, and what was found of it."""

    names: tuple[str, ...]
    indices: tuple[int, ...]
    ranged: bool
    kind: pa.DataType
    nulls: int = 0
    low: Any = None
    high: Any = None
    boundless: bool = False
    has_nan: bool = False

    @property
    def shown(self) -> str:
        """Its name, for people."""
        return ".".join(self.names)

    def is_outside(self, lows: Any, highs: Any) -> bool:
        """Whether a value that was found is outside of these bounds, or they are none of its type."""
        low, high = self._told(lows), self._told(highs)
        try:
            bottom, top = (None if bound is None else _value(bound, self.kind) for bound in (low, high))
            if isinstance(top, float) and math.isnan(top):
                top = None  # NaN is above every number
            if isinstance(top, datetime):
                top = min(top, _LAST) + _CUT
        except (ValueError, TypeError, ArithmeticError):
            return not self.boundless
        if self.has_nan and top is not None:
            return True
        if self.low is None:
            return False
        least, most = _value(self.low, self.kind), _value(self.high, self.kind)
        return (bottom is not None and not bottom <= least) or (top is not None and not most <= top)

    def counts_wrong(self, counts: Any, rows: int) -> bool:
        """Whether such a number of NULLs says that there is none where there is one, or no value where there is one."""
        told = self._told(counts)
        return told is not None and ((told == 0 and self.nulls > 0) or (told >= rows > self.nulls))

    def _told(self, of: Any) -> Any:
        for name in self.names:
            of = None if of is None else of.get(name)
        return of

    def add(self, rows: pa.RecordBatch) -> None:
        column = rows.column(self.indices[0])
        if len(self.indices) > 1:
            column = pc.struct_field(column, self.indices[1:])
        nulls = column.null_count
        self.nulls += nulls
        if not self.ranged or nulls == len(column):
            return
        column = plain(column)
        if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            self.boundless = self.has_nan = True
            column = column.filter(pc.invert(pc.is_nan(column)))
            if column.null_count == len(column):
                return
        try:
            found: dict[str, Any] = pc.min_max(column).as_py()
        except (ValueError, OverflowError):  # such as a date that Python cannot represent
            self.boundless = True
            return
        self.low = found["min"] if self.low is None else min(self.low, found["min"])
        self.high = found["max"] if self.high is None else max(self.high, found["max"])


def _leaves(of: pa.Field, index: int) -> Iterator[_Leaf]:
    """The columns of a field that have statistics: itself, or those inside of it where it is a struct."""
    if pa.types.is_struct(of.type):
        for i in range(of.type.num_fields):
            for leaf in _leaves(of.type.field(i), i):
                yield _Leaf((of.name, *leaf.names), (index, *leaf.indices), leaf.ranged, leaf.kind)
    elif not pa.types.is_nested(of.type):
        yield _Leaf((of.name,), (index,), _ranged(of.type), of.type)


def _ranged(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_boolean(kind)
        or (pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz in (None, "UTC"))
        or is_string(kind)
    )


def _value(bound: Any, kind: pa.DataType) -> Any:
    """A bound or a value of a column, as what compares with others of its type."""
    if pa.types.is_floating(kind):
        return float(np.float32(bound) if pa.types.is_float32(kind) else bound)
    if pa.types.is_timestamp(kind):
        at = datetime.fromisoformat(bound) if isinstance(bound, str) else bound
        return at if at.tzinfo is None else at.astimezone(UTC).replace(tzinfo=None)
    if pa.types.is_date(kind):
        return date.fromisoformat(bound) if isinstance(bound, str) else bound
    if pa.types.is_decimal(kind) or pa.types.is_integer(kind):
        return Decimal(bound)
    return bound


def _tree(values: Iterable[tuple[tuple[str, ...], str]]) -> str:
    """Values, which are JSON already, as nested objects by their names."""
    tree: dict[str, Any] = {}
    for names, value in values:
        at = tree
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value
    return _object(tree)


def _object(tree: dict[str, Any]) -> str:
    parts = (f"{_quoted(k)}:{_object(v) if isinstance(v, dict) else v}" for k, v in tree.items())
    return f"{{{','.join(parts)}}}"


def _shown(bound: Edge) -> str:
    """A bound as JSON, as Spark writes it. Decimals have all of their digits, and no exponent."""
    match bound:
        case str():
            return _quoted(bound)
        case Decimal():
            return f"{bound:f}"
        case datetime():
            timespec = "microseconds" if bound.microsecond % 1_000 else "milliseconds"
            zone = "" if bound.tzinfo is None else "Z"
            return f'"{bound.replace(tzinfo=None).isoformat(timespec=timespec)}{zone}"'
        case date():
            return f'"{bound.isoformat()}"'
        case float() if not math.isfinite(bound):
            return '"Infinity"' if bound > 0 else '"-Infinity"'
        case _:
            return json.dumps(bound)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lower(value: Edge) -> Edge:
    match value:
        case str():
            return value[:TEXT_MAX]  # a prefix is never above the whole
        case datetime():
            return _milliseconds(value)
        case float():
            return value or -0.0  # -0.0 and 0.0 are one value here and two elsewhere
        case _:
            return value


def _upper(value: Edge) -> Edge:
    match value:
        case str():
            return _upper_text(value)
        case datetime():
            try:
                return value if value.microsecond % 1_000 == 0 else _milliseconds(value) + _MILLISECOND
            except OverflowError:  # the last millisecond of the year 9999
                return value
        case float():
            return value or 0.0
        case _:
            return value


def _upper_text(value: str) -> str:
    """The shortest prefix of at least 32 characters behind which the highest character is above what follows."""
    end = TEXT_MAX
    while end < len(value) and value[end] == _HIGHEST_CHARACTER:
        end += 1
    return value if len(value) <= end else value[:end] + _HIGHEST_CHARACTER


def _milliseconds(value: datetime) -> datetime:
    return value.replace(microsecond=value.microsecond // 1_000 * 1_000)
