"""The pulse: tasks report their progress in small files, which the driver reads and which outlive the tasks.

Each running task has one file in its job's folder: how many rows it has worked on, whether it has ended, and, where the
job is `careful`, the message in hand. From these files the driver learns whether a job is alive (see
`stormproof.trident.lease_keeper`), and which messages were in hand when a worker, or the driver itself, died.

The row count costs a loop nothing: a thread looks five times a second at how far the loop's own iterator is. The note of
the message in hand costs each row a store into a mapped page, which the page cache keeps when the process is killed.

A task holds a lock on its file while its process lives. On its own machine the driver can so tell a running task from one
whose worker is dead. Spark repeats the latter, which may take a while, and no message hangs meanwhile.

*Not guaranteed*: a note does not survive a power loss. Driver and executors must share the folder; on a network folder the
notes of another machine may lag. A dead worker looks as if it were running where it is on another machine, or where its
function had forked a process that lives on. A note only decides what is tried first, never a result.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import struct
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from stormproof.core.arrays import Rows
from stormproof.core.errors import TransientError

T = TypeVar("T")

EVERY_S: Final = 0.2
"""How often a task's row count is written."""

SUSPECTS_MAX: Final = 8
"""Where more messages than this are equally suspect, none is named."""

_RECORD: Final = struct.Struct("=qqqqq")
_ROWS, _STATE, _NOTED, _MESSAGE, _LOCKED_ON = range(5)
_RUNNING, _DONE, _FAILED = range(3)


