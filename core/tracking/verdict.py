"""The verdict of a batch: do acked shares XOR to tokens, do counts agree? And how a batch can end.

The XOR of many messages' ack vals is again one 64-bit value. It is zero when every tuple anchored to them was acked, and
otherwise only by an accident of probability 2^-64. An XOR is blind to copies where a row comes an odd number of times: so
messages are counted, and `stormproof.core.task.exchange` counts the rows between stages.

Tasks count what each component did, and how many tuples went over each edge, by record batch, where the work is done.
Their counts are added up, so that they do not depend on how a batch was divided among tasks.

Whoever ran a batch's attempts acts on the outcome. `Breaker` ends a run in which messages fail alone for a fault that is
not theirs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import reduce
from operator import xor
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stormproof.core.base.errors import TasksBroken
from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.sink import PreparedFile
from stormproof.core.contract.source import Expectation

Edge: TypeAlias = tuple[str, str, str]
"""The component that emits, its stream, and the component or sink that takes the tuples."""


@dataclass(slots=True)
class ComponentCounts:
    """The counts of one component.

    `executed` are the tuples that it took in, which are those of the edges to it; of a spout, the messages that were read;
    of the acker, the acks that it was told. `emitted` are the tuples that it made, whoever subscribes to them. `acked` are
    the tuples that it took in and did not fail; of a spout, the messages that did not fail early. `busy_ns` is the time that
    its code took, over all tasks.
    """

    executed: int = 0
    emitted: int = 0
    acked: int = 0
    busy_ns: int = 0


@dataclass(slots=True)
class TaskCounts:
    """The counts of a task or, added up, of an attempt. Tuples of messages that failed on the way are among them.

    `now_ns` tells the time of `busy`; it does not travel.
    """

    components: dict[str, ComponentCounts] = field(default_factory=dict[str, ComponentCounts])
    edges: dict[Edge, int] = field(default_factory=dict[Edge, int])
    now_ns: Callable[[], int] = field(default=time.perf_counter_ns, compare=False)

    def of(self, component: str) -> ComponentCounts:
        """A component's counts, to add to."""
        found = self.components.get(component)
        if found is None:
            found = self.components[component] = ComponentCounts()
        return found

    def took(self, component: str, stream: str, to: str, tuples: int) -> None:
        """Count tuples that a component or a sink took from an edge."""
        edge = component, stream, to
        self.edges[edge] = self.edges.get(edge, 0) + tuples
        self.of(to).executed += tuples

    @contextmanager
    def busy(self, component: str) -> Generator[None]:
        """Count the time within this context as a component's. Contexts do not nest."""
        started_ns = self.now_ns()
        try:
            yield
        finally:
            self.of(component).busy_ns += self.now_ns() - started_ns

    def add(self, other: TaskCounts) -> None:
        """Add the counts of another task."""
        for name, more in other.components.items():
            mine = self.of(name)
            mine.executed += more.executed
            mine.emitted += more.emitted
            mine.acked += more.acked
            mine.busy_ns += more.busy_ns
        for edge, tuples in other.edges.items():
            self.edges[edge] = self.edges.get(edge, 0) + tuples

    def __reduce__(self) -> tuple[type[TaskCounts], tuple[dict[str, ComponentCounts], dict[Edge, int]]]:
        return TaskCounts, (self.components, self.edges)


def total(parts: Iterable[TaskCounts]) -> TaskCounts:
    """The counts of all tasks."""
    made = TaskCounts()
    for part in parts:
        made.add(part)
    return made


# ---- the reports of the tasks of one attempt, taken together: the verdict is taken over them

