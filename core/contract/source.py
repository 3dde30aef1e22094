"""The contract between a topology and a source of messages: open, confirm and abort (the verbs of Kestrel).

A source hands out messages in slices, one for each batch. A message is *pending* from the time its slice is opened until
the slice is confirmed or aborted. Four calls carry the guarantee:

    open      hands out a slice of messages, under a lease
    readers   read the slice's messages inside executors, any number of times
    confirm   ends the slice: its messages are done, except those named as failed
    abort     returns the slice: its messages are opened again

Order of the calls in one run (in braces: for each batch; several slices may be pending at once):

    subscribe, recover, { open, readers, extend ..., hold, confirm | abort | split }, close

Under at-most-once a slice is confirmed before it is read, so what `readers` gave must still find the messages then.

Guarantee, for each subscription:
    Every message is opened. It is opened again only when it was returned, when it failed and its retry is due, or when
    its lease ran out. Once confirmed it is never opened again. Only the owner of a lease, in the newest epoch, can
    confirm. A message that fails too often becomes a dead letter, with its payload and its history.

Not guaranteed:
    An order between slices. A batch that is replayed need not hold the same messages: see `SourceKind`.

To write a connector, derive from the first of these classes that fits. They keep leases, retries, dead letters, splits
and fencing in a store. You write only what your messages need:

    `pending.numbered.NumberedSource`, for messages with numbers without gaps that can be read again:
        stop (how many there are) and reader (what reads a range of them)
    `pending.redelivering.RedeliveringSource`, for a server that delivers again what was not acknowledged:
        receive, acknowledge and give_back
    `pending.source.PendingSource`, for any other messages that can be read again:
        start, next, head, places, expected, parts and payloads
    `Source`, for a store that keeps leases itself:
        everything below

So the shortest connector has two methods, and its reader one: see `examples/sqlite_source.py`. The suite
`stormproof.testing.SourceConformance` tests any source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import Json
from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.postgres.database import Database
from stormproof.core.start.preflight import Probe


class SourceKind(StrEnum):
    """Trident's three kinds of sources."""

    NON_TRANSACTIONAL = "non-transactional"
    """Nothing: messages in flight may be lost, or handed out again after they were applied."""
    TRANSACTIONAL = "transactional"
    """A slice can be read again, with the same messages."""
    OPAQUE = "opaque"
    """Each message is confirmed once, but a replayed batch may hold other messages."""


WEAKEST_FIRST: Final = (SourceKind.NON_TRANSACTIONAL, SourceKind.OPAQUE, SourceKind.TRANSACTIONAL)


# ---- messages' ids, as people see them


