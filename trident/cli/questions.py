"""The questions of `stormproof audit ...` that a view of the ledger answers, as a table or JSON, with an exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stormproof.core.clock import SystemClock
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.questions import Answer, Asked, Question, ask, columns_of, newest_verdicts
from stormproof.trident.cli.output import Exit, emit, finish, say, table
from stormproof.trident.cli.stores import opened
from stormproof.trident.transaction_states import Verdict
from stormproof.trident.wording import counted, parse_time


def show(
    question: str,
    *,
    as_json: bool,
    since: str | None = None,
    until: str | None = None,
    group: Sequence[str] | None = None,
    **asked: Any,
) -> None:
    """Answer a question, and end with the status that the answer has."""
    whole = asked_for(since, until, group, **asked)
    with opened() as stores:
        answer = ask(stores.audit, Question(question), whole, opener_for(stores.database))
        status = _status(stores.audit, answer)
    emit(answer, as_json=as_json, text=lambda: rows_text(answer.rows, answer.left_out, answer.view))
    finish(status)


def asked_for(since: str | None, until: str | None, group: Sequence[str] | None, **asked: Any) -> Asked:
    """What a command's options ask for."""
    now = SystemClock().now()
    return Asked(**asked, since=parse_time(since, now), until=parse_time(until, now), group=tuple(group or ()))


def _status(ledger: AuditLedger, answer: Answer) -> Exit:
    match answer.question:
        case Question.BEHIND if any(row["blocked_txid"] is not None for row in answer.rows):
            return Exit.FAILED
        case Question.ABORTED if any(row.get("what") == "blocked" for row in answer.rows):
            return Exit.FAILED
        case Question.VERDICTS:
            return _of_verdicts(newest_verdicts(ledger, answer.asked.topology))
        case _:
            return Exit.DONE


def _of_verdicts(newest: Mapping[str, str | None]) -> Exit:
    if Verdict.VIOLATION in newest.values():
        return Exit.FAILED
    return Exit.DONE if all(one == Verdict.CLEAN for one in newest.values()) else Exit.CANNOT_TELL


def rows_text(rows: Sequence[Mapping[str, Any]], left_out: int, view: str) -> None:
    """An answer's rows, for people."""
    names = columns_of(rows)
    if rows:
        table([name.replace("_", " ") for name in names], [[_cell(row[name]) for name in names] for row in rows])
    more = f", {left_out} more left out (--limit)" if left_out else ""
    say(f"{counted(len(rows), 'row')}{more}; the same in SQL: {view}")


def _cell(value: object) -> object:
    match value:
        case dict():
            return ", ".join(f"{name} {number}" for name, number in value.items()) or None
        case list():
            return ", ".join(map(str, value)) or None
        case float():
            return f"{value:.3g}"
        case _:
            return value
