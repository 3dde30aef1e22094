"""Postgres crashes under a running driver, at every failpoint: what was prepared survives, and the driver goes on.

A server of these tests' own, restarted with `-m immediate`; real Delta tables, the inline engine, all four sinks.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.crashes import UNAVAILABLE, Cell, ended, paused_driver, resume, run_driver
from support.databases import create_database
from support.queues import prepared_database, put
from support.topologies import expected, messages
from support.verdicts import require_exact

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.postgres

MESSAGES = 9
OUTAGE_S = 1.0
GIVES_UP_WITHIN_S = 20

POINTS = [point.name for point in FAILPOINTS.values() if point.scope in ("every", "delta", "postgres")]

_numbers = itertools.count(1)


@pytest.fixture
def cell(tmp_path: Path, server: EmbeddedPostgres) -> Cell:
    name = f"outage_{next(_numbers)}"
    database = prepared_database(create_database(server.database, name))
    put(database, "q", messages(MESSAGES))
    return Cell("outage", None, Guarantee.EXACTLY_ONCE, tmp_path, database, "q")


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_of_postgres_is_outlived_by_the_driver(cell: Cell, server: EmbeddedPostgres, point: str) -> None:
    with paused_driver(cell, point) as driver:
        server.restart(immediate=True)
        resume(driver)
        assert ended(driver, point) == 0
    require_exact(cell, expected(messages(MESSAGES)))


@pytest.mark.parametrize(
    "point", ["open.after", "prepare.in_transaction", "commit.before_sink", "finish.before_commit"]
)
def test_postgres_stays_away_for_too_long(cell: Cell, server: EmbeddedPostgres, point: str) -> None:
    short = replace(cell, outage_s=OUTAGE_S)
    with paused_driver(short, point) as driver:
        server.stop("immediate")
        try:
            began_s = time.monotonic()
            resume(driver)
            assert ended(driver, point) == UNAVAILABLE
            assert OUTAGE_S <= time.monotonic() - began_s < GIVES_UP_WITHIN_S
        finally:
            server.restart()
    assert run_driver(cell) == 0
    require_exact(cell, expected(messages(MESSAGES)))
