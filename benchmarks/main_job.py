"""P3, P4: the main job (Postgres queue to Delta and Postgres, exactly-once) in words a second, beside quoted figures.

Storm 2.8.3 was measured apart, on two cores like these: a tuned core topology with an acker counts 1.15 million words a
second in memory; Trident with opaque counts in Postgres 0.52 million; storm-jdbc appends 0.60 million rows, not
exactly-once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks.corpus import WORDS_IN_SENTENCE, sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.word_count import row_wise, vectorised, word_count, words_as_rows
from benchmarks.workbench import Workbench, delta_total, require_total
from stormproof.core.guarantee import Guarantee
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.delta import DeltaSink
from stormproof.sinks.postgres import PostgresSink
from stormproof.trident.stream import Stream, Topology

STORM_WORDS = 1_148_000.0
TRIDENT_WORDS = 523_000.0
STORM_JDBC_ROWS = 603_000.0

COUNTED, APPENDED = 200_000, 50_000
"""Messages a batch."""


@contextmanager
def from_queue(
    bench: Workbench, topology: Topology, queue: PostgresQueue, messages: int
) -> Generator[Callable[[], float]]:
    """Words a second of whole batches; each batch's messages are put before it is measured."""
    payloads = [line.encode() for line in sentences(messages).to_pylist()]
    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, messages) as stepper:

        def run() -> float:
            queue.put(payloads)
            return messages * WORDS_IN_SENTENCE / stepper.seconds()

        yield run


@contextmanager
def beside_storm(
    bench: Workbench, key: str, how: str, goal: Goal, words: Callable[[Stream], Stream]
) -> Generator[Case]:
    """P3."""
    table, counts = bench.path("counts"), bench.unused("counts")
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = word_count(bench.unused("main"), queue, DeltaSink(table), PostgresSink(counts), words=words)
    with from_queue(bench, topology, queue, COUNTED) as run:
        yield Case(
            key=key,
            title=f"words/s from a Postgres queue to Delta and Postgres, {how}; Storm with an acker (quoted)",
            unit=Unit.TUPLES,
            goal=goal,
            ours=run,
            theirs=STORM_WORDS,
        )
    with bench.connect() as connection:
        row = connection.execute(f"select sum(n)::bigint from {counts}".encode()).fetchone()
    require_total(delta_total(table), row[0] if row else 0, "the Delta table, beside Postgres,")


@contextmanager
def counts_beside_trident(bench: Workbench, goal: Goal) -> Generator[Case]:
    """P4."""
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = word_count(bench.unused("main"), queue, PostgresSink(bench.unused("counts")))
    with from_queue(bench, topology, queue, COUNTED) as run:
        yield Case(
            key="P4",
            title="words/s from a Postgres queue to counts in Postgres; Trident with opaque counts (quoted)",
            unit=Unit.TUPLES,
            goal=goal,
            ours=run,
            theirs=TRIDENT_WORDS,
        )


@contextmanager
def rows_beside_trident(bench: Workbench, goal: Goal) -> Generator[Case]:
    """P4-append."""
    table = bench.unused("words")
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = words_as_rows(bench.unused("main"), queue, PostgresSink(table))
    with from_queue(bench, topology, queue, APPENDED) as run, bench.connect() as connection:

        def run_into_empty() -> float:
            connection.execute(f"truncate {table}".encode())
            return run()

        yield Case(
            key="P4-append",
            title="words/s from a Postgres queue to rows in Postgres; Trident with storm-jdbc (quoted)",
            unit=Unit.TUPLES,
            goal=goal,
            ours=run_into_empty,
            theirs=STORM_JDBC_ROWS,
        )


def p3(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P3."""
    yield beside_storm(bench, "P3", "vectorised", Goal(ratio=5), vectorised)
    yield beside_storm(bench, "P3-function", "plain Python function", Goal(ratio=3), row_wise)


def p4(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P4."""
    yield counts_beside_trident(bench, Goal(ratio=10))
    yield rows_beside_trident(bench, Goal(ratio=1.3))
