"""A failing tuple that two messages anchor, under each guarantee: who fails, who is merely returned, what the sink holds.

Five messages, two keys. A join holds the parts of a key and pairs neighbours, each pair anchored to both its messages:
``bad+b`` and ``b+c`` of key x, ``d+e`` of key y. What comes after the join fails the pair ``bad+b``. So messages 0 and 1
have failed; message 2 only shares a tuple with message 1.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.joins import PAYLOADS, pairs
from support.memory_run import World

from stormproof import MemorySink, MemorySource, Topology
from stormproof.core.base.message import Guarantee
from stormproof.core.tracking import partners
from stormproof.trident.terms.observers import RunStatistics


class Joined(World):
    """The join between memory source and memory sink."""

    def __init__(self, folder: Path) -> None:
        super().__init__([], folder, batch_messages=9)
        self.source = MemorySource(
            "lines", PAYLOADS, max_attempts=2, backoff_base_s=0.0, clock=self.clock, rng=self.rng
        )
        self.sinks = [MemorySink("pairs", staging=folder / "pairs")]
        self.topology = t = Topology("join")
        t.sink(self.sinks[0], pairs(t, self.source))

    def dead(self) -> list[tuple[int, int, str]]:
        """(message, times failed, component of the last failure) of every dead letter."""
        return [(d.id, d.times_failed, str(d.history[-1]["component"])) for d in self.source.dead_letters()]


def counted(statistics: RunStatistics) -> tuple[int, int, int]:
    return statistics.failed, statistics.returned, statistics.dead_letters


def test_exactly_once_nothing_of_a_failed_message_stays_and_its_neighbour_is_returned(tmp_path: Path) -> None:
    world = Joined(tmp_path)
    first = world.run(max_batches=1)
    assert counted(first) == (2, 1, 0)
    assert first.attempts == 2, "the second one left all three out"
    assert world.counts() == Counter(["d+e"])
    rest = world.run()
    assert counted(rest) == (2, 1, 2), "again the three come together, and again the pair fails"
    assert world.counts() == Counter(["d+e", "c"]), "the neighbour ends with no failure counted"
    assert world.dead() == [(0, 2, "refuse"), (1, 2, "refuse")]


def test_at_least_once_the_neighbour_is_confirmed_and_the_good_pair_stays(tmp_path: Path) -> None:
    world = Joined(tmp_path)
    statistics = world.run(Guarantee.AT_LEAST_ONCE)
    assert counted(statistics) == (4, 0, 2)
    assert world.counts() == Counter(["b+c", "d+e"])
    assert world.dead() == [(0, 2, "refuse"), (1, 2, "refuse")]


def test_at_most_once_the_failure_is_recorded_and_nobody_comes_again(tmp_path: Path) -> None:
    world = Joined(tmp_path)
    statistics = world.run(Guarantee.AT_MOST_ONCE)
    assert counted(statistics) == (2, 0, 0)
    assert world.counts() == Counter(["b+c", "d+e"])
    assert world.dead() == []
    assert world.source.backlog().waiting == 0


def test_a_neighbour_that_is_confirmed_under_exactly_once_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Negative control: its tuple is gone with the failed message, and it would never be seen again."""
    monkeypatch.setattr(partners, "touched_by", lambda *_: {})
    with pytest.raises(AssertionError):
        test_exactly_once_nothing_of_a_failed_message_stays_and_its_neighbour_is_returned(tmp_path)
