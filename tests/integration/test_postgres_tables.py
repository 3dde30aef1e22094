"""What a Postgres table may be below a sink: rows that a crash takes are refused, at the start and in the commit itself."""

from __future__ import annotations

import logging

import pytest
from support.operated import Operated
from support.topologies import messages, source_of

from stormproof import PostgresMap, PostgresSink, Topology, count
from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import watched

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

NAME = "tables"


def built(operated: Operated, table: str = "words", *, fold: bool = False) -> Topology:
    t = Topology(NAME)
    words = t.stream("lines", source_of(NAME, operated.cell.database)).flat_map(str.split, "line", schema="word string")
    sink = PostgresSink(table, name="sink", database=operated.cell.database)
    if fold:
        words.group_by("word").persistent_aggregate(n=count()).into(sink)
    else:
        words.into(sink)
    return t


def partitioned(operated: Operated, leaf: str = "create table words_rest partition of words default") -> None:
    operated.sql("create table words (word text) partition by list (word)")
    operated.sql("create table words_m partition of words for values in ('m0', 'm1') partition by list (word)")
    operated.sql("create table words_m0 partition of words_m for values in ('m0')")
    operated.sql("create table words_m1 partition of words_m default")
    operated.sql(leaf)


VOLATILE = [
    "create unlogged table words_rest partition of words default",
    "create foreign data wrapper nowhere; create server away foreign data wrapper nowhere;"
    " create foreign table words_rest partition of words default server away",
]


@pytest.mark.parametrize("leaf", VOLATILE)
def test_a_partition_whose_rows_a_crash_may_take_is_refused_at_the_start(operated: Operated, leaf: str) -> None:
    partitioned(operated, leaf)
    operated.put(b"m0 x")
    with pytest.raises(SinkRefused, match=r"words_rest is (unlogged|a foreign table): a crash.*Nothing was written"):
        operated.run(built(operated))
    assert operated.sql("select count(*) from stormproof.txn") == [(0,)]


def test_a_table_with_logged_partitions_at_every_depth_is_written(operated: Operated) -> None:
    partitioned(operated)
    operated.put(b"m0 m1 x", b"m0 y")
    operated.run(built(operated))
    assert operated.sql("select count(*) from words") == [(5,)]
    operated.verify()


@pytest.mark.parametrize(
    "change",
    [
        "alter table words_m1 set unlogged",
        "drop table words_rest; create unlogged table words_rest partition of words default",
    ],
)
def test_a_partition_that_becomes_volatile_while_a_driver_runs_blocks_the_batch(
    operated: Operated, change: str
) -> None:
    """At the very commit: behind its checks, before its rows."""
    partitioned(operated)
    operated.put(b"m0")
    operated.run(built(operated))
    operated.put(b"m1 z x")
    done: list[str] = []

    def strike(name: str) -> None:
        if name == "postgres.after_guard" and not done:
            done.append(name)
            for statement in change.split(";"):
                operated.sql(statement)

    with watched(strike), pytest.raises(SinkRefused, match=r"is unlogged: a crash.*alter table words_\w+ set logged"):
        operated.run(built(operated))
    assert operated.sql("select count(*) from words") == [(1,)]
    operated.sql(f"alter table {'words_m1' if 'm1' in change else 'words_rest'} set logged")
    operated.command("retry", NAME, "2")
    operated.run(built(operated))
    assert operated.sql("select count(*) from words") == [(4,)]
    operated.verify()


def test_the_audit_names_a_partition_that_is_unlogged_and_a_table_that_lost_rows(operated: Operated) -> None:
    partitioned(operated)
    operated.put(b"m0 m1 x", b"m0 y")
    operated.run(built(operated))
    operated.sql("alter table words_rest set unlogged")
    report = operated.verify(status=1)
    assert operated.kinds("violations", report) == ["evidence"]
    assert "words_rest is unlogged" in report["violations"][0]["text"]
    operated.sql("truncate words_rest")  # as a crash does
    operated.sql("alter table words_rest set logged")
    report = operated.verify(status=4)
    assert not report["violations"]
    assert "holds 3 rows, its own record says that 5 or more were written" in report["unknowns"][0]["text"]


