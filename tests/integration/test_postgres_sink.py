"""The Postgres sink against zombies, lost answers, restarts, constraints, and tables that are there already."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from support.sink_harness import FOLD, SCHEMA, SinkHarness

from stormproof.core.base.errors import (
    Fenced,
    SettingsError,
    SinkRefused,
    StoreUnavailable,
    StormproofError,
    TopologyError,
)
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sinks.contract.protocol import CommitOutcome, Held, PreparedTransaction
from stormproof.sinks.postgres import connection as connection_module
from stormproof.sinks.postgres import session as session_module
from stormproof.sinks.postgres.connection import Fence
from stormproof.sinks.postgres.sink import PostgresSink

pytestmark = pytest.mark.postgres

A, B = {"a": 1, "b": 2}, {"b": 5, "c": 7}


@pytest.fixture(params=["postgres-append", "postgres-fold"])
def harness(request: pytest.FixtureRequest, tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness(request.param, tmp_path, database)


@pytest.fixture
def append(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-append", tmp_path, database)


@pytest.fixture
def fold(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-fold", tmp_path, database)


class Between:
    """Runs something at a named place of the next commit: another driver, while this one stands still in there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actions: dict[str, Callable[[], object]] = {}
        monkeypatch.setattr(session_module, "failpoint", self._reached)

    def _reached(self, name: str) -> None:
        action = self.actions.pop(name, None)
        if action is not None:
            action()


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    return Between(monkeypatch)


PLACES = ("postgres.after_guard", "postgres.after_rows")


@pytest.mark.parametrize("change", ["drop column content", "add column ours text"])
def test_the_sinks_own_tables_of_another_version_are_refused_by_name(append: SinkHarness, change: str) -> None:
    with closing(append.open(1)):
        append.sql(f"alter table stormproof_sink.evidence {change}")
    column = change.split()[2]
    with pytest.raises(SettingsError, match=rf"another version's.*evidence differ by {column}.*adopt-table"):
        append.open(2)


# Zombies


@pytest.mark.parametrize("place", PLACES)
def test_a_take_over_does_not_wait_for_a_driver_that_stands_still(
    harness: SinkHarness, between: Between, place: str
) -> None:
    with closing(harness.open(1)) as stale:
        transaction = harness.prepare(stale, 1, None, A)

        def take_over() -> None:
            with closing(harness.open(2)) as newer:
                assert newer.held() is None
                assert newer.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED

        between.actions[place] = take_over
        with pytest.raises(StoreUnavailable):
            stale.commit(transaction, checked=True)
        with pytest.raises(Fenced, match="epoch 2"):
            stale.commit(transaction, checked=True)
        with pytest.raises(Fenced):
            stale.held()
    assert harness.rows() == Counter(A.items())


def test_control_without_ending_its_connection_the_take_over_waits(
    harness: SinkHarness, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "terminate_backends", lambda *_: 0)
    monkeypatch.setattr(connection_module, "TAKE_OVER_LOCK_TIMEOUT_MS", 50)
    with closing(harness.open(1)) as stale:

        def take_over() -> None:
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                harness.open(2)

        between.actions["postgres.after_rows"] = take_over
        stale.commit(harness.prepare(stale, 1, None, A), checked=True)


