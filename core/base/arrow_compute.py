"""`pyarrow.compute` as `pc`, untyped: its functions are made when it is imported, so type checkers see none of them.

And a cast that makes no number infinite.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import pyarrow as pa

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


def _infinities(array: pa.Array) -> int:
    """How many numbers are infinite, at any depth."""
    if pa.types.is_map(array.type):
        own = array.take(pa.array(range(len(array))))  # a slice would have all of its map's items
        return _infinities(own.keys) + _infinities(own.items)
    if pa.types.is_nested(array.type):
        inside = array.flatten()
        return sum(map(_infinities, inside if pa.types.is_struct(array.type) else [inside]))
    return pc.sum(pc.is_inf(array)).as_py() or 0 if pa.types.is_floating(array.type) else 0
