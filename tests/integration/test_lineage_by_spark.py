"""Lineage columns through Spark: as engine, as committer, and as the frames of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from support.jobs import run_job, source
from support.operated import Operated
from support.topologies import source_of

from stormproof import DeltaSink, Topology, count, exactly_once, max_
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.start.settings import Settings
from stormproof.sink import Lineage
from stormproof.sinks.stores.memory import MemorySink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.sampled(0.34)]

NAME = "traced"
LINES = [f"w{i % 7} w{i % 3} v{i}".encode() for i in range(300)]


def words_of(line: str) -> list[tuple[str, str, int]]:
    return [(word, line, int(line.rpartition("v")[2])) for word in line.split()]


def test_both_engines_store_the_same_lineage(spark: SparkSession, tmp_path: Path) -> None:
    def build() -> Topology:
        t = Topology("words")
        words = t.stream("lines", source()).flat_map(words_of, "line", schema="word string, made string, at bigint")
        words.into(MemorySink("words", staging=tmp_path, lineage=True))
        kept = words.group_by("word").persistent_aggregate(n=count())
        kept.into(MemorySink("counts", staging=tmp_path, lineage=Lineage(message=None)))
        return t

    inline = run_job(InlineEngine(2), build(), LINES, tmp_path)
    ours = run_job(SparkEngine(spark, 2), build(), LINES, tmp_path)
    assert {sink: ours.sorted(sink) for sink in ours.rows} == {sink: inline.sorted(sink) for sink in inline.rows}
    assert len(ours.sorted("words")) == 3 * len(LINES)
    assert {row[0]: row[1] for row in ours.sorted("counts")}["w0"] == 143


def test_spark_commits_the_lineage_that_delta_rs_commits(spark: SparkSession, operated: Operated) -> None:
    operated = replace(operated, cell=replace(operated.cell, batch_messages=20))  # each commit by Spark takes seconds
    folder = operated.cell.folder / "lake"
    upsert: dict[str, Any] = {"mode": "upsert", "key": "word", "order_by": "at"}

    def build() -> Topology:
        t = Topology(NAME)
        stream = t.stream("lines", source_of(operated.cell.queue, operated.cell.database))
        words = stream.flat_map(words_of, "line", schema="word string, made string, at bigint")
        kept = words.group_by("word").persistent_aggregate(n=count(), newest=max_("at"))
        for by in ("spark", "delta-rs"):
            words.into(DeltaSink(folder / f"added.{by}", committer=by, lineage=True))
            words.into(DeltaSink(folder / f"newest.{by}", committer=by, lineage=True, **upsert))
            kept.into(DeltaSink(folder / f"counts.{by}", committer=by, lineage=Lineage(message=None)))
        return t

    for part in (LINES[:20], LINES[10:40]):
        operated.put(*part)
        operated.run(build())
    for table in ("added", "newest", "counts"):
        one, other = (
            sorted(map(str, DeltaTable(folder / f"{table}.{by}").to_pyarrow_table().to_pylist()))
            for by in ("spark", "delta-rs")
        )
        assert one == other
        assert all("'_txid': None" not in row for row in one)
    assert len(one) == 7 + 40  # w0 to w6, v0 to v39
    operated.verify()


def test_a_job_on_spark_frames_stores_its_key_as_the_message(spark: SparkSession, operated: Operated) -> None:
    folder = operated.cell.folder / "lake"
    frame = spark.range(100).selectExpr("id", "id % 7 as k")
    url = operated.cell.database.sqlalchemy_url.render_as_string(hide_password=False)
    settings = Settings(database_url=url, home=operated.cell.folder)
    with exactly_once(DeltaSink(folder / "job", lineage=True), name="nightly", settings=settings) as job:
        for key in ("2026-01-01", "2026-01-02", "2026-01-01"):
            job.once(frame, key=key)
    found = DeltaTable(folder / "job").to_pyarrow_table().to_pylist()
    assert len(found) == 200
    assert {(row["_txid"], row["_message_id"]) for row in found} == {(1, "2026-01-01"), (2, "2026-01-02")}
