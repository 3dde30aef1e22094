"""How large a batch is, and how many are in flight: as set, or chosen by a tuner for a latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from stormproof.core.contract.source import Limit
from stormproof.trident.terms.observers import Figures

TUNED_IN_FLIGHT_MAX: Final = 4
"""The most batches in flight under a latency target without a limit of its own."""


def in_flight_max(chosen: int | None, latency_target_s: float | None) -> int:
    """The most batches that may ever be in flight: as chosen, else one, or a few where a tuner picks their number.

    Of a plan that is `serial` (its jobs read a state) the coordinator runs one at a time, whatever this says.
    """
    if chosen is not None:
        return chosen
    return 1 if latency_target_s is None else TUNED_IN_FLIGHT_MAX


@dataclass(frozen=True, slots=True)
class Setting:
    """Limits of the next batches: messages in each, and batches in flight."""

    messages: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.messages} messages a batch, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One committed batch: its messages, its seconds from open to commit, and the time of its commit.

    `full`: it had about as many messages as its limit allowed; otherwise the source had no more, and its throughput says
    nothing. `setting` was in force when it was opened.
    """

    messages: int
    latency_s: float
    ended_s: float
    full: bool
    setting: Setting


@dataclass(frozen=True, slots=True)
class Step:
    """What a tuner decided, and why. `below_reach`: no setting reaches the target."""

    before: Setting
    after: Setting
    why: str
    below_reach: bool = False

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}" if self.before != self.after else f"stays at {self.after}"


class Tuner(Protocol):
    """Chooses the size and number of batches, and learns from those that were committed."""

    @property
    def limit(self) -> Limit:
        """The next batch's limit."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of batches that may be in flight."""
        ...

    @property
    def figures(self) -> Figures:
        """The present choice, for the ledger and the statistics."""
        ...

    def learn(self, sample: BatchSample) -> Step | None:
        """Take in a committed batch. What was decided on it, if anything."""
        ...


@dataclass(frozen=True, slots=True)
class AsSet:
    """The tuner that changes nothing."""

    limit: Limit
    in_flight: int

    @property
    def figures(self) -> Figures:
        """The limits as they were set."""
        return Figures(self.limit.messages, self.limit.bytes, self.in_flight, self.in_flight)

    def learn(self, sample: BatchSample) -> Step | None:
        """Decide nothing."""


FIRST_MESSAGES: Final = 1_000
MESSAGES_MIN: Final = 10
"""No batch is tuned to fewer."""
WINDOW: Final = 20
"""Batches that a decision is based on."""
LATE: Final = 3
"""Late batches that end a window at once: more than one in ten of it is late."""
GLANCE: Final = 5
"""Batches after which a size may double that takes less than half of the bound. A start then takes seconds, not minutes."""
MARGIN: Final = 0.04
"""How far below the bound a window's latency is led: by as much as it scatters from window to window."""
STEP_MIN: Final = 1.05
"""A smaller change of the size is not worth a trial: throughput scatters as much from window to window."""
GAIN: Final = 1.02
"""Factor of throughput that one more in flight must bring, as more messages then run again after a crash."""
CUTS: Final = 3
"""Cuts in a row after which smaller batches are known not to help: most of what is left does not depend on the size."""
PATIENCE: Final = 16
"""Windows between two rounds of trials. A trial may have `LATE` late batches, and these are to be few among the others."""
PROBE_PART: Final = 8
"""The part of a batch that is tried alone to see whether the target is within reach."""
KNEE: Final = 2.0
"""Where the target is below reach, batches may take so many times what small ones take. Half of their time then grows
with their messages, which is where throughput over latency is greatest."""


class _TriedChange(StrEnum):
    """A change that is tried."""

    LARGER = "larger batches"
    MORE = "more, smaller batches in flight"
    FEWER = "fewer, larger batches in flight"
    SMALLER = "smaller batches"
    PROBE = "small batches, one at a time"


