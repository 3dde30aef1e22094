"""How a task writes a sink's prepared file: as Parquet, with digest and statistics, synced before it is named; cut by the
partitions of a Delta table, where there are any; and the writers that stand in its place, and let no row into a sink.

A prepared file of a partitioned table holds rows of one partition alone. The partition columns are not in the file: their
values travel as text in the file's description, and its digest covers them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.arrow import pc
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.process import end_if_fork
from stormproof.core.contract.schema import shown_fields
from stormproof.core.contract.sink import (
    MESSAGE_COLUMNS,
    Lineage,
    PreparedFile,
    SinkInput,
    SinkMode,
    SinkWriter,
    TaskContext,
    TaskWriter,
)
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import NewFile, StorageOptions, options_to_send, use_storage
from stormproof.sinks.contract.preview import EXAMPLES_MAX, example_of
from stormproof.sinks.prepare.rejected_messages import LeavingOutWriter
from stormproof.sinks.prepare.staging import FileStatistics, guard_of, prepared_name
from stormproof.sinks.rows.by_key import FileTaskWriter, LatestWriter
from stormproof.sinks.rows.content import ContentSum, Sum, Totals, added_up, kinds_of, summed_columns, sums_of
from stormproof.sinks.rows.limits import DiscardingWriter, Limits

ROW_GROUP_ROWS_MAX: Final = 256 * 1024
ROW_GROUP_BYTES_MAX: Final = 64 * 1024 * 1024
"""A row group is written as soon as one of the two is reached: they bound the memory of a task, however many rows it has."""


_FLOATS: Final = ("FLOAT", "DOUBLE")


class _HashingFile(io.RawIOBase):
    """A new file that pyarrow writes into; hashes and counts the bytes.

    The hash is that of the bytes as they were meant, so a disk that returns other bytes is found out later.
    """

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._hasher = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self._file.write(view)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def writable(self) -> bool:
        return True

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._file.close()
        finally:
            super().close()  # closed, even where that failed: the number of the file may be another's by now

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()


class ParquetTaskWriter:
    """One task's output for one sink: one Parquet file, made when the first row comes, or, with `empty`, without any.

    Guarantee:
        The file that `close` returns is on disk under its name, with that digest. A file that was begun and not closed
        is an orphan of its attempt, and is swept once the attempt is dead.
    """

    def __init__(
        self,
        sink: str,
        directory: str,
        context: TaskContext,
        schema: pa.Schema,
        *,
        private: bool = True,
        partition: str = "",
        guarded: bool = False,
        empty: bool = False,
        hashed: Collection[str] = (),
        summed: Collection[str] = (),
    ) -> None:
        self._empty = empty
        self._sums = dict.fromkeys(summed, Sum())
        kinds = kinds_of(schema, [name for name in hashed if name not in MESSAGE_COLUMNS.names])
        self._content = ContentSum(kinds) if kinds else None
        self._sink = sink
        self._private = private
        self._guarded = guarded and files_at(directory).is_local
        self._partition = partition
        self._directory = directory
        self._files = files_at(directory)
        self._context = context
        self._schema = schema
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._statistics = FileStatistics(pa.schema([f for f in schema if f.name not in MESSAGE_COLUMNS.names]))
        self._name: str | None = None
        self._file: _HashingFile | None = None
        self._parquet: pq.ParquetWriter | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the writer's schema.

        Raises:
            ValueError: the rows' columns are not those of the schema, by name, order and type.
        """
        if rows.schema.names != self._schema.names or rows.schema.types != self._schema.types:
            raise ValueError(f"sink {self._sink!r} takes {shown_fields(self._schema)}, not {shown_fields(rows.schema)}")
        if rows.num_rows == 0:
            return
        self._statistics.add(rows)
        self._sums = added_up(self._sums, sums_of(rows, self._sums))
        self._pending.append(rows)
        self._pending_rows += rows.num_rows
        self._pending_bytes += rows.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS_MAX or self._pending_bytes >= ROW_GROUP_BYTES_MAX:
            self.flush()

    def close(self) -> Sequence[PreparedFile]:
        """Finish the file, and fsync it and its folder. Returns it; nothing where no row was written."""
        end_if_fork()  # the file is the parent's, too
        self.flush()
        if self._parquet is None or self._file is None or self._name is None:
            return ()
        self._parquet.close()
        self._file.sync()
        self._file.close()
        if self._guarded:
            path = os.path.join(self._directory, self._name)
            self._files.link(path, guard_of(path))
        self._files.sync_folder(self._directory)
        failpoint("task.after_file")
        return (
            PreparedFile(
                sink=self._sink,
                path=self._name,
                rows=self._statistics.rows,
                bytes=self._file.bytes,
                digest=self._file.digest,
                statistics=self._statistics.to_json(),
                partition=self._partition,
                content=self._said,
            ),
        )

    @property
    def _said(self) -> str:
        """What is kept of the rows' content."""
        if self._sums:
            return Totals(sums=self._sums).to_text()
        return "" if self._content is None else self._content.content.to_text()

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        self._pending.clear()
        if self._parquet is not None and self._file is not None and not self._file.closed:
            self._parquet.close()
            self._file.close()
        if self._name is not None:
            path = os.path.join(self._directory, self._name)
            self._files.remove(path)
            if self._guarded:
                self._files.remove(guard_of(path))

    def flush(self) -> None:
        """Write what waits, as a row group; the file is made where it is the first."""
        if not self._pending and (self._parquet is not None or not self._empty):
            return
        end_if_fork()
        if self._parquet is None:
            self._files.make_folder(self._directory, private=self._private)
            self._name = prepared_name(self._context)
            path = os.path.join(self._directory, self._name)
            self._file = _HashingFile(self._files.write_new(path, private=self._private))
            columns: Any = indexed(self._schema)
            self._parquet = pq.ParquetWriter(
                self._file,
                self._schema,
                compression="snappy",
                coerce_timestamps="us",
                allow_truncated_timestamps=False,
                write_statistics=columns,
                use_dictionary=columns,
            )
        rows = pa.Table.from_batches(self._pending, self._pending[0].schema if self._pending else self._schema)
        if self._content is not None:
            for batch in rows.to_batches() if len(self._pending) == 1 else rows.combine_chunks().to_batches():
                self._content.add(batch)
        self._parquet.write_table(rows.cast(self._schema), row_group_size=ROW_GROUP_ROWS_MAX)
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0


