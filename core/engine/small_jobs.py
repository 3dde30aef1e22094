"""Which jobs are small: their tasks' work is less than what it costs Spark to hand rows from stage to stage."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

from stormproof.core.task.job import Job, StageJob
from stormproof.core.tracking.verdict import JobReport

SMALL_JOB_MS: Final = 100.0
TASKS_MAX: Final = 16
"""A job with more tasks has each of them on a core of its own: their fixed costs, one after another, would be too much."""


class SmallJobs:
    """Foretells the work of a batch from that of the batch before it.

    A life's first job is never small: nothing is known of its functions. What is foretold is the time of all tasks
    together (`ComponentCounts.busy_ns`) for each message, times the messages. Where a batch takes longer than foretold, it
    runs on one core, and the next one is not small. `limit_ms` 0: no job is; infinite: every one, the first, too.

    Threads: any number.
    """

    def __init__(self, limit_ms: float) -> None:
        self._limit_ns = limit_ms * 1e6
        self._lock = threading.Lock()
        self._ns_a_message: dict[str, float] = {}

    def is_small(self, job: Job, parts: Sequence[StageJob]) -> bool:
        """Whether all tasks of this job are better run one after another in one process.

        A job that looks for a culprit is not: what one of its tasks meets must not be laid at another's door.
        """
        if not self._limit_ns or job.messages is None or job.careful or job.per_message:
            return False
        if len(parts) < 2 or sum(parts[0].tasks) > TASKS_MAX:
            return False
        if math.isinf(self._limit_ns):
            return True
        with self._lock:
            known = self._ns_a_message.get(job.incarnation)
        return known is not None and known * job.messages <= self._limit_ns

    def ran(self, job: Job, report: JobReport) -> None:
        """Note how long the tasks of a job have worked."""
        if report.read_messages:
            work_ns = sum(counts.busy_ns for counts in report.counts.components.values())
            with self._lock:
                self._ns_a_message[job.incarnation] = work_ns / report.read_messages
