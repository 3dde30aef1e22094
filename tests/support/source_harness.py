"""One face for the conformance suite of sources: the store, its views, and time that passes when told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeAlias

from stormproof.core.clock import ManualClock
from stormproof.core.message import FailureReason, MessageFailure, MessageId, Token
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.core.source.protocol import Slice

PendingSource: TypeAlias = MemorySource | PostgresQueue


@dataclass(frozen=True, slots=True)
class Message:
    """What a reader gave for one message."""

    id: int
    origin: int
    token: int
    payload: bytes

    def failed(self, error: str = "boom") -> MessageFailure:
        """This message, as one that a bolt failed."""
        return MessageFailure(
            MessageId(self.id), self.origin, Token(self.token), FailureReason.ERROR, "split", error, "the input"
        )


def messages_of(
    source: PendingSource,
    slice_: Slice,
    seed: int = 7,
    *,
    parallelism: int = 2,
    excluded: frozenset[int] = frozenset(),
    batch_rows: int = 3,
) -> list[Message]:
    """What the slice's readers give, part after part."""
    found = list[Message]()
    for reader in source.readers(slice_, parallelism):
        part = list[Message]()
        for batch in reader.read(seed, excluded, batch_rows):
            assert 0 < batch.num_rows <= batch_rows
            part += [Message(*row.values()) for row in batch.to_pylist()]
        assert [m.id for m in part] == sorted(m.id for m in part)
        found += part
    return found


class Harness(Protocol):
    """A fresh, empty store."""

    max_attempts: int

    def put(self, payloads: Sequence[bytes]) -> None: ...
    def view(self, subscription: str = "s", epoch: int = 1) -> PendingSource:
        """A source that is subscribed: another driver's, with nothing shared but the store."""
        ...

    def expire(self) -> None:
        """Let every open lease run out."""
        ...

    def wait_for_retries(self) -> None:
        """Let every retry fall due."""
        ...

    def close(self) -> None: ...


@dataclass
class MemoryHarness:
    """Over `MemorySource`."""

    max_attempts: int = 3
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.store = MemorySource("lines", max_attempts=self.max_attempts, clock=self.clock, rng=Random(1))

    def put(self, payloads: Sequence[bytes]) -> None:
        self.store.put(payloads)

    def view(self, subscription: str = "s", epoch: int = 1) -> MemorySource:
        view = self.store.view(subscription)
        view.subscribe(subscription, epoch)
        return view

    def expire(self) -> None:
        self.clock.advance(31)

    def wait_for_retries(self) -> None:
        self.clock.advance(1_000)

    def close(self) -> None:
        pass


@dataclass
class PostgresHarness:
    """Over `PostgresQueue`; time is moved in the rows, since the clock is the database's."""

    database: Database
    max_attempts: int = 3
    views: list[PostgresQueue] = field(default_factory=list[PostgresQueue])

    def queue(self, name: str = "lines") -> PostgresQueue:
        queue = PostgresQueue(name, database=self.database, max_attempts=self.max_attempts, rng=Random(1))
        self.views.append(queue)
        return queue

    def put(self, payloads: Sequence[bytes]) -> None:
        self.queue().put(payloads)

    def view(self, subscription: str = "s", epoch: int = 1) -> PostgresQueue:
        queue = self.queue()
        queue.subscribe(subscription, epoch)
        return queue

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def waits_for_lock(self) -> bool:
        """Whether somebody on the server waits for a lock."""
        return self.execute("select count(*) from pg_locks where not granted") != [(0,)]

    def expire(self) -> None:
        self.execute("update stormproof.queue_slice set expires_at = clock_timestamp() where state = 'open'")

    def wait_for_retries(self) -> None:
        self.execute("update stormproof.queue_retry set not_before = clock_timestamp()")

    def close(self) -> None:
        for view in self.views:
            view.close()
