"""Schemas from DDL, from StructType, and back."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.schema import SchemaLike, parse_schema, to_ddl

EVERY = pa.schema(
    [
        pa.field("a", pa.string(), nullable=False),
        pa.field("b", pa.int64()),
        pa.field("c", pa.int32()),
        pa.field("d", pa.float64()),
        pa.field("e", pa.binary()),
        pa.field("f", pa.decimal128(12, 3)),
        pa.field("g", pa.timestamp("us", tz="UTC")),
        pa.field("h", pa.timestamp("us")),
        pa.field("i", pa.date32()),
        pa.field("j", pa.bool_()),
        pa.field("k k", pa.list_(pa.struct([pa.field("x", pa.int8()), pa.field("y", pa.string(), nullable=False)]))),
        pa.field("m", pa.map_(pa.string(), pa.float32())),
        pa.field("n", pa.int16()),
    ]
)


def test_ddl_of_every_type_comes_back_the_same() -> None:
    assert parse_schema(to_ddl(EVERY)) == EVERY
    assert parse_schema(EVERY) is EVERY


def test_ddl_as_users_write_it() -> None:
    expected = pa.schema([pa.field("word", pa.string(), nullable=False), pa.field("n", pa.int64())])
    assert parse_schema("word string NOT NULL, n long") == expected
    assert parse_schema("word STRING not null, `n` bigint comment 'how often'") == expected
    assert parse_schema("word: string not null, n: long") == expected
    assert parse_schema("order string, date date, timestamp timestamp").names == ["order", "date", "timestamp"]
    assert parse_schema("d decimal").field("d").type == pa.decimal128(10, 0)


def test_a_struct_type_is_taken() -> None:
    types = pytest.importorskip("pyspark.sql.types")
    struct = types.StructType(
        [
            types.StructField("a", types.StringType(), nullable=False),
            types.StructField("b", types.ArrayType(types.DecimalType(7, 2))),
            types.StructField("c", types.MapType(types.StringType(), types.LongType())),
        ]
    )
    assert parse_schema(struct) == pa.schema(
        [
            pa.field("a", pa.string(), nullable=False),
            pa.field("b", pa.list_(pa.decimal128(7, 2))),
            pa.field("c", pa.map_(pa.string(), pa.int64())),
        ]
    )


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("word strin", "strin"),
        ("", "no"),
        ("word", "word"),
        ("a varchar(10)", "VARCHAR"),
        ("a string, A long", "twice"),
        ("a decimal(40,2)", "decimal"),
        ("a string primary key", "a"),
        ("a int>) , cast(x as struct<b int", "can't be read"),
    ],
)
def test_what_is_no_schema_is_refused_by_name(ddl: str, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        parse_schema(ddl)


TWICE = "names a field twice: '{}' and '{}'"


@pytest.mark.parametrize(("one", "other"), [("a", "a"), ("word", "word"), ("a", "A"), ("Ä", "ä")])
def test_a_field_stands_once_however_the_schema_is_given(one: str, other: str) -> None:
    """Names of one letter are one object wherever they come from, others may or may not be."""
    types = pytest.importorskip("pyspark.sql.types")
    struct = types.StructType([types.StructField(one, types.StringType()), types.StructField(other, types.LongType())])
    for schema in (f"`{one}` string, `{other}` int", pa.schema([(one, pa.string()), (other, pa.int64())]), struct):
        with pytest.raises(TopologyError, match=TWICE.format(one, other)):
            parse_schema(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("s struct<x int, x int>", "struct in field 's' names a field twice"),
        ("s array<map<string, struct<x int, X int>>>", "struct in field 's' names a field twice"),
        (pa.schema([("s", pa.struct([]))]), "'s' has a struct without fields"),
        (pa.schema([("", pa.int64())]), "a field without a name"),
    ],
)
def test_fields_within_fields_have_names_of_their_own(schema: SchemaLike, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        parse_schema(schema)


def test_what_is_no_schema_at_all_is_shown_the_form() -> None:
    types = pytest.importorskip("pyspark.sql.types")
    for schema in (None, 3, ["a string"], {"a": "string"}, types.StringType(), types.StructType, pa.string()):
        with pytest.raises(TopologyError, match="write fields like 'word string not null, n long'"):
            parse_schema(schema)


def test_an_arrow_type_without_a_spark_name_is_refused() -> None:
    with pytest.raises(TopologyError, match="uint64"):
        parse_schema(pa.schema([("a", pa.uint64())]))
