"""The driver's end of one job: what was heard from its tasks, and which of them are dead or silent.

- A connection is open: the task runs. Where its kernel does not answer either, for `SILENT_S`, the task is *silent*.
- The connection came to its end without the task's: the process is dead, unless it connects again within `GRACE_S`.
- The connection broke (a reset, or no answer for 9 s): the task is silent until it connects again. It may live.

Where tasks run below the driver, on its machine (`direct`), nothing lies between: there is no silence, and a connection that
is over is a dead process.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stormproof.core.base.clock import Clock
from stormproof.core.heartbeat.wire import (
    AWAITED,
    DONE,
    FAILED,
    KEEPALIVE_S,
    NOTED,
    NOTHING,
    PASSAGE,
    PASSED,
    RECORD,
    ROWS,
    RUNNING,
    STAGE,
    STATE,
    AttemptKey,
    Place,
    Progress,
    Record,
    most_often,
)


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
        """As `stormproof.core.heartbeat.wire.most_often`, over the job's tasks."""
        ...


class Heartbeats(Protocol):
    """Where the jobs of one driver report to."""

    def of_job(self, key: AttemptKey) -> AbstractContextManager[JobHeartbeat]:
        """One attempt's heartbeat, which begins empty, while the block runs."""
        ...


log = logging.getLogger("stormproof.heartbeat")

SILENT_S: Final = 2.5 * KEEPALIVE_S
"""A machine answers each `KEEPALIVE_S`. After so long without an answer the task on it is silent."""

GRACE_S: Final = 3.0
"""How long a task whose connection was closed by something between may take to connect again, before it counts as dead."""

QuietFor = Callable[[socket.socket], float]
"""Seconds since the other machine was heard."""

_ANSWERED_AT: Final = struct.Struct("@56xI")
"""`tcpi_last_ack_recv` of Linux's `tcp_info`, in milliseconds."""


