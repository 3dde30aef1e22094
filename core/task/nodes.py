"""Runs tuples through the nodes of a stage (functions, bolts, groups, joins) up to their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.message import FailureReason
from stormproof.core.bolt import ArrowBolt, BoltContext, Ran, fresh
from stormproof.core.bolt.runner import BoltRunner
from stormproof.core.graph.aggregation import GroupBy
from stormproof.core.graph.components import OPEN_LEFT, JoinKind, JoinOn
from stormproof.core.graph.plan import BoltNode, GatherNode, JoinNode, OperationNode, StagePlan
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.task.account import Account, Ended, Failed, Observer, Passage, Tuples, shown_row
from stormproof.core.task.combine import Combiner, evaluate
from stormproof.core.task.ends import Ends, MessageIds
from stormproof.core.task.job import StageJob
from stormproof.core.task.operate import Calls, apply, input_text
from stormproof.core.tracking.share import Anchors, BoltInputs, joined, overlaid, split_one
from stormproof.core.user_code.python_to_arrow import no_rows


@dataclass(frozen=True, slots=True)
class _Running:
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
        self._bolts: dict[str, _Running] = {}

    def start(self) -> None:
        """Prepare the bolts. Where this raises, `stop` closes those that were prepared."""
        for key, node in self._plan.nodes.items():
            if isinstance(node, BoltNode):
                self._bolts[key] = self._started(node)

    def stop(self) -> None:
        """Close the bolts of a task that is given up."""
        for bolt in self._bolts.values():
            bolt.runner.close()

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
        return _Running(runner, BoltInputs(tracked=part.tracked), max(most, 1))

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
                passage.ends.append(Ended(key, node, tuples, component, stream))

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
                failed = Failed(reason, component, error, shown_row(rows, row))
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
                failed = Failed(reason, node.component, error, input_text(node, tuples.rows, row))
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

    def _ran(self, passage: Passage, node: BoltNode, running: _Running, ran: Ran) -> None:
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
            why = Failed(failed.reason, node.component, failed.error, failed.input)
            self._account.fail_row(passage, rest, 0, why)
        for key, stream, tuples in made:
            self.hand(passage, key, tuples, node.component, stream)


# ---- joins two sides whose rows are all there: the joined rows, and their anchors


@dataclass(frozen=True, slots=True)
class Joined:
    """The joined rows, their anchors for each subscriber, and the anchors of input rows that are in no result."""

    rows: pa.RecordBatch
    deliveries: list[Anchors]
    unmatched: list[Anchors]


def join_rows(
    on: JoinOn, left: tuple[pa.RecordBatch, Anchors], right: tuple[pa.RecordBatch, Anchors], subscribers: int
) -> Joined:
    """Join both sides.

    A joined row is anchored to both of its rows. Each input row's share is split over all joined rows that it is in, for all
    subscribers; the share of one that is in none is in `unmatched`.
    """
    at = matches(on, left[0], right[0])
    made = joined_rows(on, left[0], right[0], at)
    number = made.num_rows
    parts: list[list[tuple[Anchors, Rows]]] = [[] for _ in range(subscribers)]
    unmatched: list[Anchors] = []
    for (rows, anchors), of_side in zip((left, right), at, strict=True):
        there = np.flatnonzero(of_side >= 0)
        counts = np.bincount(of_side[there], minlength=rows.num_rows)
        unmatched.append(anchors.only(counts == 0))
        # The children of a row lie one after the other, in the order of the result.
        place = there[np.argsort(of_side[there], kind="stable")]
        for mine, given in zip(parts, anchors.deliveries(counts, subscribers), strict=True):
            mine.append((given, place))
    return Joined(made, [overlaid(number, mine) for mine in parts], unmatched)


def matches(on: JoinOn, left: pa.RecordBatch, right: pa.RecordBatch) -> tuple[Rows, Rows]:
    """The row number of each side for every joined row, in order of the left rows; -1 stands for no row.

    Keys are compared exactly. NULL matches nothing. Of duplicate keys each row is joined with each.
    """
    names = [f"k{i}" for i in range(len(on.keys))]
    one = pa.Table.from_arrays(
        [*(left.column(k) for k, _ in on.keys), pa.array(np.arange(left.num_rows))], names=[*names, "left"]
    )
    other = pa.Table.from_arrays(
        [*(right.column(k) for _, k in on.keys), pa.array(np.arange(right.num_rows))], names=[*names, "right"]
    )
    kind = {JoinKind.LEFT: "left outer", JoinKind.RIGHT: "right outer", JoinKind.FULL: "full outer"}.get(
        on.kind, "inner"
    )
    joined = one.join(other, keys=names, join_type=kind, use_threads=False)
    pairs = [pc.fill_null(joined.column(side), -1).to_numpy() for side in ("left", "right")]
    order = np.lexsort((pairs[1], np.where(pairs[0] < 0, left.num_rows, pairs[0])))
    return pairs[0][order], pairs[1][order]


def joined_rows(on: JoinOn, left: pa.RecordBatch, right: pa.RecordBatch, at: tuple[Rows, Rows]) -> pa.RecordBatch:
    """The joined rows."""
    one, other = (pa.array(rows, mask=rows < 0) for rows in at)
    columns: list[pa.Array] = []
    for left_key, right_key in on.keys:
        key = left.column(left_key).take(one)
        if on.kind in OPEN_LEFT:
            key = pc.if_else(pa.array(at[0] < 0), right.column(right_key).take(other), key)
        columns.append(key)
    left_keys, right_keys = (set(names) for names in zip(*on.keys, strict=True))
    columns += [left.column(name).take(one) for name in on.left.names if name not in left_keys]
    columns += [right.column(name).take(other) for name in on.right.names if name not in right_keys]
    return pa.RecordBatch.from_arrays(columns, schema=on.schema)
