"""docs/sources.md, "What a value becomes": each row of its tables, at every source."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stormproof import (
    FileSource,
    IteratorSource,
    KafkaSource,
    KestrelSource,
    MemorySource,
    NatsSource,
    PostgresQueue,
    RabbitMQSource,
    RabbitMQStreamSource,
    RedisStreamSource,
)
from stormproof.core.base.errors import UsageError
from stormproof.core.contract.payload import decoder_for
from stormproof.core.contract.schema import KNOWN_TYPES, parse_schema, to_ddl
from stormproof.core.contract.source import Decoder
from stormproof.core.source.files.formats import scan
from stormproof.core.source.files.rows import RowDecoder, as_struct
from stormproof.core.source.kafka import reader as kafka
from stormproof.core.source.kestrel import source as kestrel
from stormproof.core.source.metadata import Metadata
from stormproof.core.source.nats import client as nats
from stormproof.core.source.rabbitmq import client as rabbitmq
from stormproof.core.source.redis_streams import source as redis

PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()

Made = Callable[[str], Any]
SOURCES: dict[str, Made] = {
    "files": lambda schema: FileSource("/nowhere", "jsonl", schema=schema),
    "iterator": lambda schema: IteratorSource("i", [], schema=schema),
    "kafka": lambda schema: KafkaSource("t", servers="127.0.0.1:1", schema=schema),
    "kestrel": lambda schema: KestrelSource("q", schema=schema),
    "memory": lambda schema: MemorySource("m", schema=schema),
    "nats": lambda schema: NatsSource("s", schema=schema),
    "postgres": lambda schema: PostgresQueue("q", schema=schema),
    "rabbitmq": lambda schema: RabbitMQSource("q", schema=schema),
    "rabbitmq stream": lambda schema: RabbitMQStreamSource("q", schema=schema),
}


FURTHER = """\
| `boolean` |  |  | `1` `1.0` |
| `tinyint` |  |  | `1.0` `true` |
| `smallint` |  |  | `1.0` |
| `bigint` | `-0` | `0` | `1e3` `"1_000"` `"\\u0661\\u0662"` |
| `float` | `3.4028235e38` `1e-60` | `3.4028234663852886e+38` `0.0` | `-1e39` `Infinity` `true` |
| `double` | `0.1` `1e-400` | `0.1` `0.0` | `-Infinity` `true` |
| `decimal(9,2)` | `1.250` `"+.5"` `"1e3"` | `1.25` `0.50` `1000.00` | `1e999999` `"1_000"` `" 1"` `"\\u0661\\u0662"` |
| `string` | `""` | `` | `"\\ud800"` |
| `date` | `"2026-W06-2"` | `2026-02-03` | `"2026-02-30"` `"\\uff12026-02-03"` `" 2026-02-03"` |
| `timestamp` | `"2026-02-03T04:05:06.1234560Z"` | `2026-02-03 04:05:06.123456+00:00` | |
| `timestamp` |  |  | `"2026-02-03T24:00:00"` `"2026-02-03T04:05:60Z"` |
| `array<int>` |  |  | `[1.0]` `[true]` `{}` |
| `map<string, double>` | `{"a": 1, "a": 2}` | `[('a', 2.0)]` | `{"\\ud800": 1}` |
| `struct<n: int not null, x: float>` |  |  | `{"n": null}` `{"n": 1, "x": 1e39}` |
"""
"""Values of JSON that the page leaves out: the same columns."""


def rows(table: str) -> list[list[str]]:
    """The cells of the page's table below this comment, without its head."""
    lines = PAGE.partition(f"<!-- {table} -->\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) > 3, table
    return list(map(cells, lines[2:]))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def read(decoder: Decoder, payload: bytes) -> object:
    """The first column of the payload's row; an error's text where it fails."""
    made = decoder.decode(pa.array([payload], pa.binary()))
    return made.failed[0][1] if made.failed else shown(made.rows.column(0)[0].as_py())


def shown(value: object) -> str:
    return str(value)


def payload(text: str) -> bytes:
    return f'{{"c": {text}, "other": 1}}'.encode()


JSON = [*rows("json values"), *map(cells, FURTHER.splitlines())]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("row", JSON, ids=lambda row: row[0])
def test_a_json_value_becomes_what_the_page_says_at_every_source(row: list[str], source: str) -> None:
    (kind,) = spans(row[0])
    decoder = SOURCES[source](f"c {kind}, other long").decoder
    taken = {text: read(decoder, payload(text)) for text in spans(row[1])}
    assert taken == dict(zip(spans(row[1]), spans(row[2]), strict=True))
    for text in spans(row[3]):
        refused = read(decoder, payload(text))
        assert "field 'c" in str(refused) or "which is not JSON" in str(refused), text


@pytest.mark.parametrize("row", JSON, ids=lambda row: row[0])
@pytest.mark.parametrize("columns", ["c {}", "c {}, other long"], ids=["one column", "two columns"])
def test_a_field_of_a_redis_entry_becomes_what_the_page_says(row: list[str], columns: str) -> None:
    (kind,) = spans(row[0])
    source: Any = RedisStreamSource("s", schema=columns.format(kind))

    def entry(text: str) -> object:
        value = json.loads(text) if text.startswith('"') else text
        fields = {b"c": value.encode("utf-8", "surrogatepass"), b"other": b"1"}
        return read(source.decoder, source._payload(fields))

    for text, wanted in zip(spans(row[1]), spans(row[2]), strict=True):
        assert entry(text) == wanted, text
    for text in spans(row[3]):
        if (kind == "string") <= text.startswith('"') and text not in (
            '"1"',
            '"true"',
        ):  # these are what they say there
            assert re.search("field 'c|not JSON|not UTF-8", str(entry(text))), text


def test_every_type_that_a_schema_knows_is_on_the_page() -> None:
    told = {re.sub(r"\W.*", "", spans(row[0])[0]) for row in rows("json values")}
    assert set(re.findall(r"[a-z_]{3,}", KNOWN_TYPES)) - {"long"} == told | {"binary"}


TYPES = {
    str(type_): type_
    for type_ in (
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.float32(),
        pa.float64(),
        pa.decimal128(9, 2),
        pa.decimal128(12, 4),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.bool_(),
        pa.date32(),
        pa.date64(),
        pa.timestamp("us"),
        pa.timestamp("ns"),
    )
} | {"list<int64>": pa.list_(pa.int64()), "list<double>": pa.list_(pa.float64())}

FAILS: dict[str, tuple[object, pa.DataType]] = {
    "int": (2**31, pa.int64()),
    "float": (1e39, pa.float64()),
    "decimal(9,2)": (decimal.Decimal("1.255"), pa.decimal128(12, 4)),
    "string": (b"\xff", pa.binary()),
    "timestamp": (1, pa.timestamp("ns")),
    "array<int>": ([2**31], pa.list_(pa.int64())),
}


@pytest.mark.parametrize("row", rows("parquet columns"), ids=lambda row: row[0])
def test_a_column_of_a_parquet_file_is_read_or_refused_as_the_page_says(row: list[str], tmp_path: Path) -> None:
    (kind,) = spans(row[0])
    schema = parse_schema(f"c {kind}")

    def register(type_: str) -> None:
        pq.write_table(pa.table({"c": pa.array([None], TYPES[type_])}), tmp_path / "f.parquet")
        scan(str(tmp_path / "f.parquet"), "parquet", schema)

    for type_ in spans(row[1]):
        register(type_)
    for type_ in spans(row[3]):
        with pytest.raises(UsageError, match="column 'c'"):
            register(type_)
    if row[2]:
        value, type_ = FAILS[kind]
        batch = pa.RecordBatch.from_arrays([pa.array([None, value], type_)], names=["c"])
        assert [number for number, _ in RowDecoder(schema).decode(as_struct(batch)).failed] == [1]


@pytest.mark.parametrize(
    ("type_", "value", "kind", "wanted"),
    [
        (pa.int64(), 2**53 + 1, "double", 2.0**53),
        (pa.float64(), float("inf"), "float", float("inf")),
        (pa.int64(), 5, "decimal(20,2)", decimal.Decimal("5.00")),
        (pa.date32(), datetime.date(2026, 2, 3), "timestamp_ntz", datetime.datetime(2026, 2, 3)),  # noqa: DTZ001 - it has no zone
    ],
    ids=str,
)
def test_a_value_of_a_parquet_file_is_converted_as_json_would_be(
    type_: pa.DataType, value: object, kind: str, wanted: object
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([value], type_)], names=["c"])
    made = RowDecoder(parse_schema(f"c {kind}")).decode(as_struct(batch))
    assert (made.rows.column(0).to_pylist(), list(made.failed)) == ([wanted], [])


