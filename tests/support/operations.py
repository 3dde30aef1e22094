"""Users' aggregates of all three kinds, and a topology with every operation of a stream, whose answers are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from stormproof.core.contract.source import Source
from stormproof.core.graph.aggregation import Aggregator, CombinerAggregator, EmitRow, ReducerAggregator
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.aggregate import count, distinct_count, max_, mean, min_, sum_
from stormproof.trident.topology.stream import Stream, Topology

LINES = [b"a b a", b"", b"b", b"  ", b"c a\tb", b"b b"]
WORDS = [word for line in LINES for word in line.decode().split()]
COUNTS = Counter(WORDS)


class Greatest(CombinerAggregator):
    """The greatest word; "bad" is none."""

    result = "string"

    def init(self, word: str) -> str:
        if word == "bad":
            raise ValueError("a bad word")
        return word

    def combine(self, one: str, other: str, /) -> str:
        return max(one, other)

    def zero(self) -> str:
        return ""


class Letters(ReducerAggregator):
    """All letters, sorted; "bad" is none."""

    result = "string"

    def init(self) -> str:
        return ""

    def reduce(self, value: str, /, word: str) -> str:
        if word == "bad":
            raise ValueError("a bad word")
        return "".join(sorted(value + word))


class Ranked(Aggregator):
    """Each of a group's words with its rank; groups of fewer than two give nothing."""

    result = "ranked string, rank int"

    def init(self) -> list[str]:
        return []

    def aggregate(self, state: list[str], emit: EmitRow, /, word: str) -> None:
        if word == "bad":  # what it emitted for nobody must not be seen
            emit(("spoilt", -1))
            state.append("spoilt")
            raise ValueError("a bad word")
        state.append(word)

    def complete(self, state: list[str], emit: EmitRow, /) -> None:
        if len(state) > 1:
            for rank, word in enumerate(sorted(state)):
                emit((word, rank))


def words_of(topology: Topology, source: Source) -> Stream:
    return topology.stream("lines", source).flat_map(str.split, "line", schema="word string")


def by_letter(rows: pa.RecordBatch, tasks: int) -> list[int]:
    return [ord(word[0]) % tasks for word in rows.column("word").to_pylist()]


def doubled(words: Stream) -> Stream:
    return words.map(lambda word: (word, word * 2), schema="x string, double string")


Build = Callable[[Stream], Stream]

