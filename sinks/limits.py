"""What a sink's columns can hold, checked over record batches before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.message import storable_text

_VALUE_SHOWN_MAX = 80
_FIRST_DAY: Final = date.min.toordinal() - date(1970, 1, 1).toordinal()
_DAY_AFTER: Final = date.max.toordinal() - date(1970, 1, 1).toordinal() + 1
_TICKS_A_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class ColumnLimit:
    """One column: what its values must be. `type_name` is how the sink calls the column's type, for messages."""

    name: str
    type_name: str
    not_null: bool = False
    no_nul: bool = False
    chars_max: int | None = None
    bytes_max: int | None = None
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """A table's columns, for `check`. Picklable; knows no connection.

    Whatever the table, no sink and no state takes text that is not UTF-8, a decimal with more digits than its type has, or
    a date or timestamp outside of the years 1 to 9999, which are all that Spark's types and Python's have. A function over
    record batches can make such values: they would be staged, and refused in the middle of the commit, or stored.
    """

    columns: tuple[ColumnLimit, ...] = ()

    def check(self, rows: pa.RecordBatch) -> list[tuple[int, str]]:
        """The rows that could not be held: row number, and column, value and reason; each row once, in row order."""
        found: dict[int, str] = {}
        limits = {limit.name: limit for limit in self.columns}
        for field, column in zip(rows.schema, rows.columns, strict=True):
            limit = limits.get(field.name) or ColumnLimit(field.name, str(field.type))
            for row, message in _violations(limit, column):
                found.setdefault(row, message)
        return sorted(found.items())


def _violations(limit: ColumnLimit, column: pa.Array) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    if limit.not_null and column.null_count:
        found += [(row, f"column {limit.name!r}: NULL, and the column takes none") for row in _true(pc.is_null(column))]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        found += _text_violations(limit, column)
    if limit.bytes_max is not None and _sized(column.type):
        found += _size_violations(limit, column, limit.bytes_max)
    if (limit.low is not None or limit.high is not None) and pa.types.is_integer(column.type):
        found += _range_violations(limit, column)
    if pa.types.is_decimal(column.type):
        found += [
            (row, f"column {limit.name!r}: {_value(column, row)} has too many digits for {limit.type_name}")
            for row in _invalid(column)
        ]
    if pa.types.is_date32(column.type) or pa.types.is_timestamp(column.type):
        found += _year_violations(limit, column)
    return found


def _invalid(column: pa.Array, start: int = 0) -> list[int]:
    """The rows that are no values of the column's type, by halves."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return [start]
        half = len(column) // 2
        return _invalid(column.slice(0, half), start) + _invalid(column.slice(half), start + half)
    return []


def _year_violations(limit: ColumnLimit, column: pa.Array) -> list[tuple[int, str]]:
    kind = column.type
    if pa.types.is_date32(kind):
        numbers, a_day, unit = column.view(pa.int32()), 1, "days"
    else:
        unit = kind.unit
        numbers, a_day = column.view(pa.int64()), 86_400 * _TICKS_A_SECOND[unit]
    bounds = ((_FIRST_DAY * a_day, pc.less), (_DAY_AFTER * a_day - 1, pc.greater))
    return [
        (
            row,
            f"column {limit.name!r}: {numbers[row].as_py()} {unit} from 1970 is outside of the years 1 to 9999, all that "
            f"{limit.type_name} holds",
        )
        for bound, beyond in bounds
        if _fits(bound, numbers.type)
        for row in _true(beyond(numbers, pa.scalar(bound, numbers.type)))
    ]


def _text_violations(limit: ColumnLimit, column: pa.Array) -> list[tuple[int, str]]:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        broken = _broken_utf8(column)
        found = [(row, f"column {limit.name!r}: {shown!r} is not UTF-8") for row, shown in broken]
        whole = pc.if_else(
            pa.array(_mask(len(column), [row for row, _ in broken])), pa.scalar(None, column.type), column
        )
        return found + _text_violations(limit, whole) if broken else found
    found = []
    if limit.no_nul:
        for row in _true(pc.match_substring(column, "\0")):
            found.append(
                (
                    row,
                    f"column {limit.name!r}: {_value(column, row)} has a NUL, and {limit.type_name} holds none",
                )
            )
    if limit.chars_max is not None:
        for row in _true(pc.greater(pc.utf8_length(column), limit.chars_max)):
            length = len(column[row].as_py())
            found.append(
                (
                    row,
                    f"column {limit.name!r}: {_value(column, row)} has {length} characters, too many for "
                    f"{limit.type_name}",
                )
            )
    return found


def _sized(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _size_violations(limit: ColumnLimit, column: pa.Array, bytes_max: int) -> list[tuple[int, str]]:
    lengths = pc.binary_length(column)
    return [
        (
            row,
            f"column {limit.name!r}: a value of {lengths[row].as_py()} bytes, and as a key {limit.type_name} takes at most "
            f"{bytes_max}",
        )
        for row in _true(pc.greater(lengths, bytes_max))
    ]


def _range_violations(limit: ColumnLimit, column: pa.Array) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for bound, beyond in ((limit.low, pc.less), (limit.high, pc.greater)):
        if bound is not None and _fits(bound, column.type):
            for row in _true(beyond(column, pa.scalar(bound, column.type))):
                found.append(
                    (row, f"column {limit.name!r}: {_value(column, row)} is out of range for {limit.type_name}")
                )
    return found


def _fits(bound: int, kind: pa.DataType) -> bool:
    """Whether the column's type reaches the bound at all; where it does not, no value is beyond it."""
    try:
        pa.scalar(bound, kind)
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


def _broken_utf8(column: pa.Array) -> list[tuple[int, bytes]]:
    """Only where validation has failed: looks at each value."""
    binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
    broken: list[tuple[int, bytes]] = []
    for row, value in enumerate(column.cast(binary).to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            broken.append((row, (value or b"")[:_VALUE_SHOWN_MAX]))
    return broken


def _mask(length: int, rows: Sequence[int]) -> list[bool]:
    mask = [False] * length
    for row in rows:
        mask[row] = True
    return mask


def _true(mask: pa.Array) -> list[int]:
    rows: list[int] = pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist()
    return rows


def _value(column: pa.Array, row: int) -> str:
    return repr(storable_text(column[row].as_py(), _VALUE_SHOWN_MAX))
