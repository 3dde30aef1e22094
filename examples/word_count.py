"""Count words: lines from a Postgres queue, counts in a Delta table and in a Postgres table, each exactly once.

stormproof queue put lines --lines some.txt
stormproof run examples/word_count.py:topology --param lake=lake --until-idle
stormproof audit verify word-count
"""

from __future__ import annotations

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count


def split(line: str) -> list[str]:
    """A word is what `str.split()` gives; its case is kept."""
    return line.split()


def topology(lake: str, queue: str = "lines") -> Topology:
    """The counts go to the Delta table `LAKE/word_counts` and to the Postgres table `word_counts`."""
    t = Topology("word-count")
    (
        t.stream("lines", PostgresQueue(queue, schema="line string"))
        .flat_map(split, "line", schema="word string")
        .group_by("word")
        .persistent_aggregate(n=count())
        .into(DeltaSink(f"{lake}/word_counts"), PostgresSink("word_counts"))
    )
    return t
