"""The tuner against a model of a pipeline: near the best point that holds the latency, and never past its bounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.memory_run import World

from stormproof.core.clock import ManualClock
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Job, JobReport
from stormproof.core.failpoint import watched
from stormproof.core.source.protocol import Limit
from stormproof.trident.statistics import BatchResult
from stormproof.trident.tuning import AsSet, LatencyTuner, Sample, Setting

MOST = Limit(100_000, 2**26)
SEED = 7


@dataclass(frozen=True)
class Pipeline:
    """Jobs take `a + b n` seconds and share `cores`; commits take `c + d n`, one at a time."""

    a: float
    b: float
    c: float
    d: float
    cores: int = 2

    def rate(self, at: Setting) -> tuple[float, float]:
        """Messages a second and seconds from open to committed, in a steady state."""
        run, commit = self.a + self.b * at.messages, self.c + self.d * at.messages
        period = max(commit, run / min(at.in_flight, self.cores), (run + commit) / at.in_flight)
        return at.messages / period, period * at.in_flight

    def batches(self, tuner: LatencyTuner, number: int, noise: Callable[[], float]) -> Iterator[tuple[Setting, Sample]]:
        """Batches one after another."""
        now = 0.0
        for _ in range(number):
            at = tuner.setting
            rate, latency = self.rate(at)
            factor = noise()
            now += at.messages / rate * factor
            waited = max(0.0, latency - (self.a + self.b * at.messages))
            yield at, Sample(at.messages, latency * factor, now, full=True, waited_s=waited)

    def best(self, target_s: float, in_flight_max: int) -> float:
        """The greatest rate within the target."""
        points = (Setting(int(10 * 1.2**i), k) for i in range(52) for k in range(1, in_flight_max + 1))
        fitting = [rate for p in points if p.messages <= MOST.messages for rate, s in [self.rate(p)] if s <= target_s]
        return max(fitting)


PIPELINES = [
    Pipeline(0.2, 1e-5, 0.05, 1e-6),
    Pipeline(0.2, 1e-6, 0.2, 1e-6),
    Pipeline(0.05, 1e-4, 0.05, 1e-5, cores=4),
    Pipeline(0.5, 1e-5, 0.02, 2e-5),
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("target_s", [1.0, 5.0])
@pytest.mark.parametrize("jitter", [0.0, 0.03])
def test_it_comes_near_the_best_within_the_latency(pipeline: Pipeline, target_s: float, jitter: float) -> None:
    rng = random.Random(SEED)
    tuner = LatencyTuner(target_s, MOST, 4)
    rates, late = list[float](), 0
    for number, (at, sample) in enumerate(pipeline.batches(tuner, 3_000, lambda: 1 + rng.uniform(-jitter, jitter))):
        tuner.learn(sample)
        if number >= 1_000:
            rates.append(pipeline.rate(at)[0])
            late += sample.latency_s > target_s
    assert late / len(rates) <= 0.1
    assert sum(rates) / len(rates) >= 0.7 * pipeline.best(target_s, 4)


def test_a_sink_that_gets_slower_makes_batches_smaller_or_fewer() -> None:
    tuner = LatencyTuner(1.0, MOST, 4)
    for _, sample in PIPELINES[0].batches(tuner, 500, lambda: 1.0):
        tuner.learn(sample)
    before = tuner.setting
    slow = Pipeline(0.2, 1e-5, 0.3, 2e-4)
    late = list[bool]()
    for _, sample in slow.batches(tuner, 200, lambda: 1.0):
        tuner.learn(sample)
        late.append(sample.latency_s > 1.0)
    after = tuner.setting
    assert after.messages * after.in_flight < before.messages * before.in_flight
    assert not any(late[50:150])


def test_a_source_with_little_in_it_teaches_nothing() -> None:
    tuner = LatencyTuner(1.0, MOST, 4)
    before = tuner.setting
    for number in range(500):
        tuner.learn(Sample(3, 0.1, number * 1.0, full=False))
    assert tuner.setting == before


def test_a_latency_above_the_target_counts_where_batches_are_not_full_too() -> None:
    tuner = LatencyTuner(1.0, MOST, 1)
    before = tuner.setting
    for number in range(50):
        tuner.learn(Sample(900, 2.0, number * 2.0, full=False))
    assert tuner.setting.messages < before.messages


@pytest.mark.parametrize("most", [1, 7, 500])
def test_it_never_passes_its_bounds(most: int) -> None:
    rng = random.Random(SEED)
    tuner = LatencyTuner(1.0, Limit(most, 1_000), 3)
    for number in range(2_000):
        assert 1 <= tuner.limit.messages <= most
        assert 1 <= tuner.in_flight <= 3
        assert tuner.limit.bytes == 1_000
        tuner.learn(
            Sample(rng.randint(1, most), rng.uniform(0, 3), number, full=rng.random() < 0.9, waited_s=rng.random())
        )


def test_what_is_set_stays() -> None:
    tuner = AsSet(Limit(5, 6), 2)
    tuner.learn(Sample(1, 100.0, 1.0, full=True))
    assert (tuner.limit, tuner.in_flight) == (Limit(5, 6), 2)


def tuned(folder: Path, messages: int, commit_s: Callable[[int], float], in_flight: int) -> list[BatchResult]:
    """Real batches, of 4,000 messages at most, tuned for a latency of one second. The clock moves as jobs and commits do."""
    clock, results, sizes = ManualClock(), list[BatchResult](), dict[int, int]()
    world = World([b"x"] * messages, folder, in_flight=in_flight, batch_messages=4_000, clock=clock)

    class Engine(InlineEngine):
        def run(self, job: Job) -> JobReport:
            report = super().run(job)
            sizes[job.txid] = report.read_messages
            clock.advance(0.05 + 1e-4 * report.read_messages)
            return report

    def commit(name: str) -> None:
        if name == "commit.before_sink":
            clock.advance(commit_s(sizes.pop(min(sizes))))

    with watched(commit):
        world.run(engine=Engine(clock=clock), latency_target_s=1.0, on_batch=results.append)
    assert world.counts()["x"] == messages
    assert max(r.messages for r in results) <= 4_000
    return results


@pytest.mark.parametrize("in_flight", [1, 3])
def test_real_batches_of_a_slow_sink_get_smaller_until_they_hold_the_latency(tmp_path: Path, in_flight: int) -> None:
    results = tuned(tmp_path, 8_000, lambda messages: 0.05 + 2e-3 * messages, in_flight)
    latencies = [r.steps_ms["total"] for r in results]
    assert min(latencies[:5]) > 2_000
    assert max(latencies[7:12]) < 1_000
    assert 300 <= results[10].messages <= 500


def test_real_batches_of_a_fast_sink_get_larger(tmp_path: Path) -> None:
    results = tuned(tmp_path, 30_000, lambda messages: 0.05 + 2e-5 * messages, 1)
    assert results[-2].messages > 2_000
    assert max(r.steps_ms["total"] for r in results) < 1_000
