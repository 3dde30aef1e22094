"""Which jobs are one task of Spark's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import TaskContext
from stormproof.core.engine.spark import TASKS_MAX, SmallJobs
from stormproof.core.graph.plan import Plan
from stormproof.core.task.job import Job, StageJob
from stormproof.core.tracking.verdict import ComponentCounts, Counts, JobReport

PLAN = Plan("t", Guarantee.EXACTLY_ONCE, {}, ())
JOB = Job(PLAN, (), {}, "life", 1, 1, 1, tracked=True, messages=1_000)
LIMIT_MS = 50.0


def parts(*tasks: int) -> tuple[StageJob, ...]:
    context = TaskContext("life", 1, 1, 0)
    return tuple(StageJob(stage, None, tasks, {}, context, tracked=True) for stage in range(len(tasks)))


def report(messages: int, *busy_ms: float) -> JobReport:
    busy = {f"c{n}": ComponentCounts(busy_ns=int(ms * 1e6)) for n, ms in enumerate(busy_ms)}
    return JobReport(messages, 0, 0, counts=Counts(busy))


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
