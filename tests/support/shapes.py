"""What a chain's topology ends in: how it is built, how often a batch comes by a place, and what its sinks hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stormproof import Topology
from stormproof.core.base.failpoint import FAILPOINTS, Failpoint
from stormproof.core.postgres.database import Database
from stormproof.trident.audit.inspect import SinkOpener, opener_for
from support.contents import content
from support.crashes import Cell
from support.topologies import FLAKY, POISON, SinkMode, expected

EVERY_RUN: Final = ("every", "recovery", "abort", "retry")
"""The scopes of failpoints that a run can reach, whatever it ends in."""

SINK_HITS: Final = {"delta": 2, "postgres": 2, "commit": len(SinkMode)}


def require_whole(found: Counter[str], put: Sequence[bytes], sink: str) -> None:
    """Nothing may stand in a sink but whole messages, each once.

    Raises:
        AssertionError: a word too many, or a message in part.
    """
    there: list[bytes] = []
    for payload in set(put) - {POISON, FLAKY, b""}:
        words = Counter(payload.decode().split())
        (own,) = set(words) - {"common"}
        if found[own]:
            assert found[own] == words[own], f"{sink} holds {own!r} {found[own]} times"
            there.append(payload)
    flaky = Counter(FLAKY.decode().split())
    times = found[next(iter(flaky))]
    assert times <= put.count(FLAKY), f"{sink} holds {FLAKY!r} {times} times, {put.count(FLAKY)} were put"
    should = expected([*there, *[FLAKY] * times])
    assert found == should, f"{sink} holds {dict(found - should)} too much, {dict(should - found)} too little"


@dataclass(frozen=True, slots=True)
class Shape:
    """One form of topology: what its messages become in sinks of some kinds.

    `contents` reads all sinks, by name. `hits` says for the first part of a failpoint's name how many of the times that a
    batch comes there are looked at; elsewhere it is the first. `build` None: what `support.topologies` has. `answer` says,
    from the input alone, what a sink must hold in the end, and `require_part` raises for what it may not hold before: unless
    told otherwise, the words of all messages.
    """

    contents: Callable[[Cell, Database], Mapping[str, Counter[str]]]
    hits: Mapping[str, int]
    build: Callable[[Cell], Topology] | None = None
    opener: Callable[[Cell, Database], SinkOpener] = lambda _, database: opener_for(database)
    untold: frozenset[str] = frozenset()
    """Sinks that remember their last transaction alone: of those before it the audit cannot tell."""
    answer: Callable[[str, Sequence[bytes]], Counter[str]] = lambda _, put: expected(put)
    require_part: Callable[[Counter[str], Sequence[bytes], str], None] = require_whole
    rejects_max_share: float = 0.1

    def points(self) -> list[Failpoint]:
        """Every failpoint that a run can reach."""
        return [point for point in FAILPOINTS.values() if point.scope in (*EVERY_RUN, *self.hits)]

    def hits_at(self, point: Failpoint) -> int:
        """How many of the times that a batch comes there are looked at."""
        return self.hits.get(point.name.partition(".")[0], 1)


def _sinks(cell: Cell, database: Database) -> Mapping[str, Counter[str]]:
    return {mode: content(mode, cell.name, cell.folder, database) for mode in SinkMode}


SINKS: Final = Shape(_sinks, SINK_HITS)
"""All four sinks."""
