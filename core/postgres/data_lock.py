"""The lock by which a server's processes show that they live: told by the kernel, not by process ids.

A process id means nothing outside its PID namespace, so neither `postmaster.pid` nor Postgres's own start check sees a
server in another container. Every process on the kernel sees a file lock. Postgres and each of its children inherit it,
so that it is held until the last of them has ended or was killed. It is on a file of the data itself, which nobody removes
as a left-over, and of which a copy of the folder has its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from stormproof.core.base.errors import SettingsError

LOCKED_FILE: Final = "PG_VERSION"
"""The file of a data folder that is locked; nobody writes it after it was made."""

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF})


def try_lock(handle: int, path: Path, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; False where another one holds it.

    Raises:
        SettingsError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise SettingsError(
            f"the file system of {path} refuses file locks ({error.strerror}), so an embedded Postgres cannot be kept from "
            "running twice there; set STORMPROOF_HOME to a folder on a local disk, or name a Postgres in "
            "STORMPROOF_DATABASE_URL",
            path=str(path),
        ) from error
    return True


def take_data_lock(data: Path) -> int | None:
    """A descriptor that holds the lock of a data folder, for the server to inherit; None where a server holds it.

    Raises:
        SettingsError: the file system has no locks.
        OSError: the file is not there, or may not be written.
    """
    path = data / LOCKED_FILE
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    taken = False
    try:
        taken = try_lock(handle, path)
    finally:
        if not taken:
            os.close(handle)
    return handle if taken else None


def is_data_locked(data: Path) -> bool:
    """Whether a process of a server works in the data folder. Call it only under the start lock: it takes the lock itself
    for a moment.

    Raises:
        SettingsError, OSError: as `take_data_lock`; a folder without data is not locked.
    """
    try:
        handle = take_data_lock(data)
    except FileNotFoundError:
        return False
    if handle is None:
        return True
    os.close(handle)
    return False
