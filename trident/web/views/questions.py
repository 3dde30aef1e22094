"""The twelve questions: one place for each, with its filters; the same as the commands and the views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from starlette.responses import Response

from stormproof.core.errors import UsageError
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.questions import Answer, Asked, ask, columns_of
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.web.reading import Opened
from stormproof.trident.web.views.batch import WHY_HIDDEN
from stormproof.trident.web.visit import Visit
from stormproof.trident.wording import parse_time

_HERE: Final = {name: one for name, one in QUESTIONS.items() if one.page == "question"}
"""Those that the general page answers."""


async def questions(visit: Visit) -> Response:
    """The list of the twelve."""
    return visit.page(
        "questions.html", title="The twelve questions", topology_name=visit.text("topology"), twelve=QUESTIONS.values()
    )


async def question(visit: Visit) -> Response:
    """The answer to one of them."""
    name = visit.required("name")
    entry = _HERE.get(name)
    if entry is None:
        raise UsageError(f"{name[:80]!r} is no question; known: {', '.join(_HERE)}")
    given: dict[str, Any] = {key: visit.text(key) for key in entry.filters}
    chosen = Asked(
        topology=visit.text("topology"),
        txid=visit.number("txid", 0, low=1) if entry.txid is not None and visit.text("txid") else None,
        since=parse_time(visit.text("since"), visit.now) if entry.time is not None else None,
        until=parse_time(visit.text("until"), visit.now) if entry.time is not None else None,
        limit=visit.number("limit", 100, low=1, high=1_000),
        **given,
    )

    def read(opened: Opened) -> Answer:
        return ask(opened.audit, entry, chosen, opener_for(opened.database))

    found = await visit.ask(read, *sorted(visit.values().items()), for_s=2.0)
    if name == "aborted" and not visit.is_operator:
        rows = ({**row, "reason": row.get("reason") and WHY_HIDDEN} for row in found.rows)
        found = replace(found, rows=tuple(rows))
    return visit.page(
        "question.html",
        title=entry.asks,
        topology_name=chosen.topology,
        entry=entry,
        chosen=chosen,
        given=given,
        has_time=entry.time is not None,
        has_txid=entry.txid is not None,
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
