"""A task of a stage: the same code for every engine. It runs tuples through the nodes of the stage, up to their ends.

A task of the first stage reads its part of a slice, decodes it, and runs the fused bolts over one record batch of messages
at a time. A message that fails there fails early: nothing of its record batch was combined, sent or written yet, so nothing
of it remains. Behind an exchange, or in a bolt that is an object and may remember its inputs, a failure is late: the report
names the message, the share that ended in the failure is accounted for, and the coordinator decides.

The nodes are functions, bolts, groups and joins. The ackers of a job are a stage of their own (`judged`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, MessageFailure, MessageId, Token, storable_text
from stormproof.core.base.process import kept_from_forks
from stormproof.core.bolt import ArrowBolt, BoltContext, Ran
from stormproof.core.bolt.runner import BoltRunner, fresh
from stormproof.core.contract.source import READER_SCHEMA
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.plan import BoltNode, GatherNode, JoinNode, OperationNode, StageEntry, StagePlan
from stormproof.core.heartbeat.task import Heartbeat, running
from stormproof.core.source.group import SpoutReader
from stormproof.core.task.account import Account, EndedTuples, FailureCause, Observer, Passage, Tuples, shown_row
from stormproof.core.task.combine import Combiner, evaluate
from stormproof.core.task.ends import Ends, MessageIds
from stormproof.core.task.exchange import Chunk, Sender, Way, receive
from stormproof.core.task.job import INIT_SCHEMA, StageJob, TaskReport, WireRow, rows_for, summary
from stormproof.core.task.join import join_rows
from stormproof.core.task.operate import Calls, apply, input_text
from stormproof.core.task.router import hash_keys
from stormproof.core.tracking.acker import ACKER, Acker
from stormproof.core.tracking.share import Anchors, BoltInputs, as_words, joined, signed, split_one, xor_reduce
from stormproof.core.user_code.functions import no_rows


@dataclass(frozen=True, slots=True)
class _RunningBolt:
    """A bolt of this task. `most` is the largest number of subscribers of any of its streams."""

    runner: BoltRunner
    inputs: BoltInputs
    most: int


class Nodes:
    """The nodes of one task. Tuples go from node to node within a passage; those that end are kept there, for `Ends`."""

    def __init__(
        self,
        part: StageJob,
        plan: StagePlan,
        task: int,
        heartbeat: Heartbeat | None,
        observe: Observer | None,
        go_on: Callable[[], None],
        account: Account,
        ends: Ends,
    ) -> None:
        self._part, self._plan, self._task, self._heartbeat, self._observe = part, plan, task, heartbeat, observe
        self._go_on, self._account, self._ends, self._counts = go_on, account, ends, account.counts
        self._bolts: dict[str, _RunningBolt] = {}

    def start(self) -> None:
        """Prepare the bolts. Where this raises, `stop` closes those that were prepared."""
        for key, node in self._plan.nodes.items():
            if isinstance(node, BoltNode):
                self._bolts[key] = self._started(node)

    def stop(self) -> None:
        """Close the bolts of a task that is given up."""
        for bolt in self._bolts.values():
            bolt.runner.close()

    def _started(self, node: BoltNode) -> _RunningBolt:
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
        return _RunningBolt(runner, BoltInputs(tracked=part.tracked), max(most, 1))

    def at_end(self, key: str) -> Passage | None:
        """What a node emits at the end of the task; call it after all nodes that it takes tuples from. None: nothing."""
        passage = Passage()
        match self._plan.nodes[key]:
            case BoltNode() as node:
                running = self._bolts[key]
                with self._counts.busy(node.component):
                    ran = running.runner.finish(self._heartbeat)
                self._ran(passage, node, running, ran)
            case GatherNode() as node:
                self._gathered(passage, key, node)
            case JoinNode() as node:
                self._join(passage, node)
            case _:
                return None
        return passage

    def deliver(
        self,
        passage: Passage,
        tuples: Tuples,
        counts: Rows | None,
        children: tuple[str, ...],
        component: str,
        stream: str = "default",
    ) -> None:
        """Hand tuples to every subscriber.

        `counts` is the number of tuples that were made of each anchored one; None: one of each. Shares are split over all
        deliveries.
        """
        self._emitted(component, stream, tuples.rows, len(children))
        for key, anchors in zip(children, tuples.anchors.deliveries(counts, len(children)), strict=True):
            self.hand(passage, key, Tuples(tuples.rows, anchors, tuples.task), component, stream)

    def hand(self, passage: Passage, key: str, tuples: Tuples, component: str, stream: str) -> None:
        """Hand a component's tuples to one node."""
        node = self._plan.nodes[key]
        match node:
            case OperationNode():
                alive = passage.alive(tuples)
                self._counts.took(component, stream, node.component, alive.rows.num_rows)
                self._operate(passage, alive, node)
            case BoltNode():
                alive = passage.alive(tuples)
                self._counts.took(component, stream, node.component, alive.rows.num_rows)
                self._bolt(passage, alive, node, component, stream)
            case JoinNode():
                raise AssertionError(f"{node.component!r} takes tuples by its sides")
            case _:
                passage.ends.append(EndedTuples(key, node, tuples, component, stream))

    def evaluated(
        self, passage: Passage, group: GroupBy, parts: list[Tuples], children: tuple[str, ...], component: str
    ) -> None:
        """Evaluate the groups of rows that were not combined before, and deliver the results.

        In per-message mode a result is anchored to every message that went into its group, else to `MANY`.
        """
        rows, anchors = self._put_together(parts, group.given)
        self._account.enter(self._heartbeat, component, anchors)
        with self._counts.busy(component):
            result = evaluate(group, rows, self._heartbeat)
        self._counts.of(component).acked -= len(result.failed)
        if result.failed:
            for row, (reason, error) in sorted(result.failed.items()):
                failed = FailureCause(reason, component, error, shown_row(rows, row))
                self._account.fail_row(passage, anchors, row, failed)
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
        passage.acked.append(by_group.only(result.counts == 0))
        self.deliver(passage, Tuples(result.rows, by_group), result.counts, children, component)

    def merged(self, combiner: Combiner) -> Tuples:
        """The results of groups that were combined; each is anchored to `MANY`."""
        with self._counts.busy(combiner.group.component):
            rows = combiner.finish()
        share = split_one(combiner.share, rows.num_rows) if self._part.tracked else None
        return Tuples(rows, Anchors(rows.num_rows, None, None, share))

    def _gathered(self, passage: Passage, key: str, node: GatherNode) -> None:
        """Deliver the results of groups that do not cross an exchange."""
        if self._ends.is_raw(node):
            waiting = self._ends.waiting(key)
            if waiting:
                self.evaluated(passage, node.group, waiting, node.children, node.component)
            return
        made = self.merged(self._ends.combiner(key))
        if made.rows.num_rows:
            self.deliver(passage, made, None, node.children, node.component)

    def _join(self, passage: Passage, node: JoinNode) -> None:
        left, right = (
            self._put_together(self._ends.waiting(f"{node.component}<{side}"), schema)
            for side, schema in ((0, node.on.left), (1, node.on.right))
        )
        with self._counts.busy(node.component):
            made = join_rows(node.on, left, right, len(node.children))
        passage.acked += made.unmatched
        self._emitted(node.component, "default", made.rows, len(node.children))
        self._account.anchored_together(made.deliveries[0])
        for key, anchors in zip(node.children, made.deliveries, strict=True):
            self.hand(passage, key, Tuples(made.rows, anchors), node.component, "default")

    def _put_together(self, parts: list[Tuples], schema: pa.Schema) -> tuple[pa.RecordBatch, Anchors]:
        if not parts:
            return no_rows(schema), Anchors.none(0, tracked=self._part.tracked)
        return pa.concat_batches([p.rows for p in parts]), joined([p.anchors for p in parts])

    def _emitted(self, component: str, stream: str, rows: pa.RecordBatch, subscribers: int) -> None:
        """Count and show what a component emitted."""
        self._account.report.tuples += rows.num_rows * subscribers
        self._counts.of(component).emitted += rows.num_rows
        if self._observe is not None:
            self._observe(component, stream, rows)

    def _operate(self, passage: Passage, tuples: Tuples, node: OperationNode) -> None:
        self._account.enter(self._heartbeat, node.component, tuples.anchors)
        ids = MessageIds(tuples.anchors, self._account.messages, self._part.shown_ids)
        calls = Calls(ids.of_row, self._part.message_timeout_s, self._go_on)
        with self._counts.busy(node.component):
            applied = apply(node, tuples.rows, self._heartbeat, calls)
        self._counts.of(node.component).acked += tuples.rows.num_rows - len(applied.failed)
        rows, counts, anchors = applied.rows, applied.counts, tuples.anchors
        if applied.failed:
            for row, error in sorted(applied.failed.items()):
                reason = applied.reasons.get(row, FailureReason.ERROR)
                failed = FailureCause(reason, node.component, error, input_text(node, tuples.rows, row))
                self._account.fail_row(passage, anchors, row, failed)
            good = np.ones(tuples.rows.num_rows, np.bool_)
            good[list(applied.failed)] = False
            # Failed rows' tuples are dropped before they are delivered, and so are those of the same message's other rows.
            mask = passage.mask(anchors)
            good = good if mask is None else good & mask
            rows = rows.filter(pa.array(good if counts is None else np.repeat(good, counts)))
            anchors = anchors.only(good)
            counts = None if counts is None else counts[good]
        if counts is not None:
            passage.acked.append(anchors.only(counts == 0))
        self.deliver(passage, Tuples(rows, anchors), counts, node.children, node.component)

    def _bolt(self, passage: Passage, tuples: Tuples, node: BoltNode, component: str, stream: str) -> None:
        if tuples.rows.num_rows == 0:
            return
        running = self._bolts[node.component]
        running.inputs.append(tuples.anchors)
        # An ArrowBolt, like a function, keeps no state by contract, so nothing of a message stays behind in it.
        if passage.number and tuples.anchors.message is not None and not isinstance(node.bolt, ArrowBolt):
            passage.seen(tuples.anchors.message)
        self._account.enter(self._heartbeat, node.component, tuples.anchors)
        with self._counts.busy(node.component):
            ran = running.runner.run(tuples.rows, component, stream, self._heartbeat)
        self._ran(passage, node, running, ran)

    def _ran(self, passage: Passage, node: BoltNode, running: _RunningBolt, ran: Ran) -> None:
        inputs = running.inputs
        self._counts.of(node.component).acked += len(ran.acked)
        made: list[tuple[str, str, Tuples]] = []
        for stream, emitted in ran.emitted.items():
            children = node.children[stream]
            self._emitted(node.component, stream, emitted.rows, len(children))
            deliveries = inputs.emit(
                emitted.rows.num_rows,
                emitted.anchor_row,
                emitted.anchor_input,
                emitted.anchor_ordinal,
                len(children),
                running.most,
            )
            if deliveries and deliveries[0].row is not None:
                self._account.anchored_together(deliveries[0])
            for key, anchors in zip(children, deliveries, strict=True):
                made.append((key, stream, Tuples(emitted.rows, anchors, emitted.task)))
        if len(ran.acked):
            passage.acked.append(inputs.rest(ran.acked))
        for failed in ran.failed:
            rest = inputs.rest(np.array([failed.handle]))
            why = FailureCause(failed.reason, node.component, failed.error, failed.input)
            self._account.fail_row(passage, rest, 0, why)
        for key, stream, tuples in made:
            self.hand(passage, key, tuples, node.component, stream)


