"""A commit goes by what the one before it knew of the table, and looks again while its rows lock it: no change in between is
overlooked, and few answers are waited for.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from support.sink_harness import SinkHarness

from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import APPLIED, PreparedTransaction, SinkIdentity
from stormproof.sinks.postgres import refusals
from stormproof.sinks.postgres import session as session_module
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.sinks.postgres.sink import PostgresSink

pytestmark = pytest.mark.postgres

A, B, C = {"a": 1, "b": 2}, {"c": 3}, {"d": 4}
ASKED = {"postgres-append": ["pipeline", "copy", "pipeline"]}
BY_KEY = ["pipeline", "create temporary table", "copy", "with done as (insert into", "pipeline"]
"""What a commit waits for, between BEGIN and COMMIT: fence and guard; the rows; guard, evidence and the facts."""


@pytest.fixture
def append(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-append", tmp_path, database)


@pytest.mark.parametrize("kind", ["postgres-append", "postgres-upsert", "postgres-fold"])
def test_a_commit_waits_for_few_answers(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    harness = SinkHarness(kind, tmp_path, database)
    asked: list[str] = []
    copy, pipeline = psycopg.Cursor.copy, psycopg.Connection.pipeline
    execute: Callable[..., Any] = psycopg.Cursor.execute

    def executed(cursor: Any, statement: Any, *arguments: Any, **options: Any) -> Any:
        if cursor.connection.info.pipeline_status is psycopg.pq.PipelineStatus.OFF:
            text = statement if isinstance(statement, (bytes, str)) else statement.as_string(cursor)
            asked.append((text.decode() if isinstance(text, bytes) else text).strip())
        return execute(cursor, statement, *arguments, **options)

    def copied(cursor: Any, *arguments: Any, **options: Any) -> Any:
        asked.append("copy")
        return copy(cursor, *arguments, **options)

    def piped(connection: Any) -> Any:
        asked.append("pipeline")
        return pipeline(connection)

    with closing(harness.open()) as session:
        assert session.commit(harness.prepare(session, 1, None, A), checked=True) == APPLIED
        second = harness.prepare(session, 2, 1, B)
        monkeypatch.setattr(psycopg.Cursor, "execute", executed)
        monkeypatch.setattr(psycopg.Cursor, "copy", copied)
        monkeypatch.setattr(psycopg.Connection, "pipeline", piped)
        assert session.commit(second, checked=True) == APPLIED
        monkeypatch.undo()
    should = ASKED.get(kind, BY_KEY)
    assert len(asked) == len(should), asked
    assert all(text.startswith(begins) for text, begins in zip(asked, should, strict=True)), asked
    assert harness.rows() == Counter(A.items()) + Counter(B.items())


def committed(append: SinkHarness, change: str) -> SinkHarness:
    """One commit, then the table is changed, then another one."""
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
        second = append.prepare(session, 2, 1, B)
        append.sql(change)
        session.commit(second, checked=True)
    return append


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("alter table counts alter n type double precision", "column 'n' is double precision in the table"),
        ("alter table counts drop column n", "the table has no column 'n'"),
        ("alter table counts set unlogged", "the table is unlogged"),
        (
            "alter table counts add late text not null default ''; alter table counts alter late drop default",
            "'late' is NOT NULL without",
        ),
        ("alter table counts rename to before", "it is gone"),
        ("alter table counts rename to before; create table counts (word text, n bigint)", "the table is now"),
    ],
)
def test_a_table_that_was_changed_between_two_commits_is_refused(append: SinkHarness, change: str, said: str) -> None:
    with pytest.raises(Exception, match=said) as refused:
        committed(append, change)
    assert not isinstance(refused.value, StoreUnavailable)
    there = "before" if "rename" in change else "counts"
    assert append.sql(f"select count(*) from {there}") == [(2,)]


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ("alter table counts add more text", A | B),
        ("alter table counts add more text default 'd'", A | B),
        ("alter table counts alter word type varchar(40)", A | B),
        ("alter table counts alter n type integer", A | B),
        ("alter table counts alter n set default 0; create index on counts (n)", A | B),
    ],
)
def test_a_table_that_was_changed_between_two_commits_takes_the_rows(
    append: SinkHarness, change: str, rows: dict[str, int]
) -> None:
    assert Counter(committed(append, change).sql("select word, n from counts")) == Counter(rows.items())


def test_bytes_of_another_width_than_the_columns_are_no_outage_that_lasts(append: SinkHarness) -> None:
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
        append.sql("alter table counts alter n type integer")
        session.commit(append.prepare(session, 2, 1, B), checked=True)
        append.sql("alter table counts alter n type bigint")
        third = append.prepare(session, 3, 2, C)
        with pytest.raises(StoreUnavailable, match="insufficient data left in message"):
            session.commit(third, checked=True)
        assert session.commit(third, checked=True) == APPLIED
    assert Counter(append.sql("select word, n from counts")) == Counter((A | B | C).items())


DROPPING = """
    create function drop_row() returns trigger language plpgsql as 'begin return null; end';
    create trigger drop_row before insert on counts for each row execute function drop_row()
