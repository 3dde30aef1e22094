"""A join of two spouts: what it emits is anchored to two messages, an order and its payment.

    python examples/join_orders_and_payments.py             # on Spark
    python examples/join_orders_and_payments.py --inline    # in one process, without Spark

        orders   ---fields(number)---+
        (spout)                     +--> join --"default"--> paid    (Postgres table)
        payments ---fields(number)---+         --"unpaid"---> unpaid  (Postgres table)
        (spout)

The message of an order or a payment is done only when every tuple anchored to it is written. Where a tuple that is
anchored to both fails, both messages fail, and both are replayed.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import psycopg

from stormproof import Bolt, PostgresQueue, PostgresSink, Settings, Topology, Tuple

ORDERS = [
    {"number": 1, "item": "lamp"},
    {"number": 2, "item": "desk"},
    {"number": 3, "item": "chair"},
]
PAYMENTS = [
    {"number": 2, "cents": 19900},
    {"number": 1, "cents": 2900},
    {"number": 9, "cents": 500},  # there is no such order: it fails, and is a dead letter in the end
]


class Join(Bolt):
    """Holds both sides of a batch, and pairs them when the batch ends.

    It has two inputs. Both are grouped by `number`, so an order and its payment meet in one task.

    A bolt keeps nothing from one batch to the next, so it joins only what one batch holds:

    - an order without a payment goes to the stream "unpaid", to be looked up there later;
    - a payment without an order *fails*. It is replayed after a wait, by when its order may have arrived, and after
      `max_attempts` failures it is a dead letter.
    """

    def __init__(self) -> None:
        self.orders: dict[int, Tuple] = {}
        self.payments: dict[int, Tuple] = {}

    def execute(self, tuple: Tuple, /) -> None:
        """Hold the tuple, on the side of the spout that it came from."""
        side = self.orders if tuple.component == "orders" else self.payments
        side[tuple["number"]] = tuple

    def finish(self) -> None:
        """Emit the pairs with two anchors each; then ack or fail every tuple that is held, each exactly once."""
        for number, order in self.orders.items():
            payment = self.payments.get(number)
            if payment is None:
                self.collector.emit((number, order["item"]), stream="unpaid", anchors=order)
            else:
                self.collector.emit((number, order["item"], payment["cents"]), anchors=[order, payment])
        for order in self.orders.values():
            self.collector.ack(order)
        for number, payment in self.payments.items():
            if number in self.orders:
                self.collector.ack(payment)
            else:
                self.collector.fail(payment, f"there is no order {number} in this batch")


def queue(name: str, schema: str) -> PostgresQueue:
    """A queue of JSON objects whose failed messages are tried twice, a tenth of a second apart."""
    return PostgresQueue(name, schema=schema, max_attempts=2)


def topology() -> Topology:
    """Pairs go to the Postgres table `paid`, orders without a payment to `unpaid`."""
    t = Topology("orders-and-payments")
    orders = t.spout("orders", queue("orders", "number long, item string"))
    payments = t.spout("payments", queue("payments", "number long, cents long"))
    joined = t.bolt(
        "join",
        Join(),
        orders.fields("number"),
        payments.fields("number"),
        schema="number long, item string, cents long",  # of the stream "default"
        streams={"unpaid": "number long, item string"},
    )
    t.sink(PostgresSink("paid"), joined)
    t.sink(PostgresSink("unpaid"), joined["unpaid"])
    return t


def main(engine: Literal["spark", "inline"]) -> None:
    """Put orders and payments, run until nothing is left, show both tables."""
    t = topology()
    PostgresQueue("orders").put([json.dumps(order).encode() for order in ORDERS])
    PostgresQueue("payments").put([json.dumps(payment).encode() for payment in PAYMENTS])
    done = t.run("exactly-once", engine=engine, until_idle=True)
    print(f"{done.messages} messages in {done.batches} batches, {done.dead_letters} dead letter")
    with psycopg.connect(Settings().resolve_database().conninfo) as connection:
        for number, item, cents in connection.execute("select number, item, cents from paid order by number"):
            print(f"paid:   {number} {item} {cents / 100:.2f}")
        for number, item in connection.execute("select number, item from unpaid order by number"):
            print(f"unpaid: {number} {item}")


if __name__ == "__main__":
    main("inline" if "--inline" in sys.argv else "spark")
