"""One process: forks of it must not use its connections, nor go on as a second driver; its cycle collector may wait.

A user's function may fork (`os.fork`, `multiprocessing`, a `preexec_fn`). The child has a copy of everything: sockets,
locks, the driver's whole stack. What belongs to one process keeps the `process_life()` that it was made in, and compares.

Python's cycle collector makes fewer passes while rows go through a user's code, and while messages come from a server.
Tuples and messages are many short-lived objects without cycles. The collector runs after every 700 of them, and every
few thousand it makes a full pass over all objects of the process, most of them modules. Measured, that is half of the
time of a bolt that emits and acks (1.9 against 0.9 us a tuple), and a quarter of a driver's processor time for messages
from Redis.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, NamedTuple

from stormproof.core.base.errors import UsageError

FORK_STATUS: Final = 70
"""Exit status of a fork that came back from a user's function without an exit status of its own."""

_forks = 0


class ProcessLife(NamedTuple):
    """One process: its id, and the number of forks that led to it, since an id may be used again."""

    pid: int
    forks: int


class _ThisThread(threading.local):
    life: ProcessLife | None = None
    """The process in which the innermost `kept_from_forks` began."""


_here = _ThisThread()


def _in_child() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_in_child)


def process_life() -> ProcessLife:
    """This process; each fork of it has another value. Costs one system call."""
    return ProcessLife(os.getpid(), _forks)


class OneProcess:
    """A lock on what lies in a process's memory: one thread at a time may enter, and no fork of the process.

    A fork has a copy of its own, and the parent would never see what it wrote there.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._life = process_life()
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Callable[[str], OneProcess], tuple[str]]:
        return OneProcess, (self._what,)

    def __enter__(self) -> None:
        life = process_life()
        if life != self._life:  # before the lock: another thread may have held it at the fork
            raise UsageError(
                f"{self._what} lies in the memory of process {self._life.pid}, and process {life.pid} is a fork of it: what "
                "it did to its copy would be lost; make one of its own there, or use one that lies in a database",
                process=life.pid,
                owner=self._life.pid,
            )
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def kept_from_forks() -> Generator[None]:
    """Ends each fork that was made inside the block and is about to leave it, by returning or by raising.

    Of nested blocks the innermost counts. A fork that enters such a block itself may leave it.
    """
    before = _here.life
    _here.life = mine = process_life()
    try:
        yield
    except BaseException as error:
        end_if_fork(error, of=mine)
        raise
    finally:
        end_if_fork(of=mine)
        _here.life = before


def end_if_fork(error: BaseException | None = None, *, of: ProcessLife | None = None) -> None:
    """End this process at once where it is a fork that was made inside `kept_from_forks` (or of the process `of`).

    No `finally` and no exit handler runs: they would end what the parent still uses. A `SystemExit` sets the exit status;
    anything else is reported on standard error.
    """
    mine = of or _here.life
    if mine is None or mine == process_life():
        return
    status = FORK_STATUS
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        what = "" if error is None else f" with {type(error).__name__}: {error}"
        text = (
            f"stormproof: process {os.getpid()} is a fork of process {mine.pid} made by a user's function, and came back"
            f" from it{what}. It ends here: two processes must not run one batch. End such a fork by os._exit(), or use"
            " multiprocessing or subprocess.\n"
        )
        os.write(2, text.encode("utf-8", "backslashreplace"))
    os._exit(status & 0xFF)


# ---- fewer passes of the cycle collector

ALLOCATIONS: Final = 50_000
"""The collector runs after this many new containers. A user's code that leaves cycles behind keeps at most these alive; a
record batch of tuples itself takes some 30,000."""


@contextmanager
def fewer_collections() -> Generator[None]:
    """Have the collector run only after every `ALLOCATIONS`, unless it is set to run less often or never. The setting is
    the whole process's: other threads have it, too.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < ALLOCATIONS:
        yield
        return
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
