"""Drivers that are paused, taken over from, and woken: they do no harm, stop with `Fenced`, and hold nobody up.

Real Postgres, real Delta tables, the inline engine, one topology with all four sinks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.contents import content
from support.crashes import FENCED, Cell, ended, paused_driver, resume, run_driver
from support.queues import prepared_database, put
from support.topologies import SinkMode, expected, messages
from support.verdicts import require_exact, require_verified

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

MESSAGES = 9
TAKE_OVER_MAX_S = 15
"""Far above what a take-over with all of its batches takes, far below any lock's or lease's time-out that it may meet."""

POINTS = [
    point.name
    for point in FAILPOINTS.values()
    if point.scope in ("every", "delta", "postgres") and point.name != "start.before_epoch"  # has no epoch yet
]


@pytest.fixture
def cell(tmp_path: Path, database: Database) -> Cell:
    prepared_database(database)
    put(database, "q", messages(MESSAGES))
    return Cell("zombies", None, Guarantee.EXACTLY_ONCE, tmp_path, database, "q")


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_that_stands_still_is_taken_over_from_and_does_no_harm(cell: Cell, point: str) -> None:
    with paused_driver(cell, point) as zombie:
        began_s = time.monotonic()
        assert run_driver(cell) == 0
        took_s = time.monotonic() - began_s
        print(f"take-over at {point}, with all that was left to do: {took_s:.2f} s")
        # More to do, so that a driver that does not know that it is over would do it.
        put(cell.database, cell.queue, [b"late"])
        resume(zombie)
        assert ended(zombie, point) == FENCED
    require_exact(cell, expected(messages(MESSAGES)))
    assert took_s < TAKE_OVER_MAX_S


@pytest.mark.parametrize("point", ["run.after", "delta.after_check", "postgres.after_rows"])
@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_the_weaker_guarantees_keep_what_they_promise(cell: Cell, guarantee: Guarantee, point: str) -> None:
    cell = replace(cell, guarantee=guarantee)
    should = expected(messages(MESSAGES))
    with paused_driver(cell, point) as zombie:
        assert run_driver(cell) == 0
        resume(zombie)
        assert ended(zombie, point) == FENCED
    for mode in SinkMode:
        found = content(mode, cell.name, cell.folder, cell.database)
        assert not (should - found if guarantee is Guarantee.AT_LEAST_ONCE else found - should), mode
    require_verified(cell)