def test_control_an_epoch_checked_without_the_lock_lets_a_zombie_land(
    append: SinkHarness, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_lock(fence: Any, connection: psycopg.Connection) -> psycopg.Cursor[Any]:
        return connection.execute("select 1 from stormproof_sink.fence where epoch = %s", (fence._epoch,))

    monkeypatch.setattr(Fence, "ask", without_lock)
    with closing(append.open(1)) as stale:
        seen: list[Held | None] = []

        def take_over() -> None:
            append.sql("update stormproof_sink.fence set epoch = 2")
            with closing(append.sink.inspect(append.identity, append.input)) as newer:
                seen.append(newer.held())

        between.actions["postgres.after_rows"] = take_over
        stale.commit(append.prepare(stale, 1, None, A), checked=True)
    assert seen == [None]
    assert append.rows() == Counter(A.items()), "the zombie's rows came after the new driver had looked"


def test_an_older_epoch_cannot_open(harness: SinkHarness) -> None:
    with closing(harness.open(2)):
        with pytest.raises(Fenced):
            harness.open(1)
        with closing(harness.open(2)) as again:
            assert again.held() is None


def test_a_driver_that_comes_back_after_its_connection_was_ended(harness: SinkHarness, database: Database) -> None:
    with closing(harness.open(1)) as session:
        transaction = harness.prepare(session, 1, None, A)
        _end_connections(database)
        with pytest.raises(StoreUnavailable):
            session.commit(transaction, checked=True)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
        # The new connection is known by its epoch, too, and the next take-over ends it.
        assert harness.sql("select count(distinct pid) from stormproof_sink.backend") == [(2,)]
    assert harness.rows() == Counter(A.items())


# Lost answers and restarts


@pytest.mark.parametrize("place", [*PLACES, "postgres.after_commit"])
def test_a_crash_inside_leaves_all_or_nothing(harness: SinkHarness, between: Between, place: str) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    with closing(harness.open(1)) as session:
        transaction = harness.prepare(session, 1, None, A)
        between.actions[place] = crash
        with pytest.raises(KeyboardInterrupt):
            session.commit(transaction, checked=True)
    expected = CommitOutcome.ALREADY_HELD if place == "postgres.after_commit" else CommitOutcome.APPLIED
    with closing(harness.open(2)) as session:
        assert session.commit(transaction, checked=True).outcome is expected
    assert harness.rows() == Counter(A.items())


@pytest.mark.parametrize("place", PLACES)
def test_a_connection_lost_inside_applies_nothing(
    harness: SinkHarness, between: Between, database: Database, place: str
) -> None:
    with closing(harness.open(1)) as session:
        transaction = harness.prepare(session, 1, None, A)
        between.actions[place] = lambda: _end_connections(database)
        with pytest.raises(StoreUnavailable):
            session.commit(transaction, checked=True)
        assert harness.rows() == Counter()
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    assert harness.rows() == Counter(A.items())


def test_what_was_committed_survives_an_immediate_stop(harness: SinkHarness, postgres: EmbeddedPostgres) -> None:
    with closing(harness.open(1)) as session:
        one, two = harness.prepare(session, 1, None, A), harness.prepare(session, 2, 1, B)
        session.commit(one, checked=True)
        postgres.restart(immediate=True)
        with pytest.raises(StoreUnavailable):
            session.held()
        assert session.held() == Held(1, one.digest)
        assert session.commit(two, checked=True).outcome is CommitOutcome.APPLIED


def test_synchronous_commit_is_on_where_the_database_has_it_off(append: SinkHarness, database: Database) -> None:
    append.sql(f"alter database {dict(database.parameters)['dbname']} set synchronous_commit = off")
    append.sql(
        f"alter database {dict(database.parameters)['dbname']} set default_transaction_isolation = 'serializable'"
    )
    with closing(append.open(1)) as session:
        shown: list[tuple[Any, ...]] = []

        def look() -> None:
            connection = session.link.connection()  # type: ignore[attr-defined]  # pyright: ignore
            shown.append(
                (
                    connection.execute("show synchronous_commit").fetchone()[0],
                    connection.execute("show transaction_isolation").fetchone()[0],
                )
            )

        with pytest.MonkeyPatch.context() as patch:
            Between(patch).actions["postgres.after_rows"] = look
            session.commit(append.prepare(session, 1, None, A), checked=True)
        assert shown == [("on", "read committed")]


def test_no_password_is_shown(append: SinkHarness, database: Database) -> None:
    secret = Database.of({**dict(database.parameters), "password": "hunter2"})
    sink = PostgresSink("counts", database=secret)
    with closing(sink.open(append.identity, append.input, 1)) as session:
        append.sql("drop table counts")
        with pytest.raises(SinkRefused) as caught:
            session.commit(append.prepare(session, 1, None, {}), checked=True)
    assert "hunter2" not in f"{caught.value} {sink.target} {sink.name}"


# What the table refuses


def refused(harness: SinkHarness, rows: Any, why: str) -> SinkRefused:
    with closing(harness.open(1)) as session:
        with pytest.raises(SinkRefused, match=why) as caught:
            session.commit(harness.prepare(session, 1, None, rows), checked=True)
        assert session.held() is None
        assert session.evidence(0, None).entries == ()
    assert harness.rows() == Counter()
    return caught.value


def test_a_constraint_names_itself_and_the_row(harness: SinkHarness) -> None:
    harness.sql("create table counts (word text primary key, n bigint constraint small check (n < 5))")
    error = refused(harness, {"a": 1, "b": 9}, "small")
    assert error.details["constraint"] == "small"
    assert "b, 9" in str(error.details["row"])


def test_a_column_that_went_away_is_named(harness: SinkHarness) -> None:
    with closing(harness.open(1)) as session:
        harness.sql("alter table counts drop column n")
        with pytest.raises(SinkRefused, match="no column 'n'"):
            session.commit(harness.prepare(session, 1, None, A), checked=True)


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ("create table counts (word text primary key, n integer[])", r"'n' is integer\[\] in the table and int64"),
        ("create table counts (word bytea primary key, n bigint)", "'word' is bytea in the table and string"),
        ("create table counts (word text primary key)", "no column 'n'"),
        ("create table counts (word text primary key, n bigint, z int not null)", "'z' is NOT NULL"),
        ("create table counts (word text primary key, n bigint generated always as (1) stored)", "generated"),
        ("create unlogged table counts (word text primary key, n bigint)", "unlogged"),
        ("create view counts as select 'a'::text as word, 1::bigint as n", "not a table"),
    ],
)
def test_a_table_that_cannot_serve_is_refused(harness: SinkHarness, definition: str, why: str) -> None:
    harness.sql(definition)
    with pytest.raises(SinkRefused, match=why):
        harness.open()


