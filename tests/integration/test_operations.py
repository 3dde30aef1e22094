"""Every operation of a stream in one Spark job, in each mode of tracking; a state that executors read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.jobs import run_job, source
from support.operations import LINES, OPERATIONS, add_all, words_of
from support.queues import prepared_database, put

from stormproof import PostgresMap, PostgresQueue, PostgresSink, count
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database, connect
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.topology.stream import Topology

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


@pytest.mark.postgres
def test_executors_read_a_state_in_postgres(
    tmp_path: Path, spark: SparkSession, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches, in which each word finds what the batches before it counted, and is told what it comes to."""
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    monkeypatch.chdir(tmp_path)
    prepared_database(database)
    batches = [[f"a w{i} x".encode() for i in range(start, start + 4)] for start in range(0, 12, 4)]
    put(database, "lines", [line for lines in batches for line in lines])
    topology = Topology("stateful")
    words = words_of(topology, PostgresQueue("lines", schema="line string"))
    kept = words.group_by("word").persistent_aggregate(n=count(), state=PostgresMap("counts"), state_name="held")
    kept.new_values_stream().into(PostgresSink("news"))
    words.state_query("held", "word", schema="before long").into(PostgresSink("found"))
    options = RunOptions(
        guarantee=Guarantee.EXACTLY_ONCE, limit=Limit(4), message_timeout_s=240
    )  # cold workers on a busy machine
    done = topology.run(options=options, until_idle=True)
    assert (done.batches, done.messages, done.dead_letters) == (3, 12, 0)
    with connect(database, application_name="tests") as connection:
        news = connection.execute("select word, n from news").fetchall()
        found = connection.execute("select word, before from found").fetchall()
    sofar: Counter[str] = Counter()
    told: Counter[tuple[object, ...]] = Counter()
    asked: Counter[tuple[object, ...]] = Counter()
    for lines in batches:
        counts = Counter(word for line in lines for word in line.decode().split())
        for word, n in counts.items():
            asked[word, sofar.get(word)] += n
            told[word, sofar[word] + n] += 1
        sofar += counts
    assert Counter(news) == told
    assert Counter(found) == asked
