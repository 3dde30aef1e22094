"""The ends of tuples in a task: they are written to a sink, combined, sent over an exchange, or kept for the task's end.

Everything is checked before anything is written, so that a message can still fail early here.

Rows are given with the names of their messages: so a sink can tell whose row its table refuses, and store who made a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import RoutingError, UsageError
from stormproof.core.base.message import FailureReason, storable_text
from stormproof.core.contract.sink import MESSAGE_COLUMNS, PreparedFile, TaskWriter
from stormproof.core.contract.source import NumberIds, ShownIds
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.plan import CombineNode, GatherNode, JoinSideNode, SendNode, StagePlan, WriteNode, taker_of
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.task.account import Account, End, FailureCause, Passage, Tuples, shown_row
from stormproof.core.task.combine import Combiner, combine, distinct_keys, prepare
from stormproof.core.task.exchange import Sender
from stormproof.core.task.job import StageJob, WireRow
from stormproof.core.task.reduce import rows_with_keys
from stormproof.core.task.router import Router, task_numbers
from stormproof.core.tracking.share import MANY, MANY_ORIGIN, Anchors, MetMessages, signed, split_one


def with_columns(rows: pa.RecordBatch, messages: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with these columns behind their own."""
    schema = pa.schema([*rows.schema, *messages.schema])
    return pa.RecordBatch.from_arrays([*rows.columns, *messages.columns], schema=schema)


