"""What a sink's columns can hold, checked over record batches before anything is written. The values inside a nested column
are looked at part by part (`NestedLevel`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import pc
from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import PreparedFile, TaskWriter


@dataclass(frozen=True, slots=True)
class NestedLevel:
    """One level of a nested column, flat. `path` begins behind the column's name: ``.x`` of a struct, ``[]`` of an array,
    ``{key}`` and ``{value}`` of a map.

    `rows` has the column's row of each value. `lacking` has the rows in which a value is NULL that must not be: in a field
    that is declared NOT NULL, or the key of a map.
    """

    path: str
    values: pa.Array
    rows: npt.NDArray[np.int64]
    lacking: npt.NDArray[np.int64]


def is_list(kind: pa.DataType) -> bool:
    """Whether it is an array of any of Arrow's layouts that Parquet can hold; a map is none."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_string(kind: pa.DataType) -> bool:
    """Whether it is text of any of Arrow's layouts, a dictionary excepted."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether it is bytes of any of Arrow's layouts."""
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def plain(column: pa.Array) -> pa.Array:
    """The column in a layout that every function of Arrow takes: without dictionary, extension type and views."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.large_binary())
    return column


def parts_of(column: pa.Array) -> Iterator[NestedLevel]:
    """The parts of a nested column, the outer ones first; none of a flat one. NULL rows have no parts."""
    yield from _inside(column, "", np.arange(len(column)))


def as_list(column: pa.Array) -> pa.Array:
    """A map as an array of its entries, structs of key and value."""
    kind = column.type
    return column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))


def parents_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """For each value of a flattened array, the row that it belongs to."""
    return np.repeat(np.arange(len(column)), lengths_of(column))


def lengths_of(column: pa.Array) -> npt.NDArray[np.int64]:
    """The number of values in each row of an array; 0 where it is NULL."""
    lengths: npt.NDArray[np.int64] = (
        pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def _inside(column: pa.Array, path: str, rows: npt.NDArray[np.int64]) -> Iterator[NestedLevel]:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _inside(column.storage, path, rows)
    elif pa.types.is_struct(kind):
        there = pc.is_valid(column)
        for i, child in enumerate(column.flatten()):
            field = kind.field(i)
            missing = None if field.nullable else pc.and_(there, pc.is_null(child))
            yield from _part(child, f"{path}.{field.name}", rows, missing)
    elif is_list(kind):
        values = column.flatten()
        missing = None if kind.value_field.nullable else pc.is_null(values)
        yield from _part(values, f"{path}[]", rows[parents_of(column)], missing)
    elif pa.types.is_map(kind):
        entries = as_list(column)
        keys, items = entries.flatten().flatten()
        inner = rows[parents_of(entries)]
        yield from _part(keys, f"{path}{{key}}", inner, pc.is_null(keys))
        yield from _part(items, f"{path}{{value}}", inner, None if kind.item_field.nullable else pc.is_null(items))


def _part(values: pa.Array, path: str, rows: npt.NDArray[np.int64], missing: pa.Array | None) -> Iterator[NestedLevel]:
    lacking = rows[:0] if missing is None else rows[missing.to_numpy(zero_copy_only=False)]
    yield NestedLevel(path, values, rows, lacking)
    yield from _inside(values, path, rows)


def repeated_keys(column: pa.Array) -> npt.NDArray[np.int64]:
    """The rows of a map in which a key comes more than once; keys that are nested themselves are not looked at."""
    entries = as_list(column)
    keys, parents = plain(entries.flatten().field(0)), parents_of(entries)
    if not len(keys) or pa.types.is_nested(keys.type):
        return parents[:0]
    counted = pa.table({"row": parents, "key": keys}).group_by(["row", "key"]).aggregate([([], "count_all")])
    if counted.num_rows == len(keys):
        return parents[:0]
    found: npt.NDArray[np.int64] = np.unique(
        counted.filter(pc.greater(counted.column("count_all"), 1)).column("row").to_numpy()
    )
    return found


_VALUE_SHOWN_MAX = 80
_NULLS_IN_PATHS: Final = ("", "__HIVE_DEFAULT_PARTITION__")
_FIRST_DAY: Final = date.min.toordinal() - date(1970, 1, 1).toordinal()
_DAY_AFTER: Final = date.max.toordinal() - date(1970, 1, 1).toordinal() + 1
_TICKS_A_SECOND: Final = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class ColumnLimit:
    """What the values of one column must be. `type_name` is the sink's name of the column's type, for messages.

    `no_nul`: text holds no NUL character. `path_bytes_max`: text and bytes name a folder, in so many bytes at most once they
    are percent-encoded; see `_path_violations`; and decimals with a scale are not below zero. `chars_max` bounds text,
    `bytes_max` text and bytes, `low` and `high` integers. `step_us` divides timestamps. `pattern`: a regular expression that
    text has to match; `form` says what it asks beyond the type; `may_grow`: it lists what the store takes now, and this may
    come to be more. All but `not_null`, `path_bytes_max`, `bytes_max` and `step_us` are asked of the values inside a nested
    column, too.
    """

    name: str
    type_name: str
    not_null: bool = False
    no_nul: bool = False
    path_bytes_max: int | None = None
    chars_max: int | None = None
    bytes_max: int | None = None
    low: int | None = None
    high: int | None = None
    pattern: str | None = None
    form: str = ""
    may_grow: bool = False
    step_us: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a table's columns. Picklable; holds no connection.

    Whatever the table, no sink and no state takes text that is not UTF-8, a decimal with more digits than its type has, a
    date or timestamp outside of the years 1 to 9999, which are all that the types of Spark and Python hold, NULL where a
    field inside of a struct, an array or a map is NOT NULL, or a map with a key twice. A function over record batches can
    make such values: without this check they would be staged, and then stored, or refused in the middle of the commit.
    """

    columns: tuple[ColumnLimit, ...] = ()

    def check(self, rows: pa.RecordBatch) -> list[tuple[int, str]]:
        """The rows that cannot be held, each once and in row order: row number; column, value and reason."""
        found: dict[int, str] = {}
        for _, row, text in self._all(rows, rows.schema.names):
            found.setdefault(row, text)
        return sorted(found.items())

    def check_required(self, rows: pa.RecordBatch) -> list[tuple[int, str]]:
        """The same of the columns whose values cannot be discarded: those that take no NULL."""
        required = {limit.name for limit in self.columns if limit.not_null}
        found: dict[int, str] = {}
        for _, row, text in self._all(rows, [f.name for f in rows.schema if f.name in required or not f.nullable]):
            found.setdefault(row, text)
        return sorted(found.items())

    def without_misfits(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[str, int]]:
        """The rows with NULL for each value that its column cannot hold, and how many of these each column has.

        `check_required` has passed: columns that take no NULL have none.
        """
        misfits: dict[str, set[int]] = {}
        for name, row, _ in self._all(rows, rows.schema.names):
            misfits.setdefault(name, set()).add(row)
        if not misfits:
            return rows, {}
        columns = list(rows.columns)
        for name, found in misfits.items():
            at = rows.schema.get_field_index(name)
            kept = np.arange(rows.num_rows)
            mask = np.zeros(rows.num_rows, bool)
            mask[list(found)] = True
            columns[at] = columns[at].take(pa.array(kept, mask=mask))  # any type has it, and it looks at no value
        made = pa.RecordBatch.from_arrays(columns, schema=rows.schema)
        return made, {name: len(found) for name, found in misfits.items()}

    def _all(self, rows: pa.RecordBatch, names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
        """Column, row and reason of each value of these columns that cannot be held; a row may come several times."""
        limits = {limit.name: limit for limit in self.columns}
        for name in names:
            column = rows.column(name)
            limit = limits.get(name) or ColumnLimit(name, str(column.type))
            for row, reason in _violations(limit, column):
                yield name, row, f"column {name!r}: {reason}"
            if pa.types.is_nested(column.type):
                for row, path, reason in _nested_violations(limit, column):
                    yield name, row, f"column {name!r}: {name}{path}: {reason}"


def _nested_violations(limit: ColumnLimit, column: pa.Array) -> Iterator[tuple[int, str, str]]:
    """Row number, path and reason of each value inside a nested column that it cannot hold."""
    inner = replace(limit, not_null=False, path_bytes_max=None, bytes_max=None, step_us=1)
    if pa.types.is_map(column.type):
        yield from ((row, "", "a key comes more than once") for row in repeated_keys(column).tolist())
    for part in parts_of(column):
        yield from ((row, part.path, "NULL, and it is NOT NULL") for row in part.lacking.tolist())
        yield from ((int(part.rows[at]), part.path, reason) for at, reason in _violations(inner, part.values))
        if pa.types.is_map(part.values.type):
            for at in repeated_keys(part.values).tolist():
                yield int(part.rows[at]), part.path, "a key comes more than once"


def _violations(limit: ColumnLimit, column: pa.Array) -> Iterator[tuple[int, str]]:
    """Row number and reason of each value that the column cannot hold; a row may come several times."""
    if limit.not_null and column.null_count:
        yield from ((row, "NULL, and the column takes none") for row in _true(pc.is_null(column)))
    column = plain(column)
    kind = column.type
    if limit.path_bytes_max is not None and is_bytes(kind):
        column = column.cast(pa.binary()).view(pa.string())
        kind = column.type
    if is_string(kind):
        broken = _broken_utf8(column)
        yield from ((row, f"{shown!r} is not UTF-8") for row, shown in broken.items())
        if broken:
            there = pa.array(row in broken for row in range(len(column)))
            column = pc.if_else(there, pa.scalar(None, kind), column)
        yield from _text_violations(limit, column)
    if limit.bytes_max is not None and (is_string(kind) or is_bytes(kind)):
        lengths = pc.binary_length(column)
        for row in _true(pc.greater(lengths, limit.bytes_max)):
            yield (
                row,
                f"a value of {lengths[row]} bytes, and as a key {limit.type_name} takes at most {limit.bytes_max}",
            )
    if pa.types.is_integer(kind):
        for row in _beyond(column, limit.low, limit.high):
            yield row, f"{_value(column, row)} is out of range for {limit.type_name}"
    if pa.types.is_decimal(kind):
        for row in _invalid(column):
            yield row, f"{_value(column, row)} has too many digits for {limit.type_name}"
        if limit.path_bytes_max is not None and kind.scale > 0:
            for row in _true(pc.less(column, pa.scalar(Decimal(0), kind))):
                yield row, f"{_value(column, row)} is below zero: delta-rs cannot read that as {limit.type_name}"
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        yield from _year_violations(limit, column)


def _invalid(column: pa.Array, start: int = 0) -> list[int]:
    """The rows that are no values of the column's type, found by bisection."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return [start]
        half = len(column) // 2
        return _invalid(column.slice(0, half), start) + _invalid(column.slice(half), start + half)
    return []


def _year_violations(limit: ColumnLimit, column: pa.Array) -> Iterator[tuple[int, str]]:
    kind = column.type
    if pa.types.is_date32(kind):
        numbers, a_day, unit = column.view(pa.int32()), 1, "days"
    else:
        unit = kind.unit
        numbers, a_day = column.view(pa.int64()), 86_400 * _TICKS_A_SECOND[unit]
    if limit.step_us > 1 and unit == "us":
        for row in np.flatnonzero(pc.fill_null(numbers, 0).to_numpy() % limit.step_us).tolist():
            yield (
                row,
                f"{numbers[row]} us from 1970 is rounded by {limit.type_name}, and two keys or times would be one",
            )
    for row in _beyond(numbers, _FIRST_DAY * a_day, _DAY_AFTER * a_day - 1):
        yield (
            row,
            f"{numbers[row]} {unit} from 1970 is outside of the years 1 to 9999, all that {limit.type_name} holds",
        )


def _text_violations(limit: ColumnLimit, column: pa.Array) -> Iterator[tuple[int, str]]:
    if limit.no_nul:
        for row in _true(pc.match_substring(column, "\0")):
            yield row, f"{_value(column, row)} has a NUL, and {limit.type_name} holds none"
    if limit.path_bytes_max is not None:
        yield from _path_violations(limit, limit.path_bytes_max, column)
    if limit.chars_max is not None:
        lengths = pc.utf8_length(column)
        for row in _true(pc.greater(lengths, limit.chars_max)):
            yield row, f"{_value(column, row)} has {lengths[row]} characters, too many for {limit.type_name}"
    if limit.pattern is not None:
        for row in _true(pc.invert(pc.match_substring_regex(column, limit.pattern))):
            yield row, f"{_value(column, row)} is no {limit.type_name}{limit.form}"


def _path_violations(limit: ColumnLimit, most: int, column: pa.Array) -> Iterator[tuple[int, str]]:
    """Text that is no part of a path, or that stands for NULL there."""
    for row in _true(pc.is_in(column, pa.array(_NULLS_IN_PATHS, column.type))):
        yield row, f"{_value(column, row)}, which {limit.type_name} stores as NULL"
    for row in _true(pc.match_substring(column, "\0")):
        yield row, f"{_value(column, row)} has a NUL, and {limit.type_name} is part of a file's path"
    plain_bytes = pc.count_substring_regex(column, "[A-Za-z0-9._~-]")
    lengths = pc.subtract(pc.multiply(pc.binary_length(column), 3), pc.multiply(plain_bytes, 2))
    for row in _true(pc.greater(lengths, most)):
        yield (
            row,
            f"{_value(column, row)} takes {lengths[row]} bytes in a file's path, percent-encoded, and {limit.type_name} "
            f"takes at most {most}",
        )


def _beyond(column: pa.Array, low: int | None, high: int | None) -> list[int]:
    """The rows of integers below `low` or above `high`."""
    rows: list[int] = []
    for bound, beyond in ((low, pc.less), (high, pc.greater)):
        if bound is not None and _fits(bound, column.type):
            rows += _true(beyond(column, pa.scalar(bound, column.type)))
    return rows


def _fits(bound: int, kind: pa.DataType) -> bool:
    """Whether the column's type reaches the bound at all; where it does not, no value is beyond it."""
    try:
        pa.scalar(bound, kind)
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


def _broken_utf8(column: pa.Array) -> dict[int, bytes]:
    """The rows that are not UTF-8, with the beginning of their bytes. Only where there are any is each value looked at."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        pass
    else:
        return {}
    binary = pa.binary() if pa.types.is_string(column.type) else pa.large_binary()
    broken: dict[int, bytes] = {}
    for row, value in enumerate(column.cast(binary).to_pylist()):
        try:
            (value or b"").decode()
        except UnicodeDecodeError:
            broken[row] = value[:_VALUE_SHOWN_MAX]
    return broken


def _true(mask: pa.Array) -> list[int]:
    rows: list[int] = pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist()
    return rows


def _value(column: pa.Array, row: int) -> str:
    return repr(storable_text(column[row].as_py(), _VALUE_SHOWN_MAX))


class DiscardingWriter:
    """A task's writer that writes NULL for what the limits do not allow; the first file says how often, by column."""

    def __init__(self, inner: TaskWriter, limits: Limits) -> None:
        self._inner = inner
        self._limits = limits
        self._counts = Counter[str]()

    def write(self, rows: pa.RecordBatch) -> None:
        """Write the rows, whose required columns were checked."""
        kept, counts = self._limits.without_misfits(rows)
        self._counts.update(counts)
        self._inner.write(kept)

    def close(self) -> Sequence[PreparedFile]:
        """Finish the files."""
        files = list(self._inner.close())
        if files and self._counts:
            files[0] = replace(files[0], discarded=json.dumps(dict(sorted(self._counts.items()))))
        return files

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        self._inner.discard()


def discarded_in(files: Iterable[PreparedFile]) -> dict[str, int]:
    """How many values of each column were discarded in these files."""
    total = Counter[str]()
    for file in files:
        total.update(json.loads(file.discarded))
    return dict(sorted(total.items()))
