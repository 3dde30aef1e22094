"""The record of a report: a topology's time or txids, the verdict, the answers to the twelve questions, and their limits.

All of the ledger's answers are of one instant. No payload and no text of an error is in it, since an error may quote a
payload: errors are told by their class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.message import MessageReport, message
from stormproof.trident.audit.questions import Asked, Question, answered
from stormproof.trident.audit.report import NoticeKind, VerifyReport
from stormproof.trident.audit_report import summaries
from stormproof.trident.audit_report.page import RENDERER
from stormproof.trident.audit_report.plain import plain
from stormproof.trident.audit_report.summaries import Scope
from stormproof.trident.ledger.graphs import Graph
from stormproof.trident.transaction_states import EventKind

FORMAT: Final = 1
ROWS: Final = 200
"""Rows of each list that a report has unless another number is asked for."""

Verifier = Callable[[int, int | None], VerifyReport]
"""Runs `audit verify` over txids from the first to the last."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report is to be of."""

    topology: str
    since: datetime | None = None
    until: datetime | None = None
    rows: int = ROWS
    messages: tuple[str, ...] = ()
    """Messages whose whole history it has."""
    verdict: int | None = None
    """The number of a verdict that was kept; None: the verification is run."""
    payload_digests: bool = False
    """Whether dead letters and rejects have the SHA-256 of their payloads. A short payload can be guessed from it."""


@dataclass(frozen=True, slots=True)
class _Group:
    question: Question
    by: tuple[str, ...]


NUMBERS: Final[Mapping[str, int]] = {
    "replays": 1,
    "message": 2,
    "txn": 3,
    "duplicates": 4,
    "pending": 5,
    "dead-letters": 6,
    "attempts": 7,
    "recovered": 8,
    "behind": 9,
    "aborted": 10,
    "actions": 11,
    "verdicts": 12,
}
"""The twelve questions by their commands."""
WORDS: Final[Mapping[str, str]] = {
    "replays": "What was replayed: why, where, when",
    "message": "The whole history of a message",
    "txn": "What each batch read, wrote and replayed, and how long each step took",
    "duplicates": "Duplicates that were suppressed, with the evidence",
    "pending": "What is pending, since when, and what waits",
    "dead-letters": "Dead letters and rejects by class of error",
    "attempts": "How often messages failed, and batches were tried",
    "recovered": "Messages that failed before they succeeded",
    "behind": "Sinks that are behind, and by how much",
    "aborted": "Batches that were aborted, abandoned or blocked, and why",
    "actions": "Every action of an operator",
    "verdicts": "The verdicts on record",
}
GROUPS: Final[Mapping[Question, tuple[tuple[str, ...], ...]]] = {
    Question.REPLAYS: (("what", "reason", "component"), ("day",)),
    Question.DUPLICATES: (("what", "sink"),),
    Question.DEAD_LETTERS: (("what", "error_class", "sink", "state"),),
    Question.ABORTED: (("what", "sink"),),
}
"""By what the answers are counted, beside their rows."""
NOW: Final = frozenset({Question.PENDING, Question.ATTEMPTS, Question.BEHIND})
"""Questions whose answers are of the instant of the report, whatever its time."""
TITLES: Final = ("replays", "message", "txn", *list(NUMBERS)[3:])


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
        verdict, checked = _kept_verdict(snapshot, wanted), None
    if verdict is None and totals["batches"]:
        first, last = totals["first"], totals["last"]
        assert isinstance(first, int)
        assert isinstance(last, int)
        whole = wanted.since is None and wanted.until is None
        checked = verifier(1 if whole else first, None if whole else last)
    histories: list[Json] = [_history(message(ledger, wanted.topology, one)) for one in wanted.messages]
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(wanted.topology)
        totals = summaries.totals(snapshot, scope)
        questions, left_out = _questions(snapshot, wanted, row, scope)
        questions[NUMBERS["message"] - 1]["histories"] = histories
        told: dict[str, Json] = {
            "about": "stormproof audit report",
            "format": FORMAT,
            "renderer": RENDERER,
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
            "verdict": _verdict(verdict, checked, totals),
            "questions": list[Json](questions),
            "digest": summaries.digest(snapshot, scope),
        }
    told["not_looked_at"] = _not_looked_at(wanted, told, verdict, checked, left_out)
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


def _kept_verdict(snapshot: LedgerSnapshot, wanted: Wanted) -> dict[str, Any] | None:
    if wanted.verdict is None:
        return None
    asked = Asked(wanted.topology, limit=1)
    found = snapshot.connection.execute(
        sa.text(f"select * from {Question.VERDICTS.view} where topology = :topology and id = :id"),
        {"topology": asked.topology, "id": wanted.verdict},
    ).mappings()
    row = found.one_or_none()
    if row is None:
        raise UsageError(
            f"topology {wanted.topology!r} has no verdict {wanted.verdict} on record; see: stormproof audit verdicts "
            f"{wanted.topology}",
            topology=wanted.topology,
        )
    return dict(row)


def _verdict(kept: Mapping[str, Any] | None, checked: VerifyReport | None, totals: Mapping[str, Any]) -> Json:
    if kept is not None:
        uncovered = _not_covered(kept, totals)
        # A clean verdict on a part of the batches is none on all of them.
        so = "cannot_tell" if uncovered and kept["verdict"] == "clean" else kept["verdict"]
        return plain({"from": "record", **kept, "verdict": so, "as_kept": kept["verdict"], "did_not_cover": uncovered})
    if checked is None:
        return {"from": "nothing", "verdict": "cannot_tell", "why": "no batch was opened in the time of this report"}
    # A blocked batch's notice quotes its reason, which may quote a value.
    notices = [
        replace(one, text=f"txid {one.txid} is blocked") if one.kind is NoticeKind.BLOCKED else one
        for one in checked.notices
    ]
    return plain(
        {
            "from": "verification",
            "verdict": checked.verdict,
            "first_txid": checked.first,
            "last_txid": checked.last,
            "pruned_upto": checked.pruned_upto,
            "recorded": checked.recorded,
            "not_recorded": checked.not_recorded,
            "checked": checked.checked,
            "proves": checked.proves,
            "violations": checked.violations,
            "unknowns": checked.unknowns,
            "notices": notices,
        }
    )


