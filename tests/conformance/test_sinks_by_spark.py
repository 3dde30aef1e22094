"""What every sink promises, asked of the Delta sink where Spark commits. A commit takes a second: a run draws a sample."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.sink_harness import SinkHarness

from stormproof.testing import SinkConformance

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.sampled(0.1)]


class TestDeltaBySpark(SinkConformance):
    @pytest.fixture(params=["delta-append", "delta-upsert", "delta-fold"])
    def harness(self, spark: SparkSession, request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
        harness = SinkHarness(request.param, tmp_path, None, committer="spark")
        harness.private = True  # no prepared file becomes the table's: Spark copies its rows
        return harness
