"""Rows of groups in order: the first or the last row of each, and the least values of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.arrow_compute import pc
from stormproof.core.folds import End


def row_of_groups(group_of_row: Rows, compared: Sequence[pa.Array | pa.ChunkedArray], end: End) -> Rows:
    """The number of one row for each group that has rows, in the order of the groups' numbers. See `ByOrder`."""
    names = [str(number) for number in range(len(compared))]
    table = pa.Table.from_arrays([pa.array(group_of_row), *compared], names=["group", *names])
    # Arrow puts NULL and NaN behind all other values, whatever the direction.
    direction = "ascending" if end is End.FIRST else "descending"
    order = pc.sort_indices(
        table, sort_keys=[("group", "ascending"), *((name, direction) for name in names)]
    ).to_numpy()
    groups = group_of_row[order]
    begins = np.concatenate(([True], groups[1:] != groups[:-1])) if len(groups) else np.zeros(0, np.bool_)
    found: Rows = order[begins].astype(np.int64)
    return found


def sets_of_groups(group_of_row: Rows, values: pa.Array, groups: int, at_most: int | None = None) -> pa.ListArray:
    """The distinct values of each group as a sorted list without NULL; only the `at_most` least ones."""
    table = pa.table({"group": pa.array(group_of_row), "value": values})
    if values.null_count:
        table = table.filter(values.is_valid())
    distinct = table.group_by(["group", "value"], use_threads=False).aggregate([])
    distinct = distinct.sort_by([("group", "ascending"), ("value", "ascending")])
    found = distinct.column("group").to_numpy()
    starts = np.searchsorted(found, np.arange(groups + 1))
    if at_most is not None:
        rank = np.arange(len(found)) - starts[found]
        distinct = distinct.filter(pa.array(rank < at_most))
        starts = np.concatenate(([0], np.cumsum(np.minimum(np.diff(starts), at_most))))
    flat = distinct.column("value").combine_chunks()
    return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), flat)
