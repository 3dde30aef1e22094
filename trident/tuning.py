"""How large a batch is and how many are in flight: as set, or tuned while running for throughput within a latency."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from stormproof.core.source.protocol import Limit

WINDOW_BATCHES: Final = 5
"""So many full batches are looked at together."""

GAIN: Final = 1.05
"""A step is kept where it brings at least so much throughput."""

GROWTH: Final = 1.5
MARGIN: Final = 0.9
SHRINK_LEAST: Final = 0.9
SHRINK_MOST: Final = 0.25
MESSAGES_MIN: Final = 10
FIRST_MESSAGES: Final = 1_000
PATIENCE_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """One committed batch: how many messages, from open to committed in how many seconds, and when it was committed.

    `full`: it had as many messages as its limit allowed, or came near it; else the source had no more, and its throughput
    says nothing. `waited_s` is how long it was ready before its turn to commit came.
    """

    messages: int
    latency_s: float
    ended_s: float
    full: bool
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What the next batches are to be: at most so many messages each, and so many in flight."""

    messages: int
    in_flight: int


class Tuner(Protocol):
    """Says how batches are to be, and learns from those that were committed."""

    @property
    def limit(self) -> Limit:
        """The next batch's limit."""
        ...

    @property
    def in_flight(self) -> int:
        """How many batches may be in flight."""
        ...

    def learn(self, sample: Sample) -> None:
        """A batch was committed."""
        ...


@dataclass(frozen=True, slots=True)
class AsSet:
    """Nothing is tuned."""

    limit: Limit
    in_flight: int

    def learn(self, sample: Sample) -> None:
        """Nothing to learn."""


class _Direction(StrEnum):
    LARGER = "larger batches"
    MORE = "more in flight"
    SPLIT = "more, smaller ones in flight"
    FEWER = "fewer in flight"

    def step(self, at: Setting, room: float, most: int) -> Setting | None:
        """The next setting; `room` is how far the latency may grow, as a factor. None: there is no room."""
        match self:
            case _Direction.LARGER:
                messages = min(most, max(at.messages + 1, round(at.messages * min(GROWTH, room))))
                return replace(at, messages=messages) if room >= GAIN and messages > at.messages else None
            case _Direction.MORE:
                return replace(at, in_flight=at.in_flight + 1)
            case _Direction.SPLIT:
                # As many messages in flight as before; where run and commit overlap, that alone pays.
                messages = at.messages * at.in_flight // (at.in_flight + 1)
                return Setting(messages, at.in_flight + 1)
            case _Direction.FEWER:
                return replace(at, in_flight=at.in_flight - 1)


class LatencyTuner:
    """Climbs to the greatest throughput at which batches are committed within `target_s` of being opened.

    Both knobs are moved together, one step at a time: larger batches, more in flight, fewer in flight (which must cost
    no throughput). A step is kept where it pays over a window of full batches, and taken back elsewhere; when no step
    pays, it waits, longer each time, before it looks again. A window whose latency lies above the target shrinks at once,
    in proportion: what waits most for its turn to commit gives up a batch in flight, else the batches get smaller. Step
    by step up and in proportion down is what keeps such a loop stable (Chiu and Jain, 1989, on congestion avoidance).

    `most` and `in_flight_max` are never passed. *Not guaranteed*: a batch that is slow by itself is above the target.
    """

    def __init__(self, target_s: float, most: Limit, in_flight_max: int) -> None:
        self._target_s = target_s
        self._most = most
        self._in_flight_max = in_flight_max
        self._at = Setting(min(FIRST_MESSAGES, most.messages), 1)
        self._window: deque[Sample] = deque()
        self._skip = 0
        self._known: float | None = None
        self._before: Setting | None = None
        self._directions = deque(_Direction)
        self._failed = 0
        self._patience = 1
        self._hold = 0

    @property
    def limit(self) -> Limit:
        """The next batch's limit."""
        return Limit(self._at.messages, self._most.bytes)

    @property
    def in_flight(self) -> int:
        """How many batches may be in flight."""
        return self._at.in_flight

    @property
    def setting(self) -> Setting:
        """Both."""
        return self._at

    def learn(self, sample: Sample) -> None:
        """A batch was committed. Those that were opened before the last step still go by the old setting."""
        if self._skip:
            self._skip -= 1
            self._window = deque([sample])  # the time from here counts, its messages do not
            return
        if not sample.full and sample.latency_s <= self._target_s:
            self._window.clear()
            return
        self._window.append(sample)
        if len(self._window) > WINDOW_BATCHES:
            self._judge()
            self._window = deque([sample])

    def _judge(self) -> None:
        first, *rest = self._window
        latency_s = sorted(sample.latency_s for sample in rest)[-2]  # one may be slow for reasons of its own
        if latency_s > self._target_s and self._before is not None:
            self._take_back()
        elif latency_s > self._target_s:
            self._shrink(latency_s, sum(sample.waited_s for sample in rest) / len(rest))
        if latency_s > self._target_s:
            return
        if self._hold:
            self._hold -= 1
            return
        rate = sum(sample.messages for sample in rest) / max(rest[-1].ended_s - first.ended_s, 1e-9)
        if self._known is None:
            self._known, self._before = rate, None
        elif self._before is not None:
            self._settle(rate)
        if not self._hold:
            self._try(MARGIN * self._target_s / max(latency_s, 1e-9))

    def _settle(self, rate: float) -> None:
        """Keep the last step, or take it back."""
        assert self._known is not None
        assert self._before is not None
        fewer = self._at.in_flight < self._before.in_flight
        if rate >= self._known * (1 / GAIN if fewer else GAIN):
            self._known, self._before = rate, None
            self._failed, self._patience = 0, 1
            return
        self._take_back()

    def _take_back(self) -> None:
        assert self._before is not None
        self._move(self._before)
        self._before = None
        self._directions.rotate(-1)
        self._failed += 1

    def _try(self, room: float) -> None:
        """Step into the next direction that is open; hold where all have been tried in vain."""
        while self._failed < len(self._directions):
            to = self._directions[0].step(self._at, room, self._most.messages)
            if to is not None and self._is_allowed(to):
                self._before = self._at
                self._move(to)
                return
            self._directions.rotate(-1)
            self._failed += 1
        self._failed, self._known = 0, None
        self._hold = self._patience
        self._patience = min(self._patience * 2, PATIENCE_MAX)

    def _is_allowed(self, to: Setting) -> bool:
        least = min(MESSAGES_MIN, self._most.messages)
        return least <= to.messages <= self._most.messages and 1 <= to.in_flight <= self._in_flight_max

    def _shrink(self, latency_s: float, waited_s: float) -> None:
        if self._at.in_flight > 1 and waited_s > latency_s / 2:
            to = replace(self._at, in_flight=self._at.in_flight - 1)
        else:
            factor = min(SHRINK_LEAST, max(SHRINK_MOST, MARGIN * self._target_s / latency_s))
            to = replace(
                self._at, messages=max(1, min(MESSAGES_MIN, self._most.messages), int(self._at.messages * factor))
            )
        self._known = self._before = None
        self._failed, self._hold = 0, self._patience
        self._patience = min(self._patience * 2, PATIENCE_MAX)
        self._move(to)

    def _move(self, to: Setting) -> None:
        self._skip = self._at.in_flight
        self._at = to
