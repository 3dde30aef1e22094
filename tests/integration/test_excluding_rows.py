"""A table in which rows of several keys exclude each other, or need each other; and late rows that its rules refuse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable
from support.queues import prepared_database
from support.sink_harness import SinkHarness
from support.verdicts import verified

from stormproof import PostgresQueue, PostgresSink, Settings, Topology
from stormproof.core.base.errors import SinkRefused
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import ALREADY_HELD, SinkSession
from stormproof.sinks.stores.memory import MemorySink

pytestmark = pytest.mark.postgres

Opening = Callable[[SinkHarness], SinkSession]


@pytest.fixture
def opening() -> Iterator[Opening]:
    """Opens a harness's sink, until the test ends."""
    with ExitStack() as stack:
        yield lambda harness: stack.enter_context(closing(harness.open()))


SHIFTS = ["unique (n)", "unique (n) deferrable initially deferred", "exclude (n with =)"]


def run(
    topology: Topology, queue: PostgresQueue, database: Database, tmp_path: Path, *rows: Mapping[str, object]
) -> int:
    """Put messages and run until all are taken; how many were rejected."""
    with closing(queue):
        queue.put([json.dumps(row).encode() for row in rows])
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path / "staging"))
    return topology.run("exactly-once", engine="inline", until_idle=True, settings=settings).rejected


def test_changes_that_are_valid_in_the_order_of_their_messages_are_taken(database: Database, tmp_path: Path) -> None:
    schema = "id bigint not null, pos string, v bigint not null"
    queue = PostgresQueue("items", schema=schema, max_attempts=2, database=prepared_database(database))
    topology = Topology("items")
    topology.stream("m", queue).into(PostgresSink("item", mode="upsert", key="id", order_by="v", database=database))

    def put(*rows: tuple[int, str, int]) -> int:
        return run(topology, queue, database, tmp_path, *({"id": i, "pos": pos, "v": v} for i, pos, v in rows))

    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("create table item (id bigint primary key, pos text unique, v bigint)")
        assert put(*[(i, str(i), 1) for i in range(1, 6)]) == 0
        assert put(*[(i, str(i + 1), 2) for i in (5, 4, 3, 2, 1)], (6, "1", 1)) == 0
        assert (
            put((1, "3", 3), (2, "9", 3), (1, "2", 2)) == 1
        )  # the last row is not newer than the one before the first
        found = connection.execute("select id, pos, v from item order by 1").fetchall()
    assert verified("items", database).clean
    assert found == [(1, "2", 2), (2, "9", 3), (3, "4", 2), (4, "5", 2), (5, "6", 2), (6, "1", 1)]


def rival(tmp_path: Path, database: Database, how: str, rule: str = "unique (n)") -> SinkHarness:
    """A table in which each number is once."""
    harness = SinkHarness(f"postgres-{how}", tmp_path, database)
    harness.open().close()
    harness.sql(f"alter table counts add {rule}")
    return harness


@pytest.mark.parametrize("rule", SHIFTS)
def test_a_fold_whose_groups_are_in_each_others_way_for_a_moment_is_taken(
    opening: Opening, tmp_path: Path, database: Database, rule: str
) -> None:
    harness = rival(tmp_path, database, "fold", rule)
    opened = opening(harness)
    opened.commit(harness.prepare(opened, 1, None, {"a": 1, "b": 2, "c": 3}), checked=True)
    added = harness.prepare(opened, 2, 1, {"a": 1, "b": 1, "c": 1}, messages=[1, 2, 3], rejects_max=10, of_groups=True)
    assert opened.commit(added, checked=True).refused == ()
    assert harness.rows() == Counter([("a", 2), ("b", 3), ("c", 4)])


