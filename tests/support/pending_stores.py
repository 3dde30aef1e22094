"""Both pending stores, for a suite over their rows: time is put on by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from stormproof.core.base.clock import ManualClock
from stormproof.core.pending.memory import MemoryPendingStore
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.rows import PendingRows, PendingStore, Subscriber
from stormproof.core.postgres.database import Database, connect


class StoreHarness(ABC):
    """A store in which nobody else has rows under the kind `kind`."""

    kind = "test"
    store: PendingStore

    def who(self, subscription: str = "s", source: str = "lines") -> Subscriber:
        return Subscriber(self.kind, source, subscription)

    def rows(self, subscription: str = "s") -> AbstractContextManager[PendingRows]:
        return self.store.rows(self.who(subscription))

    def start(self, subscription: str = "s", epoch: int = 1) -> None:
        """Make a subscription."""
        with self.rows(subscription) as rows:
            rows.subscribe(epoch, lambda: {"next": 0})

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Put the store's clock on."""


class MemoryStoreHarness(StoreHarness):
    """Over `MemoryPendingStore`."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryPendingStore("source lines", self.clock)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)


class PostgresStoreHarness(StoreHarness):
    """Over `PostgresPendingStore`; time is moved in the rows, since the clock is the database's."""

    def __init__(self, database: Database, kind: str) -> None:
        self.kind = kind
        self.database = database
        self.store = PostgresPendingStore("source", "lines", database=database)

    def advance(self, seconds: float) -> None:
        mine = f"subscription in (select id from stormproof.pending_subscription where kind = '{self.kind}')"
        back = f"- make_interval(secs => {seconds})"
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            for table, column in (
                ("pending_slice", "expires_at"),
                ("pending_retry", "not_before"),
                ("pending_lapse", "lapsed_at"),
            ):
                connection.execute(f"update stormproof.{table} set {column} = {column} {back} where {mine}".encode())
