"""What a running driver is asked to do: go on, open nothing for now, or end in one of two ways."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from stormproof.trident.ledger.control import Doing, Ending


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
