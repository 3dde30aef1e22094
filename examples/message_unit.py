"""A message unit: several tuples under one message id, which complete, fail and are replayed as one.

    python examples/message_unit.py             # on Spark
    python examples/message_unit.py --inline    # in one process, without Spark

Each message is a shop's basket: a JSON array of its rows. The spout emits one tuple for each row, all of the same message.
If one row is bad, the whole basket fails, and none of its rows is in the table: half a basket is worse than none.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from stormproof import DeltaSink, FailTuple, PostgresQueue, Topology

QUEUE = "baskets"
BASKETS = [
    [{"basket": 1, "item": "tea", "pieces": 2}, {"basket": 1, "item": "milk", "pieces": 1}],
    [{"basket": 2, "item": "bread", "pieces": 1}],
    [{"basket": 3, "item": "salt", "pieces": 1}, {"basket": 3, "item": "rice", "pieces": -4}],  # fails as a whole
    [],  # a basket without rows is complete at once
]


def checked(basket: int, item: str, pieces: int) -> list[tuple[int, str, int]]:
    """A valid row, unchanged. An invalid one fails its message. A plain function is a bolt, too."""
    if pieces < 1:
        raise FailTuple(f"{pieces} pieces of {item}")
    return [(basket, item, pieces)]


def topology(lake: str) -> Topology:
    """The rows go to the Delta table `LAKE/rows`."""
    t = Topology("baskets")
    schema = "basket long, item string, pieces long"
    # unit="json": a message is an array of objects; unit="lines" would be one of lines.
    source = PostgresQueue(QUEUE, schema=schema, unit="json", max_attempts=2)
    rows = t.spout("baskets", source)
    good = t.bolt("check", checked, rows.shuffle(), schema=schema)
    t.sink(DeltaSink(f"{lake}/rows"), good)
    return t


def main(engine: Literal["spark", "inline"], lake: str = "lake") -> None:
    """Put the baskets, run until nothing is left, show the rows."""
    t = topology(lake)
    PostgresQueue(QUEUE).put([json.dumps(basket).encode() for basket in BASKETS])
    done = t.run("exactly-once", engine=engine, until_idle=True)
    print(f"{done.messages} baskets in {done.batches} batches, {done.dead_letters} dead letter")
    rows = QueryBuilder().register("t", DeltaTable(f"{lake}/rows")).execute("select * from t order by basket, item")
    for row in pa.table(rows).to_pylist():
        print(row)


if __name__ == "__main__":
    main("inline" if "--inline" in sys.argv else "spark")
