"""`audit verify --deep` of tables that Spark commits to, with deletion vectors and with column mapping.

Whatever somebody changes in them is found, or the report says that it was not looked for; and no table that is as it should
be raises an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from support.crashes import Cell
from support.delta_tables import Made
from support.operated import Operated
from support.topologies import source_of

from stormproof import DeltaSink, Topology

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
NAME: Final = "sparked"
LINES: Final = [f"{i}|k{i % 5},{i};k{i % 3},{i + 100}".encode() for i in range(12)]
COLUMNS: Final = "k string, at bigint, made string"
LINEAGE: Final = "_txid bigint, _message_id string"
UPSERT: Final[dict[str, Any]] = {"mode": "upsert", "key": "k", "order_by": "at"}
VECTORS, MAPPED = "'delta.enableDeletionVectors' = 'true'", "'delta.columnMapping.mode' = '{}'"
PROPERTIES: Final[Mapping[str, str]] = {
    "deletion vectors": VECTORS,
    "columns mapped by name": MAPPED.format("name"),
    "columns mapped by id": MAPPED.format("id"),
    "both": f"{VECTORS}, {MAPPED.format('name')}",
}
TABLES: Final = ("plain", "traced", "newest", "newest_traced")
"""The sinks, which are called as their tables: an append, an append with lineage columns; an upsert, one with them."""
APPENDS: Final = frozenset({"plain", "traced"})


def rows_of(line: str) -> list[tuple[str, int, str]]:
    number, _, pieces = line.partition("|")
    return [(k, int(at), number) for k, at in (one.split(",") for one in pieces.split(";") if one)]


def build(cell: Cell) -> Topology:
    lake = cell.folder / "lake"
    t = Topology(NAME)
    rows = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(rows_of, "line", schema=COLUMNS)
    rows.into(
        DeltaSink(lake / "plain", name="plain", content_digests=True, committer="spark"),
        DeltaSink(lake / "traced", name="traced", lineage=True, content_digests=True, committer="spark"),
        DeltaSink(lake / "newest", name="newest", **UPSERT, committer="spark"),
        DeltaSink(lake / "newest_traced", name="newest_traced", **UPSERT, lineage=True, committer="spark"),
    )
    return t


def at(run: Operated, table: str) -> str:
    return f"delta.`{run.cell.folder / 'lake' / table}`"


@pytest.fixture(params=PROPERTIES)
def run(operated: Operated, spark: SparkSession, request: pytest.FixtureRequest) -> Operated:
    """The topology has run to its end over tables that Spark made."""
    found = replace(operated, cell=replace(operated.cell, build=build, batch_messages=3))
    for table in TABLES:
        columns = f"{COLUMNS}, {LINEAGE}" if "traced" in table else COLUMNS
        Made(columns, properties=PROPERTIES[request.param]).make(spark, found.cell.folder / "lake" / table)
    found.put(*LINES)
    found.run(build(found.cell))
    return found


def verified(run: Operated, *options: str, status: int = 4) -> tuple[set[str], dict[str, list[str]], dict[str, int]]:
    """The sinks with violations; what was left out, and how many rows were compared, by sink."""
    report = run.command("audit", "verify", NAME, "--deep", *options, status=status)
    assert report["unknowns"] == []
    return (
        {violation["sink"] for violation in report["violations"]},
        {table["sink"]: table["left_out"] for table in report["tables"]},
        {table["sink"]: table["rows"] for table in report["tables"]},
    )


def test_no_alarm_over_tables_that_are_as_they_should_be(run: Operated, spark: SparkSession) -> None:
    found, left_out, rows = verified(run)
    assert found == set()
    assert {sink: rows[sink] for sink in APPENDS} == dict.fromkeys(APPENDS, 24), left_out
    assert all(left_out[sink] for sink in set(TABLES) - APPENDS)
    for table in TABLES:
        spark.sql(f"OPTIMIZE {at(run, table)}")
    found, left_out, rows = verified(run)
    assert found == set()
    assert {sink: rows[sink] for sink in APPENDS} == dict.fromkeys(APPENDS, 24), left_out


PLANTS: Final[Mapping[str, str]] = {
    "a row is changed": "UPDATE {0} SET made = 'forged' WHERE at = {1}",
    "a key is there twice": "INSERT INTO {0} SELECT * FROM {0} WHERE at = {1}",
}


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("what", PLANTS)
def test_a_planted_change_is_found(run: Operated, spark: SparkSession, what: str) -> None:
    for table in TABLES:
        lowest = spark.sql(f"SELECT min(at) AS at FROM {at(run, table)}").collect()[0]["at"]
        spark.sql(PLANTS[what].format(at(run, table), lowest))
    found, left_out, _ = verified(run, status=1)
    assert found | {sink for sink, texts in left_out.items() if texts} == set(TABLES)
    assert found == set(TABLES), left_out
