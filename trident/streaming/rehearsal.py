"""What `once` would do with a job, found without a change: the ledger is read, and the rows are computed and dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import sqlalchemy as sa

from stormproof.core.clock import SystemClock
from stormproof.core.errors import PositionMismatch
from stormproof.core.graph.plan import Plan
from stormproof.core.postgres.database import Database
from stormproof.core.settings import Settings
from stormproof.core.sink import TaskContext, files_of
from stormproof.sinks.lineage import one_message_writer
from stormproof.sinks.preview import Rehearsal, RowsPreview, TableAction, TablePreview
from stormproof.sinks.protocol import Sink, SinkIdentity
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.dry_run import DryRun, DryRunOutcome, DryRunSink, outcome_of
from stormproof.trident.ledger import job_keys, lives
from stormproof.trident.ledger.bindings import Bound
from stormproof.trident.ledger.database import ledger_engine
from stormproof.trident.ledger.graphs import Graph, compared, graph_of
from stormproof.trident.ledger.rows import Run, Txn
from stormproof.trident.ledger.streams import SCHEMA
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.opening import require_own_tables, sinks_of
from stormproof.trident.streaming.base import Frame
from stormproof.trident.transaction_states import TxnState

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames

_NO_LIFE: Final = "dry-run"
"""Stands for the life that a first start would make; no life is called so."""

_NEEDED: Final = (("topology", "UPDATE"), ("txn", "INSERT"), ("txn_sink", "INSERT"), ("job_key", "INSERT"))
"""Rights without which no call gets through."""
_MAY: Final = sa.text("select has_table_privilege(:table, :right)")


@dataclass(frozen=True, slots=True)
class LedgerView:
    """What the ledger says of a name and a key; as it is here where it has never seen the name."""

    incarnation: str | None = None
    taken: int | None = None
    last_txid: int = 0
    unresolved: tuple[Txn, ...] = ()
    bound: Mapping[str, Bound] = field(default_factory=dict[str, Bound])
    adopted: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    refusal: str = ""
    """Why the ledger would refuse the start."""


def look(settings: Settings, name: str, key: str, graph: Graph) -> tuple[LedgerView, Database | None]:
    """Read the ledger. An embedded Postgres that was never started is not made: then there is no database.

    Raises:
        StoreUnavailable: the database does not answer.
        UsageError: a streaming query uses the name.
    """
    if settings.uses_embedded and not (settings.home / "postgres" / "data").exists():
        return LedgerView(notes=("there is no ledger yet: the first call starts an embedded Postgres",)), None
    database = settings.resolve_database()
    engine = ledger_engine(database)
    try:
        with AuditLedger(engine).snapshot() as ledger:
            if not job_keys.has_table(ledger.connection):
                note = "the database has no ledger, or one of an older version; a call needs: stormproof ledger migrate"
                return LedgerView(notes=(note,)), database
            job_keys.require_use(ledger.connection, name, by_key=True)
            missing = _missing_rights(ledger.connection)
            if name not in [topology.name for topology in ledger.topologies()]:
                return LedgerView(refusal=missing), database
            topology = ledger.topology(name)
            incarnation = topology.incarnation
            bound = {
                b.sink: Bound(name, b.sink, b.target, b.table_id, ledger.last_held(incarnation, b.sink))
                for b in ledger.sinks(incarnation)
            }
            view = LedgerView(
                incarnation,
                job_keys.find(ledger.connection, incarnation, key),
                ledger.last_txid(incarnation) or 0,
                tuple(ledger.unresolved(incarnation)),
                bound,
                lives.adopted_by(ledger.connection, incarnation),
                refusal=missing
                or _refusal(
                    Tx(ledger.connection, Run(name, incarnation, topology.epoch + 1, None), SystemClock()), graph
                ),
            )
            return view, database
    finally:
        engine.dispose()


def _missing_rights(connection: sa.Connection) -> str:
    """Why this role could not write to the ledger; a dry run itself needs only to read it."""
    found = [
        f"{right} on {SCHEMA}.{table}"
        for table, right in _NEEDED
        if not connection.execute(_MAY, {"table": f"{SCHEMA}.{table}", "right": right}).scalar_one()
    ]
    return f"this role cannot write to the ledger: it lacks {', '.join(found)}; see: stormproof doctor" if found else ""


def _refusal(tx: Tx, graph: Graph) -> str:
    try:
        compared(tx, graph)
    except PositionMismatch as mismatch:
        return mismatch.message
    return ""


def rehearsed(
    name: str, key: str, frame: Frame, plan: Plan, schema: pa.Schema, frames: Frames, settings: Settings
) -> DryRun:
    """What `once(frame, key)` would do, with the frame as it would be written.

    Raises:
        JobFailed: the job failed.
        Otherwise as `look`.
    """
    view, database = look(settings, name, key, graph_of(plan, job_keys.source_of(name)))
    if database is not None:
        require_own_tables(plan_placed(plan, database, settings))
    previews = {sink.name: _table(sink, plan, view, name, database) for sink in sinks_of(plan)}
    if view.refusal:
        notes = (*_notes(view), view.refusal)
        return DryRun(
            name, key, DryRunOutcome.REFUSE, view.taken or view.last_txid + 1, None, _sinks(plan, previews, {}), notes
        )
    if view.taken is not None:
        waits = any(txn.txid == view.taken and txn.state is not TxnState.COMMITTED for txn in view.unresolved)
        outcome = DryRunOutcome.ROLL_FORWARD if waits else DryRunOutcome.SUPPRESS
        return DryRun(name, key, outcome, view.taken, None, _sinks(plan, previews, {}), _notes(view))
    writers = {
        sink: Rehearsal(one_message_writer(preview.writer, plan.sinks[sink], key))
        for sink, preview in previews.items()
        if preview.writer is not None
    }
    rows, found, problems = None, dict[str, RowsPreview](), tuple[str, ...]()
    if writers:
        written = frames.write(frame, writers, TaskContext(_NO_LIFE, view.last_txid + 1, 1, 0), schema)
        rows, problems = written.rows, written.problems
        found = {sink: RowsPreview.of(files_of(written.files, sink)) for sink in writers}
    sinks = _sinks(plan, previews, found)
    outcome = DryRunOutcome.REFUSE if problems else outcome_of(sinks)
    notes = (*_notes(view), *(f"no sink can hold a row: {text}" for text in problems))
    return DryRun(name, key, outcome, view.last_txid + 1, rows, sinks, notes)


def plan_placed(plan: Plan, database: Database, settings: Settings) -> Plan:
    """The plan as a run would have it."""
    return replace(plan, sink_specs=tuple(sink.placed(database, settings.staging_path) for sink in sinks_of(plan)))


def _sinks(plan: Plan, previews: Mapping[str, TablePreview], rows: Mapping[str, RowsPreview]) -> tuple[DryRunSink, ...]:
    return tuple(
        DryRunSink(s.name, s.target, plan.sinks[s.name].mode.value, previews[s.name], rows.get(s.name, RowsPreview()))
        for s in plan.sink_specs
    )


def _table(sink: Sink, plan: Plan, view: LedgerView, name: str, database: Database | None) -> TablePreview:
    """The sink's own word, and the ledger's on which table it must be, as a start would have it."""
    identity = SinkIdentity(name, view.incarnation or _NO_LIFE, sink.name)
    found = sink.preview(identity, plan.sinks[sink.name], database)
    bound = view.bound.get(sink.name)
    why = ""
    if bound is not None and found.action is TableAction.CREATE and not sink.is_new_in_process:
        why = bound.is_gone(sink.target).message
    elif bound is not None and found.table_id not in (None, bound.table_id):
        why = bound.is_another(sink.target, found.table_id or "").message
    elif bound is None and set(found.other_lives) - view.adopted:
        life = min(set(found.other_lives) - view.adopted)
        why = (
            f"sink {sink.name!r}: {sink.target} was written or claimed by another life, {life}; to write beside it: "
            f"stormproof ledger adopt {name} {life}"
        )
    return replace(found, action=TableAction.REFUSE, why=why, writer=None) if why else found


def _notes(view: LedgerView) -> tuple[str, ...]:
    notes = list(view.notes)
    for txn in view.unresolved:
        if txn.state is TxnState.OPEN:
            notes.append(f"txid {txn.txid} is open: a job was killed, or runs now; a call would fence it and abort it")
        elif txn.state is TxnState.BLOCKED:
            notes.append(
                f"txid {txn.txid} is blocked: a call would try it again, and stop there if it is refused again"
            )
        else:
            notes.append(f"txid {txn.txid} is {txn.state}: a call would complete it first")
    return tuple(notes)
