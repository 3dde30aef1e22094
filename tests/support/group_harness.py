"""A group of two sources for the suite that every source must pass; the messages go to one of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stormproof.core.source.group import SourceGroup
from stormproof.testing import SourceHarness
from support.source_harness import MemoryHarness, PostgresHarness

SPOUTS = ("lines", "clicks")


@dataclass
class MemoryGroupHarness(SourceHarness):
    """Two sources in memory; `into` is the one that gets the messages."""

    into: str = SPOUTS[0]
    stores: dict[str, MemoryHarness] = field(default_factory=lambda: {spout: MemoryHarness() for spout in SPOUTS})

    def put(self, payloads: Sequence[bytes]) -> None:
        self.stores[self.into].put(payloads)

    def unsubscribed(self) -> SourceGroup:
        return SourceGroup({spout: store.unsubscribed() for spout, store in self.stores.items()})

    def view(self, subscription: str = "s", epoch: int = 1) -> SourceGroup:
        group = SourceGroup({spout: store.store.view(subscription) for spout, store in self.stores.items()})
        group.subscribe(subscription, epoch)
        return group

    def expire(self) -> None:
        for store in self.stores.values():
            store.expire()

    def wait_for_retries(self) -> None:
        for store in self.stores.values():
            store.wait_for_retries()


@dataclass
class PostgresGroupHarness(SourceHarness):
    """Two queues of one database; `into` is the one that gets the messages."""

    queues: PostgresHarness
    into: str = SPOUTS[0]

    def put(self, payloads: Sequence[bytes]) -> None:
        self.queues.queue(self.into).put(payloads)

    def unsubscribed(self) -> SourceGroup:
        return SourceGroup({spout: self.queues.queue(spout) for spout in SPOUTS})

    def expire(self) -> None:
        self.queues.expire()

    def wait_for_retries(self) -> None:
        self.queues.wait_for_retries()

    def close(self) -> None:
        self.queues.close()
