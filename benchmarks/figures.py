"""A figure's arithmetic: runs in pairs, their medians, the ratio that the goal is judged by, and the JSON of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from stormproof.core.base.errors import Json


class Unit(StrEnum):
    """What a run's value is in; seconds and bytes are good when they are few, rates when they are high."""

    SECONDS = "s"
    MESSAGES = "messages/s"
    TUPLES = "tuples/s"
    NOTICES = "notices/s"
    BYTES = "bytes"

    @property
    def less_is_better(self) -> bool:
        """Whether a goal is an upper bound."""
        return self in (Unit.SECONDS, Unit.BYTES)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should reach: `ratio` bounds ours / theirs, `own` bounds our side alone.

    Both are upper bounds for seconds and bytes, and lower bounds for rates.
    """

    ratio: float | None = None
    own: float | None = None

    def is_met(self, unit: Unit, ratio: float, ours: float) -> bool:
        """Whether both bounds hold."""
        pairs = [(ratio, self.ratio), (ours, self.own)]
        if unit.less_is_better:
            return all(value <= bound for value, bound in pairs if bound is not None)
        return all(value >= bound for value, bound in pairs if bound is not None)

    def text(self, unit: Unit) -> str:
        """The goal in words."""
        sign = "<=" if unit.less_is_better else ">="
        parts = [f"ratio {sign} {self.ratio:g}"] if self.ratio is not None else []
        parts += [f"ours {sign} {self.own:,g} {unit}"] if self.own is not None else []
        return ", ".join(parts) or "none"


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side, one right after the other."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours / theirs, whatever the unit."""
        return self.ours / self.theirs


@dataclass(frozen=True, slots=True)
class Result:
    """All pairs of one figure. `is_quoted`: the other side's value was measured elsewhere and is the same in each."""

    key: str
    title: str
    unit: Unit
    goal: Goal
    pairs: tuple[Pair, ...]
    is_quoted: bool = False
    shows_p99: bool = False

    @property
    def ours(self) -> float:
        """Our median."""
        return median(pair.ours for pair in self.pairs)

    @property
    def theirs(self) -> float:
        """The other side's median."""
        return median(pair.theirs for pair in self.pairs)

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios, not the ratio of the medians: a slow moment meets both sides of a pair."""
        return median(pair.ratio for pair in self.pairs)

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached."""
        return self.goal.is_met(self.unit, self.ratio, self.ours)

    def to_json(self) -> dict[str, Json]:
        """What a machine reads; see benchmarks/README.md."""
        mine, other = [pair.ours for pair in self.pairs], [pair.theirs for pair in self.pairs]
        made: dict[str, Json] = {
            "ours": self.ours,
            "theirs": self.theirs,
            "unit": self.unit.value,
            "ratio": self.ratio,
            "runs": [{"ours": pair.ours, "theirs": pair.theirs, "ratio": pair.ratio} for pair in self.pairs],
            "met": self.is_met,
            "goal": self.goal.text(self.unit),
            "ours_quartiles": list(quartiles(mine)),
            "theirs_quartiles": list(quartiles(other)),
            "ratio_quartiles": list(quartiles([pair.ratio for pair in self.pairs])),
        }
        if self.is_quoted:
            made["quoted"] = True
        if self.shows_p99:
            made["ours_p99"], made["theirs_p99"] = percentile(mine, 0.99), percentile(other, 0.99)
        return made


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The spread: the values at a quarter and at three quarters."""
    return percentile(values, 0.25), percentile(values, 0.75)
