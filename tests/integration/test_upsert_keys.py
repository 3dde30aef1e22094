"""Keys as the stores compare them: pairs that batches take for two keys must be two to the table, else it is refused."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.databases import at

from stormproof import DeltaSink, PostgresSink
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database, connect
from stormproof.sinks.contract.protocol import PreparedTransaction, Sink, SinkIdentity, SinkSession

pytestmark = pytest.mark.postgres

KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (
        pa.string(),
        ["a", "A", "a ", " a", "", "\u00e9", "e\u0301", "\uff41", "\U0001f600", "ss", "\u00df", "i", "\u0130"],
    ),
    "bytes": (pa.binary(), [b"", b"\0", b"\0\0", b"\xff", b"a"]),
    "decimal": (pa.decimal128(10, 2), [Decimal("1.00"), Decimal("1.10"), Decimal("-1.00"), Decimal("0.00")]),
    "instant": (
        pa.timestamp("us", "America/New_York"),
        [
            datetime(2024, 11, 3, 5, 30, tzinfo=UTC),
            datetime(2024, 11, 3, 6, 30, tzinfo=UTC),
            datetime(1, 1, 1, tzinfo=UTC),
        ],
    ),
    "local": (pa.timestamp("us"), [datetime(2024, 3, 31, 2, 30), datetime(2024, 3, 31, 3, 30), datetime(9999, 12, 31)]),  # noqa: DTZ001
    "day": (pa.date32(), [date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31)]),
    "small": (pa.int8(), [-128, 0, 127]),
    "flag": (pa.bool_(), [False, True]),
}


def put(session: SinkSession, schema: pa.Schema, txid: int, keys: list[Any], v: int) -> int:
    rows = pa.RecordBatch.from_arrays([pa.array(keys, schema[0].type), pa.array([v] * len(keys))], schema=schema)
    return put_rows(session, txid, rows)


def put_rows(session: SinkSession, txid: int, rows: pa.RecordBatch) -> int:
    writer = session.writer().open_task(TaskContext("life", txid, 1, 0), rows.schema)
    writer.write(rows)
    files = writer.close()
    done = PreparedTransaction(
        txid, txid - 1 or None, transaction_digest(files), sum(f.rows for f in files), tuple(files)
    )
    return session.commit(done, checked=True).superseded


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("store", ["delta", "postgres"])
def test_different_keys_are_different_rows(store: str, kind: str, tmp_path: Path, database: Database) -> None:
    type_, keys = KEYS[kind]
    if store == "delta" and kind == "instant":
        type_ = pa.timestamp("us", "UTC")  # all that a Delta table takes; its check refuses others
    schema = pa.schema([pa.field("Key", type_), pa.field("v", pa.int64())])
    input_ = SinkInput.for_upsert(schema, ("Key",), ("v",))
    sink: Sink = DeltaSink(tmp_path / "t", name="t")
    if store == "postgres":
        sink = PostgresSink("t", name="t", database=database, staging=tmp_path / "staged")
    with closing(sink.open(SinkIdentity("t", "life", "t"), input_, 1)) as session:
        assert put(session, schema, 1, [*keys, *keys], 1) == len(keys), "in the batch each key is left once"
        assert put(session, schema, 2, keys, 0) == len(keys), "each is found again"
        assert put(session, schema, 3, keys, 2) == 0
    if store == "delta":
        found = DeltaTable(tmp_path / "t").to_pyarrow_table().column("v").to_pylist()
    else:
        with connect(database, application_name="test", autocommit=True) as connection:
            found = [v for (v,) in connection.execute("select v from t").fetchall()]
    assert found == [2] * len(keys)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("create table t (k text collate ci primary key, v bigint)", "nondeterministic collation 'ci'"),
        (
            "create table t (k text, v bigint); create unique index on t (k collate ci)",
            "nondeterministic collation 'ci'",
        ),
        ("create table t (k text, v bigint)", r'exactly \("k"\).*CREATE UNIQUE INDEX ON .*"t" \("k"\)'),
        ("create table t (k text, v bigint, unique (k, v))", "CREATE UNIQUE INDEX"),
        ("create table t (k text unique deferrable, v bigint)", "CREATE UNIQUE INDEX"),
        ("create table t (k text, v bigint); create unique index on t (lower(k))", "CREATE UNIQUE INDEX"),
        ("create table t (k text, v bigint); create unique index on t (k) where v > 0", "CREATE UNIQUE INDEX"),
        ("create table t (k jsonb primary key, v bigint)", "key column 'k' is jsonb"),
    ],
)
def test_a_table_that_compares_keys_otherwise_is_refused(
    made: str, said: str, tmp_path: Path, database: Database
) -> None:
    with connect(database, application_name="test", autocommit=True) as connection:
        connection.execute('create collation ci from "C"')
        for statement in made.split("; "):
            connection.execute(statement.encode())
        # The embedded server has no ICU, whose collations alone can be nondeterministic.
        connection.execute("update pg_collation set collisdeterministic = false where collname = 'ci'")
    schema = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    with pytest.raises(SinkRefused, match=said):
        sink.open(SinkIdentity("t", "life", "t"), SinkInput.for_upsert(schema, ("k",), ("v",)), 1)


@pytest.mark.parametrize(
    ("partitioned", "key"),
    [
        ("", "k"),
        ("partition by hash (k); create table w partition of t for values with (modulus 1, remainder 0)", "k"),
        ("partition by list (d); create table w partition of t default", "k, d"),
        ("partition by range (e, d); create table w partition of t default", "k, d, e"),
        (
            "partition by list (d); create table u (v bigint, e text, d text, k text) partition by list (e);"
            " alter table t attach partition u default; create table w partition of u default",
            "k, d, e",
        ),
    ],
)
def test_the_unique_index_that_a_table_lacks_is_made_as_the_refusal_says(
    partitioned: str, key: str, tmp_path: Path, database: Database
) -> None:
    schema = pa.schema([*((name, pa.string()) for name in "kde"), ("v", pa.int64())])
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    with at(database) as connection:
        connection.execute(f"create table t (k text, d text, e text, v bigint) {partitioned}".encode())
        with pytest.raises(SinkRefused, match="ake one: CREATE UNIQUE INDEX") as refused:
            sink.open(SinkIdentity("t", "life", "t"), SinkInput.for_upsert(schema, ("k",), ("v",)), 1)
        (statement,) = re.findall("CREATE UNIQUE INDEX [^;]*", refused.value.message)
        assert statement.replace('"', "").endswith(f" ({key})")
        connection.execute(statement.encode())
        keys = tuple(key.split(", "))
        with closing(
            sink.open(SinkIdentity("t", "life", "t"), SinkInput.for_upsert(schema, keys, ("v",)), 1)
        ) as session:
            for v in (1, 2):
                row = {"k": "a", "d": "b", "e": "c", "v": v}
                put_rows(session, v, pa.RecordBatch.from_pylist([row], schema))
        assert connection.execute("select v from t").fetchall() == [(2,)]


@pytest.mark.parametrize(
    "made",
    [
        "create table t (k text, v bigint) partition by hash (lower(k))",
        "create table t (k text, v bigint) partition by hash (k);"
        " create table u partition of t for values with (modulus 1, remainder 0) partition by list (lower(k))",
    ],
)
def test_a_table_that_can_have_no_unique_index_is_refused_without_advice_to_make_one(
    made: str, tmp_path: Path, database: Database
) -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    with at(database) as connection:
        connection.execute(made.encode())
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            connection.execute("create unique index on t (k)")
    with pytest.raises(SinkRefused, match=r"by an expression.*name a table") as refused:
        sink.open(SinkIdentity("t", "life", "t"), SinkInput.for_upsert(schema, ("k",), ("v",)), 1)
    assert "CREATE UNIQUE INDEX" not in refused.value.message


@pytest.mark.parametrize("kind", ["uuid", "jsonb"])
def test_a_text_that_its_column_spells_anew_is_no_order(kind: str, tmp_path: Path, database: Database) -> None:
    with connect(database, application_name="test", autocommit=True) as connection:
        connection.execute(f"create table t (k bigint primary key, v {kind})".encode())
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string())])
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    with pytest.raises(SinkRefused, match=f"order_by names 'v', which is {kind}"):
        sink.open(SinkIdentity("t", "life", "t"), SinkInput.for_upsert(schema, ("k",), ("v",)), 1)


U = "-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("kind", "type_", "one", "other"),
    [
        ("uuid", pa.string(), "b0000000" + U, "A1111111" + U),
        ("uuid", pa.string(), "{c0000000" + U + "}", "d1111111" + U),
        ("jsonb", pa.string(), '{"b": 1}', ' {"a": 1}'),
        ("timestamp(0)", pa.timestamp("us"), datetime(2024, 1, 1, 0, 0, 0, 400000), datetime(2024, 1, 1)),  # noqa: DTZ001
    ],
)
def test_what_the_table_keeps_otherwise_does_not_decide(
    kind: str, type_: pa.DataType, one: Any, other: Any, tmp_path: Path, database: Database
) -> None:
    """Rows that are equal in order_by: the next column with one order decides, in a batch as across batches."""
    schema = pa.schema(
        [pa.field("k", pa.int64()), pa.field("v", pa.int64()), pa.field("x", type_), pa.field("n", pa.int64())]
    )
    rows = [{"k": 1, "v": 1, "x": one, "n": 1}, {"k": 1, "v": 1, "x": other, "n": 2}]
    found: list[Any] = []
    with connect(database, application_name="test", autocommit=True) as connection:
        for number, cut in enumerate([[rows], [rows[:1], rows[1:]], [rows[1:], rows[:1]]]):
            connection.execute(f"create table t{number} (k bigint primary key, v bigint, x {kind}, n bigint)".encode())
            sink = PostgresSink(f"t{number}", name="t", database=database, staging=tmp_path / str(number))
            input_ = SinkInput.for_upsert(schema, ("k",), ("v",))
            with closing(sink.open(SinkIdentity("t", f"life{number}", "t"), input_, 1)) as session:
                for txid, batch in enumerate(cut, start=1):
                    writer = session.writer().open_task(TaskContext(f"life{number}", txid, 1, 0), schema)
                    writer.write(pa.RecordBatch.from_pylist(batch, schema))
                    files = writer.close()
                    done = PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), 1, tuple(files))
                    session.commit(done, checked=True)
            found.append(connection.execute(f"select n, x::text from t{number}".encode()).fetchall())
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == 2


@pytest.mark.parametrize("column", ["k", "v"])
def test_a_key_or_a_time_that_its_column_rounds_fails_its_message(
    column: str, tmp_path: Path, database: Database
) -> None:
    """In a batch such keys are two, to the table they are one."""
    with connect(database, application_name="test", autocommit=True) as connection:
        connection.execute("create table t (k timestamp(3) primary key, v timestamp(3), w timestamp(3))")
    kind = pa.timestamp("us")
    schema = pa.schema([pa.field(name, kind) for name in "kvw"])
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    whole, broken = 1_704_067_200_123_000, 1_704_067_200_123_400
    rows = {name: pa.array([whole, broken if name in (column, "w") else whole], kind) for name in "kvw"}
    with closing(sink.open(SinkIdentity("t", "l", "t"), SinkInput.for_upsert(schema, ("k",), ("v",)), 1)) as session:
        found = session.writer().check(pa.RecordBatch.from_pydict(rows, schema))
    assert [row for row, _ in found] == [1]
    assert f"column '{column}'" in found[0][1]
    assert "rounded by timestamp(3)" in found[0][1]


def test_kept_columns_and_rows_dropped_by_a_trigger(tmp_path: Path, database: Database) -> None:
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.int64()), pa.field("first", pa.int64())])
    with connect(database, application_name="test", autocommit=True) as connection:
        connection.execute("create table t (k bigint primary key, v bigint, first bigint, note text default 'n')")
        connection.execute(
            "create function no() returns trigger language plpgsql as $$ begin if new.k = 3 then return null; end if; "
            "return new; end $$"
        )
        connection.execute("create trigger no before insert on t for each row execute function no()")
        sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
        input_ = SinkInput.for_upsert(schema, ("k",), ("v",), keep=("first",))
        with closing(sink.open(SinkIdentity("t", "life", "t"), input_, 1)) as session:

            def commit(txid: int, rows: list[tuple[int, int, int]]) -> tuple[int, int]:
                writer = session.writer().open_task(TaskContext("life", txid, 1, 0), schema)
                writer.write(
                    pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)
                )
                files = writer.close()
                rows_ = sum(f.rows for f in files)
                done = PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), rows_, tuple(files))
                result = session.commit(done, checked=True)
                return result.superseded, result.dropped

            assert commit(1, [(1, 1, 1), (2, 5, 1)]) == (0, 0)
            connection.execute("update t set note = 'kept' where k = 1")
            assert commit(2, [(1, 2, 2), (2, 4, 2), (3, 1, 2)]) == (1, 1)
        assert connection.execute("select k, v, first, note from t order by k").fetchall() == [
            (1, 2, 1, "kept"),
            (2, 5, 1, "n"),
        ]


def test_a_batch_whose_rows_all_came_late_is_held_when_its_table_is_opened_again(tmp_path: Path) -> None:
    """Its log entry adds no file, and is whole all the same."""
    schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
    sink = DeltaSink(tmp_path / "t", name="t", mode="upsert", key="k", order_by="v")
    input_, identity = sink.input_of(SinkInput(schema)), SinkIdentity("topology", "life", "t")
    with closing(sink.open(identity, input_, 1)) as session:
        assert put(session, schema, 1, ["a", "b"], 2) == 0
        assert put(session, schema, 2, ["a", "b"], 1) == 2
    with closing(sink.open(identity, input_, 2)) as session:
        held = session.held()
        assert held is not None
        assert held.txid == 2
        assert put(session, schema, 3, ["a"], 3) == 0
    assert sorted(DeltaTable(tmp_path / "t").to_pyarrow_table().to_pydict()["v"]) == [2, 3]
