"""Requeues dead letters by a canary: the first few, then, while few enough of them fail, the rest in growing waves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import UsageError
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.decisions.dead_letters import dispose
from stormproof.trident.decisions.letter_choice import ChosenLetters, Letters, letters_of
from stormproof.trident.ledger import control, sink_records
from stormproof.trident.terms.wording import counted

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores


WAIT_S: Final = 300.0
"""How long a wave may take unless another bound is given."""
LOOK_EVERY_S: Final = 0.5
GROWTH: Final = 2
"""Each wave may be so many times as large as the one before."""


class Fate(StrEnum):
    """What became of a message that was handed out again."""

    WAITING = "waiting"
    PASSED = "passed"
    """It is confirmed, and no sink rejected it since."""
    FAILED = "failed"
    """It failed again at least once, is a dead letter again, or a sink rejected it (again)."""


class CanaryEnd(StrEnum):
    """How a canary ended; append-only."""

    DONE = "done"
    """Everything was handed out, and few enough failed."""
    FAILURES = "failures"
    """More failed than may: the rest was not handed out."""
    UNDECIDED = "undecided"
    """A wave was not decided in time: the rest was not handed out."""
    STOPPED = "stopped"
    """Whoever ran it ended it: the rest was not handed out."""


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """How careful to be.

    `first`: messages of the first wave. `max_failures`: share of a wave, from 0 up to 1, that may fail. `wait_s`: seconds
    in which each wave must be decided.
    """

    first: int
    max_failures: float = 0.0
    wait_s: float = WAIT_S

    @staticmethod
    def of(first: int | None, max_failures: float | None, wait_s: float | None) -> CanaryRules | None:
        """The rules that a person gave; None: no canary is wanted.

        Raises:
            UsageError: the other two without a first wave, or a value out of range.
        """
        if first is not None:
            return CanaryRules(first, max_failures or 0.0, WAIT_S if wait_s is None else wait_s)
        if max_failures is not None or wait_s is not None:
            raise UsageError(
                "a share of failures (--max-failures) and a time (--wait) belong to a canary: say how many messages it "
                "begins with (--canary N)"
            )
        return None

    def __post_init__(self) -> None:
        if self.first < 1:
            raise UsageError(f"a canary of {self.first} messages: it needs at least 1")
        if not 0 <= self.max_failures < 1:
            raise UsageError(f"a canary's share of failures is {self.max_failures}: give a number from 0 up to 1")
        if not 0 < self.wait_s < math.inf:
            raise UsageError(f"a canary waits {self.wait_s} seconds for each wave: give a number above 0")


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave: `released` messages were handed out again; `left_alone` were decided by others, or cannot be."""

    released: int
    passed: int
    failed: int
    waiting: int
    left_alone: int

    @property
    def failures(self) -> float:
        """The share that failed."""
        return self.failed / self.released if self.released else 0.0


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """How far a canary came. `left` are the messages that were not handed out, in their order."""

    topology: str
    end: CanaryEnd
    why_ended: str
    waves: tuple[Wave, ...]
    left: tuple[str, ...]
    failed: tuple[str, ...]
    by: str

    @property
    def released(self) -> int:
        """How many messages were handed out again."""
        return sum(wave.released for wave in self.waves)

    def lines(self) -> list[str]:
        """What was done, for people."""
        found = [
            f"wave {number}: {counted(wave.released, 'message')} handed out again; {wave.passed} passed, "
            f"{wave.failed} failed"
            + (f", {wave.waiting} not decided" if wave.waiting else "")
            + (f"; {wave.left_alone} left alone" if wave.left_alone else "")
            for number, wave in enumerate(self.waves, 1)
        ]
        left = "nothing is left" if not self.left else f"{counted(len(self.left), 'message')} not handed out"
        return [*found, f"{self.topology}: {self.why_ended}; {self.released} handed out again by {self.by}, {left}"]


