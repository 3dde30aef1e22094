"""Aggregates of groups: combined batch by batch before an exchange, merged after it, finished at the end.

Row-wise aggregates that cannot be combined are computed where all rows of a group are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import FailureReason
from stormproof.core.graph.aggregation import (
    Aggregation,
    AggregationKind,
    GroupBy,
    UserAggregation,
    UserKind,
    arguments,
)
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.task.reduce import How, Request, failed_for_group, in_key_order, members_of, reduced
from stormproof.core.user_code.functions import CAUGHT, batch_of, blame, column_of, copied, copies_of

COMBINE_ROWS_MAX: Final = 262_144
"""The partial rows that a combiner holds before it merges them, so that its number of keys bounds its memory."""
COMBINE_BYTES_MAX: Final = 256 << 20
"""The same in bytes: few keys may have large partial rows, such as sets."""

_COMBINED: Final[Mapping[AggregationKind, tuple[How, ...]]] = {
    AggregationKind.COUNT: (How.ROWS,),
    AggregationKind.VALUES: (How.VALUES,),
    AggregationKind.SUM: (How.SUM,),
    AggregationKind.MIN: (How.MIN,),
    AggregationKind.MAX: (How.MAX,),
    AggregationKind.MEAN: (How.SUM, How.VALUES),
    AggregationKind.DISTINCT: (How.SET,),
    AggregationKind.SET: (How.LEAST,),
    AggregationKind.TRUNCATED: (How.LEAST,),
    AggregationKind.FIRST: (How.FIRST,),
    AggregationKind.LAST: (How.LAST,),
}
"""How each aggregate's partial columns are made of rows."""

_MERGED: Final[Mapping[How, How]] = {
    How.ROWS: How.SUM,
    How.VALUES: How.SUM,
    How.SUM: How.SUM,
    How.MIN: How.MIN,
    How.MAX: How.MAX,
    How.SET: How.UNION,
    How.LEAST: How.LEAST_OF_SETS,
    How.FIRST: How.FIRST,
    How.LAST: How.LAST,
    How.FOLD: How.FOLD,
}
"""How partial columns are merged, by how they were made."""


_NULL_OF_NOTHING: Final = frozenset(
    {
        *(AggregationKind.MIN, AggregationKind.MAX, AggregationKind.MEAN),
        *(AggregationKind.FIRST, AggregationKind.LAST),
    }
)


@dataclass(frozen=True, slots=True)
class CombinerInput:
    """Rows with a column for each user's combiner; the rows in `failed` hold nothing that may be used."""

    rows: pa.RecordBatch
    failed: Mapping[int, tuple[FailureReason, str]]


def prepare(group: GroupBy, rows: pa.RecordBatch, heartbeat: Heartbeat | None = None) -> CombinerInput:
    """Call `init` of users' combiners for every row; the results of each are added as a column."""
    failed: dict[int, tuple[FailureReason, str]] = {}
    for a in group.aggregations:
        if not isinstance(a, UserAggregation) or not a.combines or _prepared(a) in rows.schema.names:
            continue
        values, copies = list[object](), copies_of(a.results)
        calls: Iterable[tuple[object, ...]] = arguments([rows.column(f) for f in a.fields])
        for call in calls if heartbeat is None else heartbeat.each(list(calls)):
            try:
                values.append(copied(a.code.init(*call), copies))
            except CAUGHT as error:
                failed.setdefault(len(values), blame(error))
                values.append(None)
        made, wrong = column_of(values, a.results.field(0).with_name(f"{type(a.code).__name__}.init"))
        for row, text in wrong:
            failed.setdefault(row, (FailureReason.ERROR, text))
        rows = rows.append_column(pa.field(_prepared(a), made.type), made)
    return CombinerInput(rows, failed)


def combine(group: GroupBy, rows: pa.RecordBatch) -> pa.Table:
    """One partial row a key, of prepared rows. NULLs add nothing; a sum of nothing but NULLs is 0.

    Raises:
        JobFailed: a sum does not fit its type, or a user's `combine` raised.
    """
    requests: list[Request] = []
    for a in group.aggregations:
        partials = group.partials_of(a)
        if isinstance(a, UserAggregation):
            requests.append(Request(How.FOLD, rows.column(_prepared(a)), partials[0], code=a.code))
            continue
        column = _column_of(a, rows, partials)
        for how, made in zip(_COMBINED[a.kind], partials, strict=True):
            requests.append(Request(how, None if how is How.ROWS else column, made, _bound(a)))
    return reduced(group, [rows.column(k) for k in group.keys], requests, rows.num_rows)


