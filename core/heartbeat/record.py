"""What a task reports: one record of 88 bytes, the same on a connection and in the driver's notes."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

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
