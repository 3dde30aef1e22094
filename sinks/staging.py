"""Prepared files: how a task writes, syncs, hashes and names them, and how their names are read back."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.arrow_compute import pc
from stormproof.core.errors import Json, SinkRefused
from stormproof.core.failpoint import failpoint
from stormproof.core.forks import end_if_fork
from stormproof.core.sink import PreparedFile, TaskContext
from stormproof.sinks.files import NewFile, files_at
from stormproof.sinks.limits import Limits
from stormproof.sinks.protocol import SinkProblem

ROW_GROUP_ROWS_MAX: Final = 256 * 1024
ROW_GROUP_BYTES_MAX: Final = 64 * 1024 * 1024
"""A row group is written as soon as one of the two is reached: a task's memory is bounded by it, not by the task."""

STATISTICS_COLUMNS_MAX: Final = 32
"""Delta's own default for the number of leading columns with statistics."""

STATISTICS_TEXT_MAX: Final = 32
"""Longer strings are cut in statistics, as Delta does."""

IsDead: TypeAlias = Callable[[int, int, str], bool]
"""Whether nothing can come back to a prepared file, by its txid, attempt and name."""

_HIGHEST_CHARACTER: Final = "\U0010ffff"
_NAME: Final = re.compile(
    r"stormproof-(?P<incarnation>[A-Za-z0-9_.-]+)-(?P<txid>\d+)-(?P<attempt>\d+)-(?P<task>\d+)-[0-9a-f]{8}\.parquet"
)


@dataclass(frozen=True, slots=True)
class PreparedName:
    """What a prepared file's name says of it."""

    incarnation: str
    txid: int
    attempt: int
    task: int


def prepared_name(context: TaskContext) -> str:
    """A new name for a file of this task.

    Two attempts at one task may run at the same time with the same context, so the end of the name comes from the
    operating system's randomness: it is not content, and no tuple's share depends on it.
    """
    ids = f"{context.incarnation}-{context.txid}-{context.attempt}-{context.task}"
    name = f"stormproof-{ids}-{uuid.uuid4().hex[:8]}.parquet"
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"incarnation {context.incarnation!r} cannot be part of a file's name")
    return name


def parse_prepared_name(name: str) -> PreparedName | None:
    """Read a file's name; None where it is not one of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return PreparedName(match["incarnation"], int(match["txid"]), int(match["attempt"]), int(match["task"]))


class _HashingFile:
    """A new file that pyarrow writes into; hashes and counts what passes.

    The hash is of what was meant to be written, so a disk that returns something else is found out later.
    """

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._hasher = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self._file.write(view)
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """Nothing is held back."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._file.close()

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()


class FileStatistics:
    """Delta's statistics of one file, gathered batch by batch.

    Minimum and maximum are kept for integers, strings, dates and floats without NaN; null counts for every flat column.
    What is left out costs a reader data skipping, never a row.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = [
            (i, f.name, _ranged(f.type))
            for i, f in enumerate(schema)
            if i < STATISTICS_COLUMNS_MAX and not _nested(f.type)
        ]
        self.rows = 0
        self._nulls: dict[str, int] = {name: 0 for _, name, _ in self._columns}
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._without_range: set[str] = set()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take one batch in."""
        self.rows += rows.num_rows
        for i, name, ranged in self._columns:
            column = rows.column(i)
            self._nulls[name] += column.null_count
            if not ranged or name in self._without_range or column.null_count == len(column):
                continue
            if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
                # NaN is above every number to Spark, and no number to Arrow.
                self._without_range.add(name)
                continue
            try:
                found: dict[str, Any] = pc.min_max(column).as_py()
            except (ValueError, OverflowError):  # the least of dates, say, that Python has no date for
                self._without_range.add(name)
                continue
            self._low[name] = min(self._low.get(name, found["min"]), found["min"])
            self._high[name] = max(self._high.get(name, found["max"]), found["max"])

    def to_json(self) -> str:
        """The `stats` of an add action."""
        low = {
            n: shown for n, v in self._low.items() if n not in self._without_range and (shown := _lower(v)) is not None
        }
        high = {
            n: shown for n, v in self._high.items() if n not in self._without_range and (shown := _upper(v)) is not None
        }
        return json.dumps(
            {"numRecords": self.rows, "minValues": low, "maxValues": high, "nullCount": self._nulls},
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )


