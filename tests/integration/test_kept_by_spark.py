"""Aggregates that a Delta table keeps in several columns, where Spark commits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.fold_harness import VALUES, Folded, FoldHarness, comparable, rows_of

from stormproof import collect_set, first, last

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEPT = Folded(
    {},
    {
        "oldest": first("text", order_by="float64"),
        "newest": last("float64", order_by=["day", "text"]),
        "texts": collect_set("text", at_most=3),
        "days": collect_set("day", at_most=9),
    },
)


@pytest.mark.spark
def test_spark_folds_first_last_and_sets_as_one_batch_would(spark: SparkSession, tmp_path: Path) -> None:
    names = ("text", "float64", "day")
    values = {name: [None, *VALUES[name][1]] for name in names}
    rows = [
        (batch, {"key": key, **{n: v[(key + (at + 1) * batch) % len(v)] for at, (n, v) in enumerate(values.items())}})
        for key in range(12)
        for batch in range(3)
    ]
    batches = [KEPT.batch(rows_of(row for b, row in rows if b == number)) for number in range(3)]
    whole = KEPT.batch(rows_of(row for _, row in rows), tasks=1)
    harness = FoldHarness("delta-fold", tmp_path, None, committer="spark").take(KEPT)
    assert harness.commit_all(batches) == comparable(whole.to_pylist())
