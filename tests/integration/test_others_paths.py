"""Files whose paths a log spells otherwise than delta-rs does, or outside of the folder: a merge removes what was added.

Each case has rows in such files before the first batch. What the log removes must have been live, letter by letter.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.duck import connected
from support.queues import prepared_database
from support.sink_harness import SinkHarness

from stormproof import DeltaSink, MemorySource, Topology
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity
from stormproof.sinks.delta.features import Committer
from stormproof.sinks.delta.opening import Committers
from stormproof.sinks.delta.session import DeltaSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

IDENTITY = SinkIdentity("topology", "inc-1", "t")


def removed_but_not_live(table: Path) -> list[str]:
    """The paths that the log removes, and that no entry before had added; after a version 0 that is its checkpoint."""
    live, wrong = set[str](), list[str]()
    for entry in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in entry.read_text().splitlines() if line]
        gone = {action["remove"]["path"] for action in actions if "remove" in action}
        wrong += sorted(gone - live)
        live = live - gone | {action["add"]["path"] for action in actions if "add" in action}
    return wrong


def by_three_readers(spark: SparkSession, table: Path) -> list[Counter[tuple[Any, ...]]]:
    frame = spark.newSession().read.format("delta").load(str(table)).select("word", "n")
    found = connected().execute(f"select word, n from delta_scan('{table}')").fetchall()
    read = DeltaTable(table).to_pyarrow_table(columns=["word", "n"]).to_pylist()
    return [Counter(tuple(row) for row in frame.collect()), Counter(found), Counter((r["word"], r["n"]) for r in read)]


MADE = {
    "value": "(word STRING, n BIGINT) USING delta PARTITIONED BY (word)",
    "name": "(word STRING, n BIGINT, `größe` STRING) USING delta PARTITIONED BY (`größe`)",
}


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("checkpoint", ["none", "Spark's", "delta-rs'"])
@pytest.mark.parametrize("how", ["upsert", "fold"])
@pytest.mark.parametrize("made", MADE)
def test_a_file_is_removed_by_the_path_that_added_it(
    spark: SparkSession, made: str, how: str, checkpoint: str, tmp_path: Path
) -> None:
    harness = SinkHarness(f"delta-{how}", tmp_path, None)
    session, table = spark.newSession(), f"delta.`{harness.delta_path}`"
    every = "1" if checkpoint == "Spark's" else "100"
    session.sql(f"CREATE TABLE {table} {MADE[made]} TBLPROPERTIES ('delta.checkpointInterval' = '{every}')")
    session.sql(f"INSERT INTO {table} (word, n) VALUES ('Zürich', 1)")
    if checkpoint == "delta-rs'":
        DeltaTable(harness.delta_path).create_checkpoint()
    opened = harness.open()
    assert isinstance(opened, DeltaSession)
    assert opened.committer() is Committer.SPARK
    opened.commit(harness.prepare(opened, 1, None, {"Zürich": 10, "b": 20}), checked=True)
    session.sql(f"INSERT INTO {table} (word, n) VALUES ('Köln', 1)")
    opened.commit(harness.prepare(opened, 2, 1, {"Köln": 100, "b": 200}), checked=True)
    expected = {("Zürich", 10): 1, ("Köln", 100): 1, ("b", 200): 1}
    if how == "fold":
        expected = {("Zürich", 11): 1, ("Köln", 101): 1, ("b", 220): 1}
    assert by_three_readers(spark, harness.delta_path) == [expected] * 3
    opened.compact()
    opened.vacuum(0)
    assert by_three_readers(spark, harness.delta_path) == [expected] * 3
    assert removed_but_not_live(harness.delta_path) == []


@pytest.mark.sampled(0.5)
def test_a_row_of_a_city_with_an_umlaut_is_replaced(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    path = tmp_path / "cities"
    spark.sql(f"CREATE TABLE delta.`{path}` (id BIGINT, city STRING, n BIGINT) USING delta PARTITIONED BY (city)")
    spark.sql(f"INSERT INTO delta.`{path}` VALUES (1, 'Zürich', 0)")
    source = MemorySource(
        "m", [json.dumps({"id": 1, "city": "Zürich", "n": 1}).encode()], schema="id long, city string, n long"
    )
    topology = Topology("cities")
    topology.stream("s", source).into(DeltaSink(path, mode="upsert", key="id", order_by="n"))
    settings = Settings(database_url=prepared_database(database).adbc_uri, staging_dir=str(tmp_path / "staging"))
    topology.run(engine="inline", until_idle=True, settings=settings)
    assert DeltaTable(path).to_pyarrow_table().column("n").to_pylist() == [1]


@pytest.mark.sampled(0.5)
def test_control_a_merge_by_delta_rs_leaves_the_old_row(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SinkHarness("delta-fold", tmp_path, None)
    spark.sql(f"CREATE TABLE delta.`{harness.delta_path}` {MADE['value']}")
    spark.sql(f"INSERT INTO delta.`{harness.delta_path}` VALUES ('Zürich', 1)")
    monkeypatch.setattr(Committers, "of", lambda *_: Committer.DELTA_RS)
    session = harness.open()
    session.commit(harness.prepare(session, 1, None, {"Zürich": 10}), checked=True)
    assert harness.rows() == Counter({("Zürich", 1): 1, ("Zürich", 11): 1})
    assert removed_but_not_live(harness.delta_path) == ["word=Z%C3%BCrich/" + removed_name(harness.delta_path)]


def removed_name(table: Path) -> str:
    (file,) = (table / "word=Zürich").glob("*.parquet")
    return file.name


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("how", ["upsert", "fold"])
def test_rows_of_a_shallow_clone_are_replaced_and_its_source_is_left(
    spark: SparkSession, how: str, tmp_path: Path
) -> None:
    harness, source = SinkHarness(f"delta-{how}", tmp_path, None), tmp_path / "source"
    spark.sql(f"CREATE TABLE delta.`{source}` (word STRING, n BIGINT) USING delta")
    spark.sql(f"INSERT INTO delta.`{source}` VALUES ('a', 1), ('b', 2)")
    spark.sql(f"CREATE TABLE delta.`{harness.delta_path}` SHALLOW CLONE delta.`{source}`")
    session = harness.open()
    assert isinstance(session, DeltaSession)
    session.commit(harness.prepare(session, 1, None, {"a": 10}), checked=True)
    session.compact()
    session.vacuum(0)
    assert session.evidence(1, None).problems == ()
    frame = spark.newSession().read.format("delta").load(str(harness.delta_path)).select("word", "n")
    assert Counter(tuple(row) for row in frame.collect()) == {("a", 10 if how == "upsert" else 11): 1, ("b", 2): 1}
    assert Counter((r["word"], r["n"]) for r in DeltaTable(source).to_pyarrow_table().to_pylist()) == {
        ("a", 1): 1, ("b", 2): 1
    }  # fmt: skip


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("name", ["__delta_rs_source", "__delta_rs_target", "__delta_rs_operation"])
def test_a_column_may_have_a_name_that_delta_rs_uses_itself(spark: SparkSession, name: str, tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t", mode="upsert", key="word", order_by="n", partition_by=name)
    rows = pa.schema([("word", pa.string()), ("n", pa.int64()), (name, pa.string())])
    session = sink.open(IDENTITY, sink.input_of(SinkInput(rows)), 1)
    assert isinstance(session, DeltaSession)
    for txid in (1, 2):
        writer = session.writer().open_task(TaskContext("inc-1", txid, 1, 0), rows)
        writer.write(pa.record_batch([["a"], [txid], ["x"]], schema=rows))
        files = tuple(writer.close())
        session.commit(PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), 1, files), checked=True)
    session.compact()
    assert DeltaTable(tmp_path / "t").to_pyarrow_table().to_pylist() == [{"word": "a", "n": 2, name: "x"}]


@pytest.mark.sampled(0.3)
def test_timestamps_of_an_unknown_zone_are_neither_merged_nor_compacted(spark: SparkSession, tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    session, table = spark.newSession(), f"delta.`{harness.delta_path}`"
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    session.conf.set("spark.databricks.delta.write.utcTimestampPartitionValues", "false")
    session.sql(f"CREATE TABLE {table} (word STRING, n BIGINT, at TIMESTAMP) USING delta PARTITIONED BY (at)")
    for n in range(2):
        session.sql(f"INSERT INTO {table} VALUES ('a', {n}, TIMESTAMP '2024-01-01 10:00:00')")
    with pytest.raises(SinkRefused, match=r"partition timestamps without a zone \(2024-01-01 10:00:00\).*of that zone"):
        SinkHarness("delta-fold", tmp_path, None).open()
    opened = harness.open()
    assert isinstance(opened, DeltaSession)
    opened.commit(harness.prepare(opened, 1, None, {"b": 1}), checked=True)
    with pytest.raises(SinkRefused, match="partition timestamps without a zone"):
        opened.compact()
    opened.vacuum(0)
    assert session.table(table).where("at = TIMESTAMP '2024-01-01 10:00:00'").count() == 2
