"""One commit at a time to a Delta table that Spark writes to.

Spark's log store for local disks looks whether a version's entry is there, and then renames its own into place, which
overwrites: another writer's commit in between would be lost without an error. So whoever of us commits to such a table holds
a lock on one file in its log's folder. Spark's JVM takes the lock itself and not its driver: a JVM outlives a driver that is
killed, and its commit may still land.

Writers that are not ours do not know of the lock.
"""

from __future__ import annotations

import fcntl
import functools
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from stormproof.core.clock import Clock
from stormproof.core.errors import StoreUnavailable
from stormproof.sinks.delta.log import DeltaLog

NAME: Final = ".stormproof-commit"
"""The file that is locked; readers of a log ignore such names. It is made when Spark first writes, or when a table with
keys is first compacted, and stays.
"""

WAIT_S: Final = 30.0
_POLL_S: Final = 0.02

IN_PROCESS: Final[dict[tuple[int, str], threading.Lock]] = {}
"""A lock of a file is a process's: between threads it does nothing, and letting it go in one lets it go in all.
By process id: a fork has a copy, which may be locked for ever.
"""


LetGo: TypeAlias = Callable[[], None]


@contextmanager
def alone(log: DeltaLog, where: str, clock: Clock, jvm: Any | None = None) -> Generator[None]:
    """Hold the lock; without a `jvm` only where the file is there.

    Raises:
        StoreUnavailable: another process has held it for `WAIT_S`; nothing was written.
    """
    if not log.files.is_local:  # Spark commits to no such table, and a store refuses the second of two entries
        yield
        return
    path = os.path.join(
        os.path.realpath(log.folder), NAME
    )  # one name for one lock, by whatever path the table is reached
    if jvm is None and not os.path.exists(path):
        yield
        return
    take = functools.partial(_by_us if jvm is None else functools.partial(_by_jvm, jvm), path)
    with IN_PROCESS.setdefault((os.getpid(), path), threading.Lock()):
        let_go = _taken(take, path, where, clock)
        try:
            yield
        finally:
            let_go()


def make_lock(log: DeltaLog) -> None:
    """Have all of us take the lock from now on, also where delta-rs commits."""
    if not log.files.is_local:
        return
    os.close(os.open(os.path.join(log.folder, NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _taken(take: Callable[[], LetGo | None], path: str, where: str, clock: Clock) -> LetGo:
    until_s = clock.monotonic_s() + WAIT_S
    while (let_go := take()) is None:
        if clock.monotonic_s() >= until_s:
            raise StoreUnavailable(
                f"{where}: another process has been committing to the table for {WAIT_S:.0f} s: a driver that was paused, "
                f"the JVM of one that was killed, or a long compaction; nothing was written. Find it with: fuser -v {path}",
                path=path,
            )
        clock.sleep(_POLL_S)
    return let_go


def _by_us(path: str) -> LetGo | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return None
    return lambda: os.close(fd)


def _by_jvm(jvm: Any, path: str) -> LetGo | None:
    file = jvm.java.io.RandomAccessFile(path, "rw")
    if file.getChannel().tryLock() is None:
        file.close()
        return None
    close: LetGo = file.close
    return close
