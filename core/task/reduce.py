"""Groups of rows by key, whose values are compared exactly and never by a hash alone; and reductions of columns by group:
counts, exact sums, extremes, distinct values and users' combiners, over whole columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import JobFailed
from stormproof.core.contract.fold import End, row_of_groups, sets_of_groups
from stormproof.core.graph.aggregation import DECIMAL_DIGITS_MAX, GroupBy
from stormproof.core.user_code.functions import CAUGHT, blame, column_of, copied, copies_of, no_rows


@dataclass(frozen=True, slots=True)
class Members:
    """The rows of each group: `rows` has them group by group, and `starts` where each group begins."""

    rows: Rows
    starts: Rows
    group_of_row: Rows

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.starts) - 1

    def of_nothing(self) -> Members:
        """One group without rows."""
        return Members(self.rows, np.zeros(2, np.int64), self.group_of_row)

    @classmethod
    def of(cls, lists: pa.ChunkedArray, number: int) -> Members:
        """The groups of `number` rows, from a list of row numbers for each group."""
        column = lists.combine_chunks()
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        rows = column.flatten().to_numpy()
        group_of_row = np.empty(number, np.int64)
        group_of_row[rows] = np.repeat(np.arange(len(lengths)), lengths)
        return cls(rows, np.concatenate(([0], np.cumsum(lengths))), group_of_row)


def members_of(rows: pa.RecordBatch, keys: Sequence[str]) -> tuple[pa.Table, Members]:
    """The distinct keys, in order of first appearance, and the rows of each."""
    columns = [rows.column(k) for k in keys] or [pa.repeat(0, rows.num_rows)]
    names = [f"k{i}" for i in range(len(columns))]
    table = pa.Table.from_arrays([*columns, pa.array(np.arange(rows.num_rows))], names=[*names, "row"])
    grouped = table.group_by(names, use_threads=False).aggregate([("row", "list")])
    found = [grouped.column(f"k{i}") for i in range(len(keys))]
    schema = pa.schema([rows.schema.field(k) for k in keys])
    return pa.Table.from_arrays(found, schema=schema), Members.of(grouped.column("row_list"), rows.num_rows)


def in_key_order(keys: Sequence[str], table: pa.Table) -> pa.RecordBatch:
    """The rows sorted by key, as one batch."""
    if table.num_rows > 1 and keys:
        order = pc.sort_indices(table, sort_keys=[(key, "ascending") for key in keys])
        table = table.take(order)
    batches = table.combine_chunks().to_batches()
    if not batches:
        return no_rows(table.schema)
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def rows_with_keys(
    rows: pa.RecordBatch, keys: Sequence[str], wanted: pa.RecordBatch, numbers: Iterable[int]
) -> list[tuple[int, int]]:
    """Rows of `rows` whose key is that of one of the rows `numbers` of `wanted`, as pairs (row, number of that row).

    Columns are compared as a whole first, so that only rows with a wanted value in every column are compared one by one.
    """
    chosen_numbers = list(numbers)
    if not chosen_numbers:
        return []
    chosen = wanted.take(pa.array(chosen_numbers, pa.int64()))
    maybe = np.ones(rows.num_rows, np.bool_)
    for key in keys:
        maybe &= pc.is_in(rows.column(key), value_set=chosen.column(key)).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(maybe)
    bad = dict(zip(_keys(chosen, keys), chosen_numbers, strict=True))
    there = _keys(rows.select(list(keys)).take(pa.array(places)), keys)
    return [(row, bad[key]) for row, key in zip(places.tolist(), there, strict=True) if key in bad]


def _keys(rows: pa.RecordBatch, keys: Sequence[str]) -> Iterator[tuple[object, ...]]:
    return zip(*(rows.column(key).to_pylist() for key in keys), strict=True)


# ---- the reductions


_INT64_LIMIT: Final = 1 << 63
_SUM_ALL: Final = pc.ScalarAggregateOptions(min_count=0)


class How(StrEnum):
    """How one column is reduced by group."""

    ROWS = "rows"
    VALUES = "values"
    """The number of values that are not NULL."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SET = "set"
    """The distinct values, as a list."""
    UNION = "union"
    """The distinct values of lists."""
    LEAST = "least"
    """The least distinct values, as a sorted list."""
    LEAST_OF_SETS = "least of sets"
    """The same of lists."""
    FIRST = "first"
    """The first row of a struct, by its fields; see `ByOrder`."""
    LAST = "last"
    FOLD = "fold"
    """A user's combiner."""


