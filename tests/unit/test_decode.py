"""Payloads to tuples, and what becomes of those that do not decode."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.payload import decoder_for
from stormproof.core.contract.source import Decoder


def payloads(*values: bytes) -> pa.Array:
    return pa.array(list(values), pa.binary())


def opened(decoder: Decoder, payload: pa.Array) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
    made = decoder.decode(payload)
    return made.rows, list(made.failed)


def test_text() -> None:
    rows, errors = opened(decoder_for("line string"), payloads(b"a b", b"", "\u00e9\x00".encode()))
    assert rows.to_pydict() == {"line": ["a b", "", "\u00e9\x00"]}
    assert errors == []


def test_bytes_that_are_no_text_fail_alone() -> None:
    rows, errors = opened(decoder_for("line string not null"), payloads(b"good", b"\xff", b"\xed\xa0\x80", b"fine"))
    assert [row for row, _ in errors] == [1, 2]
    assert "line" in errors[0][1]
    assert "UTF-8" in errors[0][1]
    assert rows.column(0).take([0, 3]).to_pylist() == ["good", "fine"]


def test_text_of_a_slice_of_an_array() -> None:
    rows, errors = opened(decoder_for("line string"), payloads(b"x", b"\xff", b"y")[2:])
    assert (rows.to_pydict(), errors) == ({"line": ["y"]}, [])


def test_bytes_pass_as_they_are() -> None:
    rows, errors = opened(decoder_for("body binary"), payloads(b"\xff", b""))
    assert (rows.to_pydict(), errors) == ({"body": [b"\xff", b""]}, [])


def test_json_objects() -> None:
    decoder = decoder_for(
        "id long not null, name string, at timestamp, tags array<string>, price decimal(9,2), x double"
    )
    rows, errors = opened(
        decoder,
        payloads(
            b'{"id": 1, "name": "a", "at": "2020-01-02T03:04:05+00:00", "tags": ["t", null], "price": 1.25,'
            b' "x": 0.5, "y": 0}',
            b'{"id": 2}',
        ),
    )
    assert errors == []
    assert rows.column("price").to_pylist()[0] is not None
    assert rows.column("tags").to_pylist() == [["t", None], None]
    assert rows.column("x").to_pylist() == [0.5, None]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[1]", "not an object"),
        (b"{", "not JSON"),
        (b'{"id": NaN}', "NaN"),
        (b'{"id": 1.5}', "id"),
        (b'{"id": true}', "id"),
        (b'{"id": "1"}', "id"),
        (b'{"id": 99999999999999999999}', "id"),
        (b'{"id": null}', "NOT NULL"),
        (b"{}", "NOT NULL"),
        (b'{"id": 1, "name": 5}', "name"),
        (b'{"id": 1, "name": "\\ud800"}', "name"),
        (b'{"id": 1, "name": {"a": 1}}', "name"),
        (b'{"id": ' + b"[" * 100_000, "not JSON"),
        (b'{"id": ' + b"9" * 5_000 + b"}", "has the number 999"),
        (b'{"id": 1e99999999999999999999}', "has the number 1e99999999999999999999, which is too large"),
    ],
)
def test_bad_json_fails_alone(payload: bytes, said: str) -> None:
    rows, errors = opened(decoder_for("id long not null, name string"), payloads(b'{"id": 1}', payload, b'{"id": 3}'))
    assert [row for row, _ in errors] == [1]
    assert said in errors[0][1]
    assert len(errors[0][1]) < 1_000
    assert rows.column("id").take([0, 2]).to_pylist() == [1, 3]


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ("price decimal(9,2)", '"12,50"', "field 'price' is decimal(9,2), and '12,50' is not a decimal number"),
        ("price decimal(9,2)", '"NaN"', "field 'price' is decimal(9,2), and 'NaN' is not a decimal number"),
        ("price decimal(9,2)", "12345678901.25", "field 'price' is decimal(9,2), got"),
        ("price decimal(9,2)", "1.255", "field 'price' is decimal(9,2), got"),
        ("x double", "1e400", "field 'x' is double, and 1E+400 is too large"),
        ("x float", "-1e400", "field 'x' is float, and -1E+400 is too large"),
        ("n int", "3000000000", "field 'n' is int32, got 3000000000"),
        ("n long", "9223372036854775808", "field 'n' is int64, got 9223372036854775808"),
        (
            "at timestamp",
            '"yesterday"',
            "field 'at' is timestamp[us, tz=UTC], and 'yesterday' is not an ISO 8601 timestamp",
        ),
        ("at timestamp", "5", "field 'at' is timestamp[us, tz=UTC], got 5"),
        ("day date", '"2026-02-30"', "field 'day' is date32[day], and '2026-02-30' is not an ISO 8601 date"),
        ("day date", '"2026-02-03T04:05:06"', "field 'day' is date32[day], and '2026-02-03T04:05:06' is not an ISO"),
        ("o struct<price: decimal(9,2)>", '{"price": "x"}', "field 'o.price' is decimal(9,2), and 'x' is not"),
        ("o struct<day: date>", '{"day": "x"}', "field 'o.day' is date32[day], and 'x' is not an ISO 8601 date"),
        ("a array<decimal(9,2)>", '["1", "x"]', "field 'a' is decimal(9,2), and 'x' is not a decimal number"),
        ("m map<string, date>", '{"k": "x"}', "field 'm' is date32[day], and 'x' is not an ISO 8601 date"),
        ("o struct<n: int>", '{"n": 3000000000}', "field 'o' is"),
        ("a array<int>", '["x"]', "field 'a' is"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_named_with_the_field(schema: str, value: str, said: str) -> None:
    name = schema.split(maxsplit=1)[0]
    good, bad = b"{}", f'{{"{name}": {value}, "other": 1}}'.encode()
    rows, errors = opened(decoder_for(f"{schema}, other long"), payloads(good, bad, b'{"other": 3}'))
    assert [row for row, _ in errors] == [1]
    assert said in errors[0][1]
    assert "not JSON" not in errors[0][1]
    assert rows.column("other").take([0, 2]).to_pylist() == [None, 3]


def test_binary_beside_other_columns_is_refused() -> None:
    with pytest.raises(TopologyError, match="body"):
        decoder_for("id long, body binary")


def test_no_payloads() -> None:
    for schema in ("line string", "body binary", "id long, name string"):
        rows, errors = opened(decoder_for(schema), payloads())
        assert (rows.num_rows, errors) == (0, [])


def test_decoders_are_picklable() -> None:
    decoder = decoder_for("id long, name string")
    assert pickle.loads(pickle.dumps(decoder)).schema == decoder.schema  # noqa: S301 - our own bytes
