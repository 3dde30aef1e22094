"""The record of a report: a topology's time or txids, the verdict, the answers to the twelve questions, and their limits.

All of the ledger's answers are of one instant. No payload and no text of an error is in it, since an error may quote a
payload: errors are told by their class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.message import message
from stormproof.trident.audit.report import VerifyReport
from stormproof.trident.audit_report import summaries
from stormproof.trident.audit_report.answers import NUMBERS, answers, history
from stormproof.trident.audit_report.plain import Wanted, digest_of, plain
from stormproof.trident.audit_report.verdict import kept_verdict, not_looked_at, verdict
from stormproof.trident.ledger.graphs import Graph
from stormproof.trident.transaction_states import EventKind

FORMAT: Final = 2

Verifier = Callable[[int, int | None], VerifyReport]
"""Runs `audit verify` over txids from the first to the last."""


def record(
    ledger: AuditLedger, wanted: Wanted, verifier: Verifier, *, now: datetime, by: str, version: str
) -> dict[str, Json]:
    """The record; the same ledger at the same instant gives the same.

    Raises:
        UsageError: no such topology, message or verdict.
        StoreUnavailable: the ledger's database does not answer.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(wanted.topology)
        scope = summaries.scope_of(row.incarnation, wanted.since, wanted.until)
        totals = summaries.totals(snapshot, scope)
        kept, checked = kept_verdict(snapshot, wanted), None
    if kept is None and totals["batches"]:
        first, last = totals["first"], totals["last"]
        assert isinstance(first, int)
        assert isinstance(last, int)
        whole = wanted.since is None and wanted.until is None
        checked = verifier(1 if whole else first, None if whole else last)
    histories: list[Json] = [history(message(ledger, wanted.topology, one)) for one in wanted.messages]
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(wanted.topology)
        totals = summaries.totals(snapshot, scope)
        questions, left_out = answers(snapshot, wanted, row, scope)
        questions[NUMBERS["message"] - 1]["histories"] = histories
        told: dict[str, Json] = {
            "about": "stormproof audit report",
            "format": FORMAT,
            "made_at": plain(now),
            "made_by": plain(by),
            "stormproof": version,
            "scope": {
                "topology": plain(row.name),
                "incarnation": plain(row.incarnation),
                "since": plain(wanted.since),
                "until": plain(wanted.until),
                "rows_of_each_list": wanted.rows,
                "pruned_upto": snapshot.pruned_upto(row.incarnation),
                **totals,
            },
            "topology": plain({k: v for k, v in _fields(row).items() if k not in ("driver_started",)}),
            "graphs": _graphs(snapshot, row),
            "sinks": [_sink(one) for one in snapshot.sinks(row.incarnation)],
            "driver_lives": plain(summaries.lives(snapshot, scope)),
            "driver_events": _driver_events(snapshot, row, wanted),
            "verdict": verdict(kept, checked, totals),
            "questions": [{**one, "sha256": digest_of(one)} for one in questions],
            "digest": summaries.digest(snapshot, scope),
        }
    told["not_looked_at"] = not_looked_at(wanted, told, kept, checked, left_out)
    return told


def _fields(row: TopologyRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _sink(one: Any) -> Json:
    return plain({"sink": one.sink, "table": one.target, "table_id": one.table_id, "first_at": one.first_at})


def _graphs(snapshot: LedgerSnapshot, row: TopologyRow) -> list[Json]:
    """The shapes that it had; the newest with its components, and the sinks' columns."""
    found = snapshot.connection.execute(
        sa.text(
            "select epoch, after_txid, at, description from stormproof.graph where incarnation = :incarnation order by epoch"
        ),
        {"incarnation": row.incarnation},
    ).all()
    graphs: list[Json] = []
    for number, one in enumerate(found):
        graph = Graph(one.description)
        shape: dict[str, Json] = {
            "epoch": one.epoch,
            "after_txid": one.after_txid,
            "at": plain(one.at),
            "fingerprint": graph.fingerprint,
        }
        if number == len(found) - 1:
            shape["description"] = plain(one.description)
        graphs.append(shape)
    return graphs


def _driver_events(snapshot: LedgerSnapshot, row: TopologyRow, wanted: Wanted) -> Json:
    """Take-overs, recoveries and refused starts in the time, the newest; with numbers in place of lists."""
    kinds = [EventKind.TAKE_OVER.value, EventKind.RECOVERY.value, EventKind.START_REFUSED.value, EventKind.GRAPH.value]
    found = snapshot.connection.execute(
        sa.text(
            "select at, kind, sink, detail from stormproof.event where incarnation = :incarnation and kind = any(:kinds)"
            " and (:since is null or at >= :since) and (:until is null or at < :until) order by id desc limit :rows"
        ).bindparams(
            sa.bindparam("since", type_=sa.DateTime(timezone=True)),
            sa.bindparam("until", type_=sa.DateTime(timezone=True)),
        ),
        {
            "incarnation": row.incarnation,
            "kinds": kinds,
            "since": wanted.since,
            "until": wanted.until,
            "rows": wanted.rows,
        },
    )
    return [
        plain({"at": one.at, "what": one.kind, "sink": one.sink, "did": _numbers(one.detail or {})}) for one in found
    ]


def _numbers(detail: Mapping[str, Any]) -> dict[str, Any]:
    """What a driver's event says, with the length of each list; nothing that is empty."""
    counted = {key: len(value) if isinstance(value, list) else value for key, value in detail.items()}
    return {key: value for key, value in counted.items() if value and not isinstance(value, dict)}