ANY_KEY: Final = 0
"""The key in `JobReport.met` of messages that cannot be told apart after a group: any key."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the successful tasks of one attempt reported.

    `read_messages` is the number of messages that the readers returned, `read_xor` the XOR of their tokens. `ack_xor` is
    the XOR of every acked share. `failures` are the messages that failed early; nothing else in here includes their tuples
    or acks. `violations` has a text for each loss or copy of rows between stages.

    `late` are failures of messages whose tuples had gone on already, over an exchange or into a bolt that may keep them.
    Each task names a message once, so a message may be named more than once. `late_xor` is the XOR of the shares that ended
    in these failures: `ack_xor ^ late_xor` accounts for every share. `together` is an (n, 2) array of the ids of messages
    that anchor one tuple together. `met` has the id of each message that reached a component at which messages meet, beside
    a hash of the component and the key. `lost` are the messages that were incomplete in per-message mode. `unnamed` is the
    number of failures of messages that no task named, since it had named enough; above 0, nothing else in here adds up.
    `unanchored` is the number of failed tuples that no message anchored: nothing is replayed for them. `counts` tell what
    each component did.
    """

    read_messages: int
    read_xor: int
    ack_xor: int
    failures: tuple[MessageFailure, ...] = ()
    files: tuple[PreparedFile, ...] = ()
    violations: tuple[str, ...] = ()
    tuples: int = 0
    steps_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    late: tuple[MessageFailure, ...] = ()
    late_xor: int = 0
    together: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    met: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    lost: tuple[MessageFailure, ...] = ()
    unnamed: int = 0
    unanchored: int = 0
    counts: TaskCounts = field(default_factory=TaskCounts)

    @property
    def named(self) -> tuple[MessageFailure, ...]:
        """All failures; a message may be among them more than once."""
        return (*self.failures, *self.late, *self.lost)


def misread(report: JobReport, expected: Expectation) -> tuple[str, ...]:
    """The differences between the messages that were read and those that were opened, one text each.

    A failed message never explains such a difference.
    """
    found: list[str] = []
    if report.read_messages != expected.messages:
        found.append(f"{expected.messages} messages were opened, {report.read_messages} were read")
    if report.read_xor != expected.xor:
        found.append("the messages that were read are not those that were opened (XOR of tokens differs)")
    return tuple(found)


def mismatches(
    report: JobReport, expected: Expectation, *, tracked: bool, per_message: bool = False
) -> tuple[str, ...]:
    """What does not add up in an attempt, one text each; empty is the verdict "complete".

    `expected` was computed apart from the read. Messages that failed early are named with their tokens, and only those
    tokens are taken off: a failed message never explains the loss of another. A share that ended in a late failure was
    counted where it ended, so acks and late failures together account for every share.

    Where ackers took a verdict for each message (`per_message`) and named some as lost, the XOR over all of them is not
    compared: every other message has a verdict of its own.
    """
    found = [*report.violations, *misread(report, expected)]
    failed_ids = {failure.id for failure in report.failures}
    if len(failed_ids) != len(report.failures):
        found.append(f"{len(report.failures)} failures name {len(failed_ids)} messages: a report was counted twice")
    if tracked and not (per_message and report.lost):
        failed = reduce(xor, (failure.token for failure in report.failures), 0)
        if report.ack_xor ^ report.late_xor != expected.xor ^ failed:
            found.append("the ack val is not zero: tuples were lost or doubled on their way to the sinks")
    return tuple(found)


# ---- the ways in which a batch can end


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


# ---- the breaker

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
    """Stops a run in which messages fail alone for a fault that is not theirs, so that none of them is blamed.

    A batch whose job dies of an error outside user code is bisected, down to a message that is alone in its batch.
    Where the error is that message's fault after all (its rows make a library fail), other messages go through. Where
    it is a fault of a machine or of the package, every message fails alone, one after the other. The breaker tells
    the two apart.

    Promises, over any sequence of calls with one error (tests/property/test_breaker.py):

    * *bounded*: the run stops at the latest when `LIMIT` different messages have failed alone, or two of them
      `ROW_MAX` times together, with no report of a job in between.
    * *innocent*: a message's failure is counted only if it failed alone before and a job has reported since; or if no
      other message failed since the last report, and it failed more than `HOLDS_MAX` times.
    * *poison*: a message that always fails is held back at most once where jobs report in between, and `HOLDS_MAX`
      times where there is no other message. Then its failures count, and it becomes a dead letter. Any number of such
      messages in a row does not stop a run.

    Only errors outside user code take part, named by class and place. The failure of a message whose function raised,
    whose worker was lost, or which hung is counted always: a topology in which every message is bad makes dead
    letters, and goes on.

    Pure: it knows no store and no clock.

    It is called for every job that reports and every message that fails alone, in their order. There is one for each
    driver's run.
    """

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
    """Is called for every job that reports, with the messages whose functions met what a machine lacks.

    It does the same as the breaker for users' functions that meet what a machine lacks: an OSError of disk space,
    file handles, memory or a read-only disk. One message may cause it (it unpacks to more than the disk holds) and
    becomes a dead letter. Where unrelated messages meet it in one job, or in jobs one after the other, the run waits
    as for an outage.
    """

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
