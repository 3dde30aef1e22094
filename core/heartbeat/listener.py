"""The driver's end: one thread that listens, and hears the tasks of all of a driver's jobs.

A report costs no work of its own: of all records that have arrived, the last one is looked at. Nor do strangers cost
anything: until it has shown a job's token, a connection has `HELLO_S` and 80 bytes, and there are at most `STRANGERS_MAX` of
them. A wrong token is dropped and counted.

Of each job it is known what was heard from its tasks, and which of them are dead or silent:

- A connection is open: the task runs. Where its kernel does not answer either, for `SILENT_S`, the task is *silent*.
- The connection came to its end without the task's: the process is dead, unless it connects again within `GRACE_S`.
- The connection broke (a reset, or no answer for 9 s): the task is silent until it connects again. It may live.

Where tasks run below the driver, on its machine (`direct`), nothing lies between: there is no silence, and a connection that
is over is a dead process.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import shutil
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import FatalError, SettingsError, UsageError
from stormproof.core.base.process import process_life
from stormproof.core.heartbeat.task import (
    AWAITED,
    CHALLENGE_BYTES,
    DONE,
    FAILED,
    HEARD,
    HELLO_BYTES,
    ID_BYTES,
    KEEPALIVE_S,
    KNOWN,
    NOTED,
    NOTHING,
    OVER,
    PASSAGE,
    PASSED,
    RECORD,
    ROWS,
    RUNNING,
    STAGE,
    STATE,
    TOKEN_BYTES,
    AttemptKey,
    ProgressMark,
    Record,
    ReportAddress,
    hello_names,
    is_proven,
    keep_alive,
    most_often,
)

log = logging.getLogger("stormproof.heartbeat")

SILENT_S: Final = 2.5 * KEEPALIVE_S
"""A machine answers each `KEEPALIVE_S`. After so long without an answer the task on it is silent."""

GRACE_S: Final = 3.0
"""How long a task whose connection was closed by something between may take to connect again, before it counts as dead."""

QuietFor = Callable[[socket.socket], float]
"""Seconds since the other machine was heard."""

_ANSWERED_AT: Final = struct.Struct("@56xI")
"""`tcpi_last_ack_recv` of Linux's `tcp_info`, in milliseconds."""


