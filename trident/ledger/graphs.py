"""A topology's graph as the ledger keeps it, and which changes of it a new run may make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json, PositionMismatch
from stormproof.core.graph.plan import (
    BoltNode,
    CombineNode,
    GatherNode,
    JoinNode,
    JoinSideNode,
    Node,
    OperationNode,
    Plan,
    SendNode,
    WriteNode,
)
from stormproof.trident.ledger import bindings, events, txns
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.missing import MISSING, Missing, Shape, absences, count_missing
from stormproof.trident.ledger.rows import Event
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import EventKind, OperatorAction, SinkOutcome, TxnState

SHOWN_CHARACTERS: Final = 12
"""Leading characters of a fingerprint that are shown, and that an operator types to accept a change."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph's canonical description: source, components, and sinks with their inputs. It has nothing of functions."""

    description: dict[str, Json]

    @property
    def fingerprint(self) -> str:
        """A hash of the description."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    @property
    def shown(self) -> str:
        """The fingerprint as people see it."""
        return self.fingerprint[:SHOWN_CHARACTERS]

    @property
    def sinks(self) -> dict[str, dict[str, Json]]:
        """Each sink's description, by name."""
        return _parts(self.description, "sinks")

    @property
    def components(self) -> dict[str, dict[str, Json]]:
        """Each other component's description, by name."""
        return _parts(self.description, "components")


def _parts(description: Mapping[str, Json], kind: str) -> dict[str, dict[str, Json]]:
    parts = description.get(kind)
    if not isinstance(parts, dict):
        return {}
    return {name: part for name, part in parts.items() if isinstance(part, dict)}


def graph_of(plan: Plan, source: str) -> Graph:
    """The graph of a compiled topology."""
    targets = {spec.name: spec.target for spec in plan.sink_specs}
    sinks: dict[str, Json] = {
        name: {
            "target": targets.get(name, ""),
            "columns": [[f.name, str(f.type), f.nullable] for f in input_.schema],
            "keys": [*input_.keys],
            "folds": input_.described_folds,
            **input_.upsert_rule,
            **input_.described_lineage,
        }
        for name, input_ in plan.sinks.items()
    }
    components: dict[str, Json] = {}
    for number, stage in enumerate(plan.stages):
        for entry in stage.entries:
            components[f"{entry.component}/{entry.stream}@{number}"] = {"stage": number, "feeds": [*entry.children]}
        for key, node in stage.nodes.items():
            components[key] = {"stage": number, "kind": type(node).__name__, "to": _children(node)}
    return Graph({"source": source, "components": components, "sinks": sinks})


def _children(node: Node) -> list[Json]:
    match node:
        case BoltNode():
            return [f"{stream}>{child}" for stream, keys in node.children.items() for child in keys]
        case OperationNode() | GatherNode() | JoinNode():
            return [*node.children]
        case CombineNode() | JoinSideNode() | SendNode() | WriteNode():
            return []


