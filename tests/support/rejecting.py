"""A topology with two sinks in Postgres, of which one has a table that refuses some rows; and what they must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from stormproof import PostgresSink, Topology
from support.crashes import Cell
from support.topologies import source_of

NAME = "rejecting"
STRICT, PLAIN = "strict_words", "plain_words"
BAD = "bad"


def build(cell: Cell) -> Topology:
    """Words into a table with a rule, and into one without."""
    t = Topology(NAME)
    words = t.stream("lines", source_of(cell.queue, cell.database)).flat_map(str.split, "line", schema="word string")
    words.into(
        PostgresSink(STRICT, name="strict", database=cell.database),
        PostgresSink(PLAIN, name="plain", database=cell.database),
    )
    return t


def words_of(payloads: Sequence[bytes], without: Collection[str] = ()) -> Counter[str]:
    """The words of all messages that have none of the words in `without`: a message is in a table whole or not at all."""
    split = [payload.decode().split() for payload in payloads]
    return Counter(word for words in split if not set(words) & set(without) for word in words)
