"""Structured Streaming with Storm's guarantees: an existing query writes through `foreachBatch`.

    python examples/foreach_batch.py

Orders arrive as JSON files. One query appends them to a Delta table and to a Postgres table, exactly once. Another one
feeds a topology that sums up what each customer spent; there an invalid order becomes a dead letter and holds up no other.
Kill the program anywhere and start it again: the tables are as if nothing had happened.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import DataFrame, SparkSession

from stormproof import DeltaSink, PostgresSink, Settings, Topology, exactly_once, spark_session, sum_
from stormproof.source import MicroBatches

SCHEMA = "number long, customer string, cents long"
ORDERS = [
    [{"number": 1, "customer": "Ada", "cents": 500}, {"number": 2, "customer": "Bob", "cents": 300}],
    [{"number": 3, "customer": "Ada", "cents": -1}, {"number": 4, "customer": "Bob", "cents": 200}],
]


def checked(customer: str, cents: int) -> tuple[str, int]:
    """A valid order, unchanged. An invalid one fails alone."""
    if cents < 0:
        raise ValueError(f"{cents} cents")
    return customer, cents


def spent(lake: str) -> Topology:
    """The sum that each customer spent, over all micro-batches, in the Delta table `LAKE/spent`."""
    t = Topology("spent")
    orders = MicroBatches("orders", SCHEMA, max_attempts=1)  # the query's columns are the messages' fields
    (
        t.stream("orders", orders)
        .map(checked, "customer", "cents", schema="customer string, cents long")
        .group_by("customer")
        .persistent_aggregate(cents=sum_("cents"))
        .into(DeltaSink(f"{lake}/spent"))
    )
    return t


def run_query(spark: SparkSession, inbox: str, checkpoint: str, function: Callable[[DataFrame, int], None]) -> None:
    """Any streaming query will do; this one takes a file at a time, until none is left."""
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(inbox)
    query = stream.writeStream.foreachBatch(function).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()


def main(lake: str = "lake", inbox: str = "inbox") -> None:
    """Put the orders, run both queries, show the tables."""
    Path(inbox).mkdir(exist_ok=True)
    for number, orders in enumerate(ORDERS):
        new = Path(inbox, f".{number}.json")
        new.write_text("\n".join(json.dumps(order) for order in orders))
        new.rename(Path(inbox, f"{number}.json"))
    spark = spark_session(Settings())  # a session of your own will do, too

    raw = exactly_once(
        DeltaSink(f"{lake}/orders"),
        PostgresSink("orders"),
        name="orders",
        on_batch=lambda done: print(f"batch {done.batch}: {done.outcome}, {done.rows} rows, txid {done.txids[0]}"),
    )
    run_query(spark, inbox, "checkpoints/orders", raw)
    raw.close()

    fed = spent(lake).foreach_batch()
    run_query(spark, inbox, "checkpoints/spent", fed)
    fed.close()
    print(f"{fed.statistics.messages} orders, {fed.statistics.dead_letters} dead letter")

    for table, order in (("orders", "number"), ("spent", "customer")):
        rows = QueryBuilder().register("t", DeltaTable(f"{lake}/{table}")).execute(f"select * from t order by {order}")
        for row in pa.table(rows).to_pylist():
            print(row)


if __name__ == "__main__":
    main()
