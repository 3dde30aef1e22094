"""The rows that travel between stages, and from the last stage to the driver.

A wire row is one of these: a chunk of one edge's rows for one task (`chunk`), notices for an acker, a control row
(`exchange`), or a task's summary for the driver (`report`). Arrow serialises the rows of a chunk, so that Spark converts
none of their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

WIRE_SCHEMA: Final = pa.schema(
    [
        pa.field("dest", pa.int32(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("edge", pa.int32(), nullable=False),
        pa.field("seq", pa.int32(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
WIRE_DDL: Final = "dest int, source int, edge int, seq int, payload binary"
CONTROL: Final = -1
SUMMARY: Final = -2
INIT: Final = -3
ACK: Final = -4

INIT_SCHEMA: Final = pa.schema([("id", pa.int64()), ("origin", pa.int64()), ("value", pa.int64())])
"""Notices that begin messages: `value` is the token."""
ACK_SCHEMA: Final = pa.schema([("id", pa.int64()), ("value", pa.int64())])
"""Notices of acked shares, at most one a message and task: `value` is their XOR."""


@dataclass(frozen=True, slots=True)
class WireRow:
    """One row of `WIRE_SCHEMA`."""

    dest: int
    source: int
    edge: int
    seq: int
    payload: bytes | pa.Buffer


def wire_batch(rows: Sequence[WireRow]) -> pa.RecordBatch:
    """Wire rows as a record batch."""
    columns = [
        pa.array([r.dest for r in rows], pa.int32()),
        pa.array([r.source for r in rows], pa.int32()),
        pa.array([r.edge for r in rows], pa.int32()),
        pa.array([r.seq for r in rows], pa.int32()),
        _binary([r.payload for r in rows]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIRE_SCHEMA)


def _binary(payloads: Sequence[bytes | pa.Buffer]) -> pa.Array:
    """Payloads as an array, copied once.

    `pa.array` of memoryviews is not used: pyarrow 26 never releases them, so a worker would keep all that it ever sent.

    Raises:
        OverflowError: they are 2 GiB or more together.
    """
    offsets = np.zeros(len(payloads) + 1, np.int64)
    np.cumsum([len(payload) for payload in payloads], out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{offsets[-1]} bytes do not go into one record batch of the wire")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(payloads))]
    return pa.Array.from_buffers(pa.binary(), len(payloads), buffers)


def wire_rows(batch: pa.RecordBatch) -> Iterator[WireRow]:
    """The wire rows of a record batch; payloads are not copied."""
    if batch.schema.names != WIRE_SCHEMA.names:
        raise ValueError(f"a batch of wire rows has the columns {batch.schema.names}")
    numbers = (batch.column(i).to_pylist() for i in range(4))
    for dest, source, edge, seq, payload in zip(*numbers, batch.column(4), strict=True):
        yield WireRow(dest, source, edge, seq, payload.as_buffer())
