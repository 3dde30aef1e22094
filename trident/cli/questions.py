"""The commands of `stormproof audit ...` that a view of the ledger answers: as a table or JSON, with an exit status."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import typer

from stormproof.core.clock import SystemClock
from stormproof.trident.cli.options import AS_JSON, command, parameter
from stormproof.trident.cli.output import Exit, emit, finish, say, table
from stormproof.trident.cli.stores import opened
from stormproof.trident.declarations.questions import Question
from stormproof.trident.transaction_states import Verdict
from stormproof.trident.wording import counted, parse_time

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import AuditLedger
    from stormproof.trident.audit.questions import Answer, Asked, ReplaysAnswer

LIMIT: Final = 100
_TOPOLOGY: Final = parameter(
    "topology", str | None, typer.Argument(metavar="TOPOLOGY", help="Only this topology. Default: all."), None
)
_LIMIT: Final = parameter(
    "limit", int, typer.Option("--limit", min=1, help="Most rows to print; how many were left out is said."), LIMIT
)
_TIMES: Final = (
    parameter(
        "since",
        str | None,
        typer.Option("--since", metavar="TIME", help="From this time on: ISO 8601, or an age such as 12h."),
        None,
    ),
    parameter(
        "until",
        str | None,
        typer.Option("--until", metavar="TIME", help="Before this time: ISO 8601, or an age such as 12h."),
        None,
    ),
)


def command_of(question: Question) -> Callable[..., None]:
    """The command that answers a question, with an option for each of its filters."""
    txid = [_filter(question, "txid", question.txid, int)] if question.txid else []
    parameters = [
        *(_TOPOLOGY, *txid, *(_filter(question, name, name, str) for name in question.filters)),
        *(_TIMES if question.time else ()),
        *(_group(question), _LIMIT, AS_JSON),
    ]
    return command(parameters, question.help, partial(show, question))


def _filter(question: Question, name: str, column: str, kind: type[int | str]) -> inspect.Parameter:
    """An option that filters by a column: what it is, the column's meaning says."""
    meaning = question.columns[column] + ("; or its id at the server" if name == "message" else "")
    option = typer.Option(
        {"error_class": "--class"}.get(name, f"--{name}"),
        metavar={"message": "ID", "error_class": "CLASS"}.get(name),
        min=1 if kind is int else None,
        help=f"Filter: {meaning}.",
    )
    return parameter(name, kind | None, option, None)


def _group(question: Question) -> inspect.Parameter:
    told = f"Count by {', '.join(question.groups[:-1])} or {question.groups[-1]}; may be repeated."
    return parameter("group", list[str] | None, typer.Option("--group", metavar="COLUMN", help=told), None)


def show(question: Question, *, as_json: bool, **asked: Any) -> None:
    """Answer a question, and end with the status that the answer has."""
    whole = _asked(**asked)
    with opened() as stores:
        from stormproof.trident.audit.inspect import opener_for
        from stormproof.trident.audit.questions import answered_replays, ask

        answer: Answer | ReplaysAnswer = (
            answered_replays(stores.audit, whole)
            if question.name == "replays"
            else ask(stores.audit, question, whole, opener_for(stores.database))
        )
        status = _status(stores.audit, question, answer)
    emit(answer, as_json=as_json, text=partial(_text, answer))
    finish(status)


def _asked(*, since: str | None = None, until: str | None = None, group: Sequence[str] | None, **filters: Any) -> Asked:
    """What a command's options ask for."""
    from stormproof.trident.audit.questions import Asked

    now = SystemClock().now()
    return Asked(**filters, since=parse_time(since, now), until=parse_time(until, now), group=tuple(group or ()))


def _status(ledger: AuditLedger, question: Question, answer: Answer | ReplaysAnswer) -> Exit:
    if question.name == "verdicts":
        from stormproof.trident.audit.questions import newest_verdicts

        return _of_verdicts(newest_verdicts(ledger, answer.asked.topology))
    return Exit.FAILED if question.fails and any(map(question.is_failed_by, answer.rows)) else Exit.DONE


def _of_verdicts(newest: Mapping[str, str | None]) -> Exit:
    if Verdict.VIOLATION in newest.values():
        return Exit.FAILED
    return Exit.DONE if all(one == Verdict.CLEAN for one in newest.values()) else Exit.CANNOT_TELL


def _text(answer: Answer | ReplaysAnswer) -> None:
    """An answer's rows, for people; of replays, the histories where they are told."""
    from stormproof.trident.audit.questions import columns_of
    from stormproof.trident.cli.reports import replays_text

    histories = getattr(answer, "histories", None)
    if histories is not None:
        replays_text(histories)
        return
    names = columns_of(answer.rows)
    if answer.rows:
        heads = [name.replace("_", " ") for name in names]
        table(heads, [[_cell(row[name]) for name in names] for row in answer.rows])
    more = f", {answer.left_out} more left out (--limit)" if answer.left_out else ""
    say(f"{counted(len(answer.rows), 'row')}{more}; the same in SQL: {answer.view}")


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
