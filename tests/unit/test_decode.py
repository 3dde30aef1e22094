"""Payloads to tuples, and what becomes of those that do not decode."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from stormproof.core.errors import TopologyError
from stormproof.core.source.decode import decoder_for
from stormproof.core.source.protocol import Decoder


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
        (b"[1]", "no object"),
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
        (b'{"id": ' + b"9" * 5_000 + b"}", "not JSON"),
    ],
)
def test_bad_json_fails_alone(payload: bytes, said: str) -> None:
    rows, errors = opened(decoder_for("id long not null, name string"), payloads(b'{"id": 1}', payload, b'{"id": 3}'))
    assert [row for row, _ in errors] == [1]
    assert said in errors[0][1]
    assert len(errors[0][1]) < 1_000
    assert rows.column("id").take([0, 2]).to_pylist() == [1, 3]


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
