"""The messages of rows, by the columns that name them in prepared files."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.arrow_compute import pc
from stormproof.core.tracking.anchors import MANY_ORIGIN


def pairs_of(batch: pa.RecordBatch) -> tuple[Rows, Rows, Rows, npt.NDArray[np.bool_]]:
    """Row, number and origin of each pair, in order of the rows; and which rows have messages that are not known."""
    nothing, rows = np.empty(0, np.int64), np.arange(batch.num_rows, dtype=np.int64)
    if batch.num_columns == 1:
        return nothing, nothing, nothing, np.ones(batch.num_rows, np.bool_)
    number, origin, others = batch.columns
    has_number = np.asarray(number.is_valid())
    has_origin = np.asarray(origin.is_valid())
    named = has_number & has_origin
    unnamed = has_origin & ~has_number
    row = rows[named]
    numbers, origins = np.asarray(number.fill_null(0))[named], np.asarray(origin.fill_null(0))[named]
    if others.null_count == len(others):
        return row, numbers, origins, unnamed
    lengths = np.asarray(pc.list_value_length(others).fill_null(0)) // 2
    more = np.asarray(others.flatten()).reshape(-1, 2)
    more_row = np.repeat(rows, lengths)
    unnamed[more_row[more[:, 1] == MANY_ORIGIN]] = True
    known = more[:, 1] != MANY_ORIGIN
    row = np.concatenate([row, more_row[known]])
    order = np.argsort(row, kind="stable")
    numbers = np.concatenate([numbers, more[known, 0]])[order]
    origins = np.concatenate([origins, more[known, 1]])[order]
    return row[order], numbers, origins, unnamed
