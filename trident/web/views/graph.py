"""Where the parts of a graph stand in its picture. The template draws it, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stormproof.trident.audit.figures import Arrow, GraphFigures, Part

WIDTH: Final = 192
HEIGHT: Final = 74
GAP: Final = 54
STEP: Final = 92
LEFT: Final = 6
TOP: Final = 26
NAME_MAX: Final = 22


@dataclass(frozen=True, slots=True)
class Box:
    """A part and where it stands."""

    part: Part
    x: int
    y: int

    @property
    def shown(self) -> str:
        """Its name, as far as there is room."""
        name = self.part.name
        return name if len(name) <= NAME_MAX else f"{name[: NAME_MAX - 1]}…"


@dataclass(frozen=True, slots=True)
class Line:
    """An arrow, as an SVG path."""

    path: str
    crosses: bool
    label: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


def drawing(found: GraphFigures) -> Drawing:
    """Place the parts: each to the right of all that it has its tuples from, in the order of the graph."""
    columns = _columns(found.parts, found.arrows)
    places: dict[str, tuple[int, int]] = {}
    for number, names in enumerate(columns):
        for row, name in enumerate(names):
            places[name] = (LEFT + number * (WIDTH + GAP), TOP + row * STEP)
    by_name = {part.name: part for part in found.parts}
    rows = max((len(names) for names in columns), default=0)
    return Drawing(
        width=2 * LEFT + max(len(columns), 1) * (WIDTH + GAP) - GAP,
        height=TOP + max(rows, 1) * STEP - (STEP - HEIGHT) + 4,
        boxes=tuple(Box(by_name[name], *place) for name, place in places.items()),
        lines=tuple(_line(arrow, places) for arrow in found.arrows),
    )


def _columns(parts: Sequence[Part], arrows: Sequence[Arrow]) -> list[list[str]]:
    depth = {part.name: 0 for part in parts}
    for _ in parts:  # as many rounds as the longest way may have steps; a graph has no cycles
        moved = False
        for arrow in arrows:
            if depth[arrow.to] <= depth[arrow.origin]:
                depth[arrow.to] = depth[arrow.origin] + 1
                moved = True
        if not moved:
            break
    columns: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for part in parts:
        columns[depth[part.name]].append(part.name)
    return columns


def _line(arrow: Arrow, places: dict[str, tuple[int, int]]) -> Line:
    (x1, y1), (x2, y2) = places[arrow.origin], places[arrow.to]
    x1, y1, y2 = x1 + WIDTH, y1 + HEIGHT // 2, y2 + HEIGHT // 2
    bend = max((x2 - x1) // 2, 24)
    label = "" if arrow.stream == "default" else arrow.stream
    path = f"M{x1},{y1} C{x1 + bend},{y1} {x2 - bend},{y2} {x2 - 5},{y2}"
    return Line(path, arrow.crosses, label[:16], x2 - GAP + 6, y2 - 6)
