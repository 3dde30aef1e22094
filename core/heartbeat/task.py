"""A task's end: `Heartbeat`, which it calls to report its progress, and the connection that carries its reports and notes.

The row count costs a loop nothing: a thread looks five times a second at how far the loop's own iterator is. The note of
the message in hand is made before each row is handed out, and in careful jobs alone.

The driver answers a task's start, its end and each note, and the task waits for that: a note is in the driver's folder
before the message is handed out, and outlives both. This costs a round trip a message, in careful jobs alone. Row counts are
not answered.

A lost connection is made again. A task that is not careful goes on meanwhile: only the driver misses something. A careful
one waits, since a message that is not noted could not be found; after `WAIT_S` it gives up, and no message is to blame.

On the connection the driver sends a challenge, the task answers with its name and an HMAC of both under the job's token,
and the driver says whether it knows the job. From then on the task speaks: one record a report, of which the last one
counts. The driver answers only what the task waits for: a process that dies with unread input makes its kernel send a
reset in the place of an end, and the two mean different things where a network lies between.

The token is one job's own, and travels in the job's closure. Nothing is encrypted: whoever can read the network sees row
counts and messages' numbers.

A record has 88 bytes, and is the same on the connection and in the driver's notes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import length_hint
from types import TracebackType
from typing import Final, TypeAlias, TypeVar

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import MachineUnavailable

CHALLENGE_BYTES: Final = 32
TOKEN_BYTES: Final = 32
ID_BYTES: Final = 16
KNOWN: Final = b"+"
HEARD: Final = b"!"
"""The answer to a record that a task waits for: the driver has it, and a note is in its folder."""

OVER: Final = b"-"
"""The driver's answer where the job is over, or another driver's."""

_MAGIC: Final = b"SPP1"
_NAME: Final = struct.Struct(f"!4s{ID_BYTES}s{ID_BYTES}s")
HELLO_BYTES: Final = _NAME.size + hashlib.sha256().digest_size

KEEPALIVE_S: Final = 1
"""The kernel's own question whether the other machine is there, and the time between two. A machine answers it for a process
that hangs, or is stopped: that is how a hang is told from silence."""

KEEPALIVE_TRIES: Final = 8


class ContactLost(MachineUnavailable):
    """A task cannot report to its driver. No message is to blame, also where a loop over messages meets it."""


@dataclass(frozen=True, slots=True)
class ReportAddress:
    """Where and as what the tasks of one job report to the driver."""

    host: str
    port: int
    job: bytes
    token: bytes = field(repr=False)


def hello(place: ReportAddress, run: bytes, challenge: bytes) -> bytes:
    """A task's answer to a challenge; `run` is the id of this execution of the task, the same when it connects again."""
    name = _NAME.pack(_MAGIC, place.job, run)
    return name + _proof(place.token, challenge, name)


def hello_names(said: bytes) -> tuple[bytes, bytes] | None:
    """The job and the run that a hello names; None where it is no hello."""
    magic, job, run = _NAME.unpack_from(said)
    return (job, run) if magic == _MAGIC else None


def is_proven(said: bytes, token: bytes, challenge: bytes) -> bool:
    """Whether a hello was made with this token for this challenge; takes the same time for each wrong one."""
    return hmac.compare_digest(said[_NAME.size :], _proof(token, challenge, said[: _NAME.size]))


def _proof(token: bytes, challenge: bytes, name: bytes) -> bytes:
    return hmac.digest(token, challenge + name, "sha256")


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel ask after the other machine, and end the connection where it has not answered for some 9 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_TRIES),
        ("TCP_USER_TIMEOUT", 1_000 * KEEPALIVE_S * (KEEPALIVE_TRIES + 1)),
    ):
        option: int | None = getattr(socket, name, None)  # not every system has each
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


# ---- the records that a task sends

SUSPECTS_MAX: Final = 8
"""Where more messages than this are equally suspect, none is named."""