class ShownIds(Protocol):
    """Messages' ids as people see them, for whole columns: `Source.shown_id` inside tasks. Picklable; no connection."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """The ids (string) of messages by number and origin (int64); NULL where the number is NULL."""
        ...


@dataclass(frozen=True, slots=True)
class NumberIds(ShownIds):
    """``NUMBER``."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """The numbers alone."""
        return pc.cast(numbers, pa.string())


@dataclass(frozen=True, slots=True)
class OriginIds(ShownIds):
    """``ORIGIN-NUMBER``."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """Both, with a hyphen between them."""
        return pc.binary_join_element_wise(pc.cast(origins, pa.string()), pc.cast(numbers, pa.string()), "-")


# ---- what is opened


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a slice may hold. A single message is handed out even if it alone exceeds `bytes`.

    Without `retries`, messages that failed before are left for a later call, even if they are due. A source that ignores
    this is slower where messages fail, but still correct. Without `fresh`, only messages that were opened before are handed
    out: returned ones and due retries. With a source that ignores this, a run that is drained ends only once it is idle.
    With `certain`, the slice is confirmed before it is read: a source may assume nothing of its messages that a reader
    could refute.

    With `whole`, messages that were in one batch are opened again in one batch, whatever the other limits are. With `mates`,
    only what has one of these names is handed out (`Slice.mates`), all of it; with no name, only messages that were never
    opened. A source that ignores these two says so (`Source.keeps_mates`), and is refused where messages meet.
    """

    messages: int = 10_000
    bytes: int = 64 * 1024 * 1024
    retries: bool = True
    fresh: bool = True
    certain: bool = False
    whole: bool = False
    mates: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Who holds a slice, and for how long: an opaque owner key, the owner's epoch, and seconds by the store's clock.

    Owner and epoch go together: a driver of an older epoch must not confirm what was handed to its successor.
    """

    owner: str
    epoch: int
    seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the acker must find in a slice: the number of messages, and the XOR of their tokens (signed, 64 bits).

    The source computes it apart from the read. So a reader that returns one message twice and skips another is noticed.
    """

    messages: int
    xor: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The messages that a source opened for one batch.

    `position` describes the slice as JSON. The ledger stores it, and `Source.attach` makes the slice from it again.
    `expected` is for the seed of `open`, with no message left out. `retry` says that the messages failed before; then
    `replayed` names each as (number, origin). `deaths` is how often a driver ended while it held the slice open. `mates`
    are names that messages of other sources may share, which are to be in the same batch.
    """

    position: dict[str, Json]
    expected: Expectation
    bytes: int
    retry: bool = False
    deaths: int = 0
    replayed: tuple[tuple[int, int], ...] = ()
    mates: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a confirm did with the messages named as failed: `retried` wait for a retry, `dead` are dead letters.

    Both are shown ids. Messages that were only returned are among `retried`. Both are empty where the confirm was a
    repetition.
    """

    retried: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many messages a subscription has left: not opened yet, pending, waiting for a retry, and dead letters.

    `at_server`: those that a server which delivers has for it, and has not delivered; None: not known. They are not among
    the others. It is the server's word, as of the newest opening, so backlogs that differ in it alone are equal.
    """

    ready: int
    pending: int
    waiting: int
    dead: int
    next_retry_in_s: float | None = None
    oldest_ready_age_s: float | None = None
    at_server: int | None = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SourcePreview:
    """Messages that a source would hand out next, for a dry run: nobody has taken them.

    `readers` read them. `why` says why none can be read in this way, or not those of every spout; `refused`: the start of
    a run would be refused for it.
    """

    readers: tuple[SliceReader, ...] = ()
    messages: int = 0
    why: str = ""
    refused: bool = False


# ---- how it is read, inside executors

READER_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("origin", pa.int64(), nullable=False),
        pa.field("token", pa.int64()),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
"""The columns that every `SliceReader` yields, in this order. A NULL token: the message is not tracked.

The payload is of another type where the source's decoder takes that: a struct, for a row that has columns already.
`stormproof.core.pending.batches.batches_of` makes such record batches from ids and payloads.
"""


@runtime_checkable
class SliceReader(Protocol):
    """Reads a part of a slice inside an executor. Picklable; holds no connection."""

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages by ascending id, as batches of `READER_SCHEMA` with at most `batch_rows` rows.

        `seed` makes the tokens. Messages whose id is in `excluded` are left out. Every call must yield the same messages:
        Spark may run a task twice.

        Raises:
            StoreUnavailable: the store is away; the run waits for it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decoder made of payloads.

    `counts[i]` is the number of tuples in payload i; `rows` holds them payload by payload. Such a payload is a message
    unit: its tuples complete, fail and are replayed as one. None: every payload is one tuple. `failed` has (payload,
    error) of those that do not decode; the content of their rows is undefined.
    """

    rows: pa.RecordBatch
    counts: Rows | None
    failed: Sequence[tuple[int, str]]


class Decoder(Protocol):
    """Turns payloads into tuples. Picklable, and without side effects."""

    @property
    def schema(self) -> pa.Schema:
        """The fields of a tuple."""
        ...

    def decode(self, payload: pa.Array) -> Decoded:
        """Decode payloads (binary, or the type that the source's readers give) to rows of `schema`."""
        ...


# ---- the source


