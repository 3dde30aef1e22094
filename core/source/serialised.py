"""A source that several threads may use: one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stormproof.core.errors import Json
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.postgres.database import Database
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.protocol import (
    Backlog,
    DeadLetterSource,
    Decoder,
    DropsConnections,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
    Source,
)


class SerialisedSource:
    """Passes every call on to a source, one at a time.

    Sources are made for one thread. With several batches in flight, the threads that keep their leases call `extend`
    while the driver's own thread opens and confirms. A call waits for the one before it, and never for a transaction: it
    is the call that is guarded, not what `tx` does before and after it.
    """

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._source = source
        self._lock = threading.RLock()

    @property
    def decoder(self) -> Decoder:
        """The source's."""
        return self._source.decoder

    def serves(self, guarantee: Guarantee) -> str | None:
        """See `Source.serves`."""
        with self._lock:
            return self._source.serves(guarantee)

    def shown_id(self, message: int, origin: int) -> str:
        """See `Source.shown_id`. It touches no store, and is called within transactions that a guarded call may wait for."""
        return self._source.shown_id(message, origin)

    def bind(self, database: Database) -> None:
        """See `Source.bind`."""
        with self._lock:
            self._source.bind(database)

    def subscribe(self, subscription: str, epoch: int) -> None:
        """See `Source.subscribe`."""
        with self._lock:
            self._source.subscribe(subscription, epoch)

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """See `Source.open`."""
        with self._lock:
            return self._source.open(lease, limit, seed, tx)

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """See `Source.attach`."""
        with self._lock:
            return self._source.attach(position, expected)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """See `Source.expect`."""
        with self._lock:
            return self._source.expect(slice_, seed, excluded, tx)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """See `Source.readers`."""
        with self._lock:
            return self._source.readers(slice_, parallelism)

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """See `Source.hold`."""
        with self._lock:
            self._source.hold(lease, tx)

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """See `Source.confirm`."""
        with self._lock:
            return self._source.confirm(lease, failed, tx)

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """See `Source.abort`."""
        with self._lock:
            self._source.abort(lease, tx)

    def extend(self, lease: Lease) -> None:
        """See `Source.extend`."""
        with self._lock:
            self._source.extend(lease)

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """See `Source.recover`."""
        with self._lock:
            return self._source.recover(epoch, tx)

    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """See `Source.split`."""
        with self._lock:
            self._source.split(slice_, lease, alone, tx)

    def backlog(self) -> Backlog:
        """See `Source.backlog`."""
        with self._lock:
            return self._source.backlog()

    def kept_dead_letters(self) -> tuple[DeadLetter, ...]:
        """The source's dead letters; none where it keeps none of its own."""
        with self._lock:
            return self._source.dead_letters() if isinstance(self._source, DeadLetterSource) else ()

    def joins(self, tx: object) -> bool:
        """See `Source.joins`."""
        with self._lock:
            return self._source.joins(tx)

    def maintain(self) -> None:
        """See `Source.maintain`."""
        with self._lock:
            self._source.maintain()

    def drop_connections(self) -> None:
        """See `DropsConnections`; nothing where the source has no connections."""
        with self._lock:
            if isinstance(self._source, DropsConnections):
                self._source.drop_connections()

    def close(self) -> None:
        """See `Source.close`."""
        with self._lock:
            self._source.close()
