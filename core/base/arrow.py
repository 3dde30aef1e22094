"""Arrays of Arrow and numpy: the types that pass between the parts of the core, and what Arrow's own functions lack.

`pc` is `pyarrow.compute`, untyped: its functions are made when it is imported, so type checkers see none of them.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Words: TypeAlias = npt.NDArray[np.uint64]
"""64-bit words: shares, tokens and hashes."""

Rows: TypeAlias = npt.NDArray[np.int64]
"""Row numbers, ordinals or counts."""


pc: Final[Any] = importlib.import_module("pyarrow.compute")


def cast_within(column: pa.Array, type_: pa.DataType, *, safe: bool = True) -> pa.Array:
    """The column as another type; a number that a float cannot hold is refused, which Arrow makes infinite without a word.

    Raises:
        pa.ArrowInvalid: a value does not fit.
    """
    made = pc.cast(column, type_, safe=safe)
    if _infinities(made) != _infinities(column):
        raise pa.ArrowInvalid(f"a number is too large for {type_}")
    return made


def copy_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows in memory of their own: a user's code may fill the NumPy arrays again that they are made of."""
    return pa.concat_batches([rows, rows.slice(0, 0)])


def _infinities(array: pa.Array) -> int:
    """How many numbers are infinite, at any depth."""
    if pa.types.is_map(array.type):
        own = array.take(pa.array(range(len(array))))  # a slice would have all of its map's items
        return _infinities(own.keys) + _infinities(own.items)
    if pa.types.is_nested(array.type):
        inside = array.flatten()
        return sum(map(_infinities, inside if pa.types.is_struct(array.type) else [inside]))
    return pc.sum(pc.is_inf(array)).as_py() or 0 if pa.types.is_floating(array.type) else 0
