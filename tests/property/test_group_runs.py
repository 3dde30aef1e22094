"""Several sources as one, for any order of calls, failures and crashes: every message ends once, and none is lost."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.source_harness import messages_of

from stormproof.core.base.clock import ManualClock
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.memory import MemorySource

SPOUTS = ("a", "b", "c")
MAX_ATTEMPTS = 3


class World:
    """One group after the other over the same sources, and what became of each message."""

    def __init__(self, messages: list[int], seed: int, kind: type[SourceGroup] = SourceGroup) -> None:
        self.rng, self.clock, self.kind = Random(seed), ManualClock(), kind
        self.sources = {
            spout: MemorySource(
                spout,
                [f"{spout}{n}".encode() for n in range(count)],
                max_attempts=MAX_ATTEMPTS,
                clock=self.clock,
                rng=Random(seed),
            )
            for spout, count in zip(SPOUTS, messages, strict=True)
        }
        self.everything = Counter(
            f"{spout}{n}".encode() for spout, count in zip(SPOUTS, messages, strict=True) for n in range(count)
        )
        self.confirmed = Counter[bytes]()
        self.batches = self.epoch = 0
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.group = self.kind(self.sources)
        self.group.subscribe("s", self.epoch)
        for owner in self.group.recover(self.epoch):
            self.group.abort(Lease(owner, self.epoch))

    def batch(self) -> bool:
        """One batch, to any end."""
        self.batches += 1
        lease = Lease(f"t{self.batches}", self.epoch)
        limit = Limit(self.rng.randint(1, 9), bytes=self.rng.choice([4, 1_000]))
        slice_ = self.group.open(lease, limit, self.rng.getrandbits(62))
        if slice_ is None:
            return False
        messages = messages_of(self.group, slice_, self.rng.getrandbits(62), parallelism=self.rng.randint(1, 4))
        assert len(messages) == slice_.expected.messages == len({m.id for m in messages}) <= limit.messages
        again = {self.group.shown_id(id_, origin) for id_, origin in slice_.replayed}
        assert again == ({self.group.shown_id(m.id, m.origin) for m in messages} if slice_.retry else set())
        match self.rng.choices(["confirm", "abort", "split", "crash", "lapse"], [10, 2, 3, 1, 1])[0]:
            case "confirm":
                failed = [m for m in messages if self.rng.random() < 0.2]
                resolution = self.group.confirm(lease, [m.failed() for m in failed])
                assert len(resolution.retried) + len(resolution.dead) == len(failed)
                self.confirmed.update(m.payload for m in messages if m not in failed)
            case "abort":
                self.group.abort(lease)
            case "split":
                suspects = self.rng.sample(messages, self.rng.randint(0, min(2, len(messages))))
                self.group.split(slice_, lease, [m.id for m in suspects])
            case "crash":
                self.restart()
            case _:
                self.clock.advance(31)
        return True

    def run(self) -> None:
        """Until nothing is left, then hold the account."""
        for _ in range(2_000):
            if not self.batch():
                backlog = self.group.backlog()
                if not (backlog.ready or backlog.pending or backlog.waiting):
                    break
                self.clock.advance(1_000)
        ended = self.confirmed + Counter(
            letter.payload
            for source in self.group.sources.values()
            for letter in cast(MemorySource, source).dead_letters()
        )
        assert ended == self.everything


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=3, max_size=3), st.integers(0, 2**32))
def test_every_message_ends_once(messages: list[int], seed: int) -> None:
    World(messages, seed).run()


class Careless(SourceGroup):
    """Keeps only the first spout's part of what it is told to give back."""

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        first, *others = self.sources.values()
        first.abort(lease, tx)
        for source in others:
            source.confirm(lease, (), tx)


def test_a_group_that_loses_what_was_returned_is_caught() -> None:
    """The negative control: some run of a broken group must not add up."""

    def run_many() -> None:
        for seed in range(20):
            World([5, 5, 5], seed, Careless).run()

    with pytest.raises(AssertionError):
        run_many()
