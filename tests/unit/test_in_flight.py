"""Batches in flight: they run side by side, commit in txid order, and one that fails takes no other with it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from support.memory_run import World

from stormproof.core.clock import ManualClock, SystemClock
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Job, JobReport
from stormproof.core.errors import Fenced, JobFailed, StoreUnavailable
from stormproof.core.failpoint import armed
from stormproof.core.guarantee import Guarantee
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.protocol import Lease, Limit
from stormproof.trident.in_flight import JobsInTurn, JobsOnThreads, WaitingLeases
from stormproof.trident.statistics import BatchResult

WAIT_S = 20.0
EMPTY = JobReport(0, 0, 0)


def world(folder: Path, messages: int = 12, **more: object) -> World:
    lines = [f"m{i} common".encode() for i in range(messages)]
    return World(lines, folder, in_flight=4, batch_messages=2, clock=SystemClock(), **more)  # type: ignore[arg-type]


class Engine(InlineEngine):
    """Asks before it runs a job, on the job's thread."""

    def __init__(self, before: Callable[[Job], None]) -> None:
        super().__init__()
        self._before = before

    def run(self, job: Job) -> JobReport:
        self._before(job)
        return super().run(job)


def test_batches_commit_in_order_whichever_job_ends_first(tmp_path: Path) -> None:
    ended = {txid: threading.Event() for txid in range(1, 20)}

    class Backwards(InlineEngine):
        """Of txids 1 to 3, the job of the one above ends first."""

        def run(self, job: Job) -> JobReport:
            if job.txid < 4:
                assert ended[job.txid + 1].wait(WAIT_S), "the next batch does not run beside this one"
            report = super().run(job)
            ended[job.txid].set()
            return report

    w, results = world(tmp_path), list[BatchResult]()
    statistics = w.run(engine=Backwards(), jobs=JobsOnThreads(4), on_batch=results.append)
    assert [r.txid for r in results] == [1, 2, 3, 4, 5, 6]
    assert {r.state for r in results} == {"committed"}
    assert statistics.messages == 12
    assert w.counts() == Counter({f"m{i}": 1 for i in range(12)} | {"common": 12})
    assert all("wait" in r.steps_ms for r in results)


def test_no_more_run_than_may_be_in_flight(tmp_path: Path) -> None:
    lock, running, most = threading.Lock(), set[int](), list[int]()

    class Counting(InlineEngine):
        def run(self, job: Job) -> JobReport:
            with lock:
                running.add(job.txid)
                most.append(len(running))
            try:
                return super().run(job)
            finally:
                with lock:
                    running.discard(job.txid)

    world(tmp_path, 40).run(engine=Counting(), jobs=JobsOnThreads(8))
    assert max(most) <= 4


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_ends_decides_nothing(tmp_path: Path, seed: int) -> None:
    w, results = world(tmp_path), list[BatchResult]()
    w.run(jobs=JobsInTurn(Random(seed)), on_batch=results.append)
    assert [r.txid for r in results] == sorted(r.txid for r in results)
    assert w.counts()["common"] == 12


def test_a_batch_whose_messages_all_fail_takes_no_other_with_it(tmp_path: Path) -> None:
    def split(line: str) -> list[str]:
        if line.startswith(("m2 ", "m3 ")):  # txid 2
            raise ValueError(line)
        return line.split()

    attempts: Counter[int] = Counter()

    def count(job: Job) -> None:
        attempts[job.txid] += 1

    w = world(tmp_path, split=split, max_attempts=1)
    statistics = w.run(engine=Engine(count), jobs=JobsOnThreads(4))
    assert statistics.dead_letters == 2
    assert w.counts()["common"] == 10
    assert set(attempts.values()) == {1}, "a job ran again"


def test_a_job_that_dies_is_tried_again_while_the_others_wait_or_go_on(tmp_path: Path) -> None:
    died = set[int]()

    def die_once(job: Job) -> None:
        if job.txid in (1, 3) and job.txid not in died:
            died.add(job.txid)
            raise JobFailed("a worker is gone")

    w, results = world(tmp_path), list[BatchResult]()
    w.run(engine=Engine(die_once), jobs=JobsOnThreads(4), on_batch=results.append)
    assert [r.txid for r in results] == [1, 2, 3, 4, 5, 6]
    assert {r.txid: r.attempts for r in results} == {1: 2, 2: 1, 3: 2, 4: 1, 5: 1, 6: 1}
    assert w.counts()["common"] == 12


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_lost_answer_drops_what_is_in_flight_and_its_messages_come_again(
    tmp_path: Path, guarantee: Guarantee
) -> None:
    w = world(tmp_path)
    with armed("commit.after_sink=raise@2"):
        statistics = w.run(guarantee, jobs=JobsOnThreads(4))
    assert len(statistics.recoveries) == 1
    if guarantee is Guarantee.EXACTLY_ONCE:
        assert statistics.recoveries[0].rolled_forward == (2,)
        assert w.counts() == Counter({f"m{i}": 1 for i in range(12)} | {"common": 12})
    assert min(w.counts()[f"m{i}"] for i in range(12)) >= 1


