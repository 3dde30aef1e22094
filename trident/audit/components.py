"""What each component of a topology did, and how many tuples went over each edge: sums over batches."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.transaction_states import ComponentKind


@dataclass(frozen=True, slots=True)
class ComponentSums:
    """What one component did over some batches; the columns of the view `audit_components` say what is counted."""

    component: str
    kind: ComponentKind
    executed: int
    emitted: int
    acked: int
    failed: int
    busy_ms: float
    latency_ms: float | None
    """Mean time for one tuple that it took in; None: it took none."""


@dataclass(frozen=True, slots=True)
class EdgeSums:
    """How many tuples went from a component's stream to another component or a sink."""

    origin: str
    stream: str
    target: str
    tuples: int
    tuples_per_s: float | None
    """For each second of the time that the batches span; None: there is one batch, or none."""


@dataclass(frozen=True, slots=True)
class ComponentsReport:
    """Sums over the batches from `first_txid` to `last_txid` that are on record. A batch counts with the attempt that fixed
    its content; one that was given up does not count.

    `batches` without a record are not among them: micro-batches of a query, and those of a release before this one.
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
    "select component, kind, sum(executed) as executed, sum(emitted) as emitted, sum(acked) as acked,"
    f" sum(failed) as failed, sum(busy_ms) as busy_ms from stormproof.txn_component {_THESE} group by component, kind"
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
        ComponentSums(
            component=row.component,
            kind=ComponentKind(row.kind),
            executed=int(row.executed),
            emitted=int(row.emitted),
            acked=int(row.acked),
            failed=int(row.failed),
            busy_ms=row.busy_ms,
            latency_ms=row.busy_ms / int(row.executed) if row.executed else None,
        )
        for row in connection.execute(_COMPONENTS, these)
    ]
    edges = [
        EdgeSums(row.origin, row.stream, row.target, int(row.tuples), int(row.tuples) / seconds if seconds else None)
        for row in connection.execute(_EDGES, these)
    ]
    return ComponentsReport(topology, span.first, span.last, span.batches, seconds, tuple(made), tuple(edges))
