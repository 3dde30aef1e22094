"""What travels between stages, and from the last stage to the driver.

A wire row is a chunk of one edge's rows for one task, serialised by Arrow, so that no type ever passes through another
system's conversions; or a control row; or, at the end, a task's summary. Each map task sends one control row to every
task of the next stage, saying how many chunks and rows it sent there and what their XOR is; its report travels in one
of them. A chunk or control row that is lost, doubled or tripled is seen by whoever receives it, with or without shares.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.aggregation import GroupBy
from stormproof.core.engine.protocol import JobReport
from stormproof.core.errors import Json
from stormproof.core.keyhash import task_numbers
from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.share import Words, as_signed, as_words, signed, split_one, xor_reduce, xor_signed
from stormproof.core.sink import PreparedFile, files_to_json

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
CHUNK_ROWS_MAX: Final = 65_536
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
SHARE: Final = "\x00share"


@dataclass(slots=True)
class TaskReport:
    """What one task has to say; it counts only where the task succeeded."""

    stage: int
    task: int
    read_messages: int = 0
    read_xor: int = 0
    ack_xor: int = 0
    tuples: int = 0
    failures: list[MessageFailure] = field(default_factory=list[MessageFailure])
    files: list[PreparedFile] = field(default_factory=list[PreparedFile])
    violations: list[str] = field(default_factory=list[str])

    def ack(self, xor: int) -> None:
        """Add acked shares, by their XOR."""
        self.ack_xor = signed(self.ack_xor ^ xor)

    def to_json(self) -> list[Json]:
        """As it travels."""
        failures: list[Json] = [
            [f.id, f.origin, f.token, f.reason.value, f.component, f.error, f.input] for f in self.failures
        ]
        return [
            self.stage,
            self.task,
            self.read_messages,
            self.read_xor,
            self.ack_xor,
            self.tuples,
            failures,
            files_to_json(self.files),
            list[Json](self.violations),
        ]

    @classmethod
    def from_json(cls, parts: Any) -> TaskReport:
        """As it was sent."""
        stage, task, messages, read_xor, ack_xor, tuples, failures, files, violations = parts
        return cls(
            stage,
            task,
            messages,
            read_xor,
            ack_xor,
            tuples,
            [
                MessageFailure(MessageId(id_), origin, Token(token), FailureReason(reason), component, error, input_)
                for id_, origin, token, reason, component, error, input_ in failures
            ],
            [PreparedFile(**file) for file in files],
            violations,
        )


@dataclass(frozen=True, slots=True)
class _Row:
    dest: int
    source: int
    edge: int
    seq: int
    payload: bytes | pa.Buffer


@dataclass(slots=True)
class _Sent:
    """What was sent over one edge to one task."""

    chunks: int = 0
    rows: int = 0
    xor: int = 0


def edge_schema(grouping: GroupBy, *, tracked: bool) -> pa.Schema:
    """The columns of an edge's chunks."""
    if not tracked:
        return grouping.schema
    return pa.schema([pa.field(SHARE, pa.int64(), nullable=False), *grouping.schema])


def _checksum(source: int, edge: int, seq: int, payload: bytes | pa.Buffer) -> int:
    """What stands for a chunk in the XOR of an edge without shares."""
    return zlib.crc32(f"{source} {edge} {seq}".encode()) << 32 | zlib.crc32(payload)


class Sender:
    """One map task's side of an exchange."""

    def __init__(self, task: int, tasks: int, *, tracked: bool) -> None:
        self._task, self._tasks, self._tracked = task, tasks, tracked
        self._sent: dict[tuple[int, int], _Sent] = {}

    def send(self, edge: int, grouping: GroupBy, rows: pa.RecordBatch, share: int) -> Iterator[pa.RecordBatch]:
        """Send one edge's rows, in key order, each to the task of its key; `share` is split among them.

        A task sends each edge once. The caller acks the share where there are no rows.
        """
        if rows.num_rows == 0:
            return
        shares = split_one(share, rows.num_rows) if self._tracked else np.empty(0, np.uint64)
        dest = task_numbers(rows, grouping.keys, self._tasks)
        order = np.argsort(dest, kind="stable")
        bounds = np.searchsorted(dest[order], np.arange(self._tasks + 1))
        if self._tasks > 1:
            rows, shares = rows.take(pa.array(order)), shares[order] if self._tracked else shares
        wire: list[_Row] = []
        size = 0
        for task in range(self._tasks):
            for seq, start in enumerate(range(int(bounds[task]), int(bounds[task + 1]), CHUNK_ROWS_MAX)):
                stop = min(start + CHUNK_ROWS_MAX, int(bounds[task + 1]))
                row = self._chunk(task, edge, seq, rows.slice(start, stop - start), shares[start:stop])
                wire.append(row)
                size += len(row.payload)
                if size > BATCH_BYTES_MAX:
                    yield wire_batch(wire)
                    wire, size = [], 0
        if wire:
            yield wire_batch(wire)

    def _chunk(self, dest: int, edge: int, seq: int, rows: pa.RecordBatch, shares: Words) -> _Row:
        if self._tracked:
            columns = [pa.array(as_signed(shares)), *rows.columns]
            fields = [pa.field(SHARE, pa.int64(), nullable=False), *rows.schema]
            rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
        payload = rows.serialize()
        sent = self._sent.setdefault((dest, edge), _Sent())
        sent.chunks += 1
        sent.rows += rows.num_rows
        sent.xor ^= xor_reduce(shares) if self._tracked else _checksum(self._task, edge, seq, payload)
        return _Row(dest, self._task, edge, seq, payload)

    def control(self, reports: Sequence[TaskReport]) -> pa.RecordBatch:
        """The control rows, one for every task; the reports travel in one of them."""
        wire: list[_Row] = []
        for dest in range(self._tasks):
            edges = {str(e): [s.chunks, s.rows, s.xor] for (d, e), s in self._sent.items() if d == dest}
            carried = [r.to_json() for r in reports] if dest == self._task % self._tasks else []
            payload = json.dumps({"edges": edges, "reports": carried}).encode()
            wire.append(_Row(dest, self._task, CONTROL, 0, payload))
        return wire_batch(wire)


