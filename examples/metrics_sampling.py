"""At-most-once: a sample of metrics, where a loss does less harm than a double count or the cost of tracking.

    python examples/metrics_sampling.py             # on Spark
    python examples/metrics_sampling.py --inline    # in one process, without Spark

With `ackers=0` nothing is tracked. Each message is confirmed when it is opened, before it is processed. A message that
fails is lost, and so is one in flight when the driver dies; nothing is ever written twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Literal

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from stormproof import DeltaSink, FailTuple, IteratorSource, Topology, count, sum_

READINGS = 1_000
ONE_IN = 10


def readings() -> Iterator[str]:
    """A stand-in for the client of a metrics bus: any iterator of messages is a source."""
    for number in range(READINGS):
        yield json.dumps({"number": number, "host": f"host-{number % 3}", "busy_ms": number % 50})
    yield "not a metric"  # does not decode: gone


def sampled(number: int, host: str, busy_ms: int) -> list[tuple[str, int]]:
    """One reading in ten. A bolt that returns nothing for a tuple filters it out."""
    if busy_ms < 0:
        raise FailTuple("time does not run backwards")
    return [(host, busy_ms)] if number % ONE_IN == 0 else []


def topology(lake: str) -> Topology:
    """Each batch appends one row for each host to the Delta table `LAKE/metrics`."""
    t = Topology("metrics", ackers=0)  # then the guarantee is at-most-once, and another one is refused
    spout = t.spout("readings", IteratorSource("readings", readings, schema="number long, host string, busy_ms long"))
    sample = t.bolt("sample", sampled, spout, schema="host string, busy_ms long")
    t.following(sample).group_by("host").agg(n=count(), busy_ms=sum_("busy_ms")).into(DeltaSink(f"{lake}/metrics"))
    return t


def main(engine: Literal["spark", "inline"], lake: str = "lake") -> None:
    """Run until nothing is left; show what the sample says."""
    t = topology(lake)
    done = t.run(engine=engine, until_idle=True)
    print(f"{done.guarantee}: {done.messages} messages, {done.failed} failed and gone, {done.replayed} replayed")
    query = (
        "select host, sum(n) as n, sum(busy_ms) as busy_ms from t group by host order by host"  # sums over all batches
    )
    for row in pa.table(QueryBuilder().register("t", DeltaTable(f"{lake}/metrics")).execute(query)).to_pylist():
        print(f"{row['host']}: {row['n']} sampled, {row['busy_ms'] / row['n']:.1f} ms busy on average")


if __name__ == "__main__":
    main("inline" if "--inline" in sys.argv else "spark")
