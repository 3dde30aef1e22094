"""Tracked tuples through a fields and an all grouping, while workers die, shuffle files are lost and tasks fail."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
from pyspark.sql import SparkSession
from support.jobs import Ran, run_job, source

from stormproof.core.base.errors import JobFailed
from stormproof.core.bolt import BasicBolt, Emit, Tuple
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.task import job
from stormproof.sinks.stores.memory import MemorySink

pytestmark = pytest.mark.spark

TASKS = 4
"""More than the two cores: tasks of a stage come in waves, so that the first can spoil what the last need."""

LINES = [f"w{i % 7} w{i % 3} \u00e9{i}".encode() for i in range(60)] + [b"", b"bad \xff", b"fail me"]
WORDS = Counter(word for line in LINES[:-2] for word in line.decode().split())
Keyed: TypeAlias = Callable[[str], list[tuple[str, int]]]
ROW = "word string, value long"
STAGES = ["split", "keyed", "everywhere"]


@dataclass(frozen=True)
class Fault:
    """Something that happens in one component the first `times` times that any task of it comes by a word.

    `kill` kills the Python worker, `raise` fails the task (not a message), `lose` deletes every shuffle file that is
    finished. Each running of a task leaves a mark in the folder `ran`.
    """

    folder: Path
    component: str
    action: str
    times: int = 1
    shuffle_folders: tuple[str, ...] = ()

    def reached(self, component: str, word: str) -> None:
        """Called for each tuple."""
        if component == self.component and word.partition(" ")[0] == "w1" and self._first():
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.action == "raise":
                raise KeyboardInterrupt("not the message's fault")  # what a task answers for, not the message
            else:
                for folder in self.shuffle_folders:
                    for file in Path(folder).glob("*/shuffle_*"):
                        file.unlink(missing_ok=True)

    def happened(self) -> int:
        """How often it has happened."""
        return sum((self.folder / f"fault{n}").exists() for n in range(self.times))

    def _first(self) -> bool:
        for number in range(self.times):
            try:
                os.close(os.open(self.folder / f"fault{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False


class Split(BasicBolt):
    """Words of a line; counts how often it was prepared, which is once a task and running."""

    streams = "word string"

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def prepare(self, context: object, /) -> None:
        fd = os.open(self.fault.folder / "prepared", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(fd, b".")
        os.close(fd)

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        line = tuple["line"]
        if line.startswith("fail"):
            raise ValueError("asked to fail")
        for word in line.split():
            self.fault.reached("split", word)
            emit(word)


@dataclass(frozen=True)
class Pass:
    """Gives on what it gets."""

    component: str
    fault: Fault

    def __call__(self, word: str, value: int = 0) -> list[tuple[str, int]]:
        self.fault.reached(self.component, word)
        return [(word, value)]


def topology(fault: Fault, staging: Path, keyed: Keyed) -> TopologyGraph:
    """Split, then by word to one task, then to every task, and once more by word to one."""
    t = TopologyGraph("robust")
    words = t.bolt("split", Split(fault), t.spout("lines", source()).none())
    by_word = t.bolt("keyed", keyed, words.fields("word"), schema=ROW)
    everywhere = t.bolt("everywhere", Pass("everywhere", fault), by_word.all(), schema=ROW)
    last = t.bolt("last", Pass("last", fault), by_word.fields("word"), schema=ROW)
    t.sink(MemorySink("copies", staging=staging), everywhere)
    t.sink(MemorySink("once", staging=staging), last)
    return t


def with_a_sink_in_the_middle(fault: Fault, staging: Path) -> TopologyGraph:
    """The same with a sink in the stage before the last."""
    t = TopologyGraph("robust")
    words = t.bolt("split", Split(fault), t.spout("lines", source()).none())
    by_word = t.bolt("keyed", Pass("keyed", fault), words.fields("word"), schema=ROW)
    everywhere = t.bolt("everywhere", Pass("everywhere", fault), by_word.all(), schema=ROW)
    t.sink(MemorySink("copies", staging=staging), everywhere)
    t.sink(MemorySink("once", staging=staging), by_word)
    return t


def run(
    engine: SparkEngine | InlineEngine,
    fault: Fault,
    folder: Path,
    keyed: Callable[[str], list[tuple[str, int]]] | None = None,
) -> Ran:
    t = topology(fault, folder / "staging", keyed or Pass("keyed", fault))
    return run_job(engine, t, LINES, folder / "staging")


def shuffle_folders(spark: SparkSession) -> tuple[str, ...]:
    """Where Spark keeps shuffle files."""
    manager = spark.sparkContext._jvm.org.apache.spark.SparkEnv.get().blockManager()  # type: ignore[union-attr]
    return tuple(manager.diskBlockManager().localDirsString())


def counted(ran: Ran, sink: str) -> Counter[object]:
    return Counter(row["word"] for row in ran.rows[sink])


def assert_whole(ran: Ran, undisturbed: Ran) -> None:
    """What a sink got, what failed and what the acker saw is as if nothing had happened."""
    assert ran.mismatches == ran.report.violations == ()
    assert counted(ran, "once") == WORDS
    assert counted(ran, "copies") == {word: TASKS * n for word, n in WORDS.items()}
    assert ran.failed() == undisturbed.failed() == {61: "bad_message at lines"}
    assert ran.late() == undisturbed.late() == {62: "error at split"}
    assert (ran.report.read_messages, ran.report.ack_xor, ran.report.late_xor) == (
        len(LINES),
        undisturbed.report.ack_xor,
        undisturbed.report.late_xor,
    )


@pytest.fixture
def undisturbed(tmp_path: Path) -> Ran:
    """The same on the inline engine, with no fault."""
    (tmp_path / "calm" / "staging").mkdir(parents=True)
    return run(InlineEngine(TASKS), Fault(tmp_path / "calm", "", "none"), tmp_path / "calm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For the run that is disturbed."""
    (tmp_path / "run" / "staging").mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.parametrize("component", STAGES)
