"""The record of a report: a topology's time or txids, the verdict, the answers to the questions, and their limits.

All of the ledger's answers are of one instant, and each says how many rows its list left out. No payload and no text of an
error is in it, since an error may quote a payload: errors are told by their class. What the batches of a time come to is
worked out by the database: the report stays small however many there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import Json
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.message import MessageReport, message
from stormproof.trident.audit.questions import QuestionFilter, answered
from stormproof.trident.audit.report import NoticeKind, VerifyReport
from stormproof.trident.declarations.questions import QUESTIONS, Question
from stormproof.trident.ledger.graphs import Graph
from stormproof.trident.terms.transaction_states import EventKind

TEXT_MAX: Final = 1_000
"""Characters of one text that a report has."""
_WHOLE_MAX: Final = 2**53 - 1


def plain(value: Any) -> Json:
    """A value as JSON: times in ISO 8601 and UTC, numbers beyond 2^53 as text, long texts cut with their length said."""
    match value:
        case None | bool():
            return value
        case Enum():
            return plain(value.value)
        case str():
            return value if len(value) <= TEXT_MAX else f"{value[:TEXT_MAX]} [cut: {len(value)} characters]"
        case int():
            return value if abs(value) <= _WHOLE_MAX else str(value)
        case Decimal():
            return plain(int(value)) if value == value.to_integral_value() else plain(float(value))
        case float():
            return round(value, 3)
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="milliseconds")
        case date():
            return value.isoformat()
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case Mapping():
            return {str(key): plain(one) for key, one in value.items()}
        case Iterable() if not isinstance(value, bytes):
            return [plain(one) for one in value]
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a report")


def file_bytes(told: Json) -> bytes:
    """A report as it stands in its file: JSON for people and programs, always the same bytes of the same report.

    All is ASCII: a stranger's text (a name, a reason) does nothing to the terminal or the editor that shows it.
    """
    return json.dumps(told, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def digest_of(answer: Json) -> str:
    """SHA-256 of an answer, in hex: of its JSON without spaces, keys in order, in ASCII."""
    text = json.dumps(answer, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


ROWS: Final = 200
"""Rows of each list that a report has unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report is to be of."""

    topology: str
    since: datetime | None = None
    until: datetime | None = None
    rows: int = ROWS
    messages: tuple[str, ...] = ()
    """Messages whose whole history it has."""


DAYS_MAX: Final = 400
LIVES_MAX: Final = 200
STEPS: Final = ("open", "job", "wait", "prepare", "commit", "finish", "total")
DIGEST_OF: Final = (
    "SHA-256 over one line a batch, in txid order: txid, state, messages, failed, returned, rejected; then one line a sink "
    "of it, by name: txid, sink, the txid before, rows, digest of its content, outcome"
)

Scope = Mapping[str, Any]
_WITHIN: Final = (
    "x.incarnation = :incarnation and (:since is null or x.opened_at >= :since)"
    " and (:until is null or x.opened_at < :until)"
)
_TIMES: Final = {"since": sa.DateTime(timezone=True), "until": sa.DateTime(timezone=True)}


def scope_of(incarnation: str, since: datetime | None, until: datetime | None) -> Scope:
    """The batches of a topology that were opened from `since` on and before `until`."""
    return {"incarnation": incarnation, "since": since, "until": until}


def _rows(snapshot: LedgerSnapshot, sql: str, scope: Scope, **more: Any) -> list[dict[str, Json]]:
    statement = sa.text(sql).bindparams(*(sa.bindparam(name, type_=type_) for name, type_ in _TIMES.items()))
    found = snapshot.connection.execute(statement, {**scope, **more}).mappings()
    return [{key: plain(value) for key, value in row.items()} for row in found]


def totals_of(snapshot: LedgerSnapshot, scope: Scope) -> dict[str, Json]:
    """All batches as one row; `first` and `last` are None where there is none."""
    (row,) = _rows(
        snapshot,
        "select count(*) as batches, min(txid) as first, max(txid) as last, min(opened_at) as opened_first,"
        " max(opened_at) as opened_last, coalesce(sum(messages), 0) as messages, coalesce(sum(failed), 0) as failed,"
        " coalesce(sum(returned), 0) as returned, coalesce(sum(rejected), 0) as rejected,"
        f" coalesce(sum(tuples), 0) as tuples, coalesce(sum(bytes), 0) as bytes from stormproof.txn x where {_WITHIN}",
        scope,
    )
    return row


_STEPS_MS: Final = ", ".join(f"('{step}', cast(x.steps_ms ->> '{step}' as double precision))" for step in STEPS)
SUMS: Final = {
    # The batches by state, cause and guarantee.
    "by_state": "select state, cause, guarantee, count(*) as batches, sum(messages) as messages, sum(failed) as failed,"
    f" min(txid) as first, max(txid) as last from stormproof.txn x where {_WITHIN} group by 1, 2, 3 order by 1, 2, 3",
    # What the batches wrote to each sink, and how that ended.
    "by_sink": "select k.sink, k.outcome, count(*) as batches, sum(k.rows) as rows, sum(k.bytes) as bytes,"
    " sum(k.superseded) as superseded, min(k.txid) as first, max(k.txid) as last, min(k.version) as first_version,"
    " max(k.version) as last_version from stormproof.txn x join stormproof.txn_sink k"
    f" on k.incarnation = x.incarnation and k.txid = x.txid where {_WITHIN} group by 1, 2 order by 1, 2",
    # How long each step took, in milliseconds: of the batches of which that is on record.
    "by_step": "select s.step, count(s.ms) as batches, percentile_cont(0.5) within group (order by s.ms) as half_within,"
    " percentile_cont(0.9) within group (order by s.ms) as nine_in_ten_within, max(s.ms) as longest"
    f" from stormproof.txn x cross join lateral (values {_STEPS_MS}) s (step, ms) where {_WITHIN} and s.ms is not null"
    " group by 1 order by 3 desc",
    # The batches by day (UTC), the newest days first.
    "by_day": "select cast((opened_at at time zone 'UTC') as date) as day, count(*) as batches,"
    " count(*) filter (where state = 'committed') as committed, sum(messages) as messages, sum(failed) as failed,"
    f" sum(rejected) as rejected from stormproof.txn x where {_WITHIN} group by 1 order by 1 desc limit {DAYS_MAX}",
}
"""Sums over the batches of a report's time."""


