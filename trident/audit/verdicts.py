"""Keeps the verdicts of `audit verify`, with their time and scope; and what a check may build on (`--since`).

A check continues a clean verdict of the same scope. It begins behind the last txid up to which, by then, every batch had
ended and no message waited for a retry. So the verdicts of a chain cover every txid from the first one's on, without a gap;
each says what held when it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import sqlalchemy as sa

from stormproof.core.errors import Json, StormproofError
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.lifecycle import EndKind, Records, end_of, traces
from stormproof.trident.audit.report import Chain, VerifyReport
from stormproof.trident.audit.verify_rows import Deep
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import LedgerDatabase
from stormproof.trident.ledger.rows import Event, Reject, Txn
from stormproof.trident.transaction_states import Verdict


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


class LookAtAll(Exception):
    """What came since a verdict concerns what came before it, too: everything is to be looked at again."""


@dataclass(frozen=True, slots=True)
class Basis:
    """A clean verdict that a check continues; see the table's columns."""

    id: int
    settled_upto: int
    chain_from: int
    furthest: tuple[int, ...]


def scope_of(deep: Deep | None) -> dict[str, Json] | None:
    """How tables are read, as a verdict keeps it: only a verdict of the same scope is continued."""
    if deep is None:
        return None
    names: list[Json] = [*sorted(deep.sinks or ())]
    return {"sinks": None if deep.sinks is None else names, "others_write": deep.others_write}


def find_basis(connection: sa.Connection, incarnation: str, deep: Deep | None, *, pruned: int) -> Basis | None:
    """The newest clean verdict that a check of this scope may continue: with those that it continues, it covers every txid
    that the ledger has, from the one behind `pruned` on.
    """
    c = t.verdict.c
    query = sa.select(c.id, c.settled_upto, c.chain_from, c.furthest, c.tables).where(
        c.incarnation == incarnation,
        c.verdict.in_([Verdict.CLEAN.value, Verdict.NOT_COMPARED.value]),
        c.settled_upto.is_not(None),
        c.chain_from <= pruned + 1,
        *([c.deep] if deep is not None else []),
    )
    for row in connection.execute(query.order_by(c.id.desc())):
        if deep is None or row.tables == scope_of(deep):
            return Basis(row.id, row.settled_upto, row.chain_from, tuple(row.furthest or ()))
    return None


def first_since(connection: sa.Connection, incarnation: str, moment: datetime) -> int:
    """The first txid that had not ended before a time; the one behind the newest, where all had."""
    c = t.txn.c
    mine = c.incarnation == incarnation
    found: int | None = connection.scalar(
        sa.select(sa.func.min(c.txid)).where(mine, sa.or_(c.ended_at.is_(None), c.ended_at >= moment))
    )
    if found is not None:
        return found
    newest: int | None = connection.scalar(sa.select(sa.func.max(c.txid)).where(mine))
    return (newest or 0) + 1


def require_later(source: SourceEvidence, basis: Basis, txns: Mapping[int, Txn]) -> None:
    """Whether each new batch of new messages reads further than all that the basis knows of.

    Raises:
        LookAtAll: one does not, as one that reads again what an earlier batch had given back.
    """
    anchors = [txns[txid] for txid in basis.furthest if txid in txns]
    if len(anchors) < len(basis.furthest):
        raise LookAtAll("a batch that the verdict builds on is no longer on record")
    for txn in txns.values():
        if txn.txid > basis.settled_upto and not txn.retry and not source.continues(anchors, txn):
            raise LookAtAll(f"txid {txn.txid} reads what an earlier batch had read")


def settled(
    txns: Mapping[int, Txn], events: Sequence[Event], rejects: Sequence[Reject], source: SourceEvidence | None
) -> tuple[int, tuple[int, ...]] | None:
    """Up to which txid every batch has ended and no message waits for a retry; and which of them read furthest.

    None: a later check cannot build on it, as where a slice was given back and not opened again.
    """
    if source is None or not txns:
        return None
    records = Records.of(txns.values(), source, rejects)
    waiting = [
        min(trace.txids)
        for trace in traces(events).values()
        if end_of(trace, records).kind in (EndKind.WAITING, EndKind.PENDING) and trace.txids
    ]
    open_ = [txn.txid for txn in txns.values() if txn.ended_at is None]
    upto = min([max(txns) + 1, *open_, *waiting]) - 1
    before = [txn for txn in txns.values() if txn.txid <= upto]
    furthest = source.furthest(before)
    known = [txn for txn in before if txn.txid in furthest]
    later = [txn for txn in txns.values() if txn.txid > upto]
    if not furthest or source.gives_back() or source.slice_findings(later, known):
        return None
    if not all(txn.retry or source.continues(known, txn) for txn in later):
        return None
    return upto, furthest


def chain_of(first: int, basis: Basis | None, ends: tuple[int, tuple[int, ...]] | None, *, continues: bool) -> Chain:
    """What the next check may build on. `continues`: this one looked at what came behind the basis only."""
    joined = basis is not None and first <= basis.settled_upto + 1 and basis.chain_from < first
    chain_from = basis.chain_from if joined and basis is not None else first
    number = basis.id if continues and basis is not None else None
    if ends is None or (continues and basis is not None and ends[0] < basis.settled_upto):
        if not continues or basis is None:
            return Chain(number, chain_from)
        return Chain(number, chain_from, basis.settled_upto, basis.furthest)  # the next one looks at the same again
    return Chain(number, chain_from, *ends)
