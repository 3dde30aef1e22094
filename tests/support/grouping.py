"""A topology with groups in two tables of Postgres, and what these hold where they refuse some groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from stormproof import PostgresSink, Topology, count
from support.crashes import Cell
from support.topologies import source_of

NAME = "grouping"
WORDS, BATCHES, TOTALS = "all_words", "batch_counts", "totals"


def build(cell: Cell) -> Topology:
    """Words as they come; their number in each batch, appended; and their number in all, folded."""
    t = Topology(NAME)
    words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(str.split, "line", schema="word string")
    words.into(PostgresSink(WORDS, name="words", database=cell.database))
    words.group_by("word").agg(n=count()).into(PostgresSink(BATCHES, name="batches", database=cell.database))
    words.group_by("word").persistent_aggregate(n=count()).into(
        PostgresSink(TOTALS, name="totals", database=cell.database)
    )
    return t


def counts_of(payloads: Sequence[bytes]) -> Counter[str]:
    """How often each word comes."""
    return Counter(word for payload in payloads for word in payload.decode().split())


def taken(
    payloads: Sequence[bytes], refuses: Callable[[str, int], bool], held: Counter[str] | None = None
) -> list[bytes]:
    """The messages of one batch that have a part in the table: those of refused groups have none, and no other group has
    anything of them. `refuses` is asked of a word and its number beside what is `held`.
    """
    left = list(payloads)
    while True:
        found = counts_of(left)
        bad = {word for word, n in found.items() if refuses(word, n + (held or Counter())[word])}
        if not bad:
            return left
        left = [payload for payload in left if not bad & set(payload.decode().split())]
