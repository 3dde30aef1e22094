"""Negative controls of the fault tests: broken variants that the checks must catch, beside the healthy ones that pass.

Real Postgres, real Delta tables, the inline engine, all four sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from support import sabotage
from support.crashes import FAILED, FENCED, KILLED, Cell, ended, paused_driver, resume, run_driver
from support.databases import create_database
from support.queues import prepared_database, put
from support.topologies import expected, messages
from support.verdicts import require_exact

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import Fenced, StoreUnavailable
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Expectation, Slice
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.trident.ledger import ledger as module
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.graphs import Graph
from stormproof.trident.ledger.ledger import Backends, Ledger
from stormproof.trident.ledger.tables import Run

pytestmark = pytest.mark.postgres

MESSAGES = 9
LATE = b"late"


def make_cell(database: Database, folder: Path) -> Cell:
    prepared_database(database)
    put(database, "q", messages(MESSAGES))
    return Cell("controls", None, Guarantee.EXACTLY_ONCE, folder, database, "q")


@pytest.fixture
def cell(tmp_path: Path, database: Database) -> Cell:
    return make_cell(database, tmp_path)


# No fence


def wake_a_zombie(cell: Cell, broken: Callable[[], None] | None) -> tuple[int, int]:
    """How a driver that was taken over from ends, with a message to be had, and how the next one does."""
    with paused_driver(replace(cell, sabotage=broken), "open.before=pause@2") as zombie:
        assert run_driver(cell) == 0
        put(cell.database, cell.queue, [LATE])
        resume(zombie)
        woken = ended(zombie, "the zombie")
    return woken, run_driver(cell)


def test_with_the_fence_a_woken_driver_does_nothing(cell: Cell) -> None:
    assert wake_a_zombie(cell, None) == (FENCED, 0)
    require_exact(cell, expected([*messages(MESSAGES), LATE]))


def test_control_without_a_fence_a_woken_driver_leaves_a_batch_that_nobody_can_end(cell: Cell) -> None:
    assert wake_a_zombie(cell, sabotage.no_fence) == (FAILED, FAILED)
    with pytest.raises(AssertionError):
        require_exact(cell, expected([*messages(MESSAGES), LATE]))


# Confirm before commit


def die_before_the_commit(cell: Cell, broken: Callable[[], None] | None) -> None:
    assert run_driver(replace(cell, sabotage=broken), "commit.before_sink=kill") == KILLED
    assert run_driver(cell) == 0


def test_confirmed_after_the_commit_nothing_is_lost(cell: Cell) -> None:
    die_before_the_commit(cell, None)
    require_exact(cell, expected(messages(MESSAGES)))


def test_control_confirmed_before_the_commit_a_batch_is_lost(cell: Cell) -> None:
    die_before_the_commit(cell, sabotage.confirm_before_commit)
    with pytest.raises(AssertionError):
        require_exact(cell, expected(messages(MESSAGES)))


# What a prepared batch rests on survives a crash of Postgres


def crashed_while_prepared(server: EmbeddedPostgres, folder: Path, name: str, *, unlogged: bool) -> Cell:
    """A topology whose driver died together with Postgres, with one batch prepared."""
    cell = make_cell(create_database(server.database, name), folder)
    if unlogged:
        with psycopg.connect(cell.database.conninfo) as connection:
            connection.execute("alter table stormproof.txn_sink set unlogged")
    with paused_driver(cell, "prepare.after"):
        server.restart(immediate=True)
    return cell


def test_prepared_content_survives_a_crash_of_postgres(server: EmbeddedPostgres, tmp_path: Path) -> None:
    cell = crashed_while_prepared(server, tmp_path, "logged", unlogged=False)
    assert run_driver(cell) == 0
    require_exact(cell, expected(messages(MESSAGES)))


def test_control_unlogged_content_is_lost_and_the_topology_stops(server: EmbeddedPostgres, tmp_path: Path) -> None:
    cell = crashed_while_prepared(server, tmp_path, "unlogged", unlogged=True)
    assert run_driver(cell) == FAILED
    with pytest.raises(AssertionError):
        require_exact(cell, expected(messages(MESSAGES)))


def test_control_unlogged_content_rolled_forward_as_nothing_is_seen(server: EmbeddedPostgres, tmp_path: Path) -> None:
    cell = crashed_while_prepared(server, tmp_path, "unseen", unlogged=True)
    assert run_driver(replace(cell, sabotage=sabotage.take_nothing_for_everything)) == 0
    with pytest.raises(AssertionError):
        require_exact(cell, expected(messages(MESSAGES)))


# The ledger's epoch is checked under a lock


@pytest.fixture
def ledgers(database: Database) -> Iterator[tuple[Ledger, Ledger]]:
    """Two drivers' views of one ledger."""
    prepared_database(database)
    engines = [sa.create_engine(database.sqlalchemy_url, pool_size=1) for _ in range(2)]
    yield Ledger(engines[0], SystemClock(), lambda: "life"), Ledger(engines[1], SystemClock(), lambda: "life")
    for engine in engines:
        engine.dispose()


def start(ledger: Ledger) -> Run:
    return ledger.start("t", fingerprint="f", guarantee=Guarantee.EXACTLY_ONCE, source="q", graph=Graph({}))


def take_over_inside(older: Ledger, newer: Ledger) -> tuple[list[int], list[int]]:
    """What a driver finds unended that takes over while an older one is inside `open`, and what is there in the end."""
    run = start(older)
    with older.transaction(run) as tx:
        txns.open_batch(tx, 1, Guarantee.EXACTLY_ONCE, "q", Slice({}, Expectation(1, 1), 1), 1)
        mine = start(newer)
        found = unended(newer, mine)
    return found, unended(newer, mine)


def unended(ledger: Ledger, run: Run) -> list[int]:
    with ledger.transaction(run) as tx:
        return [txn.txid for txn in txns.unresolved(tx)]


def test_a_take_over_ends_an_older_drivers_transaction(ledgers: tuple[Ledger, Ledger]) -> None:
    older, newer = ledgers
    with pytest.raises(StoreUnavailable):
        take_over_inside(older, newer)
    with pytest.raises(Fenced):
        unended(older, Run("t", "life", 1))
    assert unended(newer, Run("t", "life", 2)) == []


def test_a_transaction_that_cannot_be_ended_keeps_others_from_taking_over(
    ledgers: tuple[Ledger, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backends, "record", lambda *_: None)
    monkeypatch.setattr(module, "TAKE_OVER_LOCK_TIMEOUT_MS", 20)
    monkeypatch.setattr(module, "TAKE_OVER_TRIES", 2)
    with pytest.raises(StoreUnavailable, match="stays locked"):
        take_over_inside(*ledgers)


def test_control_an_epoch_checked_without_the_lock_lets_a_row_land_after_the_scan(
    ledgers: tuple[Ledger, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def without_lock(ledger: Ledger, run: Run) -> Generator[Tx]:
        with ledger.unfenced() as tx:
            row = tx.connection.execute(sa.text("select epoch from stormproof.topology")).scalar_one()
            assert row == run.epoch
            yield tx.of(run)

    with ledgers[0].unfenced() as tx:  # a foreign key locks the topology's row as well
        tx.connection.execute(sa.text("alter table stormproof.txn drop constraint fk_txn_topology"))
    monkeypatch.setattr(Ledger, "transaction", without_lock)
    found, in_the_end = take_over_inside(*ledgers)
    assert found == []
    assert in_the_end == [1], "the older driver's row came after the newer one had looked"
