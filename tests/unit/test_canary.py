"""Canaries: which wave is handed out, and when no further one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import UsageError
from stormproof.trident.decisions.canary import CanaryEnd, CanaryReport, CanaryRules, Fate, run_canary

MESSAGES = [f"m{number}" for number in range(20)]


class Driver:
    """Decides each message `after_s` seconds after it was handed out; `bad` ones fail."""

    def __init__(self, *bad: str, after_s: float = 2.0, taken: frozenset[str] = frozenset()) -> None:
        self.clock = ManualClock()
        self.bad = bad
        self.after_s = after_s
        self.taken = taken
        self.waves: list[list[str]] = []
        self._decided_s: dict[str, float] = {}

    def release(self, some: Sequence[str], wave: int) -> Sequence[str]:
        mine = [one for one in some if one not in self.taken]
        self.waves.append(mine)
        assert wave == len(self.waves)
        self._decided_s.update(dict.fromkeys(mine, self.clock.monotonic_s() + self.after_s))
        return mine

    def fates(self, some: Sequence[str]) -> Mapping[str, Fate]:
        now_s = self.clock.monotonic_s()
        return {
            one: Fate.WAITING if now_s < self._decided_s[one] else Fate.FAILED if one in self.bad else Fate.PASSED
            for one in some
        }

    def run(self, rules: CanaryRules, **more: Any) -> CanaryReport:
        trouble: Callable[[], str | None] = lambda: "no driver runs"  # noqa: E731
        return run_canary(
            "orders",
            MESSAGES,
            rules,
            by="ann",
            release=self.release,
            fates=self.fates,
            trouble=trouble,
            clock=self.clock,
            **more,
        )


def test_waves_grow_until_everything_is_handed_out() -> None:
    driver = Driver()
    report = driver.run(CanaryRules(3))
    assert (report.end, report.left, report.failed) == (CanaryEnd.DONE, (), ())
    assert [len(wave) for wave in driver.waves] == [3, 6, 11]
    assert [one for wave in driver.waves for one in wave] == MESSAGES
    assert driver.clock.monotonic_s() == pytest.approx(6.0, abs=1.5)


def test_the_rest_stays_when_more_of_a_wave_fail_than_may() -> None:
    report = Driver("m1").run(CanaryRules(3))
    assert (report.end, report.failed, len(report.left)) == (CanaryEnd.FAILURES, ("m1",), 17)
    assert "1 of 3 messages of wave 1 failed (33.3%), and at most 0.0% may" in report.lines()[-1]


def test_a_share_of_failures_that_is_allowed_stops_nothing() -> None:
    """Control: the same failures with a lower bound stop the second wave."""
    bad = ("m1", "m3", "m4")
    assert Driver(*bad).run(CanaryRules(3, 0.34)).end is CanaryEnd.DONE
    stopped = Driver(*bad, "m5").run(CanaryRules(3, 0.34))
    assert (stopped.end, [wave.failed for wave in stopped.waves], len(stopped.left)) == (CanaryEnd.FAILURES, [1, 3], 11)


def test_a_wave_that_is_not_decided_in_time_has_no_successor() -> None:
    driver = Driver(after_s=1_000.0)
    report = driver.run(CanaryRules(3, wait_s=30.0))
    assert (report.end, report.waves[0].waiting, len(report.left)) == (CanaryEnd.UNDECIDED, 3, 17)
    assert "not decided within 30 s (no driver runs)" in report.lines()[-1]
    assert driver.clock.monotonic_s() == pytest.approx(30.0, abs=0.01)


def test_messages_that_others_decided_about_are_left_alone_and_counted() -> None:
    report = Driver(taken=frozenset({"m0", "m1", "m2", "m5"})).run(CanaryRules(3))
    assert (report.end, report.released, [wave.left_alone for wave in report.waves]) == (CanaryEnd.DONE, 16, [3, 1, 0])


def test_it_can_be_stopped_between_two_looks() -> None:
    seen: list[CanaryReport] = []
    report = Driver().run(CanaryRules(3), told=seen.append, stopped=lambda: len(seen) > 1)
    assert (report.end, report.released, len(report.left)) == (CanaryEnd.STOPPED, 3, 17)
    assert {one.end for one in seen} == {CanaryEnd.UNDECIDED}


@pytest.mark.parametrize(
    ("first", "share", "wait_s"),
    [(0, 0.0, 1.0), (1, -0.1, 1.0), (1, 1.0, 1.0), (1, float("nan"), 1.0), (1, 0.0, 0.0), (1, 0.0, float("inf"))],
)
def test_rules_that_mean_nothing_are_refused(first: int, share: float, wait_s: float) -> None:
    with pytest.raises(UsageError):
        CanaryRules(first, share, wait_s)