@pytest.mark.parametrize(
    "definition",
    [
        "create table counts (word text, n bigint)",
        "create table counts (word text unique deferrable, n bigint)",
        "create table counts (word text, n bigint, unique (word, n))",
        "create table counts (word text, n bigint); create unique index on counts (word) where n > 0",
        "create table counts (word text, n bigint); create unique index on counts (lower(word))",
    ],
)
def test_a_fold_needs_a_unique_constraint_on_just_its_keys(fold: SinkHarness, definition: str) -> None:
    for statement in definition.split(";"):
        fold.sql(statement)
    with pytest.raises(SinkRefused, match="unique index on exactly"):
        fold.open()


def test_what_can_be_told_before_the_commit(append: SinkHarness) -> None:
    append.sql("create table counts (word varchar(3) not null, n smallint)")
    with closing(append.open()) as session:
        pairs = [("abc", 1), (None, 1), ("a\0", 1), ("abcd", 1), ("x", 2**15), ("y", None)]
        rows = pa.record_batch(
            [pa.array([w for w, _ in pairs]), pa.array([n for _, n in pairs], pa.int64())], schema=SCHEMA
        )
        assert [row for row, _ in session.writer().check(rows)] == [1, 2, 3, 4]
        session.commit(append.prepare(session, 1, None, [pairs[0], pairs[5]]), checked=True)
    assert append.rows() == Counter({("abc", 1): 1, ("y", None): 1})


def test_a_value_beyond_a_narrower_column_is_refused(append: SinkHarness) -> None:
    append.sql("create table counts (word text, n smallint)")
    refused(append, {"a": 2**15}, "does not fit")


# Types and places