def quiet_for(connection: socket.socket) -> float:
    """Seconds since the other machine's kernel answered; 0.0 where this system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ANSWERED_AT.size)
    except OSError:  # it broke just now, which its reader finds
        return 0.0
    (milliseconds,) = _ANSWERED_AT.unpack(info)
    return float(milliseconds) / 1_000


@dataclass(slots=True)
class _TaskExecution:
    """One execution of a task, which keeps its place when it connects again."""

    number: int
    record: Record = NOTHING
    connection: socket.socket | None = None
    closed_at_s: float | None = None
    """When its connection came to an end; None where it is open, or broke."""


class JobSigns:
    """What was heard from one job's tasks. The listener's thread writes, any thread asks."""

    def __init__(
        self, place: ReportAddress, folder: Path | None, clock: Clock, quiet: QuietFor, *, direct: bool = False
    ) -> None:
        self.notices_silence_s: Final = 0.0 if direct else 2 * SILENT_S
        self._direct, self._grace_s = direct, 0.0 if direct else GRACE_S
        self.place: Final = place
        self._folder, self._clock, self._quiet = folder, clock, quiet
        self._lock = threading.Lock()
        self._tasks: dict[bytes, _TaskExecution] = {}
        self._file: int | None = None
        self._lost: str | None = None

    # The driver asks.

    def progress(self) -> ProgressMark:
        """How far the job is; see above for what is dead and what is silent.

        Raises:
            OSError: nobody listens any more.
        """
        if self._lost is not None:
            raise OSError(self._lost)
        now_s = self._clock.monotonic_s()
        with self._lock:
            tasks = list(self._tasks.values())
            states = [self._state(task, now_s) for task in tasks]
        return ProgressMark(
            rows=sum(task.record[ROWS] for task in tasks),
            started=len(tasks),
            running=sum(running for running, _ in states),
            silent=sum(silent for _, silent in states),
            tasks=tuple(
                task.record
                for task, (running, _) in zip(tasks, states, strict=True)
                if running or task.record[STATE] == DONE
            ),
        )

    def suspects(self) -> tuple[int, ...]:
        """The messages noted most often in tasks that did not end."""
        with self._lock:
            return most_often(task.record for task in self._tasks.values())

    def _state(self, task: _TaskExecution, now_s: float) -> tuple[bool, bool]:
        """Whether it runs, and whether it is silent."""
        if task.record[STATE] != RUNNING:
            return False, False
        if task.connection is not None:
            return True, not self._direct and self._quiet(task.connection) > SILENT_S
        if task.closed_at_s is None:
            return True, True
        return now_s - task.closed_at_s < self._grace_s, False

    # The listener tells.

    def connected(self, run: bytes, connection: socket.socket) -> socket.socket | None:
        """A task has connected; returns the connection that it had before, if that is still open."""
        with self._lock:
            task = self._tasks.setdefault(run, _TaskExecution(len(self._tasks)))
            before, task.connection, task.closed_at_s = task.connection, connection, None
            return before

    def reported(self, run: bytes, record: Record) -> None:
        """A task has sent a record."""
        with self._lock:
            task = self._tasks[run]
            before, task.record = task.record, record
            if before[NOTED] or record[NOTED]:
                self._write_down(task.number, record)

    def disconnected(self, run: bytes, connection: socket.socket, *, broken: bool) -> None:
        """A connection is over; no effect where the task has a newer one."""
        with self._lock:
            task = self._tasks[run]
            if task.connection is connection:
                task.connection = None
                task.closed_at_s = None if broken and not self._direct else self._clock.monotonic_s()

    def lost(self, why: str) -> None:
        """Nobody listens any more: nothing is known of the tasks from here on."""
        self._lost = why

    def connections(self) -> list[socket.socket]:
        """The connections that are open."""
        with self._lock:
            return [task.connection for task in self._tasks.values() if task.connection is not None]

    def close(self) -> None:
        """The job is over: write down nothing more."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = self._folder = None

    def _write_down(self, number: int, record: Record) -> None:
        if self._folder is None:
            return
        try:
            if self._file is None:
                self._file = os.open(self._folder / NOTES, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._file, RECORD.pack(*record), number * RECORD.size)
        except OSError as error:  # a note only saves time where this driver dies
            log.warning("notes cannot be written to %s, and are not from here on: %s", self._folder, error)
            self._folder = None


def is_record(record: Record) -> bool:
    """Whether a task can have sent this."""
    counts = min(record[: STAGE + 1]) >= 0 and record[PASSED] <= record[PASSAGE]
    return counts and RUNNING <= record[STATE] <= FAILED and {record[NOTED], record[AWAITED]} <= {0, 1}


# ---- what a driver leaves behind when it dies: the notes of what its tasks had in hand, in a folder for each job

NOTES: Final = "notes"
"""The file in a job's folder in which the driver writes down notes, one record a task."""


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
        shutil.rmtree(folder, ignore_errors=True)


def suspects_of_dead(root: Path | None, incarnation: str, txid: int) -> tuple[int, ...]:
    """As `most_often`, over all attempts at a batch whose driver died while its job ran.

    Empty where the tasks made no notes, or the folders are gone.
    """
    if root is None:
        return ()
    return most_often(record for folder in root.glob(f"{incarnation}.{txid}.*") for record in _records(folder))


def sweep(root: Path | None, incarnation: str) -> None:
    """Remove the folders that dead drivers of this incarnation left. Call it after reading their suspects."""
    for folder in () if root is None else sorted(root.glob(f"{incarnation}.*")):
        shutil.rmtree(folder, ignore_errors=True)


def _records(folder: Path) -> Iterator[Record]:
    try:
        content = (folder / NOTES).read_bytes()
    except FileNotFoundError:
        return
    whole = len(content) - len(content) % RECORD.size  # the rest was being written
    yield from RECORD.iter_unpack(content[:whole])  # pyright: ignore[reportReturnType]


