"""The chain: one topology with sinks of all kinds lives on through one misfortune after the other, checked each time.

Right after a misfortune no sink may hold a word too many, or a message in part. After one misfortune, or some, a start
recovers and runs to the end: then each sink holds the exact answer, which comes from the input alone. `audit verify` must
say the same both times.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stormproof.core.base.failpoint import Failpoint
from stormproof.trident.audit.inspect import SinkOpener
from support.blows import Action, Blow, Stand
from support.crashes import KILLED
from support.shapes import SINKS, Shape
from support.topologies import messages
from support.verdicts import is_known, require_verified, verified

MESSAGES_PER_START = 7


@dataclass(frozen=True, slots=True)
class Ordeal:
    """The starts that lead to one misfortune, each with its blows. One start at least must come to `must`'s place."""

    name: str
    starts: tuple[tuple[Blow, ...], ...]
    must: str | None = None


@dataclass(slots=True)
class Chain:
    """One topology's life."""

    stand: Stand
    shape: Shape = SINKS
    ordeals_per_end: int = 1
    """So many misfortunes come before a start runs to the end. What one loses or doubles is still seen there: it stays."""
    starts: int = 0
    killed_at: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        shape = self.shape
        self.stand.cell = replace(self.stand.cell, build=shape.build, rejects_max_share=shape.rejects_max_share)

    def run(self, ordeals: Sequence[Ordeal]) -> Iterator[str]:
        """Go through these, and be checked; yields a line for each.

        Raises:
            AssertionError: a sink holds what it should not, or the audit says otherwise, or a driver ended without a
                reason.
        """
        for first in range(0, len(ordeals), self.ordeals_per_end):
            some = ordeals[first : first + self.ordeals_per_end]
            for ordeal in some:
                yield self._meet(ordeal)
            self._end(", ".join(ordeal.name for ordeal in some))

    def undergo(self, ordeal: Ordeal) -> str:
        """Go through one, and to the end."""
        line = self._meet(ordeal)
        self._end(ordeal.name)
        return line

    def _meet(self, ordeal: Ordeal) -> str:
        reached = self.stand.reached[ordeal.must] if ordeal.must else 0
        codes: list[int] = []
        try:
            for blows in ordeal.starts:
                self.starts += 1
                self.stand.give(messages(MESSAGES_PER_START, prefix=f"s{self.starts}w"))
                codes.append(self.stand.run(blows))
                if codes[-1] == KILLED:
                    self.killed_at.update(b.point for b in blows if b.action is Action.KILL)
                self._check_part()
        except AssertionError as error:
            raise AssertionError(f"{ordeal.name}: {error}") from error
        if ordeal.must:
            assert self.stand.reached[ordeal.must] > reached, f"{ordeal.name}: it was reached by no start ({codes})"
        return f"{ordeal.name}: {', '.join(map(str, codes))}"

    def _end(self, after: str) -> None:
        """Run a driver to its end; after it everything is exact."""
        try:
            self.stand.run()
            self._check_all()
        except AssertionError as error:
            raise AssertionError(f"after {after}: {error}") from error

    def _contents(self) -> dict[str, Counter[str]]:
        return dict(self.shape.contents(self.stand.cell, self.stand.database))

    def _check_part(self) -> None:
        there = self._contents()
        for sink, found in there.items():
            self.shape.require_part(found, self.stand.put, sink)
        if is_known(self.stand.cell.name, self.stand.database):
            self._check_audit()
        else:  # no driver lived long enough
            assert not any(there.values()), f"the ledger knows of nothing, and the sinks hold {there}"

    def _check_all(self) -> None:
        wrong = {
            sink: (dict(found - should), dict(should - found))
            for sink, found in self._contents().items()
            if found != (should := self.shape.answer(sink, self.stand.put))
        }
        if wrong:
            report = verified(self.stand.cell.name, self.stand.database, self._opener())
            says = "calls it clean" if report.clean else f"says so, too: {report.violations or report.unknowns}"
            raise AssertionError(f"too much, too little: {wrong}; the audit {says}")
        self._check_audit()

    def _check_audit(self) -> None:
        require_verified(self.stand.cell, self.stand.database, self._opener(), untold=self.shape.untold)

    def _opener(self) -> SinkOpener:
        return self.shape.opener(self.stand.cell, self.stand.database)


def ordeals(actions: Sequence[Action], points: Sequence[Failpoint] | None = None, shape: Shape = SINKS) -> list[Ordeal]:
    """Each of these failpoints (None: all that a run can reach) with each action, for each sink that comes by."""
    found: list[Ordeal] = []
    for point in shape.points() if points is None else points:
        for at in range(1, shape.hits_at(point) + 1):
            found += [ordeal(point, action, at) for action in actions]
    return found


def ordeal(point: Failpoint, action: Action, at: int = 1) -> Ordeal:
    """The starts that lead a driver to a place. A kill is dealt out a second time, which is mostly inside recovery."""
    blow = Blow(point.name, action, at)
    again = [(blow,)] if action is Action.KILL else []
    died = Blow("task.after_file", Action.KILL)
    starts: list[tuple[Blow, ...]]
    match point.scope:
        case "recovery" | "abort":
            starts = [(died,), (blow,), *again]  # a batch in hand, with files
        case "retry":
            starts = [(Blow("task.after_file", Action.ERROR), blow), *again]
        case _:
            starts = [(blow,), *again]
    return Ordeal(str(blow), tuple(starts), point.name)


def one_way_each(
    actions: Sequence[Action], seed: int, points: Sequence[Failpoint] | None = None, shape: Shape = SINKS
) -> list[Ordeal]:
    """Each of these failpoints with one of these actions in turn; the seed decides with which it begins."""
    ways = [ordeals([action], points, shape) for action in actions]
    return [ways[(i + seed) % len(ways)][i] for i in range(len(ways[0]))]


def shuffled(found: Sequence[Ordeal], rng: random.Random) -> list[Ordeal]:
    """In an order that the seed decides."""
    return rng.sample(found, len(found))
