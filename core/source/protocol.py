"""What a pending source promises: Kestrel's open, confirm and abort, for slices of messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from stormproof.core.arrays import Rows
from stormproof.core.errors import Json
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.postgres.database import Database
from stormproof.core.preflight import Probe
from stormproof.core.source.kind import SourceKind

READER_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("origin", pa.int64(), nullable=False),
        pa.field("token", pa.int64()),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
"""What every `SliceReader` yields, in this order. A NULL token: the message is not tracked, for its source gave it no id.

The payload is of another type where the source's own decoder takes that: a struct, for a row that has columns already.
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a slice may hold. One message is handed out even where it alone is above `bytes`.

    `retries` off: leave what failed before for a later call, also where it is due. A source that does not heed it is
    slower where messages fail, and no less right.
    """

    messages: int = 10_000
    bytes: int = 64 * 1024 * 1024
    retries: bool = True


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a slice: an opaque owner key, the owner's epoch, and for how long (seconds, by the store's clock).

    Never the key alone: a stale owner (an older epoch) must not confirm what was handed to another.
    """

    owner: str
    epoch: int
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the acker must find: the number of messages and the XOR of their tokens (signed 64 bit).

    Computed by the source apart from the read, so that a reader that returns one message twice and skips another is seen.
    """

    messages: int
    xor: int


@runtime_checkable
class SliceReader(Protocol):
    """A part of a slice, read inside an executor. Picklable; holds no connection."""

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages as batches of `READER_SCHEMA`, of at most `batch_rows` rows, in id order.

        `seed` makes the tokens; messages whose id is in `excluded` are left out. May be called several times and must
        give the same messages each time.
        """
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decoder made of payloads.

    `counts[i]` is the number of tuples in payload i, which lie in `rows` payload by payload: a message unit, whose tuples
    complete, fail and are replayed as one. None: one of each. `failed` has (payload, error) of those that do not decode;
    rows of those hold nothing that may be used.
    """

    rows: pa.RecordBatch
    counts: Rows | None
    failed: Sequence[tuple[int, str]]


class Decoder(Protocol):
    """Payloads to tuples. Picklable and pure."""

    @property
    def schema(self) -> pa.Schema:
        """The fields that a message decodes to."""
        ...

    def decode(self, payload: pa.Array) -> Decoded:
        """Payloads (binary, or what the source's readers give) to rows of `schema`."""
        ...


@dataclass(frozen=True, slots=True)
class Slice:
    """What a source opened for one batch.

    `position` is the source's own description as JSON: the ledger keeps it, and `Source.attach` makes the slice of it
    again. `expected` holds for the seed that it was opened with and nothing excluded. `retry` says that the messages
    failed before; then `replayed` names each as (number, origin). `deaths` is how often an owner's epoch ended while it
    held this slice open.
    """

    position: dict[str, Json]
    expected: Expectation
    bytes: int
    retry: bool = False
    deaths: int = 0
    replayed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Resolution:
    """What became of the messages that a confirm named as failed: how many wait for a retry, how many are dead letters.

    `retried` and `dead` list the shown ids; those that were merely returned are among `retried`. Both are empty where
    the confirm was a repetition.
    """

    retried: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Backlog:
    """How much a source still holds for this reader: not yet opened, opened or held, waiting for a retry, dead."""

    ready: int
    pending: int
    waiting: int
    dead: int
    next_retry_in_s: float | None = None
    oldest_ready_age_s: float | None = None


class Source(Protocol):
    """A pending source, seen by one subscription: what coordinator and engines ask of it.

    Derive from it. To write a connector, derive from `PendingSource` or one of its kinds instead, which keep all of this.

    `tx` is a psycopg connection inside a transaction; a source whose store is that database takes part in it
    (`joins(tx)` says whether), so that a lease and a ledger row, or a confirm and `committed`, are one decision. With
    `tx=None` each call is a transaction of its own. Confirm and abort may be repeated without effect.
    """

    name: str

    @property
    def decoder(self) -> Decoder:
        """Turns payloads into tuples, inside executors."""
        ...

    def serves(self, guarantee: Guarantee) -> str | None:
        """None where this source can serve the guarantee; else the reason why not, for the one who builds a topology."""
        ...

    def shown_id(self, message: int, origin: int) -> str:
        """A message's id as people see it."""
        ...

    @property
    def kind(self) -> SourceKind:
        """What it promises about a batch that is replayed; by default opaque where it serves exactly-once, else nothing."""
        return SourceKind.OPAQUE if self.serves(Guarantee.EXACTLY_ONCE) is None else SourceKind.NON_TRANSACTIONAL

    def for_run(self, database: Database) -> Source:
        """The same source for one run: with a subscription and connections of its own, in `database` if none is named.

        By default itself: then one object serves one run at a time.
        """
        del database
        return self

    def probes(self) -> tuple[Probe, ...]:
        """What its readers need inside executors, for the preflight; by default nothing. No connection is made."""
        return ()

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Make the store ready for this subscription (create what is missing); later calls act for it.

        Raises:
            PositionMismatch: the store is not the one that the subscription's position was taken from.
        """
        ...

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out messages as pending: returned ones first, then due retries, then new ones; None where there are none."""
        ...

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position."""
        ...

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed or with messages left out."""
        ...

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as `parallelism` disjoint parts (some may be empty)."""
        ...

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """Open to held: from here on the lease never expires.

        Raises:
            Fenced: the lease has lapsed, was returned, or belongs to another epoch.
        """
        ...

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named, which wait for a retry or become dead letters.

        One that is not `counted` is merely returned: it waits with its failures as they were, due with the last of those
        that failed (so that messages which share tuples tend to be opened together), and its history says so.

        Raises:
            Fenced: the lease belongs to another epoch now.
        """
        ...

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return all of the lease's messages; no failure is counted."""
        ...

    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry to `seconds` from now; raises Fenced where it is not ours any more."""
        ...

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Every lease of this subscription, mine from here on; returns their owner keys.

        Those of this very epoch are among them: a driver recovers in place after a lost answer, too. An open lease of an
        older epoch counts a death.
        """
        ...

    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """Return the lease's messages in parts, which will be opened one by one; no failure is counted.

        `alone` names suspects: each becomes a part of its own, and what lies between them others. Where it is empty, or
        splits nothing off, the parts are two halves (bisection).
        """
        ...

    def backlog(self) -> Backlog:
        """What is left for this subscription."""
        ...

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in this source's own store; by default never."""
        del tx
        return False

    def maintain(self) -> None:
        """Housekeeping between batches (partitions made ahead and dropped behind); cheap where nothing is due."""
        return

    def drop_connections(self) -> None:
        """Let connections go that an outage made stale; the next call makes others. Nothing that is pending changes."""
        return

    def close(self) -> None:
        """The run is over: let everything go that it does not need."""
        return