# ---- the task

BATCH_ROWS: Final = 10_000
"""Messages in a record batch: enough for whole-column work, and few enough for its tuples to stay in the cache."""

COPIED: Final = 1
"""The value that a message's acker is told when a chunk with its tuples came twice: no share, so its ack val is not zero."""


def run_task(
    part: StageJob,
    task: int,
    incoming: Iterable[WireRow],
    observe: Observer | None = None,
    go_on: Callable[[], None] = lambda: None,
    *,
    shared: Heartbeat | None = None,
) -> Iterator[WireRow]:
    """Run one task: takes wire rows (none for the first stage), yields wire rows. `observe` is called with all tuples.

    `go_on` is called now and then while calls of functions are waited for, and raises where the job is cancelled. `shared`
    is the heartbeat of several tasks that one process runs in turn; None: the task has its own.

    Guarantee:
        The files that it wrote are closed and synced before it yields the row that names them. Where it does not get that
        far, they are removed.

    Raises:
        JobFailed: a row failed that belongs to no single message (after a group), or a reader's batches have wrong columns.
    """
    if part.plan is None:
        yield judged(part, task, incoming)
        return
    own = running(part.heartbeat, part.stage, task, careful=part.careful, steps=part.plan.steps)
    if shared is not None:
        shared.take(part.stage, part.plan.steps)
    with own if shared is None else nullcontext(shared) as heartbeat:
        task_ = _Task(part, part.plan, task, heartbeat, observe, go_on)
        try:
            with kept_from_forks():
                yield from task_.run(incoming)
        except BaseException:  # also GeneratorExit: the engine gave the task up
            task_.discard()
            raise


