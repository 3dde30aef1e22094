"""The pulse: tasks say how far they are, in small files that the driver reads, and that outlive them.

Each running task has one file in its job's folder: how many rows it has worked on, whether it has ended, and, where the
job is `careful`, the message that is in hand. The driver learns from it whether a job is alive (see
`stormproof.trident.lease_keeper`), and which messages were in hand when a worker died, or when the driver itself did.

The row count costs a loop nothing: a thread looks five times a second at how far the loop's own iterator is. The note of
the message in hand costs each row a store into a mapped page, which the page cache keeps when the process is killed.

A task holds a lock on its file for as long as its process lives. On one machine the driver so tells a task that runs from
one whose worker is dead: Spark is about to repeat that one, which may take a while, and no message hangs meanwhile.

*Not guaranteed*: a note survives no power loss; the folder must be one that executors and driver see alike (on a network
folder the notes of another machine may lag). A dead worker on another machine looks as if it were running, and so does one
whose function had started a process of its own by fork that lives on. What rests on a note is only what is tried first,
never a result.
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
"""More messages in hand than this, with nothing to tell them apart, name nobody."""

_RECORD: Final = struct.Struct("=qqqqq")
_ROWS, _STATE, _NOTED, _MESSAGE, _LOCKED_ON = range(5)
_RUNNING, _DONE, _FAILED = range(3)


class Pulse:
    """One running task's sign of life. Made by `running`; everything but its own thread is called by the task's thread.

    A stage calls `beat` for each record batch that it read, combined or wrote, and, in careful mode only, `at` with the
    rows' message numbers before it hands rows to a row-wise function. Loops over rows go through `each`.
    """

    def __init__(self, folder: Path, stage: int, task: int, *, careful: bool) -> None:
        self.careful = careful
        try:
            self._file, path = tempfile.mkstemp(prefix=f"{stage}-{task}-", dir=folder)
        except FileNotFoundError as error:
            # No fault of a message, and not for certain one of the settings: a driver that took over sweeps the folder.
            raise TransientError(
                f"a task on {socket.gethostname()} does not find its job's folder {folder}: either another driver took "
                "over, or STORMPROOF_STAGING_DIR is not a folder that the driver and every executor reach",
                folder=str(folder),
            ) from error
        self.path = Path(path)
        # The lock comes first: whoever finds a whole record may ask for it.
        locked_on = _machine() if _locked(self._file, fcntl.LOCK_EX) else 0
        os.pwrite(self._file, _RECORD.pack(0, _RUNNING, 0, 0, locked_on), 0)
        self._map = mmap.mmap(self._file, _RECORD.size)
        self._slots = memoryview(self._map).cast("q")
        # (rows of loops and batches that are over, the items that the running loop has still to take, how many it had):
        # one tuple, so that the thread never sees half of a change.
        self._at: tuple[int, Iterator[object], int] = (0, iter(()), 0)
        self._ids: Rows | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name="stormproof-pulse", daemon=True)
        self._thread.start()

    # What a task calls.

    def beat(self, rows: int = 1) -> None:
        """So many more rows were worked on; anything above 0 is a sign of life."""
        self._at = (self._rows() + rows, iter(()), 0)

    def reset(self) -> None:
        """A sign of life from inside a call that takes long: the timeout counts from here (Storm's reset timeout)."""
        done, left, total = self._at
        self._at = (done + 1, left, total)

    def at(self, ids: Rows | None) -> None:
        """The message number of each item of the next `each`; None where rows belong to no single message.

        Only needed where `careful` is on. Holds until the next call of `at`.
        """
        self._ids = ids

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """The items, one after the other; each one taken is a sign of life.

        In careful mode each item's message is noted before it is handed out, and the note is gone once all were taken.
        """
        left = iter(items)
        self._at = (self._rows(), left, len(items))
        ids = self._ids
        return left if ids is None or not self.careful else self._noting(ids, left)

    def note(self, message: int | None) -> None:
        """The message in hand, where the caller has a loop of its own; None: none is. Does nothing unless careful."""
        if not self.careful:
            return
        if message is None:
            self._slots[_NOTED] = 0
        else:
            self._slots[_MESSAGE] = message
            self._slots[_NOTED] = 1

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
        # The item comes first: the note is written when the last call is over, just before the next.
        for item, message in zip(items, ids.tolist(), strict=True):
            slots[_MESSAGE] = message
            slots[_NOTED] = 1
            yield item
        slots[_NOTED] = 0

    def _keep_publishing(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.publish()
            except MemoryError:  # the user's function has taken it all, and will be told so itself
                continue


@contextmanager
def running(folder: Path | None, stage: int, task: int, *, careful: bool = False) -> Generator[Pulse | None]:
    """A task's pulse while the block runs; None, at no cost, where there is no folder.

    Left by an exception, the task counts as failed: what it had in hand stays a suspect.

    Raises:
        TransientError: the folder is not there on this machine: another driver took over, or the place is wrong.
    """
    if folder is None:
        yield None
        return
    with Pulse(folder, stage, task, careful=careful) as pulse:
        yield pulse


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. Another value than before is a sign of life.

    `rows` is the sum over its tasks, `started` the number of tasks begun (repeated ones again), `running` how many of
    those have neither ended nor died with their worker.
    """

    rows: int = 0
    started: int = 0
    running: int = 0


def progress(folder: Path) -> Progress:
    """How far the job is that has this folder; nothing at all where the folder is not there."""
    records = list(_records(folder))
    return Progress(
        rows=sum(record[_ROWS] for _, record in records),
        started=len(records),
        running=sum(record[_STATE] == _RUNNING and not _dead(path, record) for path, record in records),
    )


@cache
def _machine() -> int:
    """A number for this machine since its start, never 0: what is locked here can be asked for here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:  # there is none but on Linux
        boot = b""
    return zlib.crc32(socket.gethostname().encode() + boot) + 1


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how)
    except OSError:  # held by another, or a file system without locks
        return False
    return True


def _dead(path: Path, record: tuple[int, ...]) -> bool:
    """Whether the process that locked this file, here, is gone."""
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
    """The messages that were in hand in tasks that did not come to their end, most often noted first.

    A task that Spark repeats notes the same message at each death, an innocent neighbour that was stopped only once: so
    those that were noted most often are named, and none where they are more than `SUSPECTS_MAX`.
    """
    return _most_often([folder])


@contextmanager
def job_folder(root: Path | None, incarnation: str, txid: int, attempt: int) -> Generator[Path | None]:
    """The folder of one attempt's job, made here and gone at the end, unless the driver dies within; None for None."""
    if root is None:
        yield None
        return
    folder = root / f"{incarnation}.{txid}.{attempt}"
    # There is one already where an earlier driver of this name died over the same attempt.
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # its notes name messages
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        # Killed workers may still add a file: what is left is swept at the next start.
        shutil.rmtree(folder, ignore_errors=True)


def suspects_of_dead(root: Path | None, incarnation: str, txid: int) -> tuple[int, ...]:
    """The messages that were in hand when the driver died while a batch's job ran; as `suspects`, over its attempts.

    Empty where its tasks made no notes, or its folder is gone.
    """
    return () if root is None else _most_often(sorted(root.glob(f"{incarnation}.{txid}.*")))


def sweep(root: Path | None, incarnation: str) -> None:
    """Remove what dead drivers left of this incarnation's jobs. Call it once their suspects were read."""
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
        except FileNotFoundError:  # removed meanwhile: the job is over
            continue
        if len(content) == _RECORD.size:  # else it was just made
            yield path, _RECORD.unpack(content)
