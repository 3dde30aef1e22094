"""Our own sources for the suite that every source must pass: the store, its views, and time that passes when told."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stormproof.core.base.clock import ManualClock
from stormproof.core.source.files import FileSource
from stormproof.core.source.files.formats import Format
from stormproof.core.source.files.rows import unpack
from stormproof.core.source.iterator import Item, IteratorSource
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.testing import Message, PendingSourceHarness, SourceHarness, messages_of

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
class PostgresHarness(PendingSourceHarness[PostgresQueue]):
    """Over `PostgresQueue`, in a database of its own: time is moved for all its queues."""

    name: str = "lines"

    def made(self, *, name: str = "lines", **options: Any) -> PostgresQueue:
        return PostgresQueue(name, database=self.database, max_attempts=self.max_attempts, rng=Random(1), **options)

    def queue(self, name: str = "lines") -> PostgresQueue:
        return self.unsubscribed(name=name)

    def put(self, payloads: Sequence[bytes]) -> None:
        self.queue().put(payloads)

    def mine(self) -> str:
        return "true"

    def waits_for_lock(self) -> bool:
        """Whether somebody on the server waits for a lock."""
        return self.execute("select count(*) from pg_locks where not granted") != [(0,)]

    def set_position(self, change: str) -> None:
        """Change every subscription's position, by keys of a JSON object."""
        self.execute(f"update stormproof.pending_subscription set position = position || '{change}'")


@dataclass
class FileHarness(PendingSourceHarness[FileSource]):
    """Over `FileSource`: each put is a new file."""

    folder: Path
    format: Format = "text"
    url: str | None = None
    """Where the files are instead, if they are in an object store."""

    def __post_init__(self) -> None:
        self.exact_bytes = self.format != "parquet"
        self.files = 0

    @property
    def place(self) -> str:
        """The address of the folder."""
        return str(self.folder) if self.url is None else self.url

    def put(self, payloads: Sequence[bytes]) -> None:
        path = self.folder / f"{self.files:05}.part"
        self.files += 1
        if self.format == "parquet":
            pq.write_table(pa.table({"other": [0] * len(payloads), "payload": list(payloads)}), path)
        else:
            path.write_bytes(b"".join(payload + b"\n" for payload in payloads))

    def made(self, **options: Any) -> FileSource:
        return FileSource(
            self.place,
            self.format,
            schema="payload string" if self.format == "jsonl" else "payload binary",
            name=self.name,
            database=self.database,
            max_attempts=self.max_attempts,
            look_interval_s=0,
            rng=Random(1),
            **options,
        )

    def payload_of(self, stored: bytes) -> bytes:
        if self.format != "parquet":
            return stored
        (row,) = unpack([stored])
        payload: bytes = row[0].as_py()["payload"]
        return payload

    def edited(self, payload: bytes) -> bytes:
        return json.dumps({"payload": payload.decode()}).encode() if self.format == "parquet" else payload
