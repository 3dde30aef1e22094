"""Which jobs are one task of Spark's, and how that one reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.heartbeats import hearing, until
from support.jobs import run_job, source

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import TaskContext
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.small_jobs import TASKS_MAX, SmallJobs
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.heartbeat.listener import JobSigns
from stormproof.core.task.job import Job, StageJob, job_report, stage_jobs
from stormproof.core.task.task import run_in_turn
from stormproof.core.tracking.verdict import ComponentCounts, JobReport, TaskCounts
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.aggregate import count
from stormproof.trident.topology.stream import Topology

PLAN = Plan("t", Guarantee.EXACTLY_ONCE, {}, ())
JOB = Job(PLAN, (), {}, "life", 1, 1, 1, tracked=True, messages=1_000)
LIMIT_MS = 50.0


def parts(*tasks: int) -> tuple[StageJob, ...]:
    context = TaskContext("life", 1, 1, 0)
    return tuple(StageJob(stage, None, tasks, {}, context, tracked=True) for stage in range(len(tasks)))


def report(messages: int, *busy_ms: float) -> JobReport:
    busy = {f"c{n}": ComponentCounts(busy_ns=int(ms * 1e6)) for n, ms in enumerate(busy_ms)}
    return JobReport(messages, 0, 0, counts=TaskCounts(busy))


def after(ran: JobReport, limit_ms: float = LIMIT_MS) -> SmallJobs:
    small = SmallJobs(limit_ms)
    small.ran(JOB, ran)
    return small


def test_a_lifes_first_job_is_not_small() -> None:
    small = SmallJobs(LIMIT_MS)
    assert not small.is_small(JOB, parts(2, 2))
    small.ran(JOB, report(10, 0.1))
    assert small.is_small(JOB, parts(2, 2))
    assert not small.is_small(replace(JOB, incarnation="another"), parts(2, 2))


@pytest.mark.parametrize(("messages", "small"), [(1_000, True), (2_000, True), (2_001, False)])
def test_the_work_of_all_components_is_foretold_by_message(messages: int, small: bool) -> None:
    known = after(report(1_000, 10.0, 15.0))
    assert known.is_small(replace(JOB, messages=messages), parts(2, 2)) is small


def test_a_slow_batch_makes_the_next_one_large_and_a_quick_one_small_again() -> None:
    small = after(report(1_000, 1.0))
    small.ran(JOB, report(100, 1_000.0))
    assert not small.is_small(JOB, parts(2, 2))
    small.ran(JOB, report(1_000, 1.0))
    assert small.is_small(JOB, parts(2, 2))


def test_a_batch_without_messages_tells_nothing() -> None:
    small = after(report(1_000, 1.0))
    small.ran(JOB, report(0, 500.0))
    assert small.is_small(JOB, parts(2, 2))


@pytest.mark.parametrize("change", [{"careful": True}, {"per_message": True}, {"messages": None}])
def test_a_job_that_looks_for_a_culprit_or_has_unknown_messages_is_not_small(change: dict[str, Any]) -> None:
    assert not after(report(1_000, 1.0)).is_small(replace(JOB, **change), parts(2, 2))


def test_one_stage_or_many_tasks_are_left_as_they_are() -> None:
    small = after(report(1_000, 1.0))
    assert not small.is_small(JOB, parts(2))
    assert small.is_small(JOB, parts(1, TASKS_MAX - 1))
    assert not small.is_small(JOB, parts(1, TASKS_MAX))


def test_none_is_small_or_all_are() -> None:
    assert not after(report(1_000, 0.0), limit_ms=0).is_small(JOB, parts(2, 2))
    assert SmallJobs(math.inf).is_small(JOB, parts(2, 2))


class InTurn(InlineEngine):
    """Runs each job as Spark's one task of a small job does."""

    def __init__(self, heard: JobSigns) -> None:
        super().__init__()
        self.heard = heard

    def run(self, job: Job) -> JobReport:
        made = stage_jobs(replace(job, heartbeat=self.heard.place), 1)
        return job_report(list(run_in_turn(made)), made[0].tasks, {})


def test_the_driver_hears_of_one_task_until_the_last_stage_has_ended(tmp_path: Path) -> None:
    """A call that hangs in a later stage is one of a task that runs, and not one that Spark has not begun."""
    with hearing() as heard:
        seen: list[tuple[int, int]] = []

        def look(line: str) -> list[str]:
            seen.append((heard.progress().started, heard.progress().running))
            return [line]

        t = TopologyGraph("looks")
        before = t.bolt("before", look, t.spout("lines", source()).none(), schema="line string")
        behind = t.bolt("behind", look, before.shuffle(), schema="line string")
        t.sink(MemorySink("kept", staging=tmp_path), behind)
        ran = run_job(InTurn(heard), t, [b"a", b"b", b"c"], tmp_path)
        assert ran.sorted("kept") == [("a",), ("b",), ("c",)]
        assert ran.mismatches == ()
        assert seen == [(1, 1)] * 6
        until(lambda: heard.progress().running == 0)
        assert heard.progress().started == 1


def key(word: str) -> str:
    return word


@pytest.mark.parametrize(
    ("build", "hides"),
    [
        pytest.param(lambda s: s.group_by("word").persistent_aggregate(n=count()), True, id="an aggregate"),
        pytest.param(lambda s: s.map(key, "word", schema="word string"), True, id="no exchange"),
        pytest.param(lambda s: s.shuffle().map(key, "word", schema="word string"), False, id="a shuffle"),
        pytest.param(lambda s: s.partition_aggregate(n=count()), False, id="one result a task"),
    ],
)
def test_where_nothing_tells_the_number_of_tasks(build: Callable[[Any], Any], hides: bool) -> None:
    t = Topology("words")
    build(t.stream("words", source(schema="word string"))).into(MemorySink("kept"))
    assert compile_topology(t, Guarantee.EXACTLY_ONCE).hides_tasks is hides
