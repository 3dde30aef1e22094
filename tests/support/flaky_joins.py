"""Joins of two spouts in a simulation, with functions that fail before and behind the join so many times each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from stormproof import Bolt, MemorySink, MemorySource, Topology, Tuple
from stormproof.core.base.message import Guarantee
from stormproof.testing import End, Faults, Simulation, simulate

POISON = 1_000
MAX_ATTEMPTS = 6
LEFT: Counter[object] = Counter()
"""How often each call is still to fail. Here, and not in a function: each job has a copy of those."""

Side = dict[int, int]
"""Messages: their keys, by their numbers."""


def failing(place: str) -> Callable[..., tuple[object, ...]]:
    """A function that gives what it gets, or fails."""

    def call(*values: object) -> tuple[object, ...]:
        from support.flaky_joins import LEFT

        if LEFT[place, *values] > 0:
            LEFT[place, *values] -= 1
            raise ConnectionError("the service is away")
        return values

    return call


class ByHand(Bolt):
    """An inner join by a bolt; what has no partner fails."""

    streams = "key long, o long, p long"

    def __init__(self) -> None:
        self.held: dict[str, list[Tuple]] = {"orders": [], "payments": []}

    def execute(self, tuple: Tuple, /) -> None:
        self.held["orders" if "o" in tuple.fields else "payments"].append(tuple)

    def finish(self) -> None:
        paired = set[Tuple]()
        for order in self.held["orders"]:
            for payment in self.held["payments"]:
                if order["key"] == payment["key"]:
                    self.collector.emit((order["key"], order["o"], payment["p"]), anchors=[order, payment])
                    paired |= {order, payment}
        for tuple in (*self.held["orders"], *self.held["payments"]):
            if tuple in paired:
                self.collector.ack(tuple)
            else:
                self.collector.fail(tuple, "no partner")


@dataclass(frozen=True)
class Case:
    """What is drawn by a seed. `fails` has how often a call fails, by its place and its values."""

    orders: Side
    payments: Side
    how: str
    fails: Mapping[object, int]
    guarantee: Guarantee
    faults: Faults
    seed: int

    def topology(self) -> Topology:
        t = Topology("paid")
        orders = t.stream("orders", MemorySource("orders", [], schema="key long, o long"))
        payments = t.stream("payments", MemorySource("payments", [], schema="key long, p long"))
        orders = orders.map(failing("orders"), schema="key long, o long")
        payments = payments.shuffle().map(failing("payments"), schema="key long, p long")
        if self.how == "by hand":
            inputs = orders.output.fields("key"), payments.output.fields("key")
            joined = t.following(t.bolt("join", ByHand(), *inputs))
        else:
            joined = orders.join(payments, "key", how=self.how)
        joined.map(failing("behind"), schema="key long, o long, p long").into(MemorySink("paid"))
        return t

    def run(self) -> Simulation:
        LEFT.clear()
        LEFT.update(self.fails)
        messages = {
            "orders": [{"key": key, "o": o} for o, key in self.orders.items()],
            "payments": [{"key": key, "p": p} for p, key in self.payments.items()],
        }
        most = len(self.orders) + len(self.payments)
        return simulate(
            self.topology(),
            messages,
            seed=self.seed,
            guarantee=self.guarantee,
            faults=self.faults,
            batch_messages=most,
            max_attempts=MAX_ATTEMPTS,
            max_steps=10_000,
        )

    def joined(self, run: Simulation) -> Counter[tuple[object, ...]]:
        """What one batch of all messages that are no dead letters gives."""
        dead = {(m.spout, m.number) for m in run.ended(End.DEAD)}
        orders = {o: key for o, key in self.orders.items() if ("orders", o) not in dead}
        payments = {p: key for p, key in self.payments.items() if ("payments", p) not in dead}
        rows: list[tuple[object, ...]] = [
            (key, o, p) for o, key in orders.items() for p, other in payments.items() if key == other
        ]
        if self.how in {"left", "full"}:
            rows += [(key, o, None) for o, key in orders.items() if key not in payments.values()]
        if self.how in {"right", "full"}:
            rows += [(key, None, p) for p, key in payments.items() if key not in orders.values()]
        return Counter[tuple[object, ...]](rows)

    def check(self) -> None:
        """The promise: as if one batch had had all of them, whatever failed how often."""
        run = self.run()
        assert run.idle, self
        rows = Counter[tuple[object, ...]]((row["key"], row["o"], row["p"]) for row in run.rows("paid"))
        expected = self.joined(run)
        if self.guarantee is Guarantee.EXACTLY_ONCE:
            assert rows == expected, (self, run)
        else:
            assert set(expected) <= set(rows), (self, run)
        poisoned = {call for call, times in self.fails.items() if times == POISON}
        assert poisoned or self.how == "by hand" or not run.ended(End.DEAD), (self, run)


def drawn(seed: int, guarantee: Guarantee) -> Case:
    """A case: keys that one, several or no messages of a side have; calls that fail once, twice or always."""
    rng = Random(seed)
    most, keys = rng.choice([3, 6, 14]), rng.choice([2, 6, 20])
    orders = {o: rng.randrange(keys) for o in range(rng.randint(1, most))}
    payments = {p: rng.randrange(keys) for p in range(rng.randint(1, most))}
    calls: list[object] = [
        *(("orders", key, o) for o, key in orders.items()),
        *(("payments", key, p) for p, key in payments.items()),
        *(("behind", key, o, p) for o, key in orders.items() for p, other in payments.items() if key == other),
    ]
    share = rng.choice([0.0, 0.1, 0.4])
    fails = {call: rng.choice([1, 1, 2, POISON]) for call in calls if rng.random() < share}
    faults = rng.choice([Faults(), Faults(driver_deaths=0.05), Faults(worker_deaths=0.1), Faults(drops=0.02)])
    how = rng.choice(["inner", "left", "right", "full", "by hand"])
    return Case(orders, payments, how, fails, guarantee, faults, seed)