OPERATIONS: dict[str, tuple[Build, Sequence[tuple[object, ...]]]] = {
    "each": (lambda w: w.each(len, "word", schema="n int"), [(w, 1) for w in WORDS]),
    "each_many": (
        lambda w: w.each(lambda x: [1, 2] if x != "c" else [], schema="n int", many=True),
        [(w, n) for w in WORDS if w != "c" for n in (1, 2)],
    ),
    "project": (
        lambda w: w.each(len, "word", schema="n int").project("n", again="word"),
        [(1, w) for w in WORDS],
    ),
    "peek": (lambda w: w.peek(len), [(w,) for w in WORDS]),
    "shuffle": (lambda w: w.shuffle(), [(w,) for w in WORDS]),
    "partition_by": (
        lambda w: w.partition_by("word").map(str.upper, schema="up string"),
        [(w.upper(),) for w in WORDS],
    ),
    "global": (lambda w: w.global_().partition_aggregate(n=count()), [(len(WORDS),)]),
    "batch_global": (
        lambda w: w.batch_global().partition_aggregate(Ranked()),
        [(w, rank) for rank, w in enumerate(sorted(WORDS))],
    ),
    "broadcast": (lambda w: w.broadcast().parallelism(3), [(w,) for w in WORDS] * 3),
    "partition": (lambda w: w.partition(by_letter).parallelism(4), [(w,) for w in WORDS]),
    "parallelism": (
        lambda w: w.parallelism(5).map(str.upper, schema="word string").shuffle(),
        [(w.upper(),) for w in WORDS],
    ),
    "partition_aggregate": (
        lambda w: w.partition_aggregate(n=count(), d=distinct_count("word")).aggregate(n=sum_("n")),
        [(len(WORDS),)],
    ),
    "grouped_partition_aggregate": (
        lambda w: w.group_by("word").partition_aggregate(n=count()).group_by("word").agg(n=sum_("n")),
        list(COUNTS.items()),
    ),
    "partition_reduced": (
        lambda w: w.global_().partition_aggregate(x=Letters()),
        [("".join(sorted("".join(WORDS))),)],
    ),
    "aggregate": (
        lambda w: w.aggregate(n=count(), d=distinct_count("word"), lo=min_("word"), hi=max_("word"), g=Greatest()),
        [(len(WORDS), len(COUNTS), "a", "c", "c")],
    ),
    "aggregate_of_nothing": (
        lambda w: w.filter(lambda _: False).aggregate(
            n=count(), d=distinct_count("word"), lo=min_("word"), g=Greatest(), r=Letters()
        ),
        [(0, 0, None, "", "")],
    ),
    "grouped": (
        lambda w: (
            w.each(len, schema="n int")
            .group_by("word")
            .parallelism(3)
            .agg(n=count(), s=sum_("n"), m=mean("n"), d=distinct_count("n"), g=Greatest().over("word"))
        ),
        [(w, n, n, 1.0, 1, w) for w, n in COUNTS.items()],
    ),
    "reduced": (
        lambda w: w.group_by("word").aggregate(r=Letters(), n=count(), g=Greatest()),
        [(w, w * n, n, w) for w, n in COUNTS.items()],
    ),
    "several_rows": (
        lambda w: w.group_by("word").agg(Ranked(), n=count()),
        [(w, w, rank, n) for w, n in COUNTS.items() if n > 1 for rank in range(n)],
    ),
    "chained": (
        lambda w: w.group_by("word").agg(n=count()).group_by("n").agg(k=count()).aggregate(k=sum_("k"), most=max_("n")),
        [(len(COUNTS), max(COUNTS.values()))],
    ),
    "merge": (
        lambda w: w.merge(w.filter(lambda x: x == "a"), w.shuffle()),
        [(w,) for w in [*WORDS, *WORDS, "a", "a", "a"]],
    ),
    "join": (
        lambda w: w.filter(lambda x: x != "c").join(doubled(w).filter(lambda x, _: x != "a"), {"word": "x"}),
        [("b", "bb")] * COUNTS["b"] ** 2,
    ),
    "join_left": (
        lambda w: w.filter(lambda x: x != "c").join(
            doubled(w).filter(lambda x, _: x != "a"), {"word": "x"}, how="left"
        ),
        [("b", "bb")] * COUNTS["b"] ** 2 + [("a", None)] * COUNTS["a"],
    ),
    "join_right": (
        lambda w: w.filter(lambda x: x != "c").join(
            doubled(w).filter(lambda x, _: x != "a"), {"word": "x"}, how="right"
        ),
        [("b", "bb")] * COUNTS["b"] ** 2 + [("c", "cc")] * COUNTS["c"],
    ),
    "join_full": (
        lambda w: w.filter(lambda x: x != "c").join(
            doubled(w).filter(lambda x, _: x != "a"), {"word": "x"}, how="full"
        ),
        [("b", "bb")] * COUNTS["b"] ** 2 + [("c", "cc")] * COUNTS["c"] + [("a", None)] * COUNTS["a"],
    ),
    "join_with_itself": (lambda w: w.join(w, "word"), [(w,) for w, n in COUNTS.items() for _ in range(n * n)]),
    "join_of_groups": (
        lambda w: w.group_by("word").agg(n=count()).join(doubled(w), {"word": "x"}),
        [(w, n, w * 2) for w, n in COUNTS.items() for _ in range(n)],
    ),
}
"""Each operation behind the words, and the rows that come of it."""


def add_all(topology: Topology, source: Source, staging: Path) -> Topology:
    """Every operation, each into a sink of its name."""
    words = words_of(topology, source)
    for name, (build, _) in OPERATIONS.items():
        build(words).into(MemorySink(f"{name}_out", staging=staging))
    return topology
