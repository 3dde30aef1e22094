"""The same word count with BasicBolts, for which anchoring and acking are automatic.

    python examples/basic_bolts_word_count.py             # on Spark
    python examples/basic_bolts_word_count.py --inline    # in one process, without Spark

Compare bolts_word_count.py, where each anchor and each ack is written out. Here each emitted tuple is anchored to the tuple
in hand, and that tuple is acked when `execute` returns. Where `execute` raises, the tuple in hand fails, and what was
emitted for it is dropped.
"""

from __future__ import annotations

import sys
from typing import Literal

import psycopg

from stormproof import (
    BasicBolt,
    DeltaSink,
    Emit,
    FailTuple,
    PostgresQueue,
    PostgresSink,
    Settings,
    Topology,
    Tuple,
    sum_,
)

QUEUE = "basic-sentences"
SENTENCES = [
    "the cow jumped over the moon",
    "an apple a day keeps the doctor away",
    "snow white and the seven dwarfs",
    "four score and seven years ago",
    "i am at two with nature",
    "",
]


class SplitSentence(BasicBolt):
    """Splits a sentence into its words."""

    streams = "word string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        """Emit each word. `FailTuple` gives the failure the reason `failed`, any other exception the reason `error`."""
        words = tuple["sentence"].split()
        if not words:
            raise FailTuple("there is no word in it")
        for word in words:
            emit(word)


class WordCount(BasicBolt):
    """Turns each word into a count of one.

    A BasicBolt's tuple is acked when `execute` returns, so it cannot hold words until the end of the batch. It emits a
    count of one for each word, and the fold behind it adds them up. The fold adds before the exchange, too, so this is
    cheap.
    """

    streams = "word string, n long"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        """Emit a count of one."""
        emit((tuple["word"], 1))


def topology(lake: str) -> Topology:
    """The counts go to the Delta table `LAKE/basic_bolts_words` and to the Postgres table `basic_bolts_words`."""
    t = Topology("basic-bolts-word-count")
    sentences = t.spout("sentences", PostgresQueue(QUEUE, schema="sentence string", max_attempts=2))
    words = t.bolt("split", SplitSentence(), sentences.shuffle())
    counts = t.bolt("count", WordCount(), words)  # no grouping: it runs in the task that made the word
    (
        t.following(counts)
        .group_by("word")
        .persistent_aggregate(n=sum_("n"))
        .into(DeltaSink(f"{lake}/basic_bolts_words"), PostgresSink("basic_bolts_words"))
    )
    return t


def main(engine: Literal["spark", "inline"], lake: str = "lake") -> None:
    """Put the sentences, run until nothing is left, show the counts."""
    t = topology(lake)
    PostgresQueue(QUEUE).put([sentence.encode() for sentence in SENTENCES])
    done = t.run("exactly-once", engine=engine, until_idle=True)
    print(f"{done.messages} sentences in {done.batches} batches, {done.dead_letters} dead letter")
    print(f"failures by reason: {dict(done.failed_by_reason)}")
    with psycopg.connect(Settings().resolve_database().conninfo) as connection:
        for word, n in connection.execute("select word, n from basic_bolts_words order by n desc, word limit 4"):
            print(f"{n:3} {word}")


if __name__ == "__main__":
    main("inline" if "--inline" in sys.argv else "spark")
