"""One table, one sink: what two sinks of a topology have in common is found in the stores, before anything is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import psycopg
import pyarrow as pa
import pytest
from support.operated import Operated
from support.streams import SCHEMA, ArrowFrames, Handout
from support.topologies import MAX_ATTEMPTS

from stormproof import DeltaMap, DeltaSink, PostgresMap, PostgresQueue, PostgresSink, Topology, count, exactly_once
from stormproof.core.base.errors import SettingsError, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.graph.plan import compile_topology
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.sinks.postgres import connection
from stormproof.trident.driver.opening import require_own_tables
from stormproof.trident.state.sink import StateSink

pytestmark = pytest.mark.postgres

NAME = "own"
LINES = [b"a b", b"a", b"c c a"]
SHOULD = Counter(["a", "b", "a", "c", "c", "a"])
Sinks = Callable[[Operated], Sequence[SinkSpec]]


def words(operated: Operated, *sinks: SinkSpec, fold: bool = True) -> Topology:
    t = Topology(NAME)
    queue = PostgresQueue(NAME, database=operated.cell.database, max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001)
    stream = t.stream("lines", queue).flat_map(str.split, "line", schema="word string")
    (stream.group_by("word").persistent_aggregate(n=count()) if fold else stream).into(*sinks)
    return t


def other_way(operated: Operated, **parameters: str) -> Database:
    """The same database by another URL."""
    return Database.of({**dict(operated.cell.database.parameters), **parameters})


ONE_TABLE: dict[str, Sinks] = {
    "with its schema": lambda o: [PostgresSink("counts", name="a"), PostgresSink("public.counts", name="b")],
    "by the run's database and by a URL": lambda o: [
        PostgresSink("counts", name="a"),
        PostgresSink("counts", name="b", database=o.cell.database),
    ],
    "by two URLs": lambda o: [
        PostgresSink("counts", name="a", database=o.cell.database),
        PostgresSink("counts", name="b", database=other_way(o, application_name="other", options="-c work_mem=8MB")),
    ],
    "by another search path": lambda o: [
        PostgresSink("counts", name="a", database=other_way(o, options="-c search_path=elsewhere")),
        PostgresSink("elsewhere.counts", name="b"),
    ],
    "a sink and a map": lambda o: [PostgresSink("counts", name="a"), StateSink("b", PostgresMap("public.counts"))],
    "two maps": lambda o: [
        StateSink("a", PostgresMap("counts")),
        StateSink("b", PostgresMap("public.counts", "transactional")),
    ],
    "a symlink": lambda o: [
        DeltaSink(o.cell.folder / "lake" / "t", name="a"),
        DeltaSink(o.cell.folder / "link", name="b"),
    ],
    "a Delta sink and a map": lambda o: [
        DeltaSink(o.cell.folder / "lake" / "t", name="a"),
        StateSink("b", DeltaMap(o.cell.folder / "link")),
    ],
}


@pytest.mark.parametrize("there", [False, True], ids=["not made yet", "made"])
@pytest.mark.parametrize("sinks", ONE_TABLE.values(), ids=ONE_TABLE)
def test_one_table_under_two_names_is_refused_before_anything_is_touched(
    operated: Operated, sinks: Sinks, there: bool
) -> None:
    operated.sql("create schema elsewhere")
    (operated.cell.folder / "link").symlink_to(operated.cell.folder / "lake" / "t")
    operated.put(*LINES)
    if there:
        operated.run(words(operated, sinks(operated)[0]))
        operated.put(*LINES)
    before = picture(operated)
    with pytest.raises(TopologyError, match=r"topology 'own': sinks 'a' and 'b' have one table: .*a\.merge\(b\)"):
        operated.run(words(operated, *sinks(operated)))
    assert picture(operated) == before  # no table, no epoch: the driver before was not fenced
    operated.run(words(operated, sinks(operated)[0]))


def picture(operated: Operated) -> object:
    """The tables, the drivers, and the lake's files."""
    tables = operated.sql(
        "select relnamespace::regnamespace::text, relname from pg_class where relkind = 'r' order by 1, 2"
    )
    mine = [name for schema, name in tables if not schema.startswith(("stormproof", "pg_", "information"))]
    made = ("stormproof", "topology") in tables
    epochs = operated.sql("select name, epoch from stormproof.topology") if made else []
    return mine, epochs, sorted(operated.cell.folder.glob("lake/**/*"))


@pytest.mark.parametrize("guarantee", list(Guarantee))
@pytest.mark.parametrize("fold", [True, False], ids=["fold", "append"])
def test_under_every_guarantee_and_for_appended_rows(operated: Operated, guarantee: Guarantee, fold: bool) -> None:
    other = Operated(replace(operated.cell, guarantee=guarantee), operated.capture)
    with pytest.raises(TopologyError, match="have one table"):
        other.run(words(operated, *ONE_TABLE["with its schema"](operated), fold=fold))


