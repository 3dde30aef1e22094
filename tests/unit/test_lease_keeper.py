"""The lease keeper: a live job keeps its lease for as long as it takes, a hanging one loses it and is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest
from support.heartbeats import hearing, published

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.heartbeat.listener import JobSigns
from stormproof.core.heartbeat.task import Heartbeat, ProgressMark, ReportAddress
from stormproof.core.source.memory import MemorySource
from stormproof.trident.driver.leases import PAUSED_S, LeaseKeeper

LEASE = Lease("life/1", 1, 30.0)
TIMEOUT_S = 30.0
START_S = 300.0


class Away(MemorySource):
    """A source whose store may be away."""

    away = False

    def extend(self, lease: Lease) -> None:
        if self.away:
            raise StoreUnavailable("no answer")
        super().extend(lease)


class World:
    """A leased slice, what is heard of its job, and time that passes when told."""

    def __init__(self, heard: JobSigns, clock: ManualClock) -> None:
        self.clock = clock
        self.source = Away("lines", [b"a"], clock=self.clock)
        self.source.subscribe("life", 1)
        assert self.source.open(LEASE, Limit(), 7) is not None
        self.heard = heard
        self.keeper = self.keeper_of(heard)

    def keeper_of(self, heartbeat: JobSigns | None) -> LeaseKeeper:
        return LeaseKeeper(
            self.source,
            LEASE,
            lambda: None,
            TIMEOUT_S,
            start_timeout_s=START_S,
            heartbeat=heartbeat,
            clock=self.clock,
        )

    def looks(self, seconds: int, heartbeat: Heartbeat | None = None) -> int:
        """Look once a second; a heartbeat that is given beats each time. The seconds until the keeper gave the job up."""
        for second in range(seconds):
            self.clock.advance(1.0)
            if heartbeat is not None:
                heartbeat.beat()
                published(heartbeat)
            if not self.keeper.look():
                return second + 1
        return seconds

    def is_mine(self) -> bool:
        """Whether the lease still holds."""
        return self.source.backlog().pending == 1

    def reasons(self) -> tuple[bool, bool, bool]:
        return self.keeper.timed_out, self.keeper.stalled, self.keeper.lapsed


@pytest.fixture
def world() -> Iterator[World]:
    clock = ManualClock()
    with hearing(clock) as heard:
        yield World(heard, clock)


@pytest.fixture
def heartbeat(world: World) -> Iterator[Heartbeat]:
    with Heartbeat(world.heard.place, 0, 0, careful=False) as made:
        yield made


def test_a_live_job_keeps_its_lease_for_as_long_as_it_takes(world: World, heartbeat: Heartbeat) -> None:
    assert world.looks(1_000, heartbeat) == 1_000
    assert world.is_mine()
    assert world.reasons() == (False, False, False)


def test_a_job_that_stands_still_is_given_up_after_the_message_timeout(world: World, heartbeat: Heartbeat) -> None:
    assert world.looks(100, heartbeat) == 100
    assert world.looks(1_000) == TIMEOUT_S
    assert world.reasons() == (True, False, False)


def test_a_keeper_that_does_not_look_lets_a_hanging_job_go_on(world: World, heartbeat: Heartbeat) -> None:
    """The negative control: with a heartbeat that always beats, as if nobody read it, a hang is never found."""
    with Heartbeat(world.heard.place, 0, 1, careful=False) as always:
        assert world.looks(1_000, always) == 1_000


def test_before_the_first_task_runs_only_the_larger_bound_counts(world: World) -> None:
    assert world.looks(1_000) == START_S
    assert world.reasons() == (False, True, False), "no message is to blame"


def test_between_two_stages_nobody_hangs(world: World) -> None:
    with Heartbeat(world.heard.place, 0, 0, careful=False) as first:
        assert world.looks(5, first) == 5
    assert world.looks(200) == 200
    with Heartbeat(world.heard.place, 1, 0, careful=False) as second:
        assert world.looks(5, second) == 5
        assert world.looks(1_000) == TIMEOUT_S
    assert world.keeper.timed_out


def test_a_hang_beside_a_task_that_moves_is_found_once_that_is_done(world: World, heartbeat: Heartbeat) -> None:
    with Heartbeat(world.heard.place, 0, 1, careful=False) as other:
        assert world.looks(500, other) == 500
    assert not heartbeat.careful
    assert world.looks(1_000) <= TIMEOUT_S + 1
    assert world.keeper.timed_out


def test_without_a_heartbeat_the_whole_job_has_the_message_timeout(world: World, heartbeat: Heartbeat) -> None:
    world.keeper = world.keeper_of(None)
    assert world.looks(1_000, heartbeat) == TIMEOUT_S
    assert world.keeper.timed_out


def test_while_the_store_is_away_no_message_is_blamed(world: World, heartbeat: Heartbeat) -> None:
    world.source.away = True
    assert world.looks(100) == 100
    world.source.away = False
    world.source.abort(LEASE)
    assert world.source.open(LEASE, Limit(), 7) is not None
    assert world.looks(int(TIMEOUT_S)) == TIMEOUT_S, "from its return on, the timeout counts again"
    assert world.looks(2) <= 2
    assert world.reasons() == (True, False, False)
    del heartbeat


def test_a_lease_that_is_anothers_is_given_up_without_blame(world: World, heartbeat: Heartbeat) -> None:
    world.source.subscribe("life", 2)
    assert world.looks(1_000, heartbeat) == 10
    assert world.reasons() == (False, False, True)


def test_a_driver_that_stood_still_itself_blames_nobody(world: World, heartbeat: Heartbeat) -> None:
    assert world.looks(3, heartbeat) == 3
    world.clock.advance(max(PAUSED_S, TIMEOUT_S) + 1)
    world.source.abort(LEASE)
    assert world.source.open(LEASE, Limit(), 7) is not None
    assert world.keeper.look()
    assert world.looks(1_000) == TIMEOUT_S
    assert world.keeper.timed_out


class Told:
    """A heartbeat that says what the test says, and needs 5 s to tell silence from a hang."""

    notices_silence_s: float = 5.0
    place: ReportAddress = ReportAddress("", 0, b"", b"")

    def __init__(self) -> None:
        self.now = ProgressMark(0, 2, 2)

    def progress(self) -> ProgressMark:
        return self.now

    def suspects(self) -> tuple[int, ...]:
        return ()


@pytest.fixture
def told(world: World) -> Told:
    heartbeat = Told()
    heard = cast(JobSigns, heartbeat)
    world.keeper = LeaseKeeper(
        world.source, LEASE, lambda: None, TIMEOUT_S, start_timeout_s=START_S, heartbeat=heard, clock=world.clock
    )
    return heartbeat


def test_a_job_whose_tasks_are_silent_is_given_up_without_blame(world: World, told: Told) -> None:
    assert world.looks(5) == 5
    told.now = ProgressMark(0, 2, 2, silent=1)
    assert world.looks(1_000) <= TIMEOUT_S
    assert (world.keeper.silent, *world.reasons()) == (True, False, False, False)


def test_from_the_end_of_a_silence_on_a_hang_is_timed_anew(world: World, told: Told) -> None:
    told.now = ProgressMark(0, 2, 2, silent=2)
    assert world.looks(int(TIMEOUT_S) - 2) == TIMEOUT_S - 2
    told.now = ProgressMark(0, 2, 2)
    assert world.looks(1_000) == TIMEOUT_S, "the message in hand had no time while nobody heard of it"
    assert (world.keeper.silent, *world.reasons()) == (False, True, False, False)


def test_a_silence_that_comes_and_goes_does_not_keep_a_job_that_stands_still(world: World, told: Told) -> None:
    for second in range(int(TIMEOUT_S) + 10):
        told.now = ProgressMark(0, 2, 2, silent=second // 5 % 2)
        world.looks(1)
    assert world.keeper.silent


def test_nobody_is_blamed_before_silence_can_be_told(world: World, told: Told) -> None:
    world.keeper = LeaseKeeper(
        world.source, LEASE, lambda: None, 1.0, heartbeat=cast(JobSigns, told), clock=world.clock
    )
    assert world.looks(1_000) in (told.notices_silence_s, told.notices_silence_s + 1)
    assert world.keeper.timed_out


def test_a_listener_that_is_lost_blames_nobody(world: World) -> None:
    world.heard.lost("its thread has ended")
    assert world.looks(1_000) == START_S
    assert world.keeper.stalled


def test_the_thread_cancels_the_job_that_it_gives_up() -> None:
    source = MemorySource("lines", [b"a"])
    source.subscribe("life", 1)
    assert source.open(LEASE, Limit(), 7) is not None
    cancelled = threading.Event()
    with (
        hearing() as heard,
        Heartbeat(heard.place, 0, 0, careful=False),
        LeaseKeeper(source, LEASE, cancelled.set, 0.02, start_timeout_s=0.02, heartbeat=heard) as keeper,
    ):
        assert cancelled.wait(5)
    assert keeper.timed_out
