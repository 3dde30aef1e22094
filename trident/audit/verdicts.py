"""Keeps the verdicts of `audit verify`, with their time and scope."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime

import sqlalchemy as sa

from stormproof.core.errors import StormproofError
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import LedgerDatabase


def keep(engine: sa.Engine, report: VerifyReport, *, at: datetime, by: str, took_ms: int) -> VerifyReport:
    """Record a verdict. The report is given back with the record's number, or with the reason why there is none.

    A role that may only read, or a standby, keeps none; the verdict itself is the same.
    """
    kinds = Counter(one.kind.value for one in report.violations) + Counter(one.kind.value for one in report.notices)
    values = {
        "incarnation": report.incarnation,
        "at": at,
        "by": by,
        "verdict": report.verdict.value,
        "first_txid": report.first,
        "last_txid": report.last,
        "pruned_upto": report.pruned_upto,
        "violations": len(report.violations),
        "unknowns": len(report.unknowns),
        "notices": len(report.notices),
        "kinds": dict(sorted(kinds.items())),
        "txids": report.checked.txids,
        "sinks": report.checked.sinks,
        "evidence": report.checked.evidence,
        "messages": report.checked.messages_opened,
        "took_ms": took_ms,
        "deep": report.deep,
        "tables": report.scope,
        "basis": report.chain.basis,
        "chain_from": report.chain.chain_from,
        "settled_upto": report.chain.settled_upto,
        "furthest": [*report.chain.furthest],
    }
    try:
        with LedgerDatabase(engine, on_lost=lambda: None).begin() as connection:
            number = connection.execute(sa.insert(t.verdict).values(values).returning(t.verdict.c.id)).scalar_one()
    except StormproofError as error:
        return replace(report, not_recorded=error.message)
    return replace(report, recorded=int(number))
