"""A topology into a state, all in memory: a driver can die at any step, and between any two keys that the store writes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stormproof import MemorySource, Topology, count
from stormproof.core.base.failpoint import watched
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit, Slice, SourceKind
from stormproof.trident.state.key_value import MemoryMap, MemoryStore
from stormproof.trident.state.protocol import StateFactory, StateKind
from stormproof.trident.state.sink import StateSink
from support.memory_run import World

PAYLOADS = [b"a b a", b"b c", b"a c", b"d"]
TRUTH = Counter(word for line in PAYLOADS for word in line.decode().split())


class Died(BaseException):
    """The driver's process ended here: nothing after this place ran in it."""


@dataclass
class Reaper:
    """Ends the driver at the n-th place that it comes to; counts the places."""

    at: int | None = None
    place: int = 0
    names: tuple[str, ...] = ()

    def __call__(self, name: str) -> None:
        self.place += 1
        self.names += (name,)
        if self.place == self.at:
            raise Died(name)


class MortalStore(MemoryStore):
    """Writes key by key, and the driver may die after each."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote: Callable[[str], None] = lambda _: None

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        for key, value in items.items():
            self.items[key] = value
            self.wrote(f"store.wrote {key.decode()}")


class OpaqueSource(MemorySource):
    """Batches that come again are put together anew: their messages come back one by one, mixed with others."""

    @property
    def kind(self) -> SourceKind:
        return SourceKind.OPAQUE

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        self._last = super().open(lease, Limit(1 + seed % limit.messages, limit.bytes), seed, tx)
        return self._last

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        if self._last is not None and self._last.expected.messages > 1:
            super().split(self._last, lease, range(100), tx)
        else:
            super().abort(lease, tx)


class ForgetfulSource(MemorySource):
    """What was in flight is lost when its driver ends."""

    @property
    def kind(self) -> SourceKind:
        return SourceKind.NON_TRANSACTIONAL

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        self.confirm(lease, (), tx)


SOURCES: Mapping[SourceKind, type[MemorySource]] = {
    SourceKind.NON_TRANSACTIONAL: ForgetfulSource,
    SourceKind.TRANSACTIONAL: MemorySource,
    SourceKind.OPAQUE: OpaqueSource,
}


class StateWorld(World):
    """What outlives a driver: source, ledger, and the state's store."""

    def __init__(
        self,
        folder: Path,
        source: SourceKind,
        state: StateKind | StateFactory,
        *,
        split: Callable[[str], list[str]] = str.split,
        sink: Callable[[StateFactory], StateSink] | None = None,
    ) -> None:
        super().__init__([], folder, batch_messages=2)
        self.source = SOURCES[source]("lines", PAYLOADS, clock=self.clock, rng=random.Random(1))
        self.store = MortalStore()
        factory = MemoryMap(state, store=self.store) if isinstance(state, StateKind) else state
        self.map = factory
        made = StateSink("counts", factory) if sink is None else sink(factory)
        self.sink = made.placed(None, folder)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self.topology = Topology("words")
        (
            self.topology.stream("lines", self.source)
            .flat_map(split, "line", schema="word string")
            .group_by("word")
            .persistent_aggregate(n=count())
            .into(self.sink)
        )

    def lives(self, guarantee: Guarantee, *deaths: int | None) -> tuple[Reaper, ...]:
        """One driver after the other, each ending at its place; one more that is left alone where the last one died."""
        reapers = tuple(Reaper(at) for at in deaths)
        for reaper in reapers:
            self.store.wrote = reaper
            try:
                with watched(reaper):
                    self.run(guarantee)
            except Died:
                continue
        if reapers and reapers[-1].at is not None:
            self.store.wrote = lambda _: None
            self.run(guarantee)
        return reapers

    def totals(self) -> Counter[str]:
        """What the state holds."""
        assert isinstance(self.map, MemoryMap)
        return Counter({key[0]: row["n"] for key, row in self.map.items().items()})