def test_a_worker_that_is_killed_in_mid_task(
    spark: SparkSession, folder: Path, undisturbed: Ran, component: str
) -> None:
    fault = Fault(folder, component, "kill")
    ran = run(SparkEngine(spark, TASKS), fault, folder)
    assert fault.happened() == 1
    assert_whole(ran, undisturbed)


@pytest.mark.parametrize("component", STAGES)
def test_a_task_that_fails_three_times_and_then_works(
    spark: SparkSession, folder: Path, undisturbed: Ran, component: str
) -> None:
    fault = Fault(folder, component, "raise", times=3)
    ran = run(SparkEngine(spark, TASKS), fault, folder)
    assert fault.happened() == 3
    assert_whole(ran, undisturbed)


def at_the_latest_with_the_next(attempt: Callable[[], Ran]) -> Ran:
    """The attempt, or the one after it where two runs of a task had readers, or Spark gave the first up to prevent that."""
    try:
        return attempt()
    except JobFailed as error:
        if "indeterminate" not in str(error) and error.details.get("outside") != "two runs of one task":
            raise
    return attempt()


@pytest.mark.parametrize("component", ["keyed", "everywhere"])
def test_a_stage_that_runs_again_because_its_shuffle_files_are_lost(
    spark: SparkSession, folder: Path, undisturbed: Ran, component: str
) -> None:
    fault = Fault(folder, component, "lose", shuffle_folders=shuffle_folders(spark))
    ran = at_the_latest_with_the_next(lambda: run(SparkEngine(spark, TASKS), fault, folder))
    assert fault.happened() == 1
    assert_whole(ran, undisturbed)
    assert (folder / "prepared").stat().st_size > TASKS  # the first stage's tasks ran again


def test_a_sink_in_the_middle_is_whole_with_the_next_attempt_at_the_latest(
    spark: SparkSession, folder: Path, undisturbed: Ran
) -> None:
    """Its files have new names when its stage runs again, which Spark takes for another output once a task has ended."""
    fault = Fault(folder, "everywhere", "lose", shuffle_folders=shuffle_folders(spark))

    def attempt() -> Ran:
        t = with_a_sink_in_the_middle(fault, folder / "staging")
        return run_job(SparkEngine(spark, TASKS), t, LINES, folder / "staging")

    ran = at_the_latest_with_the_next(attempt)
    assert fault.happened() == 1
    assert_whole(ran, undisturbed)


def at_random(word: str) -> list[tuple[str, int]]:
    """What no bolt should do: the next running of the task gives something else, to the same tasks."""
    return [(word, random.getrandbits(62))]


def torn(ran: Ran) -> int:
    """How many of the tuples that went to every task did not reach every task."""
    return sum(n != TASKS for n in Counter((row["word"], row["value"]) for row in ran.rows["copies"]).values())


def test_a_bolt_that_answers_at_random_never_gets_two_answers_into_one_batch(spark: SparkSession, folder: Path) -> None:
    fault = Fault(folder, "everywhere", "lose", shuffle_folders=shuffle_folders(spark))
    ran = at_the_latest_with_the_next(lambda: run(SparkEngine(spark, TASKS), fault, folder, at_random))
    assert fault.happened() == 1
    assert ran.mismatches == ()
    assert torn(ran) == 0


def test_two_runs_of_a_task_in_one_batch_fail_the_job_by_name(spark: SparkSession, folder: Path) -> None:
    fault = Fault(folder, "everywhere", "lose", shuffle_folders=shuffle_folders(spark))
    with pytest.raises(JobFailed, match="did not all read the same run of a task") as error:
        run(SparkEngine(spark, TASKS), fault, folder, at_random)
    assert error.value.details == {"outside": "two runs of one task"}
    assert fault.happened() == 1


def test_control_where_the_runs_are_not_compared_two_answers_get_into_one_batch(
    spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "require_one_run", lambda _: None)
    fault = Fault(folder, "everywhere", "lose", shuffle_folders=shuffle_folders(spark))
    ran = run(SparkEngine(spark, TASKS), fault, folder, at_random)
    assert fault.happened() == 1
    assert ran.mismatches == ()  # tokens, shares and counts agree
    assert torn(ran) > 0
