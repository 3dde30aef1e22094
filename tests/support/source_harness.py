"""Our own sources for the suite that every source must pass: the store, its views, and time that passes when told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.clock import ManualClock
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.files import FileSource
from stormproof.core.source.files.formats import Format
from stormproof.core.source.files.rows import unpack
from stormproof.core.source.iterator import IteratorSource
from stormproof.core.source.iterator_client import Item
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.testing import Message, SourceHarness, messages_of

__all__ = ["FileHarness", "IteratorHarness", "MemoryHarness", "Message", "PostgresHarness", "messages_of"]


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

    def set_position(self, change: str) -> None:
        """Change every subscription's position, by keys of a JSON object."""
        self.execute(f"update stormproof.pending_subscription set position = position || '{change}'")

    def expire(self) -> None:
        self.execute("update stormproof.pending_slice set expires_at = clock_timestamp() where state = 'open'")

    def wait_for_retries(self) -> None:
        self.execute("update stormproof.pending_retry set not_before = clock_timestamp()")

    def close(self) -> None:
        for view in self.views:
            view.close()


@dataclass
class FileHarness(SourceHarness):
    """Over `FileSource`: each put is a new file. Time is moved in the rows, since the clock is the database's."""

    database: Database
    folder: Path
    format: Format = "text"
    name: str = "files"
    views: list[FileSource] = field(default_factory=list[FileSource])

    def __post_init__(self) -> None:
        self.exact_bytes = self.format != "parquet"
        self.files = 0

    def put(self, payloads: Sequence[bytes]) -> None:
        path = self.folder / f"{self.files:05}.part"
        self.files += 1
        if self.format == "parquet":
            pq.write_table(pa.table({"other": [0] * len(payloads), "payload": list(payloads)}), path)
        else:
            path.write_bytes(b"".join(payload + b"\n" for payload in payloads))

    def unsubscribed(self) -> FileSource:
        source = FileSource(
            self.folder,
            self.format,
            schema="payload string" if self.format == "jsonl" else "payload binary",
            name=self.name,
            database=self.database,
            max_attempts=self.max_attempts,
            look_interval_s=0,
            rng=Random(1),
        )
        self.views.append(source)
        return source

    def execute(self, statement: str) -> None:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            of_this = f"select id from stormproof.pending_subscription where source = '{self.name}'"
            connection.execute(f"{statement} subscription in ({of_this})".encode())

    def set_position(self, change: str) -> None:
        """Change every subscription's position, by keys of a JSON object."""
        self.execute(f"update stormproof.pending_subscription set position = position || '{change}'")

    def expire(self) -> None:
        self.execute("update stormproof.pending_slice set expires_at = clock_timestamp() where state = 'open' and")

    def wait_for_retries(self) -> None:
        self.execute("update stormproof.pending_retry set not_before = clock_timestamp() where")

    def payload_of(self, stored: bytes) -> bytes:
        if self.format != "parquet":
            return stored
        (row,) = unpack([stored])
        payload: bytes = row[0].as_py()["payload"]
        return payload

    def close(self) -> None:
        for view in self.views:
            view.close()
