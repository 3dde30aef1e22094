"""What the sinks' folds have in common: which inputs can be folded, which prepared rows may be, and a fold in memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.arrow_compute import pc
from stormproof.core.errors import SinkRefused, TopologyError
from stormproof.core.folds import ByOrder, Fold, SetTruncated, SetUnion, row_of_groups, sets_of_groups
from stormproof.core.graph.aggregation import has_extremes, has_sets
from stormproof.core.sink import SinkInput, SinkMode
from stormproof.core.task.groups import Members

_WIDE_DIGITS: Final = 76


def check_fold_input(input_: SinkInput, where: str) -> None:
    """Refuse a fold that a sink cannot serve.

    Raises:
        TopologyError: keys are missing or of a type that has no one equality (floats, nested), a column is neither key
            nor fold, is folded by a user's function, or its type has no sum, least or greatest value.
    """
    names = input_.schema.names
    unknown = [n for n in (*input_.keys, *input_.folds) if n not in names]
    if unknown:
        raise TopologyError(f"{where}: no column {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
    if input_.mode is not SinkMode.FOLD:
        return
    if not input_.keys:
        raise TopologyError(f"{where}: a fold needs at least one key column")
    idle = [n for n in names if n not in input_.keys and n not in input_.folds]
    both = [n for n in input_.keys if n in input_.folds]
    if idle or both:
        raise TopologyError(f"{where}: column {(idle + both)[0]!r} of a fold must be either a key or folded")
    for name in input_.keys:
        kind = input_.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise TopologyError(
                f"{where}: key {name!r} is {kind}, whose values do not compare alike everywhere; use another type"
            )
    for name, fold in input_.folds.items():
        kind = input_.schema.field(name).type
        if fold is Fold.OWN:
            raise TopologyError(
                f"{where}: column {name!r} is folded by a function of yours, which this sink cannot call: it takes sums, "
                "minima and maxima; keep the result in a state, persistent_aggregate(..., state=...)",
                field=name,
            )
        if isinstance(fold, (SetUnion, SetTruncated)):
            _check_set(name, fold, input_, where)
        elif isinstance(fold, ByOrder):
            _check_by_order(name, fold, input_, where)
        elif not _can_fold(kind, fold):
            raise TopologyError(f"{where}: column {name!r} is {kind}, which has no {fold}", field=name)


def _check_by_order(name: str, fold: ByOrder, input_: SinkInput, where: str) -> None:
    """Refuse a first or last whose columns are not folded as one."""
    for other in (*fold.compared, name):
        if input_.folds.get(other) != fold or name not in fold.compared:
            raise TopologyError(
                f"{where}: column {name!r} is folded as the {fold}: each of these columns must be folded so, and be named "
                "in the order",
                field=other,
            )
        kind = input_.schema.field(other).type
        if not has_extremes(kind):
            raise TopologyError(f"{where}: column {other!r} is {kind}, which has no {fold.end}", field=other)


def _check_set(name: str, fold: SetUnion | SetTruncated, input_: SinkInput, where: str) -> None:
    """Refuse a set of values that stores sort otherwise, and a mark without its set."""
    kind = input_.schema.field(name).type
    if fold.at_most < 1:
        raise TopologyError(f"{where}: column {name!r}: a set of at most {fold.at_most} values holds none", field=name)
    if isinstance(fold, SetUnion):
        if not pa.types.is_list(kind) or not has_sets(kind.value_type):
            raise TopologyError(
                f"{where}: column {name!r} is {kind}, which is no set that every store sorts alike", field=name
            )
    elif not pa.types.is_boolean(kind) or input_.folds.get(fold.of) != SetUnion(fold.at_most):
        raise TopologyError(
            f"{where}: column {name!r} of type {kind} is folded as the {fold}: it must be boolean, and {fold.of!r} a set of "
            f"at most {fold.at_most} values",
            field=name,
        )


def _can_fold(kind: pa.DataType, fold: Fold) -> bool:
    if fold is Fold.SUM:
        return bool(pa.types.is_signed_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
    return has_extremes(kind)


def fold_tables(held: pa.Table, added: pa.Table, input_: SinkInput, where: str) -> pa.Table:
    """`held` with `added` folded in, key by key: sums are exact; a NULL never wins, NaN only over NULL. Each key comes at
    most once in either.

    Raises:
        SinkRefused: a sum does not fit its column.
    """
    keys = list(input_.keys)
    # Columns are named by numbers: the name that Arrow derives ("x_min" of x) may be another column's.
    columns = [pa.concat_tables([held.select([n]), added.select([n])]).column(0) for n in (*keys, *input_.folds)]
    numbers = [str(i) for i in range(len(columns))]
    number_of = {name: number for number, name in enumerate((*keys, *input_.folds))}
    folds = list(zip(numbers[len(keys) :], input_.folds.items(), strict=True))
    plain = [(number, named) for number, named in folds if isinstance(named[1], Fold)]
    for number, (_, fold) in plain:
        column = columns[int(number)]
        if fold is Fold.SUM and pa.types.is_integer(column.type):
            # Arrow's sum of int64 wraps silently; a decimal holds any sum of them.
            columns[int(number)] = column.cast(pa.decimal128(20, 0)).cast(pa.decimal128(38, 0))
        elif fold is Fold.SUM and pa.types.is_decimal(
            column.type
        ):  # Arrow's sum of decimals wraps, too, beyond 38 digits
            columns[int(number)] = column.cast(pa.decimal256(_WIDE_DIGITS, column.type.scale))
    both = pa.Table.from_arrays(columns, names=numbers)
    rows = np.arange(both.num_rows)
    folded = (
        both.append_column("row", pa.array(rows))
        .group_by(numbers[: len(keys)], use_threads=False)
        .aggregate([("row", "list"), *((number, str(fold)) for number, (_, fold) in plain)])
    )
    group_of_row = Members.of(folded.column("row_list"), both.num_rows).group_of_row
    found = {key: folded.column(number) for key, number in zip(keys, numbers, strict=False)}
    for number, (name, fold) in folds:
        kind = input_.schema.field(name).type
        if isinstance(fold, ByOrder):
            compared = [columns[number_of[other]] for other in fold.compared]
            found[name] = columns[int(number)].take(pa.array(row_of_groups(group_of_row, compared, fold.end)))
            continue
        if isinstance(fold, SetUnion):
            found[name] = _union(columns[int(number)], group_of_row, folded.num_rows, fold.at_most).cast(kind)
            continue
        if isinstance(fold, SetTruncated):
            union = _union(columns[int(number_of[fold.of])], group_of_row, folded.num_rows, fold.at_most + 1)
            marks = columns[int(number)].combine_chunks()
            marked = np.zeros(folded.num_rows, np.bool_)
            marked[group_of_row[pc.fill_null(marks, False).to_numpy(zero_copy_only=False)]] = True
            found[name] = pc.or_(pa.array(marked), pc.greater(pc.list_value_length(union), fold.at_most))
            continue
        try:
            found[name] = folded.column(f"{number}_{fold}").cast(kind)
        except pa.ArrowInvalid as error:
            raise SinkRefused(
                f"{where}: the {fold} in column {name!r} does not fit {kind}: {error}", column=name
            ) from error
    return pa.Table.from_arrays([found[name] for name in input_.schema.names], schema=input_.schema)


def _union(lists: pa.ChunkedArray, group_of_row: Rows, groups: int, at_most: int) -> pa.ListArray:
    column = lists.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return sets_of_groups(np.repeat(group_of_row, lengths), column.flatten(), groups, at_most)