def quiet_for(connection: socket.socket) -> float:
    """Seconds since the other machine's kernel answered; 0.0 where this system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ANSWERED_AT.size)
    except OSError:  # it broke just now, which its reader finds
        return 0.0
    (milliseconds,) = _ANSWERED_AT.unpack(info)
    return float(milliseconds) / 1_000


@dataclass(slots=True)
class _Task:
    """One execution of a task, which keeps its place when it connects again."""

    number: int
    record: Record = NOTHING
    connection: socket.socket | None = None
    closed_at_s: float | None = None
    """When its connection came to an end; None where it is open, or broke."""


class Heard:
    """What was heard from one job's tasks. The listener's thread writes, any thread asks."""

    def __init__(
        self, place: Place, folder: Path | None, clock: Clock, quiet: QuietFor, *, direct: bool = False
    ) -> None:
        self.notices_silence_s: Final = 0.0 if direct else 2 * SILENT_S
        self._direct, self._grace_s = direct, 0.0 if direct else GRACE_S
        self.place: Final = place
        self._folder, self._clock, self._quiet = folder, clock, quiet
        self._lock = threading.Lock()
        self._tasks: dict[bytes, _Task] = {}
        self._file: int | None = None
        self._lost: str | None = None

    # The driver asks.

    def progress(self) -> Progress:
        """How far the job is; see above for what is dead and what is silent.

        Raises:
            OSError: nobody listens any more.
        """
        if self._lost is not None:
            raise OSError(self._lost)
        now_s = self._clock.monotonic_s()
        with self._lock:
            tasks = list(self._tasks.values())
            states = [self._state(task, now_s) for task in tasks]
        return Progress(
            rows=sum(task.record[ROWS] for task in tasks),
            started=len(tasks),
            running=sum(running for running, _ in states),
            silent=sum(silent for _, silent in states),
            tasks=tuple(
                task.record
                for task, (running, _) in zip(tasks, states, strict=True)
                if running or task.record[STATE] == DONE
            ),
        )

    def suspects(self) -> tuple[int, ...]:
        """The messages noted most often in tasks that did not end."""
        with self._lock:
            return most_often(task.record for task in self._tasks.values())

    def _state(self, task: _Task, now_s: float) -> tuple[bool, bool]:
        """Whether it runs, and whether it is silent."""
        if task.record[STATE] != RUNNING:
            return False, False
        if task.connection is not None:
            return True, not self._direct and self._quiet(task.connection) > SILENT_S
        if task.closed_at_s is None:
            return True, True
        return now_s - task.closed_at_s < self._grace_s, False

    # The listener tells.

    def connected(self, run: bytes, connection: socket.socket) -> socket.socket | None:
        """A task has connected; returns the connection that it had before, if that is still open."""
        with self._lock:
            task = self._tasks.setdefault(run, _Task(len(self._tasks)))
            before, task.connection, task.closed_at_s = task.connection, connection, None
            return before

    def reported(self, run: bytes, record: Record) -> None:
        """A task has sent a record."""
        with self._lock:
            task = self._tasks[run]
            before, task.record = task.record, record
            if before[NOTED] or record[NOTED]:
                self._write_down(task.number, record)

    def disconnected(self, run: bytes, connection: socket.socket, *, broken: bool) -> None:
        """A connection is over; no effect where the task has a newer one."""
        with self._lock:
            task = self._tasks[run]
            if task.connection is connection:
                task.connection = None
                task.closed_at_s = None if broken and not self._direct else self._clock.monotonic_s()

    def lost(self, why: str) -> None:
        """Nobody listens any more: nothing is known of the tasks from here on."""
        self._lost = why

    def connections(self) -> list[socket.socket]:
        """The connections that are open."""
        with self._lock:
            return [task.connection for task in self._tasks.values() if task.connection is not None]

    def close(self) -> None:
        """The job is over: write down nothing more."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = self._folder = None

    def _write_down(self, number: int, record: Record) -> None:
        if self._folder is None:
            return
        try:
            if self._file is None:
                self._file = os.open(self._folder / NOTES, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._file, RECORD.pack(*record), number * RECORD.size)
        except OSError as error:  # a note only saves time where this driver dies
            log.warning("notes cannot be written to %s, and are not from here on: %s", self._folder, error)
            self._folder = None


def is_record(record: Record) -> bool:
    """Whether a task can have sent this."""
    counts = min(record[: STAGE + 1]) >= 0 and record[PASSED] <= record[PASSAGE]
    return counts and RUNNING <= record[STATE] <= FAILED and {record[NOTED], record[AWAITED]} <= {0, 1}


# ---- what a driver leaves behind when it dies: the notes of what its tasks had in hand, in a folder for each job

NOTES: Final = "notes"
"""The file in a job's folder in which the driver writes down notes, one record a task."""


@contextmanager
def job_folder(root: Path, key: AttemptKey) -> Generator[Path]:
    """A folder for one attempt's job while the block runs; it remains where the driver dies."""
    folder = root / ".".join(map(str, key))
    # It exists already where an earlier driver died during the same attempt.
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # its notes name messages
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def suspects_of_dead(root: Path | None, incarnation: str, txid: int) -> tuple[int, ...]:
    """As `most_often`, over all attempts at a batch whose driver died while its job ran.

    Empty where the tasks made no notes, or the folders are gone.
    """
    if root is None:
        return ()
    return most_often(record for folder in root.glob(f"{incarnation}.{txid}.*") for record in _records(folder))


def sweep(root: Path | None, incarnation: str) -> None:
    """Remove the folders that dead drivers of this incarnation left. Call it after reading their suspects."""
    for folder in () if root is None else sorted(root.glob(f"{incarnation}.*")):
        shutil.rmtree(folder, ignore_errors=True)


def _records(folder: Path) -> Iterator[Record]:
    try:
        content = (folder / NOTES).read_bytes()
    except FileNotFoundError:
        return
    whole = len(content) - len(content) % RECORD.size  # the rest was being written
    yield from RECORD.iter_unpack(content[:whole])  # pyright: ignore[reportReturnType]
