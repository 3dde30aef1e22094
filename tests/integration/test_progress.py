"""What a run tells of a batch's job while it runs."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.queues import prepared_database, put

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database
from stormproof.core.settings import Settings
from stormproof.trident.run import EngineChoice
from stormproof.trident.watched_job import JobProgress

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

MESSAGES = 20
ALL = 2 * MESSAGES
"""Rows: each message is read, and the function called for it."""


def run(database: Database, folder: Path, engine: EngineChoice, heard: Heard, until: Path) -> None:
    put(prepared_database(database), "words", [b"w%d" % number for number in range(MESSAGES)])

    def work(word: str) -> str:
        while word == "w10" and not until.exists():
            threading.Event().wait(0.01)  # a function that waits for a service
        return word

    topology = Topology("words")
    queue = PostgresQueue("words", schema="word string", database=database)
    topology.stream("words", queue).map(work, "word", schema="word string").into(
        PostgresSink("words", database=database)
    )
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(folder))
    topology.run(engine=engine, settings=settings, until_idle=True, on_progress=heard.told)


class Heard:
    """Lets the function go on once the batch's job was told of in its middle."""

    def __init__(self, until: Path) -> None:
        self.until, self.all = until, list[JobProgress]()

    def told(self, job: JobProgress) -> None:
        self.all.append(job)
        if job.rows >= ALL // 2 + MESSAGES // 2:  # what was read, and half of the calls
            self.until.touch()
        raise ValueError("what it raises is logged")


def require(heard: Heard, caplog: pytest.LogCaptureFixture) -> None:
    rows = [job.rows for job in heard.all]
    assert rows == sorted(rows)
    assert any(ALL // 2 < one < ALL for one in rows)
    assert {(job.txid, job.attempt, job.messages) for job in heard.all} == {(1, 1, MESSAGES)}
    assert "on_progress raised at txid 1" in caplog.text


def test_a_job_is_told_of_while_it_runs(database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard(tmp_path / "go on")
    with caplog.at_level(logging.ERROR, "stormproof.job"):
        run(database, tmp_path, "inline", heard, heard.until)
    require(heard, caplog)


@pytest.mark.spark
def test_a_job_on_spark_is_told_of_while_it_runs(
    spark: SparkSession, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(tmp_path / "go on")
    with caplog.at_level(logging.ERROR, "stormproof.job"):
        run(database, tmp_path, SparkEngine(spark, 1), heard, heard.until)
    require(heard, caplog)
