"""An exchange: each task of a stage sends rows to the tasks of the next stage, and a count of what it sent.

Each task sends one control row to every task of the next stage: the number of chunks and rows that it sent there, and their
XOR. Its report travels in one of them. So the receiver sees a chunk, notice or control row that is lost, doubled or
tripled, with or without shares.

A task that is repeated may send other rows than the first time, and its readers may then have read different runs of it.
So the control rows have the mark of the run that sent them, which no other run has. Each reader reports a digest of all
marks that it read, and all readers of a stage must have read the same (`stormproof.core.task.job.require_one_run`).
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, Words, pc
from stormproof.core.task.job import ACK, ACK_SCHEMA, CONTROL, INIT, INIT_SCHEMA, TaskReport, WireRow
from stormproof.core.tracking.share import MANY, MANY_ORIGIN, Anchors, MetMessages, as_signed, as_words, xor_reduce

# ---- chunks: rows that cross an exchange, with their anchors in columns before their own.
#
# A chunk has one of four forms: rows without anchors; rows with one share each, which were combined; rows with one
# (message, share) pair each; rows with any number of pairs

_SHARE: Final = pa.field("\x00share", pa.int64(), nullable=False)
_MESSAGE: Final = pa.field("\x00message", pa.int64(), nullable=False)
_ORIGIN: Final = pa.field("\x00origin", pa.int64(), nullable=False)
_LISTS: Final = tuple(pa.field(f.name, pa.list_(f.type), nullable=False) for f in (_MESSAGE, _ORIGIN, _SHARE))


class ChunkForm(IntEnum):
    """What a chunk has beside its rows."""

    ROWS = 0
    SHARES = 1
    PAIRS = 2
    LISTS = 3


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that came over an edge, with their pairs; `origin` is `MANY_ORIGIN` where a pair stands for many."""

    rows: pa.RecordBatch
    row: Rows | None
    id: Rows | None
    origin: Rows | None
    share: Words | None

    def anchors(self, messages: MetMessages) -> Anchors:
        """The rows' anchors; their messages are added to the task's."""
        if self.id is None or self.origin is None:
            return Anchors(self.rows.num_rows, self.row, None, self.share)
        first = messages.append(self.id, self.origin)
        number = np.arange(first, first + len(self.id), dtype=np.int64)
        number[self.origin == MANY_ORIGIN] = MANY
        return Anchors(self.rows.num_rows, self.row, number, self.share)


def pack(rows: pa.RecordBatch, anchors: Anchors, messages: MetMessages) -> tuple[ChunkForm, pa.RecordBatch]:
    """Rows with their anchors in columns before their own."""
    columns: list[pa.Array] = []
    fields: list[pa.Field] = []
    if anchors.row is None and anchors.message is None:
        form = ChunkForm.ROWS if anchors.share is None else ChunkForm.SHARES
    else:
        form = ChunkForm.PAIRS if anchors.row is None else ChunkForm.LISTS
        number = anchors.messages()
        many = number == MANY
        known = np.where(many, 0, number)
        ids, origins = messages.ids(known) if messages.number else known, np.full(len(number), MANY_ORIGIN, np.int64)
        if messages.number:
            origins = np.where(many, MANY_ORIGIN, messages.origins(known))
        columns += [pa.array(ids), pa.array(origins)]
        fields += [_MESSAGE, _ORIGIN]
    if anchors.share is not None:
        columns.append(pa.array(as_signed(anchors.share)))
        fields.append(_SHARE)
    if form is ChunkForm.LISTS:
        offsets = pa.array(np.searchsorted(anchors.row_of_pairs(), np.arange(anchors.rows + 1)).astype(np.int32))
        columns = [pa.ListArray.from_arrays(offsets, column) for column in columns]
        fields = [pa.field(f.name, pa.list_(f.type), nullable=False) for f in fields]
    return form, pa.RecordBatch.from_arrays([*columns, *rows.columns], schema=pa.schema([*fields, *rows.schema]))