_OF_MEMBERS: Final = frozenset(
    {
        *(How.SET, How.UNION, How.LEAST, How.LEAST_OF_SETS),
        *(How.FIRST, How.LAST, How.FOLD),
    }
)
"""How columns are reduced of which the rows of each group have to be known."""


@dataclass(frozen=True, slots=True)
class Request:
    """A column to reduce by group, into a column of `field`; None where rows are counted."""

    how: How
    column: pa.Array | pa.ChunkedArray | None
    field: pa.Field
    at_most: int | None = None
    """How many values the least are."""
    code: Any = None


def reduced(
    group: GroupBy, keys: Sequence[pa.Array | pa.ChunkedArray], requests: Sequence[Request], rows: int
) -> pa.Table:
    """One row a key, with a column for each request; keys are in order of first appearance.

    Raises:
        JobFailed: a sum does not fit its type, or a user's `combine` raised.
    """
    columns, names = list(keys), [f"k{i}" for i in range(len(keys))]
    if not columns:
        columns, names = [pa.repeat(0, rows)], ["k"]
    key_names = list(names)
    calls: list[tuple[str | list[str], str, object]] = []
    made: list[tuple[str, ...]] = []
    listed = any(r.how in _OF_MEMBERS for r in requests)
    if listed:
        columns.append(pa.array(np.arange(rows)))
        names.append("row")
        calls.append(("row", "list", None))
    for i, request in enumerate(requests):
        name = f"v{i}"
        match request.how:
            case How.ROWS:
                calls.append(([], "count_all", None))
                made.append(("count_all",))
                continue
            case How.SUM:
                parts = _summands(request, rows)
                options: object = _SUM_ALL
            case How.VALUES:
                parts, options = [request.column], pc.CountOptions(mode="only_valid")
            case How.MIN | How.MAX:
                parts, options = [request.column], None
            case _:
                assert request.how in _OF_MEMBERS
                made.append(())
                continue
        function = "count" if request.how is How.VALUES else str(request.how)
        columns += parts
        names += [f"{name}_{j}" for j in range(len(parts))]
        calls += [(f"{name}_{j}", function, options) for j in range(len(parts))]
        made.append(tuple(f"{name}_{j}_{function}" for j in range(len(parts))))
    grouped = (
        pa.Table.from_arrays(columns, names=names)
        .group_by(key_names, use_threads=False)  # threads would make the order of keys random
        .aggregate(calls)
    )
    members = Members.of(grouped.column("row_list"), rows) if listed else None
    arrays = [grouped.column(f"k{i}") for i in range(len(keys))]
    for request, parts_made in zip(requests, made, strict=True):
        if members is not None and not parts_made:
            arrays.append(_listed(group.component, request, members))
            continue
        sums = [grouped.column(part) for part in parts_made]
        total = sums[0] if len(sums) == 1 else _joined(group.component, sums[0], sums[1], request.field.name)
        try:
            arrays.append(pc.cast(total, request.field.type))
        except pa.ArrowInvalid as error:
            raise _too_large(group.component, request.field.name, f"{DECIMAL_DIGITS_MAX} digits") from error
    fields = [group.schema.field(k) for k in group.keys] + [r.field for r in requests]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _summands(request: Request, rows: int) -> list[pa.Array | pa.ChunkedArray]:
    typed = pc.cast(request.column, request.field.type)
    if pa.types.is_integer(typed.type) and _may_overflow(typed, rows):
        # The upper and the lower 32 bits are summed apart: neither sum can overflow, and together they are the sum.
        return [pc.shift_right(typed, 32), pc.bit_wise_and(typed, 0xFFFFFFFF)]
    if pa.types.is_decimal(typed.type) and _may_be_long(typed):  # Arrow's own sum of 128 bits wraps
        return [pc.cast(typed, pa.decimal256(2 * DECIMAL_DIGITS_MAX, typed.type.scale))]
    return [typed]


