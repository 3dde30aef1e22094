"""Groups by key: combined batch by batch before an exchange, merged after it, finished at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.compute import pc
from stormproof.core.convert import column_of
from stormproof.core.errors import JobFailed, TopologyError
from stormproof.core.graph.aggregators import UserAggregation, arguments
from stormproof.core.graph.keyhash import can_be_key
from stormproof.core.message import FailureReason
from stormproof.core.pulse import Pulse
from stormproof.core.usercode import CAUGHT, blame

COMBINE_ROWS_MAX: Final = 262_144
"""Partial rows that a combiner holds before it combines them among themselves: its memory is bounded by its keys."""

_INT64_LIMIT: Final = 1 << 63
_DECIMAL_DIGITS_MAX: Final = 38
_SUM_ALL: Final = pc.ScalarAggregateOptions(min_count=0)


class AggregationKind(StrEnum):
    """What is computed of a group, column by column."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    DISTINCT = "distinct"


class _How(StrEnum):
    """How one column is reduced by group."""

    ROWS = "rows"
    VALUES = "values"
    """The number that are not NULL."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SET = "set"
    """The distinct values, as a list."""
    UNION = "union"
    """The distinct values of lists."""
    FOLD = "fold"
    """A user's combiner."""


_COMBINED: Final[Mapping[AggregationKind, tuple[_How, ...]]] = {
    AggregationKind.COUNT: (_How.ROWS,),
    AggregationKind.SUM: (_How.SUM,),
    AggregationKind.MIN: (_How.MIN,),
    AggregationKind.MAX: (_How.MAX,),
    AggregationKind.MEAN: (_How.SUM, _How.VALUES),
    AggregationKind.DISTINCT: (_How.SET,),
}
"""How rows become partial columns."""

_MERGED: Final[Mapping[_How, _How]] = {
    _How.ROWS: _How.SUM,
    _How.VALUES: _How.SUM,
    _How.SUM: _How.SUM,
    _How.MIN: _How.MIN,
    _How.MAX: _How.MAX,
    _How.SET: _How.UNION,
    _How.FOLD: _How.FOLD,
}
"""How partial columns become fewer of their kind."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """One ready result column: `output` counts the group's rows, or is made of `field`."""

    output: str
    kind: AggregationKind
    field: str | None = None

    @property
    def combines(self) -> bool:
        """Results of parts of a group make the result of the whole."""
        return True

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind}({self.field or ''})"

    def result(self, schema: pa.Schema, component: str) -> pa.Field:
        """The result's column: counts and sums of integers are 64 bit, sums of decimals have all 38 digits.

        Raises:
            TopologyError: the field is unknown, or its type does not allow this.
        """
        if self.kind is AggregationKind.COUNT and self.field is None:
            return pa.field(self.output, pa.int64())
        if self.field not in schema.names:
            known = ", ".join(schema.names)
            verb = "sums" if self.kind is AggregationKind.SUM else f"is the {self.kind} of"
            raise TopologyError(
                f"component {component!r}: {self.output} {verb} the unknown field {self.field!r}; known: {known}",
                component=component,
                field=str(self.field),
            )
        type_ = schema.field(self.field).type
        found = self._result_type(type_)
        if found is None:
            raise TopologyError(
                f"component {component!r}: field {self.field!r} is {type_}, which has no {self._noun}",
                component=component,
                field=self.field,
            )
        return pa.field(self.output, found)

    @property
    def _noun(self) -> str:
        return "exact distinct count" if self.kind is AggregationKind.DISTINCT else str(self.kind)

    def _result_type(self, type_: pa.DataType) -> pa.DataType | None:
        match self.kind:
            case AggregationKind.COUNT:
                return pa.int64()
            case AggregationKind.SUM:
                return _sum_type(type_)
            case AggregationKind.MEAN:
                return None if _sum_type(type_) is None else pa.float64()
            case AggregationKind.DISTINCT:
                return pa.int64() if can_be_key(type_) else None
            case AggregationKind.MIN | AggregationKind.MAX:
                return type_ if has_extremes(type_) else None

    def partials(self, given: pa.Schema | None, result: pa.Field) -> list[pa.Field]:
        """The columns that travel."""
        match self.kind:
            case AggregationKind.MEAN:
                assert given is not None
                total = _sum_type(given.field(self.field).type)
                return [pa.field(f"{self.output}\x00sum", total), pa.field(f"{self.output}\x00count", pa.int64())]
            case AggregationKind.DISTINCT:
                assert given is not None
                return [pa.field(self.output, pa.list_(given.field(self.field).type))]
            case _:
                return [result]

    def finished(self, partials: Sequence[pa.ChunkedArray]) -> pa.Array | pa.ChunkedArray:
        """The result of merged partial columns."""
        match self.kind:
            case AggregationKind.MEAN:
                total, number = (pc.cast(column, pa.float64(), safe=False) for column in partials)
                return pc.divide(total, pc.if_else(pc.equal(number, 0.0), pa.scalar(None, pa.float64()), number))
            case AggregationKind.DISTINCT:
                return pc.cast(pc.list_value_length(partials[0]), pa.int64())
            case _:
                return partials[0]