def packed_schema(form: ChunkForm, schema: pa.Schema, *, tracked: bool) -> pa.Schema:
    """The schema of a chunk of this form, whose rows have the given schema."""
    share = [_SHARE] if tracked else []
    match form:
        case ChunkForm.ROWS:
            return schema
        case ChunkForm.SHARES:
            return pa.schema([_SHARE, *schema])
        case ChunkForm.PAIRS:
            return pa.schema([_MESSAGE, _ORIGIN, *share, *schema])
        case ChunkForm.LISTS:
            return pa.schema([*(_LISTS if tracked else _LISTS[:2]), *schema])


def unpack(form: ChunkForm, packed: pa.RecordBatch, schema: pa.Schema, *, tracked: bool) -> Chunk:
    """The rows and anchors of a packed chunk."""
    first = packed.num_columns - len(schema)
    rows = pa.RecordBatch.from_arrays(packed.columns[first:], schema=schema)
    columns = packed.columns[:first]
    index: Rows | None = None
    if form is ChunkForm.LISTS:
        lengths = pc.list_value_length(columns[0]).to_numpy(zero_copy_only=False)
        index = np.repeat(np.arange(packed.num_rows, dtype=np.int64), lengths)
        columns = [column.flatten() for column in columns]
    values = [column.to_numpy() for column in columns]
    share = as_words(values.pop()) if form is ChunkForm.SHARES or (tracked and form is not ChunkForm.ROWS) else None
    return Chunk(rows, index, values[0] if values else None, values[1] if values else None, share)


# ---- the exchange

CHUNK_ROWS_MAX: Final = 65_536
CHUNK_BYTES_MAX: Final = 16 * 1024 * 1024
"""About as many, by the mean of the rows that are sent together; a longer row is a chunk of its own."""


@dataclass(slots=True)
class _Sent:
    """What was sent over one edge to one task."""

    chunks: int = 0
    rows: int = 0
    xor: int = 0

    def add(self, row: WireRow, rows: int, xor: int | None) -> None:
        """Count a wire row. `xor` is the XOR of its shares; None where it has not one a row."""
        self.chunks += 1
        self.rows += rows
        self.xor ^= _checksum(row) if xor is None else xor


def _checksum(row: WireRow) -> int:
    """What stands for a wire row in an XOR where it has not one share a row."""
    return zlib.crc32(f"{row.source} {row.edge} {row.seq}".encode()) << 32 | zlib.crc32(row.payload)