def test_the_audit_counts_the_keys_of_a_fold(operated: Operated) -> None:
    operated.put(b"a b c", b"a b")
    operated.run(built(operated, fold=True))
    operated.verify()
    operated.sql("delete from words where word in ('a', 'b')")
    assert "holds 1 rows" in operated.verify(status=4)["unknowns"][0]["text"]


def test_a_states_table_is_held_to_the_same(operated: Operated) -> None:
    def with_state() -> Topology:
        t = Topology(NAME)
        words = t.stream("lines", source_of(NAME, operated.cell.database)).flat_map(
            str.split, "line", schema="word string"
        )
        state = PostgresMap("kept", "transactional", database=operated.cell.database)
        words.group_by("word").persistent_aggregate(name="fold", state=state, state_name="kept", n=count())
        return t

    operated.put(b"a b")
    operated.run(with_state())
    operated.verify()
    operated.sql("alter table kept set unlogged")
    with pytest.raises(SinkRefused, match="unlogged"):
        operated.run(with_state())
    assert operated.kinds("violations", operated.verify(status=1)) == ["evidence"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            "create table base (word text); create view words as select * from base;"
            " create function no() returns trigger language plpgsql as 'begin return new; end';"
            " create trigger t instead of insert on words for each row execute function no()",
            "not a table",
        ),
        ("create table words (word text); create rule r as on insert to words do instead nothing", "has the rule 'r'"),
        ("create unlogged table words (word text)", "is unlogged"),
    ],
)
def test_what_is_no_plain_table_is_refused_by_name(operated: Operated, make: str, said: str) -> None:
    operated.sql(make)
    operated.put(b"x")
    with pytest.raises(SinkRefused, match=said):
        operated.run(built(operated))


def test_a_key_without_overlaps_is_none_of_an_upsert(operated: Operated) -> None:
    (((version,),)) = operated.sql("select current_setting('server_version_num')::int")
    if version < 180_000:
        pytest.skip("before Postgres 18 there are none")
    operated.sql("create table words (word int4range, during int4range, primary key (word, during without overlaps))")
    t = Topology(NAME)
    lines = t.stream("lines", source_of(NAME, operated.cell.database))
    rows = lines.map(lambda line: (line, line), "line", schema="word string, during string")
    key = ["word", "during"]
    rows.into(PostgresSink("words", mode="upsert", key=key, order_by="any", database=operated.cell.database))
    with pytest.raises(SinkRefused, match="no primary key, unique constraint or unique index on exactly"):
        operated.run(t)


def test_children_by_inheritance_hold_no_rows_of_ours(operated: Operated) -> None:
    operated.sql("create table words (word text); create unlogged table child () inherits (words)")
    operated.put(b"x y")
    operated.run(built(operated))
    assert operated.sql("select count(*) from only words") == [(2,)]
    operated.verify()


def test_what_can_refuse_a_row_is_said_before_the_first_batch(
    operated: Operated, caplog: pytest.LogCaptureFixture
) -> None:
    operated.sql(
        "create table known (word text primary key);"
        "create table words (word text unique check (word <> 'no') references known);"
        "create function f() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger looks before insert on words for each row execute function f()"
    )
    with caplog.at_level(logging.WARNING, "stormproof.sink"):
        operated.run(built(operated))
    (said,) = [r.message for r in caplog.records if r.name == "stormproof.sink"]
    for rule in ("CHECK words_word_check", "FOREIGN KEY words_word_fkey", "UNIQUE words_word_key", "trigger looks"):
        assert rule in said
    assert "rejects_max_share" in said


def test_a_plain_table_is_not_warned_of(operated: Operated, caplog: pytest.LogCaptureFixture) -> None:
    operated.put(*messages(1))
    operated.run()
    assert not [r for r in caplog.records if r.name == "stormproof.sink"]
