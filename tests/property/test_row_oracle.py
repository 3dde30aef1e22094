"""Random tables under random steps: after each of them every reader finds the rows of a plain model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from support.row_oracle import MAKERS, STEPS, WITH_SPARK, Oracle

from stormproof.sinks.delta import features, opening, rewrite, transactional_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES: Final = range(40)
BY_SPARK: Final = range(4)
SOME, FEW_STEPS = 3, 5
"""Of these tables so many are played, by the run's seed; all with `--all`. ``make torture ARGS='--only rows'`` has 500."""
WITHIN = 20
"""So many seeds find a fault that is put back."""


def play(
    folder: Path,
    seeds: Iterable[int],
    makers: Sequence[str] = MAKERS,
    spark: SparkSession | None = None,
    steps: int = STEPS,
) -> Counter[str]:
    told = Counter[str]()
    for seed in seeds:
        oracle = Oracle(folder / str(seed), seed, spark, makers)
        oracle.play(steps)
        told += oracle.told
    return told


@pytest.mark.sampled(1.0)
@pytest.mark.timeout(600)
def test_readers_find_the_rows_of_the_model(tmp_path: Path, seed: int, pytestconfig: pytest.Config) -> None:
    seeds = TABLES if pytestconfig.getoption("--all") else random.Random(seed).sample(TABLES, SOME)
    told = play(tmp_path, seeds)
    assert {"delta-rs", "DuckDB"} <= told.keys()
    assert "checkpoint" in told or len(seeds) == SOME


@pytest.mark.sampled(1.0)
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_readers_find_them_where_spark_writes_too(
    tmp_path: Path, spark: SparkSession, seed: int, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--all"):
        play(tmp_path, BY_SPARK, WITH_SPARK, spark)
    else:
        play(tmp_path, random.Random(seed).sample(BY_SPARK, 1), WITH_SPARK, spark, FEW_STEPS)


def test_control_bounds_that_delta_rs_rounds_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transactional_table, opening):
        monkeypatch.setattr(module, "narrowed", lambda *_, **__: None)
    monkeypatch.setattr(rewrite, "is_rounded", lambda _: False)
    with pytest.raises(AssertionError, match=r"lacks|has beyond it"):
        play(tmp_path, range(WITHIN))


def test_control_removes_of_paths_that_are_spelled_otherwise_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "respelled_paths", lambda _: ())
    with pytest.raises(AssertionError, match=r"has beyond it \[\("):
        play(tmp_path, range(WITHIN), ("Spark",), steps=10)
