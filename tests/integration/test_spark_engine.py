"""The same jobs on Spark: equal to the inline engine's, through repeated tasks and killed workers."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import RDD, TaskContext
from pyspark.sql import SparkSession
from support import jvm
from support.jobs import FIRST_ID, Ran, readers_of, run_job, source

from stormproof.core.base.errors import (
    JobFailed,
    MachineUnavailable,
    MachineUnfit,
    SettingsError,
    StormproofError,
    TopologyError,
)
from stormproof.core.contract.source import SliceReader
from stormproof.core.engine.frame import require_settings
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.pending.memory import MemorySliceReader
from stormproof.core.start.preflight import PackageProbe, marked_places, package_fingerprint
from stormproof.core.task.job import CONTROL, WireRow
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.aggregate import count, sum_
from stormproof.trident.topology.stream import Stream, Topology

pytestmark = pytest.mark.spark

LINES = [f"w{i % 7} w{i % 3} \u00e9{i}".encode() for i in range(300)] + [b"", b"bad \xff", b"fail me"]


@pytest.fixture
def engine(spark: SparkSession) -> SparkEngine:
    return SparkEngine(spark, 2)


def split(line: str) -> list[str]:
    if line.startswith("fail"):
        raise ValueError("asked to fail \x00")
    return line.split()


def words(t: Topology, function: Callable[[str], object] = split) -> Stream:
    return t.stream("lines", source()).flat_map(function, "line", schema="word string", name="split")


def word_count(tmp: Path, function: Callable[[str], object] = split) -> Topology:
    t = Topology("words")
    words(t, function).group_by("word").persistent_aggregate(n=count()).into(MemorySink("counts", staging=tmp))
    return t


def truth(payloads: list[bytes]) -> list[tuple[str, int]]:
    good = [p for p in payloads if p not in LINES[-2:]]
    return sorted(Counter(w for p in good for w in p.decode().split()).items())


def branches(tmp: Path) -> Topology:
    t = Topology("branches")
    stream = words(t)
    stream.into(MemorySink("words", staging=tmp))
    often = stream.group_by("word").agg(n=count())
    often.into(MemorySink("counts", staging=tmp))
    often.group_by("n").agg(words=count(), total=sum_("n")).into(MemorySink("by_n", staging=tmp))
    return t


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("build", [word_count, branches])
def test_both_engines_agree(
    engine: SparkEngine, tmp_path: Path, build: Callable[[Path], Topology], tracked: bool
) -> None:
    def run(on: Engine) -> Ran:
        return run_job(on, build(tmp_path), LINES, tmp_path, tracked=tracked)

    inline, spark = run(InlineEngine(2)), run(engine)
    assert spark.mismatches == inline.mismatches == ()
    assert spark.sorted("counts") == truth(LINES)
    assert {s: spark.sorted(s) for s in spark.rows} == {s: inline.sorted(s) for s in inline.rows}
    assert spark.report.failures == inline.report.failures
    assert {f.id - FIRST_ID for f in spark.report.failures} == {301, 302}
    assert spark.report.ack_xor == inline.report.ack_xor
    assert [f.digest for f in spark.report.files] and spark.report.tuples == inline.report.tuples  # noqa: PT018


def test_nothing_to_read(engine: SparkEngine, tmp_path: Path) -> None:
    ran = run_job(engine, word_count(tmp_path), [], tmp_path)
    assert (ran.rows, ran.mismatches) == ({"counts": []}, ())


@dataclass(frozen=True)
class Once:
    """Does something the first time that any task comes by."""

    mark: Path
    action: str

    def __call__(self, line: str) -> list[str]:
        if line.startswith("w3") and self._first():
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt("not the message's fault")  # what a task answers for, not the message
        return split(line)

    def _first(self) -> bool:
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


@dataclass(frozen=True)
class RaisesOnce(MemorySliceReader):
    mark: str = ""

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        yield from super().read(seed, excluded, batch_rows)
        if Once(Path(self.mark), "raise")._first():  # pyright: ignore[reportPrivateUsage]
            raise ConnectionError("the first attempt's connection is lost after the last row")


def test_a_task_that_fails_once_is_repeated_and_counts_once(engine: SparkEngine, tmp_path: Path) -> None:
    ids = tuple(FIRST_ID + i for i in range(len(LINES)))
    reader = RaisesOnce(ids, tuple(LINES), str(tmp_path / "mark"))
    ran = run_job(engine, word_count(tmp_path), LINES, tmp_path, readers=(reader,))
    assert (tmp_path / "mark").exists()
    assert ran.mismatches == ()
    assert ran.sorted("counts") == truth(LINES)


def test_a_killed_worker_is_replaced_and_counts_once(engine: SparkEngine, tmp_path: Path) -> None:
    ran = run_job(engine, word_count(tmp_path, Once(tmp_path / "mark", "kill")), LINES, tmp_path)
    assert (tmp_path / "mark").exists()
    assert ran.mismatches == ()
    assert ran.sorted("counts") == truth(LINES)


@dataclass(frozen=True)
class Breaking(MemorySliceReader):
    error: Exception

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        raise self.error


def test_what_a_task_dies_of_is_told_in_few_words(engine: SparkEngine, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="LookupError: no such page") as raised:
        run_job(engine, word_count(tmp_path), LINES, tmp_path, readers=(Breaking((), (), LookupError("no such page")),))
    assert len(str(raised.value).splitlines()) < 6
    assert str(raised.value.details["outside"]).startswith("LookupError (test_spark_engine.py:")


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), MachineUnavailable),
        (ConnectionError("the store is gone"), MachineUnavailable),
        (PermissionError(errno.EACCES, "Permission denied"), MachineUnfit),
        (ModuleNotFoundError("No module named 'orders'", name="orders"), MachineUnfit),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_machines_fault_arrives_as_one(
    engine: SparkEngine, tmp_path: Path, error: Exception, cls: type[StormproofError]
) -> None:
    with pytest.raises(cls, match="No message is to blame") as raised:
        run_job(engine, word_count(tmp_path), LINES, tmp_path, readers=(Breaking((), (), error),))
    assert raised.value.details["error"] == type(error).__name__


def test_every_slot_is_asked_before_the_first_batch(engine: SparkEngine, tmp_path: Path) -> None:
    with marked_places([("the staging folder", tmp_path)]) as folders:
        engine.ask((PackageProbe(package_fingerprint()), *folders))
        next(tmp_path.iterdir()).unlink()
        with pytest.raises(MachineUnfit, match="is not the driver's folder"):
            engine.ask(folders)
    assert list(tmp_path.iterdir()) == []


def test_our_own_errors_arrive_as_they_were_raised(engine: SparkEngine, tmp_path: Path) -> None:
    t = Topology("late")
    late = words(t).group_by("word").agg(n=count()).map(lambda w: 1 // 0, "word", schema="x long", name="div")
    late.into(MemorySink("rows", staging=tmp_path))
    with pytest.raises(JobFailed, match="'div' failed after a group") as raised:
        run_job(engine, t, LINES, tmp_path)
    assert raised.value.details["component"] == "div"
    assert list(tmp_path.iterdir()) == []


def test_a_function_that_cannot_travel_is_refused(engine: SparkEngine, tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(TopologyError, match="lock"):
        run_job(engine, word_count(tmp_path, lambda line: [str(lock)]), LINES, tmp_path)


@pytest.mark.parametrize("copies", [0, 2, 3])
@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_rows_lost_doubled_or_tripled_between_stages_are_seen(
    spark: SparkSession, tmp_path: Path, copies: int, control: bool, tracked: bool
) -> None:
    def between(stage: int, sent: RDD[bytes]) -> RDD[bytes]:
        def changed(rows: Iterable[bytes]) -> Iterator[bytes]:
            for sent in rows:
                row = WireRow.from_bytes(sent)
                is_hit = row.source == 1 and (row.edge == CONTROL) == control
                yield from [sent] * (copies if is_hit else 1)

        return sent.mapPartitions(changed)

    ran = run_job(SparkEngine(spark, 2, between=between), word_count(tmp_path), LINES, tmp_path, tracked=tracked)
    assert ran.report.violations


def places_of(small_job_ms: float, spark: SparkSession, staging: Path) -> tuple[set[str], set[str]]:
    """The stages and tasks of Spark's that the two stages of a topology ran in."""

    def place(_: str) -> list[str]:
        context = TaskContext.get()
        assert context is not None
        return [f"{context.stageId()}/{context.partitionId()}"]

    def both(first: str) -> list[tuple[str, str]]:
        return [(first, second) for second in place(first)]

    t = TopologyGraph("places")
    before = t.bolt("before", place, t.spout("lines", source()).none(), schema="first string")
    behind = t.bolt("behind", both, before.shuffle(), schema="first string, second string")
    t.sink(MemorySink("places", staging=staging), behind)
    rows = run_job(SparkEngine(spark, 2, small_job_ms=small_job_ms), t, LINES[:60], staging).rows["places"]
    return {str(row["first"]) for row in rows}, {str(row["second"]) for row in rows}