RECORD: Final = struct.Struct("=11q")
ROWS, STEP, TOTAL, BEFORE, PASSAGE, PASSED, STAGE, STATE, NOTED, MESSAGE, AWAITED = range(11)
RUNNING, DONE, FAILED = range(3)

Report: TypeAlias = tuple[int, int, int, int, int, int]
"""How far a task is. Rows worked on; the number of the step that it is in, 0 before the first; how many rows it was sent, 0
in the first stage, where it reads; how many were in earlier passages, how many are in this one, and how many of this one
are through the step. In the first stage they are messages."""

NO_REPORT: Final[Report] = (0, 0, 0, 0, 0, 0)

Record: TypeAlias = tuple[int, ...]
"""A report; the stage; running, done or failed; whether a message is noted, and which; whether the task waits for an
answer."""

NOTHING: Final[Record] = (*NO_REPORT, 0, RUNNING, 0, 0, 0)
"""The record of a task that has not reported."""


AttemptKey: TypeAlias = tuple[str, int, int]
"""Incarnation, txid and attempt, as in `stormproof.core.task.job`."""


@dataclass(frozen=True, slots=True)
class ProgressMark:
    """How far a job is. A value that differs from the one before is a sign of life.

    `rows` is the sum over its tasks. `started` is the number of tasks begun, where a repeated task counts again; `running`
    is how many of those have neither ended nor died with their worker. `silent` is how many of the running ones are not
    heard of: the network between them and the driver does not carry anything, so nobody knows whether they live. `tasks` are
    the records of those that run or are done.
    """

    rows: int = 0
    started: int = 0
    running: int = 0
    silent: int = 0
    tasks: tuple[Record, ...] = field(default=(), compare=False)


def most_often(records: Iterable[Record]) -> tuple[int, ...]:
    """The messages that were noted most often in tasks that did not end; none where these are more than `SUSPECTS_MAX`.

    A task that Spark repeats notes the same message each time that it dies. A task beside it that was stopped notes its
    message once.
    """
    noted = Counter(record[MESSAGE] for record in records if record[NOTED] and record[STATE] != DONE)
    most = max(noted.values(), default=0)
    named = sorted(message for message, times in noted.items() if times == most)
    return tuple(named) if len(named) <= SUSPECTS_MAX else ()


T = TypeVar("T")


# ---- the connection that carries them

HEARTBEAT_S: Final = 1.0
"""A task without progress says so this often, and learns that its connection is lost."""

TRY_S: Final = 3.0
"""Time for one attempt to connect, and for an answer of the driver's."""

WAIT_S: Final = 15.0
"""How long a task tries to connect where it cannot go on without: at its start, and in careful mode."""

CLOSE_S: Final = 5.0
"""How long a task that is over tries to say so. The job does not depend on it."""

BACKOFF_S: Final = (0.05, 2.0)
"""The first and the longest wait between two attempts to connect."""


