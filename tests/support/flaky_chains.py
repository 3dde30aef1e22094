"""Chains of two joins over three spouts, of which one gives several tuples a message, with functions that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from stormproof import MemorySink, MemorySource, Topology
from stormproof.core.base.message import Guarantee
from stormproof.testing import End, Faults, Simulation, simulate
from support.flaky_joins import MAX_ATTEMPTS

REGIONS = 4
ALWAYS = range(1_000)
FAILS: dict[object, Sequence[int]] = {}
CALLS: Counter[object] = Counter()
"""At which of its calls each call fails, and how often it was called. Here: each job has a copy of a function's own."""

Row = tuple[object, ...]
Side = dict[int, int]
"""Messages: their keys, by their numbers."""


def flaky(place: str) -> Callable[..., Row]:
    """A function that gives what it gets, or fails."""

    def call(*values: object) -> Row:
        from support.flaky_chains import CALLS, FAILS

        CALLS[place, *values] += 1
        if CALLS[place, *values] - 1 in FAILS.get((place, *values), ()):
            raise ConnectionError("the service is away")
        return values

    return call


def keys_of(payment: int, key: int) -> list[int]:
    """A payment is for one key or for two."""
    return [key, key + 1] if payment % 3 == 0 else [key]


def wide(key: int, p: int) -> list[tuple[int, int]]:
    """One tuple for each key of a payment."""
    return [(each, p) for each in keys_of(p, key)]


def region_of(o: int | None, p: int | None) -> int:
    """Where a pair belongs: it depends on both, so that a message's key at the second join depends on its partners."""
    return (3 if o is None else o) * (5 if p is None else p + 1) % REGIONS


def regional(key: int, o: int | None, p: int | None) -> tuple[int, int, int | None, int | None]:
    """A pair with its region."""
    flaky("between")(key, o, p)
    return region_of(o, p), key, o, p


def join(left: Sequence[Row], right: Sequence[Row], how: str) -> list[Row]:
    """A join by the first field, where each side has others beside it."""
    keys, others = {row[0] for row in left}, {row[0] for row in right}
    rows = [(*one, *two[1:]) for one in left for two in right if one[0] == two[0]]
    if how in {"left", "full"}:
        rows += [(*row, None) for row in left if row[0] not in others]
    if how in {"right", "full"}:
        width = 2 if not left else len(left[0])
        rows += [(row[0], *[None] * (width - 1), *row[1:]) for row in right if row[0] not in keys]
    return rows


@dataclass(frozen=True)
class Chain:
    """What is drawn by a seed. `fails` has at which of its calls a call fails, by its place and its values."""

    orders: Side
    payments: Side
    regions: Side
    hows: tuple[str, str]
    fails: Mapping[object, Sequence[int]]
    faults: Faults
    seed: int

    def topology(self) -> Topology:
        t = Topology("paid")
        orders = t.stream("orders", MemorySource("orders", [], schema="key long, o long"))
        payments = t.stream("payments", MemorySource("payments", [], schema="key long, p long"))
        regions = t.stream("regions", MemorySource("regions", [], schema="r long, n long"))
        orders = orders.map(flaky("orders"), schema="key long, o long")
        payments = payments.flat_map(wide, schema="key long, p long").shuffle()
        payments = payments.map(flaky("payments"), schema="key long, p long")
        regions = regions.map(flaky("regions"), schema="r long, n long")
        pairs = orders.join(payments, "key", how=self.hows[0])
        pairs = pairs.map(regional, schema="r long, key long, o long, p long")
        joined = pairs.join(regions, "r", how=self.hows[1])
        joined.map(flaky("behind"), schema="r long, key long, o long, p long, n long").into(MemorySink("paid"))
        return t

    def run(self, guarantee: Guarantee) -> Simulation:
        CALLS.clear()
        FAILS.clear()
        FAILS.update(self.fails)
        messages = {
            "orders": [{"key": key, "o": o} for o, key in self.orders.items()],
            "payments": [{"key": key, "p": p} for p, key in self.payments.items()],
            "regions": [{"r": r, "n": n} for n, r in self.regions.items()],
        }
        return simulate(
            self.topology(),
            messages,
            seed=self.seed,
            guarantee=guarantee,
            faults=self.faults,
            batch_messages=sum(map(len, messages.values())),
            max_attempts=MAX_ATTEMPTS,
            max_steps=10_000,
        )

    def joined(self, dead: set[tuple[str, int]]) -> Counter[Row]:
        """What one batch of all messages but the dead letters gives."""
        orders = [(key, o) for o, key in self.orders.items() if ("orders", o) not in dead]
        payments = [row for p, key in self.payments.items() if ("payments", p) not in dead for row in wide(key, p)]
        regions = [(r, n) for n, r in self.regions.items() if ("regions", n) not in dead]
        pairs = join(orders, payments, self.hows[0])
        placed = [(region_of(o, p), key, o, p) for key, o, p in pairs]  # type: ignore[arg-type]
        if not placed and self.hows[1] == "right":
            return Counter((r, None, None, None, n) for r, n in regions)
        return Counter(join(placed, regions, self.hows[1]))

    def check(self, guarantee: Guarantee) -> None:
        """The promise: as if one batch had had all messages that are no dead letters, whatever failed how often."""
        run = self.run(guarantee)
        assert run.idle, self
        rows = Counter[Row]((row["r"], row["key"], row["o"], row["p"], row["n"]) for row in run.rows("paid"))
        expected = self.joined({(m.spout, m.number) for m in run.ended(End.DEAD)})
        if guarantee is Guarantee.EXACTLY_ONCE:
            assert rows == expected, (self, run, rows - expected, expected - rows)
        else:
            assert set(expected) <= set(rows), (self, run)
        assert ALWAYS in self.fails.values() or not run.ended(End.DEAD), (self, run)


def chain(seed: int) -> Chain:
    """A chain: calls that fail once, twice or always, of pairs too."""
    rng = Random(seed)
    most, keys = rng.choice([2, 4, 6]), rng.choice([2, 4])
    orders = {o: rng.randrange(keys) for o in range(rng.randint(1, most))}
    payments = {p: rng.randrange(keys) for p in range(rng.randint(1, most))}
    regions = {n: rng.randrange(REGIONS) for n in range(rng.randint(1, most))}
    pairs = join([(k, o) for o, k in orders.items()], [row for p, k in payments.items() for row in wide(k, p)], "full")
    calls: list[object] = [
        *(("orders", key, o) for o, key in orders.items()),
        *(("payments", key, p) for p, own in payments.items() for key in keys_of(p, own)),
        *(("regions", r, n) for n, r in regions.items()),
        *(("between", *pair) for pair in pairs),
        *(("behind", region_of(pair[1], pair[2]), *pair, n) for pair in pairs for n in regions),  # type: ignore[arg-type]
    ]
    when: list[Sequence[int]] = [[0], [1], [0, 1], [1, 2], [0, 2], ALWAYS]
    fails = {call: rng.choice(when) for call in rng.sample(calls, min(len(calls), rng.choice([1, 2, 3, 4, 8])))}
    faults = rng.choice([Faults(), Faults(driver_deaths=0.03), Faults(worker_deaths=0.05), Faults(drops=0.01)])
    hows = rng.choice(["inner", "left", "right", "full"]), rng.choice(["inner", "left", "right"])
    return Chain(orders, payments, regions, hows, fails, faults, seed)
