"""Runs the jobs and commits of batches in flight, on threads or in turn.

`Flight` is one of them: its attempt, its outcome, and how long each step took.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import ClassVar, Final, Protocol, TypeAlias

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import JobFailed, MachineUnavailable, TransientError
from stormproof.core.contract.source import Lease, Limit, Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.heartbeat.listener import HeartbeatListener
from stormproof.core.heartbeat.task import ProgressMark
from stormproof.core.task.job import Job, JobKey
from stormproof.core.tracking.attempts import Attempts, JobDied
from stormproof.core.tracking.verdict import FailedIn, JobReport, Outcome
from stormproof.core.user_code.functions import CAUGHT
from stormproof.trident.driver.batch_records import PreparedBatch, SinkAnswers, reasons_of
from stormproof.trident.driver.leases import LastMove, LeaseKeeper
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.steps import Opened
from stormproof.trident.driver.tuning import BatchSample, Setting
from stormproof.trident.ledger.control import JobProgress, JobWatch
from stormproof.trident.terms.observers import BatchResult
from stormproof.trident.terms.transaction_states import TxnState

log = logging.getLogger("stormproof.job")


def on_its_thread(keeper: LeaseKeeper) -> AbstractContextManager[object]:
    """The keeper itself: it looks at its job on a thread of its own."""
    return keeper


@dataclass(frozen=True, slots=True)
class Watch:
    """How the jobs of one driver are watched: see `LeaseKeeper`. `on_progress` is called about once a second while a job
    runs, by a thread of its own.

    `heartbeats` is where jobs report to. `keeping` gives the context in which a keeper looks while its job runs, and
    `in_hand` the messages that a dead job had in hand, by default those that its tasks noted; a simulation replaces
    both, for virtual time.
    """

    message_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    heartbeats: HeartbeatListener | None = None
    moves: LastMove = field(default_factory=LastMove)
    keeping: Callable[[LeaseKeeper], AbstractContextManager[object]] = on_its_thread
    in_hand: Callable[[Job], tuple[int, ...]] | None = None
    on_progress: Callable[[JobProgress], None] | None = None
    now: dict[int, JobProgress] = field(default_factory=dict[int, JobProgress])
    """How far each job that runs is, by txid."""

    @property
    def lowest(self) -> JobProgress | None:
        """How far the job is that runs for the lowest txid."""
        return min(self.now.copy().values(), key=lambda job: job.txid, default=None)

    @staticmethod
    def of(
        plan: Plan,
        options: RunOptions,
        heartbeats: HeartbeatListener | None = None,
        on_progress: Callable[[JobProgress], None] | None = None,
    ) -> Watch:
        """By the run's options; the topology's own message timeout beats theirs.

        Without `heartbeats`, jobs do not report.
        """
        timeout_s = options.message_timeout_s if plan.message_timeout_s is None else plan.message_timeout_s
        return Watch(timeout_s, options.start_timeout_s, heartbeats, on_progress=on_progress)


def _telling(job: Job, watch: Watch, clock: Clock) -> Callable[[ProgressMark], None]:
    """Tells the user's function of a job that begins now. What that raises must not end the thread that keeps the lease."""
    its = JobWatch(job, clock.monotonic_s())

    def tell(seen: ProgressMark) -> None:
        now = watch.now[job.txid] = its.seen(seen, clock.monotonic_s())
        try:
            if watch.on_progress is not None:
                watch.on_progress(now)
        except CAUGHT:
            log.exception("on_progress raised at txid %s", job.txid)

    return tell


