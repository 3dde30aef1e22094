"""Seeded random rounds: several misfortunes at once, several drivers, Postgres restarts, lost COMMITs; checked each time.

Some rounds share one topology, which lives on through them, and start a new one after that, of the next shape. Whatever is
random in a round comes from the seed and the round's number.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from stormproof.core.base.failpoint import Failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.blows import Action, Blow, Stand
from support.chain import Chain, Ordeal
from support.crashes import Cell
from support.databases import create_database, drop_database
from support.proxy import Proxy
from support.queues import prepared_database
from support.shapes import SINKS, Shape
from support.states import IN_MAPS

ROUNDS_PER_TOPOLOGY: Final = 10
CELLS_PER_TOPOLOGY: Final = 12
SHAPES: Final = (SINKS, IN_MAPS)
STARTS_MAX: Final = 2
BLOWS_MAX: Final = 3
AT_MAX: Final = 5

WEIGHTS: Final = {
    Action.KILL: 8,
    Action.RAISE: 3,
    Action.LAPSE: 2,
    Action.TAKE_OVER: 2,
    Action.RESTART: 1,
    Action.CRASH: 2,
    Action.LOSE_ANSWER: 3,
    Action.LOSE_COMMIT: 2,
}


@contextmanager
def stand_on(
    server: EmbeddedPostgres, name: str, *, folder: Path | None = None, proxied: bool = True
) -> Generator[Stand]:
    """A stand with a topology and a database of its own, behind a proxy; nothing of it is left afterwards."""
    drop_database(server.database, name)
    database = prepared_database(create_database(server.database, name))
    with tempfile.TemporaryDirectory(prefix="stormproof-torture-", dir=folder) as place, Proxy(database) as proxy:
        cell = Cell(name, None, Guarantee.EXACTLY_ONCE, Path(place), proxy.database if proxied else database, name)
        yield Stand(cell, database, server, proxy if proxied else None)
    drop_database(server.database, name)


def lives(
    server: EmbeddedPostgres,
    cells: Sequence[Ordeal],
    tally: Counter[str],
    change: Callable[[Cell], Cell],
    shape: Shape = SINKS,
    *,
    proxied: bool = False,
    ordeals_per_end: int = 1,
) -> Iterator[str]:
    """Go through all of these, so many in one topology's life; yields a line for each.

    A topology that lives for ever would be checked at ever greater cost.
    """
    for first in range(0, len(cells), CELLS_PER_TOPOLOGY):
        with stand_on(server, f"life_{first}", proxied=proxied) as stand:
            stand.cell = change(stand.cell)
            yield from Chain(stand, shape, ordeals_per_end).run(cells[first : first + CELLS_PER_TOPOLOGY])
            tally.update(stand.tally)


@dataclass(slots=True)
class Rounds:
    """Runs rounds and adds up what happened."""

    server: EmbeddedPostgres
    seed: int
    change: Callable[[Cell], Cell] = lambda cell: cell
    tally: Counter[str] = field(default_factory=Counter[str])
    reached: Counter[str] = field(default_factory=Counter[str])

    def run(self, first: int, last: int) -> Iterator[tuple[int, str]]:
        """The rounds from `first` to `last`; those before `first` on the same topology run, too, since they lead to it.

        Raises:
            AssertionError: a promise is broken; the text says in which round.
        """
        number = first - (first - 1) % ROUNDS_PER_TOPOLOGY
        while number <= last:
            end = min(last, number + ROUNDS_PER_TOPOLOGY - 1)
            with stand_on(self.server, f"rounds_{number}") as stand:
                made = Chain(stand, SHAPES[number // ROUNDS_PER_TOPOLOGY % len(SHAPES)])
                for n in range(number, end + 1):
                    line = self._round(made, n)
                    self._add_up(stand)
                    yield n, line
            number = end + 1

    def _add_up(self, stand: Stand) -> None:
        assert stand.proxy is not None
        self.tally["commits lost"] += stand.proxy.lost
        stand.proxy.lost = 0
        for total, part in ((self.tally, stand.tally), (self.reached, stand.reached)):
            total.update(part)
            part.clear()

    def _round(self, made: Chain, number: int) -> str:
        rng = random.Random(f"{self.seed}/{number}")
        in_flight, batch_messages = rng.choice([1, 4]), rng.randint(1, 5)
        made.stand.cell = self.change(replace(made.stand.cell, in_flight=in_flight, batch_messages=batch_messages))
        drawn = draw(rng, made.shape)
        try:
            made.undergo(drawn)
        except AssertionError as error:
            shape = f"{in_flight} batches of {batch_messages} in flight"
            raise AssertionError(f"round {number} of seed {self.seed}, {shape}: {error}") from error
        return f"{in_flight} in flight: {drawn.name}"


def draw(rng: random.Random, shape: Shape) -> Ordeal:
    """One or two starts, each with two or three misfortunes."""
    starts: list[tuple[Blow, ...]] = []
    for _ in range(rng.randint(1, STARTS_MAX)):
        leftovers = any(blow.action is Action.KILL for blow in itertools.chain(*starts))
        starts.append(_start(rng, shape, leftovers=leftovers))
    return Ordeal("; then ".join(" + ".join(map(str, blows)) for blows in starts), tuple(starts))


def _start(rng: random.Random, shape: Shape, *, leftovers: bool) -> tuple[Blow, ...]:
    """Misfortunes that can come together: one death at most, and late; what only recovery reaches where it finds some."""
    number = rng.randint(2, BLOWS_MAX)
    actions = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=number)
    for once in (Action.KILL, Action.TAKE_OVER):
        while actions.count(once) > 1:
            actions.remove(once)
            actions.append(rng.choice([Action.RAISE, Action.LAPSE, Action.LOSE_ANSWER, Action.LOSE_COMMIT]))
    again = leftovers or any(action is not Action.LAPSE for action in actions if action is not Action.KILL)
    scopes = {"every", *shape.hits, *(["recovery", "abort"] if again else [])}
    points = rng.sample([p for p in shape.points() if p.scope in scopes], number)
    blows = [Blow(point.name, action, _at(rng, point, action)) for point, action in zip(points, actions, strict=True)]
    if rng.randrange(4) == 0:
        blows = [b for b in blows if b.point != "task.after_file"][: BLOWS_MAX - 1]
        blows.append(Blow("task.after_file", Action.ERROR, rng.randint(1, AT_MAX)))
    return tuple(blows)


def _at(rng: random.Random, point: Failpoint, action: Action) -> int:
    """Which time it comes there; a driver starts once."""
    late = int(rng.expovariate(1)) + (action is Action.KILL)
    return 1 if point.name.startswith("start.") else min(AT_MAX, 1 + late)