class ChangeKind(StrEnum):
    """What differs; append-only."""

    SINK_ADDED = "sink_added"
    SINK_RETURNED = "sink_returned"
    """The sink was part of the topology before, and holds what it was given then."""
    SINK_REMOVED = "sink_removed"
    SINK_CHANGED = "sink_changed"
    """The sink is given other columns, keys or folds: what it holds was made of the old ones."""
    COMPONENTS = "components"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two graphs of one topology."""

    kind: ChangeKind
    text: str
    sink: str | None = None
    missing: Missing | None = None
    """What a sink that joins does not have."""

    @property
    def needs_acceptance(self) -> bool:
        """Whether an operator must accept it: the table would hold what no batches could have made."""
        return self.kind is ChangeKind.SINK_CHANGED or (self.kind is ChangeKind.SINK_RETURNED and bool(self.missing))

    @property
    def harm(self) -> str:
        """Why an operator must accept it."""
        if self.kind is ChangeKind.SINK_RETURNED:
            return "what it does not have would never come to it"
        return "what the table holds was made of the old ones"

    @property
    def remedy(self) -> str:
        """The condition under which it may be accepted."""
        if self.kind is ChangeKind.SINK_RETURNED:
            return "once its table was completed by hand, or to go on without that"
        return "once the table can hold both"

    @property
    def is_loud(self) -> bool:
        """Whether it is logged as a warning."""
        return self.missing is not None or self.kind in (ChangeKind.SINK_CHANGED, ChangeKind.SINK_REMOVED)

    def joining(self, missing: Missing | None, held: int | None, newest: int) -> Change:
        """This change for a sink that joins, with what the sink lacks; `held` is the last txid that it was given before."""
        if held is None:
            lacks = "" if missing is None else f", and does not have {missing}, committed before it joined"
            return replace(self, text=f"{self.text}{lacks}", missing=missing)
        lacks = (
            ""
            if missing is None
            else f": it holds txid {held}, the topology is at txid {newest}, and it does not have {missing}, committed "
            f"while it was not part of the topology"
        )
        text = f"sink {self.sink!r} is back{lacks}"
        return replace(self, kind=ChangeKind.SINK_RETURNED, text=text, missing=missing)


def changes(before: Graph, after: Graph) -> tuple[Change, ...]:
    """The differences, sinks first."""
    found: list[Change] = []
    old, new = before.sinks, after.sinks
    found += [Change(ChangeKind.SINK_ADDED, f"sink {name!r} is new", name) for name in new if name not in old]
    found += [Change(ChangeKind.SINK_REMOVED, f"sink {name!r} is gone", name) for name in old if name not in new]
    found += [change for name in new if name in old and (change := sink_change(name, before, after)) is not None]
    different = [
        name
        for name in {**before.components, **after.components}
        if before.components.get(name) != after.components.get(name)
    ]
    if different:
        found.append(Change(ChangeKind.COMPONENTS, f"other components: {', '.join(different)}"))
    return tuple(found)


def sink_change(name: str, before: Graph, after: Graph) -> Change | None:
    """How the input of a sink that both graphs have differs; None where it does not."""
    old, new = before.sinks[name], after.sinks[name]
    parts = [
        f"{part} were {json.dumps(old.get(part))}, are {json.dumps(new.get(part))}"
        if part.endswith("s")
        else f"{part} was {json.dumps(old.get(part))}, is {json.dumps(new.get(part))}"
        for part in ("columns", "keys", "folds", "mode", "order_by", "delete_when", "keep")
        if old.get(part) != new.get(part)
    ]
    return Change(ChangeKind.SINK_CHANGED, f"sink {name!r}: {'; '.join(parts)}", name) if parts else None


def keep_graph(tx: Tx, graph: Graph) -> Sequence[Change]:
    """Record the graph if it is new or changed. Returns what changed.

    Raises:
        PositionMismatch: an operator must accept the change, or a batch is prepared for a sink that is gone or changed.
    """
    run, news = tx.run, compared(tx, graph)
    if news is None:
        return ()
    found, after_txid = news.changes, news.after_txid
    tx.connection.execute(
        sa.insert(t.graph).values(
            incarnation=run.incarnation,
            epoch=run.epoch,
            after_txid=after_txid,
            fingerprint=graph.fingerprint,
            description=graph.description,
            at=tx.clock.now(),
        )
    )
    events.record(
        tx,
        [
            Event(
                EventKind.GRAPH,
                sink=change.sink,
                reason=change.kind.value,
                error=change.text,
                detail={
                    "after_txid": after_txid,
                    "epoch": run.epoch,
                    **({} if change.missing is None else {MISSING: change.missing.to_json()}),
                },
            )
            for change in found
        ],
    )
    return found


@dataclass(frozen=True, slots=True)
class News:
    """A graph that the ledger does not have yet: what changed since the one before, and the last txid of that one."""

    changes: Sequence[Change]
    after_txid: int


def compared(tx: Tx, graph: Graph) -> News | None:
    """Compare a graph with the one that ran last, as `keep_graph` does; nothing is recorded. None: it is that one.

    Raises:
        PositionMismatch: as `keep_graph`.
    """
    connection, run = tx.connection, tx.run
    of_this = t.graph.c.incarnation == run.incarnation
    earlier = connection.execute(sa.select(t.graph).where(of_this).order_by(t.graph.c.epoch)).all()
    known = earlier[-1] if earlier else None
    if known is not None and known.fingerprint == graph.fingerprint:
        return None
    after_txid: int = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(t.txn.c.txid), 0)).where(t.txn.c.incarnation == run.incarnation)
    ).scalar_one()
    if known is None:
        return News((), after_txid)
    found = _changes_with_missing(tx, earlier, graph, after_txid)
    _require_resolved(tx, found)
    _require_accepted(tx, found, graph, known.at)
    return News(found, after_txid)


def _changes_with_missing(tx: Tx, earlier: Sequence[Any], graph: Graph, after_txid: int) -> list[Change]:
    """What changed since the last of the earlier graphs; each sink that joins with what it lacks."""
    graphs = [Graph(row.description) for row in earlier]
    shapes = [Shape(row.epoch, row.after_txid, frozenset(g.sinks)) for row, g in zip(earlier, graphs, strict=True)]
    away = absences([*shapes, Shape(tx.run.epoch, after_txid, frozenset(graph.sinks))])
    pruned = txns.pruned_upto(tx)
    found: list[Change] = []
    for change in changes(graphs[-1], graph):
        if change.kind is not ChangeKind.SINK_ADDED or change.sink is None:
            found.append(change)
            continue
        sink = change.sink
        missing = next(
            (
                count_missing(tx.connection, tx.run.incarnation, sink, absence, pruned_upto=pruned)
                for absence in away[sink]
                if absence.epoch == tx.run.epoch
            ),
            None,
        )
        held = bindings.last_held(tx, sink)
        found.append(change.joining(missing, None if held is None else held[0], after_txid))
        before = next((g for g in reversed(graphs) if sink in g.sinks), None)
        other = None if before is None or held is None else sink_change(sink, before, graph)
        found += [] if other is None else [other]
    return found


def _require_resolved(tx: Tx, found: Sequence[Change]) -> None:
    """Refuse to remove or change a sink for which a batch is prepared; it must be committed or skipped there first."""
    run = tx.run
    touched = {c.sink: c for c in found if c.kind in (ChangeKind.SINK_REMOVED, ChangeKind.SINK_CHANGED)}
    rows = tx.connection.execute(
        sa.select(t.txn_sink.c.txid, t.txn_sink.c.sink)
        .join(t.txn, sa.and_(t.txn.c.incarnation == t.txn_sink.c.incarnation, t.txn.c.txid == t.txn_sink.c.txid))
        .where(
            t.txn.c.incarnation == run.incarnation,
            t.txn.c.state.in_((TxnState.PREPARED.value, TxnState.BLOCKED.value)),
            t.txn_sink.c.sink.in_([sink for sink in touched if sink is not None]),
            t.txn_sink.c.committed_at.is_(None),
            t.txn_sink.c.outcome.is_distinct_from(SinkOutcome.SKIPPED.value),
        )
        .order_by(t.txn_sink.c.txid)
    ).all()
    if rows:
        txid, sink = rows[0].txid, rows[0].sink
        raise PositionMismatch(
            f"topology {run.topology!r}: {touched[sink].text}, and txid {txid} is prepared for it"
            f"{f' (and {len(rows) - 1} more)' if len(rows) > 1 else ''}. Run the topology once as it was "
            f"(stormproof run FILE.py:NAME --until-idle), or give those rows up: stormproof ledger skip "
            f"{run.topology} {txid} {sink}",
            topology=run.topology,
            txid=txid,
            sink=sink,
        )


def _require_accepted(tx: Tx, found: Sequence[Change], graph: Graph, since: datetime) -> None:
    run = tx.run
    refused = [change for change in found if change.needs_acceptance]
    if not refused:
        return
    accepted = tx.connection.execute(
        sa.select(t.event.c.id)
        .where(
            t.event.c.incarnation == run.incarnation,
            t.event.c.kind == EventKind.OPERATOR.value,
            t.event.c.action == OperatorAction.ACCEPT_CHANGE.value,
            t.event.c.message == graph.shown,
            t.event.c.at >= since,
        )
        .limit(1)
    ).one_or_none()
    if accepted is None:
        harm = " and ".join(dict.fromkeys(c.harm for c in refused))
        remedy = " and ".join(dict.fromkeys(c.remedy for c in refused))
        raise PositionMismatch(
            f"topology {run.topology!r} has changed since its last run: {'; '.join(c.text for c in refused)}. "
            f"{harm[0].upper()}{harm[1:]}, and nothing was written. Give the topology, or the sink, a new name and a "
            f"new table; or, {remedy}: stormproof ledger accept-change {run.topology} {graph.shown}",
            topology=run.topology,
            fingerprint=graph.shown,
            sinks=[c.sink for c in refused],
        )


def accept(tx: Tx, fingerprint: str, *, by: str, why: str) -> None:
    """Let the topology go on with the graph of this shown fingerprint, by an operator's decision."""
    events.decided(tx, OperatorAction.ACCEPT_CHANGE, by=by, why=why, about=fingerprint, message=fingerprint)
