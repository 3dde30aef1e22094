"""The tuner: climbs to the greatest throughput at which batches are committed within a latency; bounds: `tuning`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Final

from stormproof.core.source.protocol import Limit
from stormproof.trident.tuning import Figures, Sample, Setting, Step

FIRST_MESSAGES: Final = 1_000
MESSAGES_MIN: Final = 10

WINDOW_BATCHES: Final = 20
GLANCE_BATCHES: Final = 5
"""So few are enough to see that batches are late, or far from it."""

PROBE_BATCHES: Final = 10
LATE_MOST: Final = 2
"""So many of a window may be late: one batch in ten."""

QUANTILE: Final = 0.9
"""A window's latency is that within which so great a part of its batches was committed."""

MARGIN_MIN, MARGIN_MAX, MARGIN_SPREAD = 0.01, 0.05, 0.2
"""The aim lies below the target by this part of it; between the two bounds, the further the more latencies scatter."""

GAIN: Final = 1.05
PAYS_OFF: Final = 1.2
"""Where larger batches bring so much, smaller ones were chosen by chance, or under another load."""

GLANCE_GROWTH: Final = 2.0
GROWTH: Final = 1.5
SHRINK_LEAST: Final = 0.97
SHRINK_MOST: Final = 0.25
GRAVE_SHRINK: Final = 0.7
FIRST_CUT: Final = 0.9
"""Where nothing is known of what any batch takes, a cut is so much deeper."""

FAR: Final = 1.2
"""Where batches may take longer than the target, and take so much less than they may, the target may be within reach."""

GRAVE: Final = 1.15
"""A latency so far above the target is no accident: the load has changed."""

ELASTICITY_MIN, ELASTICITY_MAX = 0.2, 4.0
"""Bounds to what two windows say of it, which scatter. Above one, latency grows faster than a batch's size."""

FULL: Final = 0.9
FIT_LEAST: Final = 0.25
"""Two sizes must lie so far apart for what one message costs to be read off their latencies."""

PROBE_PART: Final = 8
"""The smallest sensible batch is so small a part of a late one: nearly all of its time is what any batch takes."""

LATE_RUN_MOST: Final = 3
"""So many steps in a row may leave batches late; more small ones would lead nowhere slowly."""

REACH: Final = 0.95
KNEE: Final = 2.0
"""Where the target is below reach, batches may take so many times what small ones take. Half of their time then grows
with their messages, which is where throughput over latency is greatest."""

TRIAL_WINDOWS: Final = 8
PATIENCE_MIN, PATIENCE_MAX = 4, 32
"""So many windows pass between one round of trials and the next, where none of them paid."""

CHANGE: Final = 1.3
"""A throughput that has changed by so great a factor since the last trials calls for new ones."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a window of batches showed. `rate` is in messages a second, of its full batches."""

    size: int
    late: int
    messages: float
    high_s: float
    median_s: float
    rate: float