def _bound(aggregation: Aggregation) -> int | None:
    """One value more than are kept tells that there are more."""
    return None if aggregation.at_most is None else aggregation.at_most + 1


def _column_of(aggregation: Aggregation, rows: pa.RecordBatch, partials: Sequence[pa.Field]) -> pa.Array | None:
    if aggregation.compared:
        fields = list(partials[0].type)
        return pa.StructArray.from_arrays([rows.column(f.name) for f in fields], fields=fields)
    return None if aggregation.field is None else rows.column(aggregation.field)


def merge(group: GroupBy, parts: Sequence[pa.Table]) -> pa.Table:
    """One partial row a key, of partial rows; in no particular order."""
    table = pa.concat_tables(parts)
    requests: list[Request] = []
    for a in group.aggregations:
        partials = group.partials_of(a)
        if isinstance(a, UserAggregation):
            requests.append(Request(How.FOLD, table.column(partials[0].name), partials[0], code=a.code))
            continue
        for how, made in zip(_COMBINED[a.kind], partials, strict=True):
            requests.append(Request(_MERGED[how], table.column(made.name), made, _bound(a)))
    return reduced(group, [table.column(k) for k in group.keys], requests, table.num_rows)


def finish(group: GroupBy, partials: pa.Table) -> pa.RecordBatch:
    """The results of merged partial rows, in key order."""
    columns = [partials.column(k) for k in group.keys]
    for a in group.aggregations:
        parts = [partials.column(field.name) for field in group.partials_of(a)]
        columns.append(a.finished(parts) if isinstance(a, Aggregation) else parts[0])
    return in_key_order(group.keys, pa.Table.from_arrays(columns, schema=group.schema))


def zero(group: GroupBy) -> pa.RecordBatch:
    """The result of no rows, for a group-by without keys: counts and sums are 0, other aggregates NULL.

    Raises:
        JobFailed: a user's `zero` raised, or its result is not of its type.
    """
    columns: list[pa.Array] = []
    for a in group.aggregations:
        if isinstance(a, UserAggregation):
            columns.append(_zero_of(group, a))
            continue
        type_ = group.schema.field(a.output).type
        none = a.kind in _NULL_OF_NOTHING
        if a.kind is AggregationKind.SET:
            columns.append(pa.array([[]], type_))
            continue
        columns.append(pa.nulls(1, type_) if none else pa.array([0]).cast(type_))
    return pa.RecordBatch.from_arrays(columns, schema=group.schema)


def _zero_of(group: GroupBy, aggregation: UserAggregation) -> pa.Array:
    try:
        value = aggregation.code.zero()
    except CAUGHT as error:
        raise failed_for_group(group.component, aggregation.name, blame(error)[1]) from error
    return results_column(group, aggregation, [value])


def results_column(group: GroupBy, aggregation: UserAggregation, values: Sequence[object]) -> pa.Array:
    """The results of a user's aggregate as its column, one for each group.

    Raises:
        JobFailed: one is not of its type.
    """
    made, wrong = column_of(values, aggregation.results.field(0))
    if wrong:
        raise failed_for_group(group.component, aggregation.name, wrong[0][1])
    return made


def distinct_keys(group: GroupBy, rows: pa.RecordBatch) -> pa.Table:
    """The distinct keys."""
    return reduced(group, [rows.column(k) for k in group.keys], [], rows.num_rows)


def _prepared(aggregation: UserAggregation) -> str:
    return f"\x00init {aggregation.output}"


