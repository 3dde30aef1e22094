"""What each component of a topology did, and how many tuples went over each edge: sums over batches.

And the topology's graph with them, over its newest batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import Json
from stormproof.core.tracking.acker import ACKER
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import ComponentRow, EdgeRow, record_of
from stormproof.trident.terms.transaction_states import ComponentKind


@dataclass(frozen=True, slots=True)
class ComponentSums(ComponentRow):
    """What one component did over some batches; the columns of the view `audit_components` say what is counted."""

    latency_ms: float | None
    """Mean time for one tuple that it took in; None: it took none."""


@dataclass(frozen=True, slots=True)
class EdgeSums(EdgeRow):
    """How many tuples went from a component's stream to another component or a sink."""

    tuples_per_s: float | None
    """For each second of the time that the batches span; None: there is one batch, or none."""


@dataclass(frozen=True, slots=True)
class ComponentsReport:
    """Sums over the batches from `first_txid` to `last_txid` that are on record. A batch counts with the attempt that fixed
    its content; one that was given up does not count.

    `batches` without a record are not among them: micro-batches of a query.
    """

    topology: str
    first_txid: int | None
    last_txid: int | None
    batches: int
    seconds: float
    """From the first to the last of them."""
    components: tuple[ComponentSums, ...]
    edges: tuple[EdgeSums, ...]


_THESE: Final = "where incarnation = :incarnation and txid >= :lowest"
_LOWEST: Final = sa.text(
    "select min(txid) from stormproof.txn_component where incarnation = :incarnation and at >= :since"
)
_SPAN: Final = sa.text(
    "select min(txid) as first, max(txid) as last, count(distinct txid) as batches,"
    " coalesce(extract(epoch from max(at) - min(at)), 0) as seconds"
    f" from stormproof.txn_component {_THESE}"
)
_COMPONENTS: Final = sa.text(
    "select component, kind, cast(sum(executed) as bigint) as executed, cast(sum(emitted) as bigint) as emitted,"
    " cast(sum(acked) as bigint) as acked, cast(sum(failed) as bigint) as failed, sum(busy_ms) as busy_ms,"
    " sum(busy_ms) / nullif(cast(sum(executed) as double precision), 0) as latency_ms"
    f" from stormproof.txn_component {_THESE} group by component, kind"
    " order by case kind when 'spout' then 0 when 'sink' then 2 when 'acker' then 3 else 1 end, component"
)
_EDGES: Final = sa.text(
    f"select origin, stream, target, sum(tuples) as tuples from stormproof.txn_edge {_THESE}"
    " group by origin, stream, target order by origin, stream, target"
)


def components(ledger: AuditLedger, topology: str, since: datetime | None = None) -> ComponentsReport:
    """The sums of a topology, over all batches on record or from the first one that was fixed since a time.

    Raises:
        UsageError: no such topology.
        StoreUnavailable: the database does not answer.
    """
    with ledger.snapshot() as snapshot:
        incarnation, lowest = snapshot.topology(topology).incarnation, 0
        if since is not None:
            lowest = snapshot.connection.scalar(_LOWEST, {"incarnation": incarnation, "since": since})
        return sums(snapshot.connection, topology, incarnation, lowest)


def sums(connection: sa.Connection, topology: str, incarnation: str, lowest: int | None) -> ComponentsReport:
    """The sums over the batches from this txid on; None: over none."""
    if lowest is None:
        return ComponentsReport(topology, None, None, 0, 0.0, (), ())
    these = {"incarnation": incarnation, "lowest": lowest}
    span = connection.execute(_SPAN, these).one()
    seconds = float(span.seconds)
    made = [
        record_of(ComponentSums, row, kind=ComponentKind(row.kind)) for row in connection.execute(_COMPONENTS, these)
    ]
    edges = [
        EdgeSums(row.origin, row.stream, row.target, int(row.tuples), int(row.tuples) / seconds if seconds else None)
        for row in connection.execute(_EDGES, these)
    ]
    return ComponentsReport(topology, span.first, span.last, span.batches, seconds, tuple(made), tuple(edges))