def test_a_small_job_is_one_task_of_sparks(spark: SparkSession, tmp_path: Path) -> None:
    before, behind = places_of(math.inf, spark, tmp_path)
    assert before == behind
    assert len(before) == 1
    before, behind = places_of(0, spark, tmp_path)
    assert before.isdisjoint(behind)
    assert len(before) == len(behind) == 2


LONG = [b"w" * (1 << 21)] * 2
"""More than PySpark sends with each task."""


@pytest.mark.parametrize("small_job_ms", [0, math.inf])
@pytest.mark.parametrize("fails", [True, False])
def test_of_what_is_too_long_to_go_with_each_task_nothing_is_left(
    spark: SparkSession, tmp_path: Path, small_job_ms: float, fails: bool
) -> None:
    context: Any = spark.sparkContext
    kept = Path(context._temp_dir)
    before = set(kept.iterdir())
    engine = SparkEngine(spark, 2, small_job_ms=small_job_ms)
    readers: tuple[SliceReader, ...] = readers_of(LONG)
    if fails:
        readers = (*readers, Breaking((), (), LookupError("no such page")))
    with pytest.raises(JobFailed, match="no such page") if fails else nullcontext():
        assert run_job(engine, word_count(tmp_path), LONG, tmp_path, readers=readers).sorted("counts") == truth(LONG)
    assert set(kept.iterdir()) == before


