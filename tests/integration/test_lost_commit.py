"""A COMMIT whose answer is lost: whether it took place is read again, and it is applied once.

Real Postgres behind a proxy that cuts the connection, real Delta tables, the inline engine, all four sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from support.crashes import Cell, ended, paused_driver, resume
from support.proxy import Loses, Proxy
from support.queues import prepared_database, put
from support.topologies import expected, messages
from support.verdicts import require_exact

from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres

MESSAGES = 9

PLACES = [
    "start.after_epoch",  # the next COMMIT is the subscription's
    "open.in_transaction",
    "prepare.in_transaction",
    "finish.in_transaction",
    "finish.before_commit",
    "postgres.after_guard",  # the sink's own
    "postgres.after_rows",
]


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    with Proxy(prepared_database(database)) as proxy:
        yield proxy


@pytest.fixture
def cell(tmp_path: Path, database: Database, proxy: Proxy) -> Cell:
    put(database, "q", messages(MESSAGES))
    return Cell("lost", None, Guarantee.EXACTLY_ONCE, tmp_path, proxy.database, "q")


def test_the_proxy_loses_what_it_says(database: Database, proxy: Proxy) -> None:
    def insert(n: int) -> None:
        with psycopg.connect(proxy.database.conninfo) as connection:
            connection.execute("insert into t values (%s)", (n,))

    with psycopg.connect(database.conninfo, autocommit=True) as direct:
        direct.execute("create table t (n int)")
        insert(1)
        cases: list[tuple[int, Loses]] = [(2, "answer"), (3, "commit")]
        for n, loses in cases:
            proxy.lose_next(loses)
            with pytest.raises(psycopg.OperationalError):
                insert(n)
        insert(4)
        assert direct.execute("select n from t order by n").fetchall() == [(1,), (2,), (4,)]
    assert proxy.lost == 2


@pytest.mark.parametrize("loses", ["answer", "commit"])
@pytest.mark.parametrize("place", PLACES)
def test_a_lost_commit_is_applied_once(cell: Cell, proxy: Proxy, database: Database, place: str, loses: Loses) -> None:
    with paused_driver(cell, place) as driver:
        proxy.lose_next(loses)
        resume(driver)
        assert ended(driver, place) == 0
    assert proxy.lost == 1
    require_exact(replace(cell, database=database), expected(messages(MESSAGES)))