def has_extremes(type_: pa.DataType) -> bool:
    """Whether values of this type have a least and a greatest one; NaN is neither where there is a number."""
    return can_be_key(type_) or pa.types.is_float32(type_) or pa.types.is_float64(type_)


def _sum_type(type_: pa.DataType) -> pa.DataType | None:
    if pa.types.is_integer(type_):
        return pa.int64()
    if pa.types.is_floating(type_):
        return pa.float64()
    if pa.types.is_decimal(type_):
        return pa.decimal128(_DECIMAL_DIGITS_MAX, type_.scale)
    return None


AnyAggregation: TypeAlias = Aggregation | UserAggregation


@dataclass(frozen=True, slots=True)
class _Request:
    """One column to reduce by group into a column of `field`; `column` None counts rows."""

    how: _How
    column: pa.Array | pa.ChunkedArray | None
    field: pa.Field
    code: Any = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows with what users' combiners made of each; the rows in `failed` hold nothing that may be used."""

    rows: pa.RecordBatch
    failed: Mapping[int, tuple[FailureReason, str]]


@dataclass(frozen=True, slots=True)
class GroupBy:
    """What is grouped by which keys into what. No keys: one group. `given` are the rows, `schema` the results.

    Where all results combine, rows are combined to partial rows, `partial`, one a key, which merge with others of their
    kind and are finished at the end.
    """

    component: str
    keys: tuple[str, ...]
    aggregations: tuple[AnyAggregation, ...]
    schema: pa.Schema
    given: pa.Schema | None = None

    @property
    def combines(self) -> bool:
        """Whether rows may be combined before they are all together."""
        return all(a.combines for a in self.aggregations)

    @property
    def partial(self) -> pa.Schema:
        """The rows that travel where they are combined before."""
        fields = [self.schema.field(k) for k in self.keys]
        for a in self.aggregations:
            fields += self._partials(a)
        return pa.schema(fields)

    def _partials(self, aggregation: AnyAggregation) -> list[pa.Field]:
        if isinstance(aggregation, Aggregation):
            return aggregation.partials(self.given, self.schema.field(aggregation.output))
        return list(aggregation.results)

    def only_combining(self) -> GroupBy:
        """The same without what does not combine; rows are prepared alike for both."""
        if self.combines:
            return self
        kept = tuple(a for a in self.aggregations if a.combines)
        fields = [self.schema.field(name) for name in (*self.keys, *(a.output for a in kept))]
        return GroupBy(self.component, self.keys, kept, pa.schema(fields), self.given)

    def prepare(self, rows: pa.RecordBatch, pulse: Pulse | None = None) -> Prepared:
        """Call `init` of users' combiners for every row; what it gives is added as a column of its own."""
        failed: dict[int, tuple[FailureReason, str]] = {}
        for a in self.aggregations:
            if not isinstance(a, UserAggregation) or not a.combines or _prepared(a) in rows.schema.names:
                continue
            values: list[object] = []
            calls: Iterable[tuple[object, ...]] = arguments([rows.column(f) for f in a.fields])
            for call in calls if pulse is None else pulse.each(list(calls)):
                try:
                    values.append(a.code.init(*call))
                except CAUGHT as error:
                    failed.setdefault(len(values), blame(error))
                    values.append(None)
            made, wrong = column_of(values, a.results.field(0).with_name(f"{type(a.code).__name__}.init"))
            for row, text in wrong:
                failed.setdefault(row, (FailureReason.ERROR, text))
            rows = rows.append_column(pa.field(_prepared(a), made.type), made)
        return Prepared(rows, failed)

    def combine(self, rows: pa.RecordBatch) -> pa.Table:
        """Prepared rows to one partial row a key. NULLs add nothing; a sum of NULLs alone is 0.

        Raises:
            JobFailed: a sum does not fit its type, or a user's `combine` raised.
        """
        requests: list[_Request] = []
        for a in self.aggregations:
            partials = self._partials(a)
            if isinstance(a, UserAggregation):
                requests.append(_Request(_How.FOLD, rows.column(_prepared(a)), partials[0], a.code))
                continue
            column = None if a.field is None else rows.column(a.field)
            for how, made in zip(_COMBINED[a.kind], partials, strict=True):
                requests.append(_Request(how, None if how is _How.ROWS else column, made))
        return self._reduced([rows.column(k) for k in self.keys], requests, rows.num_rows)

    def merge(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Partial rows to one partial row a key, in no particular order."""
        table = pa.concat_tables(parts)
        requests: list[_Request] = []
        for a in self.aggregations:
            partials = self._partials(a)
            if isinstance(a, UserAggregation):
                requests.append(_Request(_How.FOLD, table.column(partials[0].name), partials[0], a.code))
                continue
            for how, made in zip(_COMBINED[a.kind], partials, strict=True):
                requests.append(_Request(_MERGED[how], table.column(made.name), made))
        return self._reduced([table.column(k) for k in self.keys], requests, table.num_rows)

    def finish(self, partials: pa.Table) -> pa.RecordBatch:
        """Merged partial rows to results, in key order."""
        columns = [partials.column(k) for k in self.keys]
        for a in self.aggregations:
            parts = [partials.column(f.name) for f in self._partials(a)]
            columns.append(a.finished(parts) if isinstance(a, Aggregation) else parts[0])
        return self.in_key_order(pa.Table.from_arrays(columns, schema=self.schema))

    def zero(self) -> pa.RecordBatch:
        """The result of no rows at all, where there are no keys: counts and sums are 0, NULL the others.

        Raises:
            JobFailed: a user's `zero` raised, or gave what is not of its type.
        """
        columns: list[pa.Array] = []
        for a in self.aggregations:
            if isinstance(a, UserAggregation):
                columns.append(self.one_value(a, a.code.zero))
                continue
            type_ = self.schema.field(a.output).type
            none = a.kind in {AggregationKind.MIN, AggregationKind.MAX, AggregationKind.MEAN}
            columns.append(pa.nulls(1, type_) if none else pa.array([0]).cast(type_))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def one_value(self, aggregation: UserAggregation, call: Any) -> pa.Array:
        """What a call of a user's aggregate gives, as a column of one row."""
        try:
            value = call()
        except CAUGHT as error:
            raise self._failed(aggregation.name, blame(error)[1]) from error
        return self.column(aggregation, [value])

    def column(self, aggregation: UserAggregation, values: Sequence[object]) -> pa.Array:
        """What a user's aggregate gave for groups, as its column.

        Raises:
            JobFailed: one is not of its type.
        """
        made, wrong = column_of(values, aggregation.results.field(0))
        if wrong:
            raise self._failed(aggregation.name, wrong[0][1])
        return made

    def in_key_order(self, table: pa.Table) -> pa.RecordBatch:
        """The rows sorted by key, as one batch."""
        if table.num_rows > 1 and self.keys:
            order = pc.sort_indices(table, sort_keys=[(key, "ascending") for key in self.keys])
            table = table.take(order)
        batches = table.combine_chunks().to_batches()
        if not batches:
            schema = table.schema
            return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def distinct_keys(self, rows: pa.RecordBatch) -> pa.Table:
        """The keys, once each."""
        return self._reduced([rows.column(k) for k in self.keys], [], rows.num_rows)

    def _reduced(self, keys: Sequence[pa.Array | pa.ChunkedArray], requests: Sequence[_Request], rows: int) -> pa.Table:
        columns, names = list(keys), [f"k{i}" for i in range(len(keys))]
        if not columns:
            columns, names = [pa.repeat(0, rows)], ["k"]
        key_names = list(names)
        calls: list[tuple[str | list[str], str, object]] = []
        made: list[tuple[str, ...]] = []
        listed = any(r.how in {_How.SET, _How.UNION, _How.FOLD} for r in requests)
        if listed:
            columns.append(pa.array(np.arange(rows)))
            names.append("row")
            calls.append(("row", "list", None))
        for i, request in enumerate(requests):
            name = f"v{i}"
            match request.how:
                case _How.ROWS:
                    calls.append(([], "count_all", None))
                    made.append(("count_all",))
                    continue
                case _How.SET | _How.UNION | _How.FOLD:
                    made.append(())
                    continue
                case _How.SUM:
                    parts = self._summands(request, rows)
                    options: object = _SUM_ALL
                case _How.VALUES:
                    parts, options = [request.column], pc.CountOptions(mode="only_valid")
                case _How.MIN | _How.MAX:
                    parts, options = [request.column], None
            function = "count" if request.how is _How.VALUES else str(request.how)
            columns += parts
            names += [f"{name}_{j}" for j in range(len(parts))]
            calls += [(f"{name}_{j}", function, options) for j in range(len(parts))]
            made.append(tuple(f"{name}_{j}_{function}" for j in range(len(parts))))
        grouped = (
            pa.Table.from_arrays(columns, names=names)
            .group_by(key_names, use_threads=False)  # first seen, first row: deterministic
            .aggregate(calls)
        )
        members = _Members.of(grouped.column("row_list"), rows) if listed else None
        arrays = [grouped.column(f"k{i}") for i in range(len(keys))]
        for request, parts_made in zip(requests, made, strict=True):
            if members is not None and not parts_made:
                arrays.append(self._listed(request, members))
                continue
            sums = [grouped.column(part) for part in parts_made]
            total = sums[0] if len(sums) == 1 else self._joined(sums[0], sums[1], request.field.name)
            arrays.append(pc.cast(total, request.field.type))
        fields = [self.schema.field(k) for k in self.keys] + [r.field for r in requests]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def _summands(self, request: _Request, rows: int) -> list[pa.Array | pa.ChunkedArray]:
        typed = pc.cast(request.column, request.field.type)
        if pa.types.is_integer(typed.type) and _may_overflow(typed, rows):
            # Sums of the upper and of the lower 32 bits: neither can overflow, and together they are the sum.
            return [pc.shift_right(typed, 32), pc.bit_wise_and(typed, 0xFFFFFFFF)]
        if pa.types.is_decimal(typed.type):
            self._refuse_long_decimal(typed, request.field.name)
        return [typed]

    def _listed(self, request: _Request, members: _Members) -> pa.Array:
        column = request.column
        assert column is not None
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        match request.how:
            case _How.SET:
                return _sets(members.group_of_row, column, members.groups)
            case _How.UNION:
                lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
                return _sets(np.repeat(members.group_of_row, lengths), column.flatten(), members.groups)
            case _:
                return self._folded(request, column.take(pa.array(members.rows)).to_pylist(), members)

    def _folded(self, request: _Request, values: list[object], members: _Members) -> pa.Array:
        combine, folded = request.code.combine, list[object]()
        try:
            for start, stop in zip(members.starts[:-1].tolist(), members.starts[1:].tolist(), strict=True):
                value = values[start]
                for other in values[start + 1 : stop]:
                    value = combine(value, other)
                folded.append(value)
        except CAUGHT as error:
            raise self._failed(f"{type(request.code).__name__}.combine", blame(error)[1]) from error
        made, wrong = column_of(folded, request.field)
        if wrong:
            raise self._failed(f"{type(request.code).__name__}.combine", wrong[0][1])
        return made

    def _joined(self, upper: pa.ChunkedArray, lower: pa.ChunkedArray, output: str) -> pa.Array:
        high, low = upper.to_numpy(), lower.to_numpy()
        high = high + (low >> 32)
        if len(high) and (int(high.max()) >= 1 << 31 or int(high.min()) < -(1 << 31)):
            raise self._too_large(output, "64 bits")
        return pa.array((high << 32) | (low & 0xFFFFFFFF), pa.int64())

    def _refuse_long_decimal(self, column: pa.Array | pa.ChunkedArray, output: str) -> None:
        total = pc.sum(pc.abs(pc.cast(column, pa.float64()))).as_py() or 0.0
        if total >= 10.0 ** (_DECIMAL_DIGITS_MAX - column.type.scale) / 2:
            raise self._too_large(output, f"{_DECIMAL_DIGITS_MAX} digits")

    def _too_large(self, output: str, room: str) -> JobFailed:
        column = output.partition("\x00")[0]
        return JobFailed(
            f"component {self.component!r}: a sum in column {column!r} does not fit into {room}; "
            "sum a decimal or a double instead",
            component=self.component,
            column=column,
        )

    def _failed(self, what: str, text: str) -> JobFailed:
        return JobFailed(
            f"component {self.component!r}: {what} failed for a group, which belongs to no single message: {text}",
            component=self.component,
        )


@dataclass(frozen=True, slots=True)
class _Members:
    """The rows of each group: `rows` group by group, whose `starts` say where each begins."""

    rows: Rows
    starts: Rows
    group_of_row: Rows

    @property
    def groups(self) -> int:
        return len(self.starts) - 1

    def of_nothing(self) -> _Members:
        """One group without rows."""
        return _Members(self.rows, np.zeros(2, np.int64), self.group_of_row)

    @classmethod
    def of(cls, lists: pa.ChunkedArray, number: int) -> _Members:
        column = lists.combine_chunks()
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        rows = column.flatten().to_numpy()
        group_of_row = np.empty(number, np.int64)
        group_of_row[rows] = np.repeat(np.arange(len(lengths)), lengths)
        return cls(rows, np.concatenate(([0], np.cumsum(lengths))), group_of_row)


def members_of(rows: pa.RecordBatch, keys: Sequence[str]) -> tuple[pa.Table, _Members]:
    """The distinct keys, in the order in which they come first, and the rows of each; compared exactly, not by hash."""
    columns = [rows.column(k) for k in keys] or [pa.repeat(0, rows.num_rows)]
    names = [f"k{i}" for i in range(len(columns))]
    table = pa.Table.from_arrays([*columns, pa.array(np.arange(rows.num_rows))], names=[*names, "row"])
    grouped = table.group_by(names, use_threads=False).aggregate([("row", "list")])
    found = [grouped.column(f"k{i}") for i in range(len(keys))]
    schema = pa.schema([rows.schema.field(k) for k in keys])
    return pa.Table.from_arrays(found, schema=schema), _Members.of(grouped.column("row_list"), rows.num_rows)


def _sets(group: Rows, values: pa.Array, groups: int) -> pa.Array:
    """The distinct values of each group as a list; NULL is no value."""
    table = pa.table({"g": pa.array(group), "v": values})
    if values.null_count:
        table = table.filter(values.is_valid())
    distinct = table.group_by(["g", "v"], use_threads=False).aggregate([]).sort_by("g")
    bounds = np.searchsorted(distinct.column("g").to_numpy(), np.arange(groups + 1)).astype(np.int32)
    flat = distinct.column("v").combine_chunks()
    return pa.ListArray.from_arrays(pa.array(bounds), flat)


def _prepared(aggregation: UserAggregation) -> str:
    return f"\x00init {aggregation.output}"


def _may_overflow(column: pa.Array | pa.ChunkedArray, rows: int) -> bool:
    low, high = pc.min_max(column).as_py().values()
    return low is not None and max(-low, high) * max(rows, 1) >= _INT64_LIMIT


@dataclass(slots=True)
class Combiner:
    """Partial rows of one group-by in one task, in memory bounded by the number of its keys."""

    group: GroupBy
    share: int = 0
    """The XOR of the shares that were absorbed."""
    _parts: list[pa.Table] = field(default_factory=list[pa.Table])
    _rows: int = 0
    _rows_max: int = COMBINE_ROWS_MAX

    def absorb(self, partial: pa.Table) -> None:
        """Take partial rows in."""
        if partial.num_rows == 0:
            return
        self._parts.append(partial)
        self._rows += partial.num_rows
        if self._rows > self._rows_max and len(self._parts) > 1:
            merged = self.group.merge(self._parts)
            self._parts, self._rows = [merged], merged.num_rows
            self._rows_max = max(COMBINE_ROWS_MAX, 2 * self._rows)

    def _merged(self) -> pa.Table:
        match self._parts:
            case []:
                return self.group.partial.empty_table()
            case [only]:
                return only
            case parts:
                return self.group.merge(parts)

    def partials(self) -> pa.RecordBatch:
        """One partial row a key, in key order."""
        return self.group.in_key_order(self._merged())

    def finish(self) -> pa.RecordBatch:
        """One result row a key, in key order."""
        return self.group.finish(self._merged())


def rows_with_keys(
    rows: pa.RecordBatch, keys: Sequence[str], wanted: pa.RecordBatch, numbers: Iterable[int]
) -> list[tuple[int, int]]:
    """The rows whose keys are those of `wanted` with one of these numbers: row by row, with that number.

    Whole columns first, so that only rows with a bad value in every key are looked at one by one.
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
