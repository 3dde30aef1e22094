"""Streaming queries that feed sinks and topologies, killed at every failpoint they pass; real Postgres, real Delta.

Failpoints that only a stream has: stream.before_register, stream.in_transaction, stream.after_register.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.crashes import KILLED
from support.queues import prepared_database
from support.stream_chain import StreamChain, points_of, require_exact
from support.stream_driver import (
    MORE_LINES,
    run_files_on_spark,
    run_rate_on_spark,
    run_two_and_rename_one_on_spark,
    run_two_on_spark,
)
from support.streams import Form, StreamCell, put_file, run_stream_driver
from support.verdicts import verified

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.database import Database

pytestmark = pytest.mark.postgres


@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", Form)
def test_a_query_killed_at_every_failpoint(form: Form, database: Database, tmp_path: Path, seed: int) -> None:
    cell = StreamCell(f"chain-{form}", form, tmp_path, prepared_database(database))
    points = points_of(form)
    random.Random(seed).shuffle(points)
    made = StreamChain(cell, run_stream_driver)
    for line in made.run(points):
        print(line)


@pytest.mark.spark(own=True)
@pytest.mark.timeout(600)
def test_a_rate_stream_on_spark_into_sinks(database: Database, tmp_path: Path) -> None:
    cell = StreamCell("spark-rate", Form.SINKS, tmp_path, prepared_database(database))
    made = StreamChain(cell, run_rate_on_spark, by_clock=True)
    for line in made.run([FAILPOINTS["task.after_file"]]):
        print(line)
    assert made.starts == 2


@pytest.mark.spark(own=True)
@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(600)
def test_a_checkpoint_of_spark_that_is_one_batch_old_is_refused(
    database: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Spark's offsets of the batch are the same ones, a place in the checkpoint's own list of files; the file is another."""
    cell = StreamCell("spark-old", Form.SINKS, tmp_path, prepared_database(database))
    put_file(cell.folder, ["a"])
    assert run_files_on_spark(cell) == 0
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(cell.checkpoint, old)
    put_file(cell.folder, ["b"])
    assert run_files_on_spark(cell) == 0
    cell.checkpoint.rename(new)
    old.rename(cell.checkpoint)
    put_file(cell.folder, ["c"])
    os.utime(cell.folder / "in" / "000002.txt", (0, 0))  # the oldest file: it is planned in place of the second one
    assert run_files_on_spark(cell) != 0
    assert "planned otherwise" in capfd.readouterr().err
    require_exact(cell, ["a", "b"])
    cell.lose_checkpoint()
    new.rename(cell.checkpoint)
    os.utime(cell.folder / "in" / "000002.txt")
    assert run_files_on_spark(cell) == 0
    require_exact(cell, ["a", "b", "c"])
    assert verified(cell.name, cell.database).clean


@pytest.mark.spark(own=True)
@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(600)
def test_two_functions_of_a_query_on_spark_and_one_that_was_renamed(
    database: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One feeds sinks and the other one a topology; the driver dies in the topology's second batch."""
    cell = StreamCell("spark-two", Form.SINKS, tmp_path, prepared_database(database))
    even, renamed = replace(cell.even, form=Form.TOPOLOGY), replace(cell, name="renamed", query=cell.name)
    for lines in (["a", "bb"], ["cc", "d"]):
        put_file(cell.folder, lines)
    assert run_two_on_spark(cell, "prepare.after=kill@4") == KILLED
    assert run_two_and_rename_one_on_spark(cell) == 0
    told = capfd.readouterr().err
    assert "Either 'spark-two' was renamed to 'renamed'" in told
    require_exact(cell, ["a", "bb", "cc", "d"])
    require_exact(even, ["bb", "cc"])
    require_exact(renamed, MORE_LINES)
    for name in (cell.name, even.name):
        assert verified(name, cell.database).clean
    (notice,) = verified("renamed", cell.database).notices
    assert notice.text.endswith("batches 0 to 1 are not in its sinks")
