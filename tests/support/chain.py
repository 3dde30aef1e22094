"""The chain: one topology with all four sinks lives on through one misfortune after the other, and is checked each time.

Right after a misfortune no sink may hold a word too many, or a message in part; after the start that follows, which
recovers and runs to the end, each holds the exact answer, which comes from the input alone. `audit verify` must say the
same both times.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from stormproof.core.failpoint import FAILPOINTS, Failpoint
from stormproof.core.postgres.database import Database
from support.blows import Action, Blow, Stand
from support.contents import content
from support.crashes import KILLED, Cell
from support.topologies import FLAKY, POISON, SinkMode, expected, messages
from support.verdicts import is_known, require_verified, verified

MESSAGES_PER_START = 7

HITS: Final = {"delta": 2, "postgres": 2, "commit": len(SinkMode)}
"""A topology with all four sinks comes so often to these places with each batch: once for each sink."""


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
    content_of: Callable[[Cell, Database, SinkMode], Counter[str]] = lambda cell, database, mode: content(
        mode, cell.name, cell.folder, database
    )
    starts: int = 0
    killed_at: Counter[str] = field(default_factory=Counter[str])

    def run(self, ordeals: Sequence[Ordeal]) -> Iterator[str]:
        """Go through each, and be checked; yields a line for each.

        Raises:
            AssertionError: a sink holds what it should not, or the audit says otherwise, or a driver ended without a
                reason.
        """
        for ordeal in ordeals:
            yield self.undergo(ordeal)

    def undergo(self, ordeal: Ordeal) -> str:
        """Go through one."""
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
            self.stand.run()
            self._check_all()
        except AssertionError as error:
            raise AssertionError(f"{ordeal.name}: {error}") from error
        if ordeal.must:
            assert self.stand.reached[ordeal.must] > reached, f"{ordeal.name}: it was reached by no start ({codes})"
        return f"{ordeal.name}: {', '.join(map(str, codes))}, exact"

    def _content(self, mode: SinkMode) -> Counter[str]:
        return self.content_of(self.stand.cell, self.stand.database, mode)

    def _check_part(self) -> None:
        there = [self._content(mode) for mode in SinkMode]
        for mode, found in zip(SinkMode, there, strict=True):
            require_whole(found, self.stand.put, mode)
        if is_known(self.stand.cell.name, self.stand.database):
            self._check_audit()
        else:  # no driver lived long enough
            assert not any(there), f"the ledger knows of nothing, and the sinks hold {there}"

    def _check_all(self) -> None:
        should = expected(self.stand.put)
        wrong = {
            mode: (dict(found - should), dict(should - found))
            for mode in SinkMode
            if (found := self._content(mode)) != should
        }
        if wrong:
            report = verified(self.stand.cell.name, self.stand.database)
            says = "calls it clean" if report.clean else f"says so, too: {report.violations or report.unknowns}"
            raise AssertionError(f"too much, too little: {wrong}; the audit {says}")
        self._check_audit()

    def _check_audit(self) -> None:
        require_verified(self.stand.cell, self.stand.database)


def require_whole(found: Counter[str], put: Sequence[bytes], mode: SinkMode) -> None:
    """Nothing may stand in a sink but whole messages, each once.

    Raises:
        AssertionError: a word too many, or a message in part.
    """
    there: list[bytes] = []
    for payload in set(put) - {POISON, FLAKY, b""}:
        words = Counter(payload.decode().split())
        (own,) = set(words) - {"common"}
        if found[own]:
            assert found[own] == words[own], f"{mode} holds {own!r} {found[own]} times"
            there.append(payload)
    flaky = Counter(FLAKY.decode().split())
    times = found[next(iter(flaky))]
    assert times <= put.count(FLAKY), f"{mode} holds {FLAKY!r} {times} times, {put.count(FLAKY)} were put"
    should = expected([*there, *[FLAKY] * times])
    assert found == should, f"{mode} holds {dict(found - should)} too much, {dict(should - found)} too little"


def ordeals(actions: Sequence[Action], points: Sequence[Failpoint] | None = None) -> list[Ordeal]:
    """Each of these failpoints (None: all that a run can reach) with each action, for each sink that comes by."""
    found: list[Ordeal] = []
    for point in all_points() if points is None else points:
        for at in range(1, HITS.get(point.name.partition(".")[0], 1) + 1):
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


def all_points() -> list[Failpoint]:
    """Every failpoint that a run of a topology with these sinks can reach."""
    return [p for p in FAILPOINTS.values() if p.scope not in ("queue", "state", "stream")]


def one_way_each(actions: Sequence[Action], seed: int) -> list[Ordeal]:
    """Each failpoint with one of these actions in turn; the seed decides with which it begins."""
    ways = [ordeals([action]) for action in actions]
    return [ways[(i + seed) % len(ways)][i] for i in range(len(ways[0]))]


def shuffled(found: Sequence[Ordeal], rng: random.Random) -> list[Ordeal]:
    """In an order that the seed decides."""
    return rng.sample(found, len(found))