def test_a_running_job_is_cancelled(engine: SparkEngine, tmp_path: Path) -> None:
    started, fifo = tmp_path / "started", tmp_path / "fifo"
    os.mkfifo(started)
    os.mkfifo(fifo)

    def hang(line: str) -> list[str]:
        with open(started, "w"):
            pass
        with open(fifo):  # nobody ever writes
            return []

    def cancel() -> None:
        with open(started):  # opens once a task has come that far
            pass
        engine.cancel(("life", 1, 1))

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(JobFailed, match="cancelled"):
        run_job(engine, word_count(tmp_path, hang), [b"a"], tmp_path)
    canceller.join()
    assert run_job(engine, word_count(tmp_path), LINES, tmp_path).mismatches == ()


def test_a_query_refuses_a_session_that_believes_in_determinism_and_a_topology_takes_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    key = "spark.sql.shuffle.orderIndependentChecksum.enabled"
    other = spark.newSession()
    other.conf.set(key, "false")
    with pytest.raises(SettingsError, match=key) if spark_line().sees_repeated_tasks else nullcontext():
        require_settings(other)
    assert run_job(SparkEngine(other), word_count(tmp_path), LINES, tmp_path).mismatches == ()


START = """
import os
import sys
from pathlib import Path
import pandas
from pyspark.sql.pandas.utils import require_minimum_pandas_version
from stormproof.core.engine.spark import spark_session
from stormproof.core.start.settings import Settings
home, level, options = Path(sys.argv[1]), sys.argv[2], os.environ["SPARK_SUBMIT_OPTS"]
session = spark_session(Settings(master="local[1]", home=home, spark={"spark.log.level": level}))
assert os.environ["SPARK_SUBMIT_OPTS"] == options, "which the program's children inherit"
pandas.__version__ = "3.0.0"
require_minimum_pandas_version()  # PySpark calls it somewhere in a start
session._jvm.org.apache.logging.log4j.LogManager.getLogger("tests").warn("a word of warning")
session.stop()
"""


@pytest.mark.parametrize(
    ("level", "own", "said"),
    [
        ("OFF", "", ""),
        ("WARN", "", r"[\d/]+ [\d:]+ WARN tests: a word of warning\n"),
        ("WARN", "appender.a.layout.pattern = mine %m%n", r"(mine .*\n)*mine a word of warning\n"),
    ],
    ids=["by default", "control: a warning", "a configuration of the user's"],
)
def test_spark_starts_without_a_line_of_its_own(tmp_path: Path, level: str, own: str, said: str) -> None:
    environment = {**os.environ, jvm.VARIABLE: jvm.options()}  # without what a session of this process added
    if own:
        kind = "appender.a.type = Console\nappender.a.name = a\nappender.a.target = SYSTEM_ERR\n"
        layout = f"appender.a.layout.type = PatternLayout\n{own}\nrootLogger = warn, a\n"
        (tmp_path / "log4j2.properties").write_text(kind + layout)
        environment["SPARK_CONF_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", START, str(tmp_path / "home"), level]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    written = done.stderr.replace("WARNING: Using incubator modules: jdk.incubator.vector\n", "")  # Java's own
    assert re.fullmatch(said, written), written