def _nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind))


def _ranged(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    )


def _lower(value: str | int | float | date) -> Json:
    if isinstance(value, str):
        return value[:STATISTICS_TEXT_MAX]  # a prefix is never above the whole
    return _edge(value, -0.0)


def _upper(value: str | int | float | date) -> Json:
    if not isinstance(value, str):
        return _edge(value, 0.0)
    if len(value) <= STATISTICS_TEXT_MAX:
        return value
    if value[STATISTICS_TEXT_MAX] == _HIGHEST_CHARACTER:
        return None
    return value[:STATISTICS_TEXT_MAX] + _HIGHEST_CHARACTER


def _edge(value: int | float | date, zero: float) -> Json:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if value else zero  # -0.0 and 0.0 are one value here and two elsewhere
    return value


class ParquetTaskWriter:
    """One task's output for one sink: one Parquet file, made when the first row comes.

    Guarantee:
        What `close` names is on disk, under its name, with that digest. A file that was begun and not closed is an
        orphan of its attempt, and is swept when the attempt is dead.
    """

    def __init__(
        self, sink: str, directory: str, context: TaskContext, schema: pa.Schema, *, private: bool = True
    ) -> None:
        self._sink = sink
        self._private = private
        self._directory = directory
        self._files = files_at(directory)
        self._context = context
        self._schema = schema
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._statistics = FileStatistics(schema)
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
        self._pending.append(rows)
        self._pending_rows += rows.num_rows
        self._pending_bytes += rows.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS_MAX or self._pending_bytes >= ROW_GROUP_BYTES_MAX:
            self._flush()

    def close(self) -> Sequence[PreparedFile]:
        """Finish the file, fsync it and its folder, and name it; no rows, no file."""
        end_if_fork()  # the file is the parent's, too
        self._flush()
        if self._parquet is None or self._file is None or self._name is None:
            return ()
        self._parquet.close()
        self._file.sync()
        self._file.close()
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
            ),
        )

    def discard(self) -> None:
        """Remove what was written: the task failed."""
        self._pending.clear()
        if self._parquet is not None and self._file is not None and not self._file.closed:
            self._parquet.close()
            self._file.close()
        if self._name is not None:
            self._files.remove(os.path.join(self._directory, self._name))

    def _flush(self) -> None:
        if not self._pending:
            return
        end_if_fork()
        if self._parquet is None:
            self._files.make_folder(self._directory, private=self._private)
            self._name = prepared_name(self._context)
            path = os.path.join(self._directory, self._name)
            self._file = _HashingFile(self._files.write_new(path, private=self._private))
            self._parquet = pq.ParquetWriter(
                self._file, self._schema, compression="snappy", coerce_timestamps="us", allow_truncated_timestamps=False
            )
        self._parquet.write_table(
            pa.Table.from_batches(self._pending, self._pending[0].schema).cast(self._schema),
            row_group_size=ROW_GROUP_ROWS_MAX,
        )
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


@dataclass(frozen=True, slots=True)
class FileWriter:
    """A sink's face inside an executor: Parquet files in one folder, and the checks of what the sink can hold.

    `private` files are for this user alone, as is their folder where it is made here: they hold messages' content. Only
    files that become a Delta table's own are not.
    """

    sink: str
    directory: str
    limits: Limits = field(default_factory=Limits)
    private: bool = True

    def check(self, rows: pa.RecordBatch) -> Sequence[tuple[int, str]]:
        """The rows that this sink could not hold, with column, value and reason."""
        return self.limits.check(rows)

    def open_task(self, context: TaskContext, schema: pa.Schema) -> ParquetTaskWriter:
        """A writer for one task."""
        return ParquetTaskWriter(self.sink, self.directory, context, schema, private=self.private)

    def files_in(self) -> str:
        """The folder."""
        return self.directory

    def resource(self) -> None:
        """Nothing for bolts."""


