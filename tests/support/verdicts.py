"""Asks the audit about a cell, as an operator would."""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.trident.audit.inspect import SinkOpener, opener_for
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.message import MESSAGE_EVENTS, Trace, traces
from stormproof.trident.audit.report import NoticeKind, VerifyReport, Violation
from stormproof.trident.audit.verify import verify
from support.contents import content
from support.crashes import Cell
from support.topologies import SinkMode


def verified(name: str, database: Database, opener: SinkOpener | None = None) -> VerifyReport:
    """What `audit verify` says of a topology."""
    engine = sa.create_engine(database.sqlalchemy_url)
    try:
        return verify(AuditLedger(engine), name, opener or opener_for(database))
    finally:
        engine.dispose()


def is_known(name: str, database: Database) -> bool:
    """Whether a driver of the topology ever came so far as to be written into the ledger."""
    engine = sa.create_engine(database.sqlalchemy_url)
    try:
        with AuditLedger(engine).snapshot() as snapshot:
            return any(topology.name == name for topology in snapshot.topologies())
    finally:
        engine.dispose()


def traces_of(ledger: AuditLedger, name: str) -> dict[str, Trace]:
    """What the ledger has of each message of a topology that failed, was returned, or came again."""
    with ledger.snapshot() as snapshot:
        return traces(snapshot.events(snapshot.topology(name).incarnation, MESSAGE_EVENTS))


def violations(cell: Cell) -> tuple[Violation, ...]:
    """What the audit calls wrong."""
    return verified(cell.name, cell.database).violations


def require_verified(
    cell: Cell,
    database: Database | None = None,
    opener: SinkOpener | None = None,
    *,
    untold: frozenset[str] = frozenset(),
) -> VerifyReport:
    """The audit must agree that nothing is wrong, and that everything could be told, but at the sinks `untold`.

    A loss is possible under at-most-once alone, a duplicate under at-least-once alone: exactly-once may not even call
    one possible. It is asked at `database`, where the cell's own is not to be used.
    """
    report = verified(cell.name, cell.database if database is None else database, opener)
    unknowns = [u for u in report.unknowns if u.sink not in untold]
    shown = "\n".join([f"{v.kind}: {v.text}" for v in report.violations] + [f"cannot tell: {u.text}" for u in unknowns])
    assert not shown, f"audit of {cell.name} ({cell.guarantee}, {cell.mode}):\n{shown}"
    noticed = {notice.kind for notice in report.notices}
    if cell.guarantee is not Guarantee.AT_MOST_ONCE:
        assert NoticeKind.LOSS_POSSIBLE not in noticed
    if cell.guarantee is not Guarantee.AT_LEAST_ONCE:
        assert NoticeKind.DUPLICATE_POSSIBLE not in noticed
    return report


def require_exact(cell: Cell, should: Counter[str]) -> None:
    """Every sink of a cell holds just this, and the audit agrees."""
    for mode in SinkMode if cell.mode is None else [cell.mode]:
        assert content(mode, cell.name, cell.folder, cell.database) == should, mode
    require_verified(cell)
