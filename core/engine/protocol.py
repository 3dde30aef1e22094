"""What an engine does: run one batch of a compiled topology, and report what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stormproof.core.job import Job, JobKey
from stormproof.core.preflight import Probe
from stormproof.core.tracking.report import JobReport


class Engine(Protocol):
    """Runs jobs. Nothing that calls it may depend on which engine it is."""

    name: str

    @property
    def parallelism(self) -> int:
        """How many source tasks a job should have."""
        ...

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end. Several threads may run jobs at once.

        Raises:
            JobFailed: the job ended without a report; nothing of it counts, its files belong to a dead attempt. Where an
                error outside user code ended it, the detail `outside` names that one.
            MachineUnavailable, MachineUnfit: a task met what is a machine's fault; no message may be blamed for it.
        """
        ...

    def ask(self, probes: Sequence[Probe]) -> None:
        """Have the machines that run tasks try what every task needs, before any message is opened.

        Each slot of the engine is asked once, where it is free; no more than that is promised of machines that are busy or
        come later.

        Raises:
            MachineUnfit: one cannot run tasks; names it, and what to do.
            MachineUnavailable, StoreUnavailable: one lacks what may come back.
        """
        ...

    def cancel(self, key: JobKey) -> None:
        """End the job with this key, from another thread; its `run` raises JobFailed. Without effect where none runs."""
        ...

    def close(self) -> None:
        """Let the engine's resources go."""
        ...
