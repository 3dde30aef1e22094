"""Rows by key, over record batches: which of two rows is the later one, and the last row of each key; the fold of columns;
that no key comes twice.

The order of an upsert is total over what a row holds, so the last row of a key does not depend on how rows were cut into
batches, on their order, or on repeats. Postgres and Delta compare in the same way: see `sinks.rows.merge_sql`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words, pc
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.fold import ByOrder, Fold, SetTruncated, SetUnion, row_of_groups, sets_of_groups
from stormproof.core.contract.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, TaskWriter
from stormproof.core.task.reduce import Members
from stormproof.core.task.router import hash_keys, is_hashable

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
    `sinks.prepare.staging` passes over.

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


_WIDE_DIGITS: Final = 76


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


HASHES_MAX: Final = 16 << 20
"""Keys of a table that are looked at together. Where there are more, the table is read several times."""
SUSPECTS_MAX: Final = 100_000
"""Hashes of keys that come twice whose keys are compared; more are not needed to know that some do."""


def require_unique_keys(
    read: Callable[[], Iterable[pa.RecordBatch]], rows: int, keys: tuple[str, ...], where: str
) -> None:
    """Refuse prepared rows that a commit by key would apply wrongly: a NULL key matches no key, and a new key that comes
    twice would be inserted twice.

    `read` gives the key columns of all rows, and may be called twice: only keys of equal hashes are compared.

    Raises:
        SinkRefused: names the column, or one such key; or there are more or fewer than `rows` rows.
    """
    hashes = np.empty(rows, np.uint64)
    at, comparable = 0, True
    for batch in read():
        for name in keys:
            if batch.column(name).null_count:
                raise SinkRefused(f"{where}: key column {name!r} holds NULL, which no key can match", column=name)
        comparable = comparable and all(is_hashable(batch.column(name).type) for name in keys)
        if comparable and at + batch.num_rows <= rows:
            hashes[at : at + batch.num_rows] = hash_keys(batch, keys)
        at += batch.num_rows
    if at != rows:
        raise SinkRefused(f"{where}: {at} rows read from the prepared files instead of {rows}")
    if comparable:
        suspects = _twice(hashes)
        if not suspects.size:
            return
        found = _doubled((_with_hashes(batch, keys, suspects) for batch in read()), keys)
    else:
        found = _doubled(read(), keys)
    if found.num_rows:
        more = pc.sum(pc.subtract(found.column("_sum"), 1)).as_py()
        one = found.select(list(keys)).slice(0, 1).to_pylist()[0]
        raise SinkRefused(f"{where}: {more} keys come more than once, such as {one!r}", key=repr(one))


def doubled_keys(read: Callable[[], Iterable[pa.RecordBatch]], rows: int, keys: tuple[str, ...]) -> int:
    """How many keys a table of so many rows has more than once; of a great many, at least how many. A NULL equals none."""
    parts = max(1, -(-rows // HASHES_MAX))
    return sum(_doubled(_suspects(read, keys, part, parts), keys).num_rows for part in range(parts))


def _suspects(
    read: Callable[[], Iterable[pa.RecordBatch]], keys: tuple[str, ...], part: int, parts: int
) -> Iterator[pa.RecordBatch]:
    """The rows whose keys' hashes are of this part, and come more than once."""

    def chosen() -> Iterator[pa.RecordBatch]:
        for batch in read():
            yield (
                batch.select(list(keys)).filter(pa.array(hash_keys(batch, keys) % np.uint64(parts) == part)).drop_null()
            )

    hashes = [hash_keys(batch, keys) for batch in chosen()]
    found = _twice(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)
    if found.size:
        yield from (_with_hashes(batch, keys, found[:SUSPECTS_MAX]) for batch in chosen())


def _twice(hashes: Words) -> Words:
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def _with_hashes(batch: pa.RecordBatch, keys: tuple[str, ...], hashes: Words) -> pa.RecordBatch:
    return batch.filter(pa.array(np.isin(hash_keys(batch, keys), hashes)))


def _doubled(batches: Iterable[pa.RecordBatch], keys: tuple[str, ...]) -> pa.Table:
    """The keys that come more than once, and how often in the column `_sum`."""
    parts = [batch.select(list(keys)) for batch in batches if batch.num_rows]
    if not parts:
        return pa.table({"_sum": pa.array([], pa.int64())})
    table = pa.Table.from_batches(parts)
    counted = table.append_column("", pa.repeat(1, table.num_rows)).group_by(list(keys)).aggregate([("", "sum")])
    return counted.filter(pc.greater(counted.column("_sum"), 1))
