"""The answers to the audit's questions by their views: filters, groups, and how much of the answer is shown.

The views are those of `migrations/views.sql`, `stormproof.audit_*`; any SQL program may read them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.base.errors import UsageError
from stormproof.trident.audit.inspect import Has, SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot
from stormproof.trident.audit.source import recorded_ids, server_ids, spout_sources, stored_source
from stormproof.trident.audit.status import holdings_of
from stormproof.trident.declarations.questions import FILTERS, SPANS, Question
from stormproof.trident.terms.transaction_states import TxnState

LIMIT: Final = 100
"""Rows that an answer has unless more are asked for."""


_ALL: Final = "number_of_all_rows"


@dataclass(frozen=True, slots=True)
class QuestionFilter:
    """What is asked for; None: of all. Times are from `since` on and before `until`."""

    topology: str | None = None
    txid: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    what: str | None = None
    source: str | None = None
    sink: str | None = None
    message: str | None = None
    reason: str | None = None
    component: str | None = None
    error_class: str | None = None
    state: str | None = None
    group: tuple[str, ...] = ()
    """Count by these columns, or by minute, hour or day, in place of rows."""
    limit: int = LIMIT


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """Rows of a question's view, with its columns' names; or, by group, their `number`."""

    question: str
    view: str
    asked: QuestionFilter
    rows: tuple[dict[str, Any], ...]
    left_out: int
    """Rows that `limit` left out."""


def ask(
    ledger: AuditLedger, question: Question, asked: QuestionFilter, opener: SinkOpener | None = None
) -> QuestionAnswer:
    """Answer a question from one instant of the ledger. Of `pending` each row has what waits in the source, too; with an
    `opener`, of `behind` what the sink holds by its own record.

    Raises:
        UsageError: no such topology, or a filter or group that the question does not have.
        StoreUnavailable: the database does not answer.
    """
    with ledger.snapshot() as snapshot:
        return answered(snapshot, question, asked, opener)


def answered(
    snapshot: LedgerSnapshot, question: Question, asked: QuestionFilter, opener: SinkOpener | None = None
) -> QuestionAnswer:
    """The same from an instant that several questions are asked of."""
    if asked.topology is not None:
        topology = snapshot.topology(asked.topology)
        if asked.message is not None:
            asked = replace(asked, message=recorded_ids(snapshot, topology, [asked.message])[0])
    where, values = _conditions(question, asked)
    rows, left_out = _rows(snapshot, question, asked, where, values)
    if not asked.group:
        rows = _completed(snapshot, question, rows, opener)
    return QuestionAnswer(question.name, question.view, asked, tuple(rows), left_out)


def _completed(
    snapshot: LedgerSnapshot, question: Question, rows: list[dict[str, Any]], opener: SinkOpener | None
) -> list[dict[str, Any]]:
    """The rows with what no view can have: it is asked of the source or of the sink, or may quote a payload."""
    match question.name:
        case "pending":
            return [{**row, **_unopened(snapshot, row)} for row in rows]
        case "aborted":
            return [{**row, "reason": _reason(snapshot, row)} for row in rows]
        case "behind" if opener is not None:
            return [_held(snapshot, row, opener) if row["behind_txids"] else row for row in rows]
        case _:
            return _with_server_ids(snapshot, rows) if "message" in question.filters else rows


def _conditions(question: Question, asked: QuestionFilter) -> tuple[str, dict[str, Any]]:
    parts, values = list[str](), dict[str, Any]()

    def add(condition: str, name: str, value: object) -> None:
        parts.append(condition)
        values[name] = value

    if asked.topology is not None:
        add("topology = :topology", "topology", asked.topology)
    for name in FILTERS:
        value = getattr(asked, name)
        if value is not None:
            _require(question, name, name in question.filters)
            add(f"{name} = :{name}", name, value)
    if asked.txid is not None:
        _require(question, "txid", question.txid is not None)
        add(f"{question.txid} = :txid", "txid", asked.txid)
    for name, compared in (("since", ">="), ("until", "<")):
        value = getattr(asked, name)
        if value is not None:
            _require(question, name, question.time is not None)
            add(f"{question.time} {compared} :{name}", name, value)
    return (f" where {' and '.join(parts)}" if parts else ""), values


def _require(question: Question, name: str, has_it: bool) -> None:
    if not has_it:
        known = [
            *sorted(question.filters),
            *(["txid"] if question.txid else []),
            *(["since", "until"] if question.time else []),
        ]
        raise UsageError(
            f"audit {question.name} has no column to filter by {name}; it can be filtered by: "
            f"{', '.join(known) or 'nothing'}",
            question=question.name,
            filter=name,
        )


def _rows(
    snapshot: LedgerSnapshot, question: Question, asked: QuestionFilter, where: str, values: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """The rows up to the limit, and how many there are beyond."""
    view = question.counted if asked.group and question.counted is not None else question.view
    source, order = f"{view}{where}", question.order
    if asked.group:
        columns = [_grouped(question, name) for name in dict.fromkeys(asked.group)]
        places = ", ".join(str(place + 1) for place in range(len(columns)))
        source = f"(select {', '.join(columns)}, count(*) as number from {source} group by {places}) as grouped"
        order = f"number desc, {places}"
    # The number of all rows comes with the rows: a second query would find all of them again.
    limited = sa.text(f"select *, count(*) over () as {_ALL} from {source} order by {order} limit :rows")
    found = snapshot.connection.execute(limited, {**values, "rows": asked.limit}).mappings()
    rows = [{key: _plain(value) for key, value in row.items()} for row in found]
    number = max([row.pop(_ALL) for row in rows], default=0)
    return rows, number - len(rows)


def _grouped(question: Question, name: str) -> str:
    if name not in question.groups:
        known = ", ".join(question.groups)
        raise UsageError(f"audit {question.name} cannot be grouped by {name!r}; known: {known}", question=question.name)
    return f"date_trunc('{name}', {question.time}) as {name}" if name in SPANS else name


def _plain(value: Any) -> Any:
    if not isinstance(value, Decimal):
        return value
    return int(value) if value == value.to_integral_value() else float(value)


def _with_server_ids(snapshot: LedgerSnapshot, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with what its server calls each message, where that is on record of any."""
    found = dict[tuple[str, str], str]()
    for name in {row["topology"] for row in rows}:
        messages = {row["message"] for row in rows if row["topology"] == name and row["message"] is not None}
        for message, id_ in server_ids(snapshot, snapshot.topology(name), messages).items():
            found[name, message] = id_
    return [{**row, "server_id": found.get((row["topology"], row["message"]))} for row in rows] if found else [*rows]


