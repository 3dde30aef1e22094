"""A topology's graph as the ledger keeps it, and which changes of it a new run may make."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from stormproof.core.base.arguments import operator
from stormproof.core.base.errors import Json, PositionMismatch, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.fold import fold_from_json
from stormproof.core.contract.schema import type_name
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
from stormproof.trident.ledger import sink_records, txns
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.missing import MISSING, Missing, Shape, absences, count_missing
from stormproof.trident.ledger.tables import Event
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction, SinkOutcome, TxnState

SHOWN_CHARACTERS: Final = 12
"""Characters of a change's fingerprint, which an operator types to accept it."""
FINGERPRINT: Final = "fingerprint"
"""The key of a change's fingerprint, in the detail of a `start_refused` event."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph's canonical description: source, components, and sinks with their inputs. It has nothing of functions.

    `evolving` sinks take added columns and wider types by themselves; only a graph that is to run knows them.
    """

    description: dict[str, Json]
    evolving: frozenset[str] = frozenset()

    @property
    def fingerprint(self) -> str:
        """A hash of the description."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

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
            "columns": [[f.name, type_name(f.type), f.nullable] for f in input_.schema],
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
    evolving = frozenset(spec.name for spec in plan.sink_specs if spec.evolves)
    return Graph({"source": source, "components": components, "sinks": sinks}, evolving)


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
class GraphChange:
    """One difference between two graphs of one topology."""

    kind: ChangeKind
    text: str
    sink: str | None = None
    missing: Missing | None = None
    """What a sink that joins does not have."""
    was: Json = None
    becomes: Json = None
    """The sink's input before and after."""
    grows: bool = False
    """Whether the sink takes it by itself: columns are added, or widened, and its schema contract is to evolve."""

    @property
    def needs_acceptance(self) -> bool:
        """Whether an operator must accept it: the table would hold what no batches could have made."""
        if self.kind is ChangeKind.SINK_CHANGED:
            return not self.grows
        return self.kind is ChangeKind.SINK_RETURNED and bool(self.missing)

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
        return 'once the table can hold both (schema_contract="evolve" has a sink take columns that are added)'

    @property
    def is_loud(self) -> bool:
        """Whether it is logged as a warning."""
        return self.missing is not None or self.kind in (ChangeKind.SINK_CHANGED, ChangeKind.SINK_REMOVED)

    def joining(self, missing: Missing | None, held: int | None, newest: int) -> GraphChange:
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


def changes(before: Graph, after: Graph) -> tuple[GraphChange, ...]:
    """The differences, sinks first."""
    found: list[GraphChange] = []
    old, new = before.sinks, after.sinks
    found += [
        GraphChange(ChangeKind.SINK_ADDED, f"sink {name!r} is new", name, becomes=_as_json(_columns_of(new[name])))
        for name in new
        if name not in old
    ]
    found += [GraphChange(ChangeKind.SINK_REMOVED, f"sink {name!r} is gone", name) for name in old if name not in new]
    found += [change for name in new if name in old and (change := sink_change(name, before, after)) is not None]
    different = [
        name
        for name in {**before.components, **after.components}
        if before.components.get(name) != after.components.get(name)
    ]
    if different:
        found.append(GraphChange(ChangeKind.COMPONENTS, f"other components: {', '.join(different)}"))
    return tuple(found)


def sink_change(name: str, before: Graph, after: Graph) -> GraphChange | None:
    """How the input of a sink that both graphs have differs; None where it does not. The order of columns says nothing."""
    old, new = before.sinks[name], after.sinks[name]
    was, becomes = _columns_of(old), _columns_of(new)
    added = [column for column in becomes if column not in was]
    changed = [column for column in becomes if column in was and was[column] != becomes[column]]
    words = [
        *(f"column {column} {_shown_column(becomes[column])} was added" for column in added),
        *(f"column {c} was {_shown_column(was[c])}, is {_shown_column(becomes[c])}" for c in changed),
        *(f"column {c} {_shown_column(was[c])} was removed" for c in was if c not in becomes),
    ]
    grown = len(added) + sum(_is_widened(was[column], becomes[column]) for column in changed)
    rules = {part: (_rule(old, part), _rule(new, part)) for part in ("mode", "keys", "order_by", "delete_when", "keep")}
    words += [
        f"{part.replace('keys', 'key')} was {one}, is {other}" for part, (one, other) in rules.items() if one != other
    ]
    if not words:
        return None
    grows = name in after.evolving and grown == len(words)
    taken = ", which its schema_contract='evolve' takes" if grows else ""
    return GraphChange(
        ChangeKind.SINK_CHANGED,
        f"sink {name!r}: {'; '.join(words)}{taken}",
        name,
        was={"columns": _as_json(was), **{part: one for part, (one, _) in rules.items()}},
        becomes={"columns": _as_json(becomes), **{part: other for part, (_, other) in rules.items()}},
        grows=grows,
    )


