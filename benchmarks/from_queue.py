"""P1q: the exactly-once word count from a Postgres queue to Delta, beside plain Spark with a reader of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.batches import SMALL, size_name
from benchmarks.corpus import WORDS_IN_SENTENCE, sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.word_count import word_count
from benchmarks.workbench import Workbench, delta_total, require_total, timed
from stormproof.core.base.message import Guarantee
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.delta.sink import DeltaSink


def lines_of(
    uri: str, table: str, total: int, parts: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Reads a table's payloads as text, a part a task, by the same driver as ours: no token, no count, no lease."""

    def read(tasks: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from adbc_driver_postgresql import dbapi

        for task in tasks:
            for part in task.column(0).to_pylist():
                with dbapi.connect(uri) as connection, connection.cursor() as cursor:
                    cursor.execute(
                        f"select convert_from(payload, 'UTF8') as line from {table}"
                        f" where id > {total} * {part}::bigint / {parts} and id <= {total} * ({part}::bigint + 1) / {parts}"
                    )
                    yield from cursor.fetch_record_batch()

    return read


@contextmanager
def against_plain_reader(bench: Workbench, goal: Goal) -> Generator[Case]:
    """P1q."""
    session, out, table = bench.rival_session, bench.path("merged"), bench.path("counts")
    payloads = [line.encode() for line in sentences(SMALL).to_pylist()]
    words = SMALL * WORDS_IN_SENTENCE
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    rival_queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    rival_queue.put(payloads)
    with bench.connect() as connection:
        found = connection.execute(
            f"select min(id), max(id) from stormproof_queue.{rival_queue.queue}".encode()
        ).fetchone()
    assert found is not None
    require_total(found[0], 1, "the first id of the rival's queue")
    require_total(found[1], SMALL, "the last id of the rival's queue")
    session.createDataFrame([], "word string, n long").write.format("delta").save(str(out))
    read = lines_of(bench.database.adbc_uri, f"stormproof_queue.{rival_queue.queue}", SMALL, bench.cores)
    merges = 0

    def merge() -> None:
        nonlocal merges
        lines = session.range(0, bench.cores, 1, bench.cores).mapInArrow(read, "line string")
        counted = (
            lines.select(F.explode(F.split("line", " ")).alias("word")).groupBy("word").agg(F.count("*").alias("n"))
        )
        counted.createOrReplaceTempView("counted")
        session.sql(
            f"MERGE INTO delta.`{out}` t USING counted s ON t.word = s.word"
            " WHEN MATCHED THEN UPDATE SET n = t.n + s.n WHEN NOT MATCHED THEN INSERT *"
        )
        merges += 1

    topology = word_count(bench.unused("count"), queue, DeltaSink(table))
    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, SMALL) as stepper:

        def ours() -> float:
            queue.put(payloads)
            return stepper.seconds()

        yield Case(
            key="P1q",
            title=f"exactly-once word count from a Postgres queue into Delta, {size_name(SMALL)} words; plain Spark, MERGE",
            unit=Unit.SECONDS,
            goal=goal,
            ours=ours,
            theirs=lambda: timed(merge),
        )
    require_total(delta_total(table), stepper.batches * words, "our Delta table")
    require_total(delta_total(out), merges * words, "the rival's Delta table")


def p1q(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The case of P1q."""
    yield against_plain_reader(bench, Goal(ratio=0.6))
