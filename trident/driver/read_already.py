"""Messages that are read before they are confirmed: a retry's payload is gone with its confirm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from stormproof.core.base.arrow import pc
from stormproof.core.contract.source import SliceReader

_BATCH_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ReadAlready:
    """A reader's messages as they were read, with the tokens of one seed. They are in memory, and travel with the job."""

    batches: tuple[pa.RecordBatch, ...]

    @staticmethod
    def of(reader: SliceReader, seed: int) -> ReadAlready:
        """Read all of a reader's messages now."""
        return ReadAlready(tuple(reader.read(seed, frozenset(), _BATCH_ROWS)))

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield them again; `seed` is the one with which they were read."""
        for batch in self.batches:
            kept = batch
            if excluded:
                kept = batch.filter(pc.invert(pc.is_in(batch.column("id"), value_set=pa.array(sorted(excluded)))))
            for first in range(0, kept.num_rows, batch_rows):
                yield kept.slice(first, batch_rows)
