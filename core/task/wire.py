"""What travels between stages, and from the last stage to the driver.

A wire row is a chunk of one edge's rows for one task, serialised by Arrow, so that no type ever passes through another
system's conversions; or notices for an acker; or a control row; or, at the end, a task's summary. Each map task sends one
control row to every task of the next stage, saying how many chunks and rows it sent there and what their XOR is; its
report travels in one of them. A chunk, notice or control row that is lost, doubled or tripled is seen by whoever receives
it, with or without shares. Where a task was repeated and sent something else than the first time, its readers may have
read the one and the other: the control rows carry a mark of all that a run of the task sent, and the marks must agree.

Beside its rows a chunk carries what anchors them, in one of four forms: nothing; one share a row, for rows that were
combined; one (message, share) pair a row; any number of pairs a row.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrays import Rows, Words
from stormproof.core.compute import pc
from stormproof.core.errors import Json
from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.sink import PreparedFile, files_to_json
from stormproof.core.tracking.anchors import MANY, MANY_ORIGIN, Anchors, Messages
from stormproof.core.tracking.report import JobReport
from stormproof.core.tracking.share import as_signed, as_words, mix64, signed, xor_reduce, xor_signed

WIRE_SCHEMA: Final = pa.schema(
    [
        pa.field("dest", pa.int32(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("edge", pa.int32(), nullable=False),
        pa.field("seq", pa.int32(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
WIRE_DDL: Final = "dest int, source int, edge int, seq int, payload binary"
CONTROL: Final = -1
SUMMARY: Final = -2
INIT: Final = -3
ACK: Final = -4
CHUNK_ROWS_MAX: Final = 65_536
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024

_SHARE: Final = pa.field("\x00share", pa.int64(), nullable=False)
_MESSAGE: Final = pa.field("\x00message", pa.int64(), nullable=False)
_ORIGIN: Final = pa.field("\x00origin", pa.int64(), nullable=False)
_LISTS: Final = tuple(pa.field(f.name, pa.list_(f.type), nullable=False) for f in (_MESSAGE, _ORIGIN, _SHARE))

INIT_SCHEMA: Final = pa.schema([("id", pa.int64()), ("origin", pa.int64()), ("value", pa.int64())])
"""Notices that begin messages: `value` is the token."""
ACK_SCHEMA: Final = pa.schema([("id", pa.int64()), ("value", pa.int64())])
"""Notices of acked shares, at most one a message and task: `value` is their XOR."""


class _Form(IntEnum):
    """What a chunk carries beside its rows."""

    ROWS = 0
    SHARES = 1
    PAIRS = 2
    LISTS = 3


@dataclass(slots=True)
class TaskReport:
    """What one task has to say; it counts only where the task succeeded. See `JobReport` for the words."""

    stage: int
    task: int
    read_messages: int = 0
    read_xor: int = 0
    ack_xor: int = 0
    tuples: int = 0
    failures: list[MessageFailure] = field(default_factory=list[MessageFailure])
    files: list[PreparedFile] = field(default_factory=list[PreparedFile])
    violations: list[str] = field(default_factory=list[str])
    late: list[MessageFailure] = field(default_factory=list[MessageFailure])
    late_xor: int = 0
    lost: list[MessageFailure] = field(default_factory=list[MessageFailure])
    together: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    unanchored: int = 0
    heard: str = ""
    """The marks of the runs that it was sent by, of all tasks of the stage before."""

    def ack(self, xor: int) -> None:
        """Add acked shares, by their XOR."""
        self.ack_xor = signed(self.ack_xor ^ xor)

    def to_json(self) -> list[Json]:
        """As it travels."""
        return [
            self.stage,
            self.task,
            self.read_messages,
            self.read_xor,
            self.ack_xor,
            self.tuples,
            _failures_to_json(self.failures),
            files_to_json(self.files),
            list[Json](self.violations),
            _failures_to_json(self.late),
            self.late_xor,
            _failures_to_json(self.lost),
            base64.b64encode(np.ascontiguousarray(self.together).tobytes()).decode(),
            self.unanchored,
            self.heard,
        ]

    @classmethod
    def from_json(cls, parts: Any) -> TaskReport:
        """As it was sent."""
        (
            stage, task, messages, read_xor, ack_xor, tuples, failures, files, violations,
            late, late_xor, lost, together, unanchored, heard,
        ) = parts  # fmt: skip
        return cls(
            stage,
            task,
            messages,
            read_xor,
            ack_xor,
            tuples,
            _failures_from_json(failures),
            [PreparedFile(**file) for file in files],
            violations,
            _failures_from_json(late),
            late_xor,
            _failures_from_json(lost),
            np.frombuffer(base64.b64decode(together), np.int64).reshape(-1, 2),
            unanchored,
            heard,
        )


def _failures_to_json(failures: Sequence[MessageFailure]) -> list[Json]:
    return [[f.id, f.origin, f.token, f.reason.value, f.component, f.error, f.input] for f in failures]


def _failures_from_json(parts: Any) -> list[MessageFailure]:
    return [
        MessageFailure(MessageId(id_), origin, Token(token), FailureReason(reason), component, error, input_)
        for id_, origin, token, reason, component, error, input_ in parts
    ]


@dataclass(frozen=True, slots=True)
class WireRow:
    """One row of `WIRE_SCHEMA`."""

    dest: int
    source: int
    edge: int
    seq: int
    payload: bytes | pa.Buffer


@dataclass(slots=True)
class _Sent:
    """What was sent over one edge to one task.

    `mark` stands for its messages, whatever the order: the XOR of their shares, or without shares a sum of their ids.
    """

    chunks: int = 0
    rows: int = 0
    xor: int = 0
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that came over an edge, and what anchors them: `origin` is `MANY_ORIGIN` where a pair stands for many."""

    rows: pa.RecordBatch
    row: Rows | None
    id: Rows | None
    origin: Rows | None
    share: Words | None

    def anchors(self, messages: Messages) -> Anchors:
        """The rows' anchors, their messages taken into the task's."""
        if self.id is None or self.origin is None:
            return Anchors(self.rows.num_rows, self.row, None, self.share)
        first = messages.append(self.id, self.origin)
        number = np.arange(first, first + len(self.id), dtype=np.int64)
        number[self.origin == MANY_ORIGIN] = MANY
        return Anchors(self.rows.num_rows, self.row, number, self.share)