def require_files(directory: str, files: Sequence[PreparedFile], *, where: str, digests: bool = False) -> None:
    """Check that every prepared file is there, with its size, and where asked with its digest.

    Raises:
        SinkRefused: names each file that is not as it was prepared.
    """
    store, wrong = files_at(directory), list[str]()
    for file in files:
        path = os.path.join(directory, file.path)
        state = store.stat(path)
        if state is None:
            wrong.append(f"{path} is missing")
        elif state.size != file.bytes:
            wrong.append(f"{path} has {state.size} bytes instead of {file.bytes}")
        elif digests:
            try:
                found = file_digest(path)
            except FileNotFoundError:
                wrong.append(f"{path} is missing")
                continue
            if found != file.digest:
                wrong.append(f"{path} has digest {found} instead of {file.digest}")
    if wrong:
        raise SinkRefused(
            f"{where}: {len(wrong)} of {len(files)} prepared files are not as prepared: {'; '.join(wrong[:5])}; "
            "nothing was written; put the files back, then retry the txid",
            problem=SinkProblem.FILE_LOST,
            files=list(wrong),
        )


def file_digest(path: str) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with files_at(path).open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepared_batches(
    directory: str, files: Sequence[PreparedFile], columns: Sequence[str] | None = None, batch_rows: int = 64 * 1024
) -> Iterator[pa.RecordBatch]:
    """The rows of prepared files, file by file in path order, in bounded memory.

    Raises:
        SinkRefused: a file is gone. Where it was there when the commit began, that is mostly the work of a driver that took
            over while this one stood still.
    """
    for file in sorted(files, key=lambda f: f.path):
        path = os.path.join(directory, file.path)
        try:
            opened = files_at(directory).open_native(path)
        except FileNotFoundError as error:
            raise SinkRefused(
                f"the prepared file {path} is missing; nothing was written; put it back, then retry the txid",
                problem=SinkProblem.FILE_LOST,
                files=[path],
            ) from error
        with opened, pq.ParquetFile(opened) as parquet:
            yield from parquet.iter_batches(batch_size=batch_rows, columns=None if columns is None else list(columns))


def remove_staged(directory: str, incarnation: str, txid: int, files: Sequence[PreparedFile]) -> None:
    """Remove a txid's staging files, which nobody needs any more; those already gone are fine.

    Also those that are not among its `files`: a task that ran again, or an attempt that ended, leaves its own.
    """
    store = files_at(directory)
    for file in files:
        store.remove(os.path.join(directory, file.path))
    for name in store.list(directory):
        parsed = parse_prepared_name(name)
        if parsed is not None and (parsed.incarnation, parsed.txid) == (incarnation, txid):
            store.remove(os.path.join(directory, name))


def sweep_folder(
    directory: str,
    incarnation: str,
    is_dead: IsDead,
    keep: Callable[[], frozenset[str]] = frozenset,
) -> int:
    """Remove this incarnation's prepared files that are dead by txid, attempt and name; returns how many.

    `keep` names files that stay whatever `is_dead` says; it is asked only when there is something to remove.
    """
    store, dead = files_at(directory), list[str]()
    for name in store.list(directory):
        parsed = parse_prepared_name(name)
        if parsed is not None and parsed.incarnation == incarnation and is_dead(parsed.txid, parsed.attempt, name):
            dead.append(name)
    if not dead:
        return 0
    kept = keep()
    removed = 0
    for name in sorted(dead):
        if name in kept:
            continue
        failpoint("sweep.before_unlink")
        store.remove(os.path.join(directory, name))
        removed += 1
    store.sync_folder(directory)
    return removed


def statistics_of(file: PreparedFile) -> Mapping[str, Json]:
    """A prepared file's statistics, read."""
    read: dict[str, Json] = json.loads(file.statistics)
    return read
