"""The inline engine: all tasks in this process, one after another; for tests, and for trying a topology out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias, TypeVar

import pyarrow as pa

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import JobFailed, StormproofError, UsageError
from stormproof.core.base.machine_faults import classified
from stormproof.core.contract.source import SliceReader
from stormproof.core.heartbeat.listener import DriverAddress
from stormproof.core.source.group import SpoutReader
from stormproof.core.start.preflight import Probe, first_fault
from stormproof.core.task.account import Observer
from stormproof.core.task.job import Job, JobKey, StageJob, WireRow, job_report, rows_for, stage_jobs
from stormproof.core.task.task import run_task
from stormproof.core.tracking.verdict import JobReport

T = TypeVar("T")
"""What is shuffled: task numbers, or wire rows."""

Tamper: TypeAlias = Callable[[int, list[WireRow]], list[WireRow]]
"""For tests: changes the wire rows before a stage, whose number it is given."""


class InlineEngine:
    """Runs a job's tasks in this process.

    `rng` shuffles the order of the tasks, and the order in which rows arrive: no report may depend on it. `observe` is
    called with everything that components emit, also in tasks that fail later.

    Threads: any number may run jobs and cancel them. Forks: a fork may run jobs of its own; one that a user's function
    makes ends when it returns from that function.
    """

    name = "inline"

    def __init__(
        self,
        parallelism: int = 2,
        *,
        rng: Random | None = None,
        clock: Clock | None = None,
        tamper: Tamper | None = None,
        observe: Observer | None = None,
    ) -> None:
        if parallelism < 1:
            raise UsageError(f"parallelism is {parallelism}; at least 1 task is needed")
        self._parallelism = parallelism
        self._rng = rng
        self._clock = clock or SystemClock()
        self._tamper = tamper
        self._observe = observe
        self._lock = threading.Lock()
        self._running: dict[JobKey, threading.Event] = {}
        self._mine = threading.local()

    @property
    def parallelism(self) -> int:
        """The number of source tasks that a job should have."""
        return self._parallelism

    @property
    def driver_address(self) -> DriverAddress | None:
        """None: all tasks run in this process."""
        return None

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end.

        Raises:
            JobFailed: a task ended with an error, which is this one's cause, or `cancel` was called.
            MachineUnavailable, MachineUnfit: a task met a fault of this machine.
        """
        if not job.readers:
            raise UsageError("a job needs at least one reader")
        started_s = self._clock.monotonic_s()
        rows: list[WireRow] = []
        parts = stage_jobs(job, self._parallelism)
        with self._cancellable(job):
            for part in parts:
                if part.stage:
                    rows = self._tamper(part.stage, rows) if self._tamper else rows
                rows = self._run_stage(part, rows)
        elapsed_ms = (self._clock.monotonic_s() - started_s) * 1_000
        return job_report(rows, parts[0].tasks, {"job": elapsed_ms})

    def ask(self, probes: Sequence[Probe]) -> None:
        """Try every probe in this process, which runs all tasks.

        Raises:
            MachineUnfit, MachineUnavailable, StoreUnavailable: this machine lacks something.
        """
        fault = first_fault(probes)
        if fault is not None:
            raise fault

    def cancel(self, key: JobKey) -> None:
        """End the job with this key at its next record batch, or within a second where it waits for several calls at a time;
        its `run` raises JobFailed. No effect where none runs.
        """
        with self._lock:
            if key in self._running:
                self._running[key].set()

    def close(self) -> None:
        """There is nothing to release."""

    def _run_stage(self, part: StageJob, rows: list[WireRow]) -> list[WireRow]:
        order = self._shuffled(list(range(part.tasks[part.stage])))
        results: dict[int, list[WireRow]] = {}
        for task in order:
            results[task] = self._run_task(part, task, rows_for(rows, task))
        return [row for task in order for row in results[task]]

    def _run_task(self, part: StageJob, task: int, incoming: list[WireRow]) -> list[WireRow]:
        if part.stage == 0:
            part = replace(part, readers=tuple(_watched(r, self._go_on) for r in part.readers))
        try:
            return list(run_task(part, task, self._watched(incoming), self._observe, self._go_on))
        except StormproofError:
            raise
        except Exception as error:
            raise classified(error, f"task {task} of stage {part.stage}") from error

    def _watched(self, incoming: list[WireRow]) -> Iterator[WireRow]:
        for row in self._shuffled(incoming):
            self._go_on()
            yield row
        self._go_on()

    @contextmanager
    def _cancellable(self, job: Job) -> Generator[None]:
        with self._lock:
            self._mine.cancelled = self._running[job.key] = threading.Event()
        try:
            yield
        finally:
            with self._lock:
                del self._running[job.key]

    def _go_on(self) -> None:
        if self._mine.cancelled.is_set():
            raise JobFailed("the job was cancelled")

    def _shuffled(self, items: list[T]) -> list[T]:
        if self._rng is not None:
            self._rng.shuffle(items)
        return items


@dataclass(frozen=True, slots=True)
class _WatchedReader:
    """A reader that stops at the next record batch once the job is cancelled."""

    reader: SliceReader
    go_on: Callable[[], None]

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """What the reader gives; `go_on` raises where the job is cancelled."""
        self.go_on()
        for batch in self.reader.read(seed, excluded, batch_rows):
            self.go_on()
            yield batch


def _watched(reader: SliceReader, go_on: Callable[[], None]) -> SliceReader:
    if isinstance(reader, SpoutReader):
        return replace(reader, reader=_WatchedReader(reader.reader, go_on))
    return _WatchedReader(reader, go_on)
