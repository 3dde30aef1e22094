"""Distinct values by Theta sketches of Apache DataSketches: of groups' values, their unions, and the estimates.

A sketch holds the `K` least hashes of its values, and the next one, below which they all are. So it is a function of the set
of values alone: the same bytes, in whatever order and parts the values came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.arrow_compute import pc
from stormproof.core.errors import UsageError

LG_K: Final = 12
K: Final = 1 << LG_K
"""Up to so many distinct values are counted exactly. Beyond, the estimate's standard error is 1/sqrt(K), 1.6 %."""


class UnreadableSketch(ValueError):
    """The sketch in `row` is none."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


def require_sketches() -> ModuleType:
    """The library, which is imported only where it is used.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import datasketches
    except ImportError as error:
        raise UsageError(
            f"approx_count_distinct needs the package datasketches, which cannot be imported ({error}); install it: "
            "pip install 'datasketches>=5.2,<6'"
        ) from error
    module: ModuleType = datasketches
    return module


def sketches_of_groups(group_of_row: Rows, values: pa.Array, groups: int) -> pa.Array:
    """The sketch of each group's values, without NULL. One call of the library for each distinct value of a group."""
    library = require_sketches()
    table = pa.table({"g": pa.array(group_of_row), "v": values})
    if values.null_count:
        table = table.filter(values.is_valid())
    distinct = table.group_by(["g", "v"], use_threads=False).aggregate([]).sort_by("g")
    bounds = np.searchsorted(distinct.column("g").to_numpy(), np.arange(groups + 1)).tolist()
    hashed = _hashed(distinct.column("v").combine_chunks())
    made: list[bytes] = []
    for start, stop in pairwise(bounds):
        sketch = library.update_theta_sketch(LG_K)
        deque(map(sketch.update, hashed[start:stop]), maxlen=0)
        sketch.trim()
        made.append(sketch.compact().serialize())
    return pa.array(made, pa.binary())


def _hashed(column: pa.Array) -> list[int | float | str]:
    """The values as the library hashes them; equal where they are equal."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        # With a letter before each: the library counts no empty text.
        return [f"={text}" for text in column.to_pylist()]
    if pa.types.is_decimal(kind):
        column = column.cast(pa.decimal128(38, kind.scale)).view(pa.binary(16))
    elif pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return [f"={value.decode('latin-1')}" for value in column.to_pylist()]
    # The library takes -0.0 for 0.0, and all NaN for one.
    numbers: list[int | float | str] = column.cast(
        pa.float64() if pa.types.is_floating(kind) else pa.int64()
    ).to_pylist()
    return numbers


def unions_of_groups(group_of_row: Rows, sketches: pa.Array, groups: int) -> pa.Array:
    """The union of each group's sketches; NULL is none.

    Raises:
        UnreadableSketch: one is no sketch of ours.
    """
    library = require_sketches()
    order = np.argsort(group_of_row, kind="stable")
    bounds = np.searchsorted(group_of_row[order], np.arange(groups + 1)).tolist()
    rows, made = order.tolist(), list[bytes]()
    for start, stop in pairwise(bounds):
        union = library.theta_union(LG_K)
        for row in rows[start:stop]:
            value = sketches[row].as_py()
            if value is not None:
                union.update(_read(library, value, row))
        made.append(union.get_result().serialize())
    return pa.array(made, pa.binary())


def estimates(sketches: pa.Array) -> pa.Array:
    """The estimated number of values of each sketch; NULL where there is none.

    Raises:
        UnreadableSketch: one is no sketch of ours.
    """
    library = require_sketches()
    found = [
        None if value is None else round(_read(library, value, row).get_estimate())
        for row, value in enumerate(sketches.to_pylist())
    ]
    return pa.array(found, pa.int64())


def empty_sketch() -> bytes:
    """The sketch of no values."""
    found: bytes = require_sketches().update_theta_sketch(LG_K).compact().serialize()
    return found


def merged_counts(held: Sequence[pa.Array], added: Sequence[pa.Array]) -> list[pa.Array]:
    """Estimates and sketches, row by row, of what is held and what is added; see `core.merging`.

    Raises:
        UnreadableSketch: a sketch is none, or a row has an estimate and no sketch to merge.
    """
    (counts, sketches), (_, others) = held, added
    lost = pc.and_(sketches.is_null(), pc.greater(pc.fill_null(counts, 0), 0))
    if lost.true_count:
        raise UnreadableSketch(lost.index(True).as_py(), "it is NULL beside an estimate")
    rows = np.arange(len(sketches))
    both = pa.concat_arrays([sketches, others])
    try:
        union = unions_of_groups(np.concatenate((rows, rows)), both, len(rows))
    except UnreadableSketch as error:
        raise UnreadableSketch(error.row % max(len(rows), 1), str(error)) from error
    return [estimates(union), union]


def _read(library: ModuleType, value: bytes, row: int) -> Any:
    try:
        return library.compact_theta_sketch.deserialize(value)
    except (ValueError, IndexError, RuntimeError) as error:
        raise UnreadableSketch(row, str(error)) from error
