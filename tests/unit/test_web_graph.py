"""The picture of a graph: parts stand apart, lines pass between them, and rates stand at their own lines."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

from stormproof.trident.audit.figures import AckerFigures, Arrow, ComponentFigures, GraphFigures
from stormproof.trident.web.render import environment
from stormproof.trident.web.views.topology import HEIGHT, WIDTH, Drawing, drawing

ACKER = AckerFigures(1, 1, 1, 0, 0, 1, 1, 0, 1.0, 1.0, 10.0)
JOINED = GraphFigures(
    "joined",
    tuple(
        ComponentFigures(name, kind, stage, emitted=1_234_567, acked=7)
        for name, kind, stage in (
            ("lines", "spout", 0),
            ("clicks", "spout", 0),
            ("users", "spout", 0),
            ("parse", "bolt", 0),
            ("joined", "join", 1),
            ("enriched", "join", 2),
            ("lake", "sink", 2),
            ("errors", "sink", 0),
        )
    ),
    tuple(
        Arrow(origin, to, stream, crosses=False, tuples=number, tuples_per_s=number / 10)
        for number, (origin, to, stream) in enumerate(
            (
                ("lines", "parse", "default"),
                ("parse", "errors", "bad"),
                ("parse", "joined", "default"),
                ("clicks", "joined", "default"),
                ("joined", "enriched", "default"),
                ("users", "enriched", "default"),
                ("enriched", "lake", "default"),
                ("lines", "lake", "raw"),
            ),
            start=1,
        )
    ),
    ACKER,
    3,
)


def crossed(drawn: Drawing) -> list[str]:
    """The parts that a line passes through."""
    found: list[str] = []
    for line in drawn.lines:
        points = [tuple(map(int, point.split(","))) for point in re.findall(r"(?:M|[ ])(\d+,\d+)(?= C|$)", line.path)]
        for (x1, y1), (x2, y2) in pairwise(points):
            found += [
                box.part.name
                for box in drawn.boxes
                if y1 == y2 and x1 <= box.x < x2 and x2 >= box.x + WIDTH and box.y <= y1 <= box.y + HEIGHT
            ]
    return found


def test_no_part_is_on_another_and_no_line_passes_through_one() -> None:
    drawn = drawing(JOINED)
    for one, other in combinations(drawn.boxes, 2):
        assert abs(one.x - other.x) > WIDTH or abs(one.y - other.y) > HEIGHT, (one, other)
    assert crossed(drawn) == []
    assert all(box.x + WIDTH <= drawn.width and box.y + HEIGHT <= drawn.height for box in drawn.boxes)


def test_each_rate_has_a_place_of_its_own() -> None:
    drawn = drawing(JOINED)
    places = [(line.x, line.y) for line in drawn.lines]
    assert len({*places}) == len(places)
    shown = environment().get_template("graph.html").render(drawing=drawn)
    assert [f"{line.arrow.tuples_per_s:.3g}/s" in shown for line in drawn.lines] == [True] * len(places)
    assert "1.23 M" in shown


def test_of_a_release_before_there_are_no_rates() -> None:
    bare = GraphFigures(
        "bare",
        (ComponentFigures("a", "spout", 0), ComponentFigures("b", "bolt", 0)),
        (Arrow("a", "b", "default", True),),
        ACKER,
    )
    shown = environment().get_template("graph.html").render(drawing=drawing(bare))
    assert "/s<" not in shown
    assert "stage 0" in shown