@dataclass(slots=True)
class Received:
    """What a task was sent: chunks by edge, in an order that does not depend on their arrival, and reports."""

    chunks: dict[int, list[pa.RecordBatch]]
    reports: list[TaskReport]
    violations: list[str]


def receive(
    batches: Iterable[pa.RecordBatch],
    stage: int,
    task: int,
    sources: int,
    groupings: dict[int, GroupBy],
    *,
    tracked: bool,
) -> Received:
    """Take everything that was sent to a task of a stage by `sources` tasks, checked against their control rows."""
    chunks: list[_Row] = []
    controls: dict[int, list[Any]] = {}
    where = f"task {task} of stage {stage}"
    violations: list[str] = []
    for batch in batches:
        for row in wire_rows(batch):
            if row.dest != task:
                violations.append(f"{where} received a row of task {row.source} meant for task {row.dest}")
            if row.edge == CONTROL:
                controls.setdefault(row.source, []).append(json.loads(bytes(row.payload)))
            else:
                chunks.append(row)
    reports: list[TaskReport] = []
    told: dict[tuple[int, int], tuple[int, int, int]] = {}
    for source in range(sources):
        copies = controls.pop(source, [])
        if len(copies) != 1:
            violations.append(f"{where} received {len(copies)} control rows of task {source} instead of 1")
        for control in copies[:1]:
            reports += [TaskReport.from_json(parts) for parts in control["reports"]]
            for edge, (count, rows, xor) in control["edges"].items():
                told[source, int(edge)] = (count, rows, xor)
    violations += [f"{where} received control rows of an unknown task {source}" for source in controls]
    chunks.sort(key=lambda row: (row.edge, row.source, row.seq))
    by_edge: dict[int, list[pa.RecordBatch]] = {edge: [] for edge in groupings}
    schemas = {edge: edge_schema(grouping, tracked=tracked) for edge, grouping in groupings.items()}
    found: dict[tuple[int, int], _Sent] = {}
    for row in chunks:
        rows = pa.ipc.read_record_batch(pa.py_buffer(row.payload), schemas[row.edge])
        by_edge[row.edge].append(rows)
        sent = found.setdefault((row.source, row.edge), _Sent())
        sent.chunks += 1
        sent.rows += rows.num_rows
        sent.xor ^= (
            xor_reduce(as_words(rows.column(0).to_numpy()))
            if tracked
            else _checksum(row.source, row.edge, row.seq, row.payload)
        )
    for source, edge in sorted(told.keys() | found.keys()):
        sent = found.get((source, edge), _Sent())
        here, there = (sent.chunks, sent.rows, sent.xor), told.get((source, edge), (0, 0, 0))
        if here != there:
            name = groupings[edge].component if edge in groupings else f"edge {edge}"
            violations.append(
                f"{where} received {here[1]} rows in {here[0]} chunks of task {source} for {name!r}, {there[1]} in "
                f"{there[0]} were sent; their XOR {'agrees' if here[2] == there[2] else 'differs'}"
            )
    return Received(by_edge, reports, violations)


def summary(stage: int, task: int, reports: Sequence[TaskReport]) -> pa.RecordBatch:
    """A task of the last stage's one row for the driver."""
    return wire_batch([_Row(0, task, SUMMARY, stage, json.dumps([r.to_json() for r in reports]).encode())])


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
    return JobReport(
        read_messages=sum(r.read_messages for r in reports),
        read_xor=xor_signed(r.read_xor for r in reports),
        ack_xor=xor_signed(r.ack_xor for r in reports),
        failures=tuple(f for r in reports for f in r.failures),
        files=tuple(sorted((f for r in reports for f in r.files), key=lambda f: (f.sink, f.path))),
        violations=(*violations, *(v for r in reports for v in r.violations)),
        tuples=sum(r.tuples for r in reports),
        steps_ms=steps_ms,
    )


def wire_batch(rows: Sequence[_Row]) -> pa.RecordBatch:
    """Wire rows as a record batch."""
    columns = [
        pa.array([r.dest for r in rows], pa.int32()),
        pa.array([r.source for r in rows], pa.int32()),
        pa.array([r.edge for r in rows], pa.int32()),
        pa.array([r.seq for r in rows], pa.int32()),
        pa.array([memoryview(r.payload) for r in rows], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIRE_SCHEMA)


def wire_rows(batch: pa.RecordBatch) -> Iterator[_Row]:
    """A record batch's wire rows, their payloads without a copy."""
    if batch.schema.names != WIRE_SCHEMA.names:
        raise ValueError(f"a batch of wire rows has the columns {batch.schema.names}")
    numbers = (batch.column(i).to_pylist() for i in range(4))
    for dest, source, edge, seq, payload in zip(*numbers, batch.column(4), strict=True):
        yield _Row(dest, source, edge, seq, payload.as_buffer())
