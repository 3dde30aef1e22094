"""Postgres tables that people have: names, defaults, triggers, policies, locks, rights; what a commit makes of them."""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.operated import Operated
from support.servers import sql
from support.sink_harness import APPEND, SCHEMA, SinkHarness
from support.topologies import source_of

from stormproof import PostgresSink, Topology
from stormproof.core.base.errors import MissingRight, SinkRefused, StoreUnavailable, TopologyError
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import CommitOutcome, SinkIdentity, SupportsSkipRows
from stormproof.sinks.postgres import connection as connection_module
from stormproof.sinks.postgres import session as session_module
from stormproof.sinks.postgres.table import TableName
from stormproof.sinks.postgres.transactional_table import copy_rows
from stormproof.sinks.prepare.staging import prepared_batches

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]

A = {"a": 1, "b": 2}
NAME = "targets"
DROPS_B = (
    "create function drop_b() returns trigger language plpgsql as "
    "$$ begin if new.word = 'b' then return null; end if; return new; end $$;"
    "create trigger drops before insert on {table} for each row execute function drop_b()"
)
_numbers = itertools.count(1)


@pytest.fixture
def append(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-append", tmp_path, database)


@pytest.fixture
def fold(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-fold", tmp_path, database)


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """A role without any right; roles are of the server, which other tests use at the same time."""
    name = f"test_targets_{os.getpid()}_{next(_numbers)}"
    sql(database, f"create role {name} login")
    yield name
    sql(database, f"drop owned by {name} cascade")
    sql(database, f"drop role {name}")


def as_role(harness: SinkHarness, role: str) -> SinkHarness:
    """The same sink under the role, whose own tables an owner made."""
    assert harness.database is not None
    harness.sql(f"create schema if not exists stormproof_sink authorization {role}")
    return SinkHarness(harness.kind, harness.folder, Database.of({**dict(harness.database.parameters), "user": role}))


def committed(harness: SinkHarness, rows: Any = A) -> Counter[tuple[str, int]]:
    with closing(harness.open()) as session:
        session.commit(harness.prepare(session, 1, None, rows), checked=True)
    return harness.rows()


# Names


@pytest.mark.parametrize(
    "name",
    [
        "Mixed Case",
        'say "hi"',
        '"""quoted"""',
        '"a.b"',
        'public."a.b.c"',
        '"dotted.schema".t',
        "zażółć.ギ",
        "select",
        "ж" * 31 + "x",
        "a;drop table b--%s{}",
    ],
)
def test_a_name_of_any_kind_is_written_and_opened_again_from_its_record(
    append: SinkHarness, database: Database, name: str
) -> None:
    parsed = TableName.parse(name)
    assert TableName.parse(str(parsed)) == parsed
    if parsed.schema not in (None, "public"):
        append.sql(f'create schema "{parsed.schema}"')
    append.sink = PostgresSink(name, name="counts", database=database, staging=append.folder)
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
    found = append.sql(f"select word, n from {parsed.quoted}")
    assert Counter(found) == Counter(A.items())
    assert append.sql("select relname from pg_class where relkind = 'r' and relname = $$" + parsed.table + "$$")
    again = PostgresSink(str(append.sink.description(APPEND)["table"]), database=database, name="counts")
    with closing(again.inspect(append.identity, APPEND)) as reader:
        assert reader.evidence(0, None).last_txid == 1


def test_a_sink_of_a_table_of_any_name_runs_without_a_name_of_its_own(operated: Operated) -> None:
    names = ['public."a.b"', "Mixed Case", 'say "hi"', "x" * 63, "ж" * 31]
    t = Topology(NAME)
    lines = t.stream("lines", source_of(NAME, operated.cell.database))
    lines.flat_map(str.split, "line", schema="word string").into(*(PostgresSink(name) for name in names))
    operated.put(b"a b c b")
    operated.run(t)
    for name in names:
        assert operated.sql(f"select count(*) from {TableName.parse(name).quoted}") == [(4,)]
    assert operated.verify()["violations"] == []


@pytest.mark.parametrize("name", ['"a', '"a"b', '""', 'a."', '"a".', '"a"."b"."c"', "a..b", "x\0"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(TopologyError, match="name"):
        PostgresSink(name)


@pytest.mark.parametrize("name", ["x" * 64, "ж" * 32, "s." + "x" * 64, "s" * 64 + ".x"])
def test_a_name_that_postgres_would_cut_is_refused(name: str) -> None:
    with pytest.raises(TopologyError, match=r"has 64 bytes in UTF-8; Postgres keeps 63"):
        PostgresSink(name)


def test_the_users_own_table_may_have_the_name_of_our_temporary_one(fold: SinkHarness, database: Database) -> None:
    """The temporary table would hide it, and the rows would go there: the guard says yes, the table has nothing."""
    fold.sql("create table stormproof_added (word text primary key, n bigint)")
    fold.sink = PostgresSink("stormproof_added", name="counts", database=database, staging=fold.folder)
    with closing(fold.open()) as session:
        session.commit(fold.prepare(session, 1, None, A), checked=True)
    assert Counter(fold.sql("select word, n from public.stormproof_added")) == Counter(A.items())


@pytest.mark.parametrize("place", ["postgres.after_guard"])
def test_a_table_that_takes_the_name_during_a_commit_gets_no_row(
    append: SinkHarness, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def swap(name: str) -> None:
        if name == place:
            append.sql("alter table counts rename to before; create table counts (word text, n bigint)")

    with closing(append.open()) as session:
        transaction = append.prepare(session, 1, None, A)
        monkeypatch.setattr(session_module, "failpoint", swap)
        with pytest.raises(SinkRefused, match="another table took the name"):
            session.commit(transaction, checked=True)
        monkeypatch.undo()
        assert append.sql("select (select count(*) from counts), (select count(*) from before)") == [(0, 0)]
        append.sql("drop table counts; alter table before rename to counts")
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED


def test_a_search_path_that_changes_leads_to_no_other_table(append: SinkHarness, database: Database) -> None:
    append.sql("create schema other; create table other.counts (word text, n bigint)")
    with closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, A), checked=True)
        two = append.prepare(session, 2, 1, A)
    append.sql(f"alter database {dict(database.parameters)['dbname']} set search_path = other, public")
    with closing(append.open(2)) as session, pytest.raises(Exception, match="the table is now"):
        session.commit(two, checked=True)
    assert append.sql("select count(*) from other.counts") == [(0,)]


# Columns that the table fills


def test_identity_serial_default_and_generated_columns_are_the_tables_to_fill(append: SinkHarness) -> None:
    append.sql(
        "create table counts (a int generated always as identity, b int generated by default as identity, c serial, "
        "d text default 'd', n bigint, stored bigint generated always as (n * 2) stored, "
        "word text, virtual text generated always as (word || '!') virtual)"
    )
    assert committed(append, [("x", 1), ("y", 2)]) == Counter({("x", 1): 1, ("y", 2): 1})
    found = append.sql("select a, b, c, d, stored, virtual from counts order by n")
    assert found == [(1, 1, 1, "d", 2, "x!"), (2, 2, 2, "d", 4, "y!")]


def test_a_domain_is_read_as_the_type_below_it(append: SinkHarness) -> None:
    append.sql(
        "create domain short as varchar(3) not null; create domain word as short check (value <> 'no');"
        "create table counts (word word, n bigint)"
    )
    with closing(append.open()) as session:
        import pyarrow as pa

        rows = pa.record_batch([pa.array(["abc", None, "abcd"]), pa.array([1, 1, 1])], schema=SCHEMA)
        assert [row for row, _ in session.writer().check(rows)] == [1, 2]
        session.commit(append.prepare(session, 1, None, {"abc": 1}), checked=True)
    assert append.rows() == Counter({("abc", 1): 1})
    assert any("CHECK word_check" in rule for rule in append.sink.refusals(APPEND))


# Triggers


def test_rows_that_a_trigger_rewrites_are_as_it_made_them(append: SinkHarness) -> None:
    append.sql(
        "create table counts (word text, n bigint); create function up() returns trigger language plpgsql as "
        "$$ begin new.word = upper(new.word); return new; end $$;"
        "create trigger t before insert on counts for each row execute function up()"
    )
    assert committed(append) == Counter({("A", 1): 1, ("B", 2): 1})


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("kind", ["postgres-append", "postgres-fold"])
def test_rows_that_a_trigger_drops_are_counted(
    kind: str, partitioned: bool, tmp_path: Path, database: Database
) -> None:
    harness = SinkHarness(kind, tmp_path, database)
    table = "part" if partitioned else "counts"
    harness.sql(
        "create table counts (word text primary key, n bigint)"
        + (" partition by list (word); create table part partition of counts default" if partitioned else "")
    )
    harness.sql(DROPS_B.format(table=table))
    with closing(harness.open()) as session:
        transaction = harness.prepare(session, 1, None, A)
        assert session.commit(transaction, checked=True).dropped == 1
        assert session.commit(transaction, checked=True).dropped == 1, "by the sink's own record"
        (entry,) = session.evidence(0, None).entries
    assert (entry.rows, entry.dropped) == (1, 1)
    assert harness.rows() == Counter({("a", 1): 1})


@pytest.mark.parametrize("trigger", ["", DROPS_B.format(table="counts")])
@pytest.mark.parametrize("lost", ["file", "copy"])
def test_control_rows_lost_by_other_means_are_seen(
    append: SinkHarness, monkeypatch: pytest.MonkeyPatch, trigger: str, lost: str
) -> None:
    append.sql("create table counts (word text, n bigint);" + trigger)
    if lost == "file":  # a reader that leaves a row out

        def short(*arguments: Any, **options: Any) -> Iterator[Any]:
            for batch in prepared_batches(*arguments, **options):
                yield batch.slice(1)

        monkeypatch.setattr(session_module, "prepared_batches", short)
    else:  # a COPY that takes more than it was given
        monkeypatch.setattr(session_module, "copy_rows", lambda *given: copy_rows(*given) + 5)
    with closing(append.open()) as session, pytest.raises(SinkRefused, match="rows reached the table instead of the 2"):
        session.commit(append.prepare(session, 1, None, A), checked=True)
    monkeypatch.undo()
    assert append.rows() == Counter()


def test_a_trigger_that_does_not_fire_excuses_no_lost_row(append: SinkHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    append.sql("create table counts (word text, n bigint);" + DROPS_B.format(table="counts"))
    append.sql("alter table counts disable trigger drops")
    monkeypatch.setattr(session_module, "copy_rows", lambda *given: copy_rows(*given) - 1)
    with closing(append.open()) as session, pytest.raises(SinkRefused, match="no trigger of the table drops rows"):
        session.commit(append.prepare(session, 1, None, A), checked=True)


def test_verify_tells_of_dropped_rows_without_an_alarm(operated: Operated) -> None:
    operated.sql("create table words (word text);" + DROPS_B.format(table="words"))
    t = Topology(NAME)
    lines = t.stream("lines", source_of(NAME, operated.cell.database))
    lines.flat_map(str.split, "line", schema="word string").into(PostgresSink("words", name="sink"))
    operated.put(b"a b c b")
    operated.run(t)
    report = operated.verify()
    (notice,) = report["notices"]
    assert notice["kind"] == "dropped"
    assert "took 2 of 4 rows; its own triggers dropped the other 2" in notice["text"]
    (status,) = operated.command("status")["topologies"]
    assert status["sinks"][0]["dropped"] == 2
    assert "2 rows dropped by the table's own triggers" in operated.text("status")
    operated.sql("update stormproof_sink.evidence set dropped = 1")
    assert operated.kinds("violations", operated.verify(status=1)) == ["evidence_differs"]


# Rights and policies


def test_a_role_that_may_only_insert_appends(append: SinkHarness, role: str) -> None:
    append.sql("create table counts (id serial, word text primary key, n bigint)")
    append.sql(f"grant insert on counts to {role}; grant usage on sequence counts_id_seq to {role}")
    limited = as_role(append, role)
    with closing(limited.open()) as session:
        session.commit(limited.prepare(session, 1, None, A), checked=True)
        report = session.evidence(0, None)
    assert append.rows() == Counter(A.items())
    assert (report.rows_found, report.uncounted) == (None, "the role may not SELECT from the table")


def test_a_role_that_may_insert_select_and_update_folds(fold: SinkHarness, role: str) -> None:
    fold.sql("create table counts (word text primary key, n bigint)")
    fold.sql(f"grant insert, select, update on counts to {role}")
    assert committed(as_role(fold, role)) == Counter(A.items())


def test_row_level_security_is_met_by_insert_and_its_rows_are_not_counted(append: SinkHarness, role: str) -> None:
    append.sql(
        f"create table counts (word text, n bigint); grant insert, select on counts to {role};"
        "alter table counts enable row level security;"
        "create policy writes on counts for insert with check (n < 5);"
        "create policy reads on counts for select using (word = 'a')"
    )
    limited = as_role(append, role)
    with closing(limited.open()) as session:
        session.commit(limited.prepare(session, 1, None, A), checked=True)
        report = session.evidence(0, None)
    assert append.rows() == Counter(A.items())
    assert report.rows_found is None
    assert report.uncounted is not None
    assert "row-level security" in report.uncounted


def test_a_row_that_a_policy_does_not_admit_is_told_from_a_missing_right(append: SinkHarness, role: str) -> None:
    """Both have one SQLSTATE, and the text is in the server's language."""
    append.sql(
        f"create table counts (word text, n bigint); grant insert, select on counts to {role};"
        "alter table counts enable row level security;"
        "create policy writes on counts for insert with check (word <> 'a');"
        "create policy reads on counts for select using (true)"
    )
    limited = as_role(append, role)
    with closing(limited.open()) as session:
        assert isinstance(session, SupportsSkipRows)
        prepared = limited.prepare(session, 1, None, A)
        with pytest.raises(SinkRefused, match="violates row-level security"):
            session.commit(prepared, checked=True)
        assert [row.sqlstate for row in session.commit_without_refused(prepared).refused] == ["42501"]
        append.sql(
            "create function no() returns trigger language plpgsql as"
            " 'begin raise exception ''no row-level security'' using errcode = ''42501''; end';"
            "create trigger t before insert on counts for each row execute function no()"
        )
        with pytest.raises(MissingRight, match="no row-level security"):
            session.commit_without_refused(limited.prepare(session, 2, 1, {"b": 1}))


def test_a_large_commit_says_how_far_it_is(
    append: SinkHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_module, "PROGRESS_ROWS", 2)
    with caplog.at_level(logging.INFO, "stormproof.sink"), closing(append.open()) as session:
        session.commit(append.prepare(session, 1, None, {str(i): i for i in range(5)}, tasks=5), checked=True)
    said = [record.getMessage() for record in caplog.records if "rows sent" in record.message]
    assert [text.rpartition(": ")[2] for text in said] == ["2 of 5 rows sent", "4 of 5 rows sent"]


# Constraints and locks


@pytest.mark.parametrize("initially", ["immediate", "deferred"])
def test_a_deferred_constraint_is_met_before_the_commit(append: SinkHarness, initially: str) -> None:
    append.sql(
        "create table known (word text primary key); insert into known values ('a');"
        "create table counts (word text constraint is_known references known deferrable initially "
        f"{initially}, n bigint)"
    )
    with closing(append.open()) as session:
        with pytest.raises(SinkRefused, match="is_known") as caught:
            session.commit(append.prepare(session, 1, None, A), checked=True)
        assert caught.value.details["constraint"] == "is_known"
        assert session.held() is None
        session.commit(append.prepare(session, 1, None, {"a": 1}), checked=True)


def test_rows_of_one_batch_may_refer_to_each_other(append: SinkHarness) -> None:
    append.sql("create table counts (word text, n bigint primary key, up bigint default 1 references counts)")
    assert committed(append, [("child", 2), ("root", 1)]) == Counter({("child", 2): 1, ("root", 1): 1})


def test_a_sink_whose_table_refers_to_another_ones_follows_it(tmp_path: Path, database: Database) -> None:
    harness = SinkHarness("postgres-append", tmp_path, database)
    harness.sql("create table counts (word text primary key, n bigint)")
    harness.sql("create table lines (word text references counts, n bigint)")
    lines = PostgresSink("lines", database=database, staging=tmp_path / "lines")
    with closing(harness.open()) as one, closing(lines.open(SinkIdentity("t", "i", "l"), APPEND, 1)) as two:
        for session in (one, two):
            session.commit(harness.prepare(session, 1, None, A), checked=True)
    assert harness.sql("select count(*) from lines") == [(2,)]


def test_a_table_that_another_session_locks_is_waited_for_with_a_bound(
    append: SinkHarness, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As VACUUM FULL, CLUSTER and most of ALTER TABLE do."""
    monkeypatch.setattr(connection_module, "LOCK_TIMEOUT_MS", 50)
    with closing(append.open()) as session:
        transaction = append.prepare(session, 1, None, A)
        with psycopg.connect(database.conninfo, application_name="a migration") as other:
            other.execute("lock table counts in access exclusive mode")
            with pytest.raises(StoreUnavailable, match=r"counts.*lock") as caught:
                session.commit(transaction, checked=True)
            assert "a migration" in str(caught.value)
            assert caught.value.details["sqlstate"] == "55P03"
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
