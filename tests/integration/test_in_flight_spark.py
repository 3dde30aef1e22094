"""Batches in flight on real Spark: their jobs share two cores, and what befalls one of them befalls no other."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from support.memory_run import World
from support.poison import POISON, Poisoning, Split

from stormproof import MemorySink, Topology
from stormproof.core.base.clock import SystemClock
from stormproof.core.base.failpoint import armed, watched
from stormproof.core.base.message import FailureReason
from stormproof.core.contract.sink import PreparedFile, SinkInput, TaskContext
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.task.job import Job, JobKey
from stormproof.core.tracking.verdict import JobReport
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.prepare.writer import FileWriter, ParquetTaskWriter
from stormproof.sinks.stores.memory import MemorySession
from stormproof.trident.driver.jobs import JobsOnThreads
from stormproof.trident.terms.observers import BatchResult

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

IN_FLIGHT = 4
BATCH = 4
BATCHES = 6
CULPRIT = BATCH + 1
"""In the second batch."""

TIMEOUT_S = 5.0


class Telling(SparkEngine):
    """Notes which jobs run at the same time, and which are cancelled."""

    def __init__(self, session: SparkSession) -> None:
        super().__init__(session, 2)
        self.most = 0
        self.cancelled: Counter[int] = Counter()
        self._side_by_side = 0
        self._noting = threading.Lock()

    def run(self, job: Job) -> JobReport:
        with self._noting:
            self._side_by_side += 1
            self.most = max(self.most, self._side_by_side)
        try:
            return super().run(job)
        finally:
            with self._noting:
                self._side_by_side -= 1

    def cancel(self, key: JobKey) -> None:
        self.cancelled[key[1]] += 1
        super().cancel(key)


def payloads_with(poison: bool) -> list[bytes]:
    payloads = [b"m%d common" % i for i in range(BATCH * BATCHES)]
    if poison:
        payloads[CULPRIT] = POISON.encode()
    return payloads


def world(folder: Path, payloads: list[bytes], poisoning: Poisoning = Poisoning.EXIT) -> World:
    return World(
        payloads,
        folder / "world",
        split=Split(poisoning, folder / "pids"),
        batch_messages=BATCH,
        max_attempts=1,
        in_flight=IN_FLIGHT,
        clock=SystemClock(),
    )


def truth(payloads: list[bytes]) -> Counter[str]:
    return Counter(word for p in payloads if p != POISON.encode() for word in p.decode().split())


def test_jobs_share_the_cores_and_their_batches_commit_in_order(spark: SparkSession, tmp_path: Path) -> None:
    w, engine, results = world(tmp_path, payloads_with(poison=False)), Telling(spark), list[BatchResult]()
    w.run(engine=engine, jobs=JobsOnThreads(IN_FLIGHT), on_batch=results.append, heartbeat_root=tmp_path / "heartbeat")
    assert [(r.txid, r.attempts) for r in results] == [(txid, 1) for txid in range(1, BATCHES + 1)]
    assert w.counts() == truth(payloads_with(poison=False))
    assert engine.most == IN_FLIGHT
    assert not engine.cancelled


@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.parametrize("poisoning", [Poisoning.EXIT, Poisoning.HANG])
def test_a_message_that_kills_or_hangs_its_worker_costs_no_other_batch_anything(
    spark: SparkSession, tmp_path: Path, poisoning: Poisoning
) -> None:
    payloads = payloads_with(poison=True)
    w, engine, results = world(tmp_path, payloads, poisoning), Telling(spark), list[BatchResult]()
    w.run(
        engine=engine,
        jobs=JobsOnThreads(IN_FLIGHT),
        on_batch=results.append,
        heartbeat_root=tmp_path / "heartbeat",
        message_timeout_s=TIMEOUT_S,
    )
    (letter,) = w.source.dead_letters()
    reason = FailureReason.TIMEOUT if poisoning is Poisoning.HANG else FailureReason.WORKER_LOST
    assert (letter.id, letter.reason) == (CULPRIT, reason.value)
    assert w.counts() == truth(payloads)
    committed = [r for r in results if r.state == "committed"]
    assert [r.txid for r in committed] == sorted(r.txid for r in committed)
    # Batch 2 is opened in parts after two attempts; those numbers were free then. Nobody else ran twice, or was cancelled.
    again = {r.txid for r in results if r.attempts > 1}
    culprits = {r.txid for r in results if r.state == "aborted"}
    assert 2 in culprits
    assert again <= culprits
    assert set(engine.cancelled) == (culprits if poisoning is Poisoning.HANG else set())
    assert {r.failed for r in results if r.txid not in culprits} == {0}


def test_files_of_cancelled_jobs_are_adopted_by_nobody_and_swept(spark: SparkSession, tmp_path: Path) -> None:
    payloads = payloads_with(poison=False)
    w, engine = world(tmp_path, payloads), Telling(spark)
    with armed("commit.after_sink=raise@2"):
        statistics = w.run(engine=engine, jobs=JobsOnThreads(IN_FLIGHT), heartbeat_root=tmp_path / "heartbeat")
    (recovery,) = statistics.recoveries
    assert recovery.rolled_forward == (2,)
    assert recovery.aborted, "nothing was in flight"
    assert w.counts() == truth(payloads)
    w.run(engine=engine, heartbeat_root=tmp_path / "heartbeat")
    assert w.counts() == truth(payloads)
    assert not [path for path in (tmp_path / "world").rglob("*") if path.is_file()]
    assert not list((tmp_path / "heartbeat").iterdir())


class DiesOnce(MemorySink):
    """Its first task to close its file takes its worker with it: what the task wrote for other sinks before stays."""

    def __init__(self, name: str, staging: Path, flag: Path) -> None:
        super().__init__(name, staging=staging)
        self._flag = flag

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> MemorySession:
        session = super().open(identity, input_, epoch, create=create)
        files = session.writer()
        writer = DyingWriter(files.sink, files.directory, files.limits, flag=self._flag)
        session.writer = lambda: writer  # type: ignore[method-assign]
        return session


@dataclass(frozen=True)
class DyingWriter(FileWriter):
    """See `DiesOnce`."""

    flag: Path = Path()

    def open_task(self, context: TaskContext, schema: pa.Schema) -> DyingTask:
        return DyingTask(self.flag, self.sink, self.directory, context, schema)


class DyingTask(ParquetTaskWriter):
    """See `DiesOnce`."""

    def __init__(self, flag: Path, sink: str, directory: str, context: TaskContext, schema: pa.Schema) -> None:
        super().__init__(sink, directory, context, schema)
        self._flag = flag

    def close(self) -> Sequence[PreparedFile]:
        files = super().close()
        try:
            self._flag.touch(exist_ok=False)
        except FileExistsError:
            return files
        os.kill(os.getpid(), signal.SIGKILL)
        return files


def test_files_of_a_task_that_ran_again_go_with_their_txid(spark: SparkSession, tmp_path: Path) -> None:
    """Spark repeats the task; nobody names what its first run wrote."""
    w = World([b"a", b"b", b"c", b"d"], tmp_path, fold=False, sinks=1, clock=SystemClock())
    flag = tmp_path / "flag"
    second = DiesOnce("second", tmp_path / "second", flag)
    w.topology = Topology("words")
    w.topology.stream("lines", w.source).flat_map(str.split, "line", schema="word string").into(*w.sinks, second)
    seen: list[int] = []
    with watched(lambda place: seen.append(len(left(tmp_path))) if place == "finish.before" else None):
        w.run(engine=SparkEngine(spark, 1))
    assert flag.exists()
    assert seen[0] > 2, "the first run's files were there"
    assert w.counts() == Counter("abcd")
    assert left(tmp_path) == []


def left(folder: Path) -> list[Path]:
    return list(folder.rglob("stormproof-*.parquet"))
