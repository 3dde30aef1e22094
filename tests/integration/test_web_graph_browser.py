"""The graph of a topology with several spouts and joins, in a real browser: every word can be read, at two widths."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
from support.browser import SCREENS, Screen, browsing, needs_browser
from support.command_line import command_line_in

from stormproof.core.postgres.database import Database

pytestmark = [pytest.mark.postgres, needs_browser]

NAME: Final = "shop"
FILE: Final = """
from stormproof import PostgresQueue, PostgresSink, Topology, count

def order(line: str) -> tuple[str, int]:
    customer, cents = line.split()
    return customer, int(cents)

def customer(line: str) -> tuple[str, str]:
    name, city = line.split()
    return name, city

def topology() -> Topology:
    t = Topology("shop")
    orders, returns, customers = (
        t.stream(name, PostgresQueue(name)).map(parse, "line", schema=schema, name=f"parse-{name}")
        for name, parse, schema in (
            ("orders", order, "customer string, cents int"),
            ("returns", order, "customer string, back int"),
            ("customers-of-all-shops", customer, "customer string, city string"),
        )
    )
    priced = orders.join(customers, "customer", how="left", name="with-city")
    whole = priced.join(returns, "customer", how="left", name="with-returns")
    whole.into(PostgresSink("whole"))
    orders.into(PostgresSink("orders_as_they_came"))
    whole.group_by("city").agg(n=count()).into(PostgresSink("cities"))
    return t
"""
LINES: Final = {
    "orders": [f"c{i % 4} {i}" for i in range(40)],
    "returns": [f"c{i} {i}" for i in range(3)] + ["c1 nonsense"],
    "customers-of-all-shops": [f"c{i} Bern" for i in range(4)],
}


@pytest.fixture
def screen(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generator[Screen]:
    """The page of that topology after a run."""
    command = command_line_in(tmp_path, database, "shop.py", FILE, monkeypatch, capsys)
    command("ledger", "migrate")
    for queue, lines in LINES.items():
        (tmp_path / "lines").write_text("\n".join(lines))
        command("queue", "put", queue, "--lines", "lines")
    command("run", "shop.py:topology", "--engine", "inline", "--until-idle")
    with browsing(tmp_path / "browser") as found:
        yield found


OVERLAPS: Final = """
const boxes = [...document.querySelectorAll(".graph svg text")]
  .map(one => [one.textContent.trim(), one.getBoundingClientRect()]).filter(([text]) => text);
const found = [];
for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
  const [a, p] = boxes[i], [b, q] = boxes[j];
  const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
  const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
  if (wide > 1 && high > 3) found.push(a + " / " + b);
}
return found;
"""
OUTSIDE: Final = """
const svg = document.querySelector(".graph svg"), all = svg.getBoundingClientRect();
return [...svg.querySelectorAll("text, rect")].map(one => [one.textContent || one.tagName, one.getBoundingClientRect()])
  .filter(([_, p]) => p.left < all.left - 1 || p.right > all.right + 1 || p.top < all.top - 1 || p.bottom > all.bottom + 1)
  .map(([text]) => text);
"""
STRIKES: Final = """
const svg = document.querySelector(".graph svg"), found = [];
const boxes = [...svg.querySelectorAll("rect.box")].map(one => one.getBoundingClientRect());
for (const path of svg.querySelectorAll("path.edge")) {
  const at = path.getScreenCTM(), length = path.getTotalLength();
  for (let step = 8; step < length - 8; step += 4) {
    const point = path.getPointAtLength(step).matrixTransform(at);
    if (boxes.some(p => point.x > p.left + 1 && point.x < p.right - 1 && point.y > p.top + 1 && point.y < p.bottom - 1)) {
      found.push(path.getAttribute("d")); break;
    }
  }
}
return found;
"""


def test_a_graph_with_joins_and_several_spouts_can_be_read(screen: Screen) -> None:
    screen.go(f"/topology?topology={NAME}")
    names: Any = screen.run("return [...document.querySelectorAll('.graph text.name')].map(one => one.textContent)")
    parts = {"spouts": 3, "parsers": 3, "joins": 2, "aggregates": 1, "sinks": 3}
    assert len(names) == sum(parts.values()), names
    assert {"orders", "returns", "with-city", "with-returns"} <= set(names), names
    assert "e+" not in screen.text("main"), "a span in a form for machines"
    for width in (1280, 380):
        screen.show(width, 900, "light")
        height = min(int(screen.run("return document.documentElement.scrollHeight")), 4_000)
        for theme in ("light", "dark"):
            screen.shot(SCREENS / f"graph-of-joins-{width}-{theme}.png", width, height, theme)
        assert screen.run("return document.documentElement.scrollWidth") <= width
        faults = [screen.run(look) for look in (OVERLAPS, OUTSIDE, STRIKES)]
        assert faults == [[], [], []], names
    screen.require_clean()
