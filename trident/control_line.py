"""What a running driver is asked to do: go on, open nothing for now, or end in one of two ways.

`ControlLine` carries an operator's requests to a running driver, and the driver's signs of life to the ledger.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from threading import Event
from types import TracebackType
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from stormproof.core.errors import StormproofError
from stormproof.trident.job_progress import JobProgress
from stormproof.trident.ledger import control
from stormproof.trident.ledger.control import Doing, Ending
from stormproof.trident.ledger.database import LedgerDatabase
from stormproof.trident.ledger.rows import Run


class Orders:
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
        orders: Orders,
        in_flight: Callable[[], int],
        job: Callable[[], JobProgress | None] = lambda: None,
        *,
        every_s: float = EVERY_S,
        heard: Callable[[Doing, JobProgress | None], None] | None = None,
    ) -> None:
        """`heard` is told of each sign of life that was left."""
        self._database = LedgerDatabase(engine, lambda: None)
        self._run = run
        self._orders = orders
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
            doing = self._orders.doing(in_flight)
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
            self._orders.follow(paused=asked.paused, ending=ending)

    def _said(self, asked: control.Control, ending: control.Ending | None) -> str:
        who = f"asked for by {asked.by}{f' ({asked.why})' if asked.why else ''}"
        if ending is control.Ending.STOP:
            return f"stops after the batches in flight, {who}"
        if asked.paused:
            return f"opens no batch until: stormproof resume {self._run.topology}; {who}"
        if ending is control.Ending.DRAIN:
            return f"opens no new messages, and ends once none is pending, {who}"
        return f"goes on, {who}" if self._orders.pauses else ""

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