@pytest.mark.parametrize(
    "metadata",
    [
        kafka.KafkaMetadata,
        kestrel.ItemMetadata,
        nats.NatsMetadata,
        rabbitmq.DeliveryMetadata,
        rabbitmq.StreamMetadata,
        redis.EntryMetadata,
    ],
    ids=["kafka", "kestrel", "nats", "rabbitmq", "rabbitmq stream", "redis"],
)
def test_what_a_broker_says_of_a_message_is_of_types_that_a_sink_takes(metadata: type[Metadata]) -> None:
    assert to_ddl(pa.schema([(name, type_) for name, (type_, _) in metadata.KNOWN.items()]))


def test_a_number_beyond_a_float_fails_also_where_a_function_gives_it() -> None:
    from stormproof.core.user_code.functions import column_of

    array, errors = column_of([1.5, 1e39, float("inf"), None], pa.field("x", pa.float32()))
    assert (array.to_pylist(), [row for row, _ in errors]) == ([1.5, None, float("inf"), None], [1])


@pytest.mark.parametrize(
    ("type_", "good", "bad"),
    [
        (pa.list_(pa.float32()), [1.5, None, float("inf")], [1.5, 1e39]),
        (pa.struct([("a", pa.float32())]), {"a": float("-inf")}, {"a": -1e39}),
        (pa.map_(pa.string(), pa.list_(pa.float32())), [("k", [1.5])], {"k": [1e39]}),
    ],
    ids=["list", "struct", "map"],
)
def test_a_number_beyond_a_float_fails_also_inside_of_another_value(type_: pa.DataType, good: Any, bad: Any) -> None:
    from stormproof.core.user_code.functions import column_of

    array, errors = column_of([good, bad, None], pa.field("x", type_))
    assert (array.to_pylist(), [row for row, _ in errors]) == ([good, None, None], [1])
    assert "too large" in errors[0][1]


