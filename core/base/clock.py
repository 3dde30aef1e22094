"""Where time comes from: an object that is passed in, so that tests own it."""

from __future__ import annotations

import queue
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Tells and spends time. Times are aware UTC datetimes; durations are seconds."""

    def now(self) -> datetime:
        """The time of day; may jump. For records and backoff dates, never for durations."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back. For durations."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after this many seconds, or as soon as `wake` was called."""
        ...

    def wake(self) -> None:
        """End a running or the next `sleep` at once."""
        ...


class SystemClock:
    """The machine's clock."""

    def __init__(self) -> None:
        # No Event: a signal handler that wakes the thread that it interrupts could wait for ever.
        self._woken = queue.SimpleQueue[None]()

    def now(self) -> datetime:
        """The machine's time of day, in UTC."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """The machine's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for so long, or until `wake`."""
        with suppress(queue.Empty):
            self._woken.get(timeout=max(0.0, seconds))
            while True:
                self._woken.get_nowait()

    def wake(self) -> None:
        """End the wait."""
        self._woken.put(None)


class ManualClock:
    """A clock that moves only when it is told to, or slept on: sleeping takes no real time."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2000, 1, 1, tzinfo=UTC)
        self._elapsed_s = 0.0

    def now(self) -> datetime:
        """The time that this clock was moved to."""
        return self._now

    def monotonic_s(self) -> float:
        """The seconds that this clock was moved by."""
        return self._elapsed_s

    def sleep(self, seconds: float) -> None:
        """Move on by so many seconds."""
        self.advance(max(0.0, seconds))

    def wake(self) -> None:
        """Nothing to end: sleeping takes no time."""

    def advance(self, seconds: float) -> None:
        """Move on; time cannot go backwards."""
        if seconds < 0:
            raise ValueError(f"time can't go backwards (by {seconds} s)")
        self._elapsed_s += seconds
        self._now += timedelta(seconds=seconds)