def _questions(
    snapshot: LedgerSnapshot, wanted: Wanted, row: TopologyRow, scope: Scope
) -> tuple[list[dict[str, Json]], dict[str, int]]:
    found: list[dict[str, Json]] = []
    left_out: dict[str, int] = {}
    for command, number in NUMBERS.items():
        one: dict[str, Json] = {"number": number, "question": WORDS[command], "command": f"stormproof audit {command}"}
        match command:
            case "message":
                one["view"] = "stormproof.audit_message"
                one["entries"] = _entries(snapshot, wanted)
            case "txn":
                rows, more = summaries.of_note(snapshot, row.name, scope, wanted.rows)
                left_out[command] = more
                one |= {
                    "view": "stormproof.audit_txn",
                    "by_state": plain(summaries.by_state(snapshot, scope)),
                    "by_sink": plain(summaries.by_sink(snapshot, scope)),
                    "by_step": plain(summaries.by_step(snapshot, scope)),
                    "by_day": plain(summaries.by_day(snapshot, scope)),
                    "rows": plain(rows),
                    "left_out": more,
                    "rows_are": "batches that did not simply commit at their first attempt, the newest first",
                }
            case _:
                left_out[command] = _answer(snapshot, wanted, Question(command), one)
        found.append(one)
    if wanted.payload_digests:
        found[NUMBERS["dead-letters"] - 1]["payloads"] = _payload_digests(snapshot, row, wanted.rows)
    return found, left_out


def _answer(snapshot: LedgerSnapshot, wanted: Wanted, question: Question, one: dict[str, Json]) -> int:
    timed = question not in NOW
    asked = Asked(
        wanted.topology,
        since=wanted.since if timed else None,
        until=wanted.until if timed else None,
        limit=wanted.rows,
    )
    answer = answered(snapshot, question, asked)
    rows = [{key: value for key, value in row.items() if key not in ("topology", "reason_text")} for row in answer.rows]
    if question is Question.ABORTED:
        rows = [{key: value for key, value in row.items() if key != "reason"} for row in rows]
    one |= {
        "view": question.view,
        "of": "the report's time" if timed else "the instant of the report",
        "number_of_rows": len(answer.rows) + answer.left_out,
        "rows": plain(rows),
        "left_out": answer.left_out,
        "counts": [
            {
                "by": list(by),
                "rows": plain(answered(snapshot, question, replace(asked, group=by)).rows),
            }
            for by in GROUPS.get(question, ())
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


def _history(found: MessageReport) -> Json:
    """One message: without the texts of its errors, and without its payload."""
    return plain(
        {
            "message": found.message,
            "end": found.end,
            "openings": found.openings,
            "failures": [
                {"txid": f.txid, "attempt": f.attempt, "at": f.at, "reason": f.reason, "component": f.component}
                for f in (*found.failures, *found.returned)
            ],
            "decisions": found.operator,
            "rows_in": found.stored_in,
            "in_source": found.in_source,
        }
    )


def _not_looked_at(
    wanted: Wanted,
    told: Mapping[str, Any],
    kept: Mapping[str, Any] | None,
    checked: VerifyReport | None,
    left_out: Mapping[str, int],
) -> list[Json]:
    """Everything that a reader might take for said, and is not."""
    scope = told["scope"]
    found: list[Json] = [
        "Payloads, and the texts of errors, which may quote them: errors are told by their class.",
        "Messages that succeeded at their first attempt, one by one: they have no row of their own in the ledger.",
    ]
    if scope["pruned_upto"]:
        found.append(
            f"Batches up to txid {scope['pruned_upto']}: they were pruned, and what is left of them is no whole record."
        )
    if kept is not None:
        found.append(
            f"The tables, at the time of this report: the verdict is number {kept['id']} on record, of {plain(kept['at'])}."
        )
        found += _not_covered(kept, scope)
    elif checked is None:
        found.append("Ledger, sinks and source against each other: no batch was opened in the time of this report.")
    else:
        found.append(f"What the verdict does not prove. It proves: {checked.proves}")
        found += [f"Cannot be told: {one.text}" for one in checked.unknowns]
    if wanted.since is not None or wanted.until is not None:
        names = ", ".join(str(number) for number in sorted(NUMBERS[one.value] for one in NOW))
        found.append(f"The report's time, in the answers to questions {names}: these are of the instant of the report.")
    for command, number in left_out.items():
        if number:
            found.append(
                f"{number} rows of question {NUMBERS[command]} ({command}), which has the newest {wanted.rows}."
            )
    if not wanted.messages:
        found.append("The histories of single messages: none was asked for (--message ID).")
    return found


def _not_covered(kept: Mapping[str, Any], scope: Mapping[str, Any]) -> list[Json]:
    """Batches of the report's time that a verdict on record did not look at."""
    first, last = scope["first"], scope["last"]
    if first is None:
        return []
    upto = kept["last_txid"] or 0
    found: list[Json] = []
    if kept["first_txid"] > first:
        found.append(f"Txids {first} to {min(kept['first_txid'] - 1, last)}: that verdict began behind them.")
    if upto < last:
        found.append(f"Txids {max(upto + 1, first)} to {last}: that verdict ended before them.")
    return found