def run_watched(
    engine: Engine, job: Job, source: Source, lease: Lease | None, watch: Watch, clock: Clock
) -> JobReport | JobDied:
    """Run a job while its lease is kept. Its report; or how it died, and the messages that it had in hand.

    `lease` is None under at-most-once: the messages are confirmed already.

    Raises:
        TransientError: the lease ran out, or no task of the job ever ran; no message is to blame.
        MachineUnavailable: tasks were not heard of, so nobody knows whether they hung, died or lived; likewise.
    """
    with nullcontext() if watch.heartbeats is None else watch.heartbeats.of_job(job.key) as heartbeat:
        place = None if heartbeat is None else heartbeat.place
        job = replace(job, heartbeat=place, message_timeout_s=watch.message_timeout_s)
        keeper = LeaseKeeper(
            source,
            lease,
            lambda: engine.cancel(job.key),
            watch.message_timeout_s,
            start_timeout_s=watch.start_timeout_s,
            heartbeat=heartbeat,
            clock=clock,
            moves=watch.moves,
            on_look=_telling(job, watch, clock),
        )
        where = f"txid {job.txid} of topology {job.plan.topology!r}"
        try:
            with watch.keeping(keeper):
                return engine.run(job)
        except JobFailed as error:
            if keeper.lapsed:
                raise TransientError(
                    f"{where}: its lease ran out while its job ran; its messages are opened again", txid=job.txid
                ) from error
            if keeper.stalled:
                raise TransientError(
                    f"{where}: no task of its job ran for {watch.start_timeout_s} s, or the source's store did not "
                    "answer for so long; its messages are opened again. Look whether Spark has executors for it; "
                    "STORMPROOF_START_TIMEOUT_S allows more time",
                    txid=job.txid,
                ) from error
            if keeper.silent or (not keeper.timed_out and keeper.misses_tasks()):
                raise MachineUnavailable(
                    f"{where}: tasks of its job were not heard of: their machines, or the network between them and the "
                    "driver, do not answer. No message is to blame; its messages are opened again. Look at the executors' "
                    "machines, and at the network",
                    txid=job.txid,
                    error="ContactLost",
                ) from error
            noted = () if heartbeat is None else heartbeat.suspects()
            in_hand = noted if watch.in_hand is None else watch.in_hand(job)
            if keeper.timed_out:
                text = f"cancelled: no progress for {watch.message_timeout_s} s"
                return JobDied(text, timed_out=True, suspects=in_hand)
            return JobDied.of(error, suspects=in_hand)
        finally:
            watch.now.pop(job.txid, None)


JobResult: TypeAlias = "JobReport | JobDied"
Work: TypeAlias = Callable[[], "JobResult | SinkAnswers"]


# ---- jobs in turn and on threads, and what is in flight


@dataclass(frozen=True, slots=True)
class WorkEnd:
    """The end of a piece of work: what it returned, or what it raised."""

    txid: int
    result: JobResult | SinkAnswers | None = None
    error: BaseException | None = None


class Jobs(Protocol):
    """Does the work of several batches, their jobs and commits. One thread uses it."""

    on_threads: ClassVar[bool]
    """Whether work runs while the caller does something else."""

    def start(self, txid: int, work: Work) -> None:
        """Have a piece of work done. A batch has one at a time."""
        ...

    def wait(self, timeout_s: float | None) -> WorkEnd | None:
        """Wait for the next end; None where nothing ended within `timeout_s` (None: no limit), or nothing was started."""
        ...

    @property
    def running(self) -> int:
        """The number of pieces that were started and whose end `wait` has not returned yet."""
        ...

    def drop_queued(self) -> None:
        """Forget the work that has not begun."""
        ...

    def close(self) -> None:
        """Start no more; work that runs is not waited for."""
        ...


class JobsInTurn:
    """Does a piece of work when its end is waited for, in the caller's thread: the oldest, or one that `rng` picks.

    With one batch in flight threads gain nothing; with several, every order of ends is reproducible.
    """

    on_threads: ClassVar[bool] = False

    def __init__(self, rng: Random | None = None) -> None:
        self._rng = rng
        self._waiting: list[tuple[int, Work]] = []

    def start(self, txid: int, work: Work) -> None:
        """Queue it."""
        self._waiting.append((txid, work))

    def wait(self, timeout_s: float | None) -> WorkEnd | None:
        """Run one piece to its end. What it raises is raised."""
        if not self._waiting:
            return None
        txid, work = self._waiting.pop(0 if self._rng is None else self._rng.randrange(len(self._waiting)))
        return WorkEnd(txid, work())

    @property
    def running(self) -> int:
        """The number of queued pieces."""
        return len(self._waiting)

    def drop_queued(self) -> None:
        """Forget all of them."""
        self._waiting.clear()

    def close(self) -> None:
        """Forget all of them."""
        self._waiting.clear()


