"""SIGINT and SIGTERM end a run in order."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from types import FrameType

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
BY_SIGNAL: Final = "signal"
"""`RunStatistics.stopped` then."""

ONE_SIGNAL_S: Final = 0.3
"""Two signals within this time count as one: whoever ends a process group often signals process and group."""

_STDERR: Final = 2
"""The descriptor: a handler may run while `sys.stderr` is in use."""


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
        del frame
        now_s = self._now_s()
        if self._asked_at_s is not None:
            if now_s - self._asked_at_s >= ONE_SIGNAL_S:
                self._end(signal.Signals(number))
            return
        self._asked_at_s = now_s
        when = "as soon as everything has started" if self._running is None else "after the batches in flight"
        tell(f"{signal.Signals(number).name}: stopping {when}; once more stops at once")
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
    with suppress(OSError):
        os.write(_STDERR, f"stormproof: {text}\n".encode())


def end_jvm() -> None:
    """End Spark's JVM, which may not watch for our end yet. An embedded Postgres keeps running for its other users."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            if child.name() == "java":
                child.kill()
        except psutil.Error:
            continue
