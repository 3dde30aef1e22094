"""A Postgres server for where there is none: started by its first user, shared, stopped by its last."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import psycopg

from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import SettingsError, StoreUnavailable
from stormproof.core.postgres.binaries import Binaries, RunAs, find_binaries, run_as
from stormproof.core.postgres.data_lock import LOCKED_FILE, is_data_locked, take_data_lock, try_lock
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.server_process import (
    PidFile,
    processes_in,
    read_pid_file,
    serves,
    system_identifier,
)
from stormproof.core.trusted_paths import require_trusted

StopMode = Literal["fast", "immediate"]

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
LOCK_TIMEOUT_S: Final = 180.0
DYING_TIMEOUT_S: Final = 3.0
_POLL_S: Final = 0.01
_PORT: Final = 5432  # only names the socket's file; nothing listens on the network
_SOCKET_PATH_MAX_BYTES: Final = 107
_LOG_TAIL_BYTES: Final = 3_000
_NEEDED_BYTES: Final = 100 * 2**20
"""What a new data folder and its first log segments take, with some room."""
_STOP_FROM_INSIDE: Final = {"fast": "INT", "immediate": "QUIT"}
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


class EmbeddedPostgres:
    """One Postgres server below a folder, shared by every process that names the same folder.

    Guarantee:
        The server outlives its starter (a session of its own: neither Ctrl-C nor the starter's death reaches it). Users
        hold a shared file lock, which the kernel drops with a killed process; starting and stopping need an exclusive
        one. The last user to release stops it; where the last one was killed, the server stays, the next user adopts
        it, and its release stops it. What was committed survives any of this, and a crash of the machine.
        No second server starts on the same data, whatever the folder is called (a link, a second mount, a moved folder)
        and in whatever containers its users are, as long as they share a kernel: the server's processes hold a lock
        (`data_lock`). A server in another container is used through its socket; one that does not answer is refused.
        It listens on a socket in a folder that only this user may enter, and on no network address.

    Not guaranteed:
        A home on a network file system: one without locks is refused, one whose locks end at the machine is not told.

    Threads and forks:
        An object belongs to one thread. A fork may only release its copy. Processes and threads with objects of their own
        may share a home.
    """

    def __init__(self, home: Path, *, clock: Clock | None = None) -> None:
        self.home = home.resolve()
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
        """The server's process id; None where none runs, or where it runs in a PID namespace that is not seen from here."""
        return self._running_pid()

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self._log

    def acquire(self) -> Database:
        """Start the server, or adopt the running one, and become one of its users.

        Raises:
            StoreUnavailable: it did not start (with the end of its log), another process holds the start lock, a server that
                is not seen from here works in the folder and does not answer, or there is no room on the disk.
            SettingsError: there is no Postgres here that can run this folder's data, or the folder is not fit: another
                user's, not writable, or without file locks.
        """
        if self._users_lock is not None and self._owner_pid == os.getpid():
            return self.database
        with self._naming_the_folder():
            self._make_folder()
            with self._start_lock():
                path = self._folder / "users.lock"
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    if not try_lock(lock, path, shared=True):  # an exclusive one is only held under the start lock
                        raise self._failed(f"another process holds {path} although it starts and stops nothing")
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
                if try_lock(lock, self._folder / "users.lock"):  # else others still use it
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
        require_trusted(
            self._folder,
            "a Postgres that another user prepared runs that user's code",
            "or set STORMPROOF_HOME to a folder of your own",
        )

    @contextlib.contextmanager
    def _naming_the_folder(self) -> Generator[None, None, None]:
        """Turn what the file system refuses into an error that names the folder and the next step."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreUnavailable(
                    f"embedded Postgres in {self._folder}: {error.strerror}{self._room()}; free some, and start again",
                    path=str(self._folder),
                ) from error
            raise SettingsError(
                f"embedded Postgres in {self._folder}: {error.strerror or error}: {error.filename or self._folder}; make it "
                "writable for this user, set STORMPROOF_HOME to a folder that is, or name a Postgres in "
                "STORMPROOF_DATABASE_URL",
                path=str(error.filename or self._folder),
            ) from error

    def _room(self) -> str:
        """Says so where the disk has no room for a server's files."""
        free = shutil.disk_usage(self._folder).free
        if free > _NEEDED_BYTES:
            return ""
        return (
            f" ({free / 2**20:.0f} MB are free on its file system, a new server needs some {_NEEDED_BYTES / 2**20:.0f})"
        )

    @contextlib.contextmanager
    def _start_lock(self) -> Generator[None, None, None]:
        """The exclusive lock for starting and stopping; the kernel drops it when its holder dies."""
        path = self._folder / "start.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not self._wait_until(lambda: try_lock(lock, path), LOCK_TIMEOUT_S):
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

        A socket's path may be 107 bytes long, and libpq takes a comma in a host for a list. What a dead server left in it
        goes away: Postgres would take the number in it for a living server's where another process has it by now.
        """
        below, note = self._folder / "socket", self._folder / "socket_folder"
        socket = below / f".s.PGSQL.{_PORT}"
        if len(os.fsencode(socket)) <= _SOCKET_PATH_MAX_BYTES and re.fullmatch(r"[A-Za-z0-9_./+~-]+", str(below)):
            folder = below
            folder.mkdir(mode=0o700, exist_ok=True)
        else:
            folder = Path(note.read_text()) if note.exists() else Path()
            # Of a copied home, it is the original's, and its server may run.
            if not (note.exists() and _is_private(folder, owner) and not _somebody_listens(folder)):
                folder = Path(tempfile.mkdtemp(prefix="stormproof-"))
                note.write_text(str(folder))
        for left_over in folder.glob(".s.PGSQL.*"):
            left_over.unlink()
        folder.chmod(0o700)
        if owner is not None:
            os.chown(folder, *owner)
        return folder

    # --- which server runs -------------------------------------------------------------------------------------------

    def _running_pid(self) -> int | None:
        """The pid in the pid file, if a process that is seen from here has it and is the server of this data folder."""
        noted = read_pid_file(self._data)
        return noted.pid if noted is not None and self._is_ours(noted.pid) else None

    def _is_ours(self, pid: int) -> bool:
        if (child := _children.get(pid)) is not None and child.poll() is not None:
            del _children[pid]  # reaped just now
            return False
        return serves(pid, self._data)

    def _works(self) -> bool:
        """Whether a server, or what is left of one, works in the data folder, seen from here or not.

        A server that was not started from here (by pg_ctl, or by an older version) holds no lock; it must be seen.
        """
        return is_data_locked(self._data) or self._running_pid() is not None

    def _adopt(self) -> Database | None:
        """The running server's database, once it answers; None where none runs."""
        if not self._works():
            return None

        def ready_or_gone() -> bool:
            noted = read_pid_file(self._data)
            return (noted is not None and noted.ready) or not self._works()

        if not self._wait_until(ready_or_gone, START_TIMEOUT_S):
            raise self._failed("the server that runs already does not become ready")
        noted, pid = read_pid_file(self._data), self._running_pid()
        if noted is None or not self._works():
            return None  # it ended while we looked
        problem = "there is no socket"
        for folder in dict.fromkeys((self._folder / "socket", Path(noted.socket_folder))):
            if not (folder / f".s.PGSQL.{_PORT}").exists():
                continue
            database = self._database_at(str(folder))
            try:
                if self._answers_for(database, noted):
                    return database
                problem = f"at {folder} another server answers"
            except psycopg.errors.UndefinedFile:
                # The folder was moved below it. Its control file is written by its old path: it would end with a panic at
                # its next checkpoint, and what it has committed is in its log.
                if pid is not None:
                    self._end(pid, "immediate")
                else:
                    self._send_from_inside(database, "immediate")
                return None
            except StoreUnavailable as error:
                problem = error.message
        # A server that is gone leaves processes that are about to see it.
        left = pid is None and (problem != "there is no socket" or processes_in(self._data))
        if self._wait_until(lambda: not self._works(), STOP_TIMEOUT_S if left else DYING_TIMEOUT_S):
            return None
        raise self._refused(noted, problem)

    def _answers_for(self, database: Database, noted: PidFile) -> bool:
        """Whether the server there is this data folder's: a socket's path may be another server's in this container."""
        with connect(database, application_name="stormproof embedded") as connection:
            row = connection.execute(
                "select system_identifier, extract(epoch from pg_postmaster_start_time())::int8 from pg_control_system()"
            ).fetchone()
        if row is None:
            return False
        identifier, started = int(row[0]), int(row[1])
        return identifier % 2**64 == system_identifier(self._data) and abs(started - noted.started) <= 1

    def _refused(self, noted: PidFile, problem: str) -> StoreUnavailable:
        """Somebody works in the data folder and does not answer: a second server would ruin the data."""
        if self._is_ours(noted.pid):
            return self._failed(
                f"the server (pid {noted.pid}) runs and cannot be reached ({problem}); if its socket was removed, end it "
                f"with: kill -INT {noted.pid}, and start again"
            )
        if seen := processes_in(self._data):
            return self._failed(f"processes of a killed server still work in {self._data}: pids {seen}")
        where = self._started_on()
        return StoreUnavailable(
            f"embedded Postgres in {self._folder}: a server that is not seen from here works in it, and cannot be reached "
            f"({problem}); it was started on {where} as pid {noted.pid}, in another container (PID namespace). No second "
            "one is started on its data. Stop the programs that use it there; or give this one a folder of its own in "
            "STORMPROOF_HOME; or let both use one Postgres that STORMPROOF_DATABASE_URL names. Who holds it, seen from the "
            f"machine itself: fuser -v {self._data / LOCKED_FILE}",
            path=str(self._data),
            started_on=where,
            pid=noted.pid,
        )

    def _started_on(self) -> str:
        try:
            return (self._folder / "started_on").read_text().strip()
        except FileNotFoundError:
            return "another host"

    def _database_at(self, socket_folder: str) -> Database:
        return Database.of({"host": socket_folder, "port": str(_PORT), "user": "postgres", "dbname": "postgres"})

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start(self) -> Database:
        as_user = run_as()
        binaries = find_binaries(self._data_version())
        if as_user.owner is not None:
            self._folder.chmod(0o711)  # nobody must reach its data
            as_user.require_reach(binaries.folder, self._folder)
        self._initialise(binaries, as_user)
        locks: list[int] = []

        def taken() -> bool:
            lock = take_data_lock(self._data)
            locks.extend([] if lock is None else [lock])
            return lock is not None

        if not self._wait_until(taken, DYING_TIMEOUT_S):
            raise self._failed(f"another process holds {self._data / LOCKED_FILE}; see who with: fuser -v")
        try:
            return self._start_locked(binaries, as_user, locks[0])
        finally:
            os.close(locks[0])  # the server has it now

    def _start_locked(self, binaries: Binaries, as_user: RunAs, lock: int) -> Database:
        """Start it with the data's lock, which every process of it inherits."""
        self._clear_stale_pid_file()
        socket_folder = self._socket_folder(as_user.owner)
        (self._folder / "started_on").write_text(f"{os.uname().nodename}\n")
        settings = {**_SERVER_SETTINGS, "unix_socket_directories": str(socket_folder)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [*as_user.prefix, str(binaries.folder / "postgres"), "-D", str(self._data), *options]
        child = self._spawn(command, as_user, lock)
        _children[child.pid] = child

        def ready_or_gone() -> bool:
            noted = read_pid_file(self._data)
            return child.poll() is not None or (noted is not None and noted.pid == child.pid and noted.ready)

        if not self._wait_until(ready_or_gone, START_TIMEOUT_S):
            self._end(child.pid, "immediate")
            raise self._failed(f"Postgres was not ready after {START_TIMEOUT_S:.0f} s, and was stopped")
        if child.poll() is not None:
            del _children[child.pid]
            raise self._failed(f"Postgres ended at once with exit status {child.returncode}{self._room()}")
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
            shutil.rmtree(left_over, ignore_errors=True)  # an initdb whose starter was killed may still write there
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
            raise self._failed(f"initdb ended with exit status {status}{self._room()}")
        new.rename(self._data)

    def _spawn(self, command: list[str], as_user: RunAs, *inherited: int) -> subprocess.Popen[bytes]:
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
                pass_fds=inherited,
                user=user,
                group=group,
                extra_groups=[] if as_user.owner is not None else None,
            )

    def _clear_stale_pid_file(self) -> None:
        """Remove the pid file of a server that was killed; only with the data's lock in hand.

        Postgres refuses to start where another process has the number, be it a zombie. And the new server may get the same
        number, as it often does in a container that starts alike: the old file would then show it ready before it is.
        """
        if not self._wait_until(lambda: not processes_in(self._data), STOP_TIMEOUT_S):
            raise self._failed(
                f"processes of a killed server still work in {self._data}: pids {processes_in(self._data)}"
            )
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _stop(self, mode: StopMode) -> None:
        pid = self._running_pid()
        if pid is not None:
            self._end(pid, mode)
        elif is_data_locked(self._data):
            self._end_elsewhere(mode)
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

    def _end_elsewhere(self, mode: StopMode) -> None:
        """End a server that no signal from here reaches: a process of its own sends it."""
        database = self._adopt()
        if database is not None:
            self._send_from_inside(database, mode)

    def _send_from_inside(self, database: Database, mode: StopMode) -> None:
        """Have the server run a program, in its data folder, that ends it; the answer may be lost then."""
        kill = f"while read -r row; do :; done; read -r pid < postmaster.pid; kill -{_STOP_FROM_INSIDE[mode]} $pid"
        with (
            contextlib.suppress(psycopg.OperationalError),
            connect(database, application_name="stormproof embedded", autocommit=True) as connection,
        ):
            connection.execute(f"copy (select 1) to program '{kill}'".encode())
        if not self._wait_until(lambda: not is_data_locked(self._data), STOP_TIMEOUT_S):
            raise self._failed(f"Postgres, which runs in another container ({self._started_on()}), does not stop")

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


def _somebody_listens(folder: Path) -> bool:
    """Whether a server listens on the socket in a folder."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(folder / f".s.PGSQL.{_PORT}"))
        except OSError:
            return False
    return True


_held: dict[tuple[Path, int], EmbeddedPostgres] = {}


def embedded_database(home: Path) -> Database:
    """The embedded server's database, held until this process ends; the same server for the same home."""
    key = (home.resolve(), os.getpid())
    if key not in _held:
        server = EmbeddedPostgres(home)
        server.acquire()
        atexit.register(server.release)
        _held[key] = server
    return _held[key].database
