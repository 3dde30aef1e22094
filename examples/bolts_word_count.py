"""The streaming word count of the literature, bolt by bolt, with anchors and acks by hand.

    python examples/bolts_word_count.py             # on Spark
    python examples/bolts_word_count.py --inline    # in one process, without Spark

        sentences ---shuffle---> split ---fields(word)---> count ---> fold ---> tables
        (spout)                  (bolt)                    (bolt)     (sum)     (sink)

The spout hands out sentences. Each is a message: it is confirmed only when every word made of it is counted and written,
and handed out again when one of its tuples fails.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Literal

import psycopg

from stormproof import Bolt, DeltaSink, PostgresQueue, PostgresSink, Settings, Topology, Tuple, sum_
from stormproof.testing import Fault, FaultKind, Faults, simulate

QUEUE = "sentences"
SENTENCES = [
    "the cow jumped over the moon",
    "an apple a day keeps the doctor away",
    "snow white and the seven dwarfs",
    "four score and seven years ago",
    "i am at two with nature",
    "",  # no sentence: it fails, is tried again, and ends as a dead letter
]


class SplitSentence(Bolt):
    """Splits a sentence into its words."""

    streams = "word string"  # what it emits, in Spark's DDL

    def execute(self, tuple: Tuple, /) -> None:
        """Emit each word *anchored* to the sentence, then ack the sentence.

        The anchor makes the word a child of the sentence in its tuple tree. Without the anchor the word would not be
        tracked: the sentence would be done as soon as it was acked here.
        """
        words = tuple["sentence"].split()
        if not words:
            self.collector.fail(tuple, "there is no word in it")
            return
        for word in words:
            self.collector.emit(word, anchors=tuple)
        self.collector.ack(tuple)


class WordCount(Bolt):
    """Counts the words of one batch.

    Storm's WordCount keeps its counts in a dict for ever. A bolt here keeps no state from one batch to the next: this
    dict is empty at the beginning of each batch, and the fold behind the bolt keeps the totals, in the sink. So a crash
    cannot lose a count, and a replay cannot double one.
    """

    streams = "word string, n long"

    def __init__(self) -> None:
        self.held: dict[str, list[Tuple]] = defaultdict(list)

    def execute(self, tuple: Tuple, /) -> None:
        """Hold the tuple. It stays pending, and so does its sentence."""
        self.held[tuple["word"]].append(tuple)

    def finish(self) -> None:
        """At the end of the batch, emit each word's count anchored to all the tuples that it counts, and ack them."""
        for word, tuples in self.held.items():
            self.collector.emit((word, len(tuples)), anchors=tuples)
            for tuple_ in tuples:
                self.collector.ack(tuple_)


def topology(lake: str) -> Topology:
    """The counts go to the Delta table `LAKE/bolts_words` and to the Postgres table `bolts_words`."""
    t = Topology("bolts-word-count")
    sentences = t.spout("sentences", PostgresQueue(QUEUE, schema="sentence string", max_attempts=2))
    # shuffle: evenly over the tasks of the bolt.
    words = t.bolt("split", SplitSentence(), sentences.shuffle())
    # fields: the same word always to the same task. Without that two tasks would both count "the".
    counts = t.bolt("count", WordCount(), words.fields("word"))
    # From here on it is a stream: the counts of each batch are added to those in the table.
    (
        t.following(counts)
        .group_by("word")
        .persistent_aggregate(n=sum_("n"))
        .into(DeltaSink(f"{lake}/bolts_words"), PostgresSink("bolts_words"))
    )
    return t


def rehearse(lake: str) -> None:
    """The same topology in a simulation, before it touches anything.

    Its driver is killed right after it has written the first table, and has not yet told the second one.
    """
    killed = Faults(at=(Fault(FaultKind.DRIVER_DEATH, "commit.after_sink"),))
    result = simulate(topology(lake), SENTENCES, seed=7, faults=killed, max_attempts=2)
    s = result.statistics
    counts = {row["word"]: row["n"] for row in result.rows("delta.bolts_words")}
    print(f"rehearsal with {s.drivers} drivers: {s.acked} sentences acked, {s.dead} dead, {counts['the']} times 'the'")


def main(engine: Literal["spark", "inline"], lake: str = "lake") -> None:
    """Put the sentences, run until nothing is left, show the counts."""
    rehearse(lake)
    t = topology(lake)
    PostgresQueue(QUEUE).put([sentence.encode() for sentence in SENTENCES])
    done = t.run("exactly-once", engine=engine, until_idle=True)
    print(f"{done.messages} sentences in {done.batches} batches, {done.dead_letters} dead letter")
    with psycopg.connect(Settings().resolve_database().conninfo) as connection:
        for word, n in connection.execute("select word, n from bolts_words order by n desc, word limit 4"):
            print(f"{n:3} {word}")


if __name__ == "__main__":
    main("inline" if "--inline" in sys.argv else "spark")
