"""The answers of a report to the twelve questions: rows, counts, and how many rows a list left out.

No payload and no text of an error is in them, since an error may quote a payload: errors are told by their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Final

import sqlalchemy as sa

from stormproof.core.errors import Json
from stormproof.trident.audit.ledger import LedgerSnapshot, TopologyRow
from stormproof.trident.audit.message import MessageReport
from stormproof.trident.audit.questions import Asked, answered
from stormproof.trident.audit_report import summaries
from stormproof.trident.audit_report.plain import Wanted, plain
from stormproof.trident.audit_report.summaries import Scope
from stormproof.trident.declarations.questions import QUESTIONS, Question

NUMBERS: Final[Mapping[str, int]] = {name: number for number, name in enumerate(QUESTIONS, 1)}
"""The twelve questions by their commands."""
NOW: Final = frozenset(one.name for one in QUESTIONS.values() if one.order and not one.time)
"""Questions whose answers are of the instant of the report, whatever its time."""


def answers(
    snapshot: LedgerSnapshot, wanted: Wanted, row: TopologyRow, scope: Scope
) -> tuple[list[dict[str, Json]], dict[str, int]]:
    """The twelve answers in their order, and how many rows each left out, by command."""
    found: list[dict[str, Json]] = []
    left_out: dict[str, int] = {}
    for command, question in QUESTIONS.items():
        one: dict[str, Json] = {
            "number": NUMBERS[command],
            "question": question.asks,
            "command": question.command,
            "view": question.view,
        }
        match command:
            case "message":
                one["entries"] = _entries(snapshot, wanted)
            case "txn":
                rows, more = summaries.of_note(snapshot, row.name, scope, wanted.rows)
                left_out[command] = more
                one |= {
                    "by_state": plain(summaries.by_state(snapshot, scope)),
                    "by_sink": plain(summaries.by_sink(snapshot, scope)),
                    "by_step": plain(summaries.by_step(snapshot, scope)),
                    "by_day": plain(summaries.by_day(snapshot, scope)),
                    "rows": plain(rows),
                    "left_out": more,
                    "rows_are": "batches that did not simply commit at their first attempt, the newest first",
                }
            case _:
                left_out[command] = _answer(snapshot, wanted, question, one)
        found.append(one)
    if wanted.payload_digests:
        found[NUMBERS["dead-letters"] - 1]["payloads"] = _payload_digests(snapshot, row, wanted.rows)
    return found, left_out


def _answer(snapshot: LedgerSnapshot, wanted: Wanted, question: Question, one: dict[str, Json]) -> int:
    timed = question.name not in NOW
    asked = Asked(
        wanted.topology,
        since=wanted.since if timed else None,
        until=wanted.until if timed else None,
        limit=wanted.rows,
    )
    answer = answered(snapshot, question, asked)
    rows = [{key: value for key, value in row.items() if key not in ("topology", "reason_text")} for row in answer.rows]
    if question.name == "aborted":
        rows = [{key: value for key, value in row.items() if key != "reason"} for row in rows]
    one |= {
        "of": "the report's time" if timed else "the instant of the report",
        "number_of_rows": len(answer.rows) + answer.left_out,
        "rows": plain(rows),
        "left_out": answer.left_out,
        "counts": [
            {
                "by": list(by),
                "rows": plain(answered(snapshot, question, replace(asked, group=by)).rows),
            }
            for by in question.counts
        ],
    }
    return answer.left_out


def _entries(snapshot: LedgerSnapshot, wanted: Wanted) -> Json:
    found = snapshot.connection.execute(
        sa.text(
            "select what, count(*) as entries, count(distinct message) as messages from stormproof.audit_message"
            " where topology = :topology and (:since is null or at >= :since) and (:until is null or at < :until)"
            " group by 1 order by 1"
        ).bindparams(
            sa.bindparam("since", type_=sa.DateTime(timezone=True)),
            sa.bindparam("until", type_=sa.DateTime(timezone=True)),
        ),
        {"topology": wanted.topology, "since": wanted.since, "until": wanted.until},
    ).mappings()
    return plain([dict(row) for row in found])


def _payload_digests(snapshot: LedgerSnapshot, row: TopologyRow, most: int) -> Json:
    """The SHA-256 and length of the payloads of dead letters and rejects, the newest."""
    found = snapshot.connection.execute(
        sa.text(
            "select 'dead_letter' as what, s.origin || '-' || s.id as message, s.dead_at as at, s.payload"
            " from stormproof.dead_letter s where s.subscription in (:incarnation, :name)"
            " or starts_with(s.subscription, :incarnation || ':')"
            " union all select 'reject', r.message, r.at, r.payload from stormproof.reject r"
            " where r.incarnation = :incarnation and r.payload is not null order by at desc limit :most"
        ),
        {"incarnation": row.incarnation, "name": row.name, "most": most},
    )
    return [
        plain(
            {
                "what": one.what,
                "message": one.message,
                "sha256": sha256(bytes(one.payload)).hexdigest(),
                "bytes": len(one.payload),
            }
        )
        for one in found
    ]


def history(found: MessageReport) -> Json:
    """One message: without the texts of its errors, and without its payload."""
    return plain(
        {
            "message": found.message,
            "server_id": found.server_id,
            "end": found.end,
            "openings": found.openings,
            "failures": [
                {"txid": f.txid, "attempt": f.attempt, "at": f.at, "reason": f.reason, "component": f.component}
                for f in (*found.failures, *found.returned)
            ],
            "rejects": [
                {"txid": r.txid, "sink": r.sink, "reason": r.reason, "rows": r.rows, "state": r.state, "at": r.at}
                for r in found.rejects
            ],
            "decisions": found.operator,
            "rows_in": found.stored_in,
            "in_source": found.in_source,
        }
    )
