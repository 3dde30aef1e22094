"""Batches in flight: they run side by side, commit in txid order, and one that fails takes no other with it."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from shutil import copytree, rmtree

import numpy as np
import pyarrow as pa
import pytest
from support.heartbeats import hearing, note, published
from support.memory_run import World

from stormproof.core.base.arrow import pc
from stormproof.core.base.clock import ManualClock, SystemClock
from stormproof.core.base.errors import (
    BatchUnverified,
    Fenced,
    JobFailed,
    SinkRefused,
    StoreUnavailable,
    TransientError,
)
from stormproof.core.base.failpoint import armed, watched
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.plan import compile_topology
from stormproof.core.heartbeat.task import Heartbeat
from stormproof.core.pending.memory import MemorySliceReader
from stormproof.core.source.memory import MemorySource
from stormproof.core.task.job import Job, WireRow
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.contract.protocol import CommitResult, PreparedTransaction
from stormproof.sinks.stores.memory import FaultPoint, MemorySession
from stormproof.trident.driver.batch_records import SinkAnswers
from stormproof.trident.driver.jobs import JobResult, JobsInTurn, JobsOnThreads, Work
from stormproof.trident.driver.leases import LastMove, LeaseKeeper, WaitingLeases
from stormproof.trident.driver.opening import SinkSessions, attached
from stormproof.trident.terms.observers import BatchResult

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


class HeldUp:
    """The first commit begins, and goes on once something happened beside it. Failpoints are watched with it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.beside = threading.Event()
        self.passed: list[str] = []

    def __call__(self, name: str) -> None:
        self.passed.append(name)
        if name == "commit.before_sink" and not self.begun.is_set():
            self.begun.set()
            assert self.beside.wait(WAIT_S), "the driver waits for the sink"

    def die(self) -> None:
        """A job that dies beside the commit."""
        assert self.begun.wait(WAIT_S)
        raise JobFailed("a worker is gone")


