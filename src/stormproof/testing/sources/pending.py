"""A harness over any source whose connector derives from `PendingSource`: what is pending is in the ledger's Postgres."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from stormproof.core.pending.source import PendingSource
from stormproof.core.postgres.database import Database, connect
from stormproof.testing.sources.harness import SourceHarness

S = TypeVar("S", bound=PendingSource)


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
