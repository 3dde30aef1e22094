"""The faults of a simulation: by rate, or one at a named place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from random import Random
from typing import Final, TypeAlias

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import UsageError

Rate: TypeAlias = float | Mapping[str, float]
"""The probability of a fault each time that a place is reached: at every place, or by place (0 at those not named)."""


class FaultKind(StrEnum):
    """The kinds of faults, and the places of each."""

    RAISE = "raises"
    """A function or bolt raises for a tuple. Place: the component."""
    FAIL = "fails"
    """A function or bolt fails a tuple (`FailTuple`). Place: the component."""
    REJECT = "rejects"
    """A sink cannot hold a row: its message fails; or it is rejected there, by ``schema_contract="discard_row"``. Place: the
    sink."""
    REFUSE = "refuses"
    """A sink's table refuses a row at its commit: the row's message is rejected there, or the messages of the row's group.
    Place: the sink."""
    MISREAD = "misreads"
    """A reader skips one message and gives another one twice. Place: the spout."""
    DROP = "drops"
    """A chunk of rows is lost between stages. Place: ``stage N``, the stage that was to receive it."""
    DUPLICATE = "duplicates"
    """A chunk of rows arrives two or three times. Place: as for `DROP`."""
    DELAY = "delays"
    """A task is delayed, and leases may run out. Place: ``stage N``."""
    TIMEOUT = "timeouts"
    """A task hangs, and its job is cancelled. Place: ``stage N``."""
    WORKER_DEATH = "worker_deaths"
    """A task's worker is killed, before or after its work: the task is repeated, or the job fails. Where it is repeated,
    some tasks may have read its first output, and the others read the second. Place: ``stage N``."""
    DRIVER_DEATH = "driver_deaths"
    """The driver is killed. Place: a step's name, as in `stormproof.core.base.failpoint.FAILPOINTS`."""


_OF_JOBS: Final = frozenset(
    {
        FaultKind.RAISE,
        FaultKind.FAIL,
        FaultKind.MISREAD,
        FaultKind.DROP,
        FaultKind.DUPLICATE,
        FaultKind.TIMEOUT,
        FaultKind.WORKER_DEATH,
    }
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: the `number`-th time (from 1) that its place is reached in the whole simulation."""

    kind: FaultKind
    place: str
    number: int = 1


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a simulation. Each rate is a probability; `FaultKind` says at which places. `at` are single faults.

    `delay_s` is the longest delay of a task, in virtual seconds.
    """

    raises: Rate = 0.0
    fails: Rate = 0.0
    rejects: Rate = 0.0
    refuses: Rate = 0.0
    misreads: Rate = 0.0
    drops: Rate = 0.0
    duplicates: Rate = 0.0
    delays: Rate = 0.0
    timeouts: Rate = 0.0
    worker_deaths: Rate = 0.0
    driver_deaths: Rate = 0.0
    at: tuple[Fault, ...] = ()
    delay_s: float = 40.0

    def __post_init__(self) -> None:
        for kind in FaultKind:
            rate = self.rate(kind)
            for value in rate.values() if isinstance(rate, Mapping) else (rate,):
                if not 0 <= value <= 1:
                    raise UsageError(f"faults: {kind.value} is {value}; a rate is a probability from 0 to 1")
        for fault in self.at:
            if fault.number < 1:
                raise UsageError(f"faults: {fault} has number {fault.number}; it counts from 1")

    def rate(self, kind: FaultKind) -> Rate:
        """The rate of one kind."""
        rate: Rate = getattr(self, kind.value)
        return rate

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Faults({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of a simulation's log; `at_s` is in virtual seconds."""

    at_s: float
    what: str
    place: str
    detail: str = ""


class Chance:
    """Decides from one random source which faults strike, and keeps the log."""

    def __init__(self, faults: Faults, rng: Random, clock: Clock) -> None:
        self.faults = faults
        self.rng = rng
        self.events: list[Event] = []
        self.struck: Counter[str] = Counter()
        self.over = False
        """Whether no more faults strike."""
        self.spares_jobs = False
        """Whether no fault strikes that makes a job fail, or not add up."""
        self._clock = clock
        self._named = {(f.kind, f.place, f.number) for f in faults.at}
        self._named_places = {(f.kind, f.place) for f in faults.at}
        self._reached: Counter[tuple[FaultKind, str]] = Counter()

    def possible(self, kind: FaultKind, place: str) -> bool:
        """Whether this kind of fault can strike at this place at all."""
        return (kind, place) in self._named_places or self._rate(kind, place) > 0

    def strikes(self, kind: FaultKind, place: str, detail: Callable[[], str] = str) -> bool:
        """Whether the fault strikes now; to be called each time that the place is reached."""
        if self.over or (self.spares_jobs and kind in _OF_JOBS):
            return False
        named = False
        if (kind, place) in self._named_places:
            self._reached[kind, place] += 1
            named = (kind, place, self._reached[kind, place]) in self._named
        rate = self._rate(kind, place)
        if not (named or (rate > 0 and self.rng.random() < rate)):
            return False
        self.struck[kind.value] += 1
        self.tell(kind.value, place, detail())
        return True

    def tell(self, what: str, place: str, detail: str = "") -> None:
        """Write the log."""
        self.events.append(Event(round(self._clock.monotonic_s(), 6), what, place, detail))

    def _rate(self, kind: FaultKind, place: str) -> float:
        rate = self.faults.rate(kind)
        return rate.get(place, 0.0) if isinstance(rate, Mapping) else rate
