"""How a task writes a sink's prepared file: as Parquet, with digest and statistics, synced before it is named."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.failpoint import failpoint
from stormproof.core.forks import end_if_fork
from stormproof.core.sink import MESSAGE_COLUMNS, PreparedFile, SinkInput, SinkMode, TaskContext, TaskWriter
from stormproof.core.storage.address import StorageOptions, options_to_send, use_storage
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import NewFile
from stormproof.sinks.content import ContentSum, kinds_of
from stormproof.sinks.latest import LatestWriter
from stormproof.sinks.limits import DiscardingWriter, Limits
from stormproof.sinks.misfits import LeavingOutWriter
from stormproof.sinks.partitions import PartitionedTaskWriter
from stormproof.sinks.staging import guard_of, prepared_name
from stormproof.sinks.statistics import FileStatistics
from stormproof.sinks.totals import Sum, Totals, added_up, summed_columns, sums_of

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
            raise ValueError(f"sink {self._sink!r} takes {_shown(self._schema)}, not {_shown(rows.schema)}")
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


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


@dataclass(frozen=True, slots=True)
class FileWriter:
    """A sink's side inside an executor: Parquet files in one folder, and the checks of what the sink can hold.

    With `names_messages` the rows that it is given have the `MESSAGE_COLUMNS` behind their own; without `keeps_messages` an
    upsert does not write them. `private` files are readable
    for this user alone, as is their folder where it is made here: they hold messages' content. Only files that become a
    Delta table's own are not private. `for_bolts` is the sink's resource for bolts. `partitions` are the columns by which a
    task cuts the rows of an append into files. Where `input` is an upsert, a task leaves one row a key, the last one; with
    `names_messages` its file holds the others, too; `undecided` are the columns that do not tell which one is the last
    (`sinks.latest`). `discards`: a value that its column cannot hold is NULL, where the column takes NULL. `leaves_out`: a
    row with such a value is left out, and the file names its messages; rows without message columns are not. `guarded` files
    have a second name, since the folder is a table's own; see `staging.guard_of`. `storage` has the options of an object
    store, which executors have not: they travel with the job. `hashed` are the columns that
    the content digests of an append's files cover; those of a fold have the sums of the columns that are summed, those of an
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
