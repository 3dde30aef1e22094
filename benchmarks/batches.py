"""P1, P2, P6: big batches from Parquet files to a Delta table, beside plain Spark and beside ourselves untracked."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.corpus import WORDS_IN_SENTENCE, Corpus
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.parquet_source import RepeatedParquet
from benchmarks.places import Place, for_spark, on_disk
from benchmarks.word_count import by_bolt, row_wise, split, vectorised, word_count
from benchmarks.workbench import Stepper, Workbench, delta_total, require_total, timed
from stormproof.core.base.arrow import pc
from stormproof.core.base.message import Guarantee
from stormproof.core.engine.protocol import Engine
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.trident.topology.stream import Stream

SMALL, LARGE = 200_000, 1_000_000
"""Sentences of ten words."""


def size_name(sentences: int) -> str:
    """`2M` for 200,000 sentences."""
    return f"{sentences * WORDS_IN_SENTENCE // 1_000_000}M"


@contextmanager
def counting(
    bench: Workbench,
    corpus: Corpus,
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE,
    *,
    folds: bool,
    words: Callable[[Stream], Stream] = vectorised,
    engine: Engine | None = None,
    place: Place | None = None,
) -> Generator[Stepper]:
    """A word count from Parquet to a new Delta table, whose content is checked at the end."""
    place = place or on_disk(bench)
    table, source = place.table(bench, "counts"), RepeatedParquet(bench.unused("parquet"), corpus)
    sink = DeltaSink(table, storage_options=place.options)
    topology = word_count(bench.unused("count"), source, sink, words=words, folds=folds)
    with bench.stepping(topology, guarantee, corpus.messages, engine=engine) as stepper:
        yield stepper
    found = delta_total(table, options=place.options)
    require_total(found, stepper.batches * corpus.words, f"the Delta table of {topology.name}")


def plain_counts(bench: Workbench, corpus: Corpus) -> DataFrame:
    """What a Spark user writes."""
    lines = bench.rival_session.read.schema("line string").parquet(str(corpus.folder))
    return lines.select(F.explode(F.split("line", " ")).alias("word")).groupBy("word").agg(F.count("*").alias("n"))


@contextmanager
def against_parquet(bench: Workbench, sentences: int, goal: Goal, place: Place | None = None) -> Generator[Case]:
    """P1a: appended counts, beside untracked Parquet."""
    place = place or on_disk(bench)
    corpus, out, writes = bench.corpus(sentences), for_spark(place.table(bench, "plain")), 0

    def write() -> None:
        nonlocal writes
        plain_counts(bench, corpus).write.mode("append").parquet(out)
        writes += 1

    with counting(bench, corpus, folds=False, place=place) as ours:
        yield Case(
            key=f"P1a{place.suffix}@{size_name(sentences)}",
            title=f"exactly-once word count to Delta, {size_name(sentences)} words; plain Spark to untracked Parquet",
            unit=Unit.SECONDS,
            goal=goal,
            ours=ours.seconds,
            theirs=lambda: timed(write),
        )
    found = bench.rival_session.read.schema("word string, n long").parquet(out).agg(F.sum("n")).collect()[0][0]
    require_total(found, writes * corpus.words, "the rival's Parquet files")


@contextmanager
def against_merge(bench: Workbench, sentences: int, goal: Goal) -> Generator[Case]:
    """P1b: folded counts, beside Spark's MERGE."""
    corpus, out, session = bench.corpus(sentences), bench.path("merged"), bench.rival_session
    session.createDataFrame([], "word string, n long").write.format("delta").save(str(out))
    merges = 0

    def merge() -> None:
        nonlocal merges
        plain_counts(bench, corpus).createOrReplaceTempView("counted")
        session.sql(
            f"MERGE INTO delta.`{out}` t USING counted s ON t.word = s.word"
            " WHEN MATCHED THEN UPDATE SET n = t.n + s.n WHEN NOT MATCHED THEN INSERT *"
        )
        merges += 1

    with counting(bench, corpus, folds=True) as ours:
        yield Case(
            key="P1b",
            title=f"exactly-once word count folded into Delta, {size_name(sentences)} words; plain Spark MERGE",
            unit=Unit.SECONDS,
            goal=goal,
            ours=ours.seconds,
            theirs=lambda: timed(merge),
        )
    require_total(delta_total(out), merges * corpus.words, "the rival's Delta table")


@contextmanager
def against_append(bench: Workbench, sentences: int, goal: Goal, place: Place | None = None) -> Generator[Case]:
    """P1b-append: appended counts, beside Spark's own append to Delta."""
    place = place or on_disk(bench)
    corpus, written, writes = bench.corpus(sentences), place.table(bench, "appended"), 0

    def write() -> None:
        nonlocal writes
        plain_counts(bench, corpus).write.format("delta").mode("append").save(for_spark(written))
        writes += 1

    with counting(bench, corpus, folds=False, place=place) as ours:
        yield Case(
            key=f"P1b-append{place.suffix}",
            title=f"exactly-once word count appended to Delta, {size_name(sentences)} words; plain Spark append",
            unit=Unit.SECONDS,
            goal=goal,
            ours=ours.seconds,
            theirs=lambda: timed(write),
        )
    total = delta_total(written, options=place.options)
    require_total(total, writes * corpus.words, "the rival's Delta table")


