"""A task of a stage: the same code for every engine.

A task of the first stage reads its part of the slice, decodes it, runs the fused operations over one record batch of
messages at a time, and combines or writes what comes out. A message that fails does so before any row of its batch is
combined or written, so that nothing of it is left anywhere. Tasks of later stages merge what they receive, and go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.aggregation import Combiner, rows_with_keys
from stormproof.core.engine.protocol import Job
from stormproof.core.errors import JobFailed
from stormproof.core.message import INPUT_TEXT_MAX, FailureReason, MessageFailure, MessageId, Token, storable_text
from stormproof.core.operate import apply, input_text
from stormproof.core.plan import CombineNode, Node, OperationNode, StagePlan, WriteNode
from stormproof.core.share import Rows, Words, as_words, signed, split_one, split_runs, xor_reduce
from stormproof.core.sink import SinkWriter, TaskContext, TaskWriter
from stormproof.core.source.protocol import READER_SCHEMA, Decoder, SliceReader
from stormproof.core.wire import Sender, TaskReport, receive, summary

BATCH_ROWS: Final = 10_000
"""Messages in a record batch: enough for whole-column work, few enough for a batch's tuples to stay in the cache."""


@dataclass(frozen=True, slots=True)
class StageJob:
    """What the tasks of one stage are given: a job's part for that stage. Picklable where the plan is.

    `tasks` is the number of tasks of every stage.
    """

    stage: int
    plan: StagePlan
    tasks: tuple[int, ...]
    writers: Mapping[str, SinkWriter]
    context: TaskContext
    tracked: bool
    spout: str
    seed: int = 0
    decoder: Decoder | None = None
    readers: tuple[SliceReader, ...] = ()
    excluded: frozenset[int] = frozenset()


def stage_jobs(job: Job, parallelism: int) -> tuple[StageJob, ...]:
    """A job cut into the parts for its stages. The first stage has a task a reader, the others `parallelism`."""
    stages = job.plan.stages
    tasks = (len(job.readers), *(parallelism for _ in stages[1:]))
    made: list[StageJob] = []
    for number, plan in enumerate(stages):
        part = StageJob(
            stage=number,
            plan=plan,
            tasks=tasks,
            writers={name: job.writers[name] for name in sorted(_sinks_of(plan))},
            context=TaskContext(job.incarnation, job.txid, job.attempt, 0),
            tracked=job.tracked,
            spout=stages[0].entries[0].component,
        )
        if number == 0:
            part = replace(part, seed=job.seed, decoder=job.plan.decoder, readers=job.readers, excluded=job.excluded)
        made.append(part)
    return tuple(made)


