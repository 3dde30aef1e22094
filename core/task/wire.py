"""The rows that travel between stages, and from the last stage to the driver.

A wire row is a chunk of one edge's rows for one task, serialised by Arrow, so that no type ever passes through another
system's conversions (`chunk`); or notices for an acker; or a control row (`exchange`); or, at the end, a task's summary
(`report`).
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

    Not by `pa.array` of memoryviews: pyarrow 26 never lets those go, so a worker would keep all it has ever sent.

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
    """A record batch's wire rows, their payloads without a copy."""
    if batch.schema.names != WIRE_SCHEMA.names:
        raise ValueError(f"a batch of wire rows has the columns {batch.schema.names}")
    numbers = (batch.column(i).to_pylist() for i in range(4))
    for dest, source, edge, seq, payload in zip(*numbers, batch.column(4), strict=True):
        yield WireRow(dest, source, edge, seq, payload.as_buffer())
