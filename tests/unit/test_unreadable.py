"""Payloads that were marked when they came fail their messages by name, and no others."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.source.metadata import MarkedDecoder


class Lacking(MarkedDecoder):
    __slots__ = ()
    MARK = b"\0none\0"

    def error(self, rest: bytes) -> str:
        return f"no {self.wanted} in {rest!r}"


@pytest.mark.parametrize(("unit", "rows"), [(None, ["a", "\0none\0b", "c"]), ("lines", ["a", "c"])])
def test_a_marked_payload_fails_its_message_alone(unit: Unit | None, rows: list[str]) -> None:
    decoder = pickle.loads(pickle.dumps(Lacking(decoder_for("line string", unit), "id")))  # noqa: S301 - made here
    made = decoder.decode(pa.array([b"a", Lacking.MARK + b"b", b"c"], pa.binary()))
    assert made.failed == [(1, "no id in b'b'")]
    assert made.rows.column(0).to_pylist() == rows
    assert (None if made.counts is None else made.counts.tolist()) == (None if unit is None else [1, 0, 1])


def test_no_message_at_all() -> None:
    assert Lacking(decoder_for("line string", None), "id").decode(pa.array([], pa.binary())).failed == []
