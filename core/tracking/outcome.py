"""The ways in which a batch can end. Whoever ran its attempts acts on the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeAlias

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