@contextmanager
def against_untracked(bench: Workbench, sentences: int, goal: Goal, place: Place | None = None) -> Generator[Case]:
    """P2: the same topology under exactly-once and under at-most-once."""
    corpus, place = bench.corpus(sentences), place or on_disk(bench)
    with (
        counting(bench, corpus, Guarantee.EXACTLY_ONCE, folds=False, place=place) as tracked,
        counting(bench, corpus, Guarantee.AT_MOST_ONCE, folds=False, place=place) as untracked,
    ):
        yield Case(
            key=f"P2{place.suffix}@{size_name(sentences)}",
            title=f"word count to Delta, {size_name(sentences)} words: exactly-once; at-most-once",
            unit=Unit.SECONDS,
            goal=goal,
            ours=tracked.seconds,
            theirs=untracked.seconds,
        )


def map_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The plain row loop that P6 stands beside."""
    for batch in batches:
        words: list[str] = []
        for line in batch.column(0).to_pylist():
            words.extend(split(line))
        yield pa.record_batch([pa.array(words, pa.string())], names=["word"])


def map_and_count_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same loop by one who counts inside Python already, so that Spark gets few rows."""
    counted = [
        pa.Table.from_batches([batch]).group_by("word").aggregate([([], "count_all")]) for batch in map_rows(batches)
    ]
    if counted:
        total = pa.concat_tables(counted).group_by("word").aggregate([("count_all", "sum")])
        columns = [total.column(name).combine_chunks() for name in ("word", "count_all_sum")]
        yield pa.record_batch([columns[0], pc.cast(columns[1], pa.int64())], names=["word", "n"])


@contextmanager
def bolt_against_row_loop(bench: Workbench, sentences: int, goal: Goal) -> Generator[Case]:
    """P6-bolt: a Bolt that anchors and acks by hand, beside the plain row loop, which tracks nothing."""
    corpus, out = bench.corpus(sentences), bench.path("mapped")
    per_core = corpus.words / bench.cores

    def plain() -> None:
        lines = bench.rival_session.read.schema("line string").parquet(str(corpus.folder))
        counted = lines.mapInArrow(map_rows, "word string").groupBy("word").agg(F.count("*").alias("n"))
        counted.write.mode("append").parquet(str(out))

    with counting(bench, corpus, folds=False, words=by_bolt) as ours:
        yield Case(
            key="P6-bolt",
            title=f"words by a Bolt with explicit emit and ack, and passed on by another, exactly-once to Delta, "
            f"{size_name(sentences)} words, a core; mapInArrow loop to Parquet",
            unit=Unit.TUPLES,
            goal=goal,
            ours=lambda: per_core / ours.seconds(),
            theirs=lambda: per_core / timed(plain),
        )


@contextmanager
def against_row_loop(bench: Workbench, sentences: int, goal: Goal, *, counts_in_python: bool) -> Generator[Case]:
    """P6: a plain Python function a tuple, beside a `mapInArrow` loop that calls the same function."""
    corpus, out = bench.corpus(sentences), bench.path("mapped")
    per_core = corpus.words / bench.cores

    def plain() -> None:
        lines = bench.rival_session.read.schema("line string").parquet(str(corpus.folder))
        if counts_in_python:
            words = lines.mapInArrow(map_and_count_rows, "word string, n long")
            counted = words.groupBy("word").agg(F.sum("n").alias("n"))
        else:
            counted = lines.mapInArrow(map_rows, "word string").groupBy("word").agg(F.count("*").alias("n"))
        counted.write.mode("append").parquet(str(out))

    with counting(bench, corpus, folds=False, words=row_wise) as ours:
        yield Case(
            key="P6-counted" if counts_in_python else "P6",
            title=f"str.split by flat_map, exactly-once to Delta, {size_name(sentences)} words, a core; mapInArrow loop"
            + (" that counts in Python" if counts_in_python else "")
            + " to Parquet",
            unit=Unit.TUPLES,
            goal=goal,
            ours=lambda: per_core / ours.seconds(),
            theirs=lambda: per_core / timed(plain),
        )


def p1a(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P1a."""
    yield against_parquet(bench, SMALL, Goal(ratio=1.15))
    yield against_parquet(bench, LARGE, Goal(ratio=1.05))


def p1b(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P1b."""
    yield against_merge(bench, SMALL, Goal(ratio=0.5))
    yield against_append(bench, SMALL, Goal(ratio=0.5))


def p2(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P2."""
    yield against_untracked(bench, SMALL, Goal(ratio=1.15))
    yield against_untracked(bench, LARGE, Goal(ratio=1.10))


def p6(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P6."""
    yield against_row_loop(bench, LARGE, Goal(ratio=0.8, own=2_000_000), counts_in_python=False)
    yield against_row_loop(bench, LARGE, Goal(), counts_in_python=True)
    yield bolt_against_row_loop(bench, SMALL, Goal(own=500_000))
