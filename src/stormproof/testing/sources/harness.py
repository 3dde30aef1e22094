"""What the suite for sources needs of a store, and the steps that its cases share.

`PendingSourceHarness` is one over any source whose connector derives from `PendingSource`: what is pending is in the
ledger's Postgres.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from stormproof.core.base.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.contract.dead_letter import DeadLetter
from stormproof.core.contract.payload import payload_in
from stormproof.core.contract.source import Lease, Limit, Slice, Source
from stormproof.core.pending.source import PendingSource
from stormproof.core.postgres.database import Database, connect

SEED: Final = 7
ANY: Final = Limit(1_000)


class SubscribedSource(Source, Protocol):
    """What a harness makes: a source that keeps its dead letters, and carries out an operator's decisions about them."""

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, oldest first, including those that were decided."""
        ...

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with failures counted from 0; returns those that waited for a decision."""
        ...

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that waited for a decision."""
        ...

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Requeue a dead letter with this payload in place of the old one; False where it is not a dead letter.

        Raises:
            UsageError: the source cannot store such a payload; nothing was changed.
        """
        ...


class SourceHarness(ABC):
    """One fresh, empty store, as the suite sees it.

    `max_attempts` is how often a message may fail there. `several_subscriptions` is off for a source that serves only
    one, `counts_unopened` for one whose backlog does not include messages that were never opened, `exact_bytes` for one
    that estimates how many bytes a message has. The suite's leases last 30 seconds. After a message's first failure its
    retry must be due within a second.
    """

    max_attempts: int = 3
    several_subscriptions: bool = True
    counts_unopened: bool = True
    exact_bytes: bool = True

    @abstractmethod
    def put(self, payloads: Sequence[bytes]) -> None:
        """Append messages to the store. Payloads are any bytes but newlines."""

    @abstractmethod
    def unsubscribed(self) -> SubscribedSource:
        """A new source object on the store, as another driver has it: it shares nothing but the store."""

    def view(self, subscription: str = "s", epoch: int = 1) -> SubscribedSource:
        """A new source object that is subscribed."""
        source = self.unsubscribed()
        source.subscribe(subscription, epoch)
        return source

    @abstractmethod
    def expire(self) -> None:
        """Let every open lease run out: advance the store's clock, or move the leases' expiry into the past."""

    @abstractmethod
    def wait_for_retries(self) -> None:
        """Make every waiting retry due, in the same way."""

    def payload_of(self, stored: bytes) -> bytes:
        """The payload that was put, from what a dead letter has stored of it."""
        return payload_in(stored)

    def edited(self, payload: bytes) -> bytes:
        """What `edit` is given so that this payload takes a dead letter's place."""
        return payload

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Release what the views hold; called by whoever made the harness."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as a reader gave it."""

    id: int
    origin: int
    token: int
    payload: bytes

    def failed(self, error: str = "boom", *, counted: bool = True) -> MessageFailure:
        """The failure of this message by a bolt; not `counted`: it is returned because another message failed."""
        return MessageFailure(
            MessageId(self.id),
            self.origin,
            Token(self.token),
            FailureReason.ERROR,
            "split",
            error,
            "the input",
            counted=counted,
        )


def messages_of(
    source: Source,
    slice_: Slice,
    seed: int = SEED,
    *,
    parallelism: int = 2,
    excluded: frozenset[int] = frozenset(),
    batch_rows: int = 3,
) -> list[Message]:
    """The messages that the slice's readers give, part after part; checks the size of batches and the order within parts.

    Where a payload is a row (see `Decoder`), the value of its column `payload`, or else of its only one, is taken for it.
    """
    found = list[Message]()
    for reader in source.readers(slice_, parallelism):
        part = list[Message]()
        for batch in reader.read(seed, excluded, batch_rows):
            assert 0 < batch.num_rows <= batch_rows
            for row in batch.to_pylist():
                payload = row["payload"]
                if isinstance(payload, dict):
                    columns = cast("dict[str, object]", payload)
                    (payload,) = [columns["payload"]] if "payload" in columns else columns.values()
                assert isinstance(payload, bytes)
                part.append(Message(row["id"], row["origin"], row["token"], payload))
        assert [m.id for m in part] == sorted(m.id for m in part)
        found += part
    return found


