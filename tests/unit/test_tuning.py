"""The tuner against a model of the coordinator: near the best setting that holds the latency, and never stuck at a worse.

The goals: at least `GOOD` of the throughput of the best setting that stays as it is, found by trying all of them in the
model, and at most one batch in ten late, trials among them. A control breaks the tuner, and the goals are missed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
from support.memory_run import World
from support.pipeline import LATE_SHARE, MOST, Course, Load, best, course, jitter

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.failpoint import watched
from stormproof.core.contract.source import Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.task.job import Job
from stormproof.core.tracking.verdict import JobReport
from stormproof.trident.driver import tuning
from stormproof.trident.driver.tuning import KNEE, AsSet, BatchSample, LatencyTuner, Setting, Step, Tuner, in_flight_max
from stormproof.trident.terms.observers import BatchResult, Figures

GOOD = 0.8
IN_FLIGHT_MAX = 4
BATCHES = 1_500
LEARNING = 500
ADAPTING = 150
"""Batches after a change of the load that may be late: it is noticed by them."""


class Pipeline:
    """A tuner, and the model that it runs in: time goes on from load to load."""

    def __init__(self, target_s: float, amount: float, seed: int = 1, tuner: Tuner | None = None) -> None:
        self.target_s = target_s
        self.amount = amount
        self.tuner = tuner or LatencyTuner(target_s, MOST, IN_FLIGHT_MAX)
        self.steps = list[Step]()
        self._noise = jitter(seed, amount)
        self._now_s = 0.0

    def run(self, load: Load, batches: int = BATCHES, learning: int = LEARNING) -> Course:
        """What came of it, the first batches left out."""
        samples = list[BatchSample]()
        for sample in islice(load.batches(self.tuner, self._noise, self._now_s), batches):
            step = self.tuner.learn(sample)
            self.steps += [] if step is None else [step]
            samples.append(sample)
        self._now_s = samples[-1].ended_s
        return course(samples[learning:], self.target_s)

    def assert_good(self, load: Load, batches: int = BATCHES, learning: int = LEARNING) -> None:
        """It reaches the goals."""
        found, (rate, at) = self.run(load, batches, learning), best(load, self.target_s, IN_FLIGHT_MAX, self.amount)
        assert found.late <= LATE_SHARE, f"{found.late:.0%} are late at {self.tuner.figures}"
        assert found.rate >= GOOD * rate, f"{found.rate:.0f} of {rate:.0f} messages/s, which {at} has"


SHORT_COMMIT = Load(0.2, 1e-5, 0.05, 1e-6)
LONG_COMMIT = Load(0.2, 1e-6, 0.2, 1e-6)
FOUR_CORES = Load(0.05, 1e-4, 0.05, 1e-5, cores=4)
GREAT_FIXED_COST = Load(0.5, 1e-5, 0.02, 2e-5)
ONE_CORE = Load(0.2, 1e-6, 0.3, 1e-6, cores=1)
COMMIT_BOUND = Load(0.01, 1e-5, 0.3, 1e-5)
SUPERLINEAR = Load(0.1, 1e-6, 0.02, 1e-6, q=1e-9)
LOADS = [SHORT_COMMIT, LONG_COMMIT, FOUR_CORES, GREAT_FIXED_COST, ONE_CORE, COMMIT_BOUND]


@pytest.mark.parametrize("load", [*LOADS, SUPERLINEAR], ids=str)
@pytest.mark.parametrize("amount", [0.0, 0.1, 0.4], ids=lambda amount: f"jitter {amount}")
def test_it_comes_near_the_best_within_the_latency(load: Load, amount: float) -> None:
    Pipeline(1.0, amount).assert_good(load)


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_it_uses_a_generous_latency(load: Load) -> None:
    Pipeline(5.0, 0.4).assert_good(load)


@pytest.mark.parametrize("amount", [0.0, 0.1], ids=lambda amount: f"jitter {amount}")
def test_a_fixed_cost_that_grows_where_jobs_share_a_core_costs_a_batch_in_flight(amount: float) -> None:
    """Two jobs of half a second on one core take a second, however small they are."""
    pipeline = Pipeline(1.0, amount)
    pipeline.assert_good(ONE_CORE)
    assert pipeline.tuner.in_flight == 2
    pipeline.assert_good(replace(ONE_CORE, a=0.5), learning=ADAPTING)
    assert pipeline.tuner.in_flight == 1
    assert pipeline.tuner.limit.messages > 50_000
    pipeline.assert_good(ONE_CORE, learning=LEARNING)


@pytest.mark.parametrize("amount", [0.0, 0.4], ids=lambda amount: f"jitter {amount}")
@pytest.mark.parametrize(
    "other",
    [
        replace(SHORT_COMMIT, c=0.3, d=2e-4),
        replace(SHORT_COMMIT, a=0.35),
        replace(SHORT_COMMIT, b=1e-4),
        replace(SHORT_COMMIT, b=1e-6),
    ],
    ids=["slow sink", "greater fixed cost", "slow functions", "fast functions"],
)
def test_a_load_that_changes_and_comes_back_is_followed(other: Load, amount: float) -> None:
    pipeline = Pipeline(1.0, amount)
    for load in (SHORT_COMMIT, other, SHORT_COMMIT):
        pipeline.assert_good(load, learning=LEARNING)


@pytest.mark.parametrize("amount", [0.0, 0.4], ids=lambda amount: f"jitter {amount}")
def test_a_target_below_reach_is_said_and_left_behind_when_the_load_comes_back(amount: float) -> None:
    slow, pipeline = replace(SHORT_COMMIT, a=3.0), Pipeline(1.0, amount)
    pipeline.assert_good(SHORT_COMMIT)
    seen = len(pipeline.steps)
    found = pipeline.run(slow)
    floor_s = pipeline.tuner.figures.floor_s or 0.0
    assert floor_s == pytest.approx(3.05 * (1 + 0.7 * amount), rel=0.05 + amount / 2)
    assert pipeline.tuner.in_flight == 1
    one_at_a_time, _ = best(slow, KNEE * floor_s, 1, amount)
    assert found.rate >= GOOD * one_at_a_time
    below = [step for step in pipeline.steps[seen:] if step.below_reach]
    assert len(below) == 1, "it is said once"
    assert "below reach" in below[0].why
    pipeline.assert_good(SHORT_COMMIT, learning=LEARNING)
    assert pipeline.tuner.figures.floor_s is None


def test_a_target_that_was_never_within_reach_gets_the_throughput_of_batches_at_the_knee() -> None:
    load, pipeline = Load(0.1, 1e-4, 0.1, 1e-5), Pipeline(0.01, 0.1)
    found = pipeline.run(load)
    at_the_knee, _ = best(load, KNEE * 0.2 * 1.05, 1, 0.1)
    assert found.rate >= GOOD * at_the_knee
    assert pipeline.tuner.in_flight == 1


class Latches(LatencyTuner):
    """Gives no batch in flight up, and asks of nothing whether it is within reach."""

    def _is_futile(self, seen: object) -> bool:
        return False


class Believes(LatencyTuner):
    """Takes the mean for what nine in ten keep."""

    def _look(self) -> tuning._Window:  # pyright: ignore[reportPrivateUsage]
        seen = super()._look()
        mean_s = sum(sample.latency_s for sample, _ in self._window) / len(self._window)
        return replace(seen, high_s=mean_s, late=0 if mean_s <= self._bound_s else seen.late)


class StaysAlone(LatencyTuner):
    """Never tries more in flight."""

    def __init__(self, target_s: float, most: Limit, in_flight_max: int) -> None:
        super().__init__(target_s, most, min(1, in_flight_max))


@pytest.mark.parametrize(
    ("broken", "amount", "loads"),
    [
        (Latches, 0.0, [ONE_CORE, replace(ONE_CORE, a=0.6)]),
        (Believes, 0.4, [SHORT_COMMIT]),
        (StaysAlone, 0.0, [LONG_COMMIT]),
    ],
)
def test_control_a_broken_tuner_misses_the_goals(broken: type[LatencyTuner], amount: float, loads: list[Load]) -> None:
    *before, last = loads
    pipeline = Pipeline(1.0, amount, tuner=broken(1.0, MOST, IN_FLIGHT_MAX))
    for load in before:
        pipeline.assert_good(load)
    with pytest.raises(AssertionError, match=r"are late|messages/s, which"):
        pipeline.assert_good(last)
    sound = Pipeline(1.0, amount)
    for load in loads:
        sound.assert_good(load)


def test_every_step_says_why() -> None:
    pipeline = Pipeline(1.0, 0.1)
    pipeline.run(LONG_COMMIT, 300, learning=0)
    assert len(pipeline.steps) > 5
    assert all(step.why for step in pipeline.steps)
    figures = pipeline.tuner.figures
    assert (figures.step, figures.why) == (str(pipeline.steps[-1]), pipeline.steps[-1].why)
    assert any("tries more, smaller batches in flight" in step.why for step in pipeline.steps)


def test_a_source_with_little_in_it_teaches_nothing() -> None:
    tuner = LatencyTuner(1.0, MOST, 4)
    before = tuner.figures
    for number in range(500):
        assert tuner.learn(BatchSample(3, 0.1, number * 1.0, full=False, setting=setting_of(tuner))) is None
    assert tuner.figures == before


def test_a_latency_above_the_target_counts_where_batches_are_not_full_too() -> None:
    tuner = LatencyTuner(1.0, MOST, 1)
    for number in range(50):
        tuner.learn(
            BatchSample(min(900, tuner.limit.messages), 2.0, number * 2.0, full=False, setting=setting_of(tuner))
        )
    assert tuner.limit.messages < 900


def test_a_late_batch_of_a_quiet_source_is_outweighed_by_one_as_large_in_time() -> None:
    """Three hiccups within days are no reason to make batches smaller."""
    tuner = LatencyTuner(1.0, MOST, 4)
    before = tuner.figures
    for number in range(1_000):
        tuner.learn(
            BatchSample(20, 3.0 if number % 200 == 0 else 0.1, number * 10.0, full=False, setting=setting_of(tuner))
        )
    assert tuner.figures == before


def test_control_late_batches_that_are_larger_than_those_in_time_count() -> None:
    tuner = LatencyTuner(1.0, MOST, 4)
    before = tuner.limit.messages
    for number in range(20):
        messages, latency_s = (20, 0.1) if number % 2 else (min(900, tuner.limit.messages), 3.0)
        tuner.learn(BatchSample(messages, latency_s, number * 10.0, full=False, setting=setting_of(tuner)))
    assert tuner.limit.messages < before


def test_where_the_load_is_much_lighter_the_target_is_tried_before_larger_batches() -> None:
    tuner, now_s = LatencyTuner(1.0, Limit(10_000_000, 2**40), 1), 0.0
    steps: list[Step] = []

    def until(fixed_s: float, done: Callable[[], bool]) -> None:
        nonlocal now_s
        for _ in range(1_000):
            latency_s = fixed_s + tuner.limit.messages * 1e-5
            now_s += latency_s
            step = tuner.learn(
                BatchSample(tuner.limit.messages, latency_s, now_s, full=True, setting=setting_of(tuner))
            )
            steps.extend([] if step is None else [step])
            if done():
                return
        pytest.fail("it did not come to that")

    until(4.0, lambda: tuner.figures.floor_s is not None)
    largest = tuner.limit.messages
    steps.clear()
    until(0.01, lambda: tuner.figures.floor_s is None)
    assert max(step.after.messages for step in steps) <= largest


def test_what_was_opened_under_another_setting_says_nothing() -> None:
    tuner = LatencyTuner(1.0, MOST, 1)
    before = tuner.figures
    for number in range(50):
        tuner.learn(BatchSample(900, 2.0, number * 2.0, full=True, setting=Setting(900, 1)))
    assert tuner.figures == before


def setting_of(tuner: Tuner) -> Setting:
    return Setting(tuner.limit.messages, tuner.in_flight)


@pytest.mark.parametrize("most", [1, 7, 500])
@pytest.mark.parametrize("seed", range(3))
def test_it_never_passes_its_bounds(most: int, seed: int) -> None:
    rng = random.Random(seed)
    tuner = LatencyTuner(1.0, Limit(most, 1_000), 3)
    for number in range(2_000):
        assert 1 <= tuner.limit.messages <= most
        assert 1 <= tuner.in_flight <= 3
        assert tuner.limit.bytes == 1_000
        latency_s = rng.uniform(0, 3) * (1 + number // 500 % 2)
        full = rng.random() < 0.9
        tuner.learn(BatchSample(rng.randint(1, tuner.limit.messages), latency_s, number, full, setting_of(tuner)))


def test_batches_that_may_not_be_smaller_are_tried_side_by_side_all_the_same() -> None:
    tuner = LatencyTuner(1.0, Limit(5), IN_FLIGHT_MAX)
    Pipeline(1.0, 0.0, tuner=tuner).run(LONG_COMMIT, 400, learning=0)
    assert setting_of(tuner) == Setting(5, 2)


def test_what_is_set_stays() -> None:
    tuner = AsSet(Limit(5, 6), 2)
    assert tuner.learn(BatchSample(1, 100.0, 1.0, full=True, setting=Setting(5, 2))) is None
    assert (tuner.limit, tuner.in_flight) == (Limit(5, 6), 2)
    assert tuner.figures == Figures(5, 6, 2, 2)


def test_a_target_alone_lets_several_be_in_flight_and_a_choice_wins() -> None:
    assert [in_flight_max(None, None), in_flight_max(None, 1.0)] == [1, 4]
    assert [in_flight_max(1, 1.0), in_flight_max(8, None)] == [1, 8]


def test_figures_survive_the_ledger() -> None:
    plain, tuned = Figures(1, 2, 3, 4), Figures(1, 2, 3, 4, 0.5, 0.7, "a -> b", "since")
    assert [Figures.of_json(asdict(figures)) for figures in (plain, tuned)] == [plain, tuned]
    assert Figures.of_json({}) is None
    assert Figures.of_json({**asdict(tuned), "messages": "many"}) is None


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
        statistics = world.run(engine=Engine(clock=clock), latency_target_s=1.0, on_batch=results.append)
    assert world.counts()["x"] == messages
    assert max(r.messages for r in results) <= 4_000
    assert statistics.tuning is not None
    assert statistics.tuning.in_flight_max == in_flight
    return results


@pytest.mark.parametrize("in_flight", [1, 3])
def test_real_batches_of_a_slow_sink_get_smaller_until_they_hold_the_latency(tmp_path: Path, in_flight: int) -> None:
    results = tuned(tmp_path, 8_000, lambda messages: 0.05 + 2e-3 * messages, in_flight)
    latencies = [r.steps_ms["total"] for r in results]
    assert min(latencies[:3]) > 2_000
    assert max(latencies[7:12]) < 1_000
    assert 300 <= results[10].messages <= 500


def test_real_batches_of_a_fast_sink_get_larger(tmp_path: Path) -> None:
    results = tuned(tmp_path, 30_000, lambda messages: 0.05 + 2e-5 * messages, 1)
    assert results[-2].messages > 2_000
    assert max(r.steps_ms["total"] for r in results) < 1_000
