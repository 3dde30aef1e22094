"""Message units: whatever the rows, they come back as they were put together, and a message fails as it would alone."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.contract.payload import decoder_for
from stormproof.core.contract.source import Decoded, Decoder

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


@given(st.lists(st.lists(st.text(alphabet="a\u00e9 \r", max_size=3), max_size=4), max_size=5), st.booleans())
def test_lines_are_what_they_were_put_together_from(messages: list[list[str]], ended: bool) -> None:
    payloads = [
        ("\n".join(lines) + ("\n" if lines and (ended or not lines[-1]) else "")).encode() for lines in messages
    ]
    assert units(decoded(decoder_for("line string", "lines"), *payloads)) == messages


@given(
    st.lists(
        st.lists(st.sampled_from([b"good", b"\xff"]), max_size=4).map(b"\n".join),
        max_size=6,
    )
)
def test_a_message_fails_exactly_where_it_would_alone(payloads: list[bytes]) -> None:
    decoder = decoder_for("line string", "lines")
    together = decoded(decoder, *payloads)
    alone = [decoded(decoder, payload) for payload in payloads]
    assert [number for number, _ in together.failed] == [n for n, made in enumerate(alone) if made.failed]
    assert [error for _, error in together.failed] == [made.failed[0][1] for made in alone if made.failed]
    assert units(together) == [units(made)[0] for made in alone]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_both_units_say_the_same(messages: list[list[int]]) -> None:
    rows = [[{"n": n} for n in message] for message in messages]
    arrays = decoded(decoder_for(NUMBERS, "json"), *(json.dumps(r).encode() for r in rows))
    lines = decoded(decoder_for(NUMBERS, "lines"), *("\n".join(map(json.dumps, r)).encode() for r in rows))
    assert units(arrays) == units(lines)