class Pulse:
    """One running task's signs of life. Made by `running`. Only the task's thread may call it.

    A task calls `beat` for each record batch that it read, combined or wrote. Loops over rows go through `each`. In careful
    mode the task calls `at` with the rows' message numbers before it hands rows to a row-wise function.
    """

    def __init__(self, folder: Path, stage: int, task: int, *, careful: bool) -> None:
        self.careful = careful
        try:
            self._file, path = tempfile.mkstemp(prefix=f"{stage}-{task}-", dir=folder)
        except FileNotFoundError as error:
            # No message's fault, and perhaps not one of the settings either: a driver that took over sweeps the folder.
            raise TransientError(
                f"a task on {socket.gethostname()} does not find its job's folder {folder}: either another driver took "
                "over, or STORMPROOF_STAGING_DIR is not a folder that the driver and every executor reach",
                folder=str(folder),
            ) from error
        self.path = Path(path)
        # The lock comes before the record: whoever finds a whole record may test the lock.
        locked_on = _machine() if _locked(self._file, fcntl.LOCK_EX) else 0
        os.pwrite(self._file, _RECORD.pack(0, _RUNNING, 0, 0, locked_on), 0)
        self._map = mmap.mmap(self._file, _RECORD.size)
        self._slots = memoryview(self._map).cast("q")
        # (rows of finished loops and batches, the running loop's iterator, the number of its items); one tuple, so that the
        # publishing thread never sees half of a change.
        self._at: tuple[int, Iterator[object], int] = (0, iter(()), 0)
        self._ids: Rows | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name="stormproof-pulse", daemon=True)
        self._thread.start()

    # What a task calls.

    def beat(self, rows: int = 1) -> None:
        """Add to the number of rows worked on; any number above 0 is a sign of life."""
        self._at = (self._rows() + rows, iter(()), 0)

    def reset(self) -> None:
        """Give a sign of life inside a long call: the timeout counts from here (Storm's reset timeout)."""
        done, left, total = self._at
        self._at = (done + 1, left, total)

    def at(self, ids: Rows | None) -> None:
        """Set the message number of each item of the next `each`; None where rows belong to no single message.

        Only needed where `careful` is on. It holds until the next call of `at`.
        """
        self._ids = ids

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """Iterate over the items; each one taken is a sign of life.

        In careful mode each item's message is noted before the item is handed out. The note is removed after the last item.
        """
        left = iter(items)
        self._at = (self._rows(), left, len(items))
        ids = self._ids
        return left if ids is None or not self.careful else self._noting(ids, left)

    def publish(self) -> None:
        """Write the row count now. The pulse's own thread does so by itself."""
        self._slots[_ROWS] = self._rows()

    # The end.

    def __enter__(self) -> Pulse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.publish()
        self._slots[_STATE] = _DONE if kind is None else _FAILED
        self._slots.release()
        self._map.close()
        os.close(self._file)

    # Its own.

    def _rows(self) -> int:
        done, left, total = self._at
        return done + total - length_hint(left)

    def _noting(self, ids: Rows, items: Iterator[T]) -> Iterator[T]:
        slots = self._slots
        # The item is taken first, so the note is written just before the item is handed out.
        for item, message in zip(items, ids.tolist(), strict=True):
            slots[_MESSAGE] = message
            slots[_NOTED] = 1
            yield item
        slots[_NOTED] = 0

    def _keep_publishing(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.publish()
            except MemoryError:  # the user's function has taken all memory, and gets the same error
                continue


@contextmanager
def running(folder: Path | None, stage: int, task: int, *, careful: bool = False) -> Generator[Pulse | None]:
    """A task's pulse while the block runs; None where there is no folder.

    Where an exception leaves the block, the task has failed, and the message that it had in hand stays a suspect.

    Raises:
        TransientError: this machine does not have the folder: another driver took over, or the place is wrong.
    """
    if folder is None:
        yield None
        return
    with Pulse(folder, stage, task, careful=careful) as pulse:
        yield pulse


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. A value that differs from the one before is a sign of life.

    `rows` is the sum over its tasks. `started` is the number of tasks begun, where a repeated task counts again; `running`
    is how many of those have neither ended nor died with their worker.
    """

    rows: int = 0
    started: int = 0
    running: int = 0


def progress(folder: Path) -> Progress:
    """The progress of the job with this folder; zeros where the folder does not exist."""
    records = list(_records(folder))
    return Progress(
        rows=sum(record[_ROWS] for _, record in records),
        started=len(records),
        running=sum(record[_STATE] == _RUNNING and not _dead(path, record) for path, record in records),
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


def _dead(path: Path, record: tuple[int, ...]) -> bool:
    """Whether the process that locked this file is dead; False where it runs on another machine."""
    if record[_LOCKED_ON] != _machine():
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
    """The messages that were noted most often in tasks that did not end; none where these are more than `SUSPECTS_MAX`.

    A task that Spark repeats notes the same message each time that it dies. A task beside it that was stopped notes its
    message once.
    """
    return _most_often([folder])


@contextmanager
def job_folder(root: Path | None, incarnation: str, txid: int, attempt: int) -> Generator[Path | None]:
    """A folder for one attempt's job while the block runs; it remains where the driver dies. None where `root` is None."""
    if root is None:
        yield None
        return
    folder = root / f"{incarnation}.{txid}.{attempt}"
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
    return () if root is None else _most_often(sorted(root.glob(f"{incarnation}.{txid}.*")))


def sweep(root: Path | None, incarnation: str) -> None:
    """Remove the folders that dead drivers of this incarnation left. Call it after reading their suspects."""
    for folder in () if root is None else sorted(root.glob(f"{incarnation}.*")):
        shutil.rmtree(folder, ignore_errors=True)


def _most_often(folders: Sequence[Path]) -> tuple[int, ...]:
    noted = Counter(
        record[_MESSAGE]
        for folder in folders
        for _, record in _records(folder)
        if record[_NOTED] and record[_STATE] != _DONE
    )
    most = max(noted.values(), default=0)
    named = sorted(message for message, times in noted.items() if times == most)
    return tuple(named) if len(named) <= SUSPECTS_MAX else ()


def _records(folder: Path) -> Iterator[tuple[Path, tuple[int, ...]]]:
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
        if len(content) == _RECORD.size:  # else it is being made
            yield path, _RECORD.unpack(content)