def _unopened(snapshot: LedgerSnapshot, row: Mapping[str, Any]) -> dict[str, Any]:
    """What waits in the source and was never opened; nulls where only the source's server can tell."""
    topology = snapshot.topology(row["topology"])
    members = spout_sources(snapshot, topology).values()
    evidence = next((one for one in members if one.name == row["source"]), None) or stored_source(snapshot, topology)
    if evidence is None or evidence.name != row["source"]:
        return {"ready": None, "oldest_ready_age_s": None}
    backlog = evidence.backlog()
    return {"ready": backlog.ready, "oldest_ready_age_s": backlog.oldest_ready_age_s}


def _held(snapshot: LedgerSnapshot, row: Mapping[str, Any], opener: SinkOpener) -> dict[str, Any]:
    """A sink's row without the batches that it has by its own record; `has` and `why` are of the first of the others."""
    topology = snapshot.topology(row["topology"])
    holdings = holdings_of(snapshot, topology, opener)
    found = [
        (txn, item.work.rows, holdings.of(txn, item.work))
        for txn in snapshot.unresolved(topology.incarnation)
        for item in snapshot.work(topology.incarnation, txn.txid, txn.txid)
        if (item.work.sink, item.work.committed_at, item.work.outcome) == (row["sink"], None, None)
    ]
    has = [(txn, one) for txn, _, one in found if one.has is Has.HAS]
    left = [(txn, rows, one) for txn, rows, one in found if one.has is not Has.HAS]
    return {
        **row,
        "held_txid": has[-1][0].txid if has else row["held_txid"],
        "behind_txids": len(left),
        "behind_rows": sum(rows for _, rows, _ in left),
        "behind_since": left[0][0].prepared_at if left else None,
        "blocked_txid": next((txn.txid for txn, _, _ in left if txn.state is TxnState.BLOCKED), None),
        "has": left[0][2].has.value if left else Has.HAS.value,
        "has_since": has[-1][1].at if has else None,
        "why": left[0][2].why if left else None,
    }


def _reason(snapshot: LedgerSnapshot, row: Mapping[str, Any]) -> str | None:
    """The ledger's own words, which may quote a value: the view does not show them."""
    incarnation = snapshot.topology(row["topology"]).incarnation
    batch = next(iter(snapshot.txns(incarnation, row["txid"], row["txid"])), None)
    return None if batch is None else batch.reason


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that any of the rows has a value in."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(row.get(name) not in (None, "", []) for row in rows)]