def test_control_without_the_question_every_count_is_doubled_and_the_audit_is_clean(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormproof.trident.driver.opening.require_own_tables", lambda plan: None)
    operated.put(*LINES)
    operated.run(words(operated, *ONE_TABLE["with its schema"](operated)))
    assert dict(operated.sql("select word, n from counts")) == {word: 2 * n for word, n in SHOULD.items()}
    operated.verify()


def test_control_tables_that_only_look_alike_are_not_refused(operated: Operated, database: Database) -> None:
    operated.sql("create schema elsewhere")
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        name = dict(database.parameters)["dbname"] + "_other"
        connection.execute(f"create database {name}".encode())
    try:
        operated.put(*LINES)
        operated.run(
            words(
                operated,
                PostgresSink("counts", name="a"),
                PostgresSink("elsewhere.counts", name="b"),
                PostgresSink("Counts", name="c"),
                PostgresSink("counts", name="d", database=database.with_name(name)),
                DeltaSink(operated.cell.folder / "lake" / "counts", name="e"),
                StateSink("f", DeltaMap(operated.cell.folder / "lake" / "Counts")),
            )
        )
        for table in ("counts", "elsewhere.counts", '"Counts"'):
            assert dict(operated.sql(f"select word, n from {table}")) == SHOULD
        with psycopg.connect(database.with_name(name).conninfo) as connection:
            assert dict(connection.execute("select word, n from counts").fetchall()) == SHOULD
    finally:
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute(f"drop database {name} with (force)".encode())


def test_one_sink_behind_a_merge_is_the_way_to_feed_a_table_twice(operated: Operated) -> None:
    t = Topology(NAME)
    queue = PostgresQueue(NAME, database=operated.cell.database, max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001)
    stream = t.stream("lines", queue).flat_map(str.split, "line", schema="word string")
    both = t.merge(stream, stream.filter(lambda word: word != "a"))
    both.group_by("word").persistent_aggregate(n=count()).into(PostgresSink("counts"))
    operated.put(*LINES)
    operated.run(t)
    assert dict(operated.sql("select word, n from counts")) == {"a": 3, "b": 2, "c": 4}


def test_a_streaming_querys_sinks_are_asked_too(operated: Operated) -> None:
    settings = Settings(
        database_url=operated.cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=operated.cell.folder / "home",
    )
    sinks = PostgresSink("rows", name="a"), PostgresSink("public.rows", name="b")
    function = exactly_once(*sinks, name="rows", settings=settings, frames=ArrowFrames())
    with pytest.raises(TopologyError, match=r"'a' and 'b' have one table: rows at .*, which is public.rows at"):
        function(Handout("query", lambda: pa.table([["x"], ["id"]], schema=SCHEMA), SCHEMA), 0)
    assert operated.sql("select to_regclass('rows')") == [(None,)]


@pytest.mark.parametrize("copied", [True, False])
def test_a_copied_cluster_is_another_server(operated: Operated, monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    """It has its original's identifier; when it was started tells the two apart."""
    starts = iter((1, 2 if copied else 1))
    asked = connection.LOCATE

    def connected(database: Database, *, application_name: str, autocommit: bool) -> psycopg.Connection:
        monkeypatch.setattr(
            connection, "LOCATE", asked.replace("extract(epoch from pg_postmaster_start_time())", str(next(starts)))
        )
        return connect(database, application_name=application_name, autocommit=autocommit)

    monkeypatch.setattr(connection, "connect", connected)
    sinks = [
        PostgresSink("counts", name="a", database=operated.cell.database),
        PostgresSink("public.counts", name="b", database=operated.cell.database),
    ]
    plan = compile_topology(words(operated, *sinks), Guarantee.EXACTLY_ONCE)
    if copied:
        require_own_tables(plan)
        return
    with pytest.raises(TopologyError, match="have one table"):
        require_own_tables(plan)


@pytest.mark.parametrize("state", [False, True], ids=["sink", "map"])
def test_the_audit_finds_a_table_as_the_sink_did(operated: Operated, state: bool) -> None:
    """What else its URL says, as a search path, decides which table it is; the password alone is not on record."""
    operated.sql("create schema elsewhere; create table counts (word text primary key, n bigint)")
    secret = f"not-asked-for-{NAME}"
    database = other_way(operated, options="-c search_path=elsewhere", password=secret)
    sinks = PostgresSink("counts", database=database), StateSink("a", PostgresMap("counts", database=database))
    sink = sinks[state]
    operated.put(*LINES)
    operated.run(words(operated, sink))
    ((tables,),) = operated.sql(
        "select array_agg(relnamespace::regnamespace::text || '.' || relname) from pg_class "
        "where relname = 'counts' and relkind = 'r'"
    )
    assert sorted(tables) == ["elsewhere.counts", "public.counts"]
    assert operated.sql("select count(*) from public.counts") == [(0,)]
    assert operated.verify()["violations"] == []
    ((described,),) = operated.sql("select description::text from stormproof.topology_sink")
    assert "search_path" in described
    assert secret not in described


@pytest.mark.parametrize("state", [False, True], ids=["sink", "map"])
def test_a_table_that_the_roles_search_path_does_not_lead_to_is_not_called_gone(
    operated: Operated, state: bool
) -> None:
    ((name,),) = operated.sql("select quote_ident(current_database())")
    operated.sql(f"create schema elsewhere; alter database {name} set search_path = elsewhere")
    sinks = PostgresSink("counts", name="a"), StateSink("a", PostgresMap("counts"))
    operated.put(*LINES)
    operated.run(words(operated, sinks[state]))
    operated.sql(f"alter database {name} reset search_path")
    report = operated.verify(status=4)
    assert report["violations"] == []
    assert "its table is elsewhere.counts" in report["unknowns"][0]["text"]
    with pytest.raises(SettingsError, match=r"its table is elsewhere\.counts, and the search path of role"):
        operated.run(words(operated, sinks[state]))
    operated.sql("drop table elsewhere.counts")
    assert operated.verify(status=1)["violations"]
