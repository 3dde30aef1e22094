"""What an engine does: it runs jobs, and reports the outcome of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stormproof.core.heartbeat.listener import DriverAddress
from stormproof.core.start.preflight import Probe
from stormproof.core.task.job import Job, JobKey
from stormproof.core.tracking.verdict import JobReport


class Engine(Protocol):
    """Runs jobs. Nothing that calls it may depend on which engine it is."""

    name: str

    @property
    def parallelism(self) -> int:
        """The number of source tasks that a job should have."""
        ...

    @property
    def driver_address(self) -> DriverAddress | None:
        """Where tasks reach this process over the network; None where all of them run on this machine, below it."""
        ...

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end. Several threads may run jobs at once.

        Raises:
            JobFailed: the job ended without a report. Nothing of it counts, and its files belong to a dead attempt. Where an
                error outside user code ended it, the detail `outside` names that error.
            MachineUnavailable, MachineUnfit: a task met a fault of its machine; no message may be blamed for it.
        """
        ...

    def ask(self, probes: Sequence[Probe]) -> None:
        """Have the machines that run tasks try what every task needs, before any message is opened.

        Guarantee:
            Each free slot of the engine is asked once.
        Not guaranteed:
            A machine that is busy, or that joins later, may not be asked.

        Raises:
            MachineUnfit: a machine cannot run tasks; names it, and what to do.
            MachineUnavailable, StoreUnavailable: a machine lacks something that may come back.
        """
        ...

    def cancel(self, key: JobKey) -> None:
        """End the job with this key, from another thread; its `run` raises JobFailed. No effect where none runs."""
        ...

    def close(self) -> None:
        """Release the engine's resources."""
        ...
