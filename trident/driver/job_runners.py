"""Runs the jobs and commits of batches in flight, on threads or in turn, and keeps the leases of those that wait.

`Flight` is one of them: its attempt, its outcome, and how long each step took.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, Final, Protocol, TypeAlias

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import Fenced, TransientError
from stormproof.core.contract.source import Lease, Limit, Source
from stormproof.core.task.job import JobKey
from stormproof.core.tracking.attempts import Attempts, JobDied
from stormproof.core.tracking.outcome import FailedIn, Outcome
from stormproof.core.tracking.verdict import JobReport
from stormproof.trident.driver.batch_records import Prepared, SinkAnswers, reasons_of
from stormproof.trident.driver.steps import Opened
from stormproof.trident.driver.tuning import Sample, Setting
from stormproof.trident.terms.observers import BatchResult
from stormproof.trident.terms.transaction_states import TxnState

JobResult: TypeAlias = "JobReport | JobDied"
Work: TypeAlias = Callable[[], "JobResult | SinkAnswers"]


@dataclass(frozen=True, slots=True)
class Ended:
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

    def wait(self, timeout_s: float | None) -> Ended | None:
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

    def wait(self, timeout_s: float | None) -> Ended | None:
        """Run one piece to its end. What it raises is raised."""
        del timeout_s
        if not self._waiting:
            return None
        txid, work = self._waiting.pop(0 if self._rng is None else self._rng.randrange(len(self._waiting)))
        return Ended(txid, work())

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
        self._ends: queue.SimpleQueue[Ended] = queue.SimpleQueue()
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
                ended = Ended(txid, work())
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it; unreported, that one would wait for ever
                ended = Ended(txid, error=error)
            self._ends.put(ended)

    def wait(self, timeout_s: float | None) -> Ended | None:
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
    committing: Prepared | None = None
    """What its sinks are adopting; None before the commit begins."""

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

    def sample(self, ended_s: float) -> Sample:
        """The batch as the tuner sees it."""
        slice_ = self.opened.slice
        return Sample(
            messages=slice_.expected.messages,
            latency_s=ended_s - self.started_s,
            ended_s=ended_s,
            # A source may cut a slice a little short of the limit.
            full=not slice_.retry
            and (slice_.expected.messages >= FULL * self.limit.messages or slice_.bytes >= FULL * self.limit.bytes),
            setting=self.setting,
        )