def lives(snapshot: LedgerSnapshot, scope: Scope) -> list[dict[str, Json]]:
    """The runs of the driver that opened batches, the newest first."""
    return _rows(
        snapshot,
        "select epoch, count(*) as batches, min(txid) as first, max(txid) as last, min(opened_at) as opened_first,"
        " max(opened_at) as opened_last, count(*) filter (where state = 'committed') as committed,"
        " count(*) filter (where state in ('aborted', 'abandoned')) as given_back"
        f" from stormproof.txn x where {_WITHIN} group by 1 order by 1 desc limit :most",
        scope,
        most=LIVES_MAX,
    )


def of_note(snapshot: LedgerSnapshot, topology: str, scope: Scope, most: int) -> tuple[list[dict[str, Json]], int]:
    """The newest batches that did not simply commit at their first attempt, from `audit_txn`; and how many are left out."""
    condition = (
        f"from stormproof.txn x where {_WITHIN} and (x.state <> 'committed' or x.attempt > 1 or x.failed > 0"
        " or x.returned > 0 or x.rejected > 0 or x.retry)"
    )
    (counted,) = _rows(snapshot, f"select count(*) as number {condition}", scope)
    rows = _rows(
        snapshot,
        "select v.* from stormproof.audit_txn v where v.topology = :topology and v.txid = any(array("
        f"select x.txid {condition} order by x.txid desc limit :most)) order by v.txid desc",
        scope,
        topology=topology,
        most=most,
    )
    number = counted["number"]
    assert isinstance(number, int)
    return rows, number - len(rows)


