"""Spark compacts a table that delta-rs does not rewrite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from support.delta_tables import Made
from support.sink_harness import SinkHarness

from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.spark import METADATA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.sampled(0.3)]


def read(spark: SparkSession, harness: SinkHarness) -> list[tuple[str, int]]:
    rows = spark.read.format("delta").load(str(harness.delta_path)).collect()
    return sorted((row["word"], row["n"]) for row in rows)


def test_spark_compacts_a_table_with_deletion_vectors(spark: SparkSession, tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    Made(properties="'delta.enableDeletionVectors' = 'true'").make(spark, harness.delta_path)
    session = harness.open()
    assert isinstance(session, DeltaSession)
    for txid in (1, 2, 3):
        session.commit(harness.prepare(session, txid, txid - 1 or None, {f"w{txid}": txid}), checked=True)
    rows = read(spark, harness)
    done = session.compact()
    assert done.version is not None
    assert (done.removed, done.added) == (3, 1)
    assert len(DeltaTable(harness.delta_path).file_uris()) < 4
    assert read(spark, harness) == rows
    named = session.vacuum(0, dry_run=True)
    assert named
    assert sorted(session.vacuum(0)) == sorted(named)
    assert read(spark, harness) == rows
    again = harness.open(2)
    report = again.evidence(1, None)
    assert report.problems == ()
    assert [(e.txid, e.problem, e.gone) for e in report.entries] == [(t, None, False) for t in (1, 2, 3)]


def test_an_interrupted_use_of_the_committer_asks_the_jvm_nothing_and_the_next_one_puts_its_settings_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Behind a call that a signal has cut short, the next one would read that call's answer."""
    harness = SinkHarness("delta-append", tmp_path, None)
    Made(properties="'delta.enableDeletionVectors' = 'true'").make(spark, harness.delta_path)
    session = harness.open()
    assert isinstance(session, DeltaSession)
    committer = session.committers.spark
    with pytest.raises(KeyboardInterrupt), committer.labelled(None, {"by": "test"}) as used:
        raise KeyboardInterrupt
    assert used.conf.get(METADATA, None) == '{"by": "test"}'
    session.commit(harness.prepare(session, 1, None, {"w": 1}), checked=True)
    committer.set_property("user.note", "x")
    assert used.conf.get(METADATA, None) is None
    assert read(spark, harness) == [("w", 1)]
