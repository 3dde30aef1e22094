"""A Postgres server for where there is none: started by its first user, shared, stopped by its last."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil
import psycopg

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.base.process import ProcessLife, process_life
from stormproof.core.postgres.binaries import Binaries, RunAs, find_binaries, run_as
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.server_folder import (
    LOCKED_FILE,
    PORT,
    ServerFolder,
    is_data_locked,
    take_data_lock,
    try_lock,
)

# ---- the contents of `postmaster.pid`, and the Postgres processes visible here that work in a data folder

CONTROL_FILE: Final = "global/pg_control"
_IDENTIFIER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class PidFile:
    """The contents of `postmaster.pid`, by line: 1 pid, 3 start time, 5 socket folder, 8 status.

    The pid is that in the server's PID namespace, the folder that in its mount namespace.
    """

    pid: int
    started: int
    socket_folder: str
    ready: bool


def read_pid_file(data: Path) -> PidFile | None:
    """The data folder's pid file; None where there is none, or where it is still being written."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    if not lines or not lines[0].lstrip("-").isdigit():
        return None
    return PidFile(
        pid=abs(int(lines[0])),
        started=int(lines[2]) if len(lines) > 2 and lines[2].strip().isdigit() else 0,
        socket_folder=lines[4].strip() if len(lines) > 4 else "",
        ready=len(lines) > 7 and lines[7].strip() == "ready",
    )


def system_identifier(data: Path) -> int:
    """The number that initdb gave this database cluster, from its control file."""
    with (data / CONTROL_FILE).open("rb") as control:
        return int.from_bytes(control.read(_IDENTIFIER_BYTES), "little")


def serves(pid: int, data: Path) -> bool:
    """Whether the process with this pid here is a living Postgres that works in the data folder."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.name() == "postgres" and _works_in(process, data)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # denied: another user's process has the number now


def processes_in(data: Path) -> list[int]:
    """The Postgres processes visible here that work in the data folder, also those whose server has ended."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.name() == "postgres" and _works_in(process, data):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return found


def _works_in(process: psutil.Process, data: Path) -> bool:
    """Compares the folder itself, not its name: a folder has several where it is linked, mounted twice, or was moved."""
    folder = f"/proc/{process.pid}/cwd"
    try:
        return os.path.samefile(folder if os.path.exists("/proc/self/cwd") else process.cwd(), data)
    except PermissionError:
        return str(data) in process.cmdline()  # a server that runs as nobody, and root may not look at its folder
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile, or there is no data folder


StopMode = Literal["fast", "immediate"]

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
DYING_TIMEOUT_S: Final = 3.0
_STOP_FROM_INSIDE: Final = {"fast": "INT", "immediate": "QUIT"}
_SIGNALS: Final = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_SERVER_SETTINGS: Final = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "port": str(PORT),
    "max_connections": "100",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "wal_level": "replica",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}

_children: dict[tuple[ProcessLife, int], subprocess.Popen[bytes]] = {}
"""The servers that this process started, by its life and their pid.

Only their parent can reap them, and an unreaped one looks alive to Postgres. In a fork of the parent, `poll` would say of a
living server that it has ended.
"""


