"""What each grouping costs: all words through one exchange to a table, beside plain Spark's equivalent of that exchange."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from benchmarks.batches import SMALL, size_name
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.parquet_source import RepeatedParquet
from benchmarks.word_count import split_lines
from benchmarks.workbench import Workbench, require_total, timed
from stormproof.core.base.arrow import pc
from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import ArrowBolt
from stormproof.core.graph.components import OutputStream, Subscription
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.trident.topology.stream import Topology


class Split(ArrowBolt):
    """Lines to words."""

    def execute(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """All lines at once."""
        return split_lines(rows)


class Pass(ArrowBolt):
    """What comes in goes out: the subscriber for whose sake the words are moved."""

    def execute(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """The same rows."""
        return rows, np.arange(rows.num_rows)


def by_length(rows: pa.RecordBatch, tasks: int) -> npt.NDArray[np.int64]:
    """A user's own grouping."""
    lengths: npt.NDArray[np.int64] = pc.utf8_length(rows.column("word")).to_numpy().astype(np.int64)
    return lengths % tasks


@dataclass(frozen=True, slots=True)
class Contest:
    """One grouping, what a Spark user writes for it, and how many copies of each word there are for a number of tasks."""

    name: str
    says: str
    ours: Callable[[OutputStream], Subscription]
    theirs: Callable[[DataFrame, int], DataFrame]
    copies: Callable[[int], int] = lambda tasks: 1


def _to_all(words: DataFrame, tasks: int) -> DataFrame:
    numbers = F.explode(F.sequence(F.lit(0), F.lit(tasks - 1)))
    return words.select("word", numbers.alias("task")).repartitionById(tasks, "task").select("word")


CONTESTS: Final = (
    Contest("none", "no exchange", lambda words: words.none(), lambda words, tasks: words),
    Contest("shuffle", "repartition(n)", lambda words: words.shuffle(), lambda words, tasks: words.repartition(tasks)),
    Contest(
        "fields",
        "repartition(n, word)",
        lambda words: words.fields("word"),
        lambda words, tasks: words.repartition(tasks, "word"),
    ),
    Contest(
        "partial_key",
        "repartition(n, word, salt)",
        lambda words: words.partial_key("word"),
        lambda words, tasks: words.repartition(tasks, F.col("word"), F.monotonically_increasing_id() % 2),
    ),
    Contest("all", "explode and repartitionById(n, task)", lambda words: words.all(), _to_all, lambda tasks: tasks),
    Contest("global", "repartition(1)", lambda words: words.global_(), lambda words, tasks: words.repartition(1)),
    Contest(
        "custom",
        "repartitionById(n, length(word) % n)",
        lambda words: words.custom(by_length),
        lambda words, tasks: words.repartitionById(tasks, F.length("word") % tasks),
    ),
)
"""local_or_shuffle is none by another name. direct crosses the same exchange as custom, but only a row-wise bolt emits
so: it would be measured with that."""


@contextmanager
def against_repartition(bench: Workbench, contest: Contest, sentences: int) -> Generator[Case]:
    """The same words through the same kind of exchange to Delta, exactly once, and to plain Parquet."""
    corpus, table, out = bench.corpus(sentences), bench.path("grouped"), bench.path("plain")
    topology = Topology(bench.unused("grouping"))
    lines = topology.spout("lines", RepeatedParquet(bench.unused("parquet"), corpus))
    words = topology.bolt("split", Split(), lines, schema="word string")
    topology.sink(DeltaSink(table), topology.bolt("pass", Pass(), contest.ours(words), schema="word string"))

    def plain() -> None:
        text = bench.rival_session.read.schema("line string").parquet(str(corpus.folder))
        split = text.select(F.explode(F.split("line", " ")).alias("word"))
        contest.theirs(split, bench.cores).write.mode("append").parquet(str(out))

    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, corpus.messages) as stepper:
        yield Case(
            key=f"groupings-{contest.name}",
            title=f"{size_name(sentences)} words by {contest.name} grouping, exactly-once to Delta; plain Spark: "
            f"{contest.says}, to untracked Parquet",
            unit=Unit.SECONDS,
            goal=Goal(),
            ours=stepper.seconds,
            theirs=lambda: timed(plain),
        )
    wanted = stepper.batches * corpus.words * contest.copies(bench.cores)
    found = DeltaTable(str(table)).to_pyarrow_dataset().count_rows()
    require_total(found, wanted, f"the Delta table of {topology.name}")


def groupings(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """A case for each grouping."""
    for contest in CONTESTS:
        yield against_repartition(bench, contest, SMALL)