class DriverConnection:
    """A task's end: its connection to the driver. The task's thread and the heartbeat's use it.

    `wait_s` replaces `WAIT_S`.

    Raises:
        ContactLost: the driver is not reached, or the job is over.
    """

    def __init__(
        self,
        place: ReportAddress,
        stage: int,
        task: int,
        *,
        wait_s: float | None = None,
    ) -> None:
        self._place = place
        self._what = f"task {task} of stage {stage} on {socket.gethostname()}"
        self._run = uuid.uuid4().bytes
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._record = [*NOTHING]
        self._record[STAGE] = stage
        self._socket: socket.socket | None = None
        self._over = False
        self._tries = 0
        self._told_at_s = self._next_try_s = 0.0
        with self._lock:
            self._tell_within(self._wait_s)

    def enter(self, stage: int) -> None:
        """The task goes on with another stage's work."""
        with self._lock:
            self._record[STAGE] = stage

    def publish(self, report: Report) -> None:
        """Send the report, where it has changed or is due; or try once to connect again."""
        with self._lock:
            now_s = time.monotonic()
            heard = self._socket is not None
            changed = report != tuple(self._record[: len(report)])
            self._record[: len(report)] = report
            if self._over or (now_s < self._next_try_s if not heard else not self._is_due(now_s, changed)):
                return
            with suppress(OSError, ContactLost):  # the next turn tries again
                self._tell()

    def noting(self, ids: Rows, items: Iterator[T]) -> Iterator[T]:
        """The items; each one's message is noted by the driver before it is handed out."""
        for item, message in zip(items, ids.tolist(), strict=True):
            self._note(1, message)
            yield item
        self._note(0, 0)

    def close(self, report: Report, *, failed: bool) -> None:
        """Send the end, if the driver can be reached soon, and close the connection."""
        with self._lock:
            self._record[: len(report)] = report
            self._record[STATE] = FAILED if failed else DONE
            if self._pid == os.getpid():
                with suppress(ContactLost):  # Spark tells the driver of the task's end, too
                    self._tell_within(CLOSE_S)
            self._drop()

    # Its own; the lock is held.

    def _is_due(self, now_s: float, changed: bool) -> bool:
        return changed or now_s - self._told_at_s >= HEARTBEAT_S

    def _note(self, noted: int, message: int) -> None:
        with self._lock:
            self._record[NOTED], self._record[MESSAGE] = noted, message
            self._tell_within(self._wait_s)

    def _tell_within(self, wait_s: float) -> None:
        """Send the record until the driver has answered it."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                self._tell(awaited=True)
            except OSError as error:
                now_s = time.monotonic()
                if now_s >= until_s:
                    raise self._lost(f"{type(error).__name__}: {error}") from error
                time.sleep(max(0.0, min(until_s, self._next_try_s) - now_s))
            else:
                return

    def _tell(self, *, awaited: bool = False) -> None:
        """Send the record, on a new connection where there is none."""
        if self._over:
            raise self._lost("the job is over")
        self._record[AWAITED] = int(awaited)
        try:
            if self._socket is None:
                self._socket = self._connected()
            self._socket.sendall(RECORD.pack(*self._record))
            if awaited and self._socket.recv(1) != HEARD:
                raise ConnectionResetError("the driver closed the connection")
        except OSError:
            self._drop()
            self._tries += 1
            self._next_try_s = time.monotonic() + min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** min(self._tries, 10))
            raise
        self._tries, self._told_at_s = 0, time.monotonic()

    def _connected(self) -> socket.socket:
        place = self._place
        made = socket.create_connection((place.host, place.port), timeout=TRY_S)
        try:
            keep_alive(made)
            made.sendall(hello(place, self._run, _exactly(made, CHALLENGE_BYTES)))
            answer = _exactly(made, 1)
            if answer == OVER:
                self._over = True
                raise self._lost("the job is over, or another driver took over")
            if answer != KNOWN:
                raise ConnectionError(f"what listens at {place.host}:{place.port} is no driver")
            # Not a timeout of Python's: with one, each note would ask first whether it may be sent.
            made.settimeout(None)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for wait in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                made.setsockopt(socket.SOL_SOCKET, wait, struct.pack("@ll", int(TRY_S), 0))
        except BaseException:
            made.close()
            raise
        return made

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _lost(self, why: str) -> ContactLost:
        place = self._place
        return ContactLost(
            f"{self._what} cannot report to the driver at {place.host}:{place.port}: {why}. No message is to blame. "
            "Executors must reach that address: spark.driver.host is the name, and STORMPROOF_HEARTBEAT_PORT fixes the port "
            "for a firewall",
            host=socket.gethostname(),
            error="ContactLost",
        )


def _exactly(connection: socket.socket, number: int) -> bytes:
    """So many bytes, within `TRY_S`."""
    until_s, said = time.monotonic() + TRY_S, b""
    while len(said) < number:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        part = connection.recv(number - len(said))
        if not part:
            raise ConnectionResetError("the driver closed the connection")
        said += part
    return said


# ---- what a task calls to report its progress

EVERY_S: Final = 0.2
"""How often a task's row count is reported."""


