"""A task of a stage: the same code for every engine.

A task of the first stage reads its part of a slice, decodes it, and runs the fused bolts over one record batch of messages
at a time. A message that fails on the way there fails early: nothing of its record batch was combined, sent or written
yet, so nothing of it is left anywhere. Behind an exchange, or in a bolt that is an object and may remember what it saw, a
failure comes late: it is named, the share that ended in it is accounted for, and the coordinator decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.arrays import Rows, Words
from stormproof.core.bolt import ArrowBolt, BoltContext, Ran, fresh
from stormproof.core.bolt.runner import BoltRunner
from stormproof.core.errors import JobFailed, RoutingError
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.plan import (
    BoltNode,
    CombineNode,
    Entry,
    GatherNode,
    JoinNode,
    JoinSideNode,
    OperationNode,
    SendNode,
    StagePlan,
    WriteNode,
)
from stormproof.core.job import Job
from stormproof.core.message import INPUT_TEXT_MAX, FailureReason, MessageFailure, MessageId, Token, storable_text
from stormproof.core.process import kept_from_forks
from stormproof.core.pulse import Pulse, running
from stormproof.core.sink import SinkWriter, TaskContext, TaskWriter
from stormproof.core.source.group import SpoutReader
from stormproof.core.source.protocol import READER_SCHEMA, Decoder, SliceReader
from stormproof.core.task.combine import Combiner, combine, distinct_keys, prepare
from stormproof.core.task.gather import evaluate
from stormproof.core.task.groups import rows_with_keys
from stormproof.core.task.join import join_rows
from stormproof.core.task.keyhash import task_numbers
from stormproof.core.task.operate import apply, input_text
from stormproof.core.task.router import Router
from stormproof.core.task.wire import (
    ACK,
    ACK_SCHEMA,
    INIT,
    INIT_SCHEMA,
    Chunk,
    Sender,
    TaskReport,
    Way,
    receive,
    summary,
)
from stormproof.core.tracking.acker import acker_of, incomplete
from stormproof.core.tracking.anchors import MANY, Anchors, Held, Messages, joined
from stormproof.core.tracking.share import as_signed, as_words, signed, split_one, xor_reduce

BATCH_ROWS: Final = 10_000
"""Messages in a record batch: enough for whole-column work, few enough for a batch's tuples to stay in the cache."""

COPIED: Final = 1
"""What a message's ackers are told when a chunk with its tuples came twice: no share, so that its ack val is not zero."""


Observer: TypeAlias = Callable[[str, str, pa.RecordBatch], None]
"""Is told, inside a task, of each run of tuples that a component gave: component, stream, rows."""


@dataclass(frozen=True, slots=True)
class StageJob:
    """What the tasks of one stage are given: a job's part for that stage. Picklable where the plan is.

    `plan` None is the stage of the ackers, which there is where each message gets a verdict of its own; `ackers` is the
    number of its tasks, 0 where there is none. `tasks` is the number of tasks of every stage; `parallelism` is how many an
    exchange leads to where no number was asked for.
    """

    stage: int
    plan: StagePlan | None
    tasks: tuple[int, ...]
    writers: Mapping[str, SinkWriter]
    context: TaskContext
    tracked: bool
    ackers: int = 0
    seed: int = 0
    decoders: Mapping[str, Decoder] = field(default_factory=dict[str, Decoder])
    readers: tuple[SliceReader, ...] = ()
    excluded: frozenset[int] = frozenset()
    pulse: Path | None = None
    careful: bool = False
    parallelism: int = 1
    resources: Mapping[str, object] = field(default_factory=dict[str, object])


def stage_jobs(job: Job, parallelism: int) -> tuple[StageJob, ...]:
    """A job cut into the parts for its stages. The first stage has a task a reader, the others `parallelism`, but for
    those that were asked to have another number.
    """
    stages = job.plan.stages
    ackers = (job.plan.ackers or parallelism) if job.per_message and job.tracked else 0
    tasks = (len(job.readers), *(s.tasks(parallelism) for s in stages[1:]), *([ackers] if ackers else []))
    offered = ((name, writer.resource()) for name, writer in job.writers.items())
    resources = {f"state:{name}": resource for name, resource in offered if resource is not None}
    made: list[StageJob] = []
    for number, plan in enumerate((*stages, None) if ackers else stages):
        part = StageJob(
            stage=number,
            plan=plan,
            tasks=tasks,
            writers={} if plan is None else {name: job.writers[name] for name in sorted(_sinks_of(plan))},
            context=TaskContext(job.incarnation, job.txid, job.attempt, 0),
            tracked=job.tracked,
            ackers=ackers,
            seed=job.seed,
            pulse=job.pulse,
            careful=job.careful,
            parallelism=parallelism,
            resources={} if plan is None or not plan.reads_state else resources,
        )
        if number == 0:
            part = replace(part, decoders=job.plan.decoders, readers=job.readers, excluded=job.excluded)
        made.append(part)
    return tuple(made)