def _packed(rows: pa.RecordBatch, anchors: Anchors, messages: Messages) -> tuple[_Form, pa.RecordBatch]:
    """Rows with their anchors as columns before them."""
    columns: list[pa.Array] = []
    fields: list[pa.Field] = []
    if anchors.row is None and anchors.message is None:
        form = _Form.ROWS if anchors.share is None else _Form.SHARES
    else:
        form = _Form.PAIRS if anchors.row is None else _Form.LISTS
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
    if form is _Form.LISTS:
        offsets = pa.array(np.searchsorted(anchors.row_of_pairs(), np.arange(anchors.rows + 1)).astype(np.int32))
        columns = [pa.ListArray.from_arrays(offsets, column) for column in columns]
        fields = [pa.field(f.name, pa.list_(f.type), nullable=False) for f in fields]
    return form, pa.RecordBatch.from_arrays([*columns, *rows.columns], schema=pa.schema([*fields, *rows.schema]))


def _packed_schema(form: _Form, schema: pa.Schema, *, tracked: bool) -> pa.Schema:
    share = [_SHARE] if tracked else []
    match form:
        case _Form.ROWS:
            return schema
        case _Form.SHARES:
            return pa.schema([_SHARE, *schema])
        case _Form.PAIRS:
            return pa.schema([_MESSAGE, _ORIGIN, *share, *schema])
        case _Form.LISTS:
            return pa.schema([*(_LISTS if tracked else _LISTS[:2]), *schema])


def _unpacked(form: _Form, packed: pa.RecordBatch, schema: pa.Schema, *, tracked: bool) -> Chunk:
    first = packed.num_columns - len(schema)
    rows = pa.RecordBatch.from_arrays(packed.columns[first:], schema=schema)
    columns = packed.columns[:first]
    index: Rows | None = None
    if form is _Form.LISTS:
        lengths = pc.list_value_length(columns[0]).to_numpy(zero_copy_only=False)
        index = np.repeat(np.arange(packed.num_rows, dtype=np.int64), lengths)
        columns = [column.flatten() for column in columns]
    values = [column.to_numpy() for column in columns]
    share = as_words(values.pop()) if form is _Form.SHARES or (tracked and form is not _Form.ROWS) else None
    return Chunk(rows, index, values[0] if values else None, values[1] if values else None, share)


def _checksum(source: int, edge: int, seq: int, payload: bytes | pa.Buffer) -> int:
    """What stands for a chunk in the XOR of an edge without one share a row."""
    return zlib.crc32(f"{source} {edge} {seq}".encode()) << 32 | zlib.crc32(payload)