class Heartbeat:
    """One running task's signs of life. Made by `running`. Only the task's thread may call it.

    A task calls `begin` for each record batch that it takes through its steps, and `enter` at each step; one without a loop
    calls `beat`. Loops over rows go through `each`. In careful mode the task calls `at` with the rows' message numbers
    before it hands rows to a row-wise function. `steps` has the number of each component of the stage. Where one task does
    the work of several, it calls `take` before each.
    """

    def __init__(
        self, place: ReportAddress, stage: int, task: int, *, careful: bool, steps: Mapping[str, int] | None = None
    ) -> None:
        self.careful, self._steps = careful, steps or {}
        self._connection = DriverConnection(place, stage, task)
        # (rows of finished loops and batches, the running loop's iterator, the number of its items); one tuple, so that the
        # publishing thread never sees half of a change.
        self._at: tuple[int, Iterator[object], int] = (0, iter(()), 0)
        # (the step's number, rows worked on before it, its rows, those of earlier passages, those of this one); likewise.
        self._where: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
        self._total = 0
        self._ids: Rows | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_publishing, name="stormproof-heartbeat", daemon=True)
        self._thread.start()

    # What a task calls.

    def take(self, stage: int, steps: Mapping[str, int]) -> None:
        """Begin the work of a task of this stage."""
        self.beat()
        self._steps, self._where, self._total = steps, (0, 0, 0, 0, 0), 0
        self._connection.enter(stage)

    def expect(self, rows: int) -> None:
        """Say how many rows the task was sent."""
        self._total = rows

    def begin(self, rows: int) -> None:
        """Begin a passage: these rows were read, and go through the steps from here on. The passage before is over."""
        self.beat(rows)
        _, _, _, before, passage = self._where
        self._where = (0, 0, 0, before + passage, rows)

    def enter(self, component: str, rows: int) -> None:
        """Begin a step, with so many rows that are made of the passage's."""
        self._where = (self._steps.get(component, 0), self._rows(), rows, *self._where[3:])

    def beat(self, rows: int = 1) -> None:
        """Add to the number of rows worked on; any number above 0 is a sign of life."""
        self._at = (self._rows() + rows, iter(()), 0)

    def reset(self) -> None:
        """Give a sign of life inside a long call: the timeout counts from here (Storm's reset timeout)."""
        done, left, total = self._at
        self._at = (done + 1, left, total)
        step, worked, of_step, before, passage = self._where
        self._where = (step, worked + 1, of_step, before, passage)  # it is no row of the step

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
        return left if ids is None or not self.careful else self._connection.noting(ids, left)

    def publish(self) -> None:
        """Report now. The heartbeat's own thread does so by itself."""
        self._connection.publish(self._report())

    # The end.

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close(self._report(), failed=kind is not None)

    # Its own.

    def _rows(self) -> int:
        done, left, total = self._at
        return done + total - length_hint(left)

    def _report(self) -> Report:
        rows, (step, worked, of_step, before, passage) = self._rows(), self._where
        in_hand = int(self._at[2] > 0)  # the row that a loop took last
        share = (rows - worked - in_hand) / of_step if of_step else 0.0
        return rows, step, self._total, before, passage, int(passage * min(max(share, 0.0), 1.0))

    def _keep_publishing(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                self.publish()
            except MemoryError:  # the user's function has taken all memory, and gets the same error
                continue


@contextmanager
def running(
    place: ReportAddress | None, stage: int, task: int, *, careful: bool = False, steps: Mapping[str, int] | None = None
) -> Generator[Heartbeat | None]:
    """A task's heartbeat while the block runs; None where the job has none.

    Where an exception leaves the block, the task has failed, and the message that it had in hand stays a suspect.

    Raises:
        MachineUnavailable: the job is over, or this machine does not reach the driver.
    """
    if place is None:
        yield None
        return
    with Heartbeat(place, stage, task, careful=careful, steps=steps) as heartbeat:
        yield heartbeat