@pytest.mark.parametrize("messages", [[7, 7, 7], [None, None, None]], ids=["message", "micro-batch"])
def test_rows_of_one_message_have_no_order(
    opening: Opening, tmp_path: Path, database: Database, messages: list[int | None]
) -> None:
    harness = rival(tmp_path, database, "upsert")
    opened = opening(harness)
    opened.commit(harness.prepare(opened, 1, None, {"a": 1, "b": 2, "c": 3}), checked=True)
    added = harness.prepare(opened, 2, 1, {"a": 2, "b": 3, "c": 4}, messages=messages, tasks=2, rejects_max=0)
    assert opened.commit(added, checked=True).refused == ()
    assert harness.rows() == Counter([("a", 2), ("b", 3), ("c", 4)])


@pytest.mark.parametrize("how", ["append", "upsert"])
def test_a_message_that_is_refused_makes_room_for_those_behind_it(
    opening: Opening, tmp_path: Path, database: Database, how: str
) -> None:
    """The first message's other row is refused, so it is nowhere, and the second message takes the number."""
    harness = rival(tmp_path, database, how)
    harness.refuse("bad")
    opened = opening(harness)
    rows = [("a", 1), ("bad", 2), ("b", 1), ("c", 1)]
    added = harness.prepare(opened, 1, None, rows, messages=[1, 1, 2, 3], tasks=2, rejects_max=5)
    refused = opened.commit(added, checked=True).refused
    assert harness.rows() == Counter([("b", 1)])
    assert {(row.messages[0][0], row.sqlstate, row.goes_with_others) for row in refused} == {
        (1, "23514", False),
        (1, "23514", True),
        (3, "23505", False),
    }
    (entry,) = opened.evidence(0, None).entries
    assert entry.rows + entry.rejected == added.rows + entry.reinstated


@pytest.mark.parametrize(("how", "told"), [("append", True), ("upsert", False)])
@pytest.mark.parametrize("rule", ["unique (n)", "unique (n) deferrable initially deferred"])
def test_a_duplicate_is_pointed_to_upsert_where_rows_are_appended(
    opening: Opening, tmp_path: Path, database: Database, how: str, told: bool, rule: str
) -> None:
    harness = rival(tmp_path, database, how, rule)
    opened = opening(harness)
    rows = [("a", 1), ("b", 1)]
    with pytest.raises(SinkRefused, match="duplicate key value") as refused:
        opened.commit(harness.prepare(opened, 1, None, rows, messages=[1, 2], rejects_max=0), checked=True)
    assert ('mode="upsert"' in refused.value.message) == told
    added = harness.prepare(opened, 1, None, rows, messages=[1, 2], rejects_max=5)
    (row,) = opened.commit(added, checked=True).refused
    assert row.sqlstate == "23505"
    assert row.error.startswith("duplicate key value")
    assert ('mode="upsert"' in row.error) == told


@pytest.mark.parametrize("rule", SHIFTS[:2])
def test_superseded_rows_are_put_only_of_keys_that_have_a_number_in_common(
    opening: Opening, tmp_path: Path, database: Database, rule: str
) -> None:
    harness = rival(tmp_path, database, "upsert", rule)
    harness.refuse("bad")
    opened = opening(harness)
    opened.commit(harness.prepare(opened, 1, None, {"held": 7}), checked=True)
    rows = [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 4), ("b", 5), ("d", 7), ("d", 8)]
    free = harness.prepare(opened, 2, 1, rows[:3], messages=range(3))
    assert opened.commit(free, checked=True).superseded == 2
    others = harness.prepare(opened, 3, 2, rows[3:], messages=range(5), rejects_max=5)
    assert {row.messages for row in opened.commit(others, checked=True).refused} == {((1, 0),), ((3, 0),)}
    assert harness.rows() == Counter([("held", 7), ("a", 3), ("b", 5), ("d", 8)])
    assert [entry.reinstated for entry in opened.evidence(2, None).entries] == [0, 2]