class Sender:
    """One map task's side of an exchange: chunks go out as they come, the control rows at the end."""

    def __init__(self, task: int, tasks: int, messages: Messages) -> None:
        self._task, self._tasks, self._messages = task, tasks, messages
        self._sent: dict[tuple[int, int], _Sent] = {}

    @property
    def tasks(self) -> int:
        """The number of tasks of the next stage."""
        return self._tasks

    def send(
        self, edge: int, rows: pa.RecordBatch, anchors: Anchors, dest: npt.NDArray[np.int32], tasks: int
    ) -> Iterator[pa.RecordBatch]:
        """Send rows, each to the task in `dest`, one of `tasks`."""
        if rows.num_rows == 0:
            return
        if (dest[1:] < dest[:-1]).any():
            # Small integers are sorted by radix, five to ten times as fast.
            order = np.argsort(dest.astype(np.uint16) if tasks <= 1 << 16 else dest, kind="stable")
            rows, anchors, dest = rows.take(pa.array(order)), anchors.take(order), dest[order]
        bounds = np.searchsorted(dest, np.arange(tasks + 1))
        yield from self._chunks(edge, rows, anchors, bounds)

    def copies(self, edge: int, rows: pa.RecordBatch, anchors: Anchors, tasks: int) -> Iterator[pa.RecordBatch]:
        """Send all rows to every task; each copy carries a share of its own."""
        if rows.num_rows == 0:
            return
        for dest, given in enumerate(anchors.deliveries(None, tasks)):
            bounds = np.zeros(tasks + 1, np.int64)
            bounds[dest + 1 :] = rows.num_rows
            yield from self._chunks(edge, rows, given, bounds)

    def _chunks(
        self, edge: int, rows: pa.RecordBatch, anchors: Anchors, bounds: npt.NDArray[np.int64]
    ) -> Iterator[pa.RecordBatch]:
        wire: list[WireRow] = []
        size = 0
        for task in range(len(bounds) - 1):
            begin, end = int(bounds[task]), int(bounds[task + 1])
            for start in range(begin, end, CHUNK_ROWS_MAX):
                stop = min(start + CHUNK_ROWS_MAX, end)
                part = anchors
                if stop - start < rows.num_rows:
                    part = anchors.take(np.arange(start, stop, dtype=np.int64))
                row = self._chunk(task, edge, rows.slice(start, stop - start), part)
                wire.append(row)
                size += len(row.payload)
                if size > BATCH_BYTES_MAX:
                    yield wire_batch(wire)
                    wire, size = [], 0
        if wire:
            yield wire_batch(wire)

    def _chunk(self, dest: int, edge: int, rows: pa.RecordBatch, anchors: Anchors) -> WireRow:
        form, packed = _packed(rows, anchors, self._messages)
        sent = self._sent.setdefault((dest, edge), _Sent())
        row = WireRow(dest, self._task, edge << 2 | form, sent.chunks, packed.serialize())
        xor = xor_reduce(anchors.share) if anchors.row is None and anchors.share is not None else None
        self._count(sent, row, rows.num_rows, xor)
        if anchors.share is not None:
            sent.mark ^= anchors.xor() if xor is None else xor
        elif form is not _Form.ROWS:
            ids = packed.column(0)
            words = as_words((ids if form is _Form.PAIRS else ids.flatten()).to_numpy())
            sent.mark = signed(sent.mark + int(np.add.reduce(mix64(words))))
        return row

    def _count(self, sent: _Sent, row: WireRow, rows: int, xor: int | None) -> None:
        sent.chunks += 1
        sent.rows += rows
        sent.xor ^= _checksum(row.source, row.edge, row.seq, row.payload) if xor is None else xor

    def notices(self, edge: int, rows: pa.RecordBatch, acker: Rows, ackers: int) -> Iterator[pa.RecordBatch]:
        """Send notices on their way to the ackers that `acker` names: `edge` is INIT or ACK."""
        wire: list[WireRow] = []
        for number in range(ackers):
            part = rows.filter(pa.array(acker == number))
            if part.num_rows == 0:
                continue
            dest = number % self._tasks
            sent = self._sent.setdefault((dest, edge), _Sent())
            row = WireRow(dest, self._task, edge, sent.chunks, part.serialize())
            self._count(sent, row, part.num_rows, None)
            sent.mark ^= xor_reduce(as_words(part.column("value").to_numpy()))
            wire.append(row)
        if wire:
            yield wire_batch(wire)

    def relay(self, passing: Iterable[Passing]) -> Iterator[pa.RecordBatch]:
        """Pass chunks on to the task of the same number in the next stage."""
        wire: list[WireRow] = []
        for chunk in passing:
            sent = self._sent.setdefault((self._task, chunk.row.edge >> 2), _Sent())
            row = WireRow(self._task, self._task, chunk.row.edge, sent.chunks, chunk.row.payload)
            self._count(sent, row, chunk.rows, chunk.xor)
            wire.append(row)
        if wire:
            yield wire_batch(wire)

    def control(self, reports: Sequence[TaskReport]) -> pa.RecordBatch:
        """The control rows, one for every task; the reports travel in one of them."""
        wire: list[WireRow] = []
        marks = sorted((dest, edge, s.rows, s.mark) for (dest, edge), s in self._sent.items())
        run = _digest(marks)
        for dest in range(self._tasks):
            edges = {str(e): [s.chunks, s.rows, s.xor] for (d, e), s in self._sent.items() if d == dest}
            carried = [r.to_json() for r in reports] if dest == self._task % self._tasks else []
            payload = json.dumps({"edges": edges, "reports": carried, "run": run}).encode()
            wire.append(WireRow(dest, self._task, CONTROL, 0, payload))
        return wire_batch(wire)


