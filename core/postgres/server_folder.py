"""The folder of an embedded Postgres: its data, log, socket and locks, and errors that name it.

A server's processes show that they live by a lock: told by the kernel, not by process ids. A process id means nothing
outside its PID namespace, so neither `postmaster.pid` nor Postgres's own start check sees a server in another container.
Every process on the kernel sees a file lock. Postgres and each of its children inherit it, so that it is held until the
last of them has ended or was killed. It is on a file of the data itself, which nobody removes as a left-over, and of
which a copy of the folder has its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.base.trusted_paths import require_trusted
from stormproof.core.postgres.binaries import RunAs

PORT: Final = 5432  # only names the socket's file; nothing listens on the network
LOCK_TIMEOUT_S: Final = 180.0
_POLL_S: Final = 0.01
_SOCKET_PATH_MAX_BYTES: Final = 107
_LOG_TAIL_BYTES: Final = 3_000
_NEEDED_BYTES: Final = 100 * 2**20
"""What a new data folder and its first log segments take, with some room."""


class ServerFolder:
    """The folder `postgres` below a home."""

    def __init__(self, home: Path, clock: Clock) -> None:
        self.path = home / "postgres"
        self.data = self.path / "data"
        self.log = self.path / "log"
        self.users_lock = self.path / "users.lock"
        self._clock = clock

    def make(self) -> None:
        """Make it where it is missing.

        Raises:
            SettingsError: another user could have written it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        require_trusted(
            self.path,
            "a Postgres that another user prepared runs that user's code",
            "or set STORMPROOF_HOME to a folder of your own",
        )

    @contextlib.contextmanager
    def naming_it(self) -> Generator[None, None, None]:
        """Turn an OSError into an error that names the folder and the next step."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreUnavailable(
                    f"embedded Postgres in {self.path}: {error.strerror}{self.room()}; free some, and start again",
                    path=str(self.path),
                ) from error
            raise SettingsError(
                f"embedded Postgres in {self.path}: {error.strerror or error}: {error.filename or self.path}; make it "
                "writable for this user, set STORMPROOF_HOME to a folder that is, or name a Postgres in "
                "STORMPROOF_DATABASE_URL",
                path=str(error.filename or self.path),
            ) from error

    def room(self) -> str:
        """A note for an error where the disk has no room for a server's files; else empty."""
        free = shutil.disk_usage(self.path).free
        if free > _NEEDED_BYTES:
            return ""
        return (
            f" ({free / 2**20:.0f} MB are free on its file system, a new server needs some {_NEEDED_BYTES / 2**20:.0f})"
        )

    @contextlib.contextmanager
    def start_lock(self) -> Generator[None, None, None]:
        """The exclusive lock for starting and stopping; the kernel drops it when its holder dies."""
        path = self.path / "start.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self.wait_until(lambda: try_lock(lock, path), LOCK_TIMEOUT_S):
                raise StoreUnavailable(
                    f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s while it starts or stops the embedded "
                    f"Postgres; see who with: fuser {path}",
                    path=str(path),
                )
            yield
        finally:
            os.close(lock)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds; False where it does not within `timeout_s`."""
        until_s = self._clock.monotonic_s() + timeout_s
        while not condition():
            if self._clock.monotonic_s() > until_s:
                return False
            self._clock.sleep(_POLL_S)
        return True

    def socket_folder(self, owner: tuple[int, int] | None) -> Path:
        """A private folder for the socket: below the home, or a short one in the temporary folder, noted in the home.

        A socket's path may be 107 bytes long, and libpq takes a comma in a host for a list. Files of a dead server are
        removed from it: another process may have the pid in them by now, and Postgres would take it for a living server.
        """
        below, note = self.path / "socket", self._socket_note
        socket = below / f".s.PGSQL.{PORT}"
        if len(os.fsencode(socket)) <= _SOCKET_PATH_MAX_BYTES and re.fullmatch(r"[A-Za-z0-9_./+~-]+", str(below)):
            folder = below
            folder.mkdir(mode=0o700, exist_ok=True)
        else:
            folder = Path(note.read_text()) if note.exists() else Path()
            # The note of a copied home names the original's folder, whose server may run.
            if not (note.exists() and _is_private(folder, owner) and not _somebody_listens(folder)):
                folder = Path(tempfile.mkdtemp(prefix="stormproof-"))
                note.write_text(str(folder))
        for left_over in folder.glob(".s.PGSQL.*"):
            left_over.unlink()
        folder.chmod(0o700)
        if owner is not None:
            os.chown(folder, *owner)
        return folder

    def drop_socket_folder(self, as_user: Callable[[], RunAs]) -> None:
        """Remove the noted socket folder, if it is ours and empty."""
        if self._socket_note.exists():
            folder = Path(self._socket_note.read_text())
            if _is_private(folder, as_user().owner) and not any(folder.iterdir()):
                folder.rmdir()
                self._socket_note.unlink()

    @property
    def _socket_note(self) -> Path:
        return self.path / "socket_folder"

    def data_version(self) -> int | None:
        """The major version that made the data folder; None where there is none yet.

        Raises:
            SettingsError: there is a folder that no Postgres made.
        """
        if not self.data.exists():
            return None
        try:
            return int((self.data / "PG_VERSION").read_text().strip())
        except (FileNotFoundError, ValueError):
            raise SettingsError(
                f"{self.data} is not a Postgres data folder (no readable PG_VERSION); move it away, and one is made",
                path=str(self.data),
            ) from None

    def started_on(self) -> str:
        """The host on which the server was started."""
        try:
            return (self.path / "started_on").read_text().strip()
        except FileNotFoundError:
            return "another host"

    def failed(self, what: str) -> StoreUnavailable:
        """The error for what the server did, with the end of its log."""
        tail = ""
        if self.log.exists():
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
                tail = log.read().decode("utf-8", "replace").strip()
        return StoreUnavailable(f"embedded Postgres in {self.path}: {what}; its log {self.log} ends:\n{tail}")


def _is_private(folder: Path, owner: tuple[int, int] | None) -> bool:
    """Whether the folder is ours alone: somebody else may have taken its name in a world-writable folder."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    uid = os.geteuid() if owner is None else owner[0]
    return folder.is_dir() and not folder.is_symlink() and found.st_uid == uid and found.st_mode & 0o077 == 0


def _somebody_listens(folder: Path) -> bool:
    """Whether a server listens on the socket in a folder."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(folder / f".s.PGSQL.{PORT}"))
        except OSError:
            return False
    return True


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