def digest(snapshot: LedgerSnapshot, scope: Scope) -> dict[str, Json]:
    """One digest of all batches and of what they wrote: two reports of one time must have the same, if all had ended."""
    hasher = hashlib.sha256()
    lines = sa.text(
        "select line from ("
        " select x.txid, '' as sink, concat_ws(' ', x.txid, x.state, x.messages, x.failed, x.returned, x.rejected) as line"
        f" from stormproof.txn x where {_WITHIN} union all"
        " select x.txid, k.sink, concat_ws(' ', x.txid, k.sink, coalesce(cast(k.previous as text), '-'), k.rows, k.digest,"
        " coalesce(k.outcome, '-')) from stormproof.txn x join stormproof.txn_sink k"
        f" on k.incarnation = x.incarnation and k.txid = x.txid where {_WITHIN}"
        ') l order by txid, sink collate "C"'
    ).bindparams(*(sa.bindparam(name, type_=type_) for name, type_ in _TIMES.items()))
    number = 0
    with snapshot.connection.execution_options(stream_results=True, yield_per=10_000).execute(
        lines, dict(scope)
    ) as found:
        for part in found.scalars().partitions():
            number += len(part)
            hasher.update("".join(f"{line}\n" for line in part).encode())
    return {"sha256": hasher.hexdigest(), "lines": number, "of": DIGEST_OF}


NUMBERS: Final[Mapping[str, int]] = {name: number for number, name in enumerate(QUESTIONS, 1)}
"""The questions by their commands."""
NOW: Final = frozenset(one.name for one in QUESTIONS.values() if one.order and not one.time)
"""Questions whose answers are of the instant of the report, whatever its time."""


def answers(
    snapshot: LedgerSnapshot, wanted: Wanted, row: TopologyRow, scope: Scope
) -> tuple[list[dict[str, Json]], dict[str, int]]:
    """The answers in their order, and how many rows each left out, by command."""
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
                one["entries"] = _entries(snapshot, row.name, scope)
            case "txn":
                rows, more = of_note(snapshot, row.name, scope, wanted.rows)
                left_out[command] = more
                one |= {
                    **{name: [*_rows(snapshot, sql, scope)] for name, sql in SUMS.items()},
                    "rows": plain(rows),
                    "left_out": more,
                    "rows_are": "batches that did not simply commit at their first attempt, the newest first",
                }
            case _:
                left_out[command] = _answer(snapshot, wanted, question, one)
        found.append(one)
    return found, left_out


