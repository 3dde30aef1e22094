"""A group of two sources for the suite that every source must pass; the messages go to one of the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from stormproof.core.contract.dead_letter import DeadLetter
from stormproof.core.pending.source import PendingSource
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.spouts import key_of, shown, unshown
from stormproof.testing import SourceHarness
from support.source_harness import MemoryHarness, PostgresHarness

SPOUTS = ("lines", "clicks")


class GroupWithLetters(SourceGroup):
    """A group that hands an operator's decisions on to its spouts' sources, for the cases of the suite about these."""

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        return tuple(
            replace(letter, id=key_of(letter.id, index, spout), shown_id=shown(spout, letter.shown_id))
            for index, (spout, source) in enumerate(self.sources.items())
            for letter in cast(PendingSource, source).dead_letters()
        )

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        return tuple(
            shown(spout, one)
            for spout, source, inner in self._named(ids)
            for one in source.requeue([inner], by=by, why=why)
        )

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        return tuple(
            shown(spout, one)
            for spout, source, inner in self._named(ids)
            for one in source.drop([inner], by=by, why=why)
        )

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        return any(source.edit(inner, payload, by=by, why=why) for _, source, inner in self._named([message]))

    def _named(self, ids: Sequence[str]) -> Iterator[tuple[str, PendingSource, str]]:
        for spout, inner in filter(None, map(unshown, ids)):
            yield spout, cast(PendingSource, self.sources[spout]), inner


@dataclass
class MemoryGroupHarness(SourceHarness):
    """Two sources in memory; `into` is the one that gets the messages."""

    into: str = SPOUTS[0]
    stores: dict[str, MemoryHarness] = field(default_factory=lambda: {spout: MemoryHarness() for spout in SPOUTS})

    def put(self, payloads: Sequence[bytes]) -> None:
        self.stores[self.into].put(payloads)

    def unsubscribed(self) -> GroupWithLetters:
        return GroupWithLetters({spout: store.unsubscribed() for spout, store in self.stores.items()})

    def view(self, subscription: str = "s", epoch: int = 1) -> GroupWithLetters:
        group = GroupWithLetters({spout: store.store.view(subscription) for spout, store in self.stores.items()})
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

    def unsubscribed(self) -> GroupWithLetters:
        return GroupWithLetters({spout: self.queues.queue(spout) for spout in SPOUTS})

    def expire(self) -> None:
        self.queues.expire()

    def wait_for_retries(self) -> None:
        self.queues.wait_for_retries()

    def close(self) -> None:
        self.queues.close()