# ---- one thread that listens

HELLO_S: Final = 5.0
"""Time for a connection to show a token."""

STRANGERS_MAX: Final = 256
"""Connections that have shown no token yet; beyond it the oldest one is dropped."""

LOOK_EVERY_S: Final = 1.0
PAUSE_S: Final = 0.5
"""How long nothing is accepted where this process has no file handle left."""

RESTARTS_MAX: Final = 3
RESTARTS_S: Final = 60.0
"""The thread begins anew after an error that nobody expected, at most so often within this time."""

CHUNK_BYTES: Final = 1 << 16
BACKLOG: Final = 4_096


class DriverAddress(NamedTuple):
    """Where tasks reach the driver, and where it listens for them."""

    host: str
    bind: str
    same_machine: bool = False
    """All tasks run on the driver's machine, in other processes."""


@dataclass(slots=True)
class _Peer:
    """One connection. `said` is the part of a hello or of a record that has arrived."""

    socket: socket.socket
    until_s: float
    challenge: bytes
    said: bytes = b""
    heard: JobSigns | None = None
    run: bytes = b""


@dataclass(slots=True)
class _ListenerState:
    """What the listener's thread works with."""

    selector: selectors.BaseSelector
    strangers: dict[int, _Peer] = field(default_factory=dict[int, _Peer])
    peers: dict[int, _Peer] = field(default_factory=dict[int, _Peer])
    todo: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    accepts_from_s: float | None = None


LOOPBACK: Final = DriverAddress("127.0.0.1", "127.0.0.1", same_machine=True)
"""Where all tasks run in the driver's process or below it."""