def indexed(schema: pa.Schema) -> bool | list[str]:
    """The columns of the Parquet file that have statistics and a dictionary in it: all but floats.

    Arrow leaves NaN out of the statistics. To Spark, DuckDB and delta-rs NaN is above every number: they would pass over a
    row group whose maximum is too small, and lose its NaN. Spark also passes over a row group whose dictionary lacks the
    value that is asked for, and takes -0.0 and 0.0 for two values there, though they are equal.
    """
    empty = io.BytesIO()
    pq.write_table(schema.empty_table(), empty)
    columns = pq.ParquetFile(empty).schema
    found = [columns.column(i) for i in range(len(columns))]
    kept = [column.path for column in found if column.physical_type not in _FLOATS]
    return True if len(kept) == len(found) else kept or False


@dataclass(frozen=True, slots=True)
class FileWriter:
    """A sink's side inside an executor: Parquet files in one folder, and the checks of what the sink can hold.

    With `names_messages` the rows that it is given have the `MESSAGE_COLUMNS` behind their own; without `keeps_messages` an
    upsert does not write them. `private` files are readable
    for this user alone, as is their folder where it is made here: they hold messages' content. Only files that become a
    Delta table's own are not private. `for_bolts` is the sink's resource for bolts. `partitions` are the columns by which a
    task cuts the rows of an append into files. Where `input` is an upsert, a task leaves one row a key, the last one; with
    `names_messages` its file holds the others, too; `undecided` are the columns that do not tell which one is the last
    (`sinks.rows.by_key`). `discards`: a value that its column cannot hold is NULL, where the column takes NULL.
    `leaves_out`: a row with such a value is left out, and the file names its messages; rows without message columns are not.
    `guarded` files have a second name, since the folder is a table's own; see `staging.guard_of`. `storage` has
    the options of an object store, which executors have not: they travel with the job. `hashed` are the columns that the
    content digests of an append's files cover; those of a fold have the sums of the columns that are summed, those of an
    upsert nothing.
    """

    sink: str
    directory: str
    limits: Limits = field(default_factory=Limits)
    private: bool = True
    for_bolts: object | None = None
    partitions: tuple[str, ...] = ()
    input: SinkInput | None = None
    discards: bool = False
    leaves_out: bool = False
    names_messages: bool = False
    undecided: tuple[str, ...] = ()
    keeps_messages: bool = True
    guarded: bool = False
    storage: StorageOptions | None = field(init=False)
    hashed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", options_to_send(self.directory))

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that fail their messages, since this sink cannot hold them, with column, value and reason."""
        if self.leaves_out:
            return ()
        return self.limits.check_required(rows) if self.discards else self.limits.check(rows)

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        if self.storage is not None:
            use_storage(self.directory, self.storage)
        writer = self._latest(context, schema)
        if self.leaves_out and MESSAGE_COLUMNS.names[0] in schema.names:
            return self.left_out(writer, context, schema)
        return DiscardingWriter(writer, self.limits) if self.discards else writer

    def left_out(self, writer: TaskWriter, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """The writer without rows that their columns cannot hold."""
        return LeavingOutWriter(writer, self.limits, self.empty(context, schema))

    def empty(self, context: TaskContext, schema: pa.Schema) -> Callable[[], TaskWriter]:
        """What makes a file without rows, for a task that has nothing else to write."""
        return lambda: self._parquet(context, schema, "", empty=True)

    def _latest(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        if self.input is None or self.input.mode is not SinkMode.UPSERT:
            return self._opened(context, schema)
        if not self.keeps_messages:
            schema = pa.schema([field for field in schema if field.name not in MESSAGE_COLUMNS.names])
        file = ParquetTaskWriter(self.sink, self.directory, context, schema, private=self.private)
        refusable = file if self.names_messages and self.keeps_messages else None
        return LatestWriter(file, self.input, self.undecided, refusable, schema.names)

    def _opened(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        if not self.partitions:
            return self._parquet(context, schema, "")
        return PartitionedTaskWriter(
            self.partitions,
            schema,
            lambda kept, partition: self._parquet(context, kept, partition),
        )

    def _parquet(
        self, context: TaskContext, schema: pa.Schema, partition: str, *, empty: bool = False
    ) -> ParquetTaskWriter:
        return ParquetTaskWriter(
            self.sink,
            self.directory,
            context,
            schema,
            private=self.private,
            partition=partition,
            guarded=self.guarded,
            empty=empty,
            hashed=self.hashed,
            summed=() if self.input is None else summed_columns(self.input.folds),
        )

    def files_in(self) -> str:
        """The folder."""
        return self.directory

    def resource(self) -> object | None:
        """What bolts may use in executors."""
        return self.for_bolts


OPEN_MAX: Final = 100
"""Files that a task keeps open at once. Where its rows have more partitions, it ends these files and begins others."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""So many bytes of rows wait for their files at most, over all partitions of a task."""


