"""SIGKILL at every failpoint, under every guarantee, with every sink: what the tables hold, against the input alone.

Real Postgres, real Delta tables, the inline engine. Each cell kills the driver at its failpoint, starts it again and
kills it there once more (mostly inside recovery), and starts it a third time to the end.
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

from stormproof.core.failpoint import FAILPOINTS, Failpoint
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

MESSAGES = 9


@dataclass(frozen=True, slots=True)
class Seen:
    """What one cell's table held, less what it should: words too many, words too few."""

    point: str
    doubled: Counter[str]
    lost: Counter[str]


def reachable(point: Failpoint, guarantee: Guarantee, mode: SinkMode) -> bool:
    """Whether a run of this cell comes by the place at all; where it must, not coming by is a failure."""
    match point.scope:
        case "queue" | "state" | "stream":
            return False  # reached by tests of their own
        case "delta" | "postgres" as store:
            return mode.store == store
        case "retry":
            return guarantee is not Guarantee.AT_MOST_ONCE
        case _:
            return True


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", SinkMode)
@pytest.mark.parametrize("guarantee", Guarantee)
def test_a_driver_killed_at_any_failpoint(
    guarantee: Guarantee, mode: SinkMode, database: Database, tmp_path: Path
) -> None:
    prepared_database(database)
    payloads = messages(MESSAGES)
    should = expected(payloads)
    seen: list[Seen] = []
    for number, point in enumerate(FAILPOINTS.values()):
        if not reachable(point, guarantee, mode):
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        cell = Cell(f"cell-{number}", mode, guarantee, folder, database, f"q{number}")
        put(database, cell.queue, payloads)
        codes = [run_driver(cell, armed) for armed in arming(point)]
        assert KILLED in codes[-2:], f"{point.name} was reached by no start of {guarantee} into {mode}: {codes}"
        assert run_driver(cell) == 0, f"{point.name}: the last start of {guarantee} into {mode} failed"
        found = content(mode, cell.name, folder, database)
        seen.append(Seen(point.name, found - should, should - found))
        require_verified(cell)
    check(guarantee, seen)


def check(guarantee: Guarantee, seen: list[Seen]) -> None:
    """The guarantee's statement over all cells; the weaker ones must show what they do not promise."""
    doubled = {s.point: s.doubled for s in seen if s.doubled}
    lost = {s.point: s.lost for s in seen if s.lost}
    match guarantee:
        case Guarantee.EXACTLY_ONCE:
            assert not doubled
            assert not lost
        case Guarantee.AT_LEAST_ONCE:
            assert not lost
            assert doubled, "at-least-once without a duplicate under any crash: the matrix kills nothing"
        case Guarantee.AT_MOST_ONCE:
            assert not doubled
            assert lost, "at-most-once without a loss under any crash: the matrix kills nothing"
