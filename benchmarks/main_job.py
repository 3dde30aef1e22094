"""P3, P4: the main job (Postgres queue to Delta and Postgres, exactly-once) in words a second, beside Storm and Trident.

The rivals take the same sentences from memory: a tuned core topology with an acker counts them in memory; Trident keeps
opaque counts in Postgres, or has storm-jdbc append rows, which a batch that is tried again repeats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TypedDict

import pyarrow as pa

from benchmarks.corpus import WORDS_IN_SENTENCE, sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.rival_storm import missing, storm
from benchmarks.word_count import row_wise, vectorised, word_count, words_as_rows
from benchmarks.workbench import Workbench, delta_total, require_total
from stormproof.core.base.message import Guarantee
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.trident.topology.stream import Stream, Topology

COUNTED, APPENDED, LARGE = 200_000, 50_000, 1_000_000
"""Messages a batch."""


@cache
def lines_of(messages: int) -> pa.Array:
    """The sentences of a batch."""
    return sentences(messages)


@contextmanager
def from_queue(
    bench: Workbench, topology: Topology, queue: PostgresQueue, messages: int
) -> Generator[Callable[[], float]]:
    """Words a second of whole batches; each batch's messages are put before it is measured."""
    payloads = [line.encode() for line in lines_of(messages).to_pylist()]
    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, messages) as stepper:

        def run() -> float:
            queue.put(payloads)
            return messages * WORDS_IN_SENTENCE / stepper.seconds()

        yield run


class _Runs(TypedDict, total=False):
    warm_ups: int
    pairs_most: int


def _runs(messages: int) -> _Runs:
    """A large batch takes a rival a quarter of a minute, and is measured a few times only."""
    return {"warm_ups": 1, "pairs_most": 5} if messages >= LARGE else {}


@contextmanager
def beside_storm(
    bench: Workbench, key: str, how: str, goal: Goal, words: Callable[[Stream], Stream], messages: int = COUNTED
) -> Generator[Case]:
    """P3."""
    table, counts = bench.path("counts"), bench.unused("counts")
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = word_count(bench.unused("main"), queue, DeltaSink(table), PostgresSink(counts), words=words)
    with storm(bench, "core", lines_of(messages)) as rival, from_queue(bench, topology, queue, messages) as run:
        yield Case(
            key=key,
            title=f"words/s from a Postgres queue to Delta and Postgres, {how}; Storm with an acker, in memory",
            unit=Unit.TUPLES,
            goal=goal,
            ours=run,
            theirs=rival.words_a_second,
            **_runs(messages),
        )
    with bench.connect() as connection:
        row = connection.execute(f"select sum(n)::bigint from {counts}".encode()).fetchone()
    require_total(delta_total(table), row[0] if row else 0, "the Delta table, beside Postgres,")


@contextmanager
def counts_beside_trident(bench: Workbench, key: str, goal: Goal, messages: int = COUNTED) -> Generator[Case]:
    """P4."""
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = word_count(bench.unused("main"), queue, PostgresSink(bench.unused("counts")))
    with (
        storm(bench, "trident-counts", lines_of(messages)) as rival,
        from_queue(bench, topology, queue, messages) as run,
    ):
        yield Case(
            key=key,
            title=f"words/s from a Postgres queue to counts in Postgres, {messages:,} messages a batch; Trident with opaque "
            "counts",
            unit=Unit.TUPLES,
            goal=goal,
            ours=run,
            theirs=rival.words_a_second,
            **_runs(messages),
        )


@contextmanager
def rows_beside_trident(bench: Workbench, goal: Goal) -> Generator[Case]:
    """P4-append."""
    table = bench.unused("words")
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = words_as_rows(bench.unused("main"), queue, PostgresSink(table))
    with (
        storm(bench, "trident-rows", lines_of(APPENDED)) as rival,
        from_queue(bench, topology, queue, APPENDED) as run,
        bench.connect() as connection,
    ):

        def run_into_empty() -> float:
            connection.execute(f"truncate {table}".encode())
            return run()

        yield Case(
            key="P4-append",
            title="words/s from a Postgres queue to rows in Postgres; Trident with storm-jdbc",
            unit=Unit.TUPLES,
            goal=goal,
            ours=run_into_empty,
            theirs=rival.words_a_second,
        )


def p3(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P3; none where Storm cannot be built."""
    if is_left_out("P3"):
        return
    yield beside_storm(bench, "P3", "vectorised", Goal(ratio=5), vectorised)
    yield beside_storm(bench, "P3-function", "plain Python function", Goal(ratio=3), row_wise)
    yield beside_storm(bench, "P3@10M", "vectorised, 10 M words a batch", Goal(ratio=5), vectorised, LARGE)
    large = "plain Python function, 10 M words a batch"
    yield beside_storm(bench, "P3-function@10M", large, Goal(ratio=3), row_wise, LARGE)


def p4(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P4; none where Storm cannot be built."""
    if is_left_out("P4"):
        return
    yield counts_beside_trident(bench, "P4", Goal(ratio=10))
    yield counts_beside_trident(bench, "P4@10M", Goal(ratio=10), LARGE)
    yield rows_beside_trident(bench, Goal(ratio=4))


def is_left_out(figure: str) -> bool:
    """Say so where a rival cannot be had."""
    reason = missing()
    if reason is not None:
        sys.stderr.write(
            f"{figure} is left out: {reason} is not there; install with: apt-get install maven openjdk-17-jdk\n"
        )
    return reason is not None