def test_rows_are_put_in_order_where_a_column_has_a_percent_sign_in_its_name(
    tmp_path: Path, database: Database
) -> None:
    schema = "`%s` bigint not null, `a%b` bigint not null"
    queue = PostgresQueue("q", schema=schema, database=prepared_database(database))
    topology = Topology("shares")
    topology.stream("m", queue).into(PostgresSink("shares", mode="upsert", key="%s", order_by="a%b", database=database))
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute(b'create table shares ("%s" bigint primary key, "a%b" bigint, unique ("a%b"))')
        rows = [{"%s": k, "a%b": n} for k, n in ((1, 1), (1, 2), (2, 1), (3, 1))]
        assert run(topology, queue, database, tmp_path, *rows) == 1
        assert connection.execute("select * from shares order by 1").fetchall() == [(1, 2), (2, 1)]


@pytest.mark.parametrize("kind", ["memory", "postgres", "delta"])
def test_a_late_older_row_changes_nothing_also_where_a_newer_rule_would_refuse_it(
    opening: Opening, tmp_path: Path, database: Database, kind: str
) -> None:
    harness = SinkHarness(f"{kind}-upsert", tmp_path, database)
    opened = opening(harness)
    opened.commit(harness.prepare(opened, 1, None, {"a": 5, "b": 5}), checked=True)
    if isinstance(harness.sink, MemorySink):
        harness.sink.refuse = lambda row: "small" if row["n"] < 4 else None
    elif kind == "delta":
        DeltaTable(harness.delta_path).alter.add_constraint({"large": "n >= 4"})
    else:
        harness.sql("alter table counts add check (n >= 4)")
    rows = [("a", 1), ("b", 7), ("c", 1), ("d", 9)]
    added = harness.prepare(opened, 2, 1, rows, messages=[3, 4, 5, 6], rejects_max=5)
    done = opened.commit(added, checked=True)
    assert (done.superseded, [row.messages for row in done.refused]) == (1, [((5, 0),)])
    assert harness.rows() == Counter([("a", 5), ("b", 7), ("d", 9)])
    assert opened.commit(added, checked=True) == type(done)(ALREADY_HELD.outcome, 1, done.refused)
    late = harness.prepare(opened, 3, 2, {"a": 1}, messages=[7])
    assert opened.commit(late, checked=True).superseded == 1


PARENTS = (
    "alter table counts add parent text generated always as"
    " (case when word like 'c%' then 'p' || substr(word, 2) end) stored,"
    " add foreign key (parent) references counts (word)"
)


@pytest.mark.parametrize(
    ("rule", "many"), [("check (true)", 2_500), ("unique (n)", 150)], ids=["parents", "and rivals"]
)
def test_children_before_their_parents_in_one_batch_block_nothing(
    opening: Opening, tmp_path: Path, database: Database, rule: str, many: int
) -> None:
    """One row is refused, so all are put by halves; and one child has no parent."""
    harness = rival(tmp_path, database, "upsert", rule)
    harness.sql("alter table counts add constraint counts_word unique (word)" if rule == "unique (n)" else "select 1")
    harness.sql(PARENTS)
    harness.refuse("bad")
    opened = opening(harness)
    words = [*(f"c{i}" for i in range(many)), "bad", *(f"p{i}" for i in range(1, many))]
    rows = [(word, number) for number, word in enumerate(words)]
    added = harness.prepare(opened, 1, None, rows, messages=range(len(rows)), rejects_max=2)
    assert {(row.messages, row.sqlstate) for row in opened.commit(added, checked=True).refused} == {
        (((0, 0),), "23503"),
        (((many, 0),), "23514"),
    }
    assert harness.rows() == Counter(rows[1:many] + rows[many + 1 :])


def test_children_whose_parents_come_later_block_their_batch_with_the_way_on(
    opening: Opening, tmp_path: Path, database: Database
) -> None:
    harness = rival(tmp_path, database, "upsert", "check (true)")
    harness.sql(PARENTS)
    opened = opening(harness)
    added = harness.prepare(opened, 1, None, {"c1": 1, "c2": 2}, messages=[1, 2], rejects_max=1)
    with pytest.raises(SinkRefused, match=r"name it before this one.*dead-letters requeue"):
        opened.commit(added, checked=True)
