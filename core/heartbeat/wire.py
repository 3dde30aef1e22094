"""What a task and the driver say to each other on a heartbeat's connection.

The driver sends a challenge, the task answers with its name and an HMAC of both under the job's token, and the driver says
whether it knows the job. From then on the task speaks: one record a report, of which the last one counts. The driver answers
only what the task waits for: a process that dies with unread input makes its kernel send a reset in the place of an end, and
the two mean different things where a network lies between.

The token is one job's own, and travels in the job's closure. Nothing is encrypted: whoever can read the network sees row
counts and messages' numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass, field
from typing import Final

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