_Column: TypeAlias = tuple[str, str]
"""A column's type; and what else holds for it, in words."""

_WIDER: Final = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")


def _columns_of(sink: Mapping[str, Any]) -> dict[str, _Column]:
    folds = sink.get("folds") or {}
    return {
        name: (
            kind,
            ("" if nullable else " NOT NULL")
            + (f" (folded by {fold_from_json(folds[name])})" if name in folds else ""),
        )
        for name, kind, nullable in sink["columns"]
    }


def _shown_column(column: _Column) -> str:
    return "".join(column)


def _as_json(columns: Mapping[str, _Column]) -> dict[str, Json]:
    return {name: _shown_column(column) for name, column in columns.items()}


def _is_widened(was: _Column, becomes: _Column) -> bool:
    """Whether every value of the one type is one of the other; the sink says whether its table can follow."""
    (old, told), (new, tells) = was, becomes
    if told != tells:
        return False
    before, after = _DECIMAL.fullmatch(old), _DECIMAL.fullmatch(new)
    if before is not None and after is not None:
        (digits, scale), (more, finer) = map(int, before.groups()), map(int, after.groups())
        return more - finer >= digits - scale and finer >= scale
    return any(old in kinds and new in kinds and kinds.index(old) < kinds.index(new) for kinds in _WIDER)


def _rule(sink: Mapping[str, Any], part: str) -> str:
    """What a sink's input says of its mode, its key, and so on, in words."""
    told = sink.get(part) or ("none" if part != "mode" else "fold" if sink.get("folds") else "append")
    return told if isinstance(told, str) else ", ".join(told)


def fingerprint_of(found: Sequence[GraphChange]) -> str:
    """What an operator types to accept these changes: the same wherever they are found, and for no others.

    Targets are no part of it, which another machine may call otherwise; nor is how much a returning sink lacks by now.
    """
    said = [[c.kind.value, c.sink, c.was, c.becomes] for c in found if c.needs_acceptance]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:SHOWN_CHARACTERS]