NARROWED = [
    ("float", pa.float64(), 1e39, 1.5),
    ("array<float>", pa.list_(pa.float64()), [1e39], [1.5, float("inf")]),
    ("struct<a: float>", pa.struct([("a", pa.float64())]), {"a": -1e39}, {"a": 1.5}),
    ("map<string, float>", pa.map_(pa.string(), pa.float64()), [("k", 1e39)], [("k", 1.5)]),
]
"""A field's type, that of the column for it, a value beyond it, and one that it holds."""


@pytest.mark.parametrize(("kind", "type_", "bad", "good"), NARROWED, ids=[case[0] for case in NARROWED])
def test_a_number_beyond_a_float_fails_also_in_a_column_of_a_file(
    kind: str, type_: pa.DataType, bad: Any, good: Any
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([good, bad, None], type_)], names=["c"])
    made = RowDecoder(parse_schema(f"c {kind}")).decode(as_struct(batch))
    assert [row for row, _ in made.failed] == [1]
    assert made.rows.column("c").to_pylist() == [good, None, None]


@pytest.mark.parametrize(("kind", "type_", "bad", "good"), NARROWED, ids=[case[0] for case in NARROWED])
def test_a_number_beyond_a_float_fails_also_in_what_an_arrow_wise_function_gives(
    kind: str, type_: pa.DataType, bad: Any, good: Any
) -> None:
    from stormproof.core.user_code.functions import arrow_result

    schema = parse_schema(f"c {kind}")

    def given(*values: Any) -> tuple[pa.RecordBatch, list[int]]:
        return pa.RecordBatch.from_arrays([pa.array(values, type_)], names=["c"]), [0] * len(values)

    rows, _ = arrow_result(given(good, None), 1, schema)
    assert rows.column("c").to_pylist() == [good, None]
    with pytest.raises(ValueError, match="too large"):
        arrow_result(given(good, bad), 1, schema)


def test_a_number_beyond_a_float_in_an_array_of_a_payload_is_a_bad_message() -> None:
    made = decoder_for("c array<float>").decode(pa.array([b'{"c": [1e39]}', b'{"c": [1.5]}'], pa.binary()))
    assert [row for row, _ in made.failed] == [0]


def test_units_of_several_rows_convert_alike() -> None:
    for unit, text in (("lines", b'{"c": 1e39}'), ("json", b'[{"c": 1e39}]')):
        made = decoder_for("c float", unit).decode(pa.array([text], pa.binary()))  # type: ignore[arg-type]
        assert "too large" in made.failed[0][1]