@dataclass(slots=True)
class Combiner:
    """The partial rows of one group-by in one task; their number of keys bounds its memory."""

    group: GroupBy
    share: int = 0
    """The XOR of the shares that were absorbed."""
    _parts: list[pa.Table] = field(default_factory=list[pa.Table])
    _rows: int = 0
    _rows_max: int = COMBINE_ROWS_MAX
    _bytes: int = 0
    _bytes_max: int = COMBINE_BYTES_MAX

    def absorb(self, partial: pa.Table) -> None:
        """Add partial rows."""
        if partial.num_rows == 0:
            return
        self._parts.append(partial)
        self._rows += partial.num_rows
        self._bytes += partial.nbytes
        if (self._rows > self._rows_max or self._bytes > self._bytes_max) and len(self._parts) > 1:
            merged = merge(self.group, self._parts)
            self._parts, self._rows, self._bytes = [merged], merged.num_rows, merged.nbytes
            self._rows_max = max(COMBINE_ROWS_MAX, 2 * self._rows)
            self._bytes_max = max(COMBINE_BYTES_MAX, 2 * self._bytes)

    def _merged(self) -> pa.Table:
        match self._parts:
            case []:
                return self.group.partial.empty_table()
            case [only]:
                return only
            case parts:
                return merge(self.group, parts)

    def partials(self) -> pa.RecordBatch:
        """One partial row a key, in key order."""
        return in_key_order(self.group.keys, self._merged())

    def finish(self) -> pa.RecordBatch:
        """One result row a key, in key order."""
        return finish(self.group, self._merged())


