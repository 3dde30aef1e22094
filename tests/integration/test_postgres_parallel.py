"""Parallel loads: tasks copy their files into staging tables, the commit moves them; exact whatever becomes of a task."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.operated import Operated
from support.servers import sql
from support.sink_harness import SinkHarness
from support.topologies import source_of

from stormproof import MemorySource, PostgresSink, Topology, count
from stormproof.core.base.errors import SinkRefused, UsageError
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sinks.postgres import rows
from stormproof.sinks.postgres import session as session_module
from stormproof.sinks.postgres.rows import copy_rows
from stormproof.sinks.protocol import CommitOutcome, Held

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]

A, B = {"a": 1, "b": 2}, {"b": 5, "c": 7}
NAME = "loads"


def loading(harness: SinkHarness, rows: int = 1) -> SinkHarness:
    harness.sink = PostgresSink(
        "counts", name="counts", database=harness.database, staging=harness.folder / "staged", parallel_load_rows=rows
    )
    return harness


@pytest.fixture
def harness(tmp_path: Path, database: Database) -> SinkHarness:
    return loading(SinkHarness("postgres-append", tmp_path, database))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the driver copied by itself, call by call."""
    seen: list[int] = []

    def counting(*given: Any) -> int:
        seen.append(copy_rows(*given))
        return seen[-1]

    monkeypatch.setattr(session_module, "copy_rows", counting)
    return seen


def staged(harness: SinkHarness) -> int:
    """How many staging tables there are; each has its row in the record, and each row its table."""
    (tables,) = harness.sql(
        "select count(*) from pg_tables where schemaname = 'stormproof_sink' and tablename ~ '^load_'"
    )
    assert harness.sql("select count(*) from stormproof_sink.load") == [tables]
    return int(tables[0])


def test_what_tasks_loaded_is_moved_and_the_driver_copies_nothing(harness: SinkHarness, copied: list[int]) -> None:
    with closing(harness.open()) as session:
        one = harness.prepare(session, 1, None, A, tasks=2)
        assert staged(harness) == 2
        assert session.commit(one, checked=True).outcome is CommitOutcome.APPLIED
        assert session.commit(one, checked=True).outcome is CommitOutcome.ALREADY_HELD
        assert staged(harness) == 0
        session.commit(harness.prepare(session, 2, 1, B), checked=True)
        assert [(e.txid, e.rows) for e in session.evidence(0, None).entries] == [(1, 2), (2, 2)]
    assert harness.rows() == Counter([*A.items(), *B.items()])
    assert copied == []


def test_small_files_are_left_to_the_driver(tmp_path: Path, database: Database, copied: list[int]) -> None:
    harness = loading(SinkHarness("postgres-append", tmp_path, database), rows=2)
    with closing(harness.open()) as session:
        transaction = harness.prepare(session, 1, None, {"a": 1, "b": 2, "c": 3}, tasks=2)
        assert staged(harness) == 1
        session.commit(transaction, checked=True)
    assert copied == [1]
    assert harness.rows() == Counter({("a", 1): 1, ("b", 2): 1, ("c", 3): 1})


def test_rows_by_key_are_left_to_the_driver(tmp_path: Path, database: Database) -> None:
    harness = loading(SinkHarness("postgres-fold", tmp_path, database))
    with closing(harness.open()) as session:
        session.commit(harness.prepare(session, 1, None, A), checked=True)
    assert harness.sql("select to_regclass('stormproof_sink.load')") == [(None,)]
    assert harness.rows() == Counter(A.items())


@pytest.mark.parametrize("place", ["postgres.after_guard", "postgres.after_rows", "postgres.after_commit"])
def test_a_crash_inside_the_commit_leaves_all_or_nothing(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch, place: str, copied: list[int]
) -> None:
    def crash(name: str) -> None:
        if name == place:
            raise KeyboardInterrupt

    with closing(harness.open(1)) as session:
        transaction = harness.prepare(session, 1, None, A)
        with monkeypatch.context() as patched:
            patched.setattr(session_module, "failpoint", crash)
            with pytest.raises(KeyboardInterrupt):
                session.commit(transaction, checked=True)
    done = place == "postgres.after_commit"
    with closing(harness.open(2)) as session:
        assert staged(harness) == (0 if done else 1)
        outcome = session.commit(transaction, checked=True).outcome
        assert outcome is (CommitOutcome.ALREADY_HELD if done else CommitOutcome.APPLIED)
        session.finished(transaction)
        assert staged(harness) == 0
    assert harness.rows() == Counter(A.items())
    assert copied == []