@dataclass(frozen=True, slots=True)
class _Window:
    """What a window showed: batches, late ones, messages a batch, second longest latency, messages a second."""

    size: int
    late: int
    messages: float
    high_s: float
    rate: float

    @staticmethod
    def of(window: Sequence[tuple[BatchSample, float]], bound_s: float, in_flight: int) -> _Window:
        """`window` has each batch with the time since the commit before it."""
        latencies = sorted(sample.latency_s for sample, _ in window)
        rounds = window[len(window) % in_flight :] or window
        return _Window(
            size=len(window),
            late=sum(latency_s > bound_s for latency_s in latencies),
            messages=sum(sample.messages for sample, _ in window) / len(window),
            high_s=max(latencies[-2:][0], 1e-9),
            rate=sum(sample.messages for sample, _ in rounds) / max(sum(busy_s for _, busy_s in rounds), 1e-9),
        )


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change, and the setting to go back to with what its last window showed."""

    way: _TriedChange
    home: Setting
    seen: _Window

    @property
    def needed(self) -> float:
        """The throughput at which it is kept."""
        return self.seen.rate * (GAIN if self.way is _TriedChange.MORE else 1.0)


class LatencyTuner:
    """Climbs to the greatest throughput at which nine batches in ten are committed within `target_s` of their open.

    It compares windows of 20 batches. Every change but one is a trial: a window under the new setting. The change is kept
    if at most two batches were late and throughput did not fall; else the setting before it comes back.

    - While there is room below the target, twice the size is tried. Where a size was late or slower, the next one is read
      off the straight line through the latencies of both sizes, and is at most half-way between them.
    - Where there is no room, these are tried: one more in flight, one fewer, half the size. What pays is tried again.
      After a round in which nothing paid, the tuner waits for 16 windows.

    The one change that is no trial: batches that are late get smaller. After three cuts in a row there is one batch fewer
    in flight. With one in flight, small batches are tried: if these are late, too, the target is below reach
    (`Figures.floor_s`). Batches may then take twice as long as small ones, which are tried again every 16 windows.

    Only full batches count, and late ones, until a batch as large is in time; and only those that were opened under the
    present setting. `most` and `in_flight_max` are never passed.

    *Not guaranteed*: that no batch is late. A trial may be, and a change of the load is noticed by its late batches.
    """

    def __init__(self, target_s: float, most: Limit, in_flight_max: int) -> None:
        self._target_s = target_s
        self._most = most
        self._in_flight_max = in_flight_max
        self._least = min(MESSAGES_MIN, most.messages)
        self._at = self._uncut = Setting(min(FIRST_MESSAGES, most.messages), 1)
        self._window: list[tuple[BatchSample, float]] = []
        self._skip = 0
        self._ended_s = -math.inf
        self._step: Step | None = None
        self._floor_s: float | None = None
        self._trial: _Trial | None = None
        self._restart()

    def _restart(self) -> None:
        """Begin a round of trials, and forget what the last one found."""
        self._untried = (
            [_TriedChange.MORE, _TriedChange.FEWER, _TriedChange.SMALLER]
            if self._floor_s is None
            else [_TriedChange.PROBE]
        )
        self._too_large: _Window | None = None
        self._hold = self._cuts = 0

    @property
    def limit(self) -> Limit:
        """The next batch's limit."""
        return Limit(self._at.messages, self._most.bytes)

    @property
    def in_flight(self) -> int:
        """How many batches may be in flight."""
        return self._at.in_flight

    @property
    def figures(self) -> Figures:
        """The present setting, and how it came about."""
        step, why = ("", "") if self._step is None else (str(self._step), self._step.why)
        at, most = self._at, self._most
        return Figures(
            at.messages, most.bytes, at.in_flight, self._in_flight_max, self._target_s, self._floor_s, step, why
        )

    @property
    def _bound_s(self) -> float:
        """The latency above which a batch is late."""
        return self._target_s if self._floor_s is None else KNEE * self._floor_s

    def learn(self, sample: BatchSample) -> Step | None:
        """A batch was committed. Those that were opened under another setting, or beside such ones, say nothing."""
        busy_s = sample.ended_s - max(self._ended_s, sample.ended_s - sample.latency_s)
        self._ended_s = sample.ended_s
        if sample.setting != self._at:
            return None
        if not sample.full and sample.latency_s <= self._bound_s:
            # It tells nothing of a full one, but that those which were late and no larger were late for another reason.
            self._window = [(s, b) for s, b in self._window if s.full or s.messages > sample.messages]
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._window.append((sample, busy_s))
        before, seen = self._step, self._look()
        probes = self._trial is not None and self._trial.way is _TriedChange.PROBE
        if seen.size == WINDOW or (seen.late == LATE and not probes) or (seen.size == GLANCE and self._is_far(seen)):
            self._window.clear()
            self._judge(seen)
        return self._step if self._step is not before else None

    def _look(self) -> _Window:
        return _Window.of(self._window, self._bound_s, self._at.in_flight)

    def _is_far(self, seen: _Window) -> bool:
        """Whether so few batches already show that there is room for larger ones."""
        pays = self._trial is None or (self._trial.way is _TriedChange.LARGER and seen.rate >= self._trial.needed)
        return pays and 2 * seen.high_s < self._bound_s and self._larger(seen) is not None

    def _judge(self, seen: _Window) -> None:
        trial, self._trial = self._trial, None
        if trial is None:
            if seen.late >= LATE:
                self._relieve(seen)
            else:
                self._cuts = 0
                self._advance(seen)
        elif trial.way is _TriedChange.PROBE:
            self._end_probe(trial.home, seen)
        elif seen.late < LATE and seen.rate >= trial.needed:
            self._keep(trial, seen)
        elif trial.way is _TriedChange.MORE and seen.late < LATE and self._at.messages < trial.home.messages:
            self._trial = trial
            self._move(
                replace(self._at, messages=trial.home.messages), f"{self._found(trial, seen)}: batches may be larger"
            )
        else:
            self._go_back(trial, seen)

    def _move(self, to: Setting, why: str, *, below_reach: bool = False) -> None:
        """Change the setting. The first batches under the new one run beside the last of the old: they are left out."""
        self._step = Step(self._at, to, why, below_reach)
        self._skip = to.in_flight if to.in_flight > 1 else 0
        self._at = to
        self._window.clear()

    def _shown(self, seen: _Window) -> str:
        return f"nine batches in ten took at most {seen.high_s:.3g} s, the bound is {self._bound_s:.3g} s"

    def _advance(self, seen: _Window) -> None:
        """Try what may bring more throughput: no batch, or few, were late."""
        if self._floor_s is not None and seen.high_s < self._floor_s:
            self._restart()  # Small batches took longer than these do now: the load has become lighter.
            small = self._led_to(_TriedChange.PROBE, seen)
            if (
                small is not None and KNEE * seen.high_s < self._floor_s
            ):  # so much lighter that the target may be in reach
                self._try(_TriedChange.PROBE, small, seen)
                return
        larger = self._larger(seen)
        if larger is not None:
            self._try(_TriedChange.LARGER, larger, seen)
            return
        if self._hold:
            self._hold -= 1
            if not self._hold:
                self._restart()
            return
        while self._untried:
            to = self._led_to(self._untried[0], seen)
            if to is not None:
                self._try(self._untried[0], to, seen)
                return
            self._untried.pop(0)
        self._hold = PATIENCE

    def _room(self, seen: _Window) -> float:
        return (1 - MARGIN) * self._bound_s / seen.high_s

    def _larger(self, seen: _Window) -> Setting | None:
        """The next size, if there is room below the bound for a larger one."""
        n, room, top = seen.messages, self._room(seen), self._too_large
        if top is None:
            n *= 2 if room >= STEP_MIN else 1
        else:
            n += (top.messages - n) * min(0.5, (room - 1) * seen.high_s / max(top.high_s - seen.high_s, 1e-9))
        to = min(int(n), self._most.messages)
        return replace(self._at, messages=to) if to >= STEP_MIN * self._at.messages else None

    def _relieve(self, seen: _Window) -> None:
        """Batches are late: make them smaller, or where that does not help, have fewer in flight."""
        self._too_large = seen
        self._cuts += 1
        if self._cuts == 1:
            self._uncut = self._at
        if not self._is_futile(seen):
            factor = min(1.0 if self._cuts == 1 else 0.5, max(0.25, self._room(seen) / STEP_MIN))
            messages = max(self._least, int(seen.messages * factor))
            self._move(replace(self._at, messages=messages), self._shown(seen))
            return
        self._restart()
        if self._at.in_flight > 1:
            fewer = replace(self._uncut, in_flight=self._at.in_flight - 1)
            self._move(fewer, f"{self._shown(seen)}; smaller batches do not help")
            return
        small = self._led_to(_TriedChange.PROBE, seen)
        if small is None:
            self._end_probe(self._at, seen)
        else:
            self._try(_TriedChange.PROBE, small, seen)

    def _is_futile(self, seen: _Window) -> bool:
        """Whether smaller batches would be late, too."""
        return self._cuts > CUTS or seen.messages <= self._least

    def _try(self, way: _TriedChange, to: Setting, seen: _Window) -> None:
        self._trial = _Trial(way, self._at, seen)
        self._move(to, f"tries {way}: {self._shown(seen)}, at {seen.rate:.0f} messages/s")

    def _led_to(self, way: _TriedChange, seen: _Window) -> Setting | None:
        """The setting that a trial begins with; None if it cannot be had, or is the present one."""
        n, k = self._at.messages, self._at.in_flight
        match way:
            case _TriedChange.MORE:
                # As if all of them shared the cores that they have now.
                n, k = int(n * min(1.0, self._room(seen) * k / (k + 1))), k + 1
            case _TriedChange.FEWER:
                n, k = n * k // max(1, k - 1), k - 1
            case _TriedChange.PROBE:
                n //= PROBE_PART
            case _:
                n //= 2
        to = Setting(min(self._most.messages, max(self._least, n)), k)
        return to if to != self._at and 1 <= k <= self._in_flight_max else None

    def _keep(self, trial: _Trial, seen: _Window) -> None:
        if trial.way is _TriedChange.LARGER:
            self._advance(seen)
            return
        self._restart()
        self._untried.sort(key=lambda way: way is not trial.way)
        self._too_large = trial.seen if trial.way is _TriedChange.SMALLER else None
        self._step = Step(trial.home, self._at, f"{trial.way} pays: {self._found(trial, seen)}")

    def _go_back(self, trial: _Trial, seen: _Window) -> None:
        if trial.way is _TriedChange.LARGER:
            self._too_large = seen
        else:
            self._untried.remove(trial.way)
        late = ", and batches were late" if seen.late >= LATE else ""
        self._move(trial.home, f"{trial.way} did not pay: {self._found(trial, seen)}{late}")

    def _found(self, trial: _Trial, seen: _Window) -> str:
        return f"{seen.rate:.0f} messages/s, {trial.needed:.0f} were needed"

    def _end_probe(self, home: Setting, seen: _Window) -> None:
        """Small batches were tried from `home`: say whether the target can be held."""
        before, found = self._floor_s, f"small batches, one at a time, take {seen.high_s:.3g} s"
        if seen.high_s <= self._target_s:
            self._floor_s = None
            self._restart()
            self._step = Step(home, self._at, f"{found}: the target can be held")
            return
        self._untried, self._floor_s = [], seen.high_s
        why = f"even {found}: the target of {self._target_s:.3g} s is below reach; they may take up to {self._bound_s:.3g} s"
        self._move(home, why, below_reach=before is None)
