"""Which of two rows of one key is the later one, and the last row of each key: the order of an upsert, over record batches.

The order is total over what a row holds, so the last row of a key does not depend on how rows were cut into batches, on
their order, or on repeats. Postgres and Delta compare in the same way: see `sinks.merge_sql`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.arrow_compute import pc
from stormproof.core.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, TaskWriter

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
    are `undecided`, since the table keeps their values otherwise than they come, nor the lineage columns.
    """
    first = (*input_.order_by, *(() if input_.delete_when is None else (input_.delete_when,)))
    lineage = () if input_.lineage is None else input_.lineage.columns.names
    used = {*input_.keys, *input_.keep, *first, *undecided, *lineage}
    return (*first, *(f.name for f in input_.schema if f.name not in used and has_order(f.type)))


@dataclass(frozen=True, slots=True)
class Latest:
    """The last row of each key: `last` is its row number, `first` that of the first row of its key."""

    last: Rows
    first: Rows


def latest_of(rows: pa.Table, keys: Sequence[str], compared: Sequence[str], *, least: bool = False) -> Latest:
    """The last row of each key, by the columns `compared`; `least`: the least one, where NULL and NaN are behind all others.
    Of equal rows it is the first one.
    """
    of_group, lengths = _by_key(rows, keys)
    first = of_group[np.cumsum(lengths) - lengths]
    if len(first) == rows.num_rows:
        return Latest(first, first)
    last = first.copy()
    several = np.flatnonzero(lengths > 1)
    places = of_group[np.repeat(lengths > 1, lengths)]
    group = np.repeat(several, lengths[several])
    order = _later_first(group, rows.select(list(compared)).take(pa.array(places)), least=least)
    ordered = group[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    last[ordered[begins]] = places[order[begins]]
    return Latest(last, first)


@dataclass(frozen=True, slots=True)
class Queues:
    """Rows behind a later one of their key, key by key and the later ones first: `row` is the number of each such row, and
    `behind` that of its key's first one, which is among the `heads`.
    """

    row: Rows
    behind: Rows


def queues_of(heads: pa.Table, others: pa.Table, keys: Sequence[str], compared: Sequence[str]) -> Queues:
    """The rows `others` by the key of one of `heads`, which has each key once."""
    both = pa.concat_tables([heads.select(list(keys)), others.select(list(keys))])
    of_group, lengths = _by_key(both, keys)
    group = np.repeat(np.arange(len(lengths)), lengths)
    is_head = of_group < heads.num_rows
    head = np.full(len(lengths), -1, np.int64)
    head[group[is_head]] = of_group[is_head]
    places, group = of_group[~is_head] - heads.num_rows, group[~is_head]
    order = _later_first(group, others.select(list(compared)).take(pa.array(places)))
    return Queues(places[order], head[group[order]])


def _by_key(rows: pa.Table, keys: Sequence[str]) -> tuple[Rows, Rows]:
    """The rows' numbers, key by key and in ascending order, and how many each key has."""
    columns = [rows.column(key) for key in keys]
    names = [str(number) for number in range(len(columns))]  # a key of the table may be called "row"
    table = pa.Table.from_arrays([*columns, pa.array(np.arange(rows.num_rows))], names=[*names, "row"])
    grouped = table.group_by(names, use_threads=False).aggregate([("row", "min")])
    if grouped.num_rows == rows.num_rows:  # the usual case, and the cheap one
        return grouped.column("row_min").to_numpy(), np.ones(rows.num_rows, np.int64)
    lists = table.group_by(names, use_threads=False).aggregate([("row", "list")]).column("row_list").combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return lists.flatten().to_numpy(), lengths


def _later_first(group: Rows, compared: pa.Table, *, least: bool = False) -> Rows:
    """The order of rows by their group, and in it the later ones first; `least`: the least ones. Of equal rows the first is
    first.
    """
    # NULL and NaN at the end: that is where Arrow puts them, whatever the direction.
    direction = "ascending" if least else "descending"
    names = [str(number) for number in range(compared.num_columns)]
    sortable = pa.Table.from_arrays([pa.array(group), *compared.columns], names=["group", *names])
    order: Rows = pc.sort_indices(
        sortable, sort_keys=[("group", "ascending"), *((name, direction) for name in names)]
    ).to_numpy()
    return order.astype(np.int64)


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


class FileTaskWriter(TaskWriter, Protocol):
    """A task's writer of one file, which ends a row group when it is told to."""

    def flush(self) -> None:
        """Write what waits, as a row group."""
        ...


_FIRST: Final = "_stormproof_first:"
"""Before the name of a column: its value in the first row of the key."""


class LatestWriter(TaskWriter):
    """One task's output for an upsert: the last row of each key. All rows of a key come to one task.

    The rows are kept in memory until `close`, without those that are known to be superseded. Where the table may refuse some
    rows, `file` is the writer once more: the superseded rows go to the head of its file, in row groups of their own, which
    `sinks.staging` passes over.

    The columns of `keep` are those of the first row of the key: of its first message where rows name theirs, and of several
    rows of that message, or of rows that name none, the least one. So they are as if each message were a batch of its own.
    It writes the `columns` of what it is given, by default all.
    """

    def __init__(
        self,
        writer: TaskWriter,
        input_: SinkInput,
        undecided: Sequence[str] = (),
        file: FileTaskWriter | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._writer = writer
        self._keep, self._columns = input_.keep, columns
        self._file = file
        self._keys, self._compared = input_.keys, compared_columns(input_, undecided)
        self._parts: list[pa.RecordBatch] = []
        self._rows = 0
        self._compacted = 0
        self._superseded = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the writer's schema."""
        if self._keep:
            number = MESSAGE_COLUMNS.names[0]
            told = [*([number] if number in rows.schema.names else []), *self._compared, *self._keep]
            rows = pa.RecordBatch.from_arrays(
                [*rows.columns, *(rows.column(name) for name in told)],
                schema=pa.schema([*rows.schema, *(rows.schema.field(name).with_name(_FIRST + name) for name in told)]),
            )
        self._parts.append(rows)
        self._rows += rows.num_rows
        if self._rows >= max(COMPACTED_ROWS_MIN, 2 * self._compacted):
            self._compact()

    def close(self) -> Sequence[PreparedFile]:
        """Write the last row of each key; the number of the others is in the file's description."""
        self._compact()
        kept = 0
        if self._file is not None:
            self._file.flush()
            kept = self._superseded
        for part in self._parts:
            self._writer.write(self._written(part, _FIRST))
        self._parts.clear()
        return [replace(file, rows=file.rows - kept, superseded=self._superseded) for file in self._writer.close()]

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
            if self._file is not None:
                others = np.setdiff1d(np.arange(table.num_rows), last)
                for part in table.take(pa.array(others)).to_batches():
                    self._file.write(self._written(part, ""))
            table = self._with_first(table, last)
            self._superseded += self._rows - table.num_rows
            self._parts = table.to_batches()
        self._rows = self._compacted = table.num_rows

    def _with_first(self, table: pa.Table, last: Rows) -> pa.Table:
        """The rows `last`, in order, each with what tells the first row of its key, and what is kept of that one."""
        order = np.argsort(last)
        made = table.take(pa.array(last[order]))
        told = [name for name in table.schema.names if name.startswith(_FIRST)]
        if told:
            compared = [name for name in told if has_order(table.schema.field(name).type)]
            first = pa.array(latest_of(table, self._keys, compared, least=True).last[order])
            for name in told:
                at = table.schema.get_field_index(name)
                made = made.set_column(at, table.schema.field(at), table.column(at).take(first))
        return made

    def _written(self, part: pa.RecordBatch, kept: str) -> pa.RecordBatch:
        """The rows as they are written; `kept` is before the names of the columns that `keep` is taken from."""
        names = [name for name in part.schema.names if not name.startswith(_FIRST)]
        names = names if self._columns is None else [*self._columns]
        if names == part.schema.names:
            return part
        columns = [part.column(kept + name if name in self._keep else name) for name in names]
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([part.schema.field(name) for name in names]))
