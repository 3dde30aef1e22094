"""Runs the jobs and commits of batches in flight, on threads or in turn; keeps their leases, and cancels a job that hangs.

`Flight` is one of them: its attempt, its outcome, and how long each step took.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from random import Random
from types import TracebackType
from typing import ClassVar, Final, Protocol, TypeAlias

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Fenced, JobFailed, MachineUnavailable, TransientError
from stormproof.core.contract.source import Lease, Limit, Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.heartbeat.listener import HeartbeatListener, JobSigns
from stormproof.core.heartbeat.task import ProgressMark
from stormproof.core.task.job import Job, JobKey
from stormproof.core.tracking.attempts import Attempts, JobDied
from stormproof.core.tracking.verdict import FailedIn, JobReport, Outcome
from stormproof.core.user_code.functions import CAUGHT
from stormproof.trident.driver.batch_records import PreparedBatch, SinkAnswers, reasons_of
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.steps import Opened
from stormproof.trident.driver.tuning import BatchSample, Setting
from stormproof.trident.ledger.control import JobProgress, JobWatch
from stormproof.trident.terms.observers import BatchResult
from stormproof.trident.terms.transaction_states import TxnState

lease_log = logging.getLogger("stormproof.lease")

LOOK_EVERY_S = 1.0
CANCEL_AGAIN_S = 0.5
"""A job that was just starting may have missed the first cancel."""

PAUSED_S = 5.0
"""After so long between two looks the driver itself was suspended; jobs may have moved unseen."""


class LastMove:
    """When any job of one driver last made progress: jobs that wait for a free slot behind it are not stalled."""

    def __init__(self) -> None:
        self.at_s = -math.inf


class LeaseKeeper:
    """A context in which a lease is extended every third of its length, as long as the job makes progress.

    `cancel` ends the job, from the keeper's own thread.

    Through `heartbeat` the job's tasks report their progress. A job in which some task runs and none makes progress for
    `message_timeout_s` hangs: it is cancelled, and `timed_out` is set. A job that makes progress may take as long as it
    needs. Where some task is silent by then (the network does not carry its reports), `silent` is set instead, and no
    message is to blame; from the end of a silence on, a hang is timed anew. While no task runs (Spark starts, or is between
    two stages), and while the source's store does not answer, `start_timeout_s` is the bound instead, and `stalled` is set:
    no message is to blame. A job without a running
    task may wait for a free slot behind another job; its time counts from the last progress in `moves`.

    Without `heartbeat` progress cannot be seen: the job may take `message_timeout_s` in all.

    When the lease is lost, the job is cancelled, too, and `lapsed` is set. A store that does not answer is tried again at
    the next turn, until the lease lapses; the prepare step will then raise. `lease` is None where there is none to keep:
    under at-most-once the messages were confirmed when they were opened.

    `on_look` is given the progress at each look, by the keeper's thread.

    *Not guaranteed*: a task that hangs while others make progress is noticed only when those are done.
    """

    def __init__(
        self,
        source: Source,
        lease: Lease | None,
        cancel: Callable[[], None],
        message_timeout_s: float,
        *,
        start_timeout_s: float = 300.0,
        heartbeat: JobSigns | None = None,
        clock: Clock | None = None,
        moves: LastMove | None = None,
        on_look: Callable[[ProgressMark], None] | None = None,
    ) -> None:
        self._on_look = on_look
        self._source = source
        self._lease = lease
        self._cancel = cancel
        # A shorter bound would blame a message before silence can be told from a hang.
        self._message_timeout_s = max(message_timeout_s, 0.0 if heartbeat is None else heartbeat.notices_silence_s)
        self._start_timeout_s = max(start_timeout_s, self._message_timeout_s)
        self._heartbeat = heartbeat
        self._clock: Clock = clock or SystemClock()
        self._moves = moves or LastMove()
        self._seen = ProgressMark()
        self._moved_at_s = self._looked_at_s = self._extended_at_s = self._clock.monotonic_s()
        self._silent_at_s = self._moved_at_s
        self._store_away = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="stormproof-lease", daemon=True)
        self.timed_out = False
        self.stalled = False
        self.silent = False
        self.lapsed = False

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        every_s = min(LOOK_EVERY_S, self._message_timeout_s / 4)
        if self._lease is not None:
            every_s = min(every_s, self._lease.seconds / 3)
        while not self._done.wait(every_s):
            if not self.look():
                break
        else:
            return
        self._cancel()
        while not self._done.wait(CANCEL_AGAIN_S):
            self._cancel()

    def look(self) -> bool:
        """Look at the job and extend the lease if that is due; the keeper's thread calls this at least once a second.

        False if the job is to be cancelled; then one of `timed_out`, `stalled`, `silent` and `lapsed` is set.
        """
        now_s = self._clock.monotonic_s()
        if self._heartbeat is not None and (self._has_moved() or now_s - self._looked_at_s >= PAUSED_S):
            self._moved_at_s = self._moves.at_s = now_s
        self._looked_at_s = now_s
        if self._on_look is not None:
            self._on_look(self._seen)
        waits = self._heartbeat is not None and self._seen.running == 0
        quiet_s = now_s - (max(self._moved_at_s, self._moves.at_s) if waits else self._moved_at_s)
        if self._store_away or waits:
            self.stalled = quiet_s >= self._start_timeout_s
        elif self._seen.silent:
            self._silent_at_s = now_s
            self.silent = quiet_s >= self._message_timeout_s
        else:
            self.timed_out = min(quiet_s, now_s - self._silent_at_s) >= self._message_timeout_s
        if self.stalled or self.silent or self.timed_out:
            return False
        if self._lease is None or now_s - self._extended_at_s < self._lease.seconds / 3:
            return True
        return self._extend(self._lease, now_s)

    def misses_tasks(self) -> bool:
        """Whether some task is silent now. Once the keeper's thread has ended, whoever runs the job may ask."""
        self._has_moved()
        return self._seen.silent > 0

    def _has_moved(self) -> bool:
        if self._heartbeat is None:
            return False
        try:
            before, self._seen = self._seen, self._heartbeat.progress()
        except OSError as error:
            lease_log.warning("the progress of a job could not be read: %s", error)
            before, self._seen = self._seen, ProgressMark()  # as if no task ran: no message is blamed unseen
        return replace(self._seen, silent=0) != replace(before, silent=0)

    def _extend(self, lease: Lease, now_s: float) -> bool:
        try:
            self._source.extend(lease)
        except Fenced:
            self.lapsed = True
            return False
        except TransientError as error:
            lease_log.warning("lease of %s could not be extended: %s", lease.owner, error)
            self._store_away = True
            return True
        if self._store_away:  # tasks that waited for it go on now
            self._moved_at_s, self._store_away = now_s, False
        self._extended_at_s = now_s
        return True


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


