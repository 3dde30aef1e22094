"""What a running driver is asked to do: go on, open nothing for now, or end in one of two ways.

`ControlLine` carries an operator's requests to a running driver, and the driver's signs of life to the ledger.
`Stopping` has SIGINT and SIGTERM end a run in order.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from types import FrameType, TracebackType
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from stormproof.core.base.errors import StormproofError
from stormproof.trident.ledger import control
from stormproof.trident.ledger.control import Doing, Ending, JobProgress
from stormproof.trident.ledger.database import LedgerDatabase
from stormproof.trident.ledger.tables import Run


class StopRequests:
    """What one run is asked to do. Any thread may ask, a signal handler, too; `wake` is called after each change.

    An end that was asked for is not taken back. A stop goes before a drain. `event` stops the run, too, once it is set.

    Nothing here takes a lock: the thread that a signal handler interrupts may hold it.
    """

    def __init__(self, wake: Callable[[], None], event: Event | None = None) -> None:
        self._wake = wake
        self._event = event
        self._stopped_by = ""
        self._interrupt: BaseException | None = None
        self._paused = False
        self._drains = False

    def stop(self, by: str) -> None:
        """End after the batches in flight; `by` is what `RunStatistics.stopped` says then."""
        self._stopped_by = self._stopped_by or by
        self._wake()

    def interrupt(self, error: BaseException) -> None:
        """Start no further attempt, since this is about to be raised."""
        self._interrupt = error

    def drain(self) -> None:
        """Open no new messages, and end once none is pending and none waits for a retry."""
        self._drains = True
        self._wake()

    def pause(self, paused: bool) -> None:
        """Open no batch, until this is called with False."""
        if self._paused != paused:
            self._paused = paused
            self._wake()

    @property
    def stopped_by(self) -> str:
        """Who or what stopped it; empty: nobody."""
        if not self._stopped_by and self._event is not None and self._event.is_set():
            self._stopped_by = "event"
        return self._stopped_by

    @property
    def stops(self) -> bool:
        """Whether it is to end after the batches in flight."""
        return bool(self.stopped_by)

    @property
    def interrupted(self) -> BaseException | None:
        """What ends it without waiting for its jobs; None: nothing."""
        return self._interrupt

    @property
    def pauses(self) -> bool:
        """Whether no batch may be opened for now."""
        return self._paused

    @property
    def drains(self) -> bool:
        """Whether no new messages may be opened."""
        return self._drains

    def doing(self, in_flight: int) -> Doing:
        """What the driver does now, in one word."""
        if self.stops:
            return Doing.STOPPING
        if self._paused:
            return Doing.PAUSING if in_flight else Doing.PAUSED
        return Doing.DRAINING if self._drains else Doing.RUNNING

    def follow(self, *, paused: bool, ending: Ending | None) -> None:
        """Do what an operator asked for."""
        self.pause(paused)
        match ending:
            case Ending.STOP:
                self.stop(ending.value)
            case Ending.DRAIN:
                self.drain()
            case None:
                pass


log = logging.getLogger("stormproof.control")

EVERY_S: Final = 1.0


class ControlLine:
    """A context in which a driver hears, about once a second, what operators ask of it through the ledger.

    It has a thread and a connection of its own, so that it hears while a long job runs and while the ledger is busy. A
    database that does not answer is asked again at the next turn; the run itself decides how long it waits for its stores.

    Not guaranteed:
        A driver that is suspended, or cut off from the database, hears nothing until it is back. Then its sign of life
        grows old, and `stormproof status` says so.
    """

    def __init__(
        self,
        engine: sa.Engine,
        run: Run,
        stop_requests: StopRequests,
        in_flight: Callable[[], int],
        job: Callable[[], JobProgress | None] = lambda: None,
        *,
        every_s: float = EVERY_S,
        heard: Callable[[Doing, JobProgress | None], None] | None = None,
    ) -> None:
        """`heard` is told of each sign of life that was left."""
        self._database = LedgerDatabase(engine, lambda: None)
        self._run = run
        self._stop_requests = stop_requests
        self._in_flight, self._job = in_flight, job
        self._every_s = every_s
        self._tell = heard
        self._heard = 0
        self._is_silent = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="stormproof-control", daemon=True)

    def hear_first(self) -> None:
        """Hear what was asked before the start: the driver of a topology that is paused opens nothing.

        Raises:
            StoreUnavailable: the database does not answer; it may be called again.
        """
        self._turn()

    def __enter__(self) -> ControlLine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._database.close()

    def _turn(self) -> None:
        """Leave a sign of life, and do what is newly asked for; the second exchange says that it was heard."""
        while True:
            in_flight, job = self._in_flight(), self._job()
            doing = self._stop_requests.doing(in_flight)
            with self._database.begin() as connection:
                asked = control.exchange(
                    *(connection, self._run.incarnation, self._run.epoch, doing, in_flight, self._heard),
                    job=job,
                )
            if self._tell is not None:
                self._tell(doing, job)
            if asked is None or asked.request == self._heard:
                return
            self._heard = asked.request
            ending = asked.ends(self._run.epoch)
            said = self._said(asked, ending)
            if said:
                log.warning("topology %s: %s", self._run.topology, said)
            self._stop_requests.follow(paused=asked.paused, ending=ending)

    def _said(self, asked: control.Control, ending: control.Ending | None) -> str:
        who = f"asked for by {asked.by}{f' ({asked.why})' if asked.why else ''}"
        if ending is control.Ending.STOP:
            return f"stops after the batches in flight, {who}"
        if asked.paused:
            return f"opens no batch until: stormproof resume {self._run.topology}; {who}"
        if ending is control.Ending.DRAIN:
            return f"opens no new messages, and ends once none is pending, {who}"
        return f"goes on, {who}" if self._stop_requests.pauses else ""

    def _keep(self) -> None:
        while not self._done.wait(self._every_s):
            try:
                self._turn()
            except (StormproofError, DBAPIError) as error:  # the run finds out by itself what it cannot reach
                if not self._is_silent:
                    log.warning("topology %s hears no requests: %s", self._run.topology, error)
                self._is_silent = True
                self._database.drop_connections()
            else:
                self._is_silent = False


SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
BY_SIGNAL: Final = "signal"
"""`RunStatistics.stopped` then."""

ONE_SIGNAL_S: Final = 0.3
"""Two signals within this time count as one: whoever ends a process group often signals process and group."""

_STDERR: Final = 2
"""The descriptor: a handler may run while `sys.stderr` is in use."""

_CLEAN: Final = "\r\x1b[2K\x1b[?25h"
"""Takes the line of progress off a terminal, and brings back the cursor that it hides: the process may end here."""


class Stoppable(Protocol):
    """What can be asked to stop; a signal handler asks."""

    def request_stop(self) -> None:
        """End after the batches in flight."""
        ...

    def interrupt(self, error: BaseException) -> None:
        """Wait for no job any more: this is about to be raised."""
        ...


class Stopping:
    """SIGINT and SIGTERM stop the run after the batches in flight; at the end the handlers from before are put back.

    A second signal ends the run at once, and the next start recovers. SIGINT raises KeyboardInterrupt; SIGTERM does what it
    did before, which by default ends the process, and raises SystemExit where the program's own handler returns.
    `at_once` replaces both, and does not return.

    A signal during the start takes effect once everything has started: a JVM whose Python process dies before the two
    are connected would stay for ever.

    *Not guaranteed*: outside the main thread no handler can be set, and a signal that the program ignores stays ignored
    (with `at_once` it does not: a shell's background jobs ignore SIGINT).
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, *, at_once: Callable[[], None] | None = None
    ) -> None:
        self._now_s = now_s
        self._at_once = at_once
        self._running: Stoppable | None = None
        self._asked_at_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in SIGNALS}
            # None: set by other means than Python.
            kept = (None,) if self._at_once is not None else (None, signal.SIG_IGN)
            self._before = {number: handler for number, handler in before.items() if handler not in kept}
        self._set()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if self._running is None or signal.getsignal(number) == self._handle:  # not one that `on_ready` has set
                signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._asked_at_s is not None

    def attach(self, running: Stoppable) -> None:
        """Have signals stop this run, which has started. PySpark has meanwhile installed a handler of its own."""
        self._running = running
        self._set()
        if self._asked_at_s is not None:
            running.request_stop()

    def _set(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = self._now_s()
        if self._asked_at_s is not None:
            if now_s - self._asked_at_s >= ONE_SIGNAL_S:
                self._end(signal.Signals(number))
            return
        self._asked_at_s = now_s
        when = "once all has started" if self._running is None else "after the batches in flight"
        tell(f"{signal.Signals(number).name}: stopping {when}; once more: at once")
        if self._running is not None:
            self._running.request_stop()

    def _end(self, number: signal.Signals) -> None:
        tell("stopped at once; the next start recovers")
        if self._at_once is not None:
            self._at_once()
        self.__exit__()
        if number is signal.SIGTERM:
            if self._before[number] is signal.SIG_DFL:
                end_jvm()
            signal.raise_signal(number)
        error = KeyboardInterrupt() if number is signal.SIGINT else SystemExit(128 + number)
        if self._running is not None:
            self._running.interrupt(error)
        if "pyspark" in sys.modules:
            from stormproof.core.engine.spark import drop_answer

            drop_answer()
        raise error


def tell(text: str) -> None:
    """Write to standard error, from a signal handler."""
    is_drawn = os.isatty(_STDERR) and os.environ.get("TERM", "dumb") != "dumb"
    with suppress(OSError):
        os.write(_STDERR, f"{_CLEAN if is_drawn else ''}stormproof: {text}\n".encode())


def end_jvm() -> None:
    """End Spark's JVM, which may not watch for our end yet. An embedded Postgres keeps running for its other users."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            if child.name() == "java":
                child.kill()
        except psutil.Error:
            continue
