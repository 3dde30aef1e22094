"""Attacks on the guarantees where two rules meet: failures and crashes, leases and clocks, one guarantee after another."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.bomb import BOMB, arm
from support.contents import content
from support.crashes import KILLED, Cell, ended, paused_driver, resume, run_driver
from support.queues import prepared_database, put
from support.topologies import MAX_ATTEMPTS, POISON, SinkMode, expected, messages
from support.verdicts import require_verified, violations

from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres


def cell_of(database: Database, folder: Path, guarantee: Guarantee, mode: SinkMode | None = None) -> Cell:
    return Cell("attacked", mode, guarantee, folder, prepared_database(database), "attacked")


def rows(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return [] if cursor.description is None else cursor.fetchall()


def require_exact(cell: Cell, payloads: list[bytes]) -> None:
    for mode in SinkMode if cell.mode is None else [cell.mode]:
        assert content(mode, cell.name, cell.folder, cell.database) == expected(payloads), mode
    require_verified(cell)


# -- failures of messages, and a crash between them and their end --------------------------------------------------------

CRASHES = (
    "prepare.in_transaction",
    "prepare.after",
    "commit.after_sink",
    "finish.in_transaction",
    "finish.before_commit",
    "finish.after",
    "abort.in_transaction",
    "abort.after",
)


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
@pytest.mark.parametrize("point", CRASHES)
def test_a_failure_counts_once_whatever_is_killed(
    point: str, guarantee: Guarantee, database: Database, tmp_path: Path
) -> None:
    cell = cell_of(database, tmp_path, guarantee, SinkMode.POSTGRES_FOLD)
    payloads = messages(9)
    put(database, cell.queue, payloads)
    assert run_driver(cell, f"{point}=kill") == KILLED
    assert not violations(cell)
    run_driver(cell, f"{point}=kill")
    assert not violations(cell)
    assert run_driver(cell) == 0
    ((payload, failed, history),) = rows(database, "select payload, times_failed, history from stormproof.dead_letter")
    assert bytes(payload) == POISON
    assert failed == len(history) == MAX_ATTEMPTS
    assert [entry["reason"] for entry in history] == ["error"] * MAX_ATTEMPTS
    assert rows(database, "select count(*) from stormproof.pending_retry") == [(0,)]
    assert rows(database, "select count(*) from stormproof.pending_slice") == [(0,)]
    if guarantee is Guarantee.EXACTLY_ONCE:
        require_exact(cell, payloads)
    else:
        assert not expected(payloads) - content(SinkMode.POSTGRES_FOLD, cell.name, tmp_path, database)
        require_verified(cell)


def test_batches_without_a_row_are_committed_whatever_is_killed(database: Database, tmp_path: Path) -> None:
    """Empty messages make no tuple: the batch is committed empty, so that each sink holds exactly the ledger's txids."""
    cell = cell_of(database, tmp_path, Guarantee.EXACTLY_ONCE)
    put(database, cell.queue, [b""] * 12)
    for point in ("prepare.after", "delta.after_log_entry", "postgres.after_commit", "finish.before_commit"):
        assert run_driver(cell, f"{point}=kill") == KILLED
        assert not violations(cell)
    assert run_driver(cell) == 0
    require_exact(cell, [])
    report = require_verified(cell)
    assert report.checked.evidence == len(SinkMode) * report.checked.committed > 0


def test_a_message_that_kills_its_driver_ends_as_a_dead_letter(database: Database, tmp_path: Path) -> None:
    cell = replace(cell_of(database, tmp_path, Guarantee.EXACTLY_ONCE, SinkMode.POSTGRES_FOLD), sabotage=arm)
    payloads = messages(9)
    put(database, cell.queue, [*payloads[:4], BOMB, *payloads[4:]])
    codes = [run_driver(cell)]
    while codes[-1] == KILLED and len(codes) < 25:
        codes.append(run_driver(cell))
    assert codes[-1] == 0, f"after {len(codes)} starts the message still kills every driver"
    letters = dict(rows(database, "select payload, reason from stormproof.dead_letter"))
    assert {bytes(k): v for k, v in letters.items()} == {POISON: "error", BOMB: "worker_lost"}
    require_exact(cell, payloads)


