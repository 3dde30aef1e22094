"""The chain over a streaming query: each start recovers, is checked, runs on to a failpoint and dies there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stormproof.core.base.failpoint import FAILPOINTS, Failpoint
from support.crashes import KILLED
from support.streams import Form, StreamCell, delta_rows, first_column, postgres_rows, put_file
from support.topologies import FLAKY, POISON
from support.verdicts import verified

FILES_PER_START = 2


@dataclass(slots=True)
class StreamChain:
    """What one chain put in, and where its drivers died."""

    cell: StreamCell
    start: Callable[[StreamCell, str], int]
    twice: bool = False
    """Kill at each place twice: the second time mostly while recovering from the first."""
    put: list[str] = field(default_factory=list[str])
    killed_at: Counter[str] = field(default_factory=Counter[str])
    starts: int = 0
    by_clock: bool = False
    """The rows come by the clock: 0, 1, 2 and so on, as many as there are."""

    def run(self, points: Sequence[Failpoint]) -> Iterator[str]:
        """Die at each place, then run to the end; yields a line for each start.

        Raises:
            AssertionError: a sink holds a row too many at any time, or not the exact answer at the end, or the two
                sinks hold rows of different computations, or the audit disagrees.
        """
        for point in points:
            for armed in self._arming(point):
                yield self._start(armed)
            assert self.killed_at[point.name], f"{point.name} was reached by no start"
        yield self._start("")
        require_exact(self.cell, self._input())

    def _arming(self, point: Failpoint) -> list[str]:
        kill = f"{point.name}=kill"
        match point.scope:
            case "recovery" | "abort":
                return ["prepare.before=kill", kill, *([kill] if self.twice else [])]  # a batch in hand, with files
            case "retry":
                return [f"task.after_file=error@3;{kill}"]  # the first two are the staged rows
            case _:
                later = point.name.startswith(("open.", "finish.", "prepare.", "stream."))
                return [f"{kill}@2" if later else kill, *([kill] if self.twice else [])]

    def _start(self, armed: str) -> str:
        for number in range(0 if self.by_clock else FILES_PER_START):
            word = f"s{self.starts}f{number}"
            lines = [f"{word} common {word}", "", *([POISON.decode(), FLAKY.decode()] if number else ["a"])]
            put_file(self.cell.folder, lines)
            self.put += lines
        self.starts += 1
        code = self.start(self.cell, armed)
        assert code in (0, KILLED), f"start {self.starts} ({armed or 'unarmed'}) ended with {code}"
        if code == KILLED:
            self.killed_at[armed.rpartition(";")[2].partition("=")[0]] += 1
        require_not_too_many(self.cell, self._input())
        if self.starts > 1:  # the very first one may die before there is anything in the ledger
            report = verified(self.cell.name, self.cell.database)
            assert report.clean, (armed, report.violations, report.unknowns)
        return f"start {self.starts}: {'killed at ' + armed if code == KILLED else 'ran to the end'}, checked"

    def _input(self) -> Sequence[str]:
        if not self.by_clock:
            return self.put
        seen = [int(row[0]) for row in (*delta_rows(self.cell, "rows"), *postgres_rows(self.cell, "rows"))]
        return [str(number) for number in range(max(seen, default=-1) + 1)]


def expected(cell: StreamCell, put: Sequence[str]) -> Counter[str]:
    """What the tables of rows must hold, from the input alone."""
    if cell.form is Form.SINKS:
        return Counter(put)
    return Counter(word for line in put if line != POISON.decode() for word in line.split())


def require_not_too_many(cell: StreamCell, put: Sequence[str]) -> None:
    """No row is there twice, at any time."""
    should = expected(cell, put)
    for rows in (delta_rows(cell, "rows"), postgres_rows(cell, "rows")):
        extra = first_column(rows) - should
        assert not extra, f"too many of {dict(extra)}"


def require_exact(cell: StreamCell, put: Sequence[str]) -> None:
    """Both stores hold the answer, and rows of one and the same computation."""
    should = expected(cell, put)
    delta, postgres = delta_rows(cell, "rows"), postgres_rows(cell, "rows")
    assert first_column(delta) == should
    assert sorted(delta) == sorted(postgres), "the sinks hold rows of different computations"
    if cell.form is Form.TOPOLOGY:
        assert dict(delta_rows(cell, "counts")) == dict(should)
        assert dict(postgres_rows(cell, "counts")) == dict(should)


def points_of(form: Form) -> list[Failpoint]:
    """Every failpoint that a query of this form passes."""
    apart = {"queue", "journal", "state", "operator", "audit", "reject", "group", "upkeep", "owed"} | (
        {"stream", "retry"} if form is Form.SINKS else set[str]()
    )
    return [point for point in FAILPOINTS.values() if point.scope not in apart]
