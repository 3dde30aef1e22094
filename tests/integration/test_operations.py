"""Every operation of a stream in one Spark job: batch by batch, message by message, and without tracking."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.jobs import run_job, source
from support.operations import LINES, OPERATIONS, add_all

from stormproof.core.engine.spark import SparkEngine
from stormproof.trident.stream import Topology

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(("tracked", "per_message"), [(True, False), (True, True), (False, False)])
def test_every_operation_on_spark(tmp_path: Path, spark: SparkSession, tracked: bool, per_message: bool) -> None:
    topology = add_all(Topology("all"), source(), tmp_path)
    ran = run_job(SparkEngine(spark, 2), topology, LINES, tmp_path, tracked=tracked, per_message=per_message)
    assert ran.mismatches == ()
    assert ran.report.violations == ()
    assert ran.lost() == []
    for name, (_, rows) in OPERATIONS.items():
        got = Counter(tuple(row.values()) for row in ran.rows[f"{name}_out"])
        assert got == Counter(rows), name
