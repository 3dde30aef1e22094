"""The demo's word count: as in word_count.py, with a function that fails on purpose.

A real program has no use for such a function: it is here so that there is something to replay.
"""

from __future__ import annotations

import os
from hashlib import sha256

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count

FLAKY_WORDS = frozenset({"coroutine", "metaclass", "generator"})
POISON = "poison: a message that is not of the text and can never be split"
MAX_ATTEMPTS = 3
BACKOFF_S = 0.2


class FlakySplit:
    """Splits a line into words. Fails on the first try of each line with a flaky word, and on every try of the poison.

    Tries are marked in the folder `marks`, since a topology's functions keep nothing between two batches.
    """

    def __init__(self, marks: str) -> None:
        self._marks = marks

    def __call__(self, line: str) -> list[str]:
        """The line's words."""
        if line == POISON:
            raise ValueError("this message can never be split")
        words = line.split()
        if not FLAKY_WORDS.isdisjoint(words) and self._is_first_try(line):
            raise RuntimeError("the first try of this line fails")
        return words

    def _is_first_try(self, line: str) -> bool:
        mark = os.path.join(self._marks, sha256(line.encode()).hexdigest())
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def topology(lake: str, marks: str, queue: str = "lines") -> Topology:
    """The counts go to the Delta table `LAKE/word_counts` and to the Postgres table `word_counts`."""
    t = Topology("word-count")
    source = PostgresQueue(queue, schema="line string", max_attempts=MAX_ATTEMPTS, backoff_base_s=BACKOFF_S)
    (
        t.stream("lines", source)
        .flat_map(FlakySplit(marks), "line", schema="word string")
        .group_by("word")
        .persistent_aggregate(n=count())
        .into(DeltaSink(f"{lake}/word_counts"), PostgresSink("word_counts"))
    )
    return t
