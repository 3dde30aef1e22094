"""What a carrier of pulses is: to a task, and to the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol, TypeVar

from stormproof.core.arrays import Rows
from stormproof.core.pulse.record import AttemptKey, Progress
from stormproof.core.pulse.wire import Place

T = TypeVar("T")


class Carrier(Protocol):
    """Carries one task's reports to the driver."""

    def publish(self, rows: int) -> None:
        """Report the number of rows worked on. Called several times a second, by a thread of the pulse's."""
        ...

    def noting(self, ids: Rows, items: Iterator[T]) -> Iterator[T]:
        """The items; before each is handed out, its message's number is where it outlives this process.

        Raises:
            TransientError: the driver does not hear this task any more.
        """
        ...

    def close(self, rows: int, *, failed: bool) -> None:
        """Report the end; the thread of `publish` has ended."""
        ...


class JobPulse(Protocol):
    """The driver's view of one job's tasks. Any thread may ask."""

    @property
    def place(self) -> Place:
        """What tasks need to report; picklable."""
        ...

    notices_silence_s: ClassVar[float]
    """How long it takes to tell silence from a hang: a job may not be blamed earlier. 0: there is no silence."""

    def progress(self) -> Progress:
        """How far the job is.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def suspects(self) -> tuple[int, ...]:
        """As `stormproof.core.pulse.record.most_often`, over the job's tasks."""
        ...


class Pulses(Protocol):
    """Where the jobs of one driver report to."""

    def of_job(self, key: AttemptKey) -> AbstractContextManager[JobPulse]:
        """One attempt's pulse, which begins empty, while the block runs."""
        ...
