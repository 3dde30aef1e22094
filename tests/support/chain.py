"""The chain: one topology with all four sinks; each start recovers, is checked, runs on to a failpoint and dies there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stormproof.core.failpoint import FAILPOINTS, Failpoint
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database
from support.contents import content
from support.crashes import KILLED, Cell, arming
from support.queues import put
from support.topologies import SinkMode, expected, messages
from support.verdicts import require_verified

MESSAGES_PER_START = 7


@dataclass(slots=True)
class Chain:
    """What one chain put in, and where its drivers died."""

    cell: Cell
    start: Callable[[Cell, str], int]
    put: list[bytes] = field(default_factory=list[bytes])
    killed_at: Counter[str] = field(default_factory=Counter[str])
    starts: int = 0

    def run(self, points: Sequence[Failpoint]) -> Iterator[str]:
        """Die at each place, then run to the end; yields a line for each start.

        Raises:
            AssertionError: a sink holds a word too many at any time, or not the exact answer at the end, or the audit
                disagrees.
        """
        for point in points:
            for armed in arming(point):
                yield self._start(armed)
            assert self.killed_at[point.name], f"{point.name} was reached by no start"
        yield self._start("")
        for mode in SinkMode:
            assert self._content(mode) == expected(self.put), f"{mode} is not exact at the end"

    def _start(self, armed: str) -> str:
        fresh = messages(MESSAGES_PER_START, prefix=f"s{self.starts}w")
        put(self.cell.database, self.cell.queue, fresh)
        self.put += fresh
        self.starts += 1
        code = self.start(self.cell, armed)
        assert code in (0, KILLED), f"start {self.starts} ({armed or 'unarmed'}) ended with {code}"
        if code == KILLED:
            self.killed_at[armed.rpartition(";")[2].partition("=")[0]] += 1
        should = expected(self.put)
        for mode in SinkMode:
            extra = self._content(mode) - should
            assert not extra, f"start {self.starts} ({armed}): {mode} holds too many of {dict(extra)}"
        require_verified(self.cell)
        return f"start {self.starts}: {'killed at ' + armed if code == KILLED else 'ran to the end'}, checked"

    def _content(self, mode: SinkMode) -> Counter[str]:
        return content(mode, self.cell.name, self.cell.folder, self.cell.database)


def chain(database: Database, folder: Path, start: Callable[[Cell, str], int], name: str = "chain") -> Chain:
    """A chain under exactly-once over a prepared database."""
    return Chain(Cell(name, None, Guarantee.EXACTLY_ONCE, folder, database, name), start)


def all_points(rng: random.Random) -> list[Failpoint]:
    """Every failpoint that a run can reach, in an order that the seed decides."""
    points = [p for p in FAILPOINTS.values() if p.scope not in ("queue", "state")]
    rng.shuffle(points)
    return points