def test_a_task_that_dies_while_it_loads_leaves_no_table(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    def dies(*given: Any) -> int:
        copy_rows(*given)
        raise KeyboardInterrupt

    with closing(harness.open()) as session:
        with monkeypatch.context() as patched:
            patched.setattr(rows, "copy_rows", dies)
            with pytest.raises(KeyboardInterrupt):
                harness.prepare(session, 1, None, B)
        assert staged(harness) == 0
        session.commit(harness.prepare(session, 1, None, A, attempt=2), checked=True)
    assert harness.rows() == Counter(A.items())
    assert copied == []


def test_what_dead_attempts_loaded_is_swept_and_never_read(harness: SinkHarness) -> None:
    with closing(harness.open()) as session:
        harness.prepare(session, 1, None, B, attempt=1)
        live = harness.prepare(session, 1, None, A, attempt=2)
        other = SinkHarness(harness.kind, harness.folder, harness.database)
        other.identity = type(harness.identity)("topology", "inc-2", "counts")
        with closing(loading(other).open()) as stranger:
            other.prepare(stranger, 1, None, B)
            assert staged(harness) == 3
            assert session.sweep(lambda txid, attempt, _file: (txid, attempt) == (1, 1)) == 2, "a file and a table"
            assert staged(harness) == 2
        session.commit(live, checked=True)
        harness.prepare(session, 1, None, B, attempt=1)  # a zombie's, late
        assert session.held() == Held(1, live.digest)
        session.finished(live)
        assert staged(harness) == 1, "the other life's alone"
    assert harness.rows() == Counter(A.items())


@pytest.mark.parametrize(
    "change",
    [
        "update stormproof_sink.load set digest = 'other'",
        "update stormproof_sink.load set rows = 1",
        "delete from stormproof_sink.load",
        "alter table counts alter n type numeric; alter table counts alter n type integer",
        "alter table counts alter n type smallint",
    ],
)
def test_a_staging_table_that_does_not_fit_is_not_used(harness: SinkHarness, copied: list[int], change: str) -> None:
    with closing(harness.open()) as session:
        transaction = harness.prepare(session, 1, None, A)
        harness.sql(change)
        session.commit(transaction, checked=True)
        session.finished(transaction)
    assert copied == [2]
    assert harness.rows() == Counter(A.items())


def test_a_task_that_cannot_load_costs_no_batch(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch, copied: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise psycopg.OperationalError("no route")

    with closing(harness.open()) as session:
        with monkeypatch.context() as patched:
            patched.setattr(rows, "connect", away)
            transaction = harness.prepare(session, 1, None, A)
        session.commit(transaction, checked=True)
    assert "left to the driver: no route" in caplog.text
    assert copied == [2]
    assert harness.rows() == Counter(A.items())


def test_a_file_that_reads_otherwise_than_it_was_written_is_not_loaded(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "file_digest", lambda _path: "another")
    with closing(harness.open()) as session:
        harness.prepare(session, 1, None, A)
    assert staged(harness) == 0


@pytest.fixture
def own_server(server: EmbeddedPostgres) -> Database:
    with psycopg.connect(server.database.conninfo, autocommit=True) as connection:
        connection.execute("drop database if exists loads with (force)")
        connection.execute("create database loads template template0")
    return server.database.with_name("loads")


@pytest.mark.parametrize("unlogged", [False, True], ids=["logged", "control-unlogged"])
def test_what_was_loaded_outlives_a_crash_of_the_server(
    tmp_path: Path, server: EmbeddedPostgres, own_server: Database, copied: list[int], *, unlogged: bool
) -> None:
    """Unlogged staging is emptied by a crash, and is a control: the count sees that rows are missing."""
    harness = loading(SinkHarness("postgres-append", tmp_path, own_server))
    with closing(harness.open()) as session:
        transaction = harness.prepare(session, 1, None, A)
        if unlogged:
            (name,) = harness.sql(
                "select format('%I.%I', schemaname, tablename) from pg_tables where tablename ~ '^load_'"
            )
            harness.sql(f"alter table {name[0]} set unlogged")
    server.restart(immediate=True)
    with closing(harness.open(2)) as session:
        if unlogged:
            with pytest.raises(SinkRefused, match="0 rows reached the table instead of the 2"):
                session.commit(transaction, checked=True)
            return
        session.commit(transaction, checked=True)
    assert harness.rows() == Counter(A.items())
    assert copied == []


def test_a_role_that_may_make_no_tables_has_the_driver_copy_and_is_told(
    harness: SinkHarness, database: Database, copied: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    role = "test_loads_" + str(dict(database.parameters)["dbname"])
    sql(database, f"create role {role} login")
    try:
        with closing(harness.open()):
            pass  # the owner makes the tables
        harness.sql(f"grant insert on counts to {role}; grant usage on schema stormproof_sink to {role}")
        harness.sql(f"grant select, insert, update, delete on all tables in schema stormproof_sink to {role}")
        limited = loading(
            SinkHarness(harness.kind, harness.folder, Database.of({**dict(database.parameters), "user": role}))
        )
        with caplog.at_level(logging.WARNING, "stormproof.sink"), closing(limited.open(2)) as session:
            session.commit(limited.prepare(session, 1, None, A), checked=True)
        assert f'GRANT CREATE ON SCHEMA stormproof_sink TO "{role}"' in caplog.text
        assert copied == [2]
        copied.clear()
        harness.sql(f"grant create on schema stormproof_sink to {role}")
        with closing(limited.open(3)) as session:
            session.commit(limited.prepare(session, 2, 1, B), checked=True)
            session.finished(limited.prepare(session, 2, 1, B))
        assert copied == []
    finally:
        sql(database, f"drop owned by {role} cascade")
        sql(database, f"drop role {role}")


def test_rows_that_a_trigger_drops_are_counted_here_too(harness: SinkHarness) -> None:
    harness.sql(
        "create table counts (word text, n bigint); create function drop_b() returns trigger language plpgsql as "
        "$$ begin if new.word = 'b' then return null; end if; return new; end $$;"
        "create trigger t before insert on counts for each row execute function drop_b()"
    )
    with closing(harness.open()) as session:
        assert session.commit(harness.prepare(session, 1, None, A), checked=True).dropped == 1
    assert harness.rows() == Counter({("a", 1): 1})


def test_the_writer_travels_to_executors(harness: SinkHarness) -> None:
    with closing(harness.open()) as session:
        writer = session.writer()
        assert pickle.loads(pickle.dumps(writer)) == writer  # noqa: S301 - made here


@pytest.mark.parametrize("rows", [0, -1, 1.5, "many", True])
def test_a_number_of_rows_that_is_none_is_refused(rows: Any) -> None:
    with pytest.raises(UsageError, match="parallel_load_rows"):
        PostgresSink("t", parallel_load_rows=rows)


def test_explain_says_who_loads() -> None:
    t = Topology("explained")
    lines = t.stream("lines", MemorySource("lines", [b"a"], schema="line string"))
    lines.into(PostgresSink("words", parallel_load_rows=1_000_000), PostgresSink("plain"))
    lines.group_by("line").persistent_aggregate(n=count()).into(PostgresSink("counts", parallel_load_rows=5))
    said = {sink.name: sink.how for sink in t.explain().sinks}
    assert said["postgres.plain"] is None
    assert "copied by the driver" in str(said["postgres.counts"])
    assert "append, loaded by tasks of 1,000,000 rows or more, other rows by the driver" in str(t.explain())


def test_a_topology_loads_in_parallel_and_verifies(operated: Operated) -> None:
    t = Topology(NAME)
    lines = t.stream("lines", source_of(NAME, operated.cell.database))
    words = lines.flat_map(str.split, "line", schema="word string")
    words.into(PostgresSink("words", name="sink", parallel_load_rows=2))
    operated.put(b"a b c", b"d")
    operated.run(t)
    operated.put(b"e")
    operated.run(t)
    assert operated.sql("select string_agg(word, '' order by word) from words") == [("abcde",)]
    assert operated.sql("select count(*) from stormproof_sink.load") == [(0,)]
    operated.verify()
