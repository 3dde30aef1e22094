"""What the driver asks of its jobs' heartbeats."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from stormproof.core.heartbeat.record import AttemptKey, Progress
from stormproof.core.heartbeat.wire import Place


class JobHeartbeat(Protocol):
    """The driver's view of one job's tasks. Any thread may ask."""

    @property
    def place(self) -> Place:
        """What tasks need to report; picklable."""
        ...

    @property
    def notices_silence_s(self) -> float:
        """How long it takes to tell silence from a hang: a job may not be blamed earlier. 0: there is no silence."""
        ...

    def progress(self) -> Progress:
        """How far the job is.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def suspects(self) -> tuple[int, ...]:
        """As `stormproof.core.heartbeat.record.most_often`, over the job's tasks."""
        ...


class Heartbeats(Protocol):
    """Where the jobs of one driver report to."""

    def of_job(self, key: AttemptKey) -> AbstractContextManager[JobHeartbeat]:
        """One attempt's heartbeat, which begins empty, while the block runs."""
        ...