# ---- groups whose rows are all there


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of all groups, in key order.

    `counts` is the number of results of each group. `group_of_row` is the group of each given row; -1 for rows in `failed`,
    which are in no result.
    """

    rows: pa.RecordBatch
    counts: Rows
    group_of_row: Rows
    failed: Mapping[int, tuple[FailureReason, str]]


def evaluate(group: GroupBy, rows: pa.RecordBatch, heartbeat: Heartbeat | None = None) -> Evaluated:
    """Group rows, and evaluate every aggregate of each group.

    A row for which a user's aggregate raises is left out, and everything is evaluated again without it.

    Guarantee:
        No result contains anything of a row in `failed`.

    Raises:
        JobFailed: an error that belongs to no single row: a sum is too large, or a user's `combine`, `complete` or `zero`
            raised.
    """
    failed: dict[int, tuple[FailureReason, str]] = {}
    number = np.arange(rows.num_rows, dtype=np.int64)
    while True:
        prepared = prepare(group, rows.take(pa.array(number)) if len(number) < rows.num_rows else rows, heartbeat)
        bad = dict(prepared.failed)
        if not bad:
            round_ = _Round(group, prepared.rows, heartbeat)
            result = round_.run()
            bad = round_.failed
            if result is not None:
                made, counts, of_row = result
                group_of_row = np.full(rows.num_rows, -1, np.int64)
                group_of_row[number] = of_row
                return Evaluated(made, counts, group_of_row, failed)
        for row, what in bad.items():
            failed.setdefault(int(number[row]), what)
        number = np.delete(number, list(bad))


class _Round:
    """One try at all groups. Rows for which a user's aggregate raises are added to `failed`; then there is no result."""

    def __init__(self, group: GroupBy, rows: pa.RecordBatch, heartbeat: Heartbeat | None) -> None:
        self._group, self._rows, self._heartbeat = group, rows, heartbeat
        self.failed: dict[int, tuple[FailureReason, str]] = {}
        self._members: list[list[int]] = []

    def run(self) -> tuple[pa.RecordBatch, Rows, Rows] | None:
        group, rows = self._group, self._rows
        keys, members = members_of(rows, group.keys)
        groups = members.groups
        if not groups and not group.keys:  # without keys there is a group even without rows
            groups, members = 1, members.of_nothing()
        order = np.arange(groups)
        if groups > 1:  # as `in_key_order` has them
            order = pc.sort_indices(keys, sort_keys=[(k, "ascending") for k in group.keys]).to_numpy().astype(np.int64)
        place = np.empty(groups, np.int64)
        place[order] = np.arange(groups)
        of_row = place[members.group_of_row]
        starts = members.starts
        self._members = [members.rows[starts[g] : starts[g + 1]].tolist() for g in order.tolist()]
        ready = [a for a in group.aggregations if a.combines]
        whole: pa.RecordBatch | None = None
        if ready:
            combining = group.only_combining()
            whole = finish(combining, combine(combining, rows)) if rows.num_rows or group.keys else zero(combining)
        columns: list[pa.Array] = [
            keys.column(k).combine_chunks().take(pa.array(order))
            if groups
            else pa.array([], group.schema.field(k).type)
            for k in group.keys
        ]
        made: list[tuple[list[pa.Array], Rows]] = [(columns, np.ones(groups, np.int64))]
        for a in group.aggregations:
            if a.combines:
                assert whole is not None
                made.append(([whole.column(a.output)], np.ones(groups, np.int64)))
            elif isinstance(a, UserAggregation):
                made.append(self._reduced(a) if a.kind is UserKind.REDUCER else self._emitted(a))
        if self.failed:
            return None
        table, counts = _crossed(made, groups)
        return pa.RecordBatch.from_arrays(table, schema=group.schema), counts, of_row

    def _calls(self, a: UserAggregation) -> list[tuple[object, ...]]:
        return arguments([self._rows.column(f) for f in a.fields])

    def _each(self, rows: list[int]) -> Any:
        return iter(rows) if self._heartbeat is None else self._heartbeat.each(rows)

    def _over(self, rows: list[int], begin: Callable[[], Any], step: Callable[[Any, int], Any]) -> Any:
        """Fold a group's rows; those that raise are noted, and the fold begins again without them.

        After a row that raised, the remaining rows are folded into a new state, to find further culprits in the same pass.
        The old state might make innocent rows raise.
        """
        left = [row for row in rows if row not in self.failed] if self.failed else rows
        while True:
            raised: set[int] = set()
            state, row, each = begin(), -1, self._each(left)
            while True:
                try:
                    for row in each:
                        state = step(state, row)
                    break
                except CAUGHT as error:
                    self.failed[row] = blame(error)
                    raised.add(row)
                    state = begin()
            if not raised:
                return state
            left = [row for row in left if row not in raised]

    def _reduced(self, a: UserAggregation) -> tuple[list[pa.Array], Rows]:
        calls, reduce, copies = self._calls(a), a.code.reduce, copies_of(a.results)

        def reduced_of(rows: list[int]) -> object:
            return self._over(
                rows, lambda: self._unblamed(a, "init", a.code.init), lambda v, row: reduce(v, *calls[row])
            )

        values = [copied(reduced_of(rows), copies) for rows in self._members]
        column = (
            pa.nulls(len(values), a.results.field(0).type) if self.failed else results_column(self._group, a, values)
        )
        return [column], np.ones(len(values), np.int64)

    def _emitted(self, a: UserAggregation) -> tuple[list[pa.Array], Rows]:
        calls, aggregate = self._calls(a), a.code.aggregate
        out: list[object] = []
        counts: list[int] = []
        emitted, copies = list[object](), copies_of(a.results)

        def emit(values: object) -> None:
            emitted.append(copied(values, copies))

        def begin() -> Any:
            emitted.clear()
            return self._unblamed(a, "init", a.code.init)

        def step(state: Any, row: int) -> Any:
            gave = aggregate(state, emit, *calls[row])
            return state if gave is None else gave

        for rows in self._members:
            state = self._over(rows, begin, step)
            if self.failed:
                continue  # this round gives no result
            self._unblamed(a, "complete", partial(a.code.complete, state, emit))
            out += emitted
            counts.append(len(emitted))
        batch, wrong = batch_of(out, a.results, (), f"{type(a.code).__name__} emitted")
        if wrong and not self.failed:
            raise self._fault(a, "emit", wrong[0][1])
        return list(batch.columns), np.array(counts, np.int64)

    def _unblamed(self, a: UserAggregation, what: str, call: Callable[[], Any]) -> Any:
        """Call a method whose failure is no single row's."""
        try:
            return call()
        except CAUGHT as error:
            raise self._fault(a, what, blame(error)[1]) from error

    def _fault(self, a: UserAggregation, what: str, text: str) -> JobFailed:
        return failed_for_group(self._group.component, f"{type(a.code).__name__}.{what}", text)


def _crossed(made: list[tuple[list[pa.Array], Rows]], groups: int) -> tuple[list[pa.Array], Rows]:
    """Each group's results side by side; several rows of several aggregates are combined each with each, as in Trident."""
    counts = np.ones(groups, np.int64)
    for _, number in made:
        counts = counts * number
    if all((number == 1).all() for _, number in made):
        return [column for columns, _ in made for column in columns], counts
    group = np.repeat(np.arange(groups), counts)
    position = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    arrays: list[pa.Array] = []
    stride = counts.copy()
    for columns, number in made:
        stride = np.where(number > 0, stride // np.maximum(number, 1), 0)
        within = (position // np.maximum(stride[group], 1)) % np.maximum(number[group], 1)
        taken = pa.array((np.cumsum(number) - number)[group] + within)
        arrays += [column.take(taken) for column in columns]
    return arrays, counts