@dataclass(frozen=True, slots=True)
class Way:
    """An edge as its receiver knows it: where it comes from, what its rows are, and whether they only pass through."""

    component: str
    schema: pa.Schema
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Passing:
    """A chunk for a later stage: its number of rows, and the XOR of their shares where it has one a row."""

    row: WireRow
    rows: int
    xor: int | None


@dataclass(slots=True)
class Received:
    """What a task was sent: chunks by edge, in an order that does not depend on their arrival, and reports.

    `passing` are chunks for a later stage; `inits` and `acks` are notices for ackers; `copied` has, once each, the
    chunks that came more than once; `heard` is one for all marks of the runs that sent all this.
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
    batches: Iterable[pa.RecordBatch], stage: int, task: int, sources: int, ways: Mapping[int, Way], *, tracked: bool
) -> Received:
    """Take everything that was sent to a task of a stage by `sources` tasks, checked against their control rows."""
    rows: list[WireRow] = []
    controls: dict[int, list[Any]] = {}
    where = f"task {task} of stage {stage}"
    received = Received({edge: [] for edge, way in ways.items() if not way.passes}, [], [])
    for batch in batches:
        for row in wire_rows(batch):
            if row.dest != task:
                received.violations.append(f"{where} received a row of task {row.source} meant for task {row.dest}")
            if row.edge == CONTROL:
                controls.setdefault(row.source, []).append(json.loads(bytes(row.payload)))
            else:
                rows.append(row)
    told: dict[tuple[int, int], tuple[int, int, int]] = {}
    runs: list[str] = []
    for source in range(sources):
        copies = controls.pop(source, [])
        if len(copies) != 1:
            received.violations.append(f"{where} received {len(copies)} control rows of task {source} instead of 1")
        for control in copies[:1]:
            runs.append(control["run"])
            received.reports += [TaskReport.from_json(parts) for parts in control["reports"]]
            for edge, (count, number, xor) in control["edges"].items():
                told[source, int(edge)] = (count, number, xor)
    received.violations += [f"{where} received control rows of an unknown task {source}" for source in controls]
    received.heard = _digest(runs)
    rows.sort(key=lambda row: (_edge_of(row), row.source, row.seq))
    found: dict[tuple[int, int], _Sent] = {}
    seen: dict[tuple[int, int, int], int] = {}
    for row in rows:
        key = (row.source, row.edge, row.seq)
        seen[key] = seen.get(key, 0) + 1
        sent = found.setdefault((row.source, _edge_of(row)), _Sent())
        number, xor = _taken(received, row, ways, tracked=tracked, again=seen[key] == 2)
        sent.chunks += 1
        sent.rows += number
        sent.xor ^= _checksum(row.source, row.edge, row.seq, row.payload) if xor is None else xor
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
    received: Received, row: WireRow, ways: Mapping[int, Way], *, tracked: bool, again: bool
) -> tuple[int, int | None]:
    """Put a wire row where it belongs; its number of rows, and the XOR of its shares where it has one a row."""
    buffer = pa.py_buffer(row.payload)
    if row.edge in {INIT, ACK}:
        notices = pa.ipc.read_record_batch(buffer, INIT_SCHEMA if row.edge == INIT else ACK_SCHEMA)
        (received.inits if row.edge == INIT else received.acks).append(notices)
        return notices.num_rows, None
    edge, form = row.edge >> 2, _Form(row.edge & 3)
    way = ways[edge]
    packed = pa.ipc.read_record_batch(buffer, _packed_schema(form, way.schema, tracked=tracked))
    chunk = _unpacked(form, packed, way.schema, tracked=tracked)
    xor = xor_reduce(chunk.share) if chunk.row is None and chunk.share is not None else None
    if way.passes:
        received.passing.append(Passing(row, packed.num_rows, xor))
    else:
        received.chunks[edge].append(chunk)
    if again:
        received.copied.append(chunk)
    return packed.num_rows, xor


def _digest(values: Sequence[object]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def summary(stage: int, task: int, reports: Sequence[TaskReport]) -> pa.RecordBatch:
    """A task of the last stage's one row for the driver."""
    return wire_batch([WireRow(0, task, SUMMARY, stage, json.dumps([r.to_json() for r in reports]).encode())])