def _listed(component: str, request: Request, members: Members) -> pa.Array:
    column = request.column
    assert column is not None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    match request.how:
        case How.SET:
            return _sets(members.group_of_row, column, members.groups)
        case How.UNION:
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            return _sets(np.repeat(members.group_of_row, lengths), column.flatten(), members.groups)
        case How.LEAST:
            return sets_of_groups(members.group_of_row, column, members.groups, request.at_most)
        case How.LEAST_OF_SETS:
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            group_of_value = np.repeat(members.group_of_row, lengths)
            return sets_of_groups(group_of_value, column.flatten(), members.groups, request.at_most)
        case How.FIRST | How.LAST:
            chosen = row_of_groups(members.group_of_row, column.flatten(), End(request.how.value))
            return column.take(pa.array(chosen))
        case _:
            return _folded(component, request, column.take(pa.array(members.rows)).to_pylist(), members)


def _folded(component: str, request: Request, values: list[object], members: Members) -> pa.Array:
    combine, folded, copies = request.code.combine, list[object](), copies_of(pa.schema([request.field]))
    try:
        for start, stop in zip(members.starts[:-1].tolist(), members.starts[1:].tolist(), strict=True):
            value = values[start]
            for other in values[start + 1 : stop]:
                value = combine(value, other)
            folded.append(copied(value, copies))
    except CAUGHT as error:
        raise failed_for_group(component, f"{type(request.code).__name__}.combine", blame(error)[1]) from error
    made, wrong = column_of(folded, request.field)
    if wrong:
        raise failed_for_group(component, f"{type(request.code).__name__}.combine", wrong[0][1])
    return made


def _joined(component: str, upper: pa.ChunkedArray, lower: pa.ChunkedArray, output: str) -> pa.Array:
    high, low = upper.to_numpy(), lower.to_numpy()
    high = high + (low >> 32)
    if len(high) and (int(high.max()) >= 1 << 31 or int(high.min()) < -(1 << 31)):
        raise _too_large(component, output, _INTEGER)
    return pa.array((high << 32) | (low & 0xFFFFFFFF), pa.int64())


_INTEGER: Final = "64 bits"


def _may_be_long(column: pa.Array | pa.ChunkedArray) -> bool:
    total = pc.sum(pc.abs(pc.cast(column, pa.float64()))).as_py() or 0.0
    return bool(total >= 10.0 ** (DECIMAL_DIGITS_MAX - column.type.scale) / 2)


def _too_large(component: str, output: str, room: str) -> JobFailed:
    column = output.partition("\x00")[0]
    return JobFailed(
        f"component {component!r}: a sum in column {column!r} does not fit into {room}; "
        f"sum a {'decimal' if room == _INTEGER else 'double'} instead",
        component=component,
        column=column,
    )


def failed_for_group(component: str, what: str, text: str) -> JobFailed:
    """The error of a job in which user code failed for a whole group, so that no single message is to blame."""
    return JobFailed(
        f"component {component!r}: {what} failed for a group, which belongs to no single message: {text}",
        component=component,
    )


def _sets(group: Rows, values: pa.Array, groups: int) -> pa.Array:
    """The distinct values of each group as a list, without NULL."""
    table = pa.table({"g": pa.array(group), "v": values})
    if values.null_count:
        table = table.filter(values.is_valid())
    distinct = table.group_by(["g", "v"], use_threads=False).aggregate([]).sort_by("g")
    bounds = np.searchsorted(distinct.column("g").to_numpy(), np.arange(groups + 1)).astype(np.int32)
    flat = distinct.column("v").combine_chunks()
    return pa.ListArray.from_arrays(pa.array(bounds), flat)


def _may_overflow(column: pa.Array | pa.ChunkedArray, rows: int) -> bool:
    low, high = pc.min_max(column).as_py().values()
    return low is not None and max(-low, high) * max(rows, 1) >= _INT64_LIMIT
