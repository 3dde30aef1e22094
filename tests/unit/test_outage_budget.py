"""The budget of an outage: what is spent of it, and when it begins anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.memory_run import World

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import StoreUnavailable, TransientError
from stormproof.core.base.failpoint import watched
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.outages import outlasting_outages

OPTIONS = RunOptions(outage_s=60.0)


class Stores:
    """A step over stores that are away at stated times; each step that gets through to its end takes a while."""

    def __init__(
        self, away: list[tuple[float, float]], *, step_s: float, good_after: int, progress: bool = False
    ) -> None:
        self.clock = ManualClock()
        self._away, self._step_s, self._left, self._progress = away, step_s, good_after, progress
        self.error: Callable[[str], TransientError] = StoreUnavailable

    def _ask(self) -> None:
        now_s = self.clock.monotonic_s()
        if any(low <= now_s < high for low, high in self._away):
            raise StoreUnavailable("away")

    def step(self) -> str:
        self._ask()
        self.clock.advance(self._step_s)
        self._ask()
        self._left -= 1
        if self._left >= 0:
            raise self.error("again")
        return "done"

    def recover(self) -> bool:
        self._ask()
        return self._progress

    def outlast(self) -> str:
        return outlasting_outages(self.step, OPTIONS, self.clock, recover=self.recover)


def test_two_outages_with_work_in_between_are_two() -> None:
    """45 s away, then 30 s of work that goes through, then 45 s away once more: neither is as long as an outage may be."""
    stores = Stores([(10, 50), (75, 120)], step_s=30, good_after=0)
    assert stores.outlast() == "done"
    assert stores.clock.monotonic_s() > 120


def test_an_outage_that_is_too_long_ends_it() -> None:
    stores = Stores([(10, 1_000)], step_s=10, good_after=0)
    with pytest.raises(StoreUnavailable):
        stores.outlast()
    assert 70 <= stores.clock.monotonic_s() < 80


def test_stores_that_fail_behind_every_recovery_end_it() -> None:
    """No progress: what each recovery waited for adds up."""
    stores = Stores([], step_s=1, good_after=10_000)
    with pytest.raises(StoreUnavailable):
        stores.outlast()
    assert stores.clock.monotonic_s() < 120


def test_another_error_behind_every_recovery_ends_it_within_the_budget_of_one() -> None:
    """A lease that runs out at each try costs a job each: that time is spent, too."""
    stores = Stores([], step_s=50, good_after=10_000)
    stores.error = TransientError
    with pytest.raises(TransientError):
        stores.outlast()
    assert stores.clock.monotonic_s() < 200


def test_a_commit_by_recovery_begins_the_budget_anew() -> None:
    stores = Stores([], step_s=1, good_after=100, progress=True)
    assert stores.outlast() == "done"
    assert stores.clock.monotonic_s() < 130  # and the waits, too: each is the first


def test_a_driver_outlives_a_second_outage_behind_a_batch_that_recovery_committed(tmp_path: Path) -> None:
    """Away for 40 s at a commit, which recovery makes good; the next batch takes 30 s, and its commit meets another 40 s."""
    world = World([f"m{i}".encode() for i in range(8)], tmp_path, batch_messages=4)
    clock = world.clock
    assert isinstance(clock, ManualClock)
    reached, until_s = Counter[str](), 0.0

    def fail(name: str) -> None:
        nonlocal until_s
        reached[name] += 1
        if name == "commit.before_sink" and reached[name] in (1, 3):
            until_s = clock.monotonic_s() + 40
        if name == "run.after":
            clock.advance(30)
        if name in ("commit.before_sink", "recover.before") and clock.monotonic_s() < until_s:
            raise StoreUnavailable("away")

    with watched(fail):
        statistics = world.run(outage_s=60.0, lease_s=1_000.0)
    assert world.counts() == Counter(f"m{i}" for i in range(8))
    assert [len(report.rolled_forward) for report in statistics.recoveries] == [1, 1]
