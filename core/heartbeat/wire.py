"""What a task and the driver say to each other on a heartbeat's connection.

The driver sends a challenge, the task answers with its name and an HMAC of both under the job's token, and the driver says
whether it knows the job. From then on the task speaks: one record a report, of which the last one counts. The driver answers
only what the task waits for: a process that dies with unread input makes its kernel send a reset in the place of an end, and
the two mean different things where a network lies between.

The token is one job's own, and travels in the job's closure. Nothing is encrypted: whoever can read the network sees row
counts and messages' numbers.

A record has 88 bytes, and is the same on the connection and in the driver's notes.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

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
class Place:
    """Where and as what the tasks of one job report to the driver."""

    host: str
    port: int
    job: bytes
    token: bytes = field(repr=False)


def hello(place: Place, run: bytes, challenge: bytes) -> bytes:
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
class Progress:
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
