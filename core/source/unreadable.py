"""Payloads that were marked as unreadable when they came: their messages fail when they are decoded, and no others.

A message that lacks what its source needs (an id, a field) is written down all the same, so that it is failed, retried and
set aside like any other. The mark at its payload's beginning says what it is; see the modules that set one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from stormproof.core.arrow_compute import pc
from stormproof.core.source.protocol import Decoded, Decoder


@dataclass(frozen=True, slots=True)
class MarkedDecoder(ABC):
    """Fails messages whose payload has the mark; the rest is `inner`'s."""

    MARK: ClassVar[bytes]

    inner: Decoder
    wanted: str
    """What such a message lacks."""

    @abstractmethod
    def error(self, rest: bytes) -> str:
        """Why a message failed: `rest` is its payload behind the mark."""

    @property
    def schema(self) -> pa.Schema:
        """The fields of a tuple."""
        return self.inner.schema

    def decode(self, payload: pa.Array) -> Decoded:
        """Decode all payloads at once; those with the mark are named. A unit's tuples go with their message."""
        decoded = self.inner.decode(payload)
        marked = pc.starts_with(payload, self.MARK)
        if not pc.any(marked, min_count=0).as_py():
            return decoded
        failed = dict(decoded.failed)
        for row in pc.indices_nonzero(marked).to_pylist():
            failed[row] = self.error(payload[row].as_py()[len(self.MARK) :])
        rows, counts = decoded.rows, decoded.counts
        if counts is not None:
            kept = [row not in failed for row, times in enumerate(counts) for _ in range(times)]
            rows, counts = rows.filter(pa.array(kept, pa.bool_())), counts.copy()
            counts[list(failed)] = 0
        return Decoded(rows, counts, sorted(failed.items()))
