"""Counts and sums by key: combined batch by batch before an exchange, merged after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.compute import pc
from stormproof.core.errors import JobFailed, TopologyError

COMBINE_ROWS_MAX: Final = 262_144
"""Partial rows that a combiner holds before it combines them among themselves: its memory is bounded by its keys."""

_INT64_LIMIT: Final = 1 << 63
_DECIMAL_DIGITS_MAX: Final = 38


class AggregationKind(StrEnum):
    """What is computed of a group."""

    COUNT = "count"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Aggregation:
    """One result column: `output` counts the group's rows or sums `field`."""

    output: str
    kind: AggregationKind
    field: str | None = None

    def result(self, schema: pa.Schema, component: str) -> pa.Field:
        """The result's column: counts and sums of integers are 64 bit, sums of decimals have all 38 digits.

        Raises:
            TopologyError: the field is unknown or has no sum.
        """
        if self.field is None:
            return pa.field(self.output, pa.int64())
        if self.field not in schema.names:
            known = ", ".join(schema.names)
            raise TopologyError(
                f"component {component!r}: {self.output} sums the unknown field {self.field!r}; known: {known}",
                component=component,
                field=self.field,
            )
        type_ = schema.field(self.field).type
        if pa.types.is_integer(type_):
            return pa.field(self.output, pa.int64())
        if pa.types.is_floating(type_):
            return pa.field(self.output, pa.float64())
        if pa.types.is_decimal(type_):
            return pa.field(self.output, pa.decimal128(_DECIMAL_DIGITS_MAX, type_.scale))
        raise TopologyError(
            f"component {component!r}: field {self.field!r} is {type_}, which has no sum",
            component=component,
            field=self.field,
        )


@dataclass(frozen=True, slots=True)
class GroupBy:
    """What is grouped by which keys into what. `schema` is that of partial rows and of results alike."""

    component: str
    keys: tuple[str, ...]
    aggregations: tuple[Aggregation, ...]
    schema: pa.Schema

    def combine(self, rows: pa.RecordBatch) -> pa.Table:
        """Rows to one partial row a key. NULLs add nothing to a sum; a group of NULLs alone sums to 0.

        Raises:
            JobFailed: a sum does not fit its type.
        """
        values = [None if a.field is None else rows.column(a.field) for a in self.aggregations]
        return self._sum([rows.column(k) for k in self.keys], values, rows.num_rows)

    def merge(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Partial rows to one row a key, in no particular order."""
        table = pa.concat_tables(parts)
        return self._sum(
            [table.column(k) for k in self.keys], [table.column(a.output) for a in self.aggregations], table.num_rows
        )

    def in_key_order(self, table: pa.Table) -> pa.RecordBatch:
        """The rows sorted by key, as one batch."""
        if table.num_rows > 1:
            order = pc.sort_indices(table, sort_keys=[(key, "ascending") for key in self.keys])
            table = table.take(order)
        batches = table.combine_chunks().to_batches()
        if not batches:
            return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in self.schema], schema=self.schema)
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _sum(
        self, keys: Sequence[pa.Array | pa.ChunkedArray], values: Sequence[pa.Array | pa.ChunkedArray | None], rows: int
    ) -> pa.Table:
        columns, names = list(keys), [f"k{i}" for i in range(len(keys))]
        calls: list[tuple[str | list[str], str, object]] = []
        made: list[tuple[str, ...]] = []
        sum_all = pc.ScalarAggregateOptions(min_count=0)
        for i, (aggregation, column) in enumerate(zip(self.aggregations, values, strict=True)):
            if column is None:
                calls.append(([], "count_all", None))
                made.append(("count_all",))
                continue
            typed = pc.cast(column, self.schema.field(aggregation.output).type)
            parts = [typed]
            if pa.types.is_integer(typed.type) and _may_overflow(typed, rows):
                # Sums of the upper and of the lower 32 bits: neither can overflow, and together they are the sum.
                parts = [pc.shift_right(typed, 32), pc.bit_wise_and(typed, 0xFFFFFFFF)]
            elif pa.types.is_decimal(typed.type):
                self._refuse_long_decimal(typed, aggregation)
            columns += parts
            names += [f"v{i}_{j}" for j in range(len(parts))]
            calls += [(f"v{i}_{j}", "sum", sum_all) for j in range(len(parts))]
            made.append(tuple(f"v{i}_{j}_sum" for j in range(len(parts))))
        grouped = (
            pa.Table.from_arrays(columns, names=names)
            .group_by([f"k{i}" for i in range(len(keys))], use_threads=False)  # first seen, first row: deterministic
            .aggregate(calls)
        )
        arrays = [grouped.column(f"k{i}") for i in range(len(keys))]
        for aggregation, parts_made in zip(self.aggregations, made, strict=True):
            sums = [grouped.column(name) for name in parts_made]
            total = sums[0] if len(sums) == 1 else self._joined(sums[0], sums[1], aggregation)
            arrays.append(pc.cast(total, self.schema.field(aggregation.output).type))
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def _joined(self, upper: pa.ChunkedArray, lower: pa.ChunkedArray, aggregation: Aggregation) -> pa.Array:
        high, low = upper.to_numpy(), lower.to_numpy()
        high = high + (low >> 32)
        if len(high) and (int(high.max()) >= 1 << 31 or int(high.min()) < -(1 << 31)):
            raise self._too_large(aggregation, "64 bits")
        return pa.array((high << 32) | (low & 0xFFFFFFFF), pa.int64())

    def _refuse_long_decimal(self, column: pa.Array | pa.ChunkedArray, aggregation: Aggregation) -> None:
        total = pc.sum(pc.abs(pc.cast(column, pa.float64()))).as_py() or 0.0
        if total >= 10.0 ** (_DECIMAL_DIGITS_MAX - column.type.scale) / 2:
            raise self._too_large(aggregation, f"{_DECIMAL_DIGITS_MAX} digits")

    def _too_large(self, aggregation: Aggregation, room: str) -> JobFailed:
        return JobFailed(
            f"component {self.component!r}: a sum in column {aggregation.output!r} does not fit into {room}; "
            "sum a decimal or a double instead",
            component=self.component,
            column=aggregation.output,
        )


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

    def finish(self) -> pa.RecordBatch:
        """One row a key, in key order."""
        match self._parts:
            case []:
                return self.group.in_key_order(self.group.schema.empty_table())
            case [only]:
                return self.group.in_key_order(only)
            case parts:
                return self.group.in_key_order(self.group.merge(parts))


def rows_with_keys(
    rows: pa.RecordBatch, keys: Sequence[str], wanted: pa.RecordBatch
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The numbers of the rows whose keys are among `wanted`; only used once a key is known to be bad."""
    there = zip(*(rows.column(k).to_pylist() for k in keys), strict=True)
    bad = set(zip(*(wanted.column(k).to_pylist() for k in keys), strict=True))
    return np.array([i for i, key in enumerate(there) if key in bad], np.int64)
