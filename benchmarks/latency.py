"""P5: 1,000 messages from open to committed in Delta and in Postgres, beside a `foreachBatch` micro-batch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.corpus import WORDS_IN_SENTENCE, sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.places import Place, for_spark, on_disk
from benchmarks.word_count import row_wise, word_count
from benchmarks.workbench import Workbench, delta_total, require_total
from stormproof.core.base.message import Guarantee
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink

MESSAGES = 1_000
PAIRS_FACTOR = 4
POLLING_MS = 500
"""How often the rival looks for files: seldom, since it does so while our side is measured; its figure lacks the wait."""


@contextmanager
def micro_batches(bench: Workbench, lines: pa.Array, place: Place) -> Generator[Iterator[float]]:
    """A streaming query that counts the words of each file it finds; gives the seconds of one batch after another.

    What a user writes today: MERGE into Delta, an upsert by psycopg. Exactly-once it is not. The figure is the batch's
    own time, from the offsets to the commit, as the query reports it.
    """
    folder, checkpoint, written = bench.path("stream"), bench.path("checkpoint"), place.table(bench, "streamed")
    counts, session, table = bench.unused("streamed"), bench.rival_session, for_spark(written)
    folder.mkdir()
    session.conf.set("spark.sql.streaming.pollingDelay", str(POLLING_MS))
    session.createDataFrame([], "word string, n long").write.format("delta").save(table)
    pq.write_table(pa.table({"line": lines}), bench.folder / "stream.parquet")
    with bench.connect() as connection:
        connection.execute(f"create table {counts} (word text primary key, n bigint not null)".encode())
        upsert = (
            f"insert into {counts} as t select * from unnest(%s::text[], %s::bigint[])"
            " on conflict (word) do update set n = t.n + excluded.n"
        ).encode()

        def write(batch: DataFrame, number: int) -> None:
            words = batch.select(F.explode(F.split("line", " ")).alias("word"))
            counted = words.groupBy("word").agg(F.count("*").alias("n")).persist()
            counted.createOrReplaceTempView("micro")
            batch.sparkSession.sql(
                f"MERGE INTO delta.`{table}` t USING micro s ON t.word = s.word"
                " WHEN MATCHED THEN UPDATE SET n = t.n + s.n WHEN NOT MATCHED THEN INSERT *"
            )
            rows = counted.toArrow()
            connection.execute(upsert, (rows.column("word").to_pylist(), rows.column("n").to_pylist()))
            counted.unpersist()

        stream = session.readStream.schema("line string").parquet(str(folder))
        query = stream.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint)).start()
        done = 0

        def batches() -> Iterator[float]:
            nonlocal done
            while True:
                shutil.copy(bench.folder / "stream.parquet", bench.folder / "next.parquet")
                os.rename(bench.folder / "next.parquet", folder / f"{done:06}.parquet")
                query.processAllAvailable()
                done += 1
                # The last report may be of a look that found nothing.
                worked = [p for p in query.recentProgress if p["numInputRows"]]
                yield worked[-1]["durationMs"]["triggerExecution"] / 1_000

        try:
            yield batches()
        finally:
            query.stop()
    total = delta_total(written, options=place.options)
    require_total(total, done * MESSAGES * WORDS_IN_SENTENCE, "the rival's Delta table")


@contextmanager
def against_micro_batch(bench: Workbench, goal: Goal, place: Place | None = None) -> Generator[Case]:
    """Both sides count the same 1,000 sentences into both stores."""
    lines, place = sentences(MESSAGES), place or on_disk(bench)
    payloads = [line.encode() for line in lines.to_pylist()]
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    table = place.table(bench, "counts")
    sinks = (DeltaSink(table, storage_options=place.options), PostgresSink(bench.unused("counts")))
    topology = word_count(bench.unused("small"), queue, *sinks, words=row_wise)
    with (
        bench.stepping(topology, Guarantee.EXACTLY_ONCE, MESSAGES) as stepper,
        micro_batches(bench, lines, place) as theirs,
    ):

        def ours() -> float:
            queue.put(payloads)
            return stepper.step().steps_ms["total"] / 1_000

        yield Case(
            key=f"P5{place.suffix}",
            title="1,000 messages from open to committed in Delta and Postgres; foreachBatch with MERGE and psycopg",
            unit=Unit.SECONDS,
            goal=goal,
            ours=ours,
            theirs=lambda: next(theirs),
            pairs_factor=PAIRS_FACTOR,
            shows_p99=True,
        )
    total = delta_total(table, options=place.options)
    require_total(total, stepper.batches * MESSAGES * WORDS_IN_SENTENCE, "the Delta table")


def p5(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P5."""
    yield against_micro_batch(bench, Goal(ratio=0.25, own=0.3))
