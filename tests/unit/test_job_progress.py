"""How far a job is: made of what its tasks report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stormproof import MemorySink, MemorySource, Topology, count
from stormproof.core.base.message import Guarantee
from stormproof.core.graph.plan import compile_topology
from stormproof.core.heartbeat.task import DONE, RUNNING, ProgressMark, Record
from stormproof.core.task.job import Job
from stormproof.trident.ledger.control import JobProgress, JobWatch

PARSE, LOOKUP = 1, 2


def watch(messages: int | None = 600) -> JobWatch:
    """Of a job with two functions, a group behind an exchange, and a function behind that."""
    topology = Topology("words")
    stream = topology.stream("lines", MemorySource("lines", []))
    stream = stream.map(str, "line", schema="word string", name="parse").map(
        str, "word", schema="word string", name="lookup"
    )
    counts = stream.group_by("word").agg(n=count())
    counts.map(str, "word", schema="word string", name="enrich").into(MemorySink("rows"))
    plan = compile_topology(topology, Guarantee.EXACTLY_ONCE)
    return JobWatch(Job(plan, (), {}, "life", 5, 1, 7, tracked=True, messages=messages), 0.0)


def at(
    step: int, passed: int, passage: int = 300, before: int = 0, *, stage: int = 0, total: int = 0, state: int = RUNNING
) -> Record:
    return (0, step, total, before, passage, passed, stage, state, 0, 0, 0)


def seen(watch: JobWatch, *tasks: Record) -> tuple[str | None, int, int | None]:
    found = watch.seen(ProgressMark(tasks=tasks), 10.0)
    assert (found.txid, found.attempt, found.elapsed_s) == (5, 1, 10.0)
    return found.component, found.through, found.total


def test_messages_through_the_slowest_component_are_counted_over_all_tasks() -> None:
    one = watch()
    assert seen(one) == (None, 0, 600)
    assert seen(one, at(0, 0), at(PARSE, 150)) == ("parse", 150, 600)
    assert seen(one, at(LOOKUP, 10), at(LOOKUP, 20)) == ("lookup", 30, 600)
    assert seen(one, at(LOOKUP, 20), at(PARSE, 150, before=300)) == ("lookup", 320, 600), (
        "of later passages those before"
    )
    assert seen(one, at(LOOKUP, 30), at(3, 0)) == ("lookup", 330, 600), (
        "a task that is further has all of them behind it"
    )
    assert seen(one, at(LOOKUP, 40), at(3, 299, state=DONE)) == ("lookup", 340, 600)
    assert seen(one, at(3, 300, state=DONE), at(3, 300, state=DONE)) == ("lookup", 600, 600), "between two stages"


def test_behind_an_exchange_rows_are_counted() -> None:
    one = watch()
    done = at(3, 300, state=DONE)
    found = one.seen(
        ProgressMark(tasks=(done, done, at(0, 0, 80, stage=1, total=80), at(1, 7, 50, stage=1, total=50))), 10.0
    )
    assert (found.component, found.through, found.total, found.unit) == ("enrich", 7, 130, "rows")


def test_a_task_that_ran_twice_does_not_make_more_than_all() -> None:
    done = at(3, 300, state=DONE)
    assert seen(watch(), done, done, at(LOOKUP, 10)) == ("lookup", 600, 600)
    assert seen(watch(None), done, done, at(LOOKUP, 10)) == ("lookup", 610, None)


@pytest.mark.parametrize(
    ("job", "text", "bar"),
    [
        (
            JobProgress(5, 1, "lookup", 214, 600, "messages", 10.2),
            "txid 5: 214 of 600 messages through lookup, 21/s, 10 s",
            "[###-------] 35%",
        ),
        (JobProgress(5, 2, None, 0, 1, "messages", 0.3), "txid 5 (attempt 2): 0 of 1 message, 0 s", "[----------] 0%"),
        (JobProgress(5, 1, "enrich", 1, None, "rows", 2.0), "txid 5: 1 row through enrich, 0/s, 2 s", ""),
        (
            JobProgress(5, 1, "enrich", 599, 600, "rows", 1.0),
            "txid 5: 599 of 600 rows through enrich, 599/s, 1 s",
            "[#########-] 99%",
        ),
    ],
)
def test_a_job_is_told_of_in_one_line(job: JobProgress, text: str, bar: str) -> None:
    assert (str(job), job.bar) == (text, bar)
    assert len(f"{bar} {text}") < 80
    assert replace(job, through=0).share == 0
