"""Messages as record batches, as a `SliceReader` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.contract.source import READER_SCHEMA
from stormproof.core.tracking.share import as_signed, tokens


def reader_batch(ids: Rows, origins: Rows, payload: pa.Array, seed: int) -> pa.RecordBatch:
    """What a slice reader gives, with a payload of the decoder's own type."""
    return pa.RecordBatch.from_arrays(
        [pa.array(ids), pa.array(origins), pa.array(as_signed(tokens(ids, seed))), payload],
        schema=READER_SCHEMA.set(3, pa.field("payload", payload.type, nullable=False)),
    )


def batches_of(
    ids: Sequence[int],
    origins: Sequence[int],
    payloads: Sequence[bytes],
    seed: int,
    batch_rows: int,
    unpack: Callable[[Sequence[bytes]], Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stored messages, at most `batch_rows` to a batch; `unpack` makes arrays of the decoder's own type of payloads."""
    numbers, before = np.array(ids, np.int64), np.array(origins, np.int64)
    place = 0
    for array in [pa.array(payloads, pa.binary())] if unpack is None else unpack(payloads):
        for start in range(0, len(array), batch_rows):
            part = array.slice(start, batch_rows)
            end = place + len(part)
            yield reader_batch(numbers[place:end], before[place:end], part, seed)
            place = end
