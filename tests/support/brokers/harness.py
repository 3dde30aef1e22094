"""A harness over any source that keeps a journal, for the suite that every source must pass."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from stormproof.core.pending.redelivering import RedeliveringSource
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.protocol import Lease, Limit
from stormproof.testing import SourceHarness
from support.source_harness import messages_of

ANY = Limit(1_000)


@dataclass
class BrokerHarness(SourceHarness):
    """Time is moved in the rows, since the clock is the database's. `name` is the source's, and its queue's."""

    several_subscriptions = False
    counts_unopened = False
    database: Database
    name: str
    views: list[RedeliveringSource] = field(default_factory=list[RedeliveringSource])

    @abstractmethod
    def made(self, **options: Any) -> Any:
        """A new source."""

    def unsubscribed(self, **options: Any) -> Any:
        source = self.made(**options)
        self.views.append(source)
        return source

    def view(self, subscription: str = "s", epoch: int = 1, **options: Any) -> Any:
        source = self.unsubscribed(**options)
        source.subscribe(subscription, epoch)
        return source

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run SQL; `MINE` stands for this harness's subscriptions."""
        mine = f"subscription in (select id from stormproof.pending_subscription where source = '{self.name}')"
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.replace("MINE", mine).encode())
            return cursor.fetchall() if cursor.description else []

    def expire(self) -> None:
        self.execute("update stormproof.pending_slice set expires_at = clock_timestamp() where state = 'open' and MINE")

    def wait_for_retries(self) -> None:
        self.execute("update stormproof.pending_retry set not_before = clock_timestamp() where MINE")

    def close(self) -> None:
        for view in self.views:
            view.drop_connections()


@dataclass
class CrashHarness(BrokerHarness):
    """Over a server that may be killed and cut off."""

    @abstractmethod
    def left(self) -> int:
        """How many messages the server has that are not confirmed to it."""

    @abstractmethod
    def deliver_again(self) -> None:
        """Have the server deliver messages again that were confirmed to it, as far as it can."""

    @property
    @abstractmethod
    def confirms_by(self) -> bytes:
        """What stands in the bytes by which a client confirms messages."""

    def died(self) -> None:
        """A driver died in this process: what a process takes with it goes, too."""


def opened(source: Any, lease: Lease, limit: Limit = ANY) -> list[bytes]:
    """The payloads of the next slice; none where there is none."""
    slice_ = source.open(lease, limit, 7)
    return [] if slice_ is None else [message.payload for message in messages_of(source, slice_)]