class WaitingLeases:
    """Extends the leases of batches whose job is done and whose turn to commit has not come.

    It has a thread of its own, since the driver's thread may be in a slow step; for the same reason the job's thread hands
    its lease over. A lost lease is let go: the prepare step will raise, and name the other owner.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease) -> None:
        """Extend a lease from now on, every third of its length. Any thread may call this."""
        with self._lock:
            self._leases[lease.owner] = lease
            if self._thread is None and not self._done.is_set():
                self._thread = threading.Thread(
                    target=self._extend_all, args=(lease.seconds / 3,), name="stormproof-waiting-leases", daemon=True
                )
                self._thread.start()

    def let_go(self, lease: Lease) -> None:
        """Extend a lease no more; on return no extension of it is under way."""
        with self._lock:
            self._leases.pop(lease.owner, None)

    def _extend_all(self, every_s: float) -> None:
        while not self._done.wait(every_s):
            for owner in list(self._leases):
                with self._lock:  # for one call, not for all of them: `let_go` waits for it
                    lease = self._leases.get(owner)
                    if lease is None:
                        continue
                    try:
                        self._source.extend(lease)
                    except Fenced:
                        del self._leases[owner]
                    except TransientError:
                        continue  # the next turn tries again; where the lease lapses meanwhile, prepare raises

    def close(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._done.set()
            thread, self._thread = self._thread, None
            self._leases.clear()
        if thread is not None:
            thread.join()


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
