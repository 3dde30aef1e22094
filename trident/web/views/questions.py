"""The questions: one place for each, with its filters; the same as the commands and the views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from starlette.responses import Response

from stormproof.core.base.errors import UsageError
from stormproof.trident.audit.inspect import opener_for
from stormproof.trident.audit.questions import QuestionAnswer, QuestionFilter, ask, columns_of
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.terms.wording import parse_time
from stormproof.trident.web.views.batch import WHY_HIDDEN
from stormproof.trident.web.visit import Visit

_HERE: Final = {name: one for name, one in QUESTIONS.items() if one.page == "question"}
"""Those that the general page answers."""


async def questions(visit: Visit) -> Response:
    """The list of them."""
    return visit.page(
        "questions.html", title="The questions", topology_name=visit.text("topology"), questions=QUESTIONS.values()
    )


async def question(visit: Visit) -> Response:
    """The answer to one of them."""
    name = visit.required("name")
    entry = _HERE.get(name)
    if entry is None:
        raise UsageError(f"{name[:80]!r} is no question; known: {', '.join(_HERE)}")
    given: dict[str, Any] = {key: visit.text(key) for key in entry.filters}
    chosen = QuestionFilter(
        topology=visit.text("topology"),
        txid=visit.number("txid", 0, low=1) if entry.txid is not None and visit.text("txid") else None,
        since=parse_time(visit.text("since"), visit.now) if entry.time is not None else None,
        until=parse_time(visit.text("until"), visit.now) if entry.time is not None else None,
        limit=visit.number("limit", 100, low=1, high=1_000),
        **given,
    )

    def read(stores: Stores) -> QuestionAnswer:
        return ask(stores.audit, entry, chosen, opener_for(stores.database))

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


SPANS = {"1h": ("minute", timedelta(hours=1)), "24h": ("hour", timedelta(days=1)), "30d": ("day", timedelta(days=30))}
STEPS_S = {"minute": 60, "hour": 3_600, "day": 86_400}
SERIES_MAX = 5


@dataclass(frozen=True, slots=True)
class Replays:
    """Counts over time, counts by component, and the newest."""

    over_time: QuestionAnswer
    by_place: QuestionAnswer
    newest: QuestionAnswer


def series(rows: Sequence[Mapping[str, Any]], step: str, first_s: int, last_s: int) -> dict[str, object]:
    """Counts by reason for a chart: one value for each step of the time, the most frequent reasons by themselves."""
    step_s = STEPS_S[step]
    times = list(range(first_s - first_s % step_s, last_s + 1, step_s))
    totals: dict[str, int] = {}
    for row in rows:
        name = str(row["reason"] or "unknown")
        totals[name] = totals.get(name, 0) + int(row["number"])
    named = sorted(totals, key=lambda name: (-totals[name], name))
    kept = named if len(named) <= SERIES_MAX + 1 else named[:SERIES_MAX]
    labels = kept if len(kept) == len(named) else [*kept, "other reasons"]
    values = {label: [0] * len(times) for label in labels}
    for row in rows:
        if row[step] is None:
            continue
        place = (int(row[step].timestamp()) - times[0]) // step_s
        name = str(row["reason"] or "unknown")
        if 0 <= place < len(times):
            values[name if name in values else labels[-1]][place] += int(row["number"])
    return {
        "times": times,
        "series": [{"label": label.replace("_", " ")[:60], "values": values[label]} for label in labels],
    }


async def replays(visit: Visit) -> Response:
    """The page of replays."""
    span = visit.text("span") or "24h"
    step, length = SPANS.get(span, SPANS["24h"])
    since = parse_time(visit.text("since"), visit.now) or visit.now - length
    chosen = QuestionFilter(
        topology=visit.text("topology"),
        since=since,
        what=visit.text("what"),
        reason=visit.text("reason"),
        component=visit.text("component"),
        error_class=visit.text("error_class"),
    )

    def question(stores: Stores) -> Replays:
        def asked(**more: Any) -> QuestionAnswer:
            return ask(stores.audit, QUESTIONS["replays"], replace(chosen, **more))

        return Replays(
            asked(group=(step, "reason"), limit=10_000),
            asked(group=("topology", "what", "reason", "component", "error_class"), limit=50),
            asked(limit=50),
        )

    found = await visit.ask(question, *sorted(visit.values().items()), for_s=3.0)
    return visit.page(
        "replays.html",
        title="Replays",
        topology_name=chosen.topology,
        chosen=chosen,
        found=found,
        span=span if span in SPANS else "24h",
        spans=tuple(SPANS),
        step=step,
        chart=series(found.over_time.rows, step, int(since.timestamp()), int(visit.now.timestamp())),
        total=sum(int(row["number"]) for row in found.over_time.rows),
    )