class JobsOnThreads:
    """Does each piece of work on one of `number` threads, which end with the process at the latest."""

    on_threads: ClassVar[bool] = True

    def __init__(self, number: int) -> None:
        self._number = number
        self._todo: queue.SimpleQueue[tuple[int, Work] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[WorkEnd] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running = 0

    def start(self, txid: int, work: Work) -> None:
        """Start it, or queue it where all threads are busy."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, args=(self._todo,), name=f"stormproof-job-{i}", daemon=True)
                for i in range(self._number)
            ]
            for thread in self._threads:
                thread.start()
        self._running += 1
        self._todo.put((txid, work))

    def _work(self, todo_queue: queue.SimpleQueue[tuple[int, Work] | None]) -> None:
        while (todo := todo_queue.get()) is not None:
            txid, work = todo
            try:
                ended = WorkEnd(txid, work())
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it; unreported, that one would wait for ever
                ended = WorkEnd(txid, error=error)
            self._ends.put(ended)

    def wait(self, timeout_s: float | None) -> WorkEnd | None:
        """The next end."""
        if not self._running:
            return None
        try:
            ended = self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._running -= 1
        return ended

    @property
    def running(self) -> int:
        """The number of pieces that are queued, run, or have ended unnoticed."""
        return self._running

    def drop_queued(self) -> None:
        """Forget the work that no thread has taken."""
        with suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
                self._running -= 1

    def close(self) -> None:
        """Let the threads end when their jobs do, and forget queued work."""
        self.drop_queued()
        for _ in self._threads:
            self._todo.put(None)
        # What is started later has threads and a queue of its own: the marks of the end are for those that run now.
        self._threads, self._todo = [], queue.SimpleQueue()


FULL: Final = 0.9
"""A batch that reached this part of its limit counts as full: the source may have more."""


@dataclass(slots=True)
class Flight:
    """A batch that was opened and has not ended."""

    opened: Opened
    started_s: float
    limit: Limit
    setting: Setting
    attempts: Attempts | None = None
    attempt: int = 1
    job: JobKey | None = None
    """Its running job."""
    outcome: Outcome | None = None
    """The outcome of its attempts; None while one of them runs."""
    ready_s: float = 0.0
    """When its last job ended."""
    committing: PreparedBatch | None = None
    """What its sinks are committing; None before the commit begins."""

    steps_ms: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def timed(self, clock: Clock, step: str) -> Generator[None]:
        """Add the time within this context to a step's time."""
        started_s = clock.monotonic_s()
        try:
            yield
        finally:
            self.steps_ms[step] = self.steps_ms.get(step, 0.0) + (clock.monotonic_s() - started_s) * 1000

    def result(self, failed: Sequence[FailedIn] = (), state: TxnState = TxnState.ABORTED) -> BatchResult:
        """The result of a batch that has ended without a commit."""
        reasons = reasons_of(one.failure for one in failed)
        return BatchResult(
            txid=self.opened.txid,
            state=state.value,
            messages=self.opened.slice.expected.messages,
            failed=reasons.total(),
            retry=self.opened.slice.retry,
            attempts=self.attempt,
            tuples=0,
            steps_ms=self.steps_ms,
            returned=len(failed) - reasons.total(),
            reasons=dict(reasons),
        )

    def sample(self, ended_s: float) -> BatchSample:
        """The batch as the tuner sees it."""
        slice_ = self.opened.slice
        return BatchSample(
            messages=slice_.expected.messages,
            latency_s=ended_s - self.started_s,
            ended_s=ended_s,
            # A source may cut a slice a little short of the limit.
            full=not slice_.retry
            and (slice_.expected.messages >= FULL * self.limit.messages or slice_.bytes >= FULL * self.limit.bytes),
            setting=self.setting,
        )
