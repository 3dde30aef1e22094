"""How values are merged: a column's held values with added ones, and the rows of one key with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.arguments import require_function
from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused
from stormproof.core.user_functions import refuse_unfit_call
from stormproof.trident.state.protocol import Merge


def total(held: pa.Array, added: pa.Array) -> pa.Array:
    """The sum; NULL adds nothing. A sum that does not fit is an error, never a wrapped number."""
    if pa.types.is_decimal(held.type):  # a sum may have one digit more than the type holds
        wide = pa.decimal256(held.type.precision, held.type.scale)
        summed = pc.cast(pc.add_checked(pc.cast(held, wide), pc.cast(added, wide)), held.type)
    else:
        summed = pc.add_checked(held, added)
    return pc.coalesce(summed, held, added)


def minimum(held: pa.Array, added: pa.Array) -> pa.Array:
    """The smaller one; NULL is ignored."""
    return pc.min_element_wise(held, added) if _ordered(held.type) else _chosen(pc.less(added, held), held, added)


def maximum(held: pa.Array, added: pa.Array) -> pa.Array:
    """The greater one; NULL is ignored."""
    return pc.max_element_wise(held, added) if _ordered(held.type) else _chosen(pc.greater(added, held), held, added)


def newest(held: pa.Array, added: pa.Array) -> pa.Array:
    """The added one, also where it is NULL."""
    del held
    return added


def _ordered(kind: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(kind)) and not pa.types.is_boolean(kind)


def _chosen(better: pa.Array, held: pa.Array, added: pa.Array) -> pa.Array:
    return pc.if_else(pc.or_kleene(pc.is_null(held), pc.fill_null(better, False)), added, held)


@dataclass(frozen=True, slots=True)
class RowMerge:
    """A plain function of two values as a merge. It is called row by row, and never with NULL (None)."""

    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        where = "RowMerge"
        require_function(where, "function", self.function, "f(held, added)")
        refuse_unfit_call(where, where, self.function, ("held", "added"), "write one of two values")

    def __call__(self, held: pa.Array, added: pa.Array) -> pa.Array:
        """The function's results, as an array of the columns' type."""
        pairs = zip(held.to_pylist(), added.to_pylist(), strict=True)
        values = [b if a is None else a if b is None else self.function(a, b) for a, b in pairs]
        return pa.array(values, held.type)


MERGES: Final[Mapping[str, Merge]] = {"sum": total, "count": total, "min": minimum, "max": maximum}
"""The ready-made merges, by the name of the fold or aggregate that they serve. Partial counts are summed."""


def merge_columns(
    held: Mapping[str, pa.Array], added: Mapping[str, pa.Array], merges: Mapping[str, Merge], where: str
) -> dict[str, pa.Array]:
    """Each added column merged with the held one.

    Raises:
        SinkRefused: a value does not fit its column, or a merge did not return a column of that type and length.
    """
    merged: dict[str, pa.Array] = {}
    for name, column in added.items():
        try:
            new: Any = merges[name](held[name], column)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise SinkRefused(
                f"{where}: column {name!r} ({column.type}) cannot hold a merged value: {error}", column=name
            ) from error
        if isinstance(new, pa.ChunkedArray):
            new = new.combine_chunks()
        if not isinstance(new, pa.Array) or new.type != column.type or len(new) != len(column):
            shown = f"{len(new)} of {new.type}" if isinstance(new, pa.Array) else type(new).__name__
            raise SinkRefused(
                f"{where}: the merge of column {name!r} gave {shown} for {len(column)} of {column.type}", column=name
            )
        merged[name] = new
    return merged


def one_row_a_key(rows: pa.RecordBatch, keys: Sequence[str], merges: Mapping[str, Merge], where: str) -> pa.RecordBatch:
    """Merge the rows of equal keys with each other, in pairs of neighbours; a column is merged at most log2(n) times.

    The earlier row of a pair is the held one. Rows whose keys all differ are returned as they are. Keys must not be NULL.
    """
    if rows.num_rows < 2:
        return rows
    order = pc.sort_indices(pa.Table.from_batches([rows]), sort_keys=[(key, "ascending") for key in keys])
    ordered = rows.take(order)
    differs = np.zeros(rows.num_rows - 1, np.bool_)
    for key in keys:
        column = ordered.column(key)
        differs |= pc.not_equal(column.slice(1), column.slice(0, rows.num_rows - 1)).to_numpy(zero_copy_only=False)
    if differs.all():
        return rows
    first = np.concatenate([[True], differs])
    values = {name: ordered.column(name) for name in rows.schema.names if name not in keys}
    place = np.flatnonzero(first)
    kept = place  # the rows of `ordered` from which the result takes its keys
    group = np.cumsum(first) - 1
    while len(group) > len(kept):
        rank = np.arange(len(group)) - place[group]
        left = np.flatnonzero(rank % 2 == 0)
        paired = (left + 1 < len(group)) & (group[np.minimum(left + 1, len(group) - 1)] == group[left])
        alone, with_next = left[~paired], left[paired]
        merged = merge_columns(
            {name: column.take(pa.array(with_next)) for name, column in values.items()},
            {name: column.take(pa.array(with_next + 1)) for name, column in values.items()},
            merges,
            where,
        )
        back = pa.array(np.argsort(np.concatenate([alone, with_next]), kind="stable"))
        values = {
            name: pa.concat_arrays([column.take(pa.array(alone)), merged[name]]).take(back)
            for name, column in values.items()
        }
        group = group[left]
        place = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    keys_once = ordered.take(pa.array(kept))
    return pa.RecordBatch.from_arrays(
        [keys_once.column(n) if n in keys else values[n] for n in rows.schema.names], schema=rows.schema
    )
