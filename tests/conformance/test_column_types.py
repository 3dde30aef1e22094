"""Every type of a schema, with the extreme values of it, comes back from each sink as it went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.typed_rows import EDGES, edge_table, put

from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.schema import parse_schema
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.columns import column_type, json_text
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.stores.memory import MemorySink

ROWS = edge_table()


def same(found: pa.Table, wanted: pa.Table) -> None:
    """Equal by representation: NaN is itself, and -0.0 is not 0.0."""
    assert found.schema.names == wanted.schema.names
    for name in wanted.schema.names:
        assert repr(found[name].to_pylist()) == repr(wanted[name].to_pylist()), name


def test_the_edges_have_the_types_that_they_are_called() -> None:
    for ddl, column in EDGES.items():
        assert parse_schema(f"c {ddl}").field("c").type == column.type, ddl


def test_memory_holds_every_type(tmp_path: Path) -> None:
    sink = MemorySink("t", staging=tmp_path / "staged")
    put(sink, ROWS)
    assert sink.store.content is not None
    same(sink.store.content, ROWS)


def test_delta_holds_every_type(tmp_path: Path) -> None:
    put(DeltaSink(tmp_path / "t", name="t"), ROWS)
    found = DeltaTable(tmp_path / "t").to_pyarrow_table()
    same(found.cast(ROWS.schema).sort_by("i"), ROWS)


def postgres_value(value: Any, kind: pa.DataType) -> Any:
    """As psycopg gives it; jsonb as parsed JSON."""
    if column_type(kind) == "jsonb":
        return None if value is None else json.loads(json_text(pa.array([value], kind))[0].as_py())
    return value


@pytest.mark.postgres
def test_postgres_holds_every_type(database: Database, tmp_path: Path) -> None:
    put(PostgresSink("t", name="t", database=database, staging=tmp_path / "staged"), ROWS)
    with psycopg.connect(database.conninfo) as connection:
        connection.execute("set timezone = 'UTC'")
        found = connection.execute("select * from t order by i").fetchall()
    for number, field in enumerate(ROWS.schema):
        wanted = [postgres_value(value, field.type) for value in ROWS[field.name].to_pylist()]
        got = [row[number] for row in found]
        if pa.types.is_float32(field.type):
            got = pa.array(got, pa.float32()).to_pylist()
        utc = "zoneinfo.ZoneInfo(key='UTC')"
        if column_type(field.type) == "jsonb":
            assert got == wanted, field
            continue
        assert [str(v) for v in got] == [str(v).replace(utc, "datetime.timezone.utc") for v in wanted], field


@pytest.mark.postgres
@pytest.mark.parametrize("prepared", [True, False], ids=["binary", "text"])
def test_arrays_of_timestamps_are_what_postgres_writes_itself(
    database: Database, tmp_path: Path, prepared: bool
) -> None:
    rows = pa.table({"i": ROWS["i"], "a": EDGES["array<timestamp>"]})
    put(PostgresSink("t", name="t", database=database, staging=tmp_path / "staged"), rows)
    with psycopg.connect(database.conninfo) as connection:
        connection.execute("set timezone = 'UTC'")
        found = connection.execute("select a::text from t order by i", binary=prepared).fetchall()
    assert [text for (text,) in found] == [
        '{"0001-01-01 00:00:00+00",NULL}',
        "{}",
        None,
        '{"9999-12-31 23:59:59.999999+00","1969-12-31 23:59:59.999999+00","2026-03-29 02:30:00.000001+00"}',
        "{NULL}",
    ]


OTHER_COLUMNS = (
    ("uuid", pa.array(["00010203-0405-0607-0809-0A0B0C0D0E0F", None]), ["00010203-0405-0607-0809-0a0b0c0d0e0f", None]),
    ("uuid", pa.array([bytes(range(16)), None], pa.binary(16)), ["00010203-0405-0607-0809-0a0b0c0d0e0f", None]),
    ("bytea", pa.array([bytes(range(3)), None], pa.binary(3)), ["\\x000102", None]),
    ("json", pa.array(['{"b": 1, "a": [ ]}', None]), ['{"b": 1, "a": [ ]}', None]),
    ("jsonb", pa.array(['{"b": 1, "a": [ ]}', None]), ['{"a": [], "b": 1}', None]),
    ("json", pa.array([[1, None], None]), ["[1,null]", None]),
    ("jsonb", pa.array([{"x": 1.5}, None]), ['{"x": 1.5}', None]),
    ("mood", pa.array(["sad", None]), ["sad", None]),
    ("citext", pa.array(["aB", None]), ["aB", None]),
    ("short", pa.array(["abc", None]), ["abc", None]),
    ("bytea[]", pa.array([[b"a", None], None]), ['{"\\\\x61",NULL}', None]),
    ("time[]", pa.array([[0, None], None], pa.list_(pa.time64("us"))), ["{00:00:00,NULL}", None]),
    ("interval[]", pa.array([[1, None], None], pa.list_(pa.duration("us"))), ["{00:00:00.000001,NULL}", None]),
    ("smallint[]", pa.array([[1, None], None], pa.list_(pa.int64())), ["{1,NULL}", None]),
    ("double precision[]", pa.array([[1.5], None], pa.list_(pa.float32())), ["{1.5}", None]),
    ("time", pa.array([0, 86_399_999_999], pa.time64("us")), ["00:00:00", "23:59:59.999999"]),
    ("time", pa.array([1, None], pa.time32("s")), ["00:00:01", None]),
    ("interval", pa.array([-1, None], pa.duration("us")), ["-00:00:00.000001", None]),
    ("text", pa.array(["a", None]).dictionary_encode(), ["a", None]),
    ("text", pa.array(["a", None], pa.large_string()), ["a", None]),
    ("text", pa.array(["a", None], pa.string_view()), ["a", None]),
    ("bytea", pa.array([b"a", None], pa.large_binary()), ["\\x61", None]),
    ("char(3)", pa.array(["ab", "abc"]), ["ab", "abc"]),
    ("char(3)[]", pa.array([["ab", None], None]), ['{"ab ",NULL}', None]),
    ("varchar(3)[]", pa.array([["abc"], []]), ["{abc}", "{}"]),
    ("citext[]", pa.array([["aB"], None]), ["{aB}", None]),
    (
        "uuid[]",
        pa.array([["00010203-0405-0607-0809-0A0B0C0D0E0F"], None]),
        ["{00010203-0405-0607-0809-0a0b0c0d0e0f}", None],
    ),
    ("inet[]", pa.array([["::1"], None], pa.list_(pa.string_view())), ["{::1}", None]),
    ("bit[]", pa.array([["1"], None], pa.large_list(pa.large_string())), ["{1}", None]),
    ("inet", pa.array(["::1", None]).dictionary_encode(), ["::1/128", None]),
)


@pytest.mark.postgres
def test_a_table_that_is_there_takes_other_forms_of_its_types(database: Database, tmp_path: Path) -> None:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        # Where the extension is not installed on the server, a domain of its name stands in: the wire is the same.
        if connection.execute("select 1 from pg_available_extensions where name = 'citext'").fetchone():
            connection.execute("create extension citext")
        else:
            connection.execute("create domain citext as text")
        connection.execute("create type mood as enum ('sad', 'ok')")
        connection.execute("create domain short as varchar(3) check (value <> 'no')")
        columns = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(OTHER_COLUMNS))
        connection.execute(f"create table t (i int, {columns})".encode())
        rows = pa.table({"i": [0, 1], **{f"c{n}": column for n, (_, column, _) in enumerate(OTHER_COLUMNS)}})
        put(PostgresSink("t", name="t", database=database, staging=tmp_path / "staged"), rows)
        for number, (kind, column, wanted) in enumerate(OTHER_COLUMNS):
            found = connection.execute(f"select c{number}::text from t order by i".encode()).fetchall()
            assert [text for (text,) in found] == wanted, (kind, column.type)


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("column", "values", "bad", "why"),
    [
        ("uuid", pa.array(["00010203-0405-0607-0809-0a0b0c0d0e0f", "x"]), [1], "is no uuid"),
        ("text[]", pa.array([["a\0"], ["a"]]), [0], "has a NUL"),
        ("jsonb", pa.array([{"x": ["a\0"]}, {"x": []}]), [0], r"c\.x\[\]: .* has a NUL"),
        ("smallint[]", pa.array([[1], [2**15]]), [1], "out of range for smallint"),
        ("short", pa.array(["abcd", "abc"]), [0], "4 characters"),
        ("jsonb", pa.array([[("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int32())), [0], "more than once"),
    ],
)
def test_a_value_that_a_column_cannot_hold_is_named(
    database: Database, tmp_path: Path, column: str, values: pa.Array, bad: list[int], why: str
) -> None:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("create domain short as varchar(3)")
        connection.execute(f"create table t (c {column})".encode())
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    rows = pa.table({"c": values})
    from support.typed_rows import IDENTITY

    session = sink.open(IDENTITY, SinkInput(rows.schema), 1)
    found = session.writer().check(rows.to_batches()[0])
    session.close()
    assert [row for row, _ in found] == bad
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found[0][1])
    assert "column 'c'" in found[0][1]


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("uuid", "map<string, int>"),
        ("int[]", "array<string>"),
        ("uuid[]", "array<binary>"),
        ("money[]", "array<string>"),
        ("text[]", "string"),
        ("json", "int"),
        ("timestamp[]", "array<timestamp>"),
        ("numeric(3,1)[]", "array<decimal(9,2)>"),
    ],
)
def test_a_column_of_another_type_is_refused(database: Database, tmp_path: Path, column: str, kind: str) -> None:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute(f"create table t (c {column})".encode())
    with pytest.raises(SinkRefused, match=r"column 'c' is .* in the table and"):
        put(PostgresSink("t", name="t", database=database, staging=tmp_path), parse_schema(f"c {kind}").empty_table())


NO_DELTA = (
    (pa.uint8(), "uint8"),
    (pa.list_(pa.uint8()), r"uint8 \(in c\[\]\)"),
    (pa.struct([("x", pa.timestamp("ns"))]), r"in c\.x"),
    (pa.map_(pa.string(), pa.time64("us")), "time64"),
    (pa.list_(pa.struct([("y", pa.timestamp("us", tz="Europe/Berlin"))])), r"in c\[\]\.y"),
    (pa.null(), "null"),
    (pa.list_(pa.null()), "null"),
    (pa.date64(), "date64"),
    (pa.decimal256(40, 2), "decimal256"),
    (pa.struct([]), "struct<>"),
    (pa.uuid(), "uuid"),
    (pa.map_(pa.string(), pa.timestamp("us")), r"in c\{value\}"),
    (pa.list_(pa.struct([("m", pa.map_(pa.timestamp("us"), pa.int32()))])), r"in c\[\]\.m\{key\}"),
)


@pytest.mark.parametrize(("kind", "why"), NO_DELTA, ids=str)
def test_delta_refuses_by_name_what_it_cannot_hold_also_inside(tmp_path: Path, kind: pa.DataType, why: str) -> None:
    """Of uint8 delta-rs makes a byte, and 200 would read as -56; of nanoseconds a type that Spark does not know.
    With a timestamp without a zone in a map, it makes a table that nobody can read: the protocol lacks the feature."""
    sink = DeltaSink(tmp_path / "t")
    with pytest.raises(TopologyError, match=f"column 'c' is .*{why}"):
        sink.check(SinkInput(pa.schema([("c", kind)])), Guarantee.EXACTLY_ONCE)


@pytest.mark.parametrize(
    "kind",
    [
        pa.uint8(),
        pa.duration("ns"),
        pa.list_(pa.binary(16)),
        pa.map_(pa.struct([("x", pa.int32())]), pa.int32()),
        pa.list_(pa.duration("us")),
    ],
    ids=str,
)
def test_postgres_refuses_by_name_what_it_cannot_hold(kind: pa.DataType, tmp_path: Path) -> None:
    sink = PostgresSink("t", staging=tmp_path)
    if kind == pa.list_(pa.duration("us")):
        sink.check(SinkInput(pa.schema([("c", kind)])), Guarantee.EXACTLY_ONCE)
        return
    with pytest.raises(TopologyError, match="column 'c'"):
        sink.check(SinkInput(pa.schema([("c", kind)])), Guarantee.EXACTLY_ONCE)
