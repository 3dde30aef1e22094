"""A covering subset of the crash matrix on Spark: the chain over one failpoint of each kind of place."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chain import chain
from support.queues import prepared_database
from support.spark_driver import run_spark_driver

from stormproof.core.failpoint import FAILPOINTS
from stormproof.core.postgres.database import Database

COVERING = ("task.after_file", "prepare.after", "delta.after_log_entry", "postgres.after_rows")
"""Inside a Spark task; frozen and untouched; a sink that holds it without an answer; inside a sink's transaction."""


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_a_driver_on_spark_killed_in_every_kind_of_place(database: Database, tmp_path: Path) -> None:
    made = chain(prepared_database(database), tmp_path, run_spark_driver)
    for line in made.run([FAILPOINTS[name] for name in COVERING]):
        print(line)
    assert set(COVERING) <= set(made.killed_at)
