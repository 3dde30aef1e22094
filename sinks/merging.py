"""Folds by a function over Arrow columns: a sink reads what it holds, and writes what the function makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from stormproof.core.errors import SinkRefused, TopologyError
from stormproof.core.folds import ByFunction
from stormproof.core.merging import MERGINGS
from stormproof.core.sink import SinkInput
from stormproof.core.sketches import UnreadableSketch

ROWS_AT_ONCE = 512
"""Rows that are merged at a time, so that old and new values of any size take bounded memory: 512 sketches are 16 MiB."""


def function_folds(input_: SinkInput) -> list[ByFunction]:
    """The folds by functions, one for each result."""
    return list(dict.fromkeys(fold for fold in input_.folds.values() if isinstance(fold, ByFunction)))


def columns_by_function(input_: SinkInput) -> list[str]:
    """The columns that functions merge, result by result."""
    return [name for fold in function_folds(input_) for name in fold.columns]


def check_by_function(name: str, fold: ByFunction, input_: SinkInput, where: str) -> None:
    """Refuse a result whose columns are not those that its function merges.

    Raises:
        TopologyError: names the column.
    """
    types = MERGINGS[fold.function].types
    apart = [other for other in (*fold.columns, name) if input_.folds.get(other) != fold or name not in fold.columns]
    if apart or len(fold.columns) != len(types):
        raise TopologyError(
            f"{where}: column {name!r} is folded by the {fold}: each of these {len(types)} columns must be folded so",
            field=(*apart, name)[0],
        )
    for other, kind in zip(fold.columns, types, strict=True):
        given = input_.schema.field(other).type
        if given != kind:
            raise TopologyError(
                f"{where}: column {other!r} is {given}, and folded by the {fold}: it must be {kind}",
                field=other,
            )


def merged_columns(held: pa.Table, added: pa.Table, input_: SinkInput, where: str) -> pa.Table:
    """The columns that functions merge, of rows of the same keys in the same order.

    Raises:
        SinkRefused: a held value is none that its function can merge; names its column and key.
    """
    made: dict[str, pa.ChunkedArray] = {}
    for fold in function_folds(input_):
        parts: list[list[pa.Array]] = [[] for _ in fold.columns]
        for start in range(0, added.num_rows, ROWS_AT_ONCE):
            old, new = (rows.slice(start, ROWS_AT_ONCE) for rows in (held, added))
            try:
                merged = MERGINGS[fold.function].merge(_columns(old, fold), _columns(new, fold))
            except UnreadableSketch as error:
                key = new.select(list(input_.keys)).slice(error.row, 1).to_pylist()[0]
                raise SinkRefused(
                    f"{where}: the table's column {fold.columns[-1]!r} cannot be merged for the key {key!r}: {error}. "
                    "Another program wrote it; nothing was written. Put the value back, or delete the row, then retry",
                    column=fold.columns[-1],
                    key=repr(key),
                ) from error
            for part, column in zip(parts, merged, strict=True):
                part.append(column)
        for name, part in zip(fold.columns, parts, strict=True):
            made[name] = pa.chunked_array(part, input_.schema.field(name).type)
    return pa.table(made)


def _columns(rows: pa.Table, fold: ByFunction) -> list[pa.Array]:
    return [rows.column(name).combine_chunks() for name in fold.columns]


def merged_rows(
    held: Iterable[pa.RecordBatch], added: pa.Table, input_: SinkInput, where: str
) -> Iterator[pa.RecordBatch]:
    """The added rows, each once, with what functions make of their columns and of the held row of their key.

    `held` has the keys and the columns that functions merge; it is read once, batch by batch.

    Raises:
        SinkRefused: see `merged_columns`; or `held` has a key twice, so that two values are held for it.
    """
    keys, names = list(input_.keys), columns_by_function(input_)
    place = pa.array(np.arange(added.num_rows))
    wanted = pa.table([*added.select(keys).columns, place], names=[*keys, "\x00added"])
    found = np.zeros(added.num_rows, np.int64)
    for batch in held:
        rows = pa.Table.from_batches([batch]).cast(pa.schema([input_.schema.field(n) for n in (*keys, *names)]))
        there = rows.select(keys).append_column("\x00held", pa.array(np.arange(rows.num_rows)))
        pairs = there.join(wanted, keys, join_type="inner")
        np.add.at(found, pairs.column("\x00added").to_numpy(), 1)
        if (found > 1).any():
            key = added.select(keys).slice(int(found.argmax()), 1).to_pylist()[0]
            raise SinkRefused(
                f"{where}: the table has the key {key!r} more than once, and a value of each to merge; nothing was written. "
                "Leave one row of it, then retry",
                key=repr(key),
            )
        for start in range(0, pairs.num_rows, ROWS_AT_ONCE):
            some = pairs.slice(start, ROWS_AT_ONCE)
            old, new = rows.take(some.column("\x00held")), added.take(some.column("\x00added"))
            merged = merged_columns(old, new, input_, where)
            for name in names:
                new = new.set_column(new.schema.get_field_index(name), added.schema.field(name), merged.column(name))
            yield from new.combine_chunks().to_batches()
    yield from added.filter(pa.array(found == 0)).to_batches()
