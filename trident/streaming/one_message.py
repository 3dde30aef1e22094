"""The source of a stream without a topology: a micro-batch is one message, which Spark hands out again until it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from stormproof.core.errors import Json, UsageError
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.source.decode import BytesDecoder
from stormproof.core.source.kind import SourceKind
from stormproof.core.source.protocol import (
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
    Source,
)
from stormproof.core.tracking.share import tokens, xor_reduce
from stormproof.trident.ledger.streams import StreamBatch

if TYPE_CHECKING:
    import numpy as np


class OneMessageSource(Source):
    """A source for ledger, recovery and audit: a micro-batch is one message, which Spark hands out again until it is done.

    Nothing is ever leased or given back here; where a query stands is in the ledger's own table.
    """

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self._decoder = BytesDecoder(schema)

    @property
    def decoder(self) -> Decoder:
        """Names the rows' fields; it decodes nothing."""
        return self._decoder

    @property
    def kind(self) -> SourceKind:
        """Opaque: until it is prepared, Spark may compute other rows for it."""
        return SourceKind.OPAQUE

    def serves(self, guarantee: Guarantee) -> str | None:
        """Exactly-once alone."""
        return None if guarantee is Guarantee.EXACTLY_ONCE else "exactly_once() has no other guarantee"

    def shown_id(self, message: int, origin: int) -> str:
        """The micro-batch's number among those that were taken."""
        del origin
        return str(message)

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Nothing to make ready."""

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """None: micro-batches are handed in."""
        del lease, limit, seed, tx
        return None

    def slice(self, taken: StreamBatch, seed: int) -> Slice:
        """A micro-batch as the slice that holds it."""
        position: dict[str, Json] = {"query": taken.query, "batch": taken.batch, "number": taken.number}
        return Slice(position, one_message(taken.number, seed), 0)

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice again."""
        return Slice(position, expected, 0)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """One message."""
        del excluded, tx
        number = slice_.position["number"]
        assert isinstance(number, int)
        return one_message(number, seed)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """None: Spark has the rows."""
        del slice_, parallelism
        return ()

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """There is no lease that could lapse."""

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """That the txid is committed says so."""
        del lease, failed, tx
        return Resolution()

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Spark hands it out again."""

    def extend(self, lease: Lease) -> None:
        """There is no lease that could lapse."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """No leases."""
        del epoch, tx
        return ()

    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """Refused: it is one message."""
        raise UsageError(f"stream {self.name!r}: a micro-batch is one message and cannot be split")

    def backlog(self) -> Backlog:
        """Only Spark knows."""
        return Backlog(0, 0, 0, 0)

    def joins(self, tx: object) -> bool:
        """Always: all that there is stands in the ledger."""
        del tx
        return True


def one_message(number: int, seed: int) -> Expectation:
    """What a read of a micro-batch must find."""
    ids = cast("np.ndarray", pa.array([number], pa.int64()).to_numpy())
    return Expectation(1, xor_reduce(tokens(ids, seed)))