class Source(Protocol):
    """A source, as one subscription sees it: what coordinator and engines call.

    `tx` is a psycopg connection inside a transaction. A source whose store is in that database takes part in it
    (`joins(tx)` says whether): so a lease and a row of the ledger, or a confirm and `committed`, are one decision. With
    `tx=None` each call is a transaction of its own. Confirm, abort and split may be repeated without effect, since an
    answer may be lost.

    Threads: one thread opens, confirms and recovers; others may call `extend` meanwhile.
    """

    name: str

    # -- what it is

    @property
    def decoder(self) -> Decoder:
        """Turns payloads into tuples, inside executors."""
        ...

    def serves(self, guarantee: Guarantee) -> str | None:
        """None where this source can serve the guarantee; else the reason why it cannot, for an error."""
        ...

    @property
    def kind(self) -> SourceKind:
        """What it promises about a replayed batch; by default opaque where it serves exactly-once, else nothing."""
        return SourceKind.OPAQUE if self.serves(Guarantee.EXACTLY_ONCE) is None else SourceKind.NON_TRANSACTIONAL

    def shown_id(self, message: int, origin: int) -> str:
        """A message's id as people see it."""
        ...

    def shown_ids(self) -> ShownIds | None:
        """`shown_id` for whole columns, inside tasks: for every message it gives the same id. By default there is none, and
        a sink that stores messages' ids (`Lineage`) is refused behind this source.
        """
        return None

    @property
    def keeps_mates(self) -> bool:
        """Whether `open` heeds `Limit.whole` and `Limit.mates`; by default not, and a join behind it is refused."""
        return False

    def datasets(self) -> tuple[DatasetName, ...]:
        """What it reads, as others call it; by default not known. No connection is made."""
        return ()

    def probes(self) -> tuple[Probe, ...]:
        """What its readers need inside executors, for the preflight; by default nothing. No connection is made."""
        return ()

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in this source's own store; by default never."""
        return False

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """The next messages that were never opened, for a dry run; those that wait for a retry are not among them.

        Nothing is taken, made, changed or locked, here or at a server behind the source. By default that cannot be done,
        and `why` says so. `subscription` None: there is none yet. `database` is the run's, for a source that names none
        itself; None: there is none yet.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        return SourcePreview(why=f"{type(self).__name__} {self.name!r} cannot be read without taking its messages")

    # -- the run

    def for_run(self, database: Database) -> Source:
        """The source for one run, with its own subscription and connections; in `database` if it names none itself.

        By default the source itself: then one object serves one run at a time.
        """
        return self

    def begin(self, guarantee: Guarantee) -> None:
        """The run is one under this guarantee; called once, before `subscribe`. By default that changes nothing."""
        return

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Create the subscription in the store if it is missing; later calls act for it.

        Raises:
            Fenced: a newer epoch has the subscription.
            PositionMismatch: the store is not the one that the subscription's position was taken from.
        """
        ...

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Take over every lease of the subscription; returns their owner keys.

        Leases of this epoch are among them: a driver also recovers in place, after a lost answer. An open lease of an
        older epoch counts as a death of its slice.
        """
        ...

    def backlog(self) -> Backlog:
        """What is left for this subscription."""
        ...

    def undecided_among(self, ids: Collection[str]) -> frozenset[str]:
        """Those of these messages that are dead letters which wait for a decision; no payload is read. By default it keeps
        no dead letters.
        """
        return frozenset()

    def maintain(self) -> None:
        """Housekeeping between two batches, such as dropping what is done with; cheap where nothing is due."""
        return

    def drop_connections(self) -> None:
        """Close connections that an outage may have broken; the next call opens others. Nothing pending changes."""
        return

    def close(self) -> None:
        """End the run: release what it holds."""
        return

    # -- a slice

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out messages: returned ones first, then due retries, then new ones. None where there are none."""
        ...

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as `parallelism` disjoint parts, of which some may be empty."""
        ...

    def payloads_of(self, slice_: Slice, ids: Collection[int]) -> Mapping[int, bytes]:
        """The payloads of some of the slice's messages again, as they are stored for a retry; by default none are known.

        Called for messages that a sink rejected, before the slice is confirmed (under at-most-once after it).
        """
        return {}

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed, or with messages left out."""
        ...

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position."""
        ...

    # -- its lease

    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry to `seconds` from now.

        Raises:
            Fenced: the lease has lapsed, was returned, or belongs to another epoch.
        """
        ...

    def pin(self, lease: Lease, tx: object | None = None) -> None:
        """Pin an open lease: from then on it never expires; called before anything is committed to a sink.

        Raises:
            Fenced: the lease has lapsed, was returned, or belongs to another epoch.
        """
        ...

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm the lease's messages, except those named, which wait for a retry or become dead letters.

        A named message that is not `counted` is only returned: its count of failures stays, and its history records the
        return. Those with `mates` come again in one batch with each other.

        Raises:
            Fenced: the lease belongs to another owner or epoch now.
            UsageError: a named message is not in the slice; nothing was changed.
        """
        ...

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return the lease's messages; no failure is counted."""
        ...

    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        """Return the lease's messages in parts that are opened one by one; no failure is counted.

        Each message that `alone` names becomes a part of its own, and so do the messages between two of them. Where
        `alone` names none of the slice's messages, there are `parts` of about one size, or a part a message where there are
        fewer.
        """
        ...