"""


def test_a_trigger_that_drops_rows_is_seen_by_the_next_commit(append: SinkHarness) -> None:
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
        append.sql(DROPPING)
        assert session.commit(append.prepare(session, 2, 1, B), checked=True).dropped == 1
    assert append.rows() == Counter(A.items())


def test_row_level_security_is_seen_by_the_next_commit(append: SinkHarness, database: Database) -> None:
    name = dict(database.parameters)["dbname"]
    role = f"writer_{name}"
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
    append.sql(f"create role {role} login; alter table counts owner to {role}")
    append.sql(
        f"grant all on schema stormproof_sink to {role}; grant all on all tables in schema stormproof_sink to {role}"
    )
    try:
        append.sink = PostgresSink(
            "counts",
            name="counts",
            database=Database.of({**dict(database.parameters), "user": role}),
            staging=append.folder,
        )
        with closing(append.open(2)) as session:
            session.commit(append.prepare(session, 2, 1, B), checked=True)
            append.sql(
                "alter table counts enable row level security; alter table counts force row level security;"
                "create policy short on counts with check (length(word) < 3); create policy seen on counts using (true)"
            )
            assert session.commit(append.prepare(session, 3, 2, {"d": 4}), checked=True) == APPLIED
        assert append.rows() == Counter({**A, **B, "d": 4}.items())
    finally:
        append.sql(f"reassign owned by {role} to current_user; drop owned by {role}; drop role {role}")


# ---- of the same width: the server takes the bytes for something else


def _two_columns(session: PostgresSession, number: int) -> PreparedTransaction:
    rows = pa.record_batch([pa.array([number], pa.int64()), pa.array([7], pa.int64())], names=["id", "v"])
    task = session.writer().open_task(TaskContext("inc-1", number, 1, 0), rows.schema)
    task.write(rows)
    files = tuple(task.close())
    return PreparedTransaction(number, number - 1 or None, transaction_digest(files), 1, files)


@contextlib.contextmanager
def _wide(database: Database, folder: Path) -> Generator[tuple[PostgresSession, Callable[[str], list[Any]]]]:
    sink = PostgresSink("wide", database=database, staging=folder)
    schema = pa.schema([("id", pa.int64()), ("v", pa.int64())])
    with (
        psycopg.connect(database.conninfo, autocommit=True) as connection,
        closing(sink.open(SinkIdentity("topology", "inc-1", sink.name), SinkInput(schema), 1)) as session,
    ):

        def ask(text: str) -> list[Any]:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []

        assert isinstance(session, PostgresSession)
        session.commit(_two_columns(session, 1), checked=True)
        ask("alter table wide alter v type timestamp using 'epoch'")
        yield session, ask


def test_a_column_of_another_type_and_the_same_width_takes_no_bytes(database: Database, tmp_path: Path) -> None:
    with _wide(database, tmp_path) as (session, ask):
        with pytest.raises(SinkRefused, match="column 'v' is timestamp without time zone in the table and int64"):
            session.commit(_two_columns(session, 2), checked=True)
        assert ask("select count(*) from wide") == [(1,)]


def test_control_without_the_second_look_bytes_are_taken_for_something_else(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _wide(database, tmp_path) as (session, ask):
        known = session._known  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(refusals, "facts_of", lambda _: known)
        assert session.commit(_two_columns(session, 2), checked=True) == APPLIED
        assert ask("select v::text from wide where id = 2") == [("2000-01-01 00:00:00.000007",)]


def test_a_change_during_the_commit_is_met_by_the_next_try(
    append: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
        second = append.prepare(session, 2, 1, B)
        done: list[str] = []

        def alter(name: str) -> None:
            if name == "postgres.after_guard" and not done:
                done.append(name)
                append.sql("alter table counts add more text")

        monkeypatch.setattr(session_module, "failpoint", alter)
        assert session.commit(second, checked=True) == APPLIED
    assert Counter(append.sql("select word, n from counts")) == Counter((A | B).items())


PARTITION = """
    create function with_partition() returns trigger language plpgsql as $$ begin
        if to_regclass('counts_' || new.n) is null then
            execute format('create table counts_%s (like counts)', new.n);
            execute format('create trigger own_%s before insert on counts_%1$s for each row execute function kept()', new.n);
            execute format('alter table parted attach partition counts_%s for values in (%1$s)', new.n);
        end if;
        execute format('insert into counts_%s values (%L, %1$s)', new.n, new.word);
        return null;
    end $$;
    create function kept() returns trigger language plpgsql as 'begin return new; end';
    create table counts (word text, n bigint);
    create table parted (word text, n bigint) partition by list (n);
    create trigger with_partition before insert on counts for each row execute function with_partition()
"""


def test_a_trigger_that_makes_partitions_for_our_rows_is_no_change_by_others(append: SinkHarness) -> None:
    append.sql(PARTITION)
    with closing(append.open()) as session:
        for txid, rows in enumerate((A, B, {"d": 4}), start=1):
            result = session.commit(append.prepare(session, txid, txid - 1 or None, rows), checked=True)
            assert result.dropped == len(rows), "by the trigger, which put them elsewhere"
    assert Counter(append.sql("select word, n from parted")) == Counter((A | B | {"d": 4}).items())
