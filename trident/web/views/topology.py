"""Every topology in a line. One topology: driver, pace, back-pressure, tuning, sources, sinks, and its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup
from starlette.responses import Response

from stormproof.core.contract.source import Backlog
from stormproof.trident.audit.figures import Arrow, ComponentFigures, GraphFigures, figures
from stormproof.trident.audit.inspect import committer_of, opener_for
from stormproof.trident.audit.overview import Health, backlogs
from stormproof.trident.audit.overview import overview as read
from stormproof.trident.audit.questions import QuestionAnswer, QuestionFilter, ask
from stormproof.trident.audit.status import TopologyStatus, status
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.web.visit import Visit

WIDTH: Final = 216
HEIGHT: Final = 74
GAP: Final = 96
STEP: Final = 98
LEFT: Final = 6
TOP: Final = 26
NAME_MAX: Final = 22
LABEL_MAX: Final = 14

Point = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A part and where it stands."""

    part: ComponentFigures
    x: int
    y: int

    @property
    def shown(self) -> str:
        """Its name, as far as there is room."""
        name = self.part.name
        return name if len(name) <= NAME_MAX else f"{name[: NAME_MAX - 1]}…"


@dataclass(frozen=True, slots=True)
class Line:
    """An arrow, as an SVG path; its labels end at (x, y), above it and below it."""

    arrow: Arrow
    path: str
    x: int
    y: int

    @property
    def label(self) -> str:
        """The stream's name, unless it is the one that needs none."""
        stream = "" if self.arrow.stream == "default" else self.arrow.stream
        return stream if len(stream) <= LABEL_MAX else f"{stream[: LABEL_MAX - 1]}…"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


