"""The source of what goes straight to sinks: each micro-batch, and each job, is one message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stormproof.core.errors import Json, UsageError
from stormproof.core.guarantee import Guarantee
from stormproof.core.lineage import NumberIds, ShownIds
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


class OneMessageSource(Source):
    """The source that ledger, recovery and audit see: a micro-batch, or a job, is one message.

    Nothing is leased or returned: Spark hands a micro-batch out again until it is done, and a program runs its job again;
    a ledger table says where the query stands, and which jobs are done.
    """

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self._decoder = BytesDecoder(schema)

    @property
    def decoder(self) -> Decoder:
        """It only names the rows' fields, and decodes nothing."""
        return self._decoder

    @property
    def kind(self) -> SourceKind:
        """Opaque: until it is prepared, Spark may compute other rows for it."""
        return SourceKind.OPAQUE

    def serves(self, guarantee: Guarantee) -> str | None:
        """Exactly-once only."""
        return None if guarantee is Guarantee.EXACTLY_ONCE else "exactly_once() has no other guarantee"

    def shown_id(self, message: int, origin: int) -> str:
        """The txid."""
        del origin
        return str(message)

    def shown_ids(self) -> ShownIds:
        """The numbers. Rows that are written have the key instead."""
        return NumberIds()

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Nothing to make ready."""

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Nothing: micro-batches are handed in."""
        del lease, limit, seed, tx
        return None

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
        """None: Spark computes the rows."""
        del slice_, parallelism
        return ()

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """There is no lease that could lapse."""

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Nothing to do: the committed txid is the confirmation."""
        del lease, failed, tx
        return Resolution()

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Nothing to do: Spark hands it out again."""

    def extend(self, lease: Lease) -> None:
        """There is no lease that could lapse."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """No leases."""
        del epoch, tx
        return ()

    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        """Refused: it is one message."""
        raise UsageError(f"stream {self.name!r}: a micro-batch is one message and cannot be split")

    def backlog(self) -> Backlog:
        """Only Spark knows."""
        return Backlog(0, 0, 0, 0)

    def joins(self, tx: object) -> bool:
        """Always: its whole state is in the ledger."""
        del tx
        return True


def slice_of(key: str, txid: int, seed: int) -> Slice:
    """The slice that is a job, or a micro-batch; its number is its txid."""
    position: dict[str, Json] = {"key": key, "number": txid}
    return Slice(position, one_message(txid, seed), 0)


def one_message(number: int, seed: int) -> Expectation:
    """What the acker must find for a micro-batch."""
    return Expectation(1, xor_reduce(tokens(np.array([number], np.int64), seed)))
