"""The first or the last row of each group, by the values of some columns."""

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