def drawing(found: GraphFigures) -> Drawing:
    """Place the parts: each to the right of all that it has its tuples from. A line that passes a column has a row in it."""
    depth = _depth(found.parts, found.arrows)
    ways = {(arrow.origin, arrow.to): _way(arrow, depth) for arrow in found.arrows}
    columns = _columns([part.name for part in found.parts], depth, list(ways.values()))
    places = {
        name: (LEFT + number * (WIDTH + GAP), TOP + row * STEP)
        for number, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    rows = max((len(names) for names in columns), default=0)
    return Drawing(
        width=2 * LEFT + max(len(columns), 1) * (WIDTH + GAP) - GAP,
        height=TOP + max(rows, 1) * STEP - (STEP - HEIGHT) + 4,
        boxes=tuple(Box(part, *places[part.name]) for part in found.parts),
        lines=_lines(found.arrows, ways, places),
    )


def _depth(parts: Sequence[ComponentFigures], arrows: Sequence[Arrow]) -> dict[str, int]:
    depth = {part.name: 0 for part in parts}
    for _ in parts:  # as many rounds as the longest way may have steps; a graph has no cycles
        moved = False
        for arrow in arrows:
            if depth[arrow.to] <= depth[arrow.origin]:
                depth[arrow.to] = depth[arrow.origin] + 1
                moved = True
        if not moved:
            break
    return depth


def _way(arrow: Arrow, depth: Mapping[str, int]) -> list[str]:
    """The parts that an arrow leads from and to, and the places in the columns between them."""
    between = range(depth[arrow.origin] + 1, depth[arrow.to])
    return [arrow.origin, *(f"{arrow.origin}\n{arrow.to}\n{column}" for column in between), arrow.to]


def _columns(parts: Sequence[str], depth: Mapping[str, int], ways: Sequence[Sequence[str]]) -> list[list[str]]:
    """What stands in each column, top down: ordered by the mean row of what stands before it, so that few lines cross."""
    columns: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for part in parts:
        columns[depth[part]].append(part)
    before: dict[str, list[str]] = {}
    for way in ways:
        for number, name in enumerate(way[1:-1], depth[way[0]] + 1):
            columns[number].append(name)
        for one, following in pairwise(way):
            before.setdefault(following, []).append(one)
    row: dict[str, int] = {}
    for names in columns:
        names.sort(key=lambda name: _mean([row[one] for one in before.get(name, ())]))
        row |= {name: number for number, name in enumerate(names)}
    return columns


def _mean(rows: Sequence[int]) -> float:
    return sum(rows) / len(rows) if rows else 0.0


def _lines(
    arrows: Sequence[Arrow], ways: Mapping[tuple[str, str], Sequence[str]], places: Mapping[str, Point]
) -> tuple[Line, ...]:
    """The arrows. Those of one part leave it, and reach it, one below the other."""
    leaving: dict[str, list[tuple[int, str]]] = {}
    reaching: dict[str, list[tuple[int, str]]] = {}
    for way in ways.values():
        leaving.setdefault(way[0], []).append((places[way[1]][1], way[-1]))
        reaching.setdefault(way[-1], []).append((places[way[-2]][1], way[0]))
    lines: list[Line] = []
    for arrow in arrows:
        way = ways[arrow.origin, arrow.to]
        x, y = places[arrow.origin]
        start = x + WIDTH, y + _port(leaving[arrow.origin], arrow.to)
        x, y = places[arrow.to]
        end = x - 5, y + _port(reaching[arrow.to], arrow.origin)
        middle = [point for name in way[1:-1] for point in _across(places[name])]
        lines.append(Line(arrow, _path([start, *middle, end]), end[0] - 9, end[1]))
    return tuple(lines)


def _port(ends: Sequence[tuple[int, str]], name: str) -> int:
    """How far below a part's upper edge the line from or to another one ends."""
    number = [other for _, other in sorted(ends)].index(name)
    return HEIGHT * (number + 1) // (len(ends) + 1)


def _across(place: Point) -> tuple[Point, Point]:
    """Where a line passes a column."""
    x, y = place
    return (x, y + HEIGHT // 2), (x + WIDTH, y + HEIGHT // 2)


def _path(points: Sequence[Point]) -> str:
    (x, y), path = points[0], [f"M{points[0][0]},{points[0][1]}"]
    for to_x, to_y in points[1:]:
        bend = (to_x - x) // 2
        path.append(f"C{x + bend},{y} {to_x - bend},{to_y} {to_x},{to_y}")
        x, y = to_x, to_y
    return " ".join(path)


SLOW_S = 5.0
STEPS = ("open", "job", "wait", "prepare", "commit", "held_up")


def _status(stores: Stores, name: str) -> TopologyStatus:
    def committer(binding: object) -> str | None:
        return committer_of(binding, stores.database)  # type: ignore[arg-type]

    return status(stores.audit, name, committer=committer, opener=opener_for(stores.database)).topologies[0]


def _figures(stores: Stores, name: str) -> tuple[GraphFigures, Drawing]:
    found = figures(stores.audit, name)
    return found, drawing(found)


def _asked(stores: Stores, question: str, name: str) -> QuestionAnswer:
    return ask(stores.audit, QUESTIONS[question], QuestionFilter(topology=name, limit=5))


async def topology(visit: Visit) -> Response:
    """The page of one topology."""
    name = visit.required("topology")
    found = await visit.ask(lambda stores: _status(stores, name), "status", name, for_s=2.0)
    drawn = await visit.ask(lambda stores: _figures(stores, name), "figures", name, for_s=SLOW_S)
    verdicts = await visit.ask(lambda stores: _asked(stores, "verdicts", name), "verdicts", name)
    actions = await visit.ask(lambda stores: _asked(stores, "actions", name), "actions", name)
    return visit.page(
        "topology.html",
        title=name,
        topology_name=name,
        one=found,
        figures=drawn[0],
        drawing=drawn[1],
        verdicts=verdicts.rows,
        actions=actions.rows,
        steps=STEPS,
    )


BACKLOG_S = 15.0
"""What waits in the sources may be much to count: it is counted so often."""


def _backlogs(stores: Stores) -> dict[str, Backlog | None]:
    return backlogs(stores.audit)


def grade(one: Health) -> str:
    """How a topology stands, in a word: ``bad``, ``warn``, ``ok`` or ``idle``."""
    if one.problems or (one.verdict is not None and one.verdict.verdict == "violation"):
        return "bad"
    if one.dead_letters or one.rejects or one.asked is not None:
        return "warn"
    return "ok" if one.is_alive else "idle"


async def overview(visit: Visit) -> Response:
    """The first page; those with problems first."""
    waiting = await visit.site.reader.latest(_backlogs, key="backlogs", every_s=BACKLOG_S)

    def content(stores: Stores) -> tuple[int, Markup]:
        found = read(stores.audit)
        return len(found), visit.part("overview_content.html", **_shown(found, waiting or {}))

    number, shown = await visit.ask(content, visit.root)
    return visit.page("overview.html", title="Overview", number=number, content=shown)


def _shown(found: Sequence[Health], backlogs: Mapping[str, Backlog | None]) -> dict[str, Any]:
    order = ("bad", "warn", "ok", "idle")
    return {
        "topologies": sorted(found, key=lambda one: (order.index(grade(one)) if grade(one) == "bad" else 1, one.name)),
        "backlogs": backlogs,
        "grade": grade,
        "totals": Counter(grade(one) for one in found),
        "running": sum(one.is_alive for one in found),
        "sums": {
            "rate": sum(one.recent.messages_per_s for one in found if one.recent is not None and one.is_alive),
            "pending": sum(one.pending for one in found),
            "dead": sum(one.dead_letters for one in found),
            "rejects": sum(one.rejects for one in found),
        },
    }