class HeartbeatListener:
    """Listens for the tasks of one driver's jobs. A context; its end closes every connection.

    `refused` counts the connections that were dropped, by reason. `port` 0 takes a free one. `direct` is as in `JobSigns`.

    An error that nobody expected does not end it unseen: it is logged, every connection is dropped, and the thread begins
    anew; the tasks connect again, and are silent until then. Where that does not help, jobs that run are no longer heard
    (`JobSigns.progress` raises), and none can begin.

    Threads: any may begin and end jobs. Forks: a fork may only close its copy.

    Raises:
        SettingsError: it cannot listen there.
    """

    def __init__(
        self,
        address: DriverAddress,
        port: int = 0,
        *,
        root: Path | None = None,
        direct: bool = False,
        clock: Clock | None = None,
        quiet: QuietFor = quiet_for,
        new_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._root, self._clock, self._quiet, self._new_bytes = root, clock or SystemClock(), quiet, new_bytes
        self._host, self._direct = address.host, direct
        try:
            family, *_, where = socket.getaddrinfo(
                address.bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener = socket.create_server(where[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise SettingsError(
                f"the driver cannot listen for its tasks at {address.bind}:{port}: {error.strerror or error}. Set "
                "spark.driver.bindAddress (or spark.driver.host), and STORMPROOF_HEARTBEAT_PORT, where 0 takes a free port",
                setting="heartbeat_port",
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.refused: Counter[str] = Counter()
        self._jobs: dict[bytes, JobSigns] = {}
        self._life = process_life()
        self._closed = False
        self._failed: Exception | None = None
        self._restarts = deque[float](maxlen=RESTARTS_MAX)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._buffer = bytearray(CHUNK_BYTES)
        self._state = _ListenerState(selectors.DefaultSelector())
        self._state.selector.register(self._listener, selectors.EVENT_READ)
        self._state.selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="stormproof-heartbeat-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> HeartbeatListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def of_job(self, key: AttemptKey) -> Generator[JobSigns]:
        """The heartbeat of an attempt, under a token of its own. Its notes are also written to a folder below `root`."""
        with ExitStack() as stack:
            folder = None if self._root is None else stack.enter_context(job_folder(self._root, key))
            yield stack.enter_context(self.job(folder))

    @contextmanager
    def job(self, folder: Path | None = None) -> Generator[JobSigns]:
        """A heartbeat under a token of its own, while the block runs.

        Raises:
            FatalError: its thread has ended by an error that nobody expected.
        """
        if process_life() != self._life or self._closed:
            raise UsageError(f"this heartbeat's listener belongs to process {self._life.pid}, or is closed")
        if (ended := self._ended()) is not None:
            raise ended from self._failed
        name = self._new_bytes(ID_BYTES)
        place = ReportAddress(self._host, self.port, name, self._new_bytes(TOKEN_BYTES))
        heard = self._jobs[name] = JobSigns(place, folder, self._clock, self._quiet, direct=self._direct)
        if (ended := self._ended()) is not None:  # meanwhile
            heard.lost(ended.message)
        try:
            yield heard
        finally:
            del self._jobs[name]
            heard.close()
            self._have_done(lambda: self._drop_all(heard.connections()))

    def close(self) -> None:
        """Listen no more, and close every connection: tasks that still run are told that their job is over."""
        if self._closed:
            return
        self._closed = True
        if process_life() == self._life:
            self._have_done(lambda: None)
            self._thread.join()
            if self.refused:
                log.warning("connections refused at port %d: %s", self.port, dict(self.refused))
            with suppress(OSError):  # a fork may have a copy, and would keep the port
                self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, self._wake_in, self._wake_out):
            one.close()

    # The thread.

    def _have_done(self, what: Callable[[], None]) -> None:
        self._state.todo.append(what)
        with suppress(BlockingIOError):  # full of wakes: it is awake
            self._wake_in.send(b"w")

    def _ended(self) -> FatalError | None:
        """Why nobody is heard any more; None as long as the thread runs."""
        error = self._failed
        if error is None:
            return None
        return FatalError(
            f"the driver hears no task any more: its thread {self._thread.name} at port {self.port} ended "
            f"{RESTARTS_MAX + 1} times within {RESTARTS_S:g} s, last by {type(error).__name__}: {error}. The log has where. "
            "No message is to blame. Start again",
            port=self.port,
            error=type(error).__name__,
        )

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._serve_until_closed()
            except Exception as error:  # noqa: BLE001 - a thread that ended unseen would make every task look silent
                self._begin_anew(error)
                if self._failed is not None:
                    break
        self._drop_everything()
        self._state.selector.close()

    def _begin_anew(self, error: Exception) -> None:
        log.error("the thread %s met an error that nobody expected", self._thread.name, exc_info=error)
        self._drop_everything()
        now_s = self._clock.monotonic_s()
        if len(self._restarts) == RESTARTS_MAX and now_s - self._restarts[0] < RESTARTS_S:
            self._failed = error
            ended = self._ended()
            assert ended is not None
            for heard in list(self._jobs.values()):
                heard.lost(ended.message)
            return
        self._restarts.append(now_s)
        state = self._state
        state.selector.close()
        state.selector, state.accepts_from_s = selectors.DefaultSelector(), None
        state.selector.register(self._listener, selectors.EVENT_READ)
        state.selector.register(self._wake_out, selectors.EVENT_READ)

    def _drop_everything(self) -> None:
        state = self._state
        for peer in [*state.strangers.values(), *state.peers.values()]:
            try:
                self._drop(peer, broken=not self._closed)
            except Exception:  # the fault may be in here
                log.exception("a connection could not be dropped in order")
                peer.socket.close()
        state.strangers.clear()
        state.peers.clear()

    def _serve_until_closed(self) -> None:
        state = self._state
        while not self._closed:
            for key, _ in state.selector.select(LOOK_EVERY_S if state.accepts_from_s is None else PAUSE_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._wake_out.recv(CHUNK_BYTES)
                else:
                    self._read(key.data)
            while state.todo:
                state.todo.popleft()()
            self._look()

    def _look(self) -> None:
        """Drop those who have taken too long, and accept again."""
        state, now_s = self._state, self._clock.monotonic_s()
        for peer in list(state.strangers.values()):  # the oldest comes first
            if peer.until_s > now_s:
                break
            self._refuse(peer, "too slow")
        if state.accepts_from_s is not None and now_s >= state.accepts_from_s:
            state.accepts_from_s = None
            state.selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        state = self._state
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it was gone before it was accepted
            return
        except OSError as error:
            log.warning("no connection is accepted for %s s: %s", PAUSE_S, error)
            state.selector.unregister(self._listener)
            state.accepts_from_s = self._clock.monotonic_s() + PAUSE_S
            return
        peer = _Peer(accepted, self._clock.monotonic_s() + HELLO_S, self._new_bytes(CHALLENGE_BYTES))
        state.strangers[accepted.fileno()] = peer
        try:
            accepted.setblocking(False)
            keep_alive(accepted)
            accepted.send(peer.challenge)
            state.selector.register(accepted, selectors.EVENT_READ, peer)
        except OSError:
            self._drop(peer)
            return
        if len(state.strangers) > STRANGERS_MAX:
            self._refuse(next(iter(state.strangers.values())), "too many")

    def _read(self, peer: _Peer) -> None:
        if peer.socket.fileno() < 0:  # dropped since this event was seen
            return
        limit = CHUNK_BYTES if peer.heard is not None else HELLO_BYTES - len(peer.said)
        try:
            size = peer.socket.recv_into(self._buffer, limit)
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer, broken=True)
            return
        if not size:
            self._drop(peer)
            return
        said = peer.said + self._buffer[:size]
        if peer.heard is None:
            peer.said = said
            if len(said) == HELLO_BYTES:
                self._admit(peer)
            return
        self._hear(peer, peer.heard, said)

    def _hear(self, peer: _Peer, heard: JobSigns, said: bytes) -> None:
        whole = len(said) - len(said) % RECORD.size
        peer.said = bytes(said[whole:])
        if whole:
            record = RECORD.unpack_from(said, whole - RECORD.size)
            if not is_record(record):
                self._refuse(peer, "no record")
                return
            heard.reported(peer.run, record)
            if record[AWAITED]:
                try:
                    peer.socket.send(HEARD)
                except OSError:
                    self._drop(peer, broken=True)

    def _admit(self, peer: _Peer) -> None:
        names = hello_names(peer.said)
        if names is None:
            self._refuse(peer, "no hello")
            return
        job, peer.run = names
        heard = self._jobs.get(job)
        if heard is None:
            with suppress(OSError):
                peer.socket.send(OVER)
            self._drop(peer)
            return
        if not is_proven(peer.said, heard.place.token, peer.challenge):
            self._refuse(peer, "wrong token")
            return
        try:
            peer.socket.send(KNOWN)
        except OSError:
            self._drop(peer)
            return
        number = peer.socket.fileno()
        self._state.peers[number] = self._state.strangers.pop(number)
        peer.said, peer.heard = b"", heard
        before = heard.connected(peer.run, peer.socket)
        if before is not None:
            self._drop_all([before])

    def _refuse(self, peer: _Peer, why: str) -> None:
        if not self.refused[why]:
            log.warning("a connection at port %d was dropped: %s; further ones are counted", self.port, why)
        self.refused[why] += 1
        self._drop(peer, broken=True)

    def _drop_all(self, connections: list[socket.socket]) -> None:
        for connection in connections:
            peer = self._state.peers.get(connection.fileno())
            if peer is not None and peer.socket is connection:
                self._drop(peer)

    def _drop(self, peer: _Peer, *, broken: bool = False) -> None:
        number = peer.socket.fileno()
        self._state.strangers.pop(number, None)
        self._state.peers.pop(number, None)
        if peer.heard is not None:
            peer.heard.disconnected(peer.run, peer.socket, broken=broken)
        with suppress(KeyError, ValueError):  # it was not registered
            self._state.selector.unregister(peer.socket)
        with suppress(OSError):  # a fork may have a copy
            peer.socket.shutdown(socket.SHUT_RDWR)
        peer.socket.close()
