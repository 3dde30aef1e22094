"""SIGKILL at every failpoint under the weaker guarantees: what the tables hold, against the input alone.

Exactly-once goes through the chain (`test_chain.py`). Here each cell is a topology of its own, since what one loses or
doubles stays: it is killed at its failpoint and run to the end. Under one of the two guarantees, in turn, it is killed
there once more, mostly inside recovery. Real Postgres, real Delta tables, the inline engine, all four sinks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.contents import content
from support.crashes import KILLED, Cell, arming, run_driver
from support.queues import prepared_database, put
from support.topologies import SinkMode, expected, messages
from support.verdicts import require_verified

from stormproof.core.base.failpoint import FAILPOINTS, Failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

MESSAGES = 9


@dataclass(frozen=True, slots=True)
class Seen:
    """What one cell's table held, less what it should: words too many, words too few."""

    point: str
    mode: SinkMode
    doubled: Counter[str]
    lost: Counter[str]


def reachable(point: Failpoint, guarantee: Guarantee) -> bool:
    """Whether a run of this cell comes by the place at all; where it must, not coming by is a failure."""
    match point.scope:
        case "queue" | "journal" | "state" | "stream" | "operator" | "audit" | "reject" | "group" | "upkeep" | "owed":
            return False  # reached by tests of their own
        case "retry":
            return guarantee is not Guarantee.AT_MOST_ONCE
        case _:
            return True


@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_a_driver_killed_at_any_failpoint(guarantee: Guarantee, database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    payloads = messages(MESSAGES)
    should = expected(payloads)
    seen: list[Seen] = []
    for number, point in enumerate(FAILPOINTS.values()):
        if not reachable(point, guarantee):
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        cell = Cell(f"cell-{number}", None, guarantee, folder, database, f"q{number}")
        put(database, cell.queue, payloads)
        twice = number % 2 == (guarantee is Guarantee.AT_MOST_ONCE)
        codes = [run_driver(cell, armed) for armed in arming(point, twice=twice)]
        assert KILLED in codes[-2:], f"{point.name} was reached by no start of {guarantee}: {codes}"
        assert run_driver(cell) == 0, f"{point.name}: the last start of {guarantee} failed"
        for mode in SinkMode:
            found = content(mode, cell.name, folder, database)
            seen.append(Seen(point.name, mode, found - should, should - found))
        require_verified(cell)
    for mode in SinkMode:
        check(guarantee, mode, [s for s in seen if s.mode is mode])


def check(guarantee: Guarantee, mode: SinkMode, seen: list[Seen]) -> None:
    """The guarantee's statement over all cells of a sink; which must also show what it does not promise."""
    doubled = {s.point: s.doubled for s in seen if s.doubled}
    lost = {s.point: s.lost for s in seen if s.lost}
    if guarantee is Guarantee.AT_LEAST_ONCE:
        assert not lost, mode
        assert doubled, f"{mode}: at-least-once without a duplicate under any crash: the matrix kills nothing"
    else:
        assert not doubled, mode
        assert lost, f"{mode}: at-most-once without a loss under any crash: the matrix kills nothing"
