"""Runs figures: both sides of each in turns, so that a slow moment of the machine meets both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.figures import Goal, Pair, Result, Unit

if TYPE_CHECKING:
    from benchmarks.workbench import Workbench

WARM_UPS = 3

Run = Callable[[], float]
"""One run of one side; gives its value in the case's unit."""

Progress = Callable[[int, int], None]
"""Told how many rounds of how many are done, warm-ups among them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure. `theirs` is a number where it was measured elsewhere.

    `pairs_factor` is for cases whose percentiles need more runs than a median does, `pairs_most` for those of which each
    run says the same, and takes long.
    """

    key: str
    title: str
    unit: Unit
    goal: Goal
    ours: Run
    theirs: Run | float
    pairs_factor: int = 1
    pairs_most: int | None = None
    warm_ups: int = WARM_UPS
    shows_p99: bool = False


Figure = Callable[["Workbench"], Iterator[AbstractContextManager[Case]]]
"""Gives a figure's cases one by one; each is set up when it is entered and taken down after it."""


def measure(case: Case, pairs: int, progress: Progress = lambda done, total: None) -> Result:
    """Warm both sides up, then run them in pairs; who goes first changes from pair to pair."""
    wanted = min(pairs * case.pairs_factor, case.pairs_most or pairs * case.pairs_factor)
    total = case.warm_ups + wanted
    measured: list[Pair] = []
    for number in range(total):
        if isinstance(case.theirs, (int, float)):
            ours, theirs = case.ours(), float(case.theirs)
        elif number % 2:
            theirs = case.theirs()
            ours = case.ours()
        else:
            ours = case.ours()
            theirs = case.theirs()
        if number >= case.warm_ups:
            measured.append(Pair(ours, theirs))
        progress(number + 1, total)
    return Result(
        key=case.key,
        title=case.title,
        unit=case.unit,
        goal=case.goal,
        pairs=tuple(measured),
        is_quoted=isinstance(case.theirs, (int, float)),
        shows_p99=case.shows_p99,
    )
