"""The rows that travel between stages, and from the last stage to the driver.

A wire row is one of these: a chunk of one edge's rows for one task (`chunk`), notices for an acker, a control row
(`exchange`), or a task's summary for the driver (`report`). Arrow serialises the rows of a chunk, and an engine carries each
wire row as one string of bytes: nothing below converts any of their types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

CONTROL: Final = -1
SUMMARY: Final = -2
INIT: Final = -3
ACK: Final = -4

INIT_SCHEMA: Final = pa.schema([("id", pa.int64()), ("origin", pa.int64()), ("value", pa.int64())])
"""Notices that begin messages: `value` is the token."""
ACK_SCHEMA: Final = pa.schema([("id", pa.int64()), ("value", pa.int64())])
"""Notices of acked shares, at most one a message and task: `value` is their XOR."""

BYTES_MAX: Final = 2**31 - 16
"""The JVM has no longer array."""

_HEAD: Final = struct.Struct("!iiii")


@dataclass(frozen=True, slots=True)
class WireRow:
    """A row for the task `dest`, the `seq`-th of an edge, from the task `source` of the stage before."""

    dest: int
    source: int
    edge: int
    seq: int
    payload: bytes | pa.Buffer

    def to_bytes(self) -> bytes:
        """The row as it travels; copies the payload once.

        Raises:
            OverflowError: it is 2 GiB long.
        """
        if len(self.payload) > BYTES_MAX - _HEAD.size:
            raise OverflowError(
                f"a chunk of {len(self.payload)} bytes does not go through an exchange: 2 GiB is too long"
            )
        return b"".join((_HEAD.pack(self.dest, self.source, self.edge, self.seq), self.payload))

    @classmethod
    def from_bytes(cls, sent: bytes) -> WireRow:
        """The row that was sent; its payload is not copied."""
        dest, source, edge, seq = _HEAD.unpack_from(sent)
        return cls(dest, source, edge, seq, pa.py_buffer(sent).slice(_HEAD.size))
