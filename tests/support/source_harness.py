"""Our own sources for the suite that every source must pass: the store, its views, and time that passes when told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from stormproof.core.clock import ManualClock
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.iterator import Item, IteratorSource
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.testing import Message, SourceHarness, messages_of

__all__ = ["IteratorHarness", "MemoryHarness", "Message", "PostgresHarness", "messages_of"]


@dataclass
class MemoryHarness(SourceHarness):
    """Over `MemorySource`: the object is the store."""

    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.store = MemorySource("lines", max_attempts=self.max_attempts, clock=self.clock, rng=Random(1))

    def put(self, payloads: Sequence[bytes]) -> None:
        self.store.put(payloads)

    def unsubscribed(self) -> MemorySource:
        return self.store

    def view(self, subscription: str = "s", epoch: int = 1) -> MemorySource:
        view = self.store.view(subscription)
        view.subscribe(subscription, epoch)
        return view

    def expire(self) -> None:
        self.clock.advance(31)

    def wait_for_retries(self) -> None:
        self.clock.advance(1_000)


@dataclass
class IteratorHarness(SourceHarness):
    """Over `IteratorSource`: the object is the store, and the client's queue is in memory."""

    several_subscriptions = False
    counts_unopened = False
    clock: ManualClock = field(default_factory=ManualClock)
    arrived: deque[Item] = field(default_factory=deque[Item])

    def __post_init__(self) -> None:
        self.confirmed = list[object]()
        self.returned = list[object]()
        self.store = IteratorSource(
            "lines",
            self.items(),
            confirm=self.confirmed.extend,
            abort=self.returned.extend,
            max_attempts=self.max_attempts,
            clock=self.clock,
            rng=Random(1),
        )

    def items(self) -> Iterator[Item]:
        """The client: gives what has arrived, else None."""
        while True:
            yield self.arrived.popleft() if self.arrived else None

    def put(self, payloads: Sequence[bytes]) -> None:
        self.arrived.extend((("id", n, payload), payload) for n, payload in enumerate(payloads, len(self.arrived)))

    def unsubscribed(self) -> IteratorSource:
        return self.store

    def expire(self) -> None:
        self.clock.advance(31)

    def wait_for_retries(self) -> None:
        self.clock.advance(1_000)

    def close(self) -> None:
        self.store.close()


@dataclass
class PostgresHarness(SourceHarness):
    """Over `PostgresQueue`; time is moved in the rows, since the clock is the database's."""

    database: Database
    views: list[PostgresQueue] = field(default_factory=list[PostgresQueue])

    def queue(self, name: str = "lines") -> PostgresQueue:
        queue = PostgresQueue(name, database=self.database, max_attempts=self.max_attempts, rng=Random(1))
        self.views.append(queue)
        return queue

    def unsubscribed(self) -> PostgresQueue:
        return self.queue()

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