def _answer(snapshot: LedgerSnapshot, wanted: Wanted, question: Question, one: dict[str, Json]) -> int:
    timed = question.name not in NOW
    asked = QuestionFilter(
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


def _entries(snapshot: LedgerSnapshot, topology: str, scope: Scope) -> list[Json]:
    return [
        *_rows(
            snapshot,
            "select what, count(*) as entries, count(distinct message) as messages from stormproof.audit_message"
            " where topology = :topology and (:since is null or at >= :since) and (:until is null or at < :until)"
            " group by 1 order by 1",
            scope,
            topology=topology,
        )
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


_OF_VERDICT: Final = ("verdict", "reach", "pruned_upto", "recorded", "not_recorded", "checked", "deep", "proves")


def verdict(checked: VerifyReport | None) -> Json:
    """What the verification says; where no batch is to be verified, "cannot_tell"."""
    if checked is None:
        return {"from": "nothing", "verdict": "cannot_tell", "why": "no batch was opened in the time of this report"}
    # A blocked batch's notice quotes its reason, which may quote a value.
    notices = [
        replace(one, text=f"txid {one.txid} is blocked") if one.kind is NoticeKind.BLOCKED else one
        for one in checked.notices
    ]
    return plain(
        {
            **{name: getattr(checked, name) for name in _OF_VERDICT},
            "from": "verification",
            "first_txid": checked.first,
            "last_txid": checked.last,
            "tables": checked.tables if checked.deep else None,
            "violations": checked.violations,
            "unknowns": checked.unknowns,
            "notices": notices,
        }
    )


_NOT_COMPARED: Final = (NoticeKind.NOT_COMPARED, NoticeKind.SUPERSEDED_NOT_COMPARED)


def not_looked_at(
    wanted: Wanted,
    told: Mapping[str, Any],
    checked: VerifyReport | None,
    left_out: Mapping[str, int],
) -> list[Json]:
    """Each limit as a sentence."""
    scope = told["scope"]
    found: list[Json] = [
        "Payloads, and the texts of errors, which may quote them: errors are told by their class.",
        "Messages that succeeded at their first attempt, one by one: they have no row of their own in the ledger.",
    ]
    if scope["pruned_upto"]:
        found.append(
            f"Batches up to txid {scope['pruned_upto']}: they were pruned, and what is left of them is no whole record."
        )
    if checked is None:
        found.append("Ledger, sinks and source against each other: no batch was opened in the time of this report.")
    else:
        found.append(f"What the verdict does not prove. It proves: {checked.proves}")
        found += [f"Cannot be told: {one.text}" for one in checked.unknowns]
        if not checked.deep:
            found.append(
                "The rows of the sinks' tables: the verdict is of the sinks' own records alone (--deep reads them)."
            )
        found += [f"Rows of tables: {one.text}" for one in checked.notices if one.kind in _NOT_COMPARED]
    if wanted.since is not None or wanted.until is not None:
        names = ", ".join(str(number) for number in sorted(NUMBERS[one] for one in NOW))
        found.append(f"The report's time, in the answers to questions {names}: these are of the instant of the report.")
    for command, number in left_out.items():
        if number:
            found.append(
                f"{number} rows of question {NUMBERS[command]} ({command}), which has the newest {wanted.rows}."
            )
    if not wanted.messages:
        found.append("The histories of single messages: none was asked for (--message ID).")
    return found


FORMAT: Final = 2

Verifier = Callable[[int, int | None], VerifyReport]
"""Runs `audit verify` over txids from the first to the last."""


def record(
    ledger: AuditLedger, wanted: Wanted, verifier: Verifier, *, now: datetime, by: str, version: str
) -> dict[str, Json]:
    """The record; the same ledger at the same instant gives the same.

    Raises:
        UsageError: no such topology or message.
        StoreUnavailable: the ledger's database does not answer.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(wanted.topology)
        scope = scope_of(row.incarnation, wanted.since, wanted.until)
        totals = totals_of(snapshot, scope)
    checked = None
    if totals["batches"]:
        first, last = totals["first"], totals["last"]
        assert isinstance(first, int)
        assert isinstance(last, int)
        whole = wanted.since is None and wanted.until is None
        checked = verifier(1 if whole else first, None if whole else last)
    histories: list[Json] = [history(message(ledger, wanted.topology, one)) for one in wanted.messages]
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(wanted.topology)
        totals = totals_of(snapshot, scope)
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
            "driver_lives": plain(lives(snapshot, scope)),
            "driver_events": _driver_events(snapshot, scope, wanted.rows),
            "verdict": verdict(checked),
            "questions": [{**one, "sha256": digest_of(one)} for one in questions],
            "digest": digest(snapshot, scope),
        }
    told["not_looked_at"] = not_looked_at(wanted, told, checked, left_out)
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


def _driver_events(snapshot: LedgerSnapshot, scope: Scope, most: int) -> list[Json]:
    """Take-overs, recoveries and refused starts in the time, the newest; with numbers in place of lists."""
    kinds = [EventKind.TAKE_OVER.value, EventKind.RECOVERY.value, EventKind.START_REFUSED.value, EventKind.GRAPH.value]
    found = _rows(
        snapshot,
        "select at, kind as what, sink, detail as did from stormproof.event where incarnation = :incarnation"
        " and kind = any(:kinds) and (:since is null or at >= :since) and (:until is null or at < :until)"
        " order by id desc limit :most",
        scope,
        kinds=kinds,
        most=most,
    )
    return [{**one, "did": _numbers(one["did"])} for one in found]


def _numbers(detail: Json) -> Json:
    """What a driver's event says, with the length of each list; nothing that is empty."""
    said = detail if isinstance(detail, dict) else {}
    counted = {key: len(value) if isinstance(value, list) else value for key, value in said.items()}
    return {key: value for key, value in counted.items() if value and not isinstance(value, dict)}
