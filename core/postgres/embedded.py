"""A Postgres server for where there is none: started by its first user, shared, stopped by its last."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import psutil

from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import SettingsError, StoreUnavailable
from stormproof.core.postgres.binaries import Binaries, RunAs, find_binaries, run_as
from stormproof.core.postgres.database import Database, connect

StopMode = Literal["fast", "immediate"]

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
LOCK_TIMEOUT_S: Final = 180.0
DYING_TIMEOUT_S: Final = 3.0
_POLL_S: Final = 0.01
_PORT: Final = 5432  # only names the socket's file; nothing listens on the network
_SOCKET_PATH_MAX_BYTES: Final = 107
_LOG_TAIL_BYTES: Final = 3_000
_SIGNALS: Final = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_SERVER_SETTINGS: Final = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": str(_PORT),
    "max_connections": "100",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "wal_level": "replica",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers that this process started: only their parent can reap them, and an unreaped one looks alive to Postgres."""


@dataclass(frozen=True, slots=True)
class _PidFile:
    """What `postmaster.pid` says, by its line numbers: 1 pid, 5 socket folder, 8 status."""

    pid: int
    socket_folder: str
    ready: bool


class EmbeddedPostgres:
    """One Postgres server below a folder, shared by every process that names the same folder.

    Guarantee:
        The server outlives its starter (a session of its own: neither Ctrl-C nor the starter's death reaches it). Users
        hold a shared file lock, which the kernel drops with a killed process; starting and stopping need an exclusive
        one. The last user to release stops it; where the last one was killed, the server stays, the next user adopts
        it, and its release stops it. What was committed survives any of this, and a crash of the machine.
        It listens on a socket in a folder that only this user may enter, and on no network address.

    Not guaranteed:
        A home on a network file system (locks and sockets may not work there).
    """

    def __init__(self, home: Path, *, clock: Clock | None = None) -> None:
        self.home = home.absolute()
        self._folder = self.home / "postgres"
        self._data = self._folder / "data"
        self._log = self._folder / "log"
        self._clock = clock or SystemClock()
        self._users_lock: int | None = None
        self._owner_pid = 0
        self._database: Database | None = None

    @property
    def database(self) -> Database:
        """The server's first database, while acquired."""
        if self._database is None:
            raise SettingsError(f"the embedded Postgres in {self.home} is not acquired; call acquire() first")
        return self._database

    @property
    def pid(self) -> int | None:
        """The server's process id; None where none runs."""
        return self._running_pid()

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self._log

    def acquire(self) -> Database:
        """Start the server, or adopt the running one, and become one of its users.

        Raises:
            StoreUnavailable: it did not start (with the end of its log), or another process holds the start lock.
            SettingsError: there is no Postgres here that can run this folder's data.
        """
        if self._users_lock is not None and self._owner_pid == os.getpid():
            return self.database
        self._make_folder()
        with self._start_lock():
            lock = os.open(self._folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)  # never waits: an exclusive one is only held under the start lock
                self._database = self._adopt() or self._start()
            except BaseException:
                os.close(lock)
                raise
            self._users_lock, self._owner_pid = lock, os.getpid()
            return self._database

    def release(self) -> None:
        """Stop being a user; the last one stops the server. Harmless where not acquired.

        In a fork of the process that acquired, only the fork's copy is let go: the lock is the parent's.
        """
        lock, self._users_lock, self._database = self._users_lock, None, None
        if lock is None:
            return
        if self._owner_pid != os.getpid():
            os.close(lock)
            return
        try:
            with self._start_lock():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return  # others still use it
                self._stop("fast")
        finally:
            os.close(lock)

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server whoever uses it: `fast` rolls open transactions back, `immediate` is a crash."""
        with self._start_lock():
            self._stop(mode)

    def restart(self, *, immediate: bool = False) -> Database:
        """Stop and start the server in place, whoever uses it; the database's address stays the same."""
        with self._start_lock():
            self._stop("immediate" if immediate else "fast")
            database = self._start()
        if self._users_lock is not None:
            self._database = database
        return database

    def __enter__(self) -> Database:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    # --- locks and folders -------------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _start_lock(self) -> Generator[None, None, None]:
        """The exclusive lock for starting and stopping; the kernel drops it when its holder dies."""
        path = self._folder / "start.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:

            def taken() -> bool:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            if not self._wait_until(taken, LOCK_TIMEOUT_S):
                raise StoreUnavailable(
                    f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s while it starts or stops the embedded "
                    f"Postgres; see who with: fuser {path}",
                    path=str(path),
                )
            yield
        finally:
            os.close(lock)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        until_s = self._clock.monotonic_s() + timeout_s
        while not condition():
            if self._clock.monotonic_s() > until_s:
                return False
            self._clock.sleep(_POLL_S)
        return True

    def _socket_folder(self, owner: tuple[int, int] | None) -> Path:
        """A private folder for the socket: below the home, or a short one in the temporary folder, noted in the home.

        A socket's path may be 107 bytes long, and libpq takes a comma in a host for a list.
        """
        below, note = self._folder / "socket", self._folder / "socket_folder"
        socket = below / f".s.PGSQL.{_PORT}"
        if len(os.fsencode(socket)) <= _SOCKET_PATH_MAX_BYTES and re.fullmatch(r"[A-Za-z0-9_./+~-]+", str(below)):
            folder = below
            folder.mkdir(mode=0o700, exist_ok=True)
        else:
            folder = Path(note.read_text()) if note.exists() else Path()
            if not (note.exists() and _is_private(folder, owner)):
                folder = Path(tempfile.mkdtemp(prefix="stormproof-"))
                note.write_text(str(folder))
        folder.chmod(0o700)
        if owner is not None:
            os.chown(folder, *owner)
        return folder

    # --- which server runs -------------------------------------------------------------------------------------------

    def _pid_file(self) -> _PidFile | None:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None
        if not lines or not lines[0].lstrip("-").isdigit():
            return None  # still being written
        return _PidFile(
            pid=abs(int(lines[0])),
            socket_folder=lines[4].strip() if len(lines) > 4 else "",
            ready=len(lines) > 7 and lines[7].strip() == "ready",
        )

    def _running_pid(self) -> int | None:
        """The pid in the pid file, if a living process with it is the server of this very data folder."""
        noted = self._pid_file()
        return noted.pid if noted is not None and self._is_ours(noted.pid) else None

    def _is_ours(self, pid: int) -> bool:
        if (child := _children.get(pid)) is not None and child.poll() is not None:
            del _children[pid]  # reaped just now
            return False
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            command = process.cmdline()
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return False  # another user's process has the number now
        return str(self._data) in command and any(Path(word).name == "postgres" for word in command)

    def _orphans(self) -> list[int]:
        """Postgres processes that still work in the data folder although their server is gone."""
        found: list[int] = []
        for process in psutil.process_iter():
            try:
                if process.name() == "postgres" and process.cwd() == str(self._data.resolve()):
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue  # ended meanwhile, or another user's
        return found

    def _adopt(self) -> Database | None:
        """The running server's database, once it answers; None where none runs."""
        if self._running_pid() is None:
            return None

        def ready_or_gone() -> bool:
            noted = self._pid_file()
            return noted is None or noted.ready or not self._is_ours(noted.pid)

        if not self._wait_until(ready_or_gone, START_TIMEOUT_S):
            raise self._failed("the server that runs already does not become ready")
        noted = self._pid_file()
        if noted is None or not self._is_ours(noted.pid):
            return None  # it ended while we looked
        database, pid = self._database_at(noted.socket_folder), noted.pid
        try:
            connect(database, application_name="stormproof embedded").close()
        except StoreUnavailable as error:
            if self._wait_until(lambda: not self._is_ours(pid), DYING_TIMEOUT_S):
                return None  # it was ending while we looked
            raise self._failed(
                f"the server (pid {pid}) runs and cannot be reached ({error.message}); if its socket was removed, end "
                f"it with: kill -INT {pid}, and start again"
            ) from error
        return database

    def _database_at(self, socket_folder: str) -> Database:
        return Database.of({"host": socket_folder, "port": str(_PORT), "user": "postgres", "dbname": "postgres"})

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start(self) -> Database:
        as_user = run_as()
        binaries = find_binaries(self._data_version())
        if as_user.owner is not None:
            self._folder.chmod(0o711)  # nobody must reach its data
        self._initialise(binaries, as_user)
        self._clear_stale_pid_file()
        socket_folder = self._socket_folder(as_user.owner)
        settings = {**_SERVER_SETTINGS, "unix_socket_directories": str(socket_folder)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [*as_user.prefix, str(binaries.folder / "postgres"), "-D", str(self._data), *options]
        child = self._spawn(command, as_user)
        _children[child.pid] = child

        def ready_or_gone() -> bool:
            noted = self._pid_file()
            return child.poll() is not None or (noted is not None and noted.pid == child.pid and noted.ready)

        if not self._wait_until(ready_or_gone, START_TIMEOUT_S):
            self._end(child.pid, "immediate")
            raise self._failed(f"Postgres was not ready after {START_TIMEOUT_S:.0f} s, and was stopped")
        if child.poll() is not None:
            del _children[child.pid]
            raise self._failed(f"Postgres ended at once with exit status {child.returncode}")
        return self._database_at(str(socket_folder))

    def _data_version(self) -> int | None:
        """The major version that made the data folder; None where there is none yet.

        Raises:
            SettingsError: there is a folder that no Postgres made.
        """
        if not self._data.exists():
            return None
        try:
            return int((self._data / "PG_VERSION").read_text().strip())
        except (FileNotFoundError, ValueError):
            raise SettingsError(
                f"{self._data} is not a Postgres data folder (no readable PG_VERSION); move it away, and one is made",
                path=str(self._data),
            ) from None

    def _initialise(self, binaries: Binaries, as_user: RunAs) -> None:
        """Make the data folder, whole or not at all: it gets its name only when it is complete."""
        for left_over in self._folder.glob("data.new-*"):
            shutil.rmtree(left_over)
        if self._data.exists():
            return
        new = Path(tempfile.mkdtemp(prefix="data.new-", dir=self._folder))
        if as_user.owner is not None:
            os.chown(new, *as_user.owner)
        command = [*as_user.prefix, str(binaries.folder / "initdb"), "-D", str(new), "-U", "postgres"]
        # Bytewise order, the same on every machine, whatever locales it has.
        child = self._spawn([*command, "--auth=trust", "--encoding=UTF8", "--locale=C"], as_user)
        try:
            status = child.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise self._failed(f"initdb did not end within {START_TIMEOUT_S:.0f} s") from None
        if status != 0:
            raise self._failed(f"initdb ended with exit status {status}")
        new.rename(self._data)

    def _spawn(self, command: list[str], as_user: RunAs) -> subprocess.Popen[bytes]:
        """Start in a session of its own, so that no signal for this process or its terminal arrives there."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        user, group = as_user.owner or (None, None)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                env={**environment, "LC_ALL": "C"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=user,
                group=group,
                extra_groups=[] if as_user.owner is not None else None,
            )

    def _clear_stale_pid_file(self) -> None:
        """Remove the pid file of a server that was killed, where its number belongs to another process by now.

        Postgres does it itself where nobody has the number. It refuses where somebody has, be it a zombie; under the
        start lock, and with no process left in the data folder, removing it is safe.
        """
        noted = self._pid_file()
        if noted is None:
            return
        if not self._wait_until(lambda: not self._orphans(), STOP_TIMEOUT_S):
            raise self._failed(f"processes of a killed server still work in {self._data}: pids {self._orphans()}")
        if psutil.pid_exists(noted.pid) and not self._is_ours(noted.pid):
            (self._data / "postmaster.pid").unlink(missing_ok=True)

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _stop(self, mode: StopMode) -> None:
        pid = self._running_pid()
        if pid is not None:
            self._end(pid, mode)
        note = self._folder / "socket_folder"
        if note.exists():
            folder = Path(note.read_text())
            if _is_private(folder, run_as().owner) and not any(folder.iterdir()):
                folder.rmdir()
                note.unlink()

    def _end(self, pid: int, mode: StopMode) -> None:
        steps: tuple[StopMode, ...] = ("fast", "immediate") if mode == "fast" else ("immediate",)
        for step in steps:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[step])
            if self._wait_until(lambda: not self._is_ours(pid), STOP_TIMEOUT_S):
                return
        raise self._failed(f"Postgres (pid {pid}) does not stop")

    def _failed(self, what: str) -> StoreUnavailable:
        tail = ""
        if self._log.exists():
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                tail = log.read().decode("utf-8", "replace").strip()
        return StoreUnavailable(f"embedded Postgres in {self._folder}: {what}; its log {self._log} ends:\n{tail}")


def _is_private(folder: Path, owner: tuple[int, int] | None) -> bool:
    """Whether the folder is ours alone: a name in a world-writable folder may have been taken by somebody else."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    uid = os.geteuid() if owner is None else owner[0]
    return folder.is_dir() and not folder.is_symlink() and found.st_uid == uid and found.st_mode & 0o077 == 0


_held: dict[tuple[Path, int], EmbeddedPostgres] = {}


def embedded_database(home: Path) -> Database:
    """The embedded server's database, held until this process ends; the same server for the same home."""
    key = (home.absolute(), os.getpid())
    if key not in _held:
        server = EmbeddedPostgres(home)
        server.acquire()
        atexit.register(server.release)
        _held[key] = server
    return _held[key].database
