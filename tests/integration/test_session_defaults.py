"""Defaults of a role or a database that would break a promise: each is overridden, refused by name, or without effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from support.pooler import Pooler
from support.queues import prepared_database

from stormproof import PostgresMap, PostgresQueue, PostgresSink, Settings, Topology, sum_
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.errors import SettingsError, StoreUnavailable
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.ledger.database import ledger_engine

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]


def set_default(database: Database, setting: str) -> None:
    name = dict(database.parameters)["dbname"]
    with closing(psycopg.connect(database.conninfo, autocommit=True)) as connection:
        connection.execute(f"alter database {name} set {setting}".encode())


def shown(database: Database, setting: str) -> str:
    with closing(connect(database, application_name="tests", autocommit=True)) as connection:
        row = connection.execute(f"show {setting}".encode()).fetchone()
    assert row is not None
    return str(row[0])


def topology(queue: str = "lines") -> Topology:
    made = Topology("defaults")
    lines = made.stream("lines", PostgresQueue(queue, schema="word string, n double, at timestamp", max_attempts=1))
    lines.into(PostgresSink("words"))
    lines.group_by("word").persistent_aggregate(n=sum_("n"), state=PostgresMap("totals"), state_name="t")
    return made


def settings_of(database: Database, folder: Path) -> Settings:
    return Settings(
        database_url=database.without_password, home=folder, poll_interval_s=0.01, outage_s=1.0, batch_messages=2
    )


PAYLOADS = [
    b'{"word": "a", "n": 0.1, "at": "2026-01-02T03:04:05+00:00"}',
    b'{"word": "b", "n": 0.30000000000000004, "at": "2026-07-02T03:04:05+02:00"}',
    b'{"word": "a", "n": null, "at": null}',
    b"no JSON",
]


@pytest.mark.parametrize(
    "defaults",
    [
        pytest.param(
            [
                "synchronous_commit = off",
                "default_transaction_isolation = 'serializable'",
                "default_transaction_deferrable = on",
                "lock_timeout = '1ms'",
                "idle_in_transaction_session_timeout = '1ms'",
                "extra_float_digits = -5",
                "array_nulls = off",
                "quote_all_identifiers = on",
            ],
            id="overridden",
        ),
        pytest.param(
            [
                "default_transaction_isolation = 'repeatable read'",
                "TimeZone = 'Asia/Kathmandu'",
                "DateStyle = 'SQL, DMY'",
                "IntervalStyle = 'sql_standard'",
                "bytea_output = 'escape'",
                "standard_conforming_strings = off",
                "backslash_quote = off",
                "session_replication_role = 'replica'",
                "row_security = off",
                "enable_indexscan = off",
                "enable_indexonlyscan = off",
                "jit_above_cost = 0",
                "client_min_messages = 'debug1'",
                "search_path = 'elsewhere', 'public'",
            ],
            id="without-effect",
        ),
    ],
)
def test_a_topology_runs_the_same_whatever_the_database_sets_by_default(
    database: Database, tmp_path: Path, defaults: list[str]
) -> None:
    prepared_database(database)
    for setting in defaults:
        set_default(database, setting)
    queue = PostgresQueue("lines", schema="word string, n double, at timestamp", database=database)
    try:
        assert queue.put(PAYLOADS).messages == 4
        assert [message.payload for message in queue.peek()] == PAYLOADS
        topology().run(engine="inline", settings=settings_of(database, tmp_path), until_idle=True, max_batches=6)
        assert queue.stats().messages_put == 4
    finally:
        queue.close()
    options = "-c TimeZone=UTC -c DateStyle=ISO -c extra_float_digits=1 -c default_transaction_deferrable=off"
    with closing(psycopg.connect(database.conninfo, options=options, autocommit=True)) as connection:
        rows = connection.execute("select word, n, at::text from words order by n").fetchall()
        totals = connection.execute("select word, n from totals order by word").fetchall()
    assert rows == [
        ("a", 0.1, "2026-01-02 03:04:05+00"),
        ("b", 0.30000000000000004, "2026-07-02 01:04:05+00"),
        ("a", None, None),
    ]
    assert totals == [("a", 0.1), ("b", 0.30000000000000004)]


def test_options_in_the_url_are_the_users_own_word(database: Database) -> None:
    set_default(database, "statement_timeout = '1s'")
    assert shown(database, "statement_timeout") == "0"
    chosen = Database.of({**dict(database.parameters), "options": "-c statement_timeout=7s"})
    assert shown(chosen, "statement_timeout") == "7s"


@pytest.mark.parametrize("limit", ["statement_timeout", "idle_session_timeout", "transaction_timeout"])
def test_a_time_limit_of_a_millisecond_by_default_is_lifted(database: Database, tmp_path: Path, limit: str) -> None:
    prepared_database(database)
    with closing(psycopg.connect(database.conninfo, autocommit=True)) as connection:
        known = connection.execute("select 1 from pg_settings where name = %s", (limit,)).fetchone()
    if known is None:
        pytest.skip(f"this Postgres has no {limit}")
    set_default(database, f"{limit} = '1ms'")
    with closing(PostgresQueue("lines", database=database)) as queue:
        assert queue.put(PAYLOADS).messages == 4
    found = topology().run(engine="inline", settings=settings_of(database, tmp_path), until_idle=True, max_batches=6)
    assert (found.messages, found.failed) == (3, 1)


def test_options_of_the_environment_and_of_the_url_stand_beside_ours(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_default(database, "statement_timeout = '1ms'")
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=5MB")
    assert (shown(database, "statement_timeout"), shown(database, "work_mem")) == ("0", "5MB")
    chosen = Database.of({**dict(database.parameters), "options": "-c work_mem=6MB"})
    assert (shown(chosen, "statement_timeout"), shown(chosen, "work_mem")) == ("0", "6MB")


def test_a_pooler_of_sessions_serves_without_our_options(database: Database) -> None:
    set_default(database, "synchronous_commit = off")
    with Pooler(database, "session") as pooler:
        assert shown(pooler.database, "synchronous_commit") == "on"
        assert shown(pooler.database, "jit") == "off"


def test_a_pooler_of_transactions_is_refused(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    with Pooler(database, "transaction") as pooler:
        with pytest.raises(SettingsError, match=r"another backend in each transaction.* pool_mode = session"):
            shown(pooler.database, "jit")
        with pytest.raises(SettingsError, match="another backend"):
            topology().run(engine="inline", settings=settings_of(pooler.database, tmp_path), until_idle=True)


@pytest.mark.parametrize("level", ["local", "remote_apply"])
def test_a_commit_that_is_durable_already_stays_as_it_is(database: Database, level: str) -> None:
    set_default(database, f"synchronous_commit = {level}")
    assert shown(database, "synchronous_commit") == level


def test_a_database_that_takes_no_writes_is_named(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    set_default(database, "default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable, match=r"takes no writes.*default_transaction_read_only is on"):
        topology().run(engine="inline", settings=settings_of(database, tmp_path), until_idle=True)
    with (
        closing(PostgresQueue("lines", database=database)) as queue,
        pytest.raises(StoreUnavailable, match="takes no writes"),
    ):
        queue.put([b"m"])


@pytest.fixture(scope="module")
def lazy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server of which no commit is durable by default, and whose WAL is written late."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("lazy"))
    server.acquire()
    with closing(psycopg.connect(server.database.conninfo, autocommit=True)) as connection:
        connection.execute("alter system set wal_writer_delay = '10s'")
        connection.execute("alter system set wal_writer_flush_after = '1GB'")
        connection.execute("alter system set autovacuum = off")
        connection.execute("alter system set checkpoint_timeout = '1h'")
        connection.execute("create database lazy template template0")
    server.restart()
    yield server
    server.release()


def test_a_put_and_a_prepare_outlive_a_crash_where_commits_are_asynchronous_by_default(
    lazy: EmbeddedPostgres, tmp_path: Path
) -> None:
    database = prepared_database(lazy.database.with_name("lazy"))
    set_default(database, "synchronous_commit = off")
    queue = PostgresQueue("lines", database=database)
    queue.put([b"first"])  # makes the table
    engine = ledger_engine(database)
    with closing(psycopg.connect(database.conninfo, autocommit=True)) as control:
        control.execute("create table plain (n int)")
        control.execute("checkpoint")
        queue.put([b"ours"])
        with engine.begin() as ledger:
            ledger.exec_driver_sql("create table of_the_ledger (n int)")
        control.execute("insert into plain values (1)")  # has returned, and is lost
    lazy.restart(immediate=True)
    queue.drop_connections()
    engine.dispose()
    with closing(connect(database, application_name="tests", autocommit=True)) as connection:
        assert connection.execute("select payload from stormproof_queue.lines order by id").fetchall() == [
            (b"first",),
            (b"ours",),
        ]
        assert connection.execute("select count(*) from of_the_ledger").fetchone() == (0,)
        assert connection.execute("select count(*) from plain").fetchone() == (0,)  # the control
    queue.close()


def test_an_audit_may_wait_for_the_sinks_for_longer_than_a_driver(database: Database) -> None:
    """A snapshot stays open while the records of sinks are read, which may take minutes."""
    asks = sa.text("show idle_in_transaction_session_timeout")
    engine = ledger_engine(prepared_database(database))
    with AuditLedger(engine).snapshot() as snapshot:
        assert snapshot.connection.scalar(asks) == "1h"
    with engine.connect() as connection:  # the control: the same session outside of a snapshot
        assert connection.scalar(asks) == "1min"
    engine.dispose()