def test_every_type_arrives_as_it_was(tmp_path: Path, database: Database) -> None:
    columns: dict[str, tuple[pa.DataType, Any]] = {
        "text": (pa.string(), "ä'\"\\\n\t"),
        "large": (pa.large_string(), ""),
        "i8": (pa.int8(), -128),
        "i16": (pa.int16(), 2**15 - 1),
        "i32": (pa.int32(), -(2**31)),
        "i64": (pa.int64(), 2**63 - 1),
        "f32": (pa.float32(), 0.5),
        "f64": (pa.float64(), 1e300),
        "yes": (pa.bool_(), True),
        "day": (pa.date32(), date(1969, 12, 31)),
        "local": (pa.timestamp("us"), datetime(1999, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001
        "moment": (pa.timestamp("us", "UTC"), datetime(2020, 1, 1, 12, tzinfo=UTC)),
        "raw": (pa.binary(), b"\0\xff"),
        "price": (pa.decimal128(10, 2), Decimal("-12345678.90")),
        "tiny": (pa.decimal128(30, 20), Decimal("0.00000000000000000001")),
        "none": (pa.decimal128(38, 0), Decimal(10**37)),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
    row = {name: value for name, (_, value) in columns.items()}
    harness = SinkHarness("postgres-append", tmp_path, database)
    sink = PostgresSink("Mixed Case", name="s", database=database, staging=tmp_path / "staged")
    input_ = SinkInput(schema)
    sink.check(input_, Guarantee.EXACTLY_ONCE)
    with closing(sink.open(harness.identity, input_, 1)) as session:
        writer = session.writer().open_task(TaskContext("inc-1", 1, 1, 0), schema)
        writer.write(pa.RecordBatch.from_pylist([row, dict.fromkeys(columns)], schema))
        files = tuple(writer.close())
        session.commit(PreparedTransaction(1, None, transaction_digest(files), 2, files), checked=True)
    found = harness.sql('select * from "Mixed Case"')
    assert found[0] == tuple(row.values())
    assert set(found[1]) == {None}


def test_a_table_in_a_schema_and_one_sink_beside_another(tmp_path: Path, database: Database) -> None:
    harness = SinkHarness("postgres-fold", tmp_path, database)
    harness.sql("create schema other")
    sinks = [
        PostgresSink(table, database=database, staging=tmp_path / "staged" / str(i))
        for i, table in enumerate(("other.counts", "counts"))
    ]
    for sink in sinks:
        identity = type(harness.identity)("topology", "inc-1", sink.name)
        with closing(sink.open(identity, FOLD, 1)) as session:
            transaction = harness.prepare(session, 1, None, A)
            assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    assert Counter(harness.sql("select word, n from other.counts")) == harness.rows() == Counter(A.items())


@pytest.mark.parametrize("name", ["", ".x", "a.b.c", "x."])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(TopologyError, match="name"):
        PostgresSink(name)


def test_what_is_not_given_comes_from_the_run(tmp_path: Path, database: Database) -> None:
    sink = PostgresSink("counts")
    harness = SinkHarness("postgres-fold", tmp_path, database)
    with pytest.raises(SettingsError, match="no database"):
        sink.open(harness.identity, FOLD, 1)
    placed = sink.placed(database, str(tmp_path))
    assert (placed.name, placed.table, placed.database) == (sink.name, "counts", database)
    with closing(placed.open(harness.identity, FOLD, 1)) as session:
        session.commit(harness.prepare(session, 1, None, A), checked=True)
    assert (tmp_path / sink.name).is_dir()


@pytest.mark.parametrize("kind", [pa.uint64(), pa.timestamp("ns"), pa.list_(pa.uint8()), pa.time64("ns")])
def test_a_type_that_has_no_column_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(TopologyError, match="'x'"):
        PostgresSink("t").check(SinkInput(pa.schema([("x", kind)])), Guarantee.EXACTLY_ONCE)


def test_floats_and_decimals_are_summed(tmp_path: Path, database: Database) -> None:
    schema = pa.schema([("k", pa.int32()), ("f", pa.float64()), ("d", pa.decimal128(6, 2))])
    input_ = SinkInput.for_fold(schema, ("k",), {"f": Fold.SUM, "d": Fold.SUM})
    harness = SinkHarness("postgres-fold", tmp_path, database)
    sink = PostgresSink("sums", name="s", database=database, staging=tmp_path)
    with closing(sink.open(harness.identity, input_, 1)) as session:
        for txid, amount in ((1, "1.25"), (2, "2.50")):
            writer = session.writer().open_task(TaskContext("inc-1", txid, 1, 0), schema)
            writer.write(pa.RecordBatch.from_pylist([{"k": 1, "f": 0.5, "d": Decimal(amount)}], schema))
            files = tuple(writer.close())
            session.commit(
                PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), 1, files), checked=True
            )
    assert harness.sql("select * from sums") == [(1, 1.0, Decimal("3.75"))]


# Evidence


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("delete from stormproof_sink.evidence where txid = 2", "newest evidence row is txid 1"),
        ("update stormproof_sink.evidence set digest = 'x' where txid = 2", "digest x"),
        ("update stormproof_sink.guard set last_txid = 1", "guard row says txid 1"),
        ("delete from stormproof_sink.guard", "guard row says txid None"),
    ],
)
def test_tampered_evidence_is_named(harness: SinkHarness, damage: str, named: str) -> None:
    with closing(harness.open()) as session:
        session.commit(harness.prepare(session, 1, None, A), checked=True)
        session.commit(harness.prepare(session, 2, 1, B), checked=True)
        assert session.evidence(0, None).problems == ()
        harness.sql(damage)
        (problem,) = session.evidence(0, None).problems
        assert named in problem


def test_inspecting_makes_nothing(harness: SinkHarness) -> None:
    with closing(harness.sink.inspect(harness.identity, harness.input)) as reader:
        assert reader.evidence(0, None).entries == ()
        assert reader.held() is None
        with pytest.raises(SinkRefused, match="no such table"):
            _ = reader.table_id
    assert harness.sql("select count(*) from pg_namespace where nspname = 'stormproof_sink'") == [(0,)]


def test_first_starts_at_the_same_time(tmp_path: Path, database: Database) -> None:
    harness = SinkHarness("postgres-fold", tmp_path, database)
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def start(number: int) -> None:
        identity = type(harness.identity)(f"topology-{number}", "inc-1", "counts")
        barrier.wait()
        try:
            harness.sink.open(identity, FOLD, 1).close()
        except StormproofError as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.fixture(autouse=True)
def nothing_is_left_open(database: Database) -> Iterator[None]:
    """No session may leave a connection behind: the next take-over would have to end it."""
    yield
    with connect(database, application_name="test", autocommit=True) as connection:
        left = connection.execute(
            "select application_name, state from pg_stat_activity where datname = current_database() and "
            "application_name like 'stormproof sink%' and state <> 'idle'"
        ).fetchall()
    assert left == []


def _end_connections(database: Database) -> None:
    with connect(database, application_name="test", autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where datname = current_database() and application_name like 'stormproof sink%'"
        )