def run_canary(
    topology: str,
    todo: Sequence[str],
    rules: CanaryRules,
    *,
    by: str,
    release: Callable[[Sequence[str], int], Sequence[str]],
    fates: Callable[[Sequence[str]], Mapping[str, Fate]],
    trouble: Callable[[], str | None],
    clock: Clock,
    told: Callable[[CanaryReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CanaryReport:
    """Hand messages out again, wave by wave; the driver that processes them runs elsewhere.

    The first wave has `rules.first` messages, and each later one at most twice as many as the one before. A wave begins only
    once each message of the one before has passed or failed, and at most `rules.max_failures` of them failed. `release` gets
    messages and the wave's number, and gives those that it handed out; `fates` says what became of them; `trouble` says why
    nothing may be happening. `told` gets the state at each look. Guarantee: it returns within `rules.wait_s` after the last
    wave was released, and a wave that was stopped at has no successor.
    """
    waves: list[Wave] = []
    failed: list[str] = []
    left, size = tuple(todo), rules.first

    def report(end: CanaryEnd, why: str, *now: Wave, new: Sequence[str] = ()) -> CanaryReport:
        return CanaryReport(topology, end, why, (*waves, *now), left, (*failed, *new), by)

    while left:
        if stopped():
            return report(CanaryEnd.STOPPED, "stopped before the next wave")
        some, left = left[:size], left[size:]
        mine = release(some, len(waves) + 1)
        end_s = clock.monotonic_s() + rules.wait_s
        while True:
            found = fates(mine)
            new = [one for one in mine if found[one] is Fate.FAILED]
            passed = sum(fate is Fate.PASSED for fate in found.values())
            waiting = len(mine) - passed - len(new)
            wave = Wave(len(mine), passed, len(new), waiting, len(some) - len(mine))
            if wave.failures > rules.max_failures:
                return report(CanaryEnd.FAILURES, _too_many(wave, rules, len(waves) + 1), wave, new=new)
            if not waiting:
                break
            told(report(CanaryEnd.UNDECIDED, f"waiting for wave {len(waves) + 1}", wave, new=new))
            if stopped():
                return report(CanaryEnd.STOPPED, f"stopped while wave {len(waves) + 1} ran", wave, new=new)
            left_s = end_s - clock.monotonic_s()
            if left_s <= 0:
                why = trouble()
                said = f"{waiting} of wave {len(waves) + 1} were not decided within {rules.wait_s:g} s"
                return report(CanaryEnd.UNDECIDED, said + (f" ({why})" if why else ""), wave, new=new)
            clock.sleep(min(LOOK_EVERY_S, left_s))
        waves.append(wave)
        failed += new
        size *= GROWTH
    return report(CanaryEnd.DONE, "all were handed out, and few enough failed" if failed else "none failed")


def _too_many(wave: Wave, rules: CanaryRules, number: int) -> str:
    return (
        f"{wave.failed} of {counted(wave.released, 'message')} of wave {number} failed ({wave.failures:.1%}), and at most "
        f"{rules.max_failures:.1%} may"
    )


_NO_DRIVER = (DriverState.STOPPED, DriverState.DEAD)


def requeue_canary(
    stores: Stores,
    topology: str,
    chosen: ChosenLetters,
    rules: CanaryRules,
    *,
    by: str,
    why: str,
    clock: Clock | None = None,
    told: Callable[[CanaryReport], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CanaryReport:
    """Requeue dead letters wave by wave; see `run_canary`. Each wave is on record with who, why, and its number.

    A message that several sinks rejected counts once.

    Raises:
        UsageError: no driver runs that takes messages, so no wave would be decided; nothing was handed out.
    """
    require_driver(stores, topology)
    with letters_of(stores, topology) as letters:
        fates = _Fates(stores, topology, letters)

        def release(some: Sequence[str], wave: int) -> Sequence[str]:
            fates.mark()
            said = f"{why or 'no reason given'} (canary, wave {wave}: {len(some)})"
            return dispose(stores, letters, chosen.of(some), requeue=True, by=by, why=said).messages

        return run_canary(
            topology,
            chosen.messages,
            rules,
            by=by,
            release=release,
            fates=fates,
            trouble=lambda: driver_trouble(stores, topology),
            clock=clock or SystemClock(),
            told=told,
            stopped=stopped,
        )


def require_driver(stores: Stores, topology: str) -> None:
    """Raise UsageError unless a driver of the topology runs, and is not told to open nothing."""
    reason = driver_trouble(stores, topology)
    if reason is not None:
        raise UsageError(
            f"a canary waits for what becomes of its first messages, and {reason}: start or resume it first, or hand some "
            "out without a canary",
            topology=topology,
        )


def driver_trouble(stores: Stores, topology: str) -> str | None:
    """Why a topology processes nothing now; None: its driver runs."""
    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        asked = control.control_of(snapshot.connection, row.incarnation)
        blocked = [txn.txid for txn in snapshot.unresolved(row.incarnation) if txn.state.value == "blocked"]
    if blocked:
        return f"txid {blocked[0]} of {topology!r} is blocked"
    if driver_state(row) in _NO_DRIVER:
        return f"no driver of {topology!r} runs"
    if asked is not None and asked.paused:
        return f"{topology!r} is paused"
    return None


class _Fates:
    """What became of messages since the last mark.

    The pending store is read before the rejects: a reject is recorded in the transaction that confirms its message.
    """

    def __init__(self, stores: Stores, topology: str, letters: Letters) -> None:
        self._stores = stores
        self._incarnation = stores.topology(topology).incarnation
        self._letters = letters
        self._after = 0

    def mark(self) -> None:
        """Rejects from here on are new."""
        with self._stores.audit.snapshot() as snapshot:
            self._after = sink_records.newest_reject(snapshot.connection, self._incarnation)

    def __call__(self, messages: Sequence[str]) -> Mapping[str, Fate]:
        unconfirmed = self._letters.unconfirmed(messages)
        with self._stores.audit.snapshot() as snapshot:
            rejected = sink_records.rejected_after(snapshot.connection, self._incarnation, messages, self._after)
        return {
            one: Fate.FAILED
            if one in rejected or unconfirmed.get(one)
            else Fate.WAITING
            if one in unconfirmed
            else Fate.PASSED
            for one in messages
        }