# -- leases and clocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
@pytest.mark.parametrize("point", ["open.after", "run.after", "prepare.before"])
def test_a_driver_whose_lease_ran_out_goes_on_by_itself(
    point: str, guarantee: Guarantee, database: Database, tmp_path: Path
) -> None:
    """A suspended machine, or a jump of the server's clock: nobody took over, so there is nobody to leave it to."""
    cell = cell_of(database, tmp_path, guarantee, SinkMode.DELTA_APPEND)
    payloads = messages(9)
    put(database, cell.queue, payloads)
    with paused_driver(cell, point) as driver:
        assert rows(
            database,
            "update stormproof.pending_slice set expires_at = clock_timestamp() - interval '1 hour'"
            " where state = 'open' returning 1",
        )
        resume(driver)
        assert ended(driver, point) == 0
    require_exact(cell, payloads)


# -- one guarantee after another -----------------------------------------------------------------------------------------

POINTS = (
    "open.after",
    "run.after",
    "prepare.after",
    "commit.before_sink",
    "commit.after_sink",
    "delta.after_log_entry",
    "postgres.after_commit",
    "finish.in_transaction",
    "finish.after",
)


@pytest.mark.parametrize("weaker", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_guarantees_may_change_from_start_to_start(
    weaker: Guarantee, database: Database, tmp_path: Path, seed: int
) -> None:
    """All of a walk's drivers share one incarnation; each dies somewhere. What both guarantees promise must hold."""
    rng = random.Random(seed)
    cell = cell_of(database, tmp_path, weaker)
    payloads: list[bytes] = []
    for start in range(10):
        fresh = messages(4, prefix=f"s{start}w")
        put(database, cell.queue, fresh)
        payloads += fresh
        chosen = rng.choice([Guarantee.EXACTLY_ONCE, weaker])
        armed = f"{rng.choice(POINTS)}=kill@{rng.randint(1, 2)}"
        code = run_driver(replace(cell, guarantee=chosen), armed)
        assert code in (0, KILLED), f"start {start}, {chosen}, {armed}: {code}"
        found = violations(cell)
        assert not found, f"start {start}, {chosen}, {armed}: {found}"
        require_promise(weaker, cell, payloads, finished=False)
    assert run_driver(replace(cell, guarantee=Guarantee.EXACTLY_ONCE)) == 0
    require_promise(weaker, cell, payloads, finished=True)
    assert not violations(cell)


def require_promise(weaker: Guarantee, cell: Cell, payloads: list[bytes], *, finished: bool) -> None:
    should = expected(payloads)
    for mode in SinkMode:
        held = content(mode, cell.name, cell.folder, cell.database)
        extra, missing = held - should, should - held
        if weaker is Guarantee.AT_MOST_ONCE:
            assert not extra, mode
        elif finished:
            assert not missing, mode


def test_exactly_once_after_a_crash_at_least_once_doubles_nothing_more(database: Database, tmp_path: Path) -> None:
    cell = cell_of(database, tmp_path, Guarantee.AT_LEAST_ONCE)
    first, second = messages(3, prefix="a"), messages(3, prefix="b")
    put(database, cell.queue, first)
    assert run_driver(cell, "commit.after_sink=kill") == KILLED
    put(database, cell.queue, second)
    strict = replace(cell, guarantee=Guarantee.EXACTLY_ONCE)
    for point in ("prepare.after", "commit.after_sink", "finish.before_commit"):
        assert run_driver(strict, f"{point}=kill@2") == KILLED
    assert run_driver(strict) == 0
    for mode in SinkMode:
        extra = content(mode, cell.name, tmp_path, database) - expected([*first, *second])
        assert not set(extra) & set(expected(second)) - {"common"}, mode
        assert extra - expected(first) == Counter(), mode
    assert not violations(cell)