class _Task:
    """Takes record batches through the nodes to the ends, a passage each; then whatever nodes and ends have kept."""

    def __init__(
        self,
        part: StageJob,
        plan: StagePlan,
        task: int,
        heartbeat: Heartbeat | None,
        observe: Observer | None,
        go_on: Callable[[], None],
    ) -> None:
        self._part, self._plan, self._task, self._heartbeat = part, plan, task, heartbeat
        self._account = Account(part.stage, task, part.ackers, part.named_max)
        last = part.stage == len(part.tasks) - 1
        self._sender = (
            None if last else Sender(task, part.tasks[part.stage + 1], self._account.messages, uuid.uuid4().hex)
        )
        self._ends = Ends(part, plan, task, heartbeat, self._account, self._sender)
        self._nodes = Nodes(part, plan, task, heartbeat, observe, go_on, self._account, self._ends)

    def discard(self) -> None:
        """Give the task up, and remove its files."""
        self._ends.discard()
        self._nodes.stop()

    def run(self, incoming: Iterable[WireRow]) -> Iterator[WireRow]:
        """As `run_task`."""
        carried: list[TaskReport] = []
        self._nodes.start()
        if self._part.stage == 0:
            yield from self._read()
        else:
            yield from self._receive(incoming, carried)
        for key in self._plan.nodes:  # in this order every node comes after those that it takes tuples from
            passage = self._nodes.at_end(key)
            if passage is not None:
                yield from self._ends.finish(passage)
        yield from self._ends.send_combined()
        if self._sender is not None:
            yield from self._account.notices(self._sender)
        report = self._account.report
        report.files.extend(self._ends.close())
        self._account.close()
        reports = [*carried, report]
        if self._sender is None:
            yield summary(self._part.stage, self._task, reports)
        else:
            yield from self._sender.control(reports)

    def _begin(self, rows: int) -> None:
        if self._heartbeat is not None:
            self._heartbeat.begin(rows)

    # The first stage: messages.

    def _read(self) -> Iterator[WireRow]:
        part = self._part
        reader = part.readers[self._task]
        entry = self._plan.entries[0]
        if isinstance(reader, SpoutReader):
            (entry,) = (e for e in self._plan.entries if e.component == reader.spout)
        read = iter(reader.read(part.seed, part.excluded, BATCH_ROWS))
        while True:
            with self._account.counts.busy(entry.component):
                messages = next(read, None)
            if messages is None:
                return
            # The payload's type is a matter of the source's reader and its decoder: bytes, or a row of columns.
            if messages.schema.names != READER_SCHEMA.names or messages.schema.types[:3] != READER_SCHEMA.types[:3]:
                raise JobFailed(
                    f"the reader of {entry.component!r} gave the columns {messages.schema.names} of "
                    f"{messages.schema.types}, not {READER_SCHEMA.names} of {READER_SCHEMA.types}",
                    component=entry.component,
                )
            self._begin(messages.num_rows)
            yield from self._take(messages, entry)

    def _take(self, messages: pa.RecordBatch, entry: StageEntry) -> Iterator[WireRow]:
        part, report, number = self._part, self._account.report, messages.num_rows
        column = messages.column("token")
        untracked = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
        signed_tokens = (column.fill_null(0) if column.null_count else column).to_numpy()
        tokens = as_words(signed_tokens)
        ids, origins = messages.column("id").to_numpy(), messages.column("origin").to_numpy()
        first = self._account.messages.append(ids, origins, signed_tokens)
        report.read_messages += number
        report.read_xor = signed(report.read_xor ^ xor_reduce(tokens))
        with self._account.counts.busy(entry.component):
            decoded = part.decoders[entry.component].decode(messages.column("payload"))
        passage = Passage(first, number)
        for row, error in decoded.failed:
            shown = _shown_payload(messages.column("payload")[row].as_py())
            passage.failed[first + row] = FailureCause(FailureReason.BAD_MESSAGE, entry.component, error, shown)
        share = tokens if part.tracked else None
        anchors = Anchors(number, None, np.arange(first, first + number, dtype=np.int64), share)
        if untracked is not None:
            named = np.flatnonzero(~untracked)
            anchors = Anchors(number, named, named + first, None if share is None else share[named])
        counts = decoded.counts
        if counts is not None:
            passage.acked.append(anchors.only(counts == 0))
            (anchors,) = anchors.deliveries(counts, 1)
        tuples = Tuples(decoded.rows, anchors)
        if counts is None and passage.failed:  # their rows hold nothing; that includes untracked messages
            good = np.ones(number, np.bool_)
            good[[message - first for message in passage.failed]] = False
            tuples = tuples.only(good)
        self._nodes.deliver(passage, tuples, None, entry.children, entry.component, entry.stream)
        yield from self._ends.finish(passage)
        of_spout = self._account.counts.of(entry.component)
        of_spout.executed += number
        of_spout.acked += number - len(passage.failed)
        if part.ackers:
            kept = np.ones(number, np.bool_) if untracked is None else ~untracked
            kept[[message - first for message in passage.failed]] = False
            self._account.begin(ids[kept], origins[kept], signed_tokens[kept])
        self._account.name_early(passage, untracked)

    # Later stages: rows of the stage before.

    def _receive(self, incoming: Iterable[WireRow], carried: list[TaskReport]) -> Iterator[WireRow]:
        part, account = self._part, self._account
        edges = [entry.edge for entry in self._plan.entries if entry.edge is not None]
        per_message = bool(part.ackers)
        ways = {e.number: Way(e.component, e.schema(per_message=per_message)) for e in edges}
        for edge in self._plan.relayed:
            ways[edge.number] = Way(edge.component, edge.schema(per_message=per_message), passes=True)
        received = receive(incoming, part.stage, self._task, part.tasks[part.stage - 1], ways, tracked=part.tracked)
        carried += received.reports
        account.report.violations += received.violations
        account.report.heard = received.heard
        for inits in received.inits:
            account.pass_on_init(inits)
        for acks in received.acks:
            account.pass_on_ack(acks.column(0).to_numpy(), as_words(acks.column(1).to_numpy()))
        if part.ackers:
            for chunk in received.copied:
                ids = np.empty(0, np.int64) if chunk.id is None else np.unique(chunk.id)  # once each: it is an XOR
                account.pass_on_ack(ids, np.full(len(ids), COPIED, np.uint64))
        if received.passing:
            assert self._sender is not None
            yield from self._sender.relay(received.passing)
        if self._heartbeat is not None:
            self._heartbeat.expect(
                sum(chunk.rows.num_rows for of_edge in received.chunks.values() for chunk in of_edge)
            )
        for entry in self._plan.entries:
            assert entry.edge is not None
            chunks = received.chunks.pop(entry.edge.number)
            if entry.edge.group is not None:
                self._begin(sum(chunk.rows.num_rows for chunk in chunks))
                yield from self._merge(entry, entry.edge.group, chunks)
                continue
            for chunk in chunks:
                self._begin(chunk.rows.num_rows)
                passage = Passage()
                tuples = Tuples(chunk.rows, chunk.anchors(account.messages))
                (child,) = entry.children  # tuples were observed, and shares split, where they were emitted
                account.report.tuples += tuples.rows.num_rows
                if entry.edge.meets and entry.edge.grouping is not None:
                    account.met(
                        entry.edge.component, hash_keys(tuples.rows, entry.edge.grouping.fields), tuples.anchors
                    )
                self._nodes.hand(passage, child, tuples, entry.component, entry.stream)
                yield from self._ends.finish(passage)

    def _merge(self, entry: StageEntry, group: GroupBy, chunks: list[Chunk]) -> Iterator[WireRow]:
        # Without keys there is one group, even without rows; it is the first task's.
        if not chunks and (group.keys or self._task):
            return
        passage = Passage()
        if self._part.ackers or not group.combines or not chunks:
            rows = [Tuples(chunk.rows, chunk.anchors(self._account.messages)) for chunk in chunks]
            self._nodes.evaluated(passage, group, rows, entry.children, entry.component)
        else:
            combiner = Combiner(group)
            for chunk in chunks:
                if chunk.share is not None:
                    combiner.share ^= xor_reduce(chunk.share)
                with self._account.counts.busy(group.component):
                    combiner.absorb(pa.Table.from_batches([chunk.rows]))
            merged = self._nodes.merged(combiner)
            self._nodes.deliver(passage, merged, None, entry.children, entry.component, entry.stream)
        yield from self._ends.finish(passage)