class _Way(StrEnum):
    """A direction to climb in."""

    MORE = "more, smaller batches in flight"
    FEWER = "fewer, larger batches in flight"
    SMALLER = "smaller batches"
    LARGER = "larger batches"

    @property
    def gain(self) -> float:
        """The factor of throughput that it must bring to be kept. Fewer in flight are worth a little by themselves."""
        match self:
            case _Way.MORE:
                return GAIN
            case _Way.FEWER:
                return 0.98
            case _Way.SMALLER:
                return 1.1
            case _Way.LARGER:
                return 1.0

    @property
    def moves_in_flight(self) -> bool:
        """Whether it changes their number."""
        return self in (_Way.MORE, _Way.FEWER)

    def step(self, at: Setting, capped: bool) -> Setting | None:
        """Where it leads to, with as many messages in flight where the number of batches moves; None: there is nowhere."""
        n, k = at.messages, at.in_flight
        match self:
            case _Way.MORE:
                return Setting(n * k // (k + 1), k + 1)
            case _Way.FEWER:
                return Setting(n * k // (k - 1), k - 1) if k > 1 else None
            case _Way.SMALLER:
                return replace(at, messages=n // 2)
            case _Way.LARGER:
                return replace(at, messages=math.ceil(n * GROWTH)) if capped else None


@dataclass(slots=True)
class _Trial:
    """A step that is kept if its throughput is at least `needed`; else back to `home`."""

    way: _Way
    home: Setting
    needed: float
    windows: int = 0


class LatencyTuner:
    """Climbs to the greatest throughput at which nine batches in ten are committed within `target_s` of their open.

    For a given number in flight, a batch's size is regulated: the latency's nine-in-ten quantile, over a window of
    batches, is led to just below the target. What a message adds to the latency is read off two sizes, so that a fixed
    cost, however large, does not make the steps too small. For everything else there are trials, one at a time: one more
    in flight, one fewer, half the size (batches that are too large may cost throughput). Each is regulated in turn and
    kept where its throughput pays; and given up as soon as it is late, or at the target, without having done so. When no
    trial pays, it waits, longer each time, before it looks again; at once where the load has changed.

    Batches that are late get smaller where an eighth of their size would hold the target; else there is one fewer in
    flight. With one in flight, small batches are tried: where even what any batch takes is above the target, that is
    below reach (`Figures.floor_s`). Then batches may take twice that time, until small ones, tried again from time to
    time, are fast enough.

    Only full batches count, and late ones; and only those that were opened under the present setting. `most` and
    `in_flight_max` are never passed.

    *Not guaranteed*: that no batch is late. A trial may be, and a change of the load is noticed by its late batches.
    """

    def __init__(self, target_s: float, most: Limit, in_flight_max: int) -> None:
        self._target_s = target_s
        self._most = most
        self._in_flight_max = in_flight_max
        self._least = min(MESSAGES_MIN, most.messages)
        self._at = Setting(min(FIRST_MESSAGES, most.messages), 1)
        self._window: list[tuple[Sample, float]] = []
        self._skip = 0
        self._ended_s = -math.inf
        self._step: Step | None = None
        self._floor_s: float | None = None
        self._cap: int | None = None
        self._probe: _Seen | None = None
        self._trial: _Trial | None = None
        self._ways = deque(_Way)
        self._failed = 0
        self._patience = PATIENCE_MIN
        self._hold = 0
        self._explored: float | None = None
        self._settled = False
        self._slopes: dict[int, float] = {}
        self._last: dict[int, _Seen] = {}
        self._late: dict[int, _Seen] = {}
        self._late_run: list[Setting] = []

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
        step = self._step
        return Figures(
            self._at.messages,
            self._most.bytes,
            self._at.in_flight,
            self._in_flight_max,
            self._target_s,
            self._floor_s,
            "" if step is None else str(step),
            "" if step is None else step.why,
        )

    def learn(self, sample: Sample) -> Step | None:
        """A batch was committed. Those that were opened under another setting, or beside such ones, say nothing."""
        busy_s = sample.ended_s - max(self._ended_s, sample.ended_s - sample.latency_s)
        self._ended_s = sample.ended_s
        if sample.setting != self._at:
            return None
        if self._skip:
            self._skip -= 1
            return None
        if not sample.full and sample.latency_s <= self._bound_s:
            return None
        self._window.append((sample, busy_s))
        before = self._step
        self._judge(self._look())
        return self._step if self._step is not before else None

    # -- what a window shows -----------------------------------------------------------------------------------------

    @property
    def _bound_s(self) -> float:
        """What is late: above the target, or where that is below reach, above what is aimed at instead."""
        return self._target_s if self._floor_s is None else KNEE * self._floor_s

    def _aim_s(self, seen: _Seen) -> float:
        spread = (seen.high_s - seen.median_s) / max(seen.high_s, 1e-9)
        return self._bound_s * (1 - min(MARGIN_MAX, max(MARGIN_MIN, MARGIN_SPREAD * spread)))

    def _room(self, seen: _Seen) -> float:
        return self._aim_s(seen) / max(seen.high_s, 1e-9)

    def _look(self) -> _Seen:
        samples = [sample for sample, _ in self._window]
        latencies = sorted(sample.latency_s for sample in samples)
        return _Seen(
            size=len(samples),
            late=sum(latency_s > self._bound_s for latency_s in latencies),
            messages=median(sample.messages for sample in samples),
            high_s=latencies[math.ceil(QUANTILE * len(latencies)) - 1],
            median_s=median(latencies),
            rate=self._rate(),
        )

    def _rate(self) -> float:
        """Batches in flight may be committed in bursts, so as many of them as are in flight count together."""
        k = self._at.in_flight
        full = [(sample.messages, busy_s) for sample, busy_s in self._window if sample.full]
        rounds = [full[i : i + k] for i in range(0, len(full) - k + 1, k)]
        return median([sum(n for n, _ in r) / max(sum(s for _, s in r), 1e-9) for r in rounds]) if rounds else 0.0

    def _note_slope(self, seen: _Seen) -> None:
        """What a message adds to the latency, from this window and the one before with as many in flight."""
        k, last = self._at.in_flight, self._last.get(self._at.in_flight)
        if last is not None:
            apart = seen.messages - last.messages
            if abs(apart) >= FIT_LEAST * max(seen.messages, last.messages):
                self._slopes[k] = max(0.0, (seen.high_s - last.high_s) / apart)
        self._last[k] = seen

    def _elasticity(self, seen: _Seen) -> float:
        """By how many per cent latency changes where a batch's size changes by one."""
        slope = self._slopes.get(self._at.in_flight)
        if slope is None:
            return 1.0
        return min(ELASTICITY_MAX, max(ELASTICITY_MIN, slope * seen.messages / max(seen.high_s, 1e-9)))

    # -- what is made of it ------------------------------------------------------------------------------------------

    def _judge(self, seen: _Seen) -> None:
        if self._probe is not None:
            if seen.size >= PROBE_BATCHES:
                self._end_probe(self._probe, seen)
            return
        if seen.size < GLANCE_BATCHES:
            return
        late = seen.late > LATE_MOST
        if not late and seen.size < WINDOW_BATCHES:
            if seen.size == GLANCE_BATCHES:
                self._glance(seen)
            return
        self._note_slope(seen)
        self._window.clear()
        if self._trial is not None:
            self._judge_trial(self._trial, seen, late=late)
        elif late:
            self._relieve(seen)
        else:
            self._judge_home(seen)

    def _glance(self, seen: _Seen) -> None:
        """So far below the target, batches may grow at once."""
        resizable = self._trial is None or self._trial.way.moves_in_flight
        if resizable and not (self._floor_s is not None and self._settled) and self._room(seen) >= GROWTH:
            self._note_slope(seen)
            self._grow(seen, GLANCE_GROWTH)

    def _judge_home(self, seen: _Seen) -> None:
        """In time: grow where there is room, else look whether something else is better."""
        self._late_run = []
        if self._floor_s is not None:
            if seen.high_s <= REACH * self._target_s:
                self._floor_s = None
                self._restart()
            elif self._settled and self._room(seen) >= FAR:
                self._begin_probe(seen, "batches have become faster: small ones may hold the target again")
                return
        if self._grow(seen, GROWTH):
            return
        self._settled = True
        if self._explored is not None and not 1 / CHANGE <= seen.rate / max(self._explored, 1e-9) <= CHANGE:
            self._restart()
        if self._hold:
            self._hold -= 1
        elif self._floor_s is not None:
            self._wait_longer()
            self._begin_probe(seen, "looks whether small batches hold the target again")
        else:
            self._try(seen)

    def _judge_trial(self, trial: _Trial, seen: _Seen, *, late: bool) -> None:
        """Keep it, regulate it further, or give it up: smaller batches would not have more throughput."""
        trial.windows += 1
        resizable = trial.way.moves_in_flight and trial.windows < TRIAL_WINDOWS
        pays = seen.rate >= trial.needed
        found = f"{seen.rate:.0f} messages/s, {trial.needed:.0f} were needed"
        if pays and not late:
            self._keep(trial, seen.rate, found)
        elif pays and resizable:
            self._shrink(seen, self._lateness(seen))
        elif late or not resizable or not self._grow(seen, GROWTH):
            self._trial = None
            self._failed += 1
            self._ways.rotate(-1)
            self._move(trial.home, f"{trial.way} did not pay: {found}" + (", and batches were late" if late else ""))

    def _keep(self, trial: _Trial, rate: float, found: str) -> None:
        self._trial, self._explored = None, rate
        self._failed, self._patience = 0, PATIENCE_MIN
        pays_off = trial.way is _Way.LARGER and rate >= trial.needed * PAYS_OFF
        self._cap = None if trial.way.moves_in_flight or pays_off else self._at.messages
        self._settled = False
        self._step = Step(trial.home, self._at, f"{trial.way} pays: {found}")

    # -- steps -------------------------------------------------------------------------------------------------------

    def _move(self, to: Setting, why: str, *, below_reach: bool = False) -> None:
        """Have the next batches be so. Those beside the last ones of the old setting are left out."""
        self._step = Step(self._at, to, why, below_reach)
        self._skip = to.in_flight if to.in_flight > 1 else 0
        self._at = to
        self._window.clear()

    def _grow(self, seen: _Seen, most: float) -> bool:
        """A larger batch, as far as there is room; False where that is not worth a step."""
        at, upper = self._at.messages, self._most.messages if self._cap is None else self._cap
        factor = min(most, 1 + (self._room(seen) - 1) / self._elasticity(seen))
        messages = min(upper, int(at * factor), self._below_late(seen))
        if messages < min(upper, at * GAIN) or messages <= at or seen.messages < FULL * at:
            return False
        self._move(replace(self._at, messages=messages), f"{self._held(seen)}: there is room")
        return True

    def _below_late(self, seen: _Seen) -> int:
        """Where a larger size was late of late, a size between the two: by the straight line through them.

        A line too steep to be true says that the load has become lighter since.
        """
        late = self._late.get(self._at.in_flight)
        if late is None or late.messages <= seen.messages or late.high_s <= seen.high_s:
            return self._most.messages
        if late.high_s / seen.high_s - 1 > ELASTICITY_MAX * (late.messages / seen.messages - 1):
            del self._late[self._at.in_flight]
            return self._most.messages
        part = (self._aim_s(seen) - seen.high_s) / (late.high_s - seen.high_s)
        return int(seen.messages + part * (late.messages - seen.messages))

    def _held(self, seen: _Seen) -> str:
        return f"nine batches in ten took at most {seen.high_s:.3g} s, the bound is {self._bound_s:.3g} s"

    def _lateness(self, seen: _Seen) -> str:
        return f"{seen.late} of {seen.size} batches took longer than {self._bound_s:.3g} s, up to {seen.high_s:.3g} s"

    def _relieve(self, seen: _Seen) -> None:
        """Batches are late: make them smaller, or where that does not help, have fewer in flight."""
        self._settled = False
        if self._is_grave(seen):
            self._restart()
            self._hold = 1
        why = self._lateness(seen)
        self._late_run = [at for at in self._late_run if at.in_flight == self._at.in_flight] + [self._at]
        if not self._is_futile(seen):
            self._shrink(seen, why)
            return
        first, *_ = self._late_run
        self._late_run = []
        if first.in_flight > 1:
            fewer = replace(first, in_flight=first.in_flight - 1)
            self._move(fewer, f"{why}, which smaller batches would not mend")
        else:
            self._begin_probe(seen, why)

    def _is_grave(self, seen: _Seen) -> bool:
        return seen.late * 2 > seen.size and seen.high_s > GRAVE * self._bound_s

    def _is_futile(self, seen: _Seen) -> bool:
        """Whether even an eighth of a batch would be late, or would be so for all that is known."""
        if seen.messages <= self._least or len(self._late_run) > LATE_RUN_MOST:
            return True
        slope = self._slopes.get(self._at.in_flight)
        return slope is not None and seen.high_s - slope * seen.messages * (1 - 1 / PROBE_PART) > self._aim_s(seen)

    def _shrink(self, seen: _Seen, why: str) -> None:
        """By as much as is needed: what a step does is found out at leisure, but late batches are not to be had."""
        factor = 1 + (self._room(seen) - 1) / min(1.0, self._elasticity(seen))
        factor *= 1.0 if self._at.in_flight in self._slopes else FIRST_CUT
        most = GRAVE_SHRINK if self._is_grave(seen) else SHRINK_LEAST
        base = min(self._at.messages, seen.messages)
        self._late[self._at.in_flight] = seen
        messages = max(self._least, int(base * min(most, max(SHRINK_MOST, factor))))
        self._move(replace(self._at, messages=messages), why)

    # -- trials ------------------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """The load has changed: what was found out does not hold any more."""
        self._failed, self._hold, self._patience = 0, 0, PATIENCE_MIN
        self._explored = self._cap = None
        self._late.clear()

    def _wait_longer(self) -> None:
        if self._patience == PATIENCE_MAX:
            self._late.clear()
        self._hold = self._patience
        self._patience = min(self._patience * 2, PATIENCE_MAX)

    def _try(self, seen: _Seen) -> None:
        """The next trial; wait where all have been made in vain."""
        while self._failed < len(self._ways):
            way = self._ways[0]
            to = way.step(self._at, self._cap is not None)
            if to is not None:
                to = replace(to, messages=min(self._most.messages, max(self._least, to.messages)))
            if to is not None and to != self._at and 1 <= to.in_flight <= self._in_flight_max:
                self._trial = _Trial(way, self._at, seen.rate * way.gain)
                self._move(to, f"tries {way}: {self._held(seen)}, at {seen.rate:.0f} messages/s")
                return
            self._ways.rotate(-1)
            self._failed += 1
        self._failed = 0
        self._explored = seen.rate
        self._wait_longer()

    # -- is the target within reach? ---------------------------------------------------------------------------------

    def _begin_probe(self, seen: _Seen, why: str) -> None:
        """Try a small batch, with one in flight: nearly all of its time is what any batch takes."""
        messages = max(self._least, int(seen.messages) // PROBE_PART)
        if messages < seen.messages:
            self._probe = seen
            self._move(Setting(messages, 1), why)
        else:
            self._reach(seen.high_s, seen.messages, seen)

    def _end_probe(self, before: _Seen, seen: _Seen) -> None:
        self._probe = None
        slope = max(0.0, (before.high_s - seen.high_s) / max(before.messages - seen.messages, 1))
        self._slopes[1], self._last[1] = slope, seen
        floor_s = max(0.0, seen.high_s - slope * seen.messages)
        self._reach(floor_s, before.messages, seen)

    def _reach(self, floor_s: float, most: float, seen: _Seen) -> None:
        """What any batch takes is known: say whether the target can be held, and go to the size that fits."""
        before, self._settled = self._floor_s, False
        self._floor_s = None if floor_s <= REACH * self._target_s else floor_s
        slope = self._slopes.get(1, 0.0)
        messages = most if slope <= 0 else min(most, (self._aim_s(seen) - floor_s) / slope)
        to = Setting(max(self._least, int(messages)), 1)
        if self._floor_s is None:
            if before is not None:
                self._restart()
            self._move(to, f"small batches, one at a time, take {floor_s:.3g} s: the target can be held")
        else:
            why = (
                f"even small batches, one at a time, take {floor_s:.3g} s: the target of {self._target_s:.3g} s is below "
                f"reach; they may take up to {self._bound_s:.3g} s"
            )
            self._move(to, why, below_reach=before is None)
