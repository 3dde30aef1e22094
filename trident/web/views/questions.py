"""The twelve questions: one place for each, with its filters; the same as the commands and the views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import Response

from stormproof.core.errors import UsageError
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.questions import SHAPES, Answer, Asked, Question, ask, columns_of
from stormproof.trident.web.reading import Opened
from stormproof.trident.web.views.batch import WHY_HIDDEN
from stormproof.trident.web.visit import Visit
from stormproof.trident.wording import parse_time

FILTERS: Final = ("what", "source", "sink", "message", "reason", "component", "error_class", "state")


@dataclass(frozen=True, slots=True)
class Entry:
    """One of the twelve: what is asked, where on the page, by which command, in which view."""

    asks: str
    route: str
    command: str
    view: str
    name: str | None = None
    """Of those that the general page answers."""


def _general(asks: str, question: Question) -> Entry:
    return Entry(asks, "question", f"stormproof audit {question.value}", question.view, question.value)


TWELVE: Final[Sequence[Entry]] = (
    Entry("What was tried again: why, where, when?", "replays", "stormproof audit replays", Question.REPLAYS.view),
    Entry("What became of a message?", "find", "stormproof audit message", "stormproof.audit_message"),
    Entry(
        "What did a batch read, write and replay, and how long did it take?",
        "batches",
        "stormproof audit txn",
        "stormproof.audit_txn",
    ),
    _general("Which duplicates were suppressed, by which evidence?", Question.DUPLICATES),
    _general("What is pending in each source, and how old is it?", Question.PENDING),
    Entry(
        "What failed for good: dead letters and rejects?",
        "failures",
        "stormproof audit dead-letters",
        Question.DEAD_LETTERS.view,
    ),
    _general("How often were messages and batches tried?", Question.ATTEMPTS),
    _general("Which messages failed and were committed later?", Question.RECOVERED),
    _general("Which sinks are behind, and by how much?", Question.BEHIND),
    _general("Which batches were aborted or are blocked, and why?", Question.ABORTED),
    _general("What did operators decide: who, when, why?", Question.ACTIONS),
    _general("What did the last checks find, and of what?", Question.VERDICTS),
)
_BY_NAME: Final[Mapping[str, Entry]] = {entry.name: entry for entry in TWELVE if entry.name is not None}


async def questions(visit: Visit) -> Response:
    """The list of the twelve."""
    return visit.page(
        "questions.html", title="The twelve questions", topology_name=visit.text("topology"), twelve=TWELVE
    )


async def question(visit: Visit) -> Response:
    """The answer to one of them."""
    name = visit.required("name")
    entry = _BY_NAME.get(name)
    if entry is None:
        raise UsageError(f"{name[:80]!r} is no question; known: {', '.join(_BY_NAME)}")
    asks = Question(name)
    shape = SHAPES[asks]
    given: dict[str, Any] = {key: visit.text(key) for key in FILTERS if key in shape.filters}
    chosen = Asked(
        topology=visit.text("topology"),
        txid=visit.number("txid", 0, low=1) if shape.txid is not None and visit.text("txid") else None,
        since=parse_time(visit.text("since"), visit.now) if shape.time is not None else None,
        until=parse_time(visit.text("until"), visit.now) if shape.time is not None else None,
        limit=visit.number("limit", 100, low=1, high=1_000),
        **given,
    )

    def read(opened: Opened) -> Answer:
        return ask(opened.audit, asks, chosen, opener_for(opened.database))

    found = await visit.ask(read, *sorted(visit.values().items()), for_s=2.0)
    if asks is Question.ABORTED and not visit.is_operator:
        rows = ({**row, "reason": row.get("reason") and WHY_HIDDEN} for row in found.rows)
        found = replace(found, rows=tuple(rows))
    return visit.page(
        "question.html",
        title=entry.asks,
        topology_name=chosen.topology,
        entry=entry,
        chosen=chosen,
        given=given,
        has_time=shape.time is not None,
        has_txid=shape.txid is not None,
        found=found,
        columns=columns_of(found.rows),
        cell=cell,
    )


def cell(value: Any) -> object:
    """A value for a table's cell: counts by name, and lists, as words."""
    match value:
        case dict():
            return ", ".join(f"{name} {number}" for name, number in value.items())
        case list() | tuple():
            return ", ".join(map(str, value))
        case _:
            return value
