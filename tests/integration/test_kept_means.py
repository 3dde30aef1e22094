"""A mean that is kept across batches: as sum and count, and in Postgres shown beside them."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from support.typed_rows import put

from stormproof import MemorySink, MemorySource, Topology, mean
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput
from stormproof.core.graph.aggregation import MEAN
from stormproof.core.postgres.database import Database
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.testing import simulate


def measured(line: str) -> tuple[str, float | None]:
    sensor, degrees = line.split()
    return sensor, None if degrees == "-" else float(degrees)


def test_the_halves_of_a_mean_are_folded_over_batches_and_null_counts_nothing() -> None:
    topology = Topology("means")
    (
        topology.stream("lines", MemorySource("lines", schema="line string"))
        .map(measured, schema="sensor string, degrees double")
        .group_by("sensor")
        .persistent_aggregate(warmth=mean("degrees"))
        .into(MemorySink("out"))
    )
    lines = ["a 1", "b -", "a -", "a 4", "b 2", "a 4"]
    run = simulate(topology, lines, guarantee="exactly-once")
    found = {row["sensor"]: (row["warmth_sum"], row["warmth_count"]) for row in run.rows("out")}
    assert found == {"a": (9.0, 3), "b": (2.0, 1)}


@pytest.mark.postgres
def test_a_table_that_is_made_shows_the_mean(database: Database, tmp_path: Path) -> None:
    total = pa.field("m_sum", pa.decimal128(38, 2), metadata={MEAN: b"m"})
    schema = pa.schema([pa.field("k", pa.string()), total, pa.field("m_count", pa.int64())])
    input_ = SinkInput.for_fold(schema, ("k",), {"m_sum": Fold.SUM, "m_count": Fold.SUM})
    sink = PostgresSink("t", name="t", database=database, staging=tmp_path)
    for txid, (a, n) in enumerate(((100, 2), (500, 2)), start=1):
        sums = pa.array([a, 0]).cast(pa.decimal128(38, 2))
        put(sink, pa.table([pa.array(["a", "b"]), sums, pa.array([n, 0])], schema=schema), input_, txid=txid)
    with psycopg.connect(database.conninfo) as connection:
        assert connection.execute("select k, m from t order by k").fetchall() == [("a", 150.0), ("b", None)]