def _shown_payload(payload: object) -> str:
    head = payload[:INPUT_TEXT_MAX] if isinstance(payload, bytes) else payload
    return storable_text(repr(head), INPUT_TEXT_MAX)


# ---- the task of an acker: it decides the messages whose notices came to it


def judged(part: StageJob, task: int, incoming: Iterable[WireRow]) -> WireRow:
    """The task's summary: it names the messages that are not complete."""
    received = receive(incoming, part.stage, task, part.tasks[part.stage - 1], {}, tracked=part.tracked)
    inits = pa.Table.from_batches(received.inits, INIT_SCHEMA)
    ids, origins = inits.column("id").to_numpy(), inits.column("origin").to_numpy()
    report = TaskReport(part.stage, task, violations=received.violations, heard=received.heard)
    with report.counts.busy(ACKER):
        acker = Acker(ids)
        for notices in (*received.inits, *received.acks):
            acker.tell(notices.column("id").to_numpy(), as_words(notices.column("value").to_numpy()))
        bad = acker.incomplete()
    named = np.isin(ids, bad)
    known = dict(zip(ids[named].tolist(), origins[named].tolist(), strict=True))
    error = "its ack val is not zero: a tuple of it was lost or doubled on the way"
    named_max = len(bad) if part.named_max is None else part.named_max
    report.unnamed = max(len(bad) - named_max, 0)
    for id_ in bad[:named_max].tolist():
        report.lost.append(
            MessageFailure(MessageId(id_), known.get(id_, 0), Token(0), FailureReason.LOST, "acker", error)
        )
    return summary(part.stage, task, [*received.reports, report])


def run_in_turn(parts: Sequence[StageJob]) -> Iterator[WireRow]:
    """Run every task of every stage; yields the wire rows of the last stage. Each task gets and sends what it would
    where the stages are apart, so the report is the same. For the driver's heartbeat they are one task.

    Raises:
        As `run_task`.
    """
    rows: list[WireRow] = []
    with running(parts[0].heartbeat, 0, 0) as shared:
        for part in parts:
            tasks = range(part.tasks[part.stage])
            rows = [row for task in tasks for row in run_task(part, task, rows_for(rows, task), shared=shared)]
    yield from rows