def test_jobs_of_dropped_batches_are_cancelled_and_gone_before_recovery(tmp_path: Path) -> None:
    started, cancelled = threading.Event(), set[int]()
    hung = threading.Event()

    class Hanging(InlineEngine):
        """Txid 2 hangs until it is cancelled."""

        def run(self, job: Job) -> JobReport:
            if job.txid != 2:
                assert started.wait(WAIT_S)
                return super().run(job)
            started.set()
            assert hung.wait(WAIT_S)
            raise JobFailed("the job was cancelled")

        def cancel(self, key: tuple[str, int, int]) -> None:
            cancelled.add(key[1])
            if key[1] == 2:
                hung.set()

    w = world(tmp_path, 4)
    with armed("prepare.after=raise@1"):
        w.run(engine=Hanging(), jobs=JobsOnThreads(4))
    assert 2 in cancelled
    assert w.counts()["common"] == 4


def test_what_is_in_flight_is_finished_where_the_run_is_told_to_stop(tmp_path: Path) -> None:
    w, results = world(tmp_path, 40), list[BatchResult]()
    statistics = w.run(jobs=JobsOnThreads(4), max_batches=5, on_batch=results.append)
    assert statistics.stopped == "limit"
    assert [r.txid for r in results] == [1, 2, 3, 4, 5]
    assert w.source.backlog().pending == 0


def test_an_error_that_ends_the_run_leaves_no_thread_behind(tmp_path: Path) -> None:
    def broken(job: Job) -> None:
        if job.txid == 2:
            raise ZeroDivisionError

    jobs = JobsOnThreads(4)
    with pytest.raises(ZeroDivisionError):
        world(tmp_path).run(engine=Engine(broken), jobs=jobs)
    assert jobs.running == 0


def test_a_job_that_raises_is_raised_by_who_waits() -> None:
    def work() -> JobReport:
        raise LookupError("no")

    jobs = JobsOnThreads(1)
    jobs.start(7, work)
    ended = jobs.wait(WAIT_S)
    assert ended is not None
    assert ended.txid == 7
    assert isinstance(ended.error, LookupError)
    assert jobs.wait(None) is None
    jobs.close()


class Leases(MemorySource):
    """A source that says how an extension goes, and tells of each."""

    def __init__(self) -> None:
        super().__init__("lines", [b"a", b"b"])
        self.extended: Counter[str] = Counter()
        self.seen = threading.Semaphore(0)
        self.raises: dict[str, Exception] = {}

    def extend(self, lease: Lease) -> None:
        self.extended[lease.owner] += 1
        self.seen.release()
        if lease.owner in self.raises:
            raise self.raises[lease.owner]


def test_waiting_leases_are_extended_until_they_are_let_go() -> None:
    source = Leases()
    source.raises = {"b": Fenced("lapsed"), "c": StoreUnavailable("away")}
    leases = WaitingLeases(source)
    for owner in "abc":
        leases.keep(Lease(owner, 1, 0.003))
    while min(source.extended[owner] for owner in "ac") < 3:
        assert source.seen.acquire(timeout=WAIT_S)
    assert source.extended["b"] == 1, "a lease that is lost is let go"
    for owner in "ac":
        leases.let_go(Lease(owner, 1))
    before = dict(source.extended)
    leases.close()
    assert dict(source.extended) == before


def test_a_lease_that_lapses_while_it_waits_is_found_out_by_prepare(tmp_path: Path) -> None:
    """Jobs in turn keep no waiting lease: with a clock that jumps, txid 1's lapses before its commit."""
    clock = ManualClock()
    w = World([b"a x", b"b x"], tmp_path, in_flight=2, batch_messages=1, clock=clock)

    def late(job: Job) -> None:
        if job.txid == 1:
            clock.advance(100)

    w.run(engine=Engine(late))
    assert w.counts() == Counter({"x": 2, "a": 1, "b": 1})


def test_the_limit_of_a_batch_holds_for_each(tmp_path: Path) -> None:
    w, results = world(tmp_path), list[BatchResult]()
    assert Limit(w.batch_messages).messages == 2
    w.run(jobs=JobsOnThreads(4), on_batch=results.append)
    assert max(r.messages for r in results) == 2
