"""What the ledger records of each component and edge in a batch: one row each, from the counts of the batch's last attempt.

What attempts before it did is in no row: it was done again, or its messages had failed. Failures are those of the batch,
whichever attempt they come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from stormproof.core.graph.plan import (
    BoltNode,
    CombineNode,
    GatherNode,
    JoinNode,
    Node,
    OperationNode,
    Plan,
    WriteNode,
    taker_of,
)
from stormproof.core.message import MessageFailure
from stormproof.core.source.spouts import unshown
from stormproof.core.tracking.component_counts import ACKER, ComponentCounts, Counts, Edge
from stormproof.core.tracking.outcome import Complete, FailedIn
from stormproof.trident.ledger.rows import BatchCounts, ComponentRow, EdgeRow
from stormproof.trident.transaction_states import ComponentKind


@dataclass(frozen=True, slots=True)
class CountedGraph:
    """The components and edges of a topology of which rows are recorded; without an acker under at-most-once."""

    kinds: Mapping[str, ComponentKind]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, plan: Plan) -> CountedGraph:
        """Those of a compiled topology."""
        kinds: dict[str, ComponentKind] = {}
        edges: dict[Edge, None] = {}
        for stage in plan.stages:
            ways = [(e.component, e.stream, e.children) for e in stage.entries if e.edge is None or e.edge.group]
            kinds |= {entry.component: ComponentKind.SPOUT for entry in stage.entries if entry.edge is None}
            for node in stage.nodes.values():
                kind = _kind_of(node)
                if kind is not None:
                    kinds[taker_of(node)] = kind
                ways += _ways_of(node)
            for component, stream, children in ways:
                edges |= dict.fromkeys((component, stream, taker_of(stage.nodes[child])) for child in children)
        if plan.guarantee.tracked:
            kinds[ACKER] = ComponentKind.ACKER
        return cls(kinds, tuple(edges))

    def of_complete(
        self, complete: Complete, shown: Callable[[MessageFailure], str], sinks: Collection[str] | None = None
    ) -> BatchCounts:
        """The rows of a batch whose content is fixed. `sinks` are those that get its rows; None: all.

        `shown` gives a message's id as people see it: where there are several spouts, it names the message's.
        """
        counts, report = complete.report.counts, complete.report
        late = {f.id: f for f in (*report.late, *report.lost)}
        for failure in report.failures:
            late.pop(failure.id, None)
        counted = [one.failure for one in complete.failed if one.failure.counted]
        return self._rows(counts, counted, list(late.values()), shown, sinks)

    def of_failed(self, failed: Sequence[FailedIn], shown: Callable[[MessageFailure], str]) -> BatchCounts:
        """The rows of a batch of which every message failed: where they did. Nothing of what ran is kept, or counted."""
        counted = [one.failure for one in failed if one.failure.counted]
        rows = self._rows(Counts(), counted, [], shown, None)
        return BatchCounts(tuple(row for row in rows.components if row.failed))

    def _rows(
        self,
        counts: Counts,
        failed: Sequence[MessageFailure],
        late: Sequence[MessageFailure],
        shown: Callable[[MessageFailure], str],
        sinks: Collection[str] | None,
    ) -> BatchCounts:
        spouts = [name for name, kind in self.kinds.items() if kind is ComponentKind.SPOUT]
        idle = set[str]()
        if sinks is not None:  # the others hold its rows already: their writers wrote nothing
            idle = {name for name, kind in self.kinds.items() if kind is ComponentKind.SINK and name not in sinks}

        def spout_of(failure: MessageFailure) -> str:
            if len(spouts) == 1:
                return spouts[0]
            named = unshown(shown(failure))
            return "" if named is None else named[0]

        fell, late_in = Counter(map(spout_of, failed)), Counter(map(spout_of, late))
        # A bad message failed in its spout, which counts all of its messages' failures anyway.
        fell_in = Counter(failure.component for failure in failed if failure.component not in spouts)
        rows: list[ComponentRow] = []
        for name, kind in self.kinds.items():
            found = ComponentCounts() if name in idle else counts.components.get(name, ComponentCounts())
            acked, failures, emitted = found.acked - late_in[name], fell_in[name] + fell[name], found.emitted
            if kind is ComponentKind.ACKER:
                read = sum(counts.of(spout).executed for spout in spouts)
                acked = sum(counts.of(spout).acked for spout in spouts) - late_in.total()
                failures, emitted = fell.total(), read
            rows.append(ComponentRow(name, kind, found.executed, emitted, acked, failures, found.busy_ns / 1e6))
        edges = ((edge, 0 if edge[2] in idle else counts.edges.get(edge, 0)) for edge in self.edges)
        return BatchCounts(tuple(rows), tuple(EdgeRow(*edge, tuples) for edge, tuples in edges))


def _kind_of(node: Node) -> ComponentKind | None:
    match node:
        case OperationNode():
            return ComponentKind.OPERATION
        case BoltNode():
            return ComponentKind.BOLT
        case CombineNode() | GatherNode():
            return ComponentKind.AGGREGATE
        case JoinNode():
            return ComponentKind.JOIN
        case WriteNode():
            return ComponentKind.SINK
        case _:
            return None


def _ways_of(node: Node) -> list[tuple[str, str, tuple[str, ...]]]:
    """What a node hands on: its component, the stream, and the keys of the nodes that take it."""
    match node:
        case BoltNode():
            return [(node.component, stream, children) for stream, children in node.children.items()]
        case OperationNode() | GatherNode() | JoinNode():
            return [(node.component, "default", node.children)]
        case _:
            return []
