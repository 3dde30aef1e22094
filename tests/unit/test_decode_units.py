"""Message units: several tuples in one payload, in order, with one bad row failing the whole message."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from stormproof.core.base.errors import TopologyError
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.source import Decoded, Decoder
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.postgres_queue import PostgresQueue

NUMBERS = "n int not null, s string"


def decoded(decoder: Decoder, *payloads: bytes) -> Decoded:
    return decoder.decode(pa.array(list(payloads), pa.binary()))


def units(made: Decoded) -> list[list[object]]:
    """The rows of each message; one column gives bare values."""
    assert made.counts is not None
    assert made.rows.num_rows == made.counts.sum()
    rows = [next(iter(r.values())) if len(r) == 1 else r for r in made.rows.to_pylist()]
    ends = np.cumsum(made.counts)
    return [rows[end - count : end] for end, count in zip(ends.tolist(), made.counts.tolist(), strict=True)]


def test_lines_of_text() -> None:
    made = decoded(decoder_for("line string not null", "lines"), b"a\nb", b"a b\n", b"", b"\n", b"x\r\n\n\xc3\xa9")
    assert units(made) == [["a", "b"], ["a b"], [], [""], ["x\r", "", "\u00e9"]]
    assert made.failed == []


def test_lines_of_bytes() -> None:
    made = decoded(decoder_for("body binary", "lines"), b"\xff\n\x00", b"")
    assert units(made) == [[b"\xff", b"\x00"], []]


def test_no_message_at_all() -> None:
    for unit in ("lines", "json"):
        made = decoded(decoder_for("line string", unit))
        assert (units(made), made.failed) == ([], [])


def test_a_line_that_is_no_text_fails_its_message_and_no_other() -> None:
    made = decoded(decoder_for("line string", "lines"), b"a\nb", b"c\n\xff\nd\n\xfe", b"e\nf\n")
    assert units(made) == [["a", "b"], [], ["e", "f"]]
    ((number, error),) = made.failed
    assert number == 1
    assert "row 2 of 4 in the message" in error
    assert "UTF-8" in error


def test_json_lines() -> None:
    made = decoded(decoder_for(NUMBERS, "lines"), b'{"n": 1, "s": "x"}\n{"n": 2}\n', b"", b'{"n": 3}\n\n', b'{"n": 4}')
    assert units(made) == [[{"n": 1, "s": "x"}, {"n": 2, "s": None}], [], [], [{"n": 4, "s": None}]]
    ((number, error),) = made.failed
    assert number == 2
    assert error.startswith("row 2 of 2 in the message: the payload is not JSON")


def test_a_json_array() -> None:
    made = decoded(decoder_for(NUMBERS, "json"), b'[{"n": 1}, {"n": 2, "s": "y"}]', b"[]", b' [{"n": 3}]\n')
    assert units(made) == [[{"n": 1, "s": None}, {"n": 2, "s": "y"}], [], [{"n": 3, "s": None}]]
    assert made.failed == []


def test_a_json_array_of_texts() -> None:
    made = decoded(decoder_for("word string", "json"), b'["a", {"word": "b"}]', b'["a", 1]')
    assert units(made) == [["a", "b"], []]
    assert [number for number, _ in made.failed] == [1]


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b'[{"n": 1}, {"n": "one"}]', "row 2 of 2 in the message: field 'n'"),
        (b'[{"n": 1}, {}, {}]', "row 2 of 3 in the message: field 'n'"),
        (b"[1]", "row 1 of 1 in the message: the payload is JSON, but not an object: int"),
        (b'{"n": 1}', "the payload is JSON, but not an array: dict"),
        (b"null", "the payload is JSON, but not an array: NoneType"),
        (b"[{", "the payload is not JSON"),
        (b"\xff", "the payload is not UTF-8"),
    ],
)
def test_a_bad_array_fails_its_message_and_no_other(payload: bytes, error: str) -> None:
    made = decoded(decoder_for(NUMBERS, "json"), b'[{"n": 1}]', payload, b'[{"n": 2}, {"n": 3}]')
    assert [[row["n"] for row in unit] for unit in units(made)] == [[1], [], [2, 3]]  # type: ignore[index]
    ((number, text),) = made.failed
    assert number == 1
    assert text.startswith(error)


def test_units_of_a_slice_of_an_array() -> None:
    payload = pa.array([b"x\ny", b"\xff", b"a\nb\n", b"c"], pa.binary())[2:]
    assert units(decoder_for("line string", "lines").decode(payload)) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("unit", ["lines", "json"])
def test_decoders_of_units_travel(unit: Unit) -> None:
    decoder = decoder_for(NUMBERS, unit)
    again: Decoder = pickle.loads(pickle.dumps(decoder))  # noqa: S301 - made in the line above
    assert again.schema == decoder.schema == decoder_for(NUMBERS).schema


def test_what_cannot_be_a_unit_is_refused() -> None:
    with pytest.raises(TopologyError, match="no message unit 'rows'; it is 'lines', 'json' or None"):
        decoder_for("line string", "rows")  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="binary"):
        decoder_for("body binary", "json")


def test_sources_take_units() -> None:
    for source in (MemorySource("m", unit="lines"), PostgresQueue("q", unit="lines")):
        assert units(decoded(source.decoder, b"a\nb")) == [["a", "b"]]