def job_report(batches: Iterable[pa.RecordBatch], tasks: Sequence[int], steps_ms: dict[str, float]) -> JobReport:
    """All summaries as one report; `tasks` is the number of tasks of each stage, and each must have reported once."""
    heard: dict[tuple[int, int], TaskReport] = {}
    violations: list[str] = []
    for batch in batches:
        for row in wire_rows(batch):
            for parts in json.loads(bytes(row.payload)):
                report = TaskReport.from_json(parts)
                if (report.stage, report.task) in heard:
                    violations.append(f"task {report.task} of stage {report.stage} reported twice")
                heard[report.stage, report.task] = report
    for stage, number in enumerate(tasks):
        missing = [task for task in range(number) if (stage, task) not in heard]
        violations += [f"task {task} of stage {stage} did not report" for task in missing]
    reports = [heard[key] for key in sorted(heard)]
    for stage in range(1, len(tasks)):
        if len({report.heard for report in reports if report.stage == stage}) > 1:
            violations.append(
                f"the tasks of stage {stage} did not all read the same run of a task of stage {stage - 1}: it was "
                "repeated, and sent something else than before, so a function or a reader in it is not deterministic"
            )
    return JobReport(
        read_messages=sum(r.read_messages for r in reports),
        read_xor=xor_signed(r.read_xor for r in reports),
        ack_xor=xor_signed(r.ack_xor for r in reports),
        failures=tuple(f for r in reports for f in r.failures),
        files=tuple(sorted((f for r in reports for f in r.files), key=lambda f: (f.sink, f.path))),
        violations=(*violations, *(v for r in reports for v in r.violations)),
        tuples=sum(r.tuples for r in reports),
        steps_ms=steps_ms,
        late=tuple(f for r in reports for f in r.late),
        late_xor=xor_signed(r.late_xor for r in reports),
        together=np.concatenate([r.together for r in reports]) if reports else np.empty((0, 2), np.int64),
        lost=tuple(f for r in reports for f in r.lost),
        unanchored=sum(r.unanchored for r in reports),
    )


def wire_batch(rows: Sequence[WireRow]) -> pa.RecordBatch:
    """Wire rows as a record batch."""
    columns = [
        pa.array([r.dest for r in rows], pa.int32()),
        pa.array([r.source for r in rows], pa.int32()),
        pa.array([r.edge for r in rows], pa.int32()),
        pa.array([r.seq for r in rows], pa.int32()),
        _binary([r.payload for r in rows]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIRE_SCHEMA)


def _binary(payloads: Sequence[bytes | pa.Buffer]) -> pa.Array:
    """Payloads as an array, copied once.

    Not by `pa.array` of memoryviews: pyarrow 26 never lets those go, so a worker would keep all it has ever sent.

    Raises:
        OverflowError: they are 2 GiB or more together.
    """
    offsets = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum([len(payload) for payload in payloads], out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{offsets[-1]} bytes do not go into one record batch of the wire")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(payloads))]
    return pa.Array.from_buffers(pa.binary(), len(payloads), buffers)


def wire_rows(batch: pa.RecordBatch) -> Iterator[WireRow]:
    """A record batch's wire rows, their payloads without a copy."""
    if batch.schema.names != WIRE_SCHEMA.names:
        raise ValueError(f"a batch of wire rows has the columns {batch.schema.names}")
    numbers = (batch.column(i).to_pylist() for i in range(4))
    for dest, source, edge, seq, payload in zip(*numbers, batch.column(4), strict=True):
        yield WireRow(dest, source, edge, seq, payload.as_buffer())