def keep_graph(tx: Tx, graph: Graph, accepted: str | None = None) -> Sequence[GraphChange]:
    """Record the graph if it is new or changed, and that its change was `accepted` by the caller. Returns what changed.

    Raises:
        PositionMismatch: an operator must accept the change, or a batch is prepared for a sink that is gone or changed.
        UsageError: `accepted` is the fingerprint of no change.
    """
    run, news = tx.run, compared(tx, graph, accepted)
    if news is None:
        return ()
    if news.accepts:
        accept(tx, news.accepts, by=operator(), why="given to the run")
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
    tx.record(
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
    """A graph that the ledger does not have yet: what changed since the one before, and the last txid of that one.

    `accepts` is the fingerprint that the caller gave for these changes, where they need one.
    """

    changes: Sequence[GraphChange]
    after_txid: int
    accepts: str | None = None


def compared(tx: Tx, graph: Graph, accepted: str | None = None) -> News | None:
    """Compare a graph with the last one by which a batch was prepared, as `keep_graph` does; nothing is recorded.

    None: it is the graph that the ledger has last.

    Raises:
        PositionMismatch, UsageError: as `keep_graph`.
    """
    connection, run = tx.connection, tx.run
    of_this = t.graph.c.incarnation == run.incarnation
    earlier = connection.execute(sa.select(t.graph).where(of_this).order_by(t.graph.c.epoch)).all()
    if earlier and earlier[-1].fingerprint == graph.fingerprint:
        _require_shown(tx, accepted)
        return None
    after_txid: int = connection.execute(
        sa.select(sa.func.coalesce(sa.func.max(t.txn.c.txid), 0)).where(t.txn.c.incarnation == run.incarnation)
    ).scalar_one()
    used = _used(tx, earlier)
    found = _changes_with_missing(tx, earlier, used, graph, after_txid) if used else []
    _require_resolved(tx, found)
    accepts = _accepted(tx, found, used[-1].epoch, accepted) if any(c.needs_acceptance for c in found) else None
    if accepts is None:
        _require_shown(tx, accepted)
    return News(found, after_txid, accepts)


def _used(tx: Tx, earlier: Sequence[Any]) -> Sequence[Any]:
    """The graphs up to the last one by which a batch was prepared: a start that came to none leaves nothing to compare. All
    of them where the last driver has not ended: it may prepare one.
    """
    if tx.run.took_over_from is not None:
        return earlier
    c = t.txn_sink.c
    newest = tx.connection.execute(
        sa.select(sa.func.max(t.attempt.c.epoch))
        .select_from(t.attempt)
        .join(t.txn_sink, (c.incarnation == t.attempt.c.incarnation) & (c.txid == t.attempt.c.txid))
        .where(c.incarnation == tx.run.incarnation)
    ).scalar_one()
    pruned = txns.pruned_upto(tx)
    return [row for row in earlier if row.after_txid < pruned or (newest is not None and row.epoch <= newest)]


def _changes_with_missing(
    tx: Tx, earlier: Sequence[Any], used: Sequence[Any], graph: Graph, after_txid: int
) -> list[GraphChange]:
    """What changed since the last graph that was used; each sink that joins with what it lacks."""
    graphs = [Graph(row.description) for row in used]
    shapes = [Shape(row.epoch, row.after_txid, frozenset(Graph(row.description).sinks)) for row in earlier]
    away = absences([*shapes, Shape(tx.run.epoch, after_txid, frozenset(graph.sinks))])
    pruned = txns.pruned_upto(tx)
    found: list[GraphChange] = []
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
        held = sink_records.last_held(tx, sink)
        found.append(change.joining(missing, None if held is None else held[0], after_txid))
        before = next((g for g in reversed(graphs) if sink in g.sinks), None)
        other = None if before is None or held is None else sink_change(sink, before, graph)
        found += [] if other is None else [other]
    return found


def _require_resolved(tx: Tx, found: Sequence[GraphChange]) -> None:
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


def _accepted(tx: Tx, found: Sequence[GraphChange], since_epoch: int, given: str | None) -> str | None:
    """The fingerprint of these changes where it is `given`; None where an operator accepted them before.

    Raises:
        PositionMismatch: neither; says what changed, and both ways to accept it.
    """
    run, fingerprint = tx.run, fingerprint_of(found)
    if given == fingerprint:
        return fingerprint
    decided = t.event.c.detail["epoch"].as_integer()
    if given is None and _acceptances(tx, fingerprint, decided >= since_epoch):
        return None
    refused = [change for change in found if change.needs_acceptance]
    harm = " and ".join(dict.fromkeys(c.harm for c in refused))
    remedy = " and ".join(dict.fromkeys(c.remedy for c in refused))
    other = "" if given is None else f"{given!r} was accepted, which is not the fingerprint of this change. "
    raise PositionMismatch(
        f"topology {run.topology!r} has changed since its last run: {'; '.join(c.text for c in refused)}. {other}"
        f"{harm[0].upper()}{harm[1:]}, and nothing was written. Give the topology, or the sink, a new name and a "
        f"new table; or, {remedy}: stormproof run FILE.py:NAME --accept-change {fingerprint}, or for the next start: "
        f"stormproof ledger accept-change {run.topology} {fingerprint}",
        topology=run.topology,
        fingerprint=fingerprint,
        sinks=[c.sink for c in refused],
    )


def _require_shown(tx: Tx, given: str | None) -> None:
    """Where nothing is to be accepted, take only what was accepted before: a deployment may go on naming it.

    Raises:
        UsageError: it is the fingerprint of no change.
    """
    if given is not None and not _acceptances(tx, given):
        raise UsageError(
            f"topology {tx.run.topology!r}: nothing is to be accepted, and {given!r} is the fingerprint of no change that "
            "was shown. Start without it",
            fingerprint=given,
        )


def _acceptances(tx: Tx, fingerprint: str, *more: sa.ColumnElement[bool]) -> bool:
    accepting = (t.event.c.action == OperatorAction.ACCEPT_CHANGE.value, t.event.c.message == fingerprint)
    of_this = t.event.c.incarnation == tx.run.incarnation
    return tx.connection.execute(sa.select(sa.exists().where(of_this, *accepting, *more))).scalar_one()


def keep_refusal(tx: Tx, refusal: PositionMismatch) -> None:
    """Record that a start was refused until its change is accepted, so that `accept-change` knows what it accepts."""
    detail: dict[str, Json] = {FINGERPRINT: refusal.details[FINGERPRINT]}
    tx.record([Event(EventKind.START_REFUSED, error=storable_text(refusal.message), detail=detail)])


def refusal_of(connection: sa.Connection, incarnation: str, fingerprint: str) -> str | None:
    """Why the newest start with this change was refused; None: none was."""
    c = t.event.c
    return connection.execute(
        sa.select(c.error)
        .where(c.incarnation == incarnation, c.kind == EventKind.START_REFUSED.value)
        .where(c.detail[FINGERPRINT].as_string() == fingerprint)
        .order_by(c.id.desc())
        .limit(1)
    ).scalar_one_or_none()


def accept(tx: Tx, fingerprint: str, *, by: str, why: str) -> None:
    """Let the topology go on with the change of this fingerprint, by an operator's decision."""
    detail: dict[str, Json] = {"epoch": tx.run.epoch}
    tx.decided(OperatorAction.ACCEPT_CHANGE, by=by, why=why, about=fingerprint, message=fingerprint, detail=detail)
