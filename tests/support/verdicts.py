"""Asks the audit about a cell, as an operator would."""

from __future__ import annotations

import sqlalchemy as sa

from stormproof.core.postgres.database import Database
from stormproof.trident.audit import AuditLedger, VerifyReport, opener_for, verify
from support.crashes import Cell


def verified(name: str, database: Database) -> VerifyReport:
    """What `audit verify` says of a topology."""
    engine = sa.create_engine(database.sqlalchemy_url)
    try:
        return verify(AuditLedger(engine), name, opener_for(database))
    finally:
        engine.dispose()


def require_verified(cell: Cell) -> None:
    """The audit must agree that nothing is wrong."""
    report = verified(cell.name, cell.database)
    assert not report.violations
    assert report.clean
