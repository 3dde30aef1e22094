"""A model of the coordinator's loop and of what its batches cost, by the clock alone: what a tuner is measured on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf

from stormproof.core.contract.source import Limit
from stormproof.trident.driver.tuning import AsSet, BatchSample, Setting, Tuner

MOST = Limit(100_000, 2**26)
LATE_SHARE = 0.1
SEARCHED_BATCHES = 150


@dataclass(frozen=True)
class Load:
    """A job of n messages is `a + b n + q n^2` seconds of work for one core; jobs share `cores`. A commit takes `c + d n`
    seconds; they come one at a time, in the order of opening, and a job that is done waits for its turn.
    """

    a: float
    b: float
    c: float
    d: float
    cores: int = 2
    q: float = 0.0

    def batches(self, tuner: Tuner, noise: Callable[[], float], now_s: float = 0.0) -> Iterator[BatchSample]:
        """Batches as they are committed, for ever: the tuner is asked whenever one could be opened.

        `noise` is drawn for each job and each commit.
        """
        in_flight = list[_Batch]()
        while True:
            while len(in_flight) < tuner.in_flight:
                n = tuner.limit.messages
                work_s = (self.a + self.b * n + self.q * n * n) * noise()
                in_flight.append(_Batch(Setting(n, tuner.in_flight), now_s, work_s, (self.c + self.d * n) * noise()))
            lowest = in_flight[0]
            if lowest.left_s <= 0 and lowest.ends_s == inf:
                lowest.ends_s = now_s + lowest.commit_s
            running = [batch for batch in in_flight if batch.left_s > 0]
            speed = min(1.0, self.cores / max(len(running), 1))
            passed_s = min(lowest.ends_s - now_s, *(batch.left_s / speed for batch in running), inf)
            now_s += passed_s
            for batch in running:
                left_s = batch.left_s - passed_s * speed
                batch.left_s = left_s if left_s > 1e-9 else 0.0
            if lowest.ends_s <= now_s:
                del in_flight[0]
                n = lowest.setting.messages
                yield BatchSample(n, now_s - lowest.opened_s, now_s, full=True, setting=lowest.setting)


@dataclass(slots=True)
class _Batch:
    setting: Setting
    opened_s: float
    left_s: float
    commit_s: float
    ends_s: float = inf


def jitter(seed: int, amount: float) -> Callable[[], float]:
    """Factors around one."""
    rng = random.Random(seed)
    return lambda: 1 + rng.uniform(-amount, amount)


@dataclass(frozen=True)
class Course:
    """What came of some batches: messages a second, and which part of the batches was above the target."""

    rate: float
    late: float


def course(samples: list[BatchSample], target_s: float) -> Course:
    """Of batches one after another."""
    begun_s = samples[0].ended_s
    rate = sum(s.messages for s in samples[1:]) / (samples[-1].ended_s - begun_s)
    return Course(rate, sum(s.latency_s > target_s for s in samples) / len(samples))


@cache
def best(load: Load, target_s: float, in_flight_max: int, amount: float) -> tuple[float, Setting]:
    """The greatest throughput of all settings that stay as they are, and are late no more often than they may.

    Every number in flight, and every size in steps of a fifth. Sizes stop where all batches are late.
    """
    found = (0.0, Setting(0, 0))
    for k in range(1, in_flight_max + 1):
        for n in (int(10 * 1.2**i) for i in range(51)):
            batches = load.batches(AsSet(Limit(n), k), jitter(1, amount))
            for _ in range(2 * k):
                next(batches)
            seen = course([next(batches) for _ in range(SEARCHED_BATCHES)], target_s)
            if seen.late <= LATE_SHARE and seen.rate > found[0]:
                found = (seen.rate, Setting(n, k))
            if seen.late == 1.0:
                break
    return found
