"""A task of a stage: the same code for every engine.

A task of the first stage reads its part of a slice, decodes it, and runs the fused bolts over one record batch of messages
at a time. A message that fails there fails early: nothing of its record batch was combined, sent or written yet, so nothing
of it remains. Behind an exchange, or in a bolt that is an object and may remember its inputs, a failure is late: the report
names the message, the share that ended in the failure is accounted for, and the coordinator decides.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.errors import JobFailed
from stormproof.core.base.message import INPUT_TEXT_MAX, FailureReason, MessageFailure, MessageId, Token, storable_text
from stormproof.core.base.process import kept_from_forks
from stormproof.core.contract.source import READER_SCHEMA
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.plan import Entry, StagePlan
from stormproof.core.heartbeat.task import Heartbeat, running
from stormproof.core.source.group import SpoutReader
from stormproof.core.task.account import Account, Failed, Observer, Passage, Tuples
from stormproof.core.task.combine import Combiner
from stormproof.core.task.ends import Ends
from stormproof.core.task.exchange import Sender, Way, receive
from stormproof.core.task.job import StageJob
from stormproof.core.task.nodes import Nodes
from stormproof.core.task.router import hash_keys
from stormproof.core.task.wire import INIT_SCHEMA, Chunk, TaskReport, WireRow, summary
from stormproof.core.tracking.share import Anchors, as_words, signed, xor_reduce
from stormproof.core.tracking.verdict import ACKER, Acker

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
) -> Iterator[WireRow]:
    """Run one task: takes wire rows (none for the first stage), yields wire rows. `observe` is called with all tuples.

    `go_on` is called now and then while calls of functions are waited for, and raises where the job is cancelled.

    Guarantee:
        The files that it wrote are closed and synced before it yields the row that names them. Where it does not get that
        far, they are removed.

    Raises:
        JobFailed: a row failed that belongs to no single message (after a group), or a reader's batches have wrong columns.
    """
    if part.plan is None:
        yield judged(part, task, incoming)
        return
    with running(part.heartbeat, part.stage, task, careful=part.careful, steps=part.plan.steps) as heartbeat:
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

    def _take(self, messages: pa.RecordBatch, entry: Entry) -> Iterator[WireRow]:
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
            passage.failed[first + row] = Failed(FailureReason.BAD_MESSAGE, entry.component, error, shown)
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

    def _merge(self, entry: Entry, group: GroupBy, chunks: list[Chunk]) -> Iterator[WireRow]:
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