class PartitionedTaskWriter:
    """One task's output for a partitioned table: a file for each partition that its rows have, or a few."""

    def __init__(
        self, columns: Sequence[str], schema: pa.Schema, open_file: Callable[[pa.Schema, str], FileTaskWriter]
    ) -> None:
        self._columns = tuple(columns)
        self._schema = schema
        self._kept = [name for name in schema.names if name not in self._columns]
        self._open_file = open_file
        self._open: dict[str, FileTaskWriter] = {}
        self._waiting = 0
        self._done: list[PreparedFile] = []
        self._all: list[FileTaskWriter] = []

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows of the writer's schema.

        Raises:
            ValueError: the rows' columns are not those of the schema.
        """
        if rows.schema.names != self._schema.names or rows.schema.types != self._schema.types:
            raise ValueError(f"this writer takes columns {self._schema.names}, not {rows.schema.names}")
        if rows.num_rows == 0:
            return
        for partition, part in self._parts(rows):
            if partition not in self._open:
                file = self._open_file(part.schema, partition)
                self._open[partition] = file
                self._all.append(file)
            self._open[partition].write(part)
        self._waiting += rows.nbytes
        if self._waiting >= BYTES_MAX or len(self._open) > OPEN_MAX:
            self._let_go()

    def close(self) -> Sequence[PreparedFile]:
        """Finish all files; returns them."""
        self._end_files()
        return tuple(self._done)

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        for file in self._all:
            file.discard()

    def _let_go(self) -> None:
        if len(self._open) > OPEN_MAX:
            self._end_files()
        else:
            for file in self._open.values():
                file.flush()
        self._waiting = 0

    def _end_files(self) -> None:
        for file in self._open.values():
            self._done += file.close()
        self._open.clear()

    def _parts(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each partition, with its values as JSON."""
        there = [name for name in self._columns if name in self._schema.names]
        texts = [as_text(rows.column(name)).dictionary_encode(null_encoding="encode") for name in there]
        codes = np.zeros(rows.num_rows, np.int64)
        for text in texts:
            own = text.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            codes = np.unique(codes * len(text.dictionary) + own, return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        kept = rows.select(self._kept)
        for start, end in zip(starts, [*starts[1:], rows.num_rows], strict=True):
            row = int(order[start])
            values = dict.fromkeys(self._columns)  # one that the rows do not have is NULL
            values |= {n: t.dictionary[t.indices[row].as_py()].as_py() for n, t in zip(there, texts, strict=True)}
            yield json.dumps(values), kept.take(pa.array(order[start:end]))


def as_text(column: pa.Array) -> pa.Array:
    """A partition column's values as Delta's log spells them."""
    kind = column.type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return column.cast(pa.string())
    in_utc = column.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us")).cast(pa.string())
    return pc.binary_join_element_wise(pc.replace_substring(in_utc, " ", "T"), "Z", "")


def partition_values(file: PreparedFile) -> Mapping[str, str | None]:
    """The partition of a prepared file; empty where it was not cut."""
    values: dict[str, str | None] = json.loads(file.partition) if file.partition else {}
    return values


@dataclass(frozen=True, slots=True)
class WritesNothing:
    """The writer of a sink that holds a batch's messages already: it takes the rows, and writes and counts none of them.

    `of` is the sink's writer; None where there is none without opening the sink.
    """

    sink: str
    of: SinkWriter | None = None

    @property
    def names_messages(self) -> bool:
        """No: the columns would only be counted among the bytes."""
        return False

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """Every row will do."""
        return ()

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer that makes no file."""
        return _NoFile()

    def files_in(self) -> str | None:
        """The sink's folder."""
        return None if self.of is None else self.of.files_in()

    def resource(self) -> object | None:
        """What bolts may use in executors."""
        return None if self.of is None else self.of.resource()


class _NoFile:
    def write(self, rows: pa.RecordBatch) -> None:
        pass

    def close(self) -> Sequence[PreparedFile]:
        return ()

    def discard(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Rehearsal(WritesNothing):
    """A writer that counts the rows that another one would refuse, and hands it all others. No row is refused to the caller.

    What it counted comes as one more `PreparedFile` of each task, which has no path.
    """

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task. Rows are checked when they are written."""
        assert self.of is not None
        return _RehearsedTask(self.of, self.of.open_task(context, schema))


class _RehearsedTask:
    def __init__(self, writer: SinkWriter, task: TaskWriter) -> None:
        self._writer = writer
        self._task = task
        self._refused = 0
        self._examples: list[str] = []

    def write(self, rows: pa.RecordBatch) -> None:
        refused = self._writer.check(rows)
        if refused:
            self._refused += len(refused)
            for row, text in refused[: EXAMPLES_MAX - len(self._examples)]:
                self._examples.append(example_of(text, repr(rows.slice(row, 1).to_pylist()[0])))
            kept = np.ones(rows.num_rows, np.bool_)
            kept[[row for row, _ in refused]] = False
            rows = rows.filter(pa.array(kept))
        self._task.write(rows)

    def close(self) -> Sequence[PreparedFile]:
        report = json.dumps({"refused": self._refused, "examples": self._examples})
        return (*self._task.close(), PreparedFile(self._writer.sink, "", 0, 0, "", report))

    def discard(self) -> None:
        self._task.discard()


@dataclass(frozen=True, slots=True)
class OneMessageWriter:
    """A writer of rows that are all of one message, such as a micro-batch's: it adds the lineage columns to them."""

    of: SinkWriter
    lineage: Lineage
    message: str

    @property
    def sink(self) -> str:
        """The sink's name."""
        return self.of.sink

    @property
    def names_messages(self) -> bool:
        """As the other writer."""
        return self.of.names_messages

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that the other writer refuses."""
        return self.of.check(rows)

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        task = self.of.open_task(context, pa.schema([*schema, *self.lineage.columns]))
        return _WithLineage(task, self._added(context.txid))

    def _added(self, txid: int) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
        def added(rows: pa.RecordBatch) -> pa.RecordBatch:
            ids = pa.scalar(self.message, pa.string())
            return self.lineage.added_to(rows, txid, lambda: pa.repeat(ids, rows.num_rows))

        return added

    def files_in(self) -> str | None:
        """The folder of the other writer."""
        return self.of.files_in()

    def resource(self) -> object | None:
        """That of the other writer."""
        return self.of.resource()


class _WithLineage:
    def __init__(self, task: TaskWriter, added: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
        self._task, self._added = task, added

    def write(self, rows: pa.RecordBatch) -> None:
        self._task.write(self._added(rows))

    def close(self) -> Sequence[PreparedFile]:
        return self._task.close()

    def discard(self) -> None:
        self._task.discard()


def one_message_writer(writer: SinkWriter, input_: SinkInput, message: str) -> SinkWriter:
    """The writer, with lineage columns where the sink stores them."""
    return writer if input_.lineage is None else OneMessageWriter(writer, input_.lineage, message)
