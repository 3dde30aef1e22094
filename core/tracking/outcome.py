"""The ways in which a batch can end, and the breaker, which ends the run.

Whoever ran a batch's attempts acts on the outcome. The breaker stops a run in which messages fail alone for a fault that
is not theirs, so that none of them is blamed.

A batch whose job dies of an error outside user code is bisected, down to a message that is alone in its batch. Where the
error is that message's fault after all (its rows make a library fail), other messages go through. Where it is a fault of a
machine or of the package, every message fails alone, one after the other. The breaker tells the two apart.

Promises, over any sequence of calls with one error (tests/property/test_breaker.py):

* *bounded*: the run stops at the latest when `LIMIT` different messages have failed alone, or two of them `ROW_MAX` times
  together, with no report of a job in between.
* *innocent*: a message's failure is counted only if it failed alone before and a job has reported since; or if no other
  message failed since the last report, and it failed more than `HOLDS_MAX` times.
* *poison*: a message that always fails is held back at most once where jobs report in between, and `HOLDS_MAX` times where
  there is no other message. Then its failures count, and it becomes a dead letter. Any number of such messages in a row
  does not stop a run.

Only errors outside user code take part, named by class and place. The failure of a message whose function raised, whose
worker was lost, or which hung is counted always: a topology in which every message is bad makes dead letters, and goes on.

`Shortages` does the same for users' functions that meet what a machine lacks: an OSError of disk space, file handles, memory
or a read-only disk. One message may cause it (it unpacks to more than the disk holds) and becomes a dead letter. Where
unrelated messages meet it in one job, or in jobs one after the other, the run waits as for an outage.

Pure: it knows no store and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import ClassVar, Final, TypeAlias

from stormproof.core.base.errors import TasksBroken
from stormproof.core.base.message import MessageFailure
from stormproof.core.tracking.verdict import JobReport


class AttemptEnd(StrEnum):
    """Why an attempt was followed by another."""

    JOB_FAILED = "job_failed"
    UNVERIFIED = "unverified"
    MOOT = "moot"
    """Messages failed after their tuples had gone on, or more than are named at once: the batch runs again without them, or
    goes back in parts."""


@dataclass(frozen=True, slots=True)
class FailedIn:
    """A message that failed or was returned with one that failed, and the attempt in which this happened."""

    failure: MessageFailure
    attempt: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Everything adds up: what was written may be committed, and every message but the failed ones confirmed."""

    report: JobReport
    failed: tuple[FailedIn, ...]
    attempts: int


@dataclass(frozen=True, slots=True)
class AllFailed:
    """Every message failed: nothing may be committed, and each message is to be failed or returned as named."""

    failed: tuple[FailedIn, ...]
    attempts: int


@dataclass(frozen=True, slots=True)
class Divided:
    """The batch goes back in parts: each suspect alone, or `parts` of one size where there are none. No failure counts."""

    end: AttemptEnd
    """How its last attempt ended."""
    reason: str
    alone: tuple[int, ...]
    attempts: int
    parts: int = 2


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The verdict stayed wrong and names no message: stop, and commit nothing."""

    TOO_MUCH: ClassVar = "It cannot be divided, for messages meet in it: give its tasks more memory or time"

    error: str
    attempts: int
    hint: str = "Two runs before it failed alike: the reader or a store between the stages loses or doubles rows"


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Under at-most-once: the one attempt failed, and its messages do not come back."""

    end: AttemptEnd
    """How the attempt ended."""
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Broken:
    """Unrelated messages (under at-most-once: batches) failed with one error outside user code: stop, and blame none."""

    error: str
    outside: str
    messages: int
    attempts: int

    def raised(self, where: str) -> TasksBroken:
        """The error that ends the run."""
        return TasksBroken(
            f"{where}: {self.messages} unrelated messages in a row failed alone with one error outside user code "
            f"({self.outside}), and nothing else went through in between: {self.error}. No message is to blame, and no "
            "failure was counted for it. Repair what the error names, then start the run again: it goes on from there",
            error=self.error,
            outside=self.outside,
            messages=self.messages,
        )


Outcome: TypeAlias = Complete | AllFailed | Divided | GivenUp | Abandoned | Broken


LIMIT: Final = 3
"""How many unrelated messages in a row stop the run: one may be poison, and two a coincidence."""

ROW_MAX: Final = 6
"""How many failures in a row stop the run where they are of two messages only."""

HOLDS_MAX: Final = 3
"""How often a message goes back uncounted, so that others are tried before its failures count."""


class Breaks(Enum):
    """What to do with a message that failed alone."""

    COUNT = auto()
    """Count the failure: it is the message's."""
    HOLD = auto()
    """Return the message uncounted: it is not known yet whether it is to blame."""
    STOP = auto()
    """Stop the run, and count nothing."""


class Breaker:
    """Is called for every job that reports and every message that fails alone, in their order. One for each driver's run."""

    def __init__(self) -> None:
        self._error = ""
        self._suspects: set[int] = set()
        """Messages that failed alone with the present error, at any time."""
        self._row: list[int] = []
        """Those that did since the last report, in order; one may be there several times."""

    def reported(self) -> None:
        """A job ended with a report, so imports, disks and stores served it."""
        self._row.clear()

    def failed_alone(self, message: int, outside: str) -> Breaks:
        """What to do with a message. `outside` names the error outside user code, by class and place; empty: none."""
        if not outside:
            return Breaks.COUNT
        if outside != self._error:
            self._error = outside
            self._suspects.clear()
            self._row.clear()
        if message in self._suspects and message not in self._row:
            return Breaks.COUNT  # others went through meanwhile, and this one failed again
        self._suspects.add(message)
        self._row.append(message)
        if self.messages >= LIMIT or (self.messages > 1 and len(self._row) >= ROW_MAX):
            return Breaks.STOP
        return Breaks.COUNT if self.messages == 1 and len(self._row) > HOLDS_MAX else Breaks.HOLD

    @property
    def messages(self) -> int:
        """The number of different messages that failed alone with the present error since the last report."""
        return len(set(self._row))


class Shortages:
    """Is called for every job that reports, with the messages whose functions met what a machine lacks."""

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self._row = Counter[int]()
        """How often each met a shortage since the last job without one."""

    def met_by(self, messages: AbstractSet[int]) -> AbstractSet[int] | None:
        """The messages whose failure is not to be counted yet; None: the fault is the machine's, and no failure counts.

        A message is held back at most `HOLDS_MAX` times, and not at all once a job without a shortage came after its first.
        """
        if not messages:
            self._row.clear()
            return frozenset()
        fresh = messages - (self._suspects - self._row.keys())
        self._row.update(fresh)
        if len(self._row) >= LIMIT:
            self._suspects -= self._row.keys()  # until a job has no shortage, every one is the machine's fault
            return None
        self._suspects |= messages
        return {message for message in fresh if self._row[message] <= HOLDS_MAX}
