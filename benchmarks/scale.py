"""P19: what more executors and more tasks cost: the same cores in two or in four processes, and a batch of 1,000 tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.corpus import WORDS_IN_SENTENCE, sentences, write_corpus
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.line_process import LineProcess, line_process
from benchmarks.parquet_source import RepeatedParquet
from benchmarks.places import Place, in_a_store, seaweed
from benchmarks.word_count import words_as_rows
from benchmarks.workbench import Workbench, delta_total, require_total, timed
from stormproof.core.base.message import Guarantee
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import connect
from stormproof.core.storage.object_files import ObjectFiles, root_of
from stormproof.core.storage.protocol import use_storage
from stormproof.sinks.delta.sink import DeltaSink

MESSAGES: Final = 1_000_000
"""Of a batch, and of a file."""
FILES: Final = 11
CORES: Final = 4
EXECUTOR_MB, OVERHEAD_MB = 1_300, 300
"""Of a worker for each core that it has: the same heap in all, however many executors share it."""
START_S, BATCH_S = 300.0, 600.0

TASKS: Final = 1_000
SENTENCES_A_TASK: Final = 100


@contextmanager
def driver_of(bench: Workbench, place: Place, executors: int) -> Generator[tuple[LineProcess, dict[str, str]]]:
    """A driver in a process of its own, with so many executors in processes beside it; each `step` is a batch."""
    given: dict[str, str] = {
        "name": bench.unused("scale"),
        "master": f"local-cluster[{executors},{CORES // executors},{EXECUTOR_MB * CORES // executors}]",
        "database": bench.database.adbc_uri,
        "home": str(bench.path("home")),
        "lines": f"{place.root}/lines/*.parquet",
        "counts": place.table(bench, "counts"),
        "table": bench.unused("counts"),
        "options": json.dumps(dict(place.options)),
        "messages": str(MESSAGES),
        "parallelism": str(CORES),
        "memory": f"{EXECUTOR_MB * CORES // executors - OVERHEAD_MB}m",
    }
    command = [sys.executable, "-m", "benchmarks.scale_driver", json.dumps(given)]
    with line_process(command, bench.path("driver"), start_s=START_S) as process:
        yield process, given


@contextmanager
def by_executors(bench: Workbench, place: Place) -> Generator[Case]:
    """Sentences from Parquet files in an object store, counted into a Delta table there and into Postgres."""
    for number in range(FILES):
        path = bench.path("lines")
        pq.write_table(pa.table({"line": sentences(MESSAGES, seed=number)}), path, row_group_size=MESSAGES // CORES)
        _upload(place, path, f"lines/{number:02}.parquet")
    steps = 0
    with driver_of(bench, place, 4) as (ours, first), driver_of(bench, place, 2) as (theirs, second):

        def rate(process: LineProcess) -> float:
            nonlocal steps
            steps += 1
            return MESSAGES / float(process.ask("step", BATCH_S))

        yield Case(
            key="P19-executors@1M",
            title="messages/s of ten words from Parquet files in an object store, counted into Delta there and into "
            "Postgres, exactly-once, by 4 executors of a core; by 2 executors of 2 cores",
            unit=Unit.MESSAGES,
            goal=Goal(),
            ours=lambda: rate(ours),
            theirs=lambda: rate(theirs),
            warm_ups=1,
            pairs_most=FILES - 1,
        )
    for given in (first, second):
        wanted = steps // 2 * MESSAGES * WORDS_IN_SENTENCE
        require_total(delta_total(given["counts"], options=place.options), wanted, "the Delta table")
        with connect(bench.database, application_name="benchmarks") as connection:
            row = connection.execute(f"select sum(n) from {given['table']}".encode()).fetchone()
        require_total(int(row[0]) if row else 0, wanted, "the Postgres table")


def _upload(place: Place, path: Path, name: str) -> None:
    address = f"{place.root}/{name}"
    use_storage(place.root, place.options)
    ObjectFiles(root_of(address)).put_new(address, path.read_bytes())
    path.unlink()


@contextmanager
def many_tasks(bench: Workbench) -> Generator[Case]:
    """A batch of so many tasks, each of which writes a file of a Delta table; plain Spark with as many."""
    corpus = write_corpus(bench.path("pieces"), TASKS * SENTENCES_A_TASK, TASKS)
    table, out = bench.path("words"), bench.path("plain")
    topology = words_as_rows(bench.unused("tasks"), RepeatedParquet("pieces", corpus), DeltaSink(table))
    session = bench.rival_session.newSession()
    for name in ("openCostInBytes", "maxPartitionBytes"):  # so that each file is a task
        session.conf.set(f"spark.sql.files.{name}", str(2**27))
    session.conf.set("spark.sql.files.minPartitionNum", str(TASKS))
    writes = 0

    def plain() -> None:
        nonlocal writes
        lines = session.read.schema("line string").parquet(str(corpus.folder))
        words = lines.select(F.explode(F.split("line", " ")).alias("word"))
        words.write.format("delta").mode("append").save(str(out))
        writes += 1

    with bench.stepping(
        topology, Guarantee.EXACTLY_ONCE, corpus.messages, engine=SparkEngine(bench.session, TASKS)
    ) as stepper:
        yield Case(
            key=f"P19-tasks@{TASKS}",
            title=f"a batch of {TASKS:,} tasks, each of which appends a file to a Delta table, exactly-once; plain "
            "Spark's append by as many",
            unit=Unit.SECONDS,
            goal=Goal(),
            ours=stepper.seconds,
            theirs=lambda: timed(plain),
            warm_ups=1,
            pairs_most=5,
        )
    for path, number in ((table, stepper.batches), (out, writes)):
        require_total(DeltaTable(path).to_pyarrow_dataset().count_rows(), number * corpus.words, path.name)


def p19(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P19; without an object store, the second one alone."""
    yield many_tasks(bench)
    missing = seaweed().missing()
    if missing is not None:
        sys.stderr.write(f"P19-executors is left out: {missing} is not installed\n")
        return
    with in_a_store(bench) as place:
        yield by_executors(bench, place)