def run_task(part: StageJob, task: int, incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one task: wire rows in (none for the first stage), wire rows out.

    Guarantee:
        Its prepared files are closed and synced before the row that names them is given out; where it does not get that
        far, they are removed.

    Raises:
        JobFailed: a row failed that belongs to no single message (after an exchange), or a reader gave something else
            than it promised.
    """
    running = _Task(part, task)
    try:
        yield from running.run(incoming)
    except BaseException:  # also GeneratorExit: the engine gave the task up
        running.discard()
        raise


def _sinks_of(plan: StagePlan) -> set[str]:
    found: set[str] = set()
    todo: list[Node] = [node for entry in plan.entries for node in entry.children]
    while todo:
        match todo.pop():
            case WriteNode(sink):
                found.add(sink)
            case CombineNode(_, _, sinks):
                found.update(sinks)
            case OperationNode() as node:
                todo.extend(node.children)
    return found


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Tuples on their way. `message` is the row of each one's message in its batch; None after an exchange."""

    rows: pa.RecordBatch
    message: Rows | None
    shares: Words | None

    def only(self, mask: npt.NDArray[np.bool_]) -> _Tuples:
        return _Tuples(
            self.rows.filter(pa.array(mask)),
            None if self.message is None else self.message[mask],
            None if self.shares is None else self.shares[mask],
        )


@dataclass(slots=True)
class _Failed:
    reason: FailureReason
    component: str
    error: str
    input: str


@dataclass(slots=True)
class _Batch:
    """One record batch of messages on its way through a stage; nothing of it is combined or written until its end."""

    messages: pa.RecordBatch | None
    failed: dict[int, _Failed] = field(default_factory=dict[int, _Failed])
    acked: list[tuple[Rows | None, Words]] = field(default_factory=list[tuple[Rows | None, Words]])
    ends: list[tuple[CombineNode | WriteNode, _Tuples]] = field(
        default_factory=list[tuple[CombineNode | WriteNode, _Tuples]]
    )

    def fail(self, row: int, failed: _Failed) -> None:
        """Record a failure; a message's first one stands."""
        self.failed.setdefault(row, failed)

    def alive(self, tuples: _Tuples) -> _Tuples:
        """The tuples whose messages have not failed."""
        mask = self.mask(tuples.message)
        return tuples if mask is None else tuples.only(mask)

    def mask(self, message: Rows | None) -> npt.NDArray[np.bool_] | None:
        """Which of the tuples belong to messages that have not failed; None: all."""
        if not self.failed or message is None or self.messages is None:
            return None
        good = np.ones(self.messages.num_rows, np.bool_)
        good[list(self.failed)] = False
        return good[message]


@dataclass(frozen=True, slots=True)
class _Checked:
    """Tuples at their end, combined where that was needed to check them; good while `failed` messages have failed."""

    tuples: _Tuples
    partial: pa.Table | None
    failed: int


class _Task:
    def __init__(self, part: StageJob, task: int) -> None:
        self._part = part
        self._task = task
        self._report = TaskReport(part.stage, task)
        self._open: dict[str, TaskWriter] = {}
        self._combiners: dict[int, Combiner] = {}

    def discard(self) -> None:
        for writer in self._open.values():
            writer.discard()

    def run(self, incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        carried: list[TaskReport] = []
        for node in _combines(self._part.plan):
            self._combiners[node.edge] = Combiner(node.grouping)
        if self._part.stage == 0:
            self._read()
        else:
            carried = self._merge(incoming)
        last = self._part.stage == len(self._part.tasks) - 1
        if last:
            self._close()
            yield summary(self._part.stage, self._task, [*carried, self._report])
            return
        sender = Sender(self._task, self._part.tasks[self._part.stage + 1], tracked=self._part.tracked)
        for edge, combiner in self._combiners.items():
            rows = combiner.finish()
            if rows.num_rows == 0:
                self._report.ack(combiner.share)
            yield from sender.send(edge, combiner.grouping, rows, combiner.share)
        self._close()
        yield sender.control([*carried, self._report])

    def _close(self) -> None:
        for writer in self._open.values():
            self._report.files.extend(writer.close())

    # The first stage: messages.

    def _read(self) -> None:
        part = self._part
        entry = part.plan.entries[0]
        for messages in part.readers[self._task].read(part.seed, part.excluded, BATCH_ROWS):
            if messages.schema.names != READER_SCHEMA.names or messages.schema.types != READER_SCHEMA.types:
                raise JobFailed(
                    f"the reader of {part.spout!r} gave the columns {messages.schema.names} of "
                    f"{messages.schema.types}, not {READER_SCHEMA.names} of {READER_SCHEMA.types}",
                    component=part.spout,
                )
            self._messages(messages, entry.children)

    def _messages(self, messages: pa.RecordBatch, children: tuple[Node, ...]) -> None:
        part, report = self._part, self._report
        if part.decoder is None:
            raise AssertionError("the first stage has a decoder")
        tokens = as_words(messages.column("token").to_numpy())
        report.read_messages += messages.num_rows
        report.read_xor = signed(report.read_xor ^ xor_reduce(tokens))
        decoded = part.decoder.decode(messages.column("payload"))
        rows, errors = decoded.rows, decoded.failed
        batch = _Batch(messages)
        for row, error in errors:
            payload = messages.column("payload")[row].as_py()
            shown = storable_text(repr(payload[:INPUT_TEXT_MAX]), INPUT_TEXT_MAX)
            batch.fail(row, _Failed(FailureReason.BAD_MESSAGE, part.spout, error, shown))
        message = np.arange(messages.num_rows, dtype=np.int64)
        self._deliver(batch, batch.alive(_Tuples(rows, message, tokens if part.tracked else None)), None, children)
        self._finish(batch)
        self._name_failures(batch, messages)

    def _name_failures(self, batch: _Batch, messages: pa.RecordBatch) -> None:
        for row, failed in sorted(batch.failed.items()):
            id_, origin, token = (messages.column(name)[row].as_py() for name in ("id", "origin", "token"))
            self._report.failures.append(
                MessageFailure(
                    MessageId(id_), origin, Token(token), failed.reason, failed.component, failed.error, failed.input
                )
            )

    # Later stages: rows that were combined.

    def _merge(self, incoming: Iterable[pa.RecordBatch]) -> list[TaskReport]:
        part = self._part
        groupings = {e.edge: e.grouping for e in part.plan.entries if e.grouping is not None}
        received = receive(
            incoming, part.stage, self._task, part.tasks[part.stage - 1], groupings, tracked=part.tracked
        )
        self._report.violations += received.violations
        for entry in part.plan.entries:
            if entry.grouping is None:
                raise AssertionError("what crosses an exchange is grouped")
            combiner = Combiner(entry.grouping)
            for rows in received.chunks.pop(entry.edge):
                table = pa.Table.from_batches([rows])
                if part.tracked:
                    combiner.share ^= xor_reduce(as_words(rows.column(0).to_numpy()))
                    table = table.remove_column(0)
                combiner.absorb(table)
            merged = combiner.finish()
            if merged.num_rows == 0:
                self._report.ack(combiner.share)
                continue
            batch = _Batch(None)
            shares = split_one(combiner.share, merged.num_rows) if part.tracked else None
            self._deliver(batch, _Tuples(merged, None, shares), None, entry.children)
            self._finish(batch)
        return received.reports

    # Both.

    def _deliver(self, batch: _Batch, tuples: _Tuples, counts: Rows | None, children: tuple[Node, ...]) -> None:
        """Hand tuples to every subscriber. `counts`: how many of them each parent has, whose shares are still to be
        split; None where each tuple carries its own share. A child is one delivery, so the split counts those.
        """
        subscribers = len(children)
        self._report.tuples += tuples.rows.num_rows * subscribers
        if tuples.shares is None or (counts is None and subscribers == 1):
            deliveries = [tuples.shares] * subscribers
        else:
            each = np.full(len(tuples.shares), 1, np.int64) if counts is None else counts
            split = split_runs(tuples.shares, each * subscribers).reshape(-1, subscribers)
            deliveries = [np.ascontiguousarray(split[:, i]) for i in range(subscribers)]
        for node, shares in zip(children, deliveries, strict=True):
            given = _Tuples(tuples.rows, tuples.message, shares)
            if isinstance(node, OperationNode):
                self._operate(batch, batch.alive(given), node)
            else:
                batch.ends.append((node, given))

    def _operate(self, batch: _Batch, tuples: _Tuples, node: OperationNode) -> None:
        outcome = apply(node, tuples.rows)
        for row, error in sorted(outcome.failed.items()):
            self._fail_row(
                batch,
                tuples,
                row,
                _Failed(FailureReason.ERROR, node.component, error, input_text(node, tuples.rows, row)),
            )
        counts, message = outcome.counts, tuples.message
        if counts is not None:
            if tuples.shares is not None:
                childless = counts == 0
                batch.acked.append((None if message is None else message[childless], tuples.shares[childless]))
            message = None if message is None else np.repeat(message, counts)
        made = _Tuples(outcome.rows, message, tuples.shares)
        if not outcome.failed:
            self._deliver(batch, made, counts, node.children)
            return
        # The failed rows' tuples go before anybody sees them; so do those of the same message's other rows.
        shares = tuples.shares
        if shares is not None and counts is not None:
            shares = split_runs(shares, counts)
        self._deliver(batch, batch.alive(_Tuples(outcome.rows, message, shares)), None, node.children)

    def _finish(self, batch: _Batch) -> None:
        """The batch is through: check what comes out, drop what failed messages have there, combine, write, ack."""
        checked = [self._check(batch, node, tuples) for node, tuples in batch.ends]
        for message, shares in batch.acked:
            mask = batch.mask(message)
            self._report.ack(xor_reduce(shares if mask is None else shares[mask]))
        for (node, given), check in zip(batch.ends, checked, strict=True):
            still_good = check.failed == len(batch.failed)
            tuples = check.tuples if still_good else batch.alive(given)
            xor = 0 if tuples.shares is None else xor_reduce(tuples.shares)
            if isinstance(node, CombineNode):
                partial = check.partial if still_good else None
                combiner = self._combiners[node.edge]
                combiner.absorb(node.grouping.combine(tuples.rows) if partial is None else partial)
                combiner.share = signed(combiner.share ^ xor)
            elif tuples.rows.num_rows:
                self._writer(node.sink, tuples.rows.schema).write(tuples.rows)
                self._report.ack(xor)

    def _check(self, batch: _Batch, node: CombineNode | WriteNode, given: _Tuples) -> _Checked:
        """Fail the messages of rows that could not be held."""
        tuples, failed = batch.alive(given), len(batch.failed)
        if isinstance(node, WriteNode):
            for row, error in self._part.writers[node.sink].check(tuples.rows):
                self._fail_at_sink(batch, tuples, row, node.sink, error)
            return _Checked(tuples, None, failed)
        for key in node.grouping.keys:
            column = tuples.rows.column(key)
            if column.null_count:
                for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
                    self._fail_at_sink(batch, tuples, row, node.grouping.component, f"group key {key!r} is NULL")
        tuples, failed = batch.alive(tuples), len(batch.failed)
        partial = node.grouping.combine(tuples.rows)
        keys = list(node.grouping.keys)
        for sink in node.sinks:
            # Keys are checked once each, and traced to their rows only where one is bad.
            for distinct in partial.select(keys).combine_chunks().to_batches():
                for bad, error in self._part.writers[sink].check(distinct):
                    for row in rows_with_keys(tuples.rows, keys, distinct.slice(bad, 1)).tolist():
                        self._fail_at_sink(batch, tuples, row, sink, error)
        return _Checked(tuples, partial, failed)

    def _fail_at_sink(self, batch: _Batch, tuples: _Tuples, row: int, component: str, error: str) -> None:
        shown = storable_text(_shown_row(tuples.rows.slice(row, 1)), INPUT_TEXT_MAX)
        self._fail_row(batch, tuples, row, _Failed(FailureReason.SINK_ERROR, component, storable_text(error), shown))

    def _fail_row(self, batch: _Batch, tuples: _Tuples, row: int, failed: _Failed) -> None:
        if tuples.message is not None:
            batch.fail(int(tuples.message[row]), failed)
            return
        raise JobFailed(
            f"component {failed.component!r} failed after a group, where a row belongs to no single message: "
            f"{failed.error}; input: {failed.input}",
            component=failed.component,
            reason=failed.reason.value,
            error=failed.error,
            input=failed.input,
        )

    def _writer(self, sink: str, schema: pa.Schema) -> TaskWriter:
        writer = self._open.get(sink)
        if writer is None:
            context = replace(self._part.context, task=self._task)
            writer = self._open[sink] = self._part.writers[sink].open_task(context, schema)
        return writer


def _shown_row(row: pa.RecordBatch) -> str:
    try:
        return repr(row.to_pylist()[0])
    except UnicodeDecodeError:  # an Arrow-wise function can make text that is none
        return f"a row of {', '.join(row.schema.names)} whose text is not UTF-8"


def _combines(plan: StagePlan) -> Iterator[CombineNode]:
    todo: list[Node] = [node for entry in reversed(plan.entries) for node in reversed(entry.children)]
    while todo:
        match todo.pop():
            case CombineNode() as node:
                yield node
            case OperationNode() as node:
                todo.extend(reversed(node.children))
            case WriteNode():
                pass
