"""Groups of rows by key: the values of keys are compared exactly, never by a hash alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrays import Rows
from stormproof.core.base.arrow_compute import pc
from stormproof.core.user_code.python_to_arrow import no_rows


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