class EmbeddedPostgres:
    """One Postgres server in a folder below `home`, shared by every process that names the same home.

    Guarantee:
        The server outlives its starter (a session of its own: neither Ctrl-C nor the starter's death reaches it). Users
        hold a shared file lock, which the kernel drops with a killed process; starting and stopping need an exclusive
        one. The last user to release stops it; where the last one was killed, the server stays, the next user joins
        it, and its release stops it. What was committed survives any of this, and a crash of the machine.
        No second server starts on the same data, whatever the folder is called (a link, a second mount, a moved folder)
        and whatever containers its users are in, as long as they share a kernel: the server's processes hold a lock
        (`take_data_lock`). A server in another container is used through its socket. Where it does not answer, nothing is
        started, and `acquire` raises.
        It listens on a socket in a folder that only this user may enter, and on no network address.

    Not guaranteed:
        A home on a network file system: one without file locks is refused, but locks that only this machine sees are not
        noticed.

    Threads and forks:
        An object belongs to one thread. A fork may only release its copy. Processes, and threads, that share a home have
        an object each.
    """

    def __init__(self, home: Path, *, clock: Clock | None = None) -> None:
        self.home = home.resolve()
        self._folder = ServerFolder(self.home, clock or SystemClock())
        self._data = self._folder.data
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
        noted = read_pid_file(self._data)
        return noted.pid if noted is not None and self._is_ours(noted.pid) else None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self._folder.log

    def acquire(self) -> Database:
        """Start the server, or join the running one, and become one of its users.

        Raises:
            StoreUnavailable: it did not start (with the end of its log), another process holds the start lock, a server
                works in the folder and does not answer, or the disk is full.
            SettingsError: there is no Postgres here that can run this folder's data, or the folder cannot be used: it is
                another user's, not writable, or without file locks.
        """
        if self._users_lock is not None and self._owner_pid == os.getpid():
            return self.database
        with self._folder.naming_it():
            self._folder.make()
            with self._folder.start_lock():
                path = self._folder.users_lock
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    if not try_lock(lock, path, shared=True):  # an exclusive one is only held under the start lock
                        raise self._folder.failed(f"another process holds {path} although it starts and stops nothing")
                    self._database = self._join() or self._start()
                except BaseException:
                    os.close(lock)
                    raise
                self._users_lock, self._owner_pid = lock, os.getpid()
                return self._database

    def release(self) -> None:
        """Stop being a user; the last one stops the server. Does nothing where not acquired.

        In a fork of the process that acquired, only the fork's copy of the lock is closed: the parent keeps it.
        """
        lock, self._users_lock, self._database = self._users_lock, None, None
        if lock is None:
            return
        if self._owner_pid != os.getpid():
            os.close(lock)
            return
        try:
            with self._folder.start_lock():
                if try_lock(lock, self._folder.users_lock):  # else others still use it
                    self._stop("fast")
        finally:
            os.close(lock)

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server, also where others use it: `fast` rolls open transactions back, `immediate` is a crash."""
        with self._folder.start_lock():
            self._stop(mode)

    def restart(self, *, immediate: bool = False) -> Database:
        """Stop and start the server, also where others use it; the database's address stays the same."""
        with self._folder.start_lock():
            self._stop("immediate" if immediate else "fast")
            database = self._start()
        if self._users_lock is not None:
            self._database = database
        return database

    def __enter__(self) -> Database:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # --- which server runs -------------------------------------------------------------------------------------------

    def _is_ours(self, pid: int) -> bool:
        _reap(pid)
        return serves(pid, self._data)

    def _works(self) -> bool:
        """Whether any process of a server works in the data folder, visible from here or not.

        A server that we did not start (pg_ctl did, or an older version) holds no lock, so it is found only where it is
        visible.
        """
        return is_data_locked(self._data) or self.pid is not None

    def _join(self) -> Database | None:
        """The running server's database, once it answers; None where none runs."""
        if not self._works():
            return None

        def ready_or_gone() -> bool:
            noted = read_pid_file(self._data)
            return (noted is not None and noted.ready) or not self._works()

        if not self._folder.wait_until(ready_or_gone, START_TIMEOUT_S):
            raise self._folder.failed("the server that runs already does not become ready")
        noted, pid = read_pid_file(self._data), self.pid
        if noted is None or not self._works():
            return None  # it ended while we looked
        problem = "there is no socket"
        for folder in dict.fromkeys((self._folder.path / "socket", Path(noted.socket_folder))):
            if not (folder / f".s.PGSQL.{PORT}").exists():
                continue
            database = _database_at(str(folder))
            try:
                if self._answers_for(database, noted):
                    return database
                problem = f"at {folder} another server answers"
            except psycopg.errors.UndefinedFile:
                # The folder was moved while it runs. It writes its control file by the old path, so it would panic at its
                # next checkpoint. What it has committed is in its log.
                if pid is not None:
                    self._end(pid, "immediate")
                else:
                    self._send_from_inside(database, "immediate")
                return None
            except StoreUnavailable as error:
                problem = error.message
        # Processes of a server that has just ended need a moment to notice.
        left = pid is None and (problem != "there is no socket" or processes_in(self._data))
        if self._folder.wait_until(lambda: not self._works(), STOP_TIMEOUT_S if left else DYING_TIMEOUT_S):
            return None
        raise self._refused(noted, problem)

    def _answers_for(self, database: Database, noted: PidFile) -> bool:
        """Whether the server there runs on this data folder: in this container the socket may be another server's."""
        with connect(database, application_name="stormproof embedded") as connection:
            row = connection.execute(
                "select system_identifier, extract(epoch from pg_postmaster_start_time())::int8 from pg_control_system()"
            ).fetchone()
        if row is None:
            return False
        identifier, started = int(row[0]), int(row[1])
        return identifier % 2**64 == system_identifier(self._data) and abs(started - noted.started) <= 1

    def _refused(self, noted: PidFile, problem: str) -> StoreUnavailable:
        """The error for a server that works in the data folder and does not answer: a second one would ruin the data."""
        if self._is_ours(noted.pid):
            return self._folder.failed(
                f"the server (pid {noted.pid}) runs and cannot be reached ({problem}); if its socket was removed, end it "
                f"with: kill -INT {noted.pid}, and start again"
            )
        if seen := processes_in(self._data):
            return self._folder.failed(f"processes of a killed server still work in {self._data}: pids {seen}")
        where = self._folder.started_on()
        return StoreUnavailable(
            f"embedded Postgres in {self._folder.path}: a server that is not seen from here works in it, and cannot be "
            f"reached ({problem}); it was started on {where} as pid {noted.pid}, in another container (PID namespace). No "
            "second one is started on its data. Stop the programs that use it there; or give this one a folder of its own "
            "in STORMPROOF_HOME; or let both use one Postgres that STORMPROOF_DATABASE_URL names. Who holds it, seen from "
            f"the machine itself: fuser -v {self._data / LOCKED_FILE}",
            path=str(self._data),
            started_on=where,
            pid=noted.pid,
        )

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start(self) -> Database:
        as_user = run_as()
        binaries = find_binaries(self._folder.data_version())
        if as_user.owner is not None:
            self._folder.path.chmod(0o711)  # nobody must reach its data
            as_user.require_reach(binaries.folder, self._folder.path)
        self._initialise(binaries, as_user)
        locks: list[int] = []

        def taken() -> bool:
            lock = take_data_lock(self._data)
            locks.extend([] if lock is None else [lock])
            return lock is not None

        if not self._folder.wait_until(taken, DYING_TIMEOUT_S):
            raise self._folder.failed(f"another process holds {self._data / LOCKED_FILE}; see who with: fuser -v")
        try:
            return self._start_locked(binaries, as_user, locks[0])
        finally:
            os.close(locks[0])  # the server has it now

    def _start_locked(self, binaries: Binaries, as_user: RunAs, lock: int) -> Database:
        """Start it with the data lock, which all its processes inherit."""
        self._clear_stale_pid_file()
        socket_folder = self._folder.socket_folder(as_user.owner)
        (self._folder.path / "started_on").write_text(f"{os.uname().nodename}\n")
        settings = {**_SERVER_SETTINGS, "unix_socket_directories": str(socket_folder)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [*as_user.prefix, str(binaries.folder / "postgres"), "-D", str(self._data), *options]
        child = self._spawn(command, as_user, lock)
        _children[process_life(), child.pid] = child

        def ready_or_gone() -> bool:
            noted = read_pid_file(self._data)
            return child.poll() is not None or (noted is not None and noted.pid == child.pid and noted.ready)

        if not self._folder.wait_until(ready_or_gone, START_TIMEOUT_S):
            self._end(child.pid, "immediate")
            raise self._folder.failed(f"Postgres was not ready after {START_TIMEOUT_S:.0f} s, and was stopped")
        if child.poll() is not None:
            _reap(child.pid)
            raise self._folder.failed(
                f"Postgres ended at once with exit status {child.returncode}{self._folder.room()}"
            )
        return _database_at(str(socket_folder))

    def _initialise(self, binaries: Binaries, as_user: RunAs) -> None:
        """Make the data folder in one step: it gets its name when it is complete."""
        for left_over in self._folder.path.glob("data.new-*"):
            shutil.rmtree(left_over, ignore_errors=True)  # an initdb whose starter was killed may still write there
        if self._data.exists():
            return
        new = Path(tempfile.mkdtemp(prefix="data.new-", dir=self._folder.path))
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
            raise self._folder.failed(f"initdb did not end within {START_TIMEOUT_S:.0f} s") from None
        if status != 0:
            raise self._folder.failed(f"initdb ended with exit status {status}{self._folder.room()}")
        new.rename(self._data)

    def _spawn(self, command: list[str], as_user: RunAs, *inherited: int) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own, which no signal for this process or its terminal reaches."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        user, group = as_user.owner or (None, None)
        with self._folder.log.open("ab") as log:
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
        """Remove the pid file of a server that was killed. Call it only with the data lock.

        Postgres refuses to start where another process has that pid, even a zombie. And the new server may get the same
        pid, as it often does in a container that starts alike: the old file would then show it ready before it is.
        """
        if not self._folder.wait_until(lambda: not processes_in(self._data), STOP_TIMEOUT_S):
            raise self._folder.failed(
                f"processes of a killed server still work in {self._data}: pids {processes_in(self._data)}"
            )
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _stop(self, mode: StopMode) -> None:
        pid = self.pid
        if pid is not None:
            self._end(pid, mode)
        elif is_data_locked(self._data):
            self._end_elsewhere(mode)
        self._folder.drop_socket_folder(run_as)

    def _end(self, pid: int, mode: StopMode) -> None:
        steps: tuple[StopMode, ...] = ("fast", "immediate") if mode == "fast" else ("immediate",)
        for step in steps:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[step])
            # A server that is ending has no folder any more before it can be reaped.
            if self._folder.wait_until(lambda: _reap(pid) and not serves(pid, self._data), STOP_TIMEOUT_S):
                return
        raise self._folder.failed(f"Postgres (pid {pid}) does not stop")

    def _end_elsewhere(self, mode: StopMode) -> None:
        """End a server in another PID namespace, which no signal from here reaches."""
        database = self._join()
        if database is not None:
            self._send_from_inside(database, mode)

    def _send_from_inside(self, database: Database, mode: StopMode) -> None:
        """Have the server run a program, in its data folder, that ends it; its answer may be lost."""
        kill = f"while read -r row; do :; done; read -r pid < postmaster.pid; kill -{_STOP_FROM_INSIDE[mode]} $pid"
        with (
            contextlib.suppress(psycopg.OperationalError),
            connect(database, application_name="stormproof embedded", autocommit=True) as connection,
        ):
            connection.execute(f"copy (select 1) to program '{kill}'".encode())
        if not self._folder.wait_until(lambda: not is_data_locked(self._data), STOP_TIMEOUT_S):
            raise self._folder.failed(
                f"Postgres, which runs in another container ({self._folder.started_on()}), does not stop"
            )


def _reap(pid: int) -> bool:
    """Reap this process's child where it has ended; False where it is a child that has not."""
    child = _children.get((process_life(), pid))
    if child is not None and child.poll() is None:
        return False
    _children.pop((process_life(), pid), None)
    return True


def _database_at(socket_folder: str) -> Database:
    return Database.of({"host": socket_folder, "port": str(PORT), "user": "postgres", "dbname": "postgres"})


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
