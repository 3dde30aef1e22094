"""What a start would find: what the ledger says of a name, and each sink of its table. For dry runs: nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import sqlalchemy as sa

from stormproof.core.clock import SystemClock
from stormproof.core.errors import PositionMismatch
from stormproof.core.graph.plan import Plan
from stormproof.core.postgres.database import Database
from stormproof.core.settings import Settings
from stormproof.sinks.preview import RowsPreview, TableAction, TablePreview
from stormproof.sinks.protocol import Sink, SinkIdentity
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.dry_run import DryRunSink
from stormproof.trident.ledger import bindings, handed_in, other_lives
from stormproof.trident.ledger.bindings import Bound
from stormproof.trident.ledger.database import ledger_engine
from stormproof.trident.ledger.graphs import Graph, compared
from stormproof.trident.ledger.ledger import lacking_rights
from stormproof.trident.ledger.rows import NO_LIFE, Run, Txn
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.transaction_states import TxnState

_NEEDED_FOR_KEYS: Final = ((handed_in.handed_in, "INSERT"),)


@dataclass(frozen=True, slots=True)
class LedgerView:
    """What the ledger says of a name, and of a job's key; as it is here where it has never seen the name."""

    incarnation: str | None = None
    taken: int | None = None
    last_txid: int = 0
    unresolved: tuple[Txn, ...] = ()
    bound: Mapping[str, Bound] = field(default_factory=dict[str, Bound])
    adopted: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    refusal: str = ""
    """Why the ledger would refuse the start."""
    may_run: bool = False
    """Whether its newest driver has not ended in order, so that it may run now."""


def look(settings: Settings, name: str, key: str | None, graph: Graph) -> tuple[LedgerView, Database | None]:
    """Read the ledger; `key` None: of a topology. An embedded Postgres that was never started is not made: then there is
    no database.

    Raises:
        StoreUnavailable: the database does not answer.
        UsageError: a streaming query uses the name.
    """
    if settings.uses_embedded and not (settings.home / "postgres" / "data").exists():
        return LedgerView(notes=("there is no ledger yet: the first start makes an embedded Postgres",)), None
    database = settings.resolve_database()
    engine = ledger_engine(database)
    try:
        with AuditLedger(engine).snapshot() as ledger:
            if not handed_in.has_table(ledger.connection):
                note = "the database has no ledger yet; the first start makes it, as does: stormproof ledger migrate"
                return LedgerView(notes=(note,)), database
            if key is not None:
                handed_in.require_use(ledger.connection, name, by_key=True)
            missing = _missing_rights(ledger.connection, () if key is None else _NEEDED_FOR_KEYS)
            if name not in [topology.name for topology in ledger.topologies()]:
                return LedgerView(refusal=missing), database
            topology = ledger.topology(name)
            incarnation = topology.incarnation
            older = None if topology.stopped_at is not None else "the last driver"
            tx = Tx(ledger.connection, Run(name, incarnation, topology.epoch + 1, older), SystemClock())
            bound = {
                b.sink: b for known in ledger.sinks(incarnation) if (b := bindings.bound(tx, known.sink)) is not None
            }
            changes, refusal = _compared(tx, graph)
            view = LedgerView(
                incarnation,
                None if key is None else _txid_of(ledger.connection, incarnation, key),
                ledger.last_txid(incarnation) or 0,
                tuple(ledger.unresolved(incarnation)),
                bound,
                other_lives.adopted_by(ledger.connection, incarnation),
                changes,
                refusal=missing or refusal,
                may_run=topology.stopped_at is None,
            )
            return view, database
    finally:
        engine.dispose()


def _txid_of(connection: sa.Connection, incarnation: str, key: str) -> int | None:
    job = handed_in.job_of(connection, incarnation, key)
    return None if job is None else job.txid


def _missing_rights(connection: sa.Connection, more: Sequence[tuple[sa.Table, str]]) -> str:
    """Why this role could not write to the ledger; a dry run itself needs only to read it."""
    lacking = lacking_rights(connection, more)
    return "" if lacking is None else f"this role cannot write to the ledger: {lacking}; see: stormproof doctor"


def _compared(tx: Tx, graph: Graph) -> tuple[tuple[str, ...], str]:
    """What a start would say of the changed graph; and why it would be refused."""
    try:
        news = compared(tx, graph)
    except PositionMismatch as mismatch:
        return (), mismatch.message
    return () if news is None else tuple(change.text for change in news.changes if change.is_loud), ""


def sinks_told(
    plan: Plan, previews: Mapping[str, TablePreview], rows: Mapping[str, RowsPreview]
) -> tuple[DryRunSink, ...]:
    """What is told of each sink, in the topology's order."""
    return tuple(
        DryRunSink(s.name, s.target, plan.sinks[s.name].mode.value, previews[s.name], rows.get(s.name, RowsPreview()))
        for s in plan.sink_specs
    )


def table_of(sink: Sink, plan: Plan, view: LedgerView, name: str, database: Database | None) -> TablePreview:
    """The sink's own word, and the ledger's on which table it must be, as a start would have it."""
    identity = SinkIdentity(name, view.incarnation or NO_LIFE, sink.name)
    found = sink.preview(identity, plan.sinks[sink.name], database)
    bound = view.bound.get(sink.name)
    holds, claims = (sorted(set(lives) - view.adopted) for lives in (found.other_lives, found.claimed_by))
    why = ""
    if bound is not None and found.action is TableAction.CREATE and not sink.is_new_in_process:
        why = bound.is_gone(sink.target).message
    elif bound is not None and found.table_id not in (None, bound.table_id):
        why = bound.is_another(sink.target, found.table_id or "").message
    elif bound is not None and found.dropped:
        why = found.dropped
    elif bound is None and (holds or claims):
        why = other_lives.unknown(Run(name, identity.incarnation, 0), sink.name, sink.target, holds, claims).message
    return replace(found, action=TableAction.REFUSE, why=why, writer=None) if why else found


def notes_of(view: LedgerView) -> tuple[str, ...]:
    """What a start would do first, and what else a person has to know."""
    notes = list(view.notes)
    for txn in view.unresolved:
        if txn.state is TxnState.OPEN:
            notes.append(
                f"txid {txn.txid} is open: its driver was killed, or runs now; a start would fence it and abort it"
            )
        elif txn.state is TxnState.BLOCKED:
            notes.append(
                f"txid {txn.txid} is blocked: a start would try it again, and stop there if it is refused again"
            )
        else:
            notes.append(f"txid {txn.txid} is {txn.state}: a start would complete it first")
    return tuple(notes)