def single_messages(messages: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Number and origin of each row's one message; the number is NULL where a row has none, or several."""
    number, origin, others = messages.columns
    if others.null_count < len(others):
        number = pc.if_else(pc.is_null(others), number, None)
    return number, origin


class MessageIds:
    """The id, as people see it, of the message of each row; made for all rows when the first is asked for."""

    def __init__(self, anchors: Anchors, messages: MetMessages, shown: ShownIds | None) -> None:
        self._anchors, self._messages, self._shown = anchors, messages, shown or NumberIds()
        self._ids: list[str | None] | None = None

    def of_row(self, row: int) -> str:
        """The id of a row's message.

        Raises:
            UsageError: the row was made of several messages, or of none that is known.
        """
        ids = self._ids
        if ids is None:
            columns = message_columns(self._anchors, self._messages)
            ids = self._ids = self._shown.shown(*single_messages(columns)).to_pylist()
        found = ids[row]
        if found is None:
            raise UsageError(
                "context.message_id: this tuple was made of several messages, or of none that is known (behind a group, a "
                "join or a bolt that anchors so); use the tuple's own key"
            )
        return found


def message_columns(anchors: Anchors, messages: MetMessages) -> pa.RecordBatch:
    """The `MESSAGE_COLUMNS` of rows with these anchors."""
    number, origin = _named(anchors, messages)
    if anchors.row is None:
        first = [_of(number, origin == MANY_ORIGIN), pa.array(origin)]
        others = pa.nulls(anchors.rows, MESSAGE_COLUMNS.field(2).type)
    else:
        starts = np.searchsorted(anchors.row, np.arange(anchors.rows + 1))
        counts = np.diff(starts)
        none = counts == 0
        at = np.where(none, 0, starts[:-1])
        if not len(number):
            number, origin = np.zeros(1, np.int64), np.zeros(1, np.int64)
        first = [_of(number[at], none | (origin[at] == MANY_ORIGIN)), _of(origin[at], none)]
        others = _others(anchors.row, starts, counts, number, origin)
    return pa.RecordBatch.from_arrays([*first, others], schema=MESSAGE_COLUMNS)


def _named(anchors: Anchors, messages: MetMessages) -> tuple[Rows, Rows]:
    """Number and origin of each pair's message; `MANY_ORIGIN` where it stands for many."""
    numbers = anchors.messages()
    many = numbers == MANY
    if not messages.number or many.all():
        return np.zeros(len(numbers), np.int64), np.full(len(numbers), MANY_ORIGIN, np.int64)
    known = np.where(many, 0, numbers) if many.any() else numbers
    return messages.ids(known), np.where(many, MANY_ORIGIN, messages.origins(known))


def _of(values: Rows, missing: npt.NDArray[np.bool_]) -> pa.Array:
    return pa.array(values, mask=missing) if missing.any() else pa.array(values)


def _others(row: Rows, starts: Rows, counts: Rows, number: Rows, origin: Rows) -> pa.Array:
    """Number and origin of each message of a row but its first, in turn; NULL where it has no other."""
    kind = MESSAGE_COLUMNS.field(2).type
    if not (counts > 1).any():
        return pa.nulls(len(counts), kind)
    further = np.ones(len(row), np.bool_)
    further[starts[:-1][counts > 0]] = False
    flat = np.stack([number[further], origin[further]], axis=1).reshape(-1)
    ends = np.concatenate([[0], np.cumsum(2 * np.maximum(counts - 1, 0))]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(flat), mask=pa.array(counts <= 1))
    return lists.cast(kind)


# ---- the ends


@dataclass(frozen=True, slots=True)
class _Checked:
    """Tuples at their end, combined or routed where the check needed that; valid while `failed` messages have failed."""

    tuples: Tuples
    failed: int
    partial: pa.Table | None = None
    dest: npt.NDArray[np.int32] | None = None


class Ends:
    """The ends of one task. `sender` None: this is the last stage."""

    def __init__(
        self,
        part: StageJob,
        plan: StagePlan,
        task: int,
        heartbeat: Heartbeat | None,
        account: Account,
        sender: Sender | None,
    ) -> None:
        self._part, self._plan, self._task, self._heartbeat = part, plan, task, heartbeat
        self._account, self._sender = account, sender
        self._writers: dict[str, TaskWriter] = {}
        self._combiners: dict[str, Combiner] = {}
        self._waiting: dict[str, list[Tuples]] = {}
        self._routers: dict[str, Router] = {}
        for key, node in plan.nodes.items():
            if isinstance(node, (CombineNode, GatherNode)) and not self.is_raw(node):
                self._combiners[key] = Combiner(node.group)
            elif isinstance(node, (GatherNode, JoinSideNode)):
                self._waiting[key] = []
            elif isinstance(node, SendNode):
                tasks = node.tasks or part.parallelism
                self._routers[key] = Router(node.grouping, tasks, task, component=node.component)

    def is_raw(self, node: CombineNode | GatherNode) -> bool:
        """Whether rows are kept uncombined until all are there: in per-message mode, or where parts cannot be merged."""
        return bool(self._part.ackers) or not node.group.combines

    def waiting(self, key: str) -> list[Tuples]:
        """Take the rows that were kept at this node."""
        return self._waiting.pop(key)

    def combiner(self, key: str) -> Combiner:
        """Take the combiner of this node."""
        return self._combiners.pop(key)

    def finish(self, passage: Passage) -> Iterator[WireRow]:
        """End a passage: check the tuples that end, drop those of failed messages, then combine, send, write and ack."""
        counts = self._account.counts
        checked = [self._check(passage, end.key, end.node, end.tuples) for end in passage.ends]
        for anchors in passage.acked:
            mask = passage.mask(anchors)
            self._account.ack(anchors if mask is None else anchors.only(mask))
        for end, check in zip(passage.ends, checked, strict=True):
            key, node = end.key, end.node
            mask = None if check.failed == len(passage.failed) else passage.mask(check.tuples.anchors)
            tuples = check.tuples if mask is None else check.tuples.only(mask)
            if not isinstance(node, SendNode):  # else they are taken in a later stage
                taker = taker_of(node)
                counts.took(end.component, end.stream, taker, tuples.rows.num_rows)
                counts.of(taker).acked += tuples.rows.num_rows
            if isinstance(node, WriteNode):
                if tuples.rows.num_rows:
                    if self._heartbeat is not None:
                        self._heartbeat.enter(node.sink, tuples.rows.num_rows)
                    with counts.busy(node.sink):
                        self._write(node, tuples)
                    self._account.ack(tuples.anchors)
            elif key in self._waiting:
                if tuples.rows.num_rows:
                    self._waiting[key].append(tuples)
            elif key in self._combiners:
                assert isinstance(node, (CombineNode, GatherNode))
                partial = check.partial if mask is None else None  # else it holds rows of failed messages
                combiner = self._combiners[key]
                with counts.busy(node.group.component):
                    combiner.absorb(combine(node.group, tuples.rows) if partial is None else partial)
                combiner.share = signed(combiner.share ^ tuples.anchors.xor())
            else:
                assert isinstance(node, (CombineNode, SendNode))
                dest = check.dest if mask is None or check.dest is None else check.dest[mask]
                yield from self._send(node, tuples, dest)

    def send_combined(self) -> Iterator[WireRow]:
        """Send what was combined for an exchange, at the task's end."""
        for key, combiner in self._combiners.items():
            node = self._plan.nodes[key]
            if not isinstance(node, CombineNode):
                continue
            with self._account.counts.busy(combiner.group.component):
                rows = combiner.partials()
            if rows.num_rows == 0:
                self._account.report.ack(combiner.share)
                continue
            assert self._sender is not None
            share = split_one(combiner.share, rows.num_rows) if self._part.tracked else None
            tasks = node.tasks or self._part.parallelism
            dest = task_numbers(rows, combiner.group.keys, tasks)
            yield from self._sender.send(node.edge, rows, Anchors(rows.num_rows, None, None, share), dest, tasks)

    def close(self) -> Iterator[PreparedFile]:
        """Close and sync the files; returns them."""
        for sink, writer in self._writers.items():
            with self._account.counts.busy(sink):
                files = [*writer.close()]
            yield from files

    def discard(self) -> None:
        """Remove the files."""
        for writer in self._writers.values():
            writer.discard()

    def _write(self, node: WriteNode, tuples: Tuples) -> None:
        rows, lineage = tuples.rows, node.lineage
        named = self._part.writers[node.sink].names_messages
        if named or lineage is not None:
            messages = message_columns(tuples.anchors, self._account.messages)
            if lineage is not None:
                rows = lineage.added_to(rows, self._part.context.txid, lambda: self._message_ids(messages))
            if named:
                rows = with_columns(rows, messages)
        self._writer(node.sink, rows.schema).write(rows)

    def _message_ids(self, messages: pa.RecordBatch) -> pa.Array:
        assert self._part.shown_ids is not None
        return self._part.shown_ids.shown(*single_messages(messages))

    def _writer(self, sink: str, schema: pa.Schema) -> TaskWriter:
        writer = self._writers.get(sink)
        if writer is None:
            context = replace(self._part.context, task=self._task)
            writer = self._writers[sink] = self._part.writers[sink].open_task(context, schema)
        return writer

    def _send(
        self, node: CombineNode | SendNode, tuples: Tuples, dest: npt.NDArray[np.int32] | None
    ) -> Iterator[WireRow]:
        assert self._sender is not None
        tasks = node.tasks or self._part.parallelism
        if dest is None:
            yield from self._sender.copies(node.edge, tuples.rows, tuples.anchors, tasks)
        else:
            yield from self._sender.send(node.edge, tuples.rows, tuples.anchors, dest, tasks)

    def _check(self, passage: Passage, key: str, node: End, given: Tuples) -> _Checked:
        """Fail the messages of rows that a sink cannot hold, or that have no task to go to."""
        tuples = passage.alive(given)
        match node:
            case WriteNode():
                tuples = self._held_by(passage, node.sink, tuples)
                return _Checked(tuples, len(passage.failed))
            case SendNode():
                for sink in node.sinks:
                    tuples = self._held_by(passage, sink, tuples)
                return self._routed(passage, key, node, tuples)
            case CombineNode() | GatherNode():
                return self._combined(passage, node, tuples)
            case JoinSideNode():
                return _Checked(tuples, len(passage.failed))

    def _held_by(self, passage: Passage, sink: str, tuples: Tuples) -> Tuples:
        """The tuples that a sink can hold; the messages of the others fail."""
        with self._account.counts.busy(sink):
            refused = self._part.writers[sink].check(tuples.rows)
        bad = {row: _refused(sink, error, tuples.rows, row) for row, error in refused}
        return self._account.fail_rows(passage, tuples, bad)

    def _routed(self, passage: Passage, key: str, node: SendNode, tuples: Tuples) -> _Checked:
        router = self._routers[key]
        while tuples.rows.num_rows and not router.copies:
            failed = len(passage.failed)
            try:
                return _Checked(tuples, failed, dest=router.route(tuples.rows, tuples.task))
            except RoutingError as error:
                culprits = range(tuples.rows.num_rows) if error.rows is None else error.rows
                bad = {
                    row: FailureCause(
                        FailureReason.ERROR,
                        node.component,
                        error.texts.get(row, str(error)),
                        shown_row(tuples.rows, row),
                    )
                    for row in culprits
                }
            tuples = self._account.fail_rows(passage, tuples, bad)
        dest = None if router.copies else np.empty(0, np.int32)
        return _Checked(tuples, len(passage.failed), dest=dest)

    def _combined(self, passage: Passage, node: CombineNode | GatherNode, tuples: Tuples) -> _Checked:
        group, raw = node.group, self.is_raw(node)
        tuples = self._account.fail_rows(passage, tuples, _null_keys(group, tuples.rows))
        if not raw:
            tuples = self._prepared(passage, group, tuples)
        failed = len(passage.failed)
        with self._account.counts.busy(group.component):
            partial = None if raw else combine(group, tuples.rows)
        unheld = self._unheld(node, tuples.rows, partial)
        if unheld:
            tuples = self._account.fail_rows(passage, tuples, unheld)
            failed, partial = len(passage.failed), None if raw else combine(group, tuples.rows)
        dest = None
        if raw and isinstance(node, CombineNode):
            dest = task_numbers(tuples.rows, group.keys, node.tasks or self._part.parallelism)
        return _Checked(tuples, failed, partial, dest)

    def _unheld(
        self, node: CombineNode | GatherNode, rows: pa.RecordBatch, partial: pa.Table | None
    ) -> dict[int, FailureCause]:
        """The rows whose keys a sink cannot hold. Each key is checked once; only a bad key is traced to its rows."""
        keys = list(node.group.keys)
        unheld: dict[int, FailureCause] = {}
        for sink in node.sinks if keys else ():
            there = distinct_keys(node.group, rows) if partial is None else partial.select(keys)
            for distinct in there.combine_chunks().to_batches():
                refused = dict(self._part.writers[sink].check(distinct))
                for row, number in rows_with_keys(rows, keys, distinct, refused):
                    unheld.setdefault(row, _refused(sink, refused[number], rows, row))
        return unheld

    def _prepared(self, passage: Passage, group: GroupBy, tuples: Tuples) -> Tuples:
        """The rows with columns for users' combiners; rows for which these raise fail."""
        self._account.enter(self._heartbeat, group.component, tuples.anchors)
        with self._account.counts.busy(group.component):
            prepared = prepare(group, tuples.rows, self._heartbeat)
        bad = {
            row: FailureCause(reason, group.component, error, shown_row(tuples.rows, row))
            for row, (reason, error) in prepared.failed.items()
        }
        return self._account.fail_rows(passage, replace(tuples, rows=prepared.rows), bad)


def _refused(sink: str, error: str, rows: pa.RecordBatch, row: int) -> FailureCause:
    return FailureCause(FailureReason.SINK_ERROR, sink, storable_text(error), shown_row(rows, row))


def _null_keys(group: GroupBy, rows: pa.RecordBatch) -> dict[int, FailureCause]:
    bad: dict[int, FailureCause] = {}
    for key in group.keys:
        column = rows.column(key)
        if column.null_count:
            error = f"group key {key!r} is NULL"
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
                bad.setdefault(
                    row, FailureCause(FailureReason.SINK_ERROR, group.component, error, shown_row(rows, row))
                )
    return bad