NEWEST: Final = 1_000
_EDGE: Final = re.compile(r"(?P<origin>.+)/(?P<stream>[^/>]+)>(?P<to>.+)#\d+", re.DOTALL)
_ENTRY: Final = re.compile(r"(?P<component>.+)/(?P<stream>[^/@]+)@\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ComponentFigures:
    """A component or a sink. None: it is not on record, as of a query's micro-batches."""

    name: str
    kind: str
    """``spout``, ``operation``, ``bolt``, ``aggregate``, ``join`` or ``sink``."""
    stage: int
    emitted: int | None = None
    """Tuples that it made; of a spout of which that is not on record, messages that were opened."""
    acked: int | None = None
    """Tuples that it took and did not fail; of a spout, messages that were complete; of a sink, rows that it took."""
    failed: int = 0
    """Messages that failed in it; of a sink, also messages that it rejected."""
    latency_ms: float | None = None
    """Of a sink, mean time from a batch's prepare until the sink held it; of a spout, from open to committed; of any other,
    mean time for one tuple that it took in."""
    target: str | None = None
    last_txid: int | None = None


@dataclass(frozen=True, slots=True)
class Arrow:
    """From one part to another."""

    origin: str
    to: str
    stream: str
    crosses: bool
    """Whether it goes from one stage to another: an exchange."""
    tuples: int | None = None
    """Over all streams between the two."""
    tuples_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class AckerFigures:
    """What the acker did, over the same batches."""

    batches: int
    messages: int
    acked: int
    failed: int
    returned: int
    tuples: int
    attempts: int
    again: int
    """Attempts that were followed by another one."""
    latency_ms: float | None
    """Mean, from open to committed."""
    job_ms: float | None
    seconds: float
    """The time that these batches span."""
    acks: int | None = None
    """Acks that it was told; None: not on record."""
    busy_ms: float | None = None
    """Time that the tracking took, over all tasks."""

    def a_second(self, number: int) -> float | None:
        """A number of these batches, for each second of the time that they span."""
        return number / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class GraphFigures:
    """A topology's graph as of its newest shape; no parts before its first start."""

    topology: str
    parts: tuple[ComponentFigures, ...]
    arrows: tuple[Arrow, ...]
    acker: AckerFigures
    stages: int = 1


@dataclass(slots=True)
class _Drawn:
    parts: dict[str, ComponentFigures] = field(default_factory=dict[str, ComponentFigures])
    arrows: dict[tuple[str, str], Arrow] = field(default_factory=dict[tuple[str, str], Arrow])


_KINDS: Final = {"OperationNode": "operation", "BoltNode": "bolt", "GatherNode": "aggregate", "JoinNode": "join"}
_JOIN_SIDE: Final = "JoinSideNode"
"""What sends one side's tuples to a join: no component of its own. The arrow to the join is an edge of the graph."""
_TOTALS: Final = sa.text(
    """
    select count(*) as batches, cast(coalesce(sum(messages), 0) as bigint) as messages,
      cast(coalesce(sum(failed), 0) as bigint) as failed, cast(coalesce(sum(returned), 0) as bigint) as returned,
      cast(coalesce(sum(tuples), 0) as bigint) as tuples, coalesce(sum(attempt), 0) as attempts,
      coalesce(sum(attempt), 0) - count(*) as again,
      cast(coalesce(sum(messages - failed - returned) filter (where state = 'committed'), 0) as bigint) as acked,
      cast(avg(extract(epoch from ended_at - opened_at)) filter (where state = 'committed') * 1000 as double precision)
        as latency_ms,
      avg(cast(steps_ms ->> 'job' as double precision)) as job_ms, min(txid) as lowest,
      cast(coalesce(extract(epoch from max(coalesce(ended_at, opened_at)) - min(opened_at)), 0) as double precision)
        as seconds
    from (select * from stormproof.txn where incarnation = :incarnation order by txid desc limit :newest) x
    """
)
_FAILED: Final = sa.text(
    "select component, count(*) as number from stormproof.event"
    " where incarnation = :incarnation and kind = 'failure' and txid >= :lowest group by component"
)
_SINKS: Final = sa.text(
    """
    select k.sink, sum(k.rows) as rows, max(k.txid) as last_txid,
      avg(extract(epoch from k.committed_at - x.prepared_at)) * 1000 as latency_ms
    from stormproof.txn_sink k join stormproof.txn x on x.incarnation = k.incarnation and x.txid = k.txid
    where k.incarnation = :incarnation and k.txid >= :lowest and k.committed_at is not null
    group by k.sink
    """
)
_REJECTED: Final = sa.text(
    "select sink, count(*) as number from stormproof.reject"
    " where incarnation = :incarnation and txid >= :lowest group by sink"
)


def figures(ledger: AuditLedger, topology: str, *, newest: int = NEWEST) -> GraphFigures:
    """The graph of a topology, with figures over its newest batches.

    Raises:
        UsageError: no such topology.
        StoreUnavailable: the database does not answer.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        connection, who = snapshot.connection, {"incarnation": row.incarnation}
        c = t.graph.c
        newest_graph = (
            sa.select(c.description).where(c.incarnation == row.incarnation).order_by(c.epoch.desc()).limit(1)
        )
        description = connection.scalar(newest_graph)
        total = connection.execute(_TOTALS, {**who, "newest": newest}).one()
        since = {**who, "lowest": total.lowest or 0}
        failed = {one.component: int(one.number) for one in connection.execute(_FAILED, since)}
        sinks = {one.sink: one for one in connection.execute(_SINKS, since)}
        rejected = {one.sink: int(one.number) for one in connection.execute(_REJECTED, since)}
        counted = sums(connection, topology, row.incarnation, total.lowest)
    of_component = {one.component: one for one in counted.components}
    tracking = of_component.get(ACKER)
    acker = record_of(
        AckerFigures,
        total,
        acks=None if tracking is None else tracking.executed,
        busy_ms=None if tracking is None else tracking.busy_ms,
    )
    drawn = _drawn(description or {})
    parts = tuple(
        _with_figures(part, acker, failed, sinks, rejected, of_component.get(part.name))
        for part in drawn.parts.values()
    )
    arrows = tuple(_with_rate(arrow, counted.edges) for arrow in drawn.arrows.values())
    stages = max((part.stage for part in parts), default=0) + 1
    return GraphFigures(topology, parts, arrows, acker, stages)


def _with_rate(arrow: Arrow, edges: tuple[EdgeSums, ...]) -> Arrow:
    mine = [one for one in edges if (one.origin, one.target) == (arrow.origin, arrow.to)]
    if not mine:
        return arrow
    rates = [one.tuples_per_s for one in mine if one.tuples_per_s is not None]
    return replace(arrow, tuples=sum(one.tuples for one in mine), tuples_per_s=sum(rates) if rates else None)


def _with_figures(
    part: ComponentFigures,
    acker: AckerFigures,
    failed: Mapping[str, int],
    sinks: Mapping[str, Any],
    rejected: Mapping[str, int],
    counted: ComponentSums | None,
) -> ComponentFigures:
    given: dict[str, Any] = {"failed": failed.get(part.name, 0)}
    if counted is not None:
        given |= {"emitted": counted.emitted, "acked": counted.acked, "latency_ms": counted.latency_ms}
    if part.kind == "sink":
        found = sinks.get(part.name)
        given["failed"] = failed.get(part.name, 0) + rejected.get(part.name, 0)
        given["acked"] = 0 if found is None else int(found.rows)
        given["last_txid"] = None if found is None else int(found.last_txid)
        given["latency_ms"] = None if found is None or found.latency_ms is None else float(found.latency_ms)
    elif part.kind == "spout":
        if counted is None:
            given |= {"emitted": acker.messages, "acked": acker.acked}
        else:
            given["failed"] = counted.failed  # all of its messages that failed, wherever
        given["latency_ms"] = acker.latency_ms
    return ComponentFigures(part.name, part.kind, part.stage, target=part.target, **given)


def _drawn(description: Mapping[str, Json]) -> _Drawn:
    """Parts and arrows of a graph as the ledger keeps it."""
    drawn, components, sinks = _Drawn(), description.get("components"), description.get("sinks")
    nodes = components if isinstance(components, dict) else {}
    for key, node in nodes.items():
        if not isinstance(node, dict) or _EDGE.fullmatch(key) or node.get("kind") == _JOIN_SIDE:
            continue
        stage = node.get("stage")
        place = stage if isinstance(stage, int) else 0
        entry = _ENTRY.fullmatch(key) if "feeds" in node else None
        name = key if entry is None else entry["component"]
        kind = _KINDS.get(str(node.get("kind")), "bolt") if entry is None else "spout" if place == 0 else "aggregate"
        if name not in drawn.parts or entry is None:
            drawn.parts[name] = ComponentFigures(name, kind, place)
    for name, sink in (sinks if isinstance(sinks, dict) else {}).items():
        target = sink.get("target") if isinstance(sink, dict) else None
        drawn.parts[name] = ComponentFigures(name, "sink", 0, target=None if target is None else str(target))
    for key, node in nodes.items():
        if not isinstance(node, dict) or _EDGE.fullmatch(key):
            continue
        entry = _ENTRY.fullmatch(key) if "feeds" in node else None
        children = node.get("to") if entry is None else node.get("feeds")
        for child in children if isinstance(children, list) else ():
            _connect(drawn, key if entry is None else entry["component"], str(child))
    for arrow in drawn.arrows.values():
        if drawn.parts[arrow.to].kind == "sink":
            drawn.parts[arrow.to] = ComponentFigures(
                arrow.to, "sink", drawn.parts[arrow.origin].stage, target=drawn.parts[arrow.to].target
            )
    return drawn


def _connect(drawn: _Drawn, origin: str, child: str) -> None:
    edge = _EDGE.fullmatch(child)
    to, stream = (edge["to"], edge["stream"]) if edge is not None else (child, "default")
    if to not in drawn.parts and ">" in to:  # a bolt's child is named with the stream before it
        stream, _, to = to.partition(">")
    if to in drawn.parts and origin in drawn.parts and to != origin:
        crosses = drawn.parts[to].kind != "sink" and drawn.parts[to].stage != drawn.parts[origin].stage
        drawn.arrows.setdefault((origin, to), Arrow(origin, to, stream, crosses))