def test_a_tuner_has_more_run_side_by_side_and_fewer_while_they_run(tmp_path: Path) -> None:
    """The clock stands still, so every latency is 0: it climbs as far as it may."""
    most, results = list[int](), list[BatchResult]()
    w = World([b"x"] * 400, tmp_path, in_flight=4, batch_messages=2, clock=ManualClock())

    def look(name: str) -> None:
        if name == "open.after":
            most.append(w.source.backlog().pending // 2)

    with watched(look):
        statistics = w.run(jobs=JobsOnThreads(4), on_batch=results.append, latency_target_s=1.0)
    assert w.counts() == Counter({"x": 400})
    assert [r.txid for r in results] == sorted(r.txid for r in results)
    assert most[0] == 1
    assert 2 <= max(most) <= 4
    assert statistics.tuning is not None


def test_batches_are_opened_while_the_lowest_commits(tmp_path: Path) -> None:
    held_up = HeldUp()

    def divided(job: Job) -> None:
        """Txid 3 dies until it is divided, which makes room."""
        if job.txid == 3:
            held_up.die()
        if job.txid == 5:
            held_up.beside.set()

    w, results = world(tmp_path), list[BatchResult]()
    with watched(held_up):
        w.run(engine=Engine(divided), jobs=JobsOnThreads(4), on_batch=results.append)
    assert [r.txid for r in results][:2] == [3, 1], "what commits nothing ends beside a commit"
    assert w.counts()["common"] == 12


def test_an_attempt_follows_another_while_the_lowest_commits(tmp_path: Path) -> None:
    held_up = HeldUp()

    def die_once(job: Job) -> None:
        if job.txid == 2:
            if job.attempt == 1:
                held_up.die()
            held_up.beside.set()

    w, results = world(tmp_path), list[BatchResult]()
    with watched(held_up):
        w.run(engine=Engine(die_once), jobs=JobsOnThreads(4), on_batch=results.append)
    assert [r.txid for r in results] == [1, 2, 3, 4, 5, 6]
    assert results[1].attempts == 2


def test_recovery_waits_for_the_commit_that_is_under_way(tmp_path: Path) -> None:
    """The driver loses the ledger while a sink adopts: what that sink holds is not asked before it stands still."""
    held_up, recovering = HeldUp(), threading.Event()

    def watch(name: str) -> None:
        held_up(name)
        if name == "open.after" and held_up.begun.is_set() and not recovering.is_set():
            recovering.set()
            held_up.beside.set()
            raise StoreUnavailable("the ledger's connection broke")

    def divided(job: Job) -> None:
        if job.txid == 3:
            held_up.die()

    w = world(tmp_path)
    with watched(watch):
        statistics = w.run(engine=Engine(divided), jobs=JobsOnThreads(4))
    (recovery,) = statistics.recoveries
    assert recovery.rolled_forward == (1,)
    assert statistics.suppressed == 1, "the sink held it before recovery asked"
    assert w.counts() == Counter({f"m{i}": 1 for i in range(12)} | {"common": 12})


def test_a_sink_that_refuses_beside_other_jobs_blocks_its_batch(tmp_path: Path) -> None:
    w = world(tmp_path)
    w.sinks[0].store.fail(FaultPoint.BEFORE, SinkRefused("no room"))
    with pytest.raises(SinkRefused, match="stormproof retry words 1"):
        w.run(jobs=JobsOnThreads(4))
    with pytest.raises(SinkRefused, match="txid 1 of topology 'words' is blocked"):
        w.run(jobs=JobsOnThreads(4))
    assert w.counts() == Counter()


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


class Waited(JobsOnThreads):
    """Says when a job's thread is done with it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.done = threading.Semaphore(0)

    def start(self, txid: int, work: Work) -> None:
        def watched_work() -> JobResult | SinkAnswers:
            try:
                return work()
            finally:
                self.done.release()

        super().start(txid, watched_work)


def in_first_commit(do: Callable[[], None]) -> Callable[[str], None]:
    """Called by failpoints: does something while the first batch commits."""
    times = iter(range(10**9))

    def watcher(name: str) -> None:
        if name == "commit.before_sink" and next(times) == 0:
            do()

    return watcher


def test_a_lease_is_kept_while_the_driver_sits_in_another_batchs_commit(tmp_path: Path) -> None:
    w, extended, seen = world(tmp_path, 8), set[str](), threading.Semaphore(0)
    extend = w.source.extend

    def telling(lease: Lease) -> None:
        if threading.current_thread().name == "stormproof-waiting-leases":
            extended.add(lease.owner)
            seen.release()
        extend(lease)

    w.source.extend = telling  # type: ignore[method-assign]

    def until_all_were_extended() -> None:
        while not {f"life0/{txid}" for txid in (2, 3, 4)} <= extended:
            assert seen.acquire(timeout=WAIT_S), f"only {extended} are kept during the commit"

    with watched(in_first_commit(until_all_were_extended)):
        w.run(jobs=JobsOnThreads(4), lease_s=0.3)
    assert w.counts()["common"] == 8


def test_wait_counts_from_the_end_of_the_job(tmp_path: Path) -> None:
    clock, jobs, results = ManualClock(), Waited(2), list[BatchResult]()
    w = World([b"a x", b"b x"], tmp_path, in_flight=2, batch_messages=1, clock=clock)

    def until_both_are_done() -> None:
        for _ in range(2):
            assert jobs.done.acquire(timeout=WAIT_S)
        clock.advance(10)

    with watched(in_first_commit(until_both_are_done)):
        w.run(jobs=jobs, on_batch=results.append)
    assert results[0].steps_ms["wait"] == 0
    assert results[1].steps_ms["wait"] == 10_000


@pytest.mark.parametrize("in_flight", [1, 4])
def test_at_most_once_has_no_lease_to_keep(tmp_path: Path, in_flight: int) -> None:
    """Its messages are confirmed: who extended the lease would take it for lost, and cancel a job that takes long."""
    looks, extended = threading.Semaphore(0), list[str]()

    class Clock(SystemClock):
        def monotonic_s(self) -> float:
            if threading.current_thread().name == "stormproof-lease":
                looks.release()
            return super().monotonic_s()

    def wait_for_looks(job: Job) -> None:
        for _ in range(2):
            assert looks.acquire(timeout=WAIT_S)

    w = World([b"a x", b"b x"], tmp_path, in_flight=in_flight, batch_messages=1, clock=Clock())
    w.source.extend = lambda lease: extended.append(lease.owner)  # type: ignore[method-assign]
    jobs = JobsOnThreads(4) if in_flight > 1 else JobsInTurn()
    w.run(Guarantee.AT_MOST_ONCE, engine=Engine(wait_for_looks), jobs=jobs, lease_s=0.01, message_timeout_s=0.2)
    assert not extended


def ids_of(job: Job) -> set[int]:
    return {id_ for reader in job.readers if isinstance(reader, MemorySliceReader) for id_ in reader.ids}


class Lying(InlineEngine):
    """Reports of some jobs do not add up."""

    def __init__(self, lies: Callable[[Job], bool]) -> None:
        super().__init__()
        self.ran: Counter[int] = Counter()
        self._lies = lies

    def run(self, job: Job) -> JobReport:
        self.ran[job.txid] += 1
        report = super().run(job)
        return replace(report, ack_xor=report.ack_xor ^ 1) if self._lies(job) else report


def test_verdicts_that_go_wrong_side_by_side_are_one_cause_and_each_batch_is_tried_again(tmp_path: Path) -> None:
    w, engine = world(tmp_path), Lying(lambda job: job.attempt == 1 and job.txid < 5)
    statistics = w.run(engine=engine, jobs=JobsInTurn())
    assert engine.ran == Counter({1: 2, 2: 2, 3: 2, 4: 2, 5: 1, 6: 1})
    assert statistics.failed == 0
    assert w.counts()["common"] == 12


def test_a_message_that_never_adds_up_stops_the_run_though_others_do_beside_it(tmp_path: Path) -> None:
    w, engine = world(tmp_path, 40), Lying(lambda job: 3 in ids_of(job))
    with pytest.raises(BatchUnverified, match="attempt 3 does not add up"):
        w.run(engine=engine, jobs=JobsOnThreads(4))
    assert w.counts()["m3"] == 0
    assert sum(engine.ran.values()) < 20


def test_an_exit_inside_a_job_ends_the_run_instead_of_leaving_it_to_wait_for_ever(tmp_path: Path) -> None:
    def leave(job: Job) -> None:
        if job.txid == 2:
            raise SystemExit(7)

    with pytest.raises(SystemExit):
        world(tmp_path).run(engine=Engine(leave), jobs=JobsOnThreads(4))


def test_an_interrupt_cancels_the_jobs_and_does_not_wait_for_them(tmp_path: Path) -> None:
    started, go_on, cancelled = threading.Event(), threading.Event(), set[int]()

    class Stubborn(InlineEngine):
        def run(self, job: Job) -> JobReport:
            if job.txid == 2:
                started.set()
                assert go_on.wait(WAIT_S)
            return super().run(job)

        def cancel(self, key: tuple[str, int, int]) -> None:
            cancelled.add(key[1])

    def interrupt() -> None:
        assert started.wait(WAIT_S)
        raise KeyboardInterrupt

    w = world(tmp_path, 4)
    with pytest.raises(KeyboardInterrupt), watched(in_first_commit(interrupt)):
        w.run(engine=Stubborn(), jobs=JobsOnThreads(4))
    go_on.set()
    assert 2 in cancelled
    w.run(jobs=JobsOnThreads(4))
    assert w.counts()["common"] == 4


def test_an_exit_in_a_job_closes_no_sink_in_the_middle_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    within, closing, seen = threading.Event(), threading.Event(), list[str]()
    commit, close, close_all = MemorySession.commit, MemorySession.close, SinkSessions.close

    def slow_commit(self: MemorySession, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        within.set()
        assert closing.wait(WAIT_S)
        outcome = commit(self, transaction, checked=checked)
        seen.append("committed")
        return outcome

    def told(self: MemorySession) -> None:
        seen.append("closed")
        close(self)

    def closing_all(self: SinkSessions) -> None:
        closing.set()
        close_all(self)

    def leave(job: Job) -> None:
        if job.txid == 2:
            assert within.wait(WAIT_S)
            raise SystemExit(7)

    w = world(tmp_path, sinks=2)
    with monkeypatch.context() as patched:
        patched.setattr(MemorySession, "commit", slow_commit)
        patched.setattr(MemorySession, "close", told)
        patched.setattr(SinkSessions, "close", closing_all)
        with pytest.raises(SystemExit):
            w.run(engine=Engine(leave), jobs=JobsOnThreads(4))
    assert seen[:1] == ["committed"]
    assert seen[-2:] == ["closed", "closed"]
    assert seen.count("closed") == 2
    w.run(jobs=JobsOnThreads(4))
    assert w.counts(0) == w.counts(1) == Counter({f"m{i}": 1 for i in range(12)} | {"common": 12})


class Interrupted:
    """A lock that another thread holds, and whose wait a signal ends."""

    def __enter__(self) -> None:
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        raise AssertionError("it was never held")


def test_a_further_interrupt_leaves_the_sinks_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on with one may need it; the process is about to end. No further sink is begun."""
    w, closed = world(tmp_path), list[MemorySession]()
    plan = compile_topology(w.topology, Guarantee.EXACTLY_ONCE)

    def close(session: MemorySession) -> None:
        closed.append(session)

    monkeypatch.setattr(MemorySession, "close", close)
    with attached(plan, w.source, w.ledger) as (_, sessions):
        with monkeypatch.context() as held:
            held.setattr(sessions, "_committing", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                sessions.close()
        assert closed == []
        with pytest.raises(TransientError, match="'counts0' was closed"), sessions.committing("counts0"):
            pass
    assert closed == [sessions["counts0"]]


def test_what_is_in_line_is_dropped_when_jobs_are_closed() -> None:
    jobs, started, go_on, ran = JobsOnThreads(1), threading.Event(), threading.Event(), list[int]()

    def first() -> JobReport:
        started.set()
        assert go_on.wait(WAIT_S)
        return EMPTY

    def second() -> JobReport:
        ran.append(2)
        return EMPTY

    jobs.start(1, first)
    jobs.start(2, second)
    assert started.wait(WAIT_S)
    jobs.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("stormproof-job"):
            thread.join(WAIT_S)
    assert ran == []


def test_a_job_that_waits_behind_a_live_one_is_not_stalled_and_is_where_nothing_moves() -> None:
    clock, moves = ManualClock(), LastMove()
    lease = Lease("a", 1, 1e9)
    with hearing(clock) as heard, hearing(clock) as none:
        ahead, mine = (
            LeaseKeeper(Leases(), lease, lambda: None, 10, start_timeout_s=20, heartbeat=one, clock=clock, moves=moves)
            for one in (heard, none)
        )
        with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
            for _ in range(20):
                heartbeat.beat()
                published(heartbeat)
                assert ahead.look()
                assert mine.look()
                clock.advance(4)
        assert ahead.look()
        for _ in range(5):
            assert mine.look()
            clock.advance(4)
        assert not mine.look()
        assert mine.stalled


def test_a_cancel_that_comes_too_early_is_repeated() -> None:
    cancelled = threading.Semaphore(0)
    keeper = LeaseKeeper(Leases(), None, cancelled.release, 0.01)
    with keeper:
        for _ in range(2):
            assert cancelled.acquire(timeout=WAIT_S)
    assert keeper.timed_out


class Died(BaseException):
    """The driver's process ends here."""


@pytest.mark.parametrize("seed", range(3))
def test_a_message_that_kills_the_driver_is_found_though_four_batches_were_open_each_time(
    tmp_path: Path, seed: int
) -> None:
    """Deaths count for all that was open; opened again, each runs by itself and notes what is in hand."""
    culprit, heartbeats, open_messages = 5, tmp_path / "heartbeat", list[int]()
    left = tmp_path / "left"

    class Deadly(InlineEngine):
        def run(self, job: Job) -> JobReport:
            if culprit not in ids_of(job):
                return super().run(job)
            open_messages.append(w.source.backlog().pending)
            if job.careful:
                assert job.heartbeat is not None
                with Heartbeat(job.heartbeat, 0, 0, careful=True) as heartbeat:
                    note(heartbeat, culprit)
                    copytree(heartbeats, left)
            raise Died

    lines = [b"m%d x" % i for i in range(16)]
    w = World(lines, tmp_path / "w", in_flight=4, batch_messages=4, max_attempts=1)
    statistics = None
    while statistics is None:
        assert len(open_messages) < 5, "more drivers die than with one batch in flight"
        try:
            statistics = w.run(engine=Deadly(), jobs=JobsInTurn(Random(seed)), heartbeat_root=heartbeats)
        except Died:
            if left.exists():  # a process that is killed leaves its notes behind
                rmtree(heartbeats)
                left.rename(heartbeats)
    assert len(open_messages) == 3
    assert open_messages[1:] == [4, 1], "another batch ran beside one that a driver had died over"
    assert statistics.dead_letters == 1
    assert w.counts() == Counter({f"m{i}": 1 for i in range(16) if i != culprit} | {"x": 15})


def test_what_was_sent_between_stages_is_let_go() -> None:
    """A Python worker serves many batches: it must not keep what it sent in them."""
    rows = np.arange(100_000)
    before = pa.total_allocated_bytes()
    for _ in range(5):
        payload = pc.add(pa.array(rows), 1).buffers()[1]
        sent = [WireRow(0, 0, 0, 0, payload).to_bytes(), WireRow(1, 0, 0, 0, b"").to_bytes()]
        assert [len(WireRow.from_bytes(one).payload) for one in sent] == [payload.size, 0]
        del payload, sent
    gc.collect()
    assert pa.total_allocated_bytes() - before < rows.nbytes


def test_many_batches_leave_nothing_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    jobs = JobsOnThreads(4)
    w = World([b"x"] * 60, tmp_path, in_flight=4, batch_messages=1, clock=SystemClock())
    w.run(jobs=jobs)
    assert w.counts() == Counter({"x": 60})
    for thread in threading.enumerate():
        if thread.name.startswith("stormproof-"):
            thread.join(WAIT_S)
    assert threading.active_count() <= before


def test_after_the_threads_were_let_go_nothing_counts_as_running() -> None:
    """A second run on one coordinator drops what the first left queued: no mark of the end may count as work."""
    jobs = JobsOnThreads(4)
    jobs.start(1, lambda: EMPTY)
    assert jobs.wait(WAIT_S) is not None
    jobs.close()
    jobs.drop_queued()
    assert jobs.running == 0
    jobs.start(2, lambda: EMPTY)
    ended = jobs.wait(WAIT_S)
    assert ended is not None
    assert ended.txid == 2
    jobs.close()
