"""The long work of batches in flight, jobs and commits: done on threads of its own, or in turn; and their leases."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeAlias

from stormproof.core.errors import Fenced, TransientError
from stormproof.core.source.protocol import Lease, Source
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.report import JobReport
from stormproof.trident.steps import SinkAnswers

JobResult: TypeAlias = "JobReport | JobDied"
Work: TypeAlias = Callable[[], "JobResult | SinkAnswers"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a piece of work: what it gave, or what it raised."""

    txid: int
    result: JobResult | SinkAnswers | None = None
    error: BaseException | None = None


class Jobs(Protocol):
    """Does the work of several batches: their jobs, and their commits; used by one thread."""

    def start(self, txid: int, work: Work) -> None:
        """Have a piece of work done. A batch has one at a time."""
        ...

    def wait(self, timeout_s: float | None) -> Ended | None:
        """The next piece that ends; None where none did in this time (seconds; None: for ever), or none runs."""
        ...

    @property
    def running(self) -> int:
        """How many were started whose end was not waited for yet."""
        ...

    def close(self) -> None:
        """Start no more. What still runs is not waited for."""
        ...


class JobsInTurn:
    """Does a piece of work when its end is waited for, in this very thread: the oldest, or one that `rng` picks.

    With one batch in flight there is nothing to gain from threads; with several it makes every order of ends reproducible.
    """

    def __init__(self, rng: Random | None = None) -> None:
        self._rng = rng
        self._waiting: list[tuple[int, Work]] = []

    def start(self, txid: int, work: Work) -> None:
        """Put it in line."""
        self._waiting.append((txid, work))

    def wait(self, timeout_s: float | None) -> Ended | None:
        """Run one to its end. What it raises goes through."""
        del timeout_s
        if not self._waiting:
            return None
        txid, work = self._waiting.pop(0 if self._rng is None else self._rng.randrange(len(self._waiting)))
        return Ended(txid, work())

    @property
    def running(self) -> int:
        """How many are in line."""
        return len(self._waiting)

    def close(self) -> None:
        """Drop what has not run."""
        self._waiting.clear()


class JobsOnThreads:
    """Does each piece of work on one of `number` threads, which end with the process at the latest."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._todo: queue.SimpleQueue[tuple[int, Work] | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running = 0

    def start(self, txid: int, work: Work) -> None:
        """Start it, or put it in line where all threads are busy."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"stormproof-job-{i}", daemon=True)
                for i in range(self._number)
            ]
            for thread in self._threads:
                thread.start()
        self._running += 1
        self._todo.put((txid, work))

    def _work(self) -> None:
        while (todo := self._todo.get()) is not None:
            txid, work = todo
            try:
                ended = Ended(txid, work())
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits, which else waits for ever
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
        """How many run, or have ended unnoticed."""
        return self._running

    def close(self) -> None:
        """Let the threads end when their jobs do; what is in line is dropped."""
        with suppress(queue.Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        self._threads = []


class WaitingLeases:
    """Extends the leases of batches whose job is done and whose turn to commit has not come.

    A thread of its own, since the driver's thread may sit in a slow step; for the same reason it is the job's own thread
    that hands a lease over to it. A lease that turns out to be lost is let go: the prepare step will say so, and by whose
    doing.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease) -> None:
        """Extend it from now on, every third of its length. Any thread may call it."""
        with self._lock:
            self._leases[lease.owner] = lease
            if self._thread is None and not self._done.is_set():
                self._thread = threading.Thread(
                    target=self._extend_all, args=(lease.seconds / 3,), name="stormproof-waiting-leases", daemon=True
                )
                self._thread.start()

    def let_go(self, lease: Lease) -> None:
        """No more; when it returns, no extension of it is under way."""
        with self._lock:
            self._leases.pop(lease.owner, None)

    def _extend_all(self, every_s: float) -> None:
        while not self._done.wait(every_s):
            for owner in list(self._leases):
                with self._lock:  # for one call, not for all: who lets go waits for it
                    lease = self._leases.get(owner)
                    if lease is None:
                        continue
                    try:
                        self._source.extend(lease)
                    except Fenced:
                        del self._leases[owner]
                    except TransientError:
                        continue  # the next turn tries again; the lease may lapse meanwhile, which prepare finds out

    def close(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._done.set()
            thread, self._thread = self._thread, None
            self._leases.clear()
        if thread is not None:
            thread.join()
