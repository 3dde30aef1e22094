"""Pulses in files: each running task has one in its job's folder, which the driver reads and which outlives the task.

The note of the message in hand costs each row a store into a mapped page, which the page cache keeps when the process is
killed. A task holds a lock on its file while its process lives. On its own machine the driver can so tell a running task
from one whose worker is dead. Spark repeats the latter, which may take a while, and no message hangs meanwhile.

*Not guaranteed*: driver and executors must share the folder; on a network folder the notes of another machine may lag. A
dead worker looks as if it were running where it is on another machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from stormproof.core.arrays import Rows
from stormproof.core.errors import TransientError
from stormproof.core.pulse.record import (
    DONE,
    FAILED,
    LOCKED_ON,
    MESSAGE,
    NOTED,
    RECORD,
    ROWS,
    RUNNING,
    STATE,
    AttemptKey,
    Progress,
    Record,
    most_often,
)

T = TypeVar("T")


class File:
    """A task's end: its file."""

    def __init__(self, folder: Path, stage: int, task: int) -> None:
        try:
            self._file, _ = tempfile.mkstemp(prefix=f"{stage}-{task}-", dir=folder)
        except FileNotFoundError as error:
            # No message's fault, and perhaps not one of the settings either: a driver that took over sweeps the folder.
            raise TransientError(
                f"a task on {socket.gethostname()} does not find its job's folder {folder}: either another driver took "
                "over, or STORMPROOF_STAGING_DIR is not a folder that the driver and every executor reach; "
                "STORMPROOF_PULSE=tcp asks for no shared folder",
                folder=str(folder),
            ) from error
        # The lock comes before the record: whoever finds a whole record may test the lock.
        locked_on = _machine() if _locked(self._file, fcntl.LOCK_EX) else 0
        os.pwrite(self._file, RECORD.pack(0, RUNNING, 0, 0, locked_on), 0)
        self._map = mmap.mmap(self._file, RECORD.size)
        self._slots = memoryview(self._map).cast("q")

    def publish(self, rows: int) -> None:
        """Write the row count."""
        self._slots[ROWS] = rows

    def noting(self, ids: Rows, items: Iterator[T]) -> Iterator[T]:
        """The items; each one's message is written before it is handed out."""
        slots = self._slots
        # The item is taken first, so the note is written just before the item is handed out.
        for item, message in zip(items, ids.tolist(), strict=True):
            slots[MESSAGE] = message
            slots[NOTED] = 1
            yield item
        slots[NOTED] = 0

    def close(self, rows: int, *, failed: bool) -> None:
        """Write the end, and release the lock."""
        self.publish(rows)
        self._slots[STATE] = FAILED if failed else DONE
        self._slots.release()
        self._map.close()
        os.close(self._file)


class FolderPulse:
    """The driver's end of one job: its folder."""

    notices_silence_s: ClassVar[float] = 0.0
    """A task is on this machine, or its lock cannot be tested and it counts as running."""

    def __init__(self, folder: Path) -> None:
        self.place: Final = folder

    def progress(self) -> Progress:
        """The progress of the job with this folder; zeros where the folder does not exist."""
        return progress(self.place)

    def suspects(self) -> tuple[int, ...]:
        """The messages noted most often in tasks that did not end."""
        return suspects(self.place)


class PulseFolders:
    """A folder below `root` for each job."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextmanager
    def of_job(self, key: AttemptKey) -> Generator[FolderPulse]:
        """The pulse of an attempt, in a folder of its own."""
        with job_folder(self._root, key) as folder:
            yield FolderPulse(folder)


def progress(folder: Path) -> Progress:
    """The progress of the job with this folder; zeros where the folder does not exist."""
    records = list(_records(folder))
    return Progress(
        rows=sum(record[ROWS] for _, record in records),
        started=len(records),
        running=sum(record[STATE] == RUNNING and not _dead(path, record) for path, record in records),
    )


@cache
def _machine() -> int:
    """A number for this machine and its present boot, never 0. A lock can be tested only on the machine that took it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # only Linux has this file
        boot = b""
    return zlib.crc32(socket.gethostname().encode() + boot) + 1


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except OSError:  # held by another, or a file system without locks
        return False
    return True


def _dead(path: Path, record: Record) -> bool:
    """Whether the process that locked this file is dead; False where it runs on another machine."""
    if record[LOCKED_ON] != _machine():
        return False
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return _locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(file)


def suspects(folder: Path) -> tuple[int, ...]:
    """As `most_often`, over the tasks of the job with this folder."""
    return most_often(record for _, record in _records(folder))


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
        # Workers that are being killed may still add a file, which the next start sweeps.
        shutil.rmtree(folder, ignore_errors=True)


def suspects_of_dead(root: Path | None, incarnation: str, txid: int) -> tuple[int, ...]:
    """As `suspects`, over all attempts at a batch whose driver died while its job ran.

    Empty where the tasks made no notes, or the folders are gone.
    """
    if root is None:
        return ()
    return most_often(
        record for folder in sorted(root.glob(f"{incarnation}.{txid}.*")) for _, record in _records(folder)
    )


def sweep(root: Path | None, incarnation: str) -> None:
    """Remove the folders that dead drivers of this incarnation left. Call it after reading their suspects."""
    for folder in () if root is None else sorted(root.glob(f"{incarnation}.*")):
        shutil.rmtree(folder, ignore_errors=True)


def _records(folder: Path) -> Iterator[tuple[Path, Record]]:
    """The records of a task's file, and those of a driver that wrote down what it heard: one record a task."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        try:
            path = Path(entry.path)
            content = path.read_bytes()
        except FileNotFoundError:  # removed meanwhile, since the job is over
            continue
        whole = len(content) - len(content) % RECORD.size  # the rest is being made
        for record in RECORD.iter_unpack(content[:whole]):
            yield path, record  # pyright: ignore[reportReturnType]