def lease_of(owner: str = "a", epoch: int = 1) -> Lease:
    """A lease of 30 seconds."""
    return Lease(owner, epoch)


def open_slice(source: Source, owner: str = "a", limit: Limit = ANY, *, epoch: int = 1, seed: int = SEED) -> Slice:
    """Open a slice, and require that there is one."""
    slice_ = source.open(lease_of(owner, epoch), limit, seed)
    assert slice_ is not None
    return slice_


def each_slice(source: Source, limit: Limit = ANY, epoch: int = 1) -> Iterator[tuple[Lease, Slice]]:
    """Open slices until there are no more, each under a lease of its own."""
    for number in range(100):
        lease = lease_of(f"each{number}", epoch)
        slice_ = source.open(lease, limit, SEED)
        if slice_ is None:
            return
        yield lease, slice_
    raise AssertionError("the source hands out slices without end")


def numbered(count: int, start: int = 0) -> list[bytes]:
    """As many payloads, all different, numbered from `start` on."""
    return [b"m%d" % n for n in range(start, start + count)]


def payloads_of(messages: list[Message]) -> list[bytes]:
    """The messages' payloads, in order."""
    return [message.payload for message in messages]


def dead_letter(harness: SourceHarness) -> str:
    """Put the message ``poison`` and fail it until it is a dead letter; returns its shown id."""
    harness.put([b"poison"])
    source = harness.view()
    for _ in range(harness.max_attempts):
        harness.wait_for_retries()
        slice_ = open_slice(source, "k")
        dead = source.confirm(lease_of("k"), [m.failed() for m in messages_of(source, slice_)]).dead
        if dead:
            return dead[0]
    raise AssertionError(f"the message failed {harness.max_attempts} times and is no dead letter")


S = TypeVar("S", bound=PendingSource)


# ---- over a connector that derives from `PendingSource`


@dataclass
class PendingSourceHarness(SourceHarness, Generic[S]):
    """A store of a connector of yours; a subclass gives `put` and `made`.

    `database` has the ledger's schema (`stormproof ledger migrate`), `name` is the source's. Time is moved in the rows of
    what is pending, since the clock is the database's.
    """

    database: Database
    name: str
    views: list[S] = field(default_factory=list[S], init=False)
    """Every source object that was made."""

    @abstractmethod
    def made(self, **options: Any) -> S:
        """A new source object on the store, with a connection of its own; `options` are arguments of a case of yours."""

    def unsubscribed(self, **options: Any) -> S:
        """A new source object on the store."""
        source = self.made(**options)
        self.views.append(source)
        return source

    def view(self, subscription: str = "s", epoch: int = 1, **options: Any) -> S:
        """A new source object that is subscribed."""
        source = self.unsubscribed(**options)
        source.subscribe(subscription, epoch)
        return source

    def mine(self) -> str:
        """The SQL condition by which a row of a pending slice or retry belongs to this store."""
        return f"subscription in (select id from stormproof.pending_subscription where source = '{self.name}')"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run SQL; `MINE` stands for the condition `mine`. Gives the rows, if there are any."""
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.replace("MINE", self.mine()).encode())
            return cursor.fetchall() if cursor.description else []

    def expire(self) -> None:
        """Let every open lease run out."""
        self.execute("update stormproof.pending_slice set expires_at = clock_timestamp() where state = 'open' and MINE")

    def wait_for_retries(self) -> None:
        """Make every waiting retry due."""
        self.execute("update stormproof.pending_retry set not_before = clock_timestamp() where MINE")

    def close(self) -> None:
        """Let the connections of all source objects go."""
        for view in self.views:
            view.close()
