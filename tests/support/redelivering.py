"""A toy server that only redelivers, a connector for it, and a harness for the suite that every source must pass."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, NamedTuple

from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.pending.journal import Delivery
from stormproof.core.pending.redelivering import RedeliveringSource
from stormproof.core.postgres.database import Database
from stormproof.testing import PendingSourceHarness


class Handle(NamedTuple):
    """One delivery, on one connection."""

    connection: int
    tag: int


@dataclass
class ToyServer:
    """Holds messages until they are confirmed; a connection that goes has them delivered again, in another order.

    As RabbitMQ does, it ignores a confirmation with a handle that it does not know.
    """

    rng: Random = field(default_factory=lambda: Random(1))
    reorders: bool = False
    ready: deque[tuple[str, bytes]] = field(default_factory=deque[tuple[str, bytes]])
    confirmed: list[str] = field(default_factory=list[str])
    ignored: int = 0
    deliveries: int = 0

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._unconfirmed: dict[int, dict[int, tuple[str, bytes]]] = {}

    def put(self, payloads: Sequence[bytes], prefix: str = "m") -> None:
        for payload in payloads:
            self.ready.append((f"{prefix}{next(self._numbers)}", payload))

    @property
    def left(self) -> int:
        """Messages that nobody has confirmed."""
        return len(self.ready) + sum(len(held) for held in self._unconfirmed.values())

    def connect(self) -> int:
        number = next(self._numbers)
        self._unconfirmed[number] = {}
        return number

    def lose(self, connection: int | None = None) -> None:
        """A connection goes, or all of them: what they hold is delivered again."""
        for number in list(self._unconfirmed) if connection is None else [connection]:
            back = list(self._unconfirmed.pop(number, {}).values())
            if self.reorders:
                self.rng.shuffle(back)
            self.ready.extendleft(reversed(back))

    def redeliver_everything(self) -> None:
        """Deliver all that is unconfirmed again, while its connections live: an impatient server."""
        for held in self._unconfirmed.values():
            self.ready.extend(held.values())

    def deliver(self, connection: int, limit: int) -> list[tuple[Handle, str, bytes]]:
        held = self._held(connection)
        found: list[tuple[Handle, str, bytes]] = []
        while self.ready and len(found) < limit:
            id_, payload = self.ready.popleft()
            tag = next(self._numbers)
            held[tag] = (id_, payload)
            found.append((Handle(connection, tag), id_, payload))
        self.deliveries += len(found)
        return found

    def confirm(self, connection: int, handles: Sequence[Handle]) -> None:
        self._held(connection)
        for handle in handles:
            gone = self._unconfirmed.get(handle.connection, {}).pop(handle.tag, None)
            if gone is None:
                self.ignored += 1
            else:
                self.confirmed.append(gone[0])

    def give_back(self, connection: int, handles: Sequence[Handle]) -> None:
        held = self._held(connection)
        self.ready.extendleft(held.pop(handle.tag) for handle in reversed(handles) if handle.tag in held)

    def _held(self, connection: int) -> dict[int, tuple[str, bytes]]:
        if connection not in self._unconfirmed:
            raise StoreUnavailable("the toy server's connection is gone")
        return self._unconfirmed[connection]


class ToySource(RedeliveringSource):
    """The connector: all that is needed for such a server."""

    KIND: ClassVar[str] = "journal.toy"

    def __init__(self, name: str, server: ToyServer, **options: Any) -> None:
        super().__init__(name, **options)
        self.server = server
        self.connection: int | None = None

    def receive(self, limit: int) -> Sequence[Delivery]:
        if self.connection is None:
            self.connection = self.server.connect()
            self.reconnected()
        try:
            delivered = self.server.deliver(self.connection, limit)
        except StoreUnavailable:
            self.connection = None
            raise
        return [Delivery(id_, handle, payload) for handle, id_, payload in delivered]

    def acknowledge(self, handles: Sequence[Handle]) -> None:
        if self.connection is not None:
            self.server.confirm(self.connection, handles)

    def give_back(self, handles: Sequence[Handle]) -> None:
        if self.connection is not None:
            self.server.give_back(self.connection, handles)

    def for_run(self, database: Database) -> ToySource:
        view = super().for_run(database)
        view.connection = None
        return view


@dataclass
class ToyHarness(PendingSourceHarness[ToySource]):
    """Over `ToySource`."""

    several_subscriptions = False
    counts_unopened = False
    server: ToyServer = field(default_factory=ToyServer)
    kind: type[ToySource] = ToySource

    def put(self, payloads: Sequence[bytes]) -> None:
        self.server.put(payloads)

    def made(self, **options: Any) -> ToySource:
        return self.kind(
            self.name, self.server, database=self.database, max_attempts=self.max_attempts, rng=Random(1), **options
        )

    def close(self) -> None:
        for view in self.views:
            view.drop_connections()