def run_task(
    part: StageJob, task: int, incoming: Iterable[pa.RecordBatch], observe: Observer | None = None
) -> Iterator[pa.RecordBatch]:
    """Run one task: wire rows in (none for the first stage), wire rows out. `observe` is told of everything emitted.

    Guarantee:
        Its prepared files are closed and synced before the row that names them is given out; where it does not get that
        far, they are removed.

    Raises:
        JobFailed: a row failed that belongs to no single message (after a group), or a reader gave something else than it
            promised.
    """
    if part.plan is None:
        yield _judged(part, task, incoming)
        return
    with running(part.pulse, part.stage, task, careful=part.careful) as pulse:
        task_ = _Task(part, part.plan, task, pulse, observe)
        try:
            with kept_from_forks():
                yield from task_.run(incoming)
        except BaseException:  # also GeneratorExit: the engine gave the task up
            task_.discard()
            raise


def _judged(part: StageJob, task: int, incoming: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    """An acker task: the verdicts over all messages whose notices came here."""
    received = receive(incoming, part.stage, task, part.tasks[part.stage - 1], {}, tracked=part.tracked)
    inits = pa.Table.from_batches(received.inits, INIT_SCHEMA)
    acks = pa.Table.from_batches(received.acks, ACK_SCHEMA)
    ids, origins, tokens = (inits.column(i).to_numpy() for i in range(3))
    bad = incomplete(ids, tokens, acks.column(0).to_numpy(), acks.column(1).to_numpy())
    report = TaskReport(part.stage, task, violations=received.violations, heard=received.heard)
    known = dict(zip(ids[np.isin(ids, bad)].tolist(), origins[np.isin(ids, bad)].tolist(), strict=True))
    for id_ in bad.tolist():
        error = "its ack val is not zero: a tuple of it was lost or doubled on the way"
        report.lost.append(
            MessageFailure(MessageId(id_), known.get(id_, 0), Token(0), FailureReason.LOST, "acker", error)
        )
    return summary(part.stage, task, [*received.reports, report])


def _sinks_of(plan: StagePlan) -> set[str]:
    found: set[str] = set()
    for node in plan.nodes.values():
        if isinstance(node, WriteNode):
            found.add(node.sink)
        elif isinstance(node, CombineNode):
            found.update(node.sinks)
    return found


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Tuples on their way: the rows, what anchors them, and for a direct stream the task that each one names."""

    rows: pa.RecordBatch
    anchors: Anchors
    task: Rows | None = None

    def only(self, mask: npt.NDArray[np.bool_]) -> _Tuples:
        return _Tuples(
            self.rows.filter(pa.array(mask)),
            self.anchors.only(mask),
            None if self.task is None else self.task[mask],
        )


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: FailureReason
    component: str
    error: str
    input: str


End = CombineNode | GatherNode | JoinSideNode | SendNode | WriteNode


@dataclass(slots=True)
class _Batch:
    """One record batch on its way through a stage; nothing of it is combined, sent or written until its end.

    The messages `first` to `first + number - 1` are fresh: all of their tuples are in here. `escaped` says of each of
    them, from the first on, whether a bolt which may remember it has seen it: then it is too late to fail early.
    """

    first: int = 0
    number: int = 0
    failed: dict[int, _Failed] = field(default_factory=dict[int, _Failed])
    escaped: npt.NDArray[np.bool_] | None = None
    acked: list[Anchors] = field(default_factory=list[Anchors])
    ends: list[tuple[str, End, _Tuples]] = field(default_factory=list[tuple[str, End, _Tuples]])

    def is_early(self, message: int) -> bool:
        """Whether nothing of this message can have gone anywhere."""
        fresh_ = self.first <= message < self.first + self.number
        return fresh_ and (self.escaped is None or not self.escaped[message - self.first])

    def seen(self, messages: Rows) -> None:
        """A bolt which may remember them has seen these messages."""
        if self.escaped is None:
            self.escaped = np.zeros(self.number, np.bool_)
        local = messages - self.first
        self.escaped[local[(local >= 0) & (local < self.number)]] = True

    def mask(self, anchors: Anchors) -> npt.NDArray[np.bool_] | None:
        """Which of the tuples belong to messages that have not failed early; None: all."""
        if not self.failed or anchors.message is None:
            return None
        bad = np.zeros(self.number, np.bool_)
        bad[[message - self.first for message in self.failed]] = True
        local = anchors.message - self.first
        inside = (local >= 0) & (local < self.number)
        hit = bad[np.where(inside, local, 0)] & inside
        if anchors.row is None:
            return ~hit
        mask = np.ones(anchors.rows, np.bool_)
        mask[anchors.row[hit]] = False
        return mask

    def alive(self, tuples: _Tuples) -> _Tuples:
        """The tuples whose messages have not failed early."""
        mask = self.mask(tuples.anchors)
        return tuples if mask is None else tuples.only(mask)


@dataclass(frozen=True, slots=True)
class _Checked:
    """Tuples at their end, combined or routed where that was needed to check them; good while `failed` have failed."""

    tuples: _Tuples
    failed: int
    partial: pa.Table | None = None
    dest: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """A bolt at work in this task. `most` is the largest number of subscribers that any of its streams has."""

    runner: BoltRunner
    held: Held
    most: int


class _Task:
    def __init__(
        self, part: StageJob, plan: StagePlan, task: int, pulse: Pulse | None, observe: Observer | None
    ) -> None:
        self._part, self._plan, self._task, self._pulse, self._observe = part, plan, task, pulse, observe
        self._report = TaskReport(part.stage, task)
        self._messages = Messages()
        self._open: dict[str, TaskWriter] = {}
        self._late: dict[int, _Failed] = {}
        self._together: list[npt.NDArray[np.int64]] = []
        self._inits: list[pa.RecordBatch] = []
        self._acks: list[tuple[Rows, Words]] = []
        last = part.stage == len(part.tasks) - 1
        self._sender = None if last else Sender(task, part.tasks[part.stage + 1], self._messages)
        self._combiners: dict[str, Combiner] = {}
        self._waiting: dict[str, list[_Tuples]] = {}
        self._routers: dict[str, Router] = {}
        self._bolts: dict[str, _Running] = {}
        for key, node in plan.nodes.items():
            if isinstance(node, (CombineNode, GatherNode)) and not self._raw(node):
                self._combiners[key] = Combiner(node.group)
            elif isinstance(node, (GatherNode, JoinSideNode)):
                self._waiting[key] = []
            elif isinstance(node, SendNode):
                self._routers[key] = Router(
                    node.grouping, node.tasks or part.parallelism, task, component=node.component
                )

    def _raw(self, node: CombineNode | GatherNode) -> bool:
        """Whether rows are not combined before they are all together: a result cannot be made of parts, or each message
        is to get a verdict of its own.
        """
        return bool(self._part.ackers) or not node.group.combines

    def _started(self, node: BoltNode) -> _Running:
        part = self._part
        consumers = {name: tasks or part.parallelism for name, tasks in node.consumers.items()}
        context = BoltContext(
            component=node.component,
            task=self._task,
            tasks=part.tasks[part.stage],
            consumers=consumers,
            seed=part.seed,
            params=part.resources,
        )
        direct = {stream: min(consumers[name] for name in names) for stream, names in node.direct.items()}
        runner = BoltRunner(node.component, fresh(node.bolt), node.streams, direct, context)
        most = max((len(children) for children in node.children.values()), default=1)
        return _Running(runner, Held(tracked=part.tracked), max(most, 1))

    def discard(self) -> None:
        for writer in self._open.values():
            writer.discard()
        for bolt in self._bolts.values():
            bolt.runner.close()

    def run(self, incoming: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        carried: list[TaskReport] = []
        for key, node in self._plan.nodes.items():
            if isinstance(node, BoltNode):  # not before: whatever comes now, those that were prepared are cleaned up
                self._bolts[key] = self._started(node)
        if self._part.stage == 0:
            yield from self._read()
        else:
            yield from self._receive(incoming, carried)
        for key, node in self._plan.nodes.items():  # each behind all that it takes from
            batch = _Batch()
            match node:
                case BoltNode():
                    running_ = self._bolts[key]
                    self._ran(batch, node, running_, running_.runner.finish(self._pulse))
                case GatherNode():
                    self._gathered(batch, key, node)
                case JoinNode():
                    self._join(batch, node)
                case _:
                    continue
            yield from self._finish(batch)
        yield from self._send_combined()
        yield from self._send_notices()
        for writer in self._open.values():
            self._report.files.extend(writer.close())
        self._report.late = self._named_late()
        if self._together:
            pairs = np.concatenate(self._together)
            ids = np.sort(self._messages.ids(pairs.reshape(-1)).reshape(-1, 2), axis=1)
            # A message has a number for each chunk that it came in, so the two may be one.
            self._report.together = np.unique(ids[ids[:, 0] != ids[:, 1]], axis=0)
        reports = [*carried, self._report]
        if self._sender is None:
            yield summary(self._part.stage, self._task, reports)
        else:
            yield self._sender.control(reports)

    def _beat(self, rows: int) -> None:
        if self._pulse is not None:
            self._pulse.beat(rows)

    # The first stage: messages.

    def _read(self) -> Iterator[pa.RecordBatch]:
        part = self._part
        reader = part.readers[self._task]
        entry = self._plan.entries[0]
        if isinstance(reader, SpoutReader):
            (entry,) = (e for e in self._plan.entries if e.component == reader.spout)
        for messages in reader.read(part.seed, part.excluded, BATCH_ROWS):
            # The payload's type is between the source's reader and its decoder: bytes, or a row of columns.
            if messages.schema.names != READER_SCHEMA.names or messages.schema.types[:3] != READER_SCHEMA.types[:3]:
                raise JobFailed(
                    f"the reader of {entry.component!r} gave the columns {messages.schema.names} of "
                    f"{messages.schema.types}, not {READER_SCHEMA.names} of {READER_SCHEMA.types}",
                    component=entry.component,
                )
            self._beat(messages.num_rows)
            yield from self._take(messages, entry)

    def _take(self, messages: pa.RecordBatch, entry: Entry) -> Iterator[pa.RecordBatch]:
        part, report, number = self._part, self._report, messages.num_rows
        column = messages.column("token")
        untracked = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        signed_tokens = (column.fill_null(0) if column.null_count else column).to_numpy()
        tokens = as_words(signed_tokens)
        ids, origins = messages.column("id").to_numpy(), messages.column("origin").to_numpy()
        first = self._messages.append(ids, origins, signed_tokens)
        report.read_messages += number
        report.read_xor = signed(report.read_xor ^ xor_reduce(tokens))
        decoded = part.decoders[entry.component].decode(messages.column("payload"))
        batch = _Batch(first, number)
        for row, error in decoded.failed:
            payload = messages.column("payload")[row].as_py()
            head = payload[:INPUT_TEXT_MAX] if isinstance(payload, bytes) else payload
            shown = storable_text(repr(head), INPUT_TEXT_MAX)
            batch.failed[first + row] = _Failed(FailureReason.BAD_MESSAGE, entry.component, error, shown)
        share = tokens if part.tracked else None
        anchors = Anchors(number, None, np.arange(first, first + number, dtype=np.int64), share)
        if untracked is not None:
            named = np.flatnonzero(~untracked)
            anchors = Anchors(number, named, named + first, None if share is None else share[named])
        counts = decoded.counts
        if counts is not None:
            batch.acked.append(anchors.only(counts == 0))
            (anchors,) = anchors.deliveries(counts, 1)
        tuples = _Tuples(decoded.rows, anchors)
        if counts is None and batch.failed:  # their rows hold nothing, those of messages that nobody tracks, too
            good = np.ones(number, np.bool_)
            good[[message - first for message in batch.failed]] = False
            tuples = tuples.only(good)
        self._deliver(batch, tuples, None, entry.children, entry.component, entry.stream)
        yield from self._finish(batch)
        if part.ackers:
            kept = np.ones(number, np.bool_) if untracked is None else ~untracked
            kept[[message - first for message in batch.failed]] = False
            self._inits.append(
                pa.RecordBatch.from_arrays(
                    [pa.array(a[kept]) for a in (ids, origins, signed_tokens)], schema=INIT_SCHEMA
                )
            )
        for message, failed in sorted(batch.failed.items()):
            if untracked is not None and untracked[message - first]:
                report.unanchored += 1  # nobody waits for it
            else:
                report.failures.append(self._named(message, failed))

    def _named(self, message: int, failed: _Failed) -> MessageFailure:
        at = np.array([message])
        return MessageFailure(
            MessageId(int(self._messages.ids(at)[0])),
            int(self._messages.origins(at)[0]),
            Token(int(self._messages.tokens(at)[0])),
            failed.reason,
            failed.component,
            failed.error,
            failed.input,
        )

    def _named_late(self) -> list[MessageFailure]:
        """Each message once for each component and reason: it has a number for each tuple that came over an exchange."""
        found: dict[tuple[int, str, FailureReason], MessageFailure] = {}
        for message, failed in sorted(self._late.items()):
            named = self._named(message, failed)
            found.setdefault((named.id, named.component, named.reason), named)
        return list(found.values())

    # Later stages.

    def _receive(self, incoming: Iterable[pa.RecordBatch], carried: list[TaskReport]) -> Iterator[pa.RecordBatch]:
        part = self._part
        edges = [entry.edge for entry in self._plan.entries if entry.edge is not None]
        per_message = bool(part.ackers)
        ways = {e.number: Way(e.component, e.schema(per_message=per_message)) for e in edges}
        for edge in self._plan.relayed:
            ways[edge.number] = Way(edge.component, edge.schema(per_message=per_message), passes=True)
        received = receive(incoming, part.stage, self._task, part.tasks[part.stage - 1], ways, tracked=part.tracked)
        carried += received.reports
        self._report.violations += received.violations
        self._report.heard = received.heard
        self._inits += received.inits
        self._acks += [(n.column(0).to_numpy(), as_words(n.column(1).to_numpy())) for n in received.acks]
        if part.ackers:
            for chunk in received.copied:
                ids = np.empty(0, np.int64) if chunk.id is None else np.unique(chunk.id)  # once each: it is an XOR
                self._acks.append((ids, np.full(len(ids), COPIED, np.uint64)))
        if received.passing:
            assert self._sender is not None
            yield from self._sender.relay(received.passing)
        for entry in self._plan.entries:
            assert entry.edge is not None
            chunks = received.chunks.pop(entry.edge.number)
            if entry.edge.group is not None:
                self._beat(sum(chunk.rows.num_rows for chunk in chunks))
                yield from self._merge(entry, entry.edge.group, chunks)
                continue
            for chunk in chunks:
                self._beat(chunk.rows.num_rows)
                batch = _Batch()
                tuples = _Tuples(chunk.rows, chunk.anchors(self._messages))
                (child,) = entry.children  # they were told to the watcher, and split, where they were emitted
                self._report.tuples += tuples.rows.num_rows
                self._hand(batch, child, tuples, entry.component, entry.stream)
                yield from self._finish(batch)

    def _merge(self, entry: Entry, group: GroupBy, chunks: list[Chunk]) -> Iterator[pa.RecordBatch]:
        # Without keys there is one group, also where nothing is in it; it is the first task's.
        if not chunks and (group.keys or self._task):
            return
        batch = _Batch()
        if self._part.ackers or not group.combines or not chunks:
            rows = [_Tuples(chunk.rows, chunk.anchors(self._messages)) for chunk in chunks]
            self._evaluated(batch, group, rows, entry.children, entry.component)
        else:
            combiner = Combiner(group)
            for chunk in chunks:
                if chunk.share is not None:
                    combiner.share ^= xor_reduce(chunk.share)
                combiner.absorb(pa.Table.from_batches([chunk.rows]))
            self._deliver(batch, self._merged(combiner), None, entry.children, entry.component, entry.stream)
        yield from self._finish(batch)

    def _merged(self, combiner: Combiner) -> _Tuples:
        """Results that are anchored to many together."""
        rows = combiner.finish()
        share = split_one(combiner.share, rows.num_rows) if self._part.tracked else None
        return _Tuples(rows, Anchors(rows.num_rows, None, None, share))

    def _gathered(self, batch: _Batch, key: str, node: GatherNode) -> None:
        """What this task grouped for itself, at its end."""
        if self._raw(node):
            waiting = self._waiting.pop(key)
            if waiting:
                self._evaluated(batch, node.group, waiting, node.children, node.component)
            return
        combiner = self._combiners.pop(key)
        made = self._merged(combiner)
        if made.rows.num_rows:
            self._deliver(batch, made, None, node.children, node.component, "default")

    def _evaluated(
        self, batch: _Batch, group: GroupBy, parts: list[_Tuples], children: tuple[str, ...], component: str
    ) -> None:
        """Rows that were not combined before, to the results of their groups.

        Where each message gets a verdict of its own, a result is anchored to every message that went into its group; else
        to many together.
        """
        rows = pa.concat_batches([p.rows for p in parts]) if parts else _no_rows(group.given)
        anchors = joined([p.anchors for p in parts]) if parts else Anchors.none(0, tracked=self._part.tracked)
        if self._pulse is not None and self._pulse.careful:
            self._pulse.at(self._ids_of(anchors))
        result = evaluate(group, rows, self._pulse)
        if result.failed:
            for row, (reason, error) in sorted(result.failed.items()):
                self._fail_row(batch, anchors, row, _Failed(reason, component, error, _shown_row(rows, row)))
            anchors = anchors.only(result.group_of_row >= 0)
        of_row = result.group_of_row[result.group_of_row >= 0]
        groups, of_pair, share = len(result.counts), of_row[anchors.row_of_pairs()], anchors.share
        if self._part.ackers:
            order = np.argsort(of_pair, kind="stable")
            message = anchors.messages()[order]
            by_group = Anchors(groups, of_pair[order], message, None if share is None else share[order])
        else:
            total = None if share is None else np.zeros(groups, np.uint64)
            if total is not None and share is not None:
                np.bitwise_xor.at(total, of_pair, share)
            by_group = Anchors(groups, None, None, total)
        batch.acked.append(by_group.only(result.counts == 0))
        self._deliver(batch, _Tuples(result.rows, by_group), result.counts, children, component, "default")

    def _join(self, batch: _Batch, node: JoinNode) -> None:
        """Both sides are there: join them."""
        sides: list[tuple[pa.RecordBatch, Anchors]] = []
        for side, schema in ((0, node.on.left), (1, node.on.right)):
            parts = self._waiting.pop(f"{node.component}<{side}")
            rows = pa.concat_batches([p.rows for p in parts]) if parts else _no_rows(schema)
            anchors = joined([p.anchors for p in parts]) if parts else Anchors.none(0, tracked=self._part.tracked)
            sides.append((rows, anchors))
        made = join_rows(node.on, sides[0], sides[1], len(node.children))
        batch.acked += made.unmatched
        self._report.tuples += made.rows.num_rows * len(node.children)
        if self._observe is not None:
            self._observe(node.component, "default", made.rows)
        together = made.deliveries[0].together()
        if len(together):
            self._together.append(together)
        for key, anchors in zip(node.children, made.deliveries, strict=True):
            self._hand(batch, key, _Tuples(made.rows, anchors), node.component, "default")

    # Both.

    def _deliver(
        self,
        batch: _Batch,
        tuples: _Tuples,
        counts: Rows | None,
        children: tuple[str, ...],
        component: str,
        stream: str,
    ) -> None:
        """Hand tuples to every subscriber. `counts`: how many of them were made of each of the anchored ones, whose
        shares are still to be split; None where each tuple has its own. A child is one delivery, so the split counts those.
        """
        self._report.tuples += tuples.rows.num_rows * len(children)
        if self._observe is not None:
            self._observe(component, stream, tuples.rows)
        for key, anchors in zip(children, tuples.anchors.deliveries(counts, len(children)), strict=True):
            self._hand(batch, key, _Tuples(tuples.rows, anchors, tuples.task), component, stream)

    def _hand(self, batch: _Batch, key: str, tuples: _Tuples, component: str, stream: str) -> None:
        node = self._plan.nodes[key]
        match node:
            case OperationNode():
                self._operate(batch, batch.alive(tuples), node)
            case BoltNode():
                self._bolt(batch, batch.alive(tuples), node, component, stream)
            case JoinNode():
                raise AssertionError(f"{node.component!r} takes tuples by its sides")
            case _:
                batch.ends.append((key, node, tuples))

    def _operate(self, batch: _Batch, tuples: _Tuples, node: OperationNode) -> None:
        if self._pulse is not None and self._pulse.careful:
            self._pulse.at(self._ids_of(tuples.anchors))
        outcome = apply(node, tuples.rows, self._pulse)
        rows, counts, anchors = outcome.rows, outcome.counts, tuples.anchors
        if outcome.failed:
            for row, error in sorted(outcome.failed.items()):
                reason = FailureReason.FAILED if row in outcome.refused else FailureReason.ERROR
                shown = input_text(node, tuples.rows, row)
                self._fail_row(batch, anchors, row, _Failed(reason, node.component, error, shown))
            good = np.ones(tuples.rows.num_rows, np.bool_)
            good[list(outcome.failed)] = False
            # The failed rows' tuples go before anybody sees them; so do those of the same message's other rows.
            mask = batch.mask(anchors)
            good = good if mask is None else good & mask
            rows = rows.filter(pa.array(good if counts is None else np.repeat(good, counts)))
            anchors = anchors.only(good)
            counts = None if counts is None else counts[good]
        if counts is not None:
            batch.acked.append(anchors.only(counts == 0))
        self._deliver(batch, _Tuples(rows, anchors), counts, node.children, node.component, "default")

    def _ids_of(self, anchors: Anchors) -> Rows | None:
        """The message id of each tuple, where each has exactly one."""
        if anchors.row is not None or anchors.message is None or (anchors.message == MANY).any():
            return None
        return self._messages.ids(anchors.message)

    def _bolt(self, batch: _Batch, tuples: _Tuples, node: BoltNode, component: str, stream: str) -> None:
        if tuples.rows.num_rows == 0:
            return
        running_ = self._bolts[node.component]
        running_.held.append(tuples.anchors)
        # An ArrowBolt keeps no state, by contract: as with a function, nothing of a message stays behind in it.
        if batch.number and tuples.anchors.message is not None and not isinstance(node.bolt, ArrowBolt):
            batch.seen(tuples.anchors.message)
        if self._pulse is not None and self._pulse.careful:
            self._pulse.at(self._ids_of(tuples.anchors))
        self._ran(batch, node, running_, running_.runner.run(tuples.rows, component, stream, self._pulse))

    def _ran(self, batch: _Batch, node: BoltNode, running_: _Running, ran: Ran) -> None:
        held = running_.held
        made: list[tuple[str, str, _Tuples]] = []
        for stream, emitted in ran.emitted.items():
            children, number = node.children[stream], emitted.rows.num_rows
            self._report.tuples += number * len(children)
            if self._observe is not None:
                self._observe(node.component, stream, emitted.rows)
            deliveries = held.emit(
                number,
                emitted.anchor_row,
                emitted.anchor_input,
                emitted.anchor_ordinal,
                len(children),
                running_.most,
            )
            if deliveries and deliveries[0].row is not None:
                together = deliveries[0].together()
                if len(together):
                    self._together.append(together)
            for key, anchors in zip(children, deliveries, strict=True):
                made.append((key, stream, _Tuples(emitted.rows, anchors, emitted.task)))
        if len(ran.acked):
            batch.acked.append(held.rest(ran.acked))
        for failed in ran.failed:
            rest = held.rest(np.array([failed.handle]))
            self._fail_row(batch, rest, 0, _Failed(failed.reason, node.component, failed.error, failed.input))
        for key, stream, tuples in made:
            self._hand(batch, key, tuples, node.component, stream)

    def _finish(self, batch: _Batch) -> Iterator[pa.RecordBatch]:
        """The batch is through: check what comes out, drop what failed messages have there, combine, send, write, ack."""
        checked = [self._check(batch, key, node, tuples) for key, node, tuples in batch.ends]
        for anchors in batch.acked:
            mask = batch.mask(anchors)
            self._ack(anchors if mask is None else anchors.only(mask))
        for (key, node, _), check in zip(batch.ends, checked, strict=True):
            mask = None if check.failed == len(batch.failed) else batch.mask(check.tuples.anchors)
            tuples = check.tuples if mask is None else check.tuples.only(mask)
            dest = check.dest if mask is None or check.dest is None else check.dest[mask]
            if isinstance(node, WriteNode):
                if tuples.rows.num_rows:
                    self._writer(node.sink, tuples.rows.schema).write(tuples.rows)
                    self._ack(tuples.anchors)
            elif isinstance(node, JoinSideNode) or (isinstance(node, GatherNode) and self._raw(node)):
                if tuples.rows.num_rows:
                    self._waiting[key].append(tuples)
            elif isinstance(node, GatherNode) or (isinstance(node, CombineNode) and not self._raw(node)):
                combiner = self._combiners[key]
                combiner.absorb(
                    combine(node.group, tuples.rows) if mask is not None or check.partial is None else check.partial
                )
                combiner.share = signed(combiner.share ^ tuples.anchors.xor())
            else:
                yield from self._send(node, tuples, dest)

    def _send(
        self, node: CombineNode | SendNode, tuples: _Tuples, dest: npt.NDArray[np.int32] | None
    ) -> Iterator[pa.RecordBatch]:
        assert self._sender is not None
        tasks = node.tasks or self._part.parallelism
        if dest is None:
            yield from self._sender.copies(node.edge, tuples.rows, tuples.anchors, tasks)
        else:
            yield from self._sender.send(node.edge, tuples.rows, tuples.anchors, dest, tasks)

    def _check(self, batch: _Batch, key: str, node: End, given: _Tuples) -> _Checked:
        """Fail the messages of rows that could not be held, or have no task to go to."""
        tuples = batch.alive(given)
        match node:
            case WriteNode():
                bad = {
                    row: _Failed(
                        FailureReason.SINK_ERROR, node.sink, storable_text(error), _shown_row(tuples.rows, row)
                    )
                    for row, error in self._part.writers[node.sink].check(tuples.rows)
                }
                tuples = self._without(batch, tuples, bad)
                return _Checked(tuples, len(batch.failed))
            case SendNode():
                return self._routed(batch, key, node, tuples)
            case CombineNode() | GatherNode():
                return self._combined(batch, node, tuples)
            case JoinSideNode():
                return _Checked(tuples, len(batch.failed))

    def _routed(self, batch: _Batch, key: str, node: SendNode, tuples: _Tuples) -> _Checked:
        router = self._routers[key]
        while tuples.rows.num_rows and not router.copies:
            failed = len(batch.failed)
            try:
                return _Checked(tuples, failed, dest=router.route(tuples.rows, tuples.task))
            except RoutingError as error:
                culprits = range(tuples.rows.num_rows) if error.rows is None else error.rows
                bad = {
                    row: _Failed(
                        FailureReason.ERROR,
                        node.component,
                        error.texts.get(row, str(error)),
                        _shown_row(tuples.rows, row),
                    )
                    for row in culprits
                }
            tuples = self._without(batch, tuples, bad)
        dest = None if router.copies else np.empty(0, np.int32)
        return _Checked(tuples, len(batch.failed), dest=dest)

    def _combined(self, batch: _Batch, node: CombineNode | GatherNode, tuples: _Tuples) -> _Checked:
        group, raw = node.group, self._raw(node)
        bad: dict[int, _Failed] = {}
        for key in group.keys:
            column = tuples.rows.column(key)
            if column.null_count:
                for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
                    shown = _shown_row(tuples.rows, row)
                    error = f"group key {key!r} is NULL"
                    bad.setdefault(row, _Failed(FailureReason.SINK_ERROR, group.component, error, shown))
        tuples = self._without(batch, tuples, bad)
        if not raw:
            tuples = self._prepared(batch, group, tuples)
        failed = len(batch.failed)
        partial = None if raw else combine(group, tuples.rows)
        keys = list(group.keys)
        unheld: dict[int, _Failed] = {}
        for sink in node.sinks if keys else ():
            # Keys are checked once each, and traced to their rows only where one is bad.
            there = distinct_keys(group, tuples.rows) if partial is None else partial.select(keys)
            for distinct in there.combine_chunks().to_batches():
                refused = dict(self._part.writers[sink].check(distinct))
                for row, number in rows_with_keys(tuples.rows, keys, distinct, refused):
                    error, shown = storable_text(refused[number]), _shown_row(tuples.rows, row)
                    unheld.setdefault(row, _Failed(FailureReason.SINK_ERROR, sink, error, shown))
        if unheld:
            tuples = self._without(batch, tuples, unheld)
            failed, partial = len(batch.failed), None if raw else combine(group, tuples.rows)
        dest = None
        if raw and isinstance(node, CombineNode):
            dest = task_numbers(tuples.rows, group.keys, node.tasks or self._part.parallelism)
        return _Checked(tuples, failed, partial, dest)

    def _prepared(self, batch: _Batch, group: GroupBy, tuples: _Tuples) -> _Tuples:
        """What users' combiners make of each row, beside the row; rows that they refuse fail."""
        if self._pulse is not None and self._pulse.careful:
            self._pulse.at(self._ids_of(tuples.anchors))
        prepared = prepare(group, tuples.rows, self._pulse)
        bad = {
            row: _Failed(reason, group.component, error, _shown_row(tuples.rows, row))
            for row, (reason, error) in prepared.failed.items()
        }
        return self._without(batch, replace(tuples, rows=prepared.rows), bad)

    def _without(self, batch: _Batch, tuples: _Tuples, bad: Mapping[int, _Failed]) -> _Tuples:
        """Fail these rows; the rows that are left."""
        if not bad:
            return tuples
        for row, failed in sorted(bad.items()):
            self._fail_row(batch, tuples.anchors, row, failed)
        good = np.ones(tuples.rows.num_rows, np.bool_)
        good[list(bad)] = False
        return batch.alive(tuples.only(good))

    def _fail_row(self, batch: _Batch, anchors: Anchors, row: int, failed: _Failed) -> None:
        """Fail every message that anchors a tuple: early where nothing of it can have gone anywhere, else late."""
        pairs = anchors.pairs_of(row)
        if len(pairs) == 0:
            if anchors.row is None:
                raise AssertionError("a tuple has one pair where there is no index")
            self._report.unanchored += 1
            return
        messages = anchors.messages()[pairs]
        if (messages == MANY).any():
            raise JobFailed(
                f"component {failed.component!r} failed after a group, where a row belongs to no single message: "
                f"{failed.error}; input: {failed.input}",
                component=failed.component,
                reason=failed.reason.value,
                error=failed.error,
                input=failed.input,
            )
        for pair, message in zip(pairs.tolist(), messages.tolist(), strict=True):
            if batch.is_early(message):
                batch.failed.setdefault(message, failed)
                continue
            self._late.setdefault(message, failed)
            if anchors.share is not None:
                share = anchors.share[pair : pair + 1]
                self._report.late_xor ^= xor_reduce(share)
                if self._part.ackers:
                    self._acks.append((self._messages.ids(np.array([message])), share))

    def _ack(self, anchors: Anchors) -> None:
        self._report.ack(anchors.xor())
        if self._part.ackers and anchors.message is not None and anchors.share is not None:
            self._acks.append((self._messages.ids(anchors.message), anchors.share))

    def _send_combined(self) -> Iterator[pa.RecordBatch]:
        for key, combiner in self._combiners.items():
            node = self._plan.nodes[key]
            if not isinstance(node, CombineNode):
                continue
            rows = combiner.partials()
            if rows.num_rows == 0:
                self._report.ack(combiner.share)
                continue
            assert self._sender is not None
            share = split_one(combiner.share, rows.num_rows) if self._part.tracked else None
            tasks = node.tasks or self._part.parallelism
            dest = task_numbers(rows, combiner.group.keys, tasks)
            yield from self._sender.send(node.edge, rows, Anchors(rows.num_rows, None, None, share), dest, tasks)

    def _send_notices(self) -> Iterator[pa.RecordBatch]:
        """What the ackers are to know, one ack notice a message and task, towards the acker that each message has."""
        ackers = self._part.ackers
        if not ackers or self._sender is None:
            return
        for inits in self._inits:
            yield from self._sender.notices(INIT, inits, acker_of(inits.column(0).to_numpy(), ackers), ackers)
        if not self._acks:
            return
        ids = np.concatenate([ids for ids, _ in self._acks])
        shares = np.concatenate([shares for _, shares in self._acks])
        order = np.argsort(ids, kind="stable")
        ids, shares = ids[order], shares[order]
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1]))) if len(ids) else np.empty(0, np.int64)
        if len(starts):
            values = as_signed(np.bitwise_xor.reduceat(shares, starts))
            acks = pa.RecordBatch.from_arrays([pa.array(ids[starts]), pa.array(values)], schema=ACK_SCHEMA)
            yield from self._sender.notices(ACK, acks, acker_of(ids[starts], ackers), ackers)

    def _writer(self, sink: str, schema: pa.Schema) -> TaskWriter:
        writer = self._open.get(sink)
        if writer is None:
            context = replace(self._part.context, task=self._task)
            writer = self._open[sink] = self._part.writers[sink].open_task(context, schema)
        return writer


def _shown_row(rows: pa.RecordBatch, row: int) -> str:
    try:
        text = repr(rows.slice(row, 1).to_pylist()[0])
    except UnicodeDecodeError:  # an Arrow-wise function can make text that is none
        text = f"a row of {', '.join(rows.schema.names)} whose text is not UTF-8"
    except (ValueError, OverflowError):  # and a date or a time of no year that Python has
        text = f"a row of {', '.join(rows.schema.names)} with a value that Python cannot show"
    return storable_text(text, INPUT_TEXT_MAX)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
