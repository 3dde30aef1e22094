"""The breaker: when messages fail alone for what is not theirs, the run stops by name, and none of them is blamed.

A job that dies of an error which no message's function raised is met by bisection, down to a message that stands alone.
Where that error is the message's after all (its rows trip a library), others go through. Where it is a machine's, or a
fault of the package, every message ends alone, one after the other. The breaker tells the two apart.

Promises, over any sequence of calls with one error (tests/property/test_breaker.py):

* *bounded*: the run stops at the latest when `LIMIT` different messages have failed alone, or two of them `ROW_MAX` times,
  with no report of a job in between.
* *innocent*: a failure counts only of a message that failed alone before, with a report since; or that failed more than
  `HOLDS_MAX` times with nothing else that failed since the last report, so that it was all there was to try.
* *poison*: a message that fails always is held back at most once where jobs report in between, and `HOLDS_MAX` times where
  it is alone; then it counts, and is set aside in the end. Messages that were told apart so never stop a run, however many
  follow one another.

Only errors with a name outside user code take part. A message whose function raised, whose worker was lost, or which hung,
counts as ever: a topology whose every message is bad gives dead letters, and does not stop.

`Shortages` is the same for users' functions that meet what a machine lacks: an OSError of disk space, file handles, memory
or a read-only disk. One message may bring it about (it unpacks to more than the disk holds), and is set aside; unrelated
ones that meet it in one job, or in jobs that follow one another, do not, and the run waits as for an outage.

Pure: it knows of no store and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from typing import Final

LIMIT: Final = 3
"""How many unrelated messages in a row stop the run: one may be poison, two a coincidence."""

ROW_MAX: Final = 6
"""How many failures in a row of two messages do, where there is no third."""


HOLDS_MAX: Final = 3
"""How often a message goes back without a failure, so that others get a turn before it counts."""


class Breaks(Enum):
    """What is to become of a message that failed alone."""

    COUNT = auto()
    """The failure is the message's, and counts."""
    HOLD = auto()
    """The message goes back without a failure: whether it is to blame is not known yet."""
    STOP = auto()
    """The run stops, and nothing is counted."""


class Breaker:
    """Is told of every job that reports and of every message that fails alone, in their order. One for a driver's run."""

    def __init__(self) -> None:
        self._error = ""
        self._suspects: set[int] = set()
        """Messages that failed alone with the present error, at any time."""
        self._row: list[int] = []
        """Those that did since the last report, one after the other."""

    def reported(self) -> None:
        """A job came to its end: imports, disks and stores served it."""
        self._row.clear()

    def failed_alone(self, message: int, outside: str) -> Breaks:
        """What a failure means. `outside` names the error by class and place; empty: it is no error outside user code."""
        if not outside:
            return Breaks.COUNT
        if outside != self._error:
            self._error = outside
            self._suspects.clear()
            self._row.clear()
        if message in self._suspects and message not in self._row:
            return Breaks.COUNT  # others went through meanwhile, and it failed again: it is this message
        self._suspects.add(message)
        self._row.append(message)
        if self.messages >= LIMIT or (self.messages > 1 and len(self._row) >= ROW_MAX):
            return Breaks.STOP
        return Breaks.COUNT if self.messages == 1 and len(self._row) > HOLDS_MAX else Breaks.HOLD

    @property
    def messages(self) -> int:
        """How many different messages failed alone with the present error since the last report."""
        return len(set(self._row))


class Shortages:
    """Is told of every job's report: which messages failed since their functions met what a machine lacks."""

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self._row = Counter[int]()
        """How often each met one since the last job that went without."""

    def met_by(self, messages: AbstractSet[int]) -> AbstractSet[int] | None:
        """The messages whose failure is not to count yet; None: it is the machine's, and none counts.

        A message is held back at most `HOLDS_MAX` times, and not at all once a job has gone without since it met one.
        """
        if not messages:
            self._row.clear()
            return frozenset()
        fresh = messages - (self._suspects - self._row.keys())
        self._row.update(fresh)
        if len(self._row) >= LIMIT:
            self._suspects -= self._row.keys()  # until a job goes without, whatever meets it is the machine's
            return None
        self._suspects |= messages
        return {message for message in fresh if self._row[message] <= HOLDS_MAX}
