"""The results of groups whose rows are all there, with the row-wise aggregates that cannot be combined before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import FailureReason
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.aggregators import UserAggregation, UserKind, arguments
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.task.combine import combine, finish, prepare, results_column, zero
from stormproof.core.task.reduce import failed_for_group, members_of
from stormproof.core.user_code.functions import CAUGHT, blame
from stormproof.core.user_code.python_to_arrow import batch_of


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
        calls, reduce = self._calls(a), a.code.reduce
        values = [
            self._over(rows, lambda: self._unblamed(a, "init", a.code.init), lambda v, row: reduce(v, *calls[row]))
            for rows in self._members
        ]
        column = (
            pa.nulls(len(values), a.results.field(0).type) if self.failed else results_column(self._group, a, values)
        )
        return [column], np.ones(len(values), np.int64)

    def _emitted(self, a: UserAggregation) -> tuple[list[pa.Array], Rows]:
        calls, aggregate = self._calls(a), a.code.aggregate
        out: list[object] = []
        counts: list[int] = []
        emitted: list[object] = []

        def begin() -> Any:
            emitted.clear()
            return self._unblamed(a, "init", a.code.init)

        def step(state: Any, row: int) -> Any:
            gave = aggregate(state, emitted.append, *calls[row])
            return state if gave is None else gave

        for rows in self._members:
            state = self._over(rows, begin, step)
            if self.failed:
                continue  # this round gives no result
            self._unblamed(a, "complete", partial(a.code.complete, state, emitted.append))
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
