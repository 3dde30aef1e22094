"""Which of two rows of one key is the later one, and the last row of each key: the order of an upsert, over record batches.

The order is total over what a row holds, so the last row of a key does not depend on how rows were cut into batches, on
their order, or on repeats. Postgres and Delta compare in the same way: `sinks.postgres.later`, `sinks.delta.later`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.arrow_compute import pc
from stormproof.core.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, TaskWriter
from stormproof.core.tracking.anchors import MANY_ORIGIN

COMPACTED_ROWS_MIN: Final = 256 * 1024
"""A task drops superseded rows once it holds this many, and then each time that its rows have doubled."""


def has_order(kind: pa.DataType) -> bool:
    """Whether Arrow, Postgres and Delta order values of this type alike; nested types and uuids they do not."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_decimal(kind)
    )


def compared_columns(input_: SinkInput, undecided: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns that decide which of two rows of a key is later, the weightiest first.

    They are the columns of `order_by`, the delete marker, and, for rows that are equal in those, all others in the order of
    the schema: the greater value wins. NULL is less than any value, and NaN less than any number. Text is compared by its
    bytes. Columns of types without a common order, and those that an update leaves alone, decide nothing; nor do those that
    are `undecided`, since the table keeps their values otherwise than they come.
    """
    first = (*input_.order_by, *(() if input_.delete_when is None else (input_.delete_when,)))
    used = {*input_.keys, *input_.keep, *first, *undecided}
    return (*first, *(f.name for f in input_.schema if f.name not in used and has_order(f.type)))


@dataclass(frozen=True, slots=True)
class Latest:
    """The last row of each key: `last` is its row number, `first` that of the first row of its key."""

    last: Rows
    first: Rows


def latest_of(rows: pa.Table, keys: Sequence[str], compared: Sequence[str]) -> Latest:
    """The last row of each key, by the columns `compared`. Of equal rows it is the first one."""
    columns = [rows.column(key) for key in keys]
    names = [str(number) for number in range(len(columns))]
    table = pa.Table.from_arrays([*columns, pa.array(np.arange(rows.num_rows))], names=[*names, "row"])
    grouped = table.group_by(names, use_threads=False).aggregate([("row", "min"), ("row", "count")])
    first: Rows = grouped.column("row_min").to_numpy()
    if len(first) == rows.num_rows:
        return Latest(first, first)
    lists = table.group_by(names, use_threads=False).aggregate([("row", "list")]).column("row_list").combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    of_group: Rows = lists.flatten().to_numpy()
    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    first = of_group[starts]
    last = first.copy()
    several = np.flatnonzero(lengths > 1)
    places = of_group[np.repeat(lengths > 1, lengths)]
    group = np.repeat(several, lengths[several])
    # The greatest first, and NULL and NaN at the end: that is where Arrow puts them, whatever the direction.
    there = rows.select(list(compared)).take(pa.array(places))
    sorted_by = [str(number) for number in range(len(compared))]
    sortable = pa.Table.from_arrays([pa.array(group), *there.columns], names=["group", *sorted_by])
    order = pc.sort_indices(
        sortable, sort_keys=[("group", "ascending"), *((name, "descending") for name in sorted_by)]
    ).to_numpy()
    ordered = group[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    last[ordered[begins]] = places[order[begins]]
    return Latest(last, first)


def put_rows(held: pa.Table, added: pa.Table, input_: SinkInput) -> tuple[pa.Table, int]:
    """`held` with `added` upserted, in which each key comes once; and how many of the added rows changed nothing."""
    both = pa.concat_tables([held, added])
    compared = compared_columns(input_)
    if not input_.order_by:  # what comes replaces what is there
        both = both.append_column("", pa.array(np.arange(both.num_rows)))
        compared = ("",)
    found = latest_of(both, input_.keys, compared)
    columns = [
        both.column(name).take(pa.array(found.first if name in input_.keep else found.last))
        for name in input_.schema.names
    ]
    changed = int(np.count_nonzero(found.last >= held.num_rows))
    return pa.Table.from_arrays(columns, schema=input_.schema), added.num_rows - changed


class LatestWriter(TaskWriter):
    """One task's output for an upsert: the last row of each key. All rows of a key come to one task.

    The rows are kept in memory until `close`, without those that are known to be superseded.
    """

    def __init__(self, writer: TaskWriter, input_: SinkInput, undecided: Sequence[str] = ()) -> None:
        self._writer = writer
        self._keys, self._compared = input_.keys, compared_columns(input_, undecided)
        self._parts: list[pa.RecordBatch] = []
        self._rows = 0
        self._compacted = 0
        self._superseded = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the writer's schema."""
        self._parts.append(rows)
        self._rows += rows.num_rows
        if self._rows >= max(COMPACTED_ROWS_MIN, 2 * self._compacted):
            self._compact()

    def close(self) -> Sequence[PreparedFile]:
        """Write the last row of each key; the number of the others is in the file's description."""
        self._compact()
        for part in self._parts:
            self._writer.write(part)
        self._parts.clear()
        files = self._writer.close()
        return [replace(file, superseded=self._superseded if number == 0 else 0) for number, file in enumerate(files)]

    def discard(self) -> None:
        """Remove what was written."""
        self._parts.clear()
        self._writer.discard()

    def _compact(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_batches(self._parts)
        last = latest_of(table, self._keys, self._compared).last
        if len(last) < table.num_rows:
            table = self._without_messages(table, last).take(pa.array(np.sort(last)))
            self._superseded += self._rows - table.num_rows
            self._parts = table.to_batches()
        self._rows = self._compacted = table.num_rows

    def _without_messages(self, table: pa.Table, last: Rows) -> pa.Table:
        """The rows, in which those that supersede others name no message: refused by the table, such a row would take the
        superseded ones of other messages with it, so it refuses the batch.
        """
        if MESSAGE_COLUMNS.names[0] not in table.schema.names:
            return table
        others = np.setdiff1d(np.arange(table.num_rows), last)
        names = [str(number) for number in range(len(self._keys))]  # a key of the table may be called "row"
        columns = [table.column(key) for key in self._keys]
        keys = pa.Table.from_arrays([*columns, pa.array(np.arange(table.num_rows))], names=[*names, "row"])
        lost = keys.take(pa.array(others)).drop_columns(["row"])
        several = np.zeros(table.num_rows, np.bool_)
        several[keys.join(lost, names, join_type="left semi").column("row").to_numpy()] = True
        mask = pa.array(several)
        unnamed = (
            pa.scalar(None, pa.int64()),
            pa.scalar(MANY_ORIGIN, pa.int64()),
            pa.scalar(None, MESSAGE_COLUMNS.types[2]),
        )
        for name, value in zip(MESSAGE_COLUMNS.names, unnamed, strict=True):
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(at), pc.if_else(mask, value, table.column(at)))
        return table
