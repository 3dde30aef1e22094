"""Streaming queries that feed sinks and topologies, killed at every failpoint they pass; real Postgres, real Delta.

Failpoints that only a stream has: stream.before_register, stream.in_transaction, stream.after_register.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.queues import prepared_database
from support.stream_chain import StreamChain, points_of
from support.stream_driver import run_files_on_spark, run_rate_on_spark
from support.streams import Form, StreamCell, run_stream_driver

from stormproof.core.failpoint import FAILPOINTS
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", Form)
def test_a_query_killed_at_every_failpoint(form: Form, database: Database, tmp_path: Path, seed: int) -> None:
    cell = StreamCell(f"chain-{form}", form, tmp_path, prepared_database(database))
    points = points_of(form)
    random.Random(seed).shuffle(points)
    made = StreamChain(cell, run_stream_driver)
    for line in made.run(points):
        print(line)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_files_on_spark_into_a_topology(database: Database, tmp_path: Path) -> None:
    cell = StreamCell("spark-files", Form.TOPOLOGY, tmp_path, prepared_database(database))
    for line in StreamChain(cell, run_files_on_spark).run([FAILPOINTS["prepare.after"]]):
        print(line)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_rate_stream_on_spark_into_sinks(database: Database, tmp_path: Path) -> None:
    cell = StreamCell("spark-rate", Form.SINKS, tmp_path, prepared_database(database))
    made = StreamChain(cell, run_rate_on_spark, by_clock=True)
    for line in made.run([FAILPOINTS["task.after_file"], FAILPOINTS["prepare.after"]]):
        print(line)
    assert made.starts == 3
