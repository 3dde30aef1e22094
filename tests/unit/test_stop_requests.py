"""A running driver that is paused, resumed, drained or stopped, over memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.memory_run import World

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit
from stormproof.trident.driver.control_line import StopRequests
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.ledger.control import Doing, Ending
from stormproof.trident.terms.observers import BatchResult

PAYLOADS = [f"m{number}".encode() for number in range(8)]


class Acting(ManualClock):
    """A clock whose sleeper is interrupted by what others do meanwhile, once each."""

    def __init__(self, *acts: Callable[[], None]) -> None:
        super().__init__()
        self.acts = list(acts)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.acts:
            self.acts.pop(0)()


@pytest.fixture
def coordinators(monkeypatch: pytest.MonkeyPatch) -> list[Coordinator]:
    """Every coordinator that runs in the test, the newest last."""
    found: list[Coordinator] = []
    run = Coordinator.run

    def noted(self: Coordinator) -> object:
        found.append(self)
        return run(self)

    monkeypatch.setattr(Coordinator, "run", noted)
    return found


@pytest.mark.parametrize("guarantee", Guarantee)
def test_a_paused_driver_opens_nothing_until_it_is_resumed(
    guarantee: Guarantee, tmp_path: Path, coordinators: list[Coordinator]
) -> None:
    seen: list[tuple[str, int, int]] = []

    def look() -> None:
        stop_requests = coordinators[-1].stop_requests
        seen.append((stop_requests.doing(0), world.source.backlog().ready, coordinators[-1].in_flight))

    def resume() -> None:
        look()
        coordinators[-1].stop_requests.pause(False)

    world = World(PAYLOADS, tmp_path, clock=Acting(look, look, resume))

    def pause(result: BatchResult) -> None:
        if result.txid == 1:
            coordinators[-1].stop_requests.pause(True)

    statistics = world.run(guarantee, on_batch=pause)
    assert seen == [(Doing.PAUSED, 4, 0)] * 3
    assert (statistics.stopped, statistics.batches, sum(world.counts().values())) == ("idle", 2, 8)


def test_a_drained_driver_resolves_what_was_opened_and_takes_nothing_new(
    tmp_path: Path, coordinators: list[Coordinator]
) -> None:
    failed = set[str]()

    def once_failing(line: str) -> list[str]:
        if line == "m1" and line not in failed:
            failed.add(line)
            raise ValueError("not yet")
        return [line]

    world = World(PAYLOADS, tmp_path, split=once_failing, max_attempts=3)
    statistics = world.run(on_batch=lambda _: coordinators[-1].stop_requests.drain())
    assert statistics.stopped == "drain"
    assert sorted(world.counts()) == ["m0", "m1", "m2", "m3"]
    backlog = world.source.backlog()
    assert (backlog.ready, backlog.pending, backlog.waiting) == (4, 0, 0)
    assert world.run().stopped == "idle"
    assert sorted(world.counts()) == sorted(payload.decode() for payload in PAYLOADS)


def test_a_stopped_driver_ends_after_the_batches_in_flight(tmp_path: Path, coordinators: list[Coordinator]) -> None:
    world = World(PAYLOADS, tmp_path, in_flight=2, batch_messages=2)
    statistics = world.run(on_batch=lambda _: coordinators[-1].stop_requests.stop("stop"))
    assert statistics.stopped == "stop"
    assert 1 <= statistics.batches < 4
    assert sum(world.counts().values()) == 2 * statistics.batches
    assert world.source.backlog().pending == 0


def test_a_stop_goes_before_a_drain_and_is_not_taken_back() -> None:
    woken: list[None] = []
    stop_requests = StopRequests(lambda: woken.append(None))
    assert stop_requests.doing(1) == Doing.RUNNING
    stop_requests.follow(paused=False, ending=None)
    assert not woken
    stop_requests.follow(paused=True, ending=None)
    assert (stop_requests.doing(1), stop_requests.doing(0), len(woken)) == (Doing.PAUSING, Doing.PAUSED, 1)
    stop_requests.follow(paused=False, ending=Ending.DRAIN)
    assert (stop_requests.doing(1), stop_requests.drains, stop_requests.stops) == (Doing.DRAINING, True, False)
    stop_requests.follow(paused=False, ending=Ending.STOP)
    stop_requests.stop("signal")
    stop_requests.follow(paused=False, ending=None)
    assert (stop_requests.doing(0), stop_requests.stopped_by) == (Doing.STOPPING, "stop")


def test_a_limit_without_fresh_messages_opens_none(tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path)
    world.source.subscribe("life", 1)
    assert world.source.open(Lease("a", 1), Limit(4, fresh=False), 1) is None
    assert world.source.open(Lease("a", 1), Limit(4), 1) is not None
    world.source.abort(Lease("a", 1))
    assert world.source.open(Lease("b", 1), Limit(2, fresh=False), 1) is not None, "a returned slice is not fresh"
