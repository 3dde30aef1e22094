"""The functions of `ByFunction`: what a sink holds and what a batch adds, as Arrow columns, to what it is to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from stormproof.core.folds import MergeFunction
from stormproof.core.sketches import merged_counts


@dataclass(frozen=True, slots=True)
class Merging:
    """A function over columns of these types.

    `merge` is given the columns of what is held and of what is added, row by row of one key, NULL for nothing, and gives the
    same columns merged. It is associative and commutative, and what it gives is the same, byte by byte, whatever the parts:
    a test asks that of each.
    """

    types: tuple[pa.DataType, ...]
    merge: Callable[[Sequence[pa.Array], Sequence[pa.Array]], Sequence[pa.Array]]


MERGINGS: Final[Mapping[MergeFunction, Merging]] = {
    MergeFunction.THETA: Merging((pa.int64(), pa.binary()), merged_counts),
}