class Sender:
    """One map task's side of an exchange: chunks go out as they come, the control rows at the end.

    `mark` is this run's: another run of the task has another one.
    """

    def __init__(self, task: int, tasks: int, messages: MetMessages, mark: str) -> None:
        self._task, self._tasks, self._messages, self._mark = task, tasks, messages, mark
        self._sent: dict[tuple[int, int], _Sent] = {}

    @property
    def tasks(self) -> int:
        """The number of tasks of the next stage."""
        return self._tasks

    def send(
        self, edge: int, rows: pa.RecordBatch, anchors: Anchors, dest: npt.NDArray[np.int32], tasks: int
    ) -> Iterator[WireRow]:
        """Send each row to its task in `dest`, which are numbered below `tasks`."""
        if rows.num_rows == 0:
            return
        if (dest[1:] < dest[:-1]).any():
            # numpy sorts 16-bit integers by radix, five to ten times as fast.
            order = np.argsort(dest.astype(np.uint16) if tasks <= 1 << 16 else dest, kind="stable")
            rows, anchors, dest = rows.take(pa.array(order)), anchors.take(order), dest[order]
        bounds = np.searchsorted(dest, np.arange(tasks + 1))
        yield from self._chunks(edge, rows, anchors, bounds)

    def copies(self, edge: int, rows: pa.RecordBatch, anchors: Anchors, tasks: int) -> Iterator[WireRow]:
        """Send all rows to every task; each copy has a share of its own."""
        if rows.num_rows == 0:
            return
        for dest, given in enumerate(anchors.deliveries(None, tasks)):
            bounds = np.zeros(tasks + 1, np.int64)
            bounds[dest + 1 :] = rows.num_rows
            yield from self._chunks(edge, rows, given, bounds)

    def _chunks(
        self, edge: int, rows: pa.RecordBatch, anchors: Anchors, bounds: npt.NDArray[np.int64]
    ) -> Iterator[WireRow]:
        most = max(1, min(CHUNK_ROWS_MAX, rows.num_rows * CHUNK_BYTES_MAX // max(1, rows.nbytes)))
        for task in range(len(bounds) - 1):
            begin, end = int(bounds[task]), int(bounds[task + 1])
            for start in range(begin, end, most):
                stop = min(start + most, end)
                part = anchors
                if stop - start < rows.num_rows:
                    part = anchors.take(np.arange(start, stop, dtype=np.int64))
                yield self._chunk(task, edge, rows.slice(start, stop - start), part)

    def _chunk(self, dest: int, edge: int, rows: pa.RecordBatch, anchors: Anchors) -> WireRow:
        form, packed = pack(rows, anchors, self._messages)
        sent = self._sent.setdefault((dest, edge), _Sent())
        row = WireRow(dest, self._task, edge << 2 | form, sent.chunks, packed.serialize())
        xor = xor_reduce(anchors.share) if anchors.row is None and anchors.share is not None else None
        sent.add(row, rows.num_rows, xor)
        return row

    def notices(self, edge: int, rows: pa.RecordBatch, acker: Rows, ackers: int) -> Iterator[WireRow]:
        """Send notices towards the ackers that `acker` names; `edge` is INIT or ACK."""
        for number in range(ackers):
            part = rows.filter(pa.array(acker == number))
            if part.num_rows == 0:
                continue
            dest = number % self._tasks
            sent = self._sent.setdefault((dest, edge), _Sent())
            row = WireRow(dest, self._task, edge, sent.chunks, part.serialize())
            sent.add(row, part.num_rows, None)
            yield row

    def relay(self, passing: Iterable[Passing]) -> Iterator[WireRow]:
        """Pass chunks on, to the task of the same number in the next stage."""
        for chunk in passing:
            sent = self._sent.setdefault((self._task, chunk.row.edge >> 2), _Sent())
            row = WireRow(self._task, self._task, chunk.row.edge, sent.chunks, chunk.row.payload)
            sent.add(row, chunk.rows, chunk.xor)
            yield row

    def control(self, reports: Sequence[TaskReport]) -> Iterator[WireRow]:
        """The control rows, one for every task; the reports travel in one of them."""
        for dest in range(self._tasks):
            edges = {e: (s.chunks, s.rows, s.xor) for (d, e), s in self._sent.items() if d == dest}
            carried = [*reports] if dest == self._task % self._tasks else []
            yield WireRow(dest, self._task, CONTROL, 0, pickle.dumps((self._mark, edges, carried)))


@dataclass(frozen=True, slots=True)
class Way:
    """An edge for its receiver: the component that emits, its rows' schema, and whether they only pass through."""

    component: str
    schema: pa.Schema
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Passing:
    """A chunk for a later stage: its number of rows, and the XOR of their shares; None where it has not one a row."""

    row: WireRow
    rows: int
    xor: int | None


@dataclass(slots=True)
class ReceivedChunks:
    """What a task was sent: chunks by edge, in an order that does not depend on their arrival, and reports.

    `passing` are chunks for a later stage. `inits` and `acks` are notices for ackers. `copied` has each chunk that came
    more than once, once. `heard` is a digest of the marks of the runs that sent all this, unless control rows are wrong.
    """

    chunks: dict[int, list[Chunk]]
    reports: list[TaskReport]
    violations: list[str]
    passing: list[Passing] = field(default_factory=list[Passing])
    inits: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    acks: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    copied: list[Chunk] = field(default_factory=list[Chunk])
    heard: str = ""


def receive(
    wire: Iterable[WireRow], stage: int, task: int, sources: int, ways: Mapping[int, Way], *, tracked: bool
) -> ReceivedChunks:
    """Receive everything that `sources` tasks sent to a task of a stage, checked against their control rows."""
    rows: list[WireRow] = []
    controls: dict[int, list[tuple[str, dict[int, tuple[int, int, int]], list[TaskReport]]]] = {}
    where = f"task {task} of stage {stage}"
    received = ReceivedChunks({edge: [] for edge, way in ways.items() if not way.passes}, [], [])
    for row in wire:
        if row.dest != task:
            received.violations.append(f"{where} received a row of task {row.source} meant for task {row.dest}")
        if row.edge == CONTROL:
            control = pickle.loads(row.payload)  # noqa: S301 - what a task of ours packed, as Spark does with its results
            controls.setdefault(row.source, []).append(control)
        else:
            rows.append(row)
    told: dict[tuple[int, int], tuple[int, int, int]] = {}
    marks: list[str] = []
    for source in range(sources):
        copies = controls.pop(source, [])
        if len(copies) != 1:
            received.violations.append(f"{where} received {len(copies)} control rows of task {source} instead of 1")
        for mark, edges, reports in copies[:1]:
            marks.append(mark)
            received.reports += reports
            told |= {(source, edge): sent for edge, sent in edges.items()}
    received.violations += [f"{where} received control rows of an unknown task {source}" for source in controls]
    if not received.violations:
        received.heard = hashlib.blake2b(" ".join(marks).encode(), digest_size=8).hexdigest()
    rows.sort(key=lambda row: (_edge_of(row), row.source, row.seq))
    found: dict[tuple[int, int], _Sent] = {}
    seen: dict[tuple[int, int, int], int] = {}
    for row in rows:
        key = (row.source, row.edge, row.seq)
        seen[key] = seen.get(key, 0) + 1
        sent = found.setdefault((row.source, _edge_of(row)), _Sent())
        number, xor = _taken(received, row, ways, tracked=tracked, again=seen[key] == 2)
        sent.add(row, number, xor)
    for source, edge in sorted(told.keys() | found.keys()):
        sent = found.get((source, edge), _Sent())
        here, there = (sent.chunks, sent.rows, sent.xor), told.get((source, edge), (0, 0, 0))
        if here != there:
            name = ways[edge].component if edge in ways else f"edge {edge}"
            received.violations.append(
                f"{where} received {here[1]} rows in {here[0]} chunks of task {source} for {name!r}, {there[1]} in "
                f"{there[0]} were sent; their XOR {'agrees' if here[2] == there[2] else 'differs'}"
            )
    return received


def _edge_of(row: WireRow) -> int:
    return row.edge >> 2 if row.edge >= 0 else row.edge


def _taken(
    received: ReceivedChunks, row: WireRow, ways: Mapping[int, Way], *, tracked: bool, again: bool
) -> tuple[int, int | None]:
    """Unpack a wire row into `received`; returns its number of rows, and the XOR of its shares where it has one a row."""
    buffer = pa.py_buffer(row.payload)
    if row.edge in {INIT, ACK}:
        notices = pa.ipc.read_record_batch(buffer, INIT_SCHEMA if row.edge == INIT else ACK_SCHEMA)
        (received.inits if row.edge == INIT else received.acks).append(notices)
        return notices.num_rows, None
    edge, form = row.edge >> 2, ChunkForm(row.edge & 3)
    way = ways[edge]
    packed = pa.ipc.read_record_batch(buffer, packed_schema(form, way.schema, tracked=tracked))
    chunk = unpack(form, packed, way.schema, tracked=tracked)
    xor = xor_reduce(chunk.share) if chunk.row is None and chunk.share is not None else None
    if way.passes:
        received.passing.append(Passing(row, packed.num_rows, xor))
    else:
        received.chunks[edge].append(chunk)
    if again:
        received.copied.append(chunk)
    return packed.num_rows, xor
