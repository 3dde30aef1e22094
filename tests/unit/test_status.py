"""`status` over memory: how batches are tuned, what held the driver up, and whether a run has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.memory_run import World

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import watched
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.task.job import Job
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.stores.memory import FaultPoint
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.source import PendingEvidence, evidence_of
from stormproof.trident.audit.status import DriverState, Pace, TopologyStatus, status
from stormproof.trident.driver.jobs import JobsInTurn
from stormproof.trident.terms.observers import Figures


def status_of(world: World) -> TopologyStatus:
    def source(ledger: LedgerSnapshot, topology: TopologyRow) -> PendingEvidence:
        return evidence_of(world.source)

    (found,) = status(AuditLedger(world.ledger_engine), source=source).topologies
    return found


class Slow(InlineEngine):
    """Each job takes so many seconds of a clock that moves by itself."""

    def __init__(self, clock: ManualClock, job_s: float) -> None:
        super().__init__(clock=clock)
        self._manual = clock
        self._job_s = job_s

    def run(self, job: Job) -> JobReport:
        report = super().run(job)
        self._manual.advance(self._job_s)
        return report


def commits_in(clock: ManualClock, commit_s: float) -> Callable[[str], None]:
    def watcher(name: str) -> None:
        if name == "commit.before_sink":
            clock.advance(commit_s)

    return watcher


def run(folder: Path, job_s: float, commit_s: float, in_flight: int = 1, **more: Any) -> World:
    clock = ManualClock()
    world = World([b"a x"] * 12, folder, batch_messages=2, in_flight=in_flight, clock=clock)
    with watched(commits_in(clock, commit_s)):
        world.run(engine=Slow(clock, job_s), jobs=JobsInTurn(), **more)
    return world


def pace_of(world: World) -> Pace:
    pace = status_of(world).pace
    assert pace is not None
    return pace


@pytest.mark.parametrize(("job_s", "commit_s", "part"), [(1, 9, 0.9), (9, 1, 0.1), (5, 0, 0.0)])
def test_back_pressure_is_the_time_in_which_commits_kept_batches_from_being_opened(
    tmp_path: Path, job_s: float, commit_s: float, part: float
) -> None:
    pace = pace_of(run(tmp_path, job_s, commit_s))
    assert pace.back_pressure == pytest.approx(part)
    assert pace.steps_ms["held_up"] == pytest.approx(commit_s * 1000)


def test_a_commit_beside_which_there_is_room_holds_nothing_up(tmp_path: Path) -> None:
    """Four may be in flight, and the source has two."""
    clock = ManualClock()
    world = World([b"a x"] * 4, tmp_path, batch_messages=2, in_flight=4, clock=clock)
    with watched(commits_in(clock, 9)):
        world.run(engine=Slow(clock, 1), jobs=JobsInTurn())
    pace = pace_of(world)
    assert pace.steps_ms["commit"] == pytest.approx(9_000)
    assert pace.back_pressure == 0


def test_limits_are_shown_where_nothing_is_tuned(tmp_path: Path) -> None:
    found = status_of(run(tmp_path, 1, 1, in_flight=3))
    assert found.tuning == Figures(2, 64 * 2**20, 3, 3)
    assert found.in_flight == 0


def test_the_target_and_the_last_step_are_shown_where_it_is_tuned_and_every_step_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stormproof.tuning"):
        world = run(tmp_path, 1, 9, in_flight=2, latency_target_s=3.0)
    tuning = status_of(world).tuning
    assert tuning is not None
    assert (tuning.latency_target_s, tuning.in_flight_max) == (3.0, 2)
    assert tuning.floor_s == pytest.approx(10.0)
    assert tuning.step
    assert "below reach" in tuning.why
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "below reach" in told.getMessage()


def test_batches_in_flight_are_counted_while_their_driver_lives(tmp_path: Path) -> None:
    seen = list[TopologyStatus]()
    clock = ManualClock()
    world = World([b"a x"] * 8, tmp_path, batch_messages=2, in_flight=3, clock=clock)

    def look(name: str) -> None:
        if name == "commit.before_sink":
            seen.append(status_of(world))

    with watched(look):
        world.run(engine=Slow(clock, 1), jobs=JobsInTurn())
    assert [one.in_flight for one in seen] == [3, 3, 2, 1]
    assert {one.driver for one in seen} == {DriverState.RUNNING}


class Died(BaseException):
    """The driver's process ends here."""


@pytest.mark.parametrize("error", [SinkRefused("no room"), RuntimeError("a bug")])
def test_a_run_that_raised_has_ended(tmp_path: Path, error: Exception) -> None:
    world = World([b"a x"], tmp_path)
    world.sinks[0].store.fail(FaultPoint.BEFORE, error)
    with pytest.raises(type(error)):
        world.run()
    assert status_of(world).driver is DriverState.STOPPED


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, DriverState.STOPPED), (Died, DriverState.RUNNING)])
def test_an_interrupted_run_has_ended_and_one_that_died_tells_nobody(
    tmp_path: Path, error: type[BaseException], state: DriverState
) -> None:
    def watcher(name: str) -> None:
        if name == "prepare.before":
            raise error

    world = World([b"a x"], tmp_path)
    with pytest.raises(error), watched(watcher):
        world.run()
    assert status_of(world).driver is state
