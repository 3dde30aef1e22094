"""Negative controls of the chain: with one promise's mechanism taken out, its checks must fail.

The chain itself goes through the same misfortunes with everything in place. Real Postgres, real Delta tables, the inline
engine, all four sinks, or states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import psycopg
import pytest
from support import random_code, sabotage
from support.blows import Action, Blow, Stand
from support.chain import Chain, Ordeal, ordeal
from support.contents import content
from support.crashes import FAILED, run_driver
from support.queues import put
from support.rounds import stand_on
from support.shapes import SINKS, Shape
from support.states import IN_ALL, IN_MAPS
from support.strict_tables import STRICT_TABLES
from support.topologies import SinkMode, expected, messages
from support.verdicts import violations

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.database import connect
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = pytest.mark.postgres


@dataclass(frozen=True, slots=True)
class Broken:
    """What is taken out, the misfortune at which that shows, and how."""

    sabotage: Callable[[], None]
    point: str
    action: Action
    shows: str
    at: int = 1
    shape: Shape = SINKS


BROKEN = [
    Broken(sabotage.no_fence, "open.before", Action.TAKE_OVER, "a driver ended with|PositionMismatch", at=2),
    Broken(sabotage.no_previous_check, "delta.after_log_entry", Action.KILL, "delta-fold holds", at=2),
    Broken(
        sabotage.no_transaction_identifier,
        "delta.after_log_entry",
        Action.KILL,
        "identifier says None|ends before its transaction identifier|ended with 1",
    ),
    Broken(sabotage.confirm_before_commit, "commit.before_sink", Action.KILL, "too much, too little|audit of"),
    Broken(sabotage.recompute_prepared, "commit.after_sink", Action.KILL, "delta-append holds|too much"),
    Broken(
        sabotage.guard_before_rows,
        "state.after_rows",
        Action.KILL,
        "too much, too little: .*postgres-opaque.*calls it clean",
        shape=IN_MAPS,
    ),
    Broken(
        sabotage.identifier_before_rows,
        "delta.after_log_entry",
        Action.KILL,
        "sink 'delta-opaque'.*it adds 0 of 5 rows",
        shape=IN_MAPS,
    ),
    Broken(sabotage.no_txid_check, "state.after_commit", Action.KILL, "postgres-opaque holds", shape=IN_MAPS),
    Broken(
        sabotage.late_rows_win,
        "postgres.after_rows",
        Action.KILL,
        "too much, too little: .*postgres_upsert",
        shape=STRICT_TABLES,
    ),
    Broken(sabotage.no_txid_of_keys, "state.after_rows", Action.KILL, "own-opaque holds", at=5, shape=IN_ALL),
]


@pytest.fixture
def stand(postgres: EmbeddedPostgres) -> Iterator[Stand]:
    with stand_on(postgres, "controls", proxied=False) as stand:
        yield stand


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.sabotage.__name__)
def test_control_what_is_taken_out_shows(stand: Stand, broken: Broken) -> None:
    stand.cell = replace(stand.cell, sabotage=broken.sabotage)
    with pytest.raises(AssertionError, match=broken.shows) as caught:
        Chain(stand, broken.shape).undergo(ordeal(FAILPOINTS[broken.point], broken.action, broken.at))
    print(caught.value)


def test_control_content_that_a_crash_of_postgres_takes_shows(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("pg"))
    server.acquire()
    crash = Ordeal("a crash between two sinks", ((Blow("commit.after_sink", Action.CRASH),),), "commit.after_sink")
    try:
        with stand_on(server, "logged") as stand:
            Chain(stand).undergo(crash)
        with stand_on(server, "unlogged") as stand:
            with psycopg.connect(stand.database.conninfo) as connection:
                connection.execute("alter table stormproof.txn_sink set unlogged")
            with pytest.raises(AssertionError, match="ended with 1"):
                Chain(stand).undergo(crash)
    finally:
        server.release()


def restored(stand: Stand, server: EmbeddedPostgres) -> list[bytes]:
    """Ledger and queue restored from a backup, and new messages put; the Delta table stays ahead. All that was put."""
    name, backup = str(dict(stand.database.parameters)["dbname"]), "backup_of_controls"

    def copy(of: str, to: str) -> None:
        with connect(server.database, application_name="tests", autocommit=True) as connection:
            connection.execute(f"drop database if exists {to} with (force)".encode())
            connection.execute(f"create database {to} template {of}".encode())

    stand.give(messages(9, "before"))
    assert stand.run() == 0
    copy(name, backup)
    stand.give(messages(9, "after"))
    assert stand.run() == 0
    copy(backup, name)
    stand.give(messages(9, "late"))
    return stand.put


@pytest.fixture
def one_delta_table(stand: Stand) -> Stand:
    """A table in the restored database would be told by its id."""
    stand.cell = replace(stand.cell, mode=SinkMode.DELTA_APPEND)
    return stand


def test_a_ledger_that_was_restored_is_refused(one_delta_table: Stand, postgres: EmbeddedPostgres) -> None:
    restored(one_delta_table, postgres)
    assert run_driver(one_delta_table.cell) == FAILED


def test_control_skipped_by_number_alone_a_batch_is_lost(one_delta_table: Stand, postgres: EmbeddedPostgres) -> None:
    one_delta_table.cell = replace(one_delta_table.cell, sabotage=sabotage.skip_by_number_alone)
    should = expected(restored(one_delta_table, postgres))
    assert run_driver(one_delta_table.cell) == 0
    lost = should - content(SinkMode.DELTA_APPEND, "controls", one_delta_table.cell.folder, one_delta_table.database)
    assert lost["late1"]
    assert violations(one_delta_table.cell)


def test_control_a_prepared_batch_that_runs_again_is_from_two_calls(stand: Stand) -> None:
    """The sinks that held it keep what the first run made, the others get the second's."""
    stand.cell = replace(stand.cell, sabotage=sabotage.recompute_prepared, build=random_code.build)
    put(stand.database, stand.cell.queue, messages(9))
    kill = Blow("commit.after_sink", Action.KILL)
    assert stand.run((kill,)) != 0
    assert stand.run() == 0
    with pytest.raises(AssertionError, match="instead"):
        random_code.require_one_call(stand.cell, stand.database, messages(9))
