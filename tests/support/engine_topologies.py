"""The topologies that every engine must run alike, each with what must come of it, worked out by hand or in plain Python.

`PARALLELISM` is the number of tasks that all of it is meant for: what a grouping gives depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from stormproof import MemorySink, MemorySource, Topology, count, sum_
from stormproof.core.base.clock import ManualClock
from stormproof.core.bolt import (
    ArrowBolt,
    ArrowRows,
    BasicBolt,
    Bolt,
    BoltContext,
    Collector,
    Emit,
    FailTuple,
    Streams,
    Tuple,
)
from stormproof.core.contract.sink import SinkWriter, TaskContext, TaskWriter
from stormproof.core.graph.components import BoltOrFunction, OutputStream, Subscription
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.source.iterator import Item, IteratorSource
from support.jobs import Batch

PARALLELISM = 3
LINES = [b"a b a", b"", b"b", b"  ", b"c a\tb", b"b b"]
WORDS = sorted(word for line in LINES for word in line.decode().split())
COUNTS = sorted(Counter(WORDS).items())
MANY_ROWS = 70_000

Rows = list[tuple[object, ...]]


def same(writer: SinkWriter) -> SinkWriter:
    """The sink's writer as it is."""
    return writer


@dataclass(frozen=True)
class Case:
    """A topology and what comes of it: rows by sink, sorted; messages that fail early and late; how many tuples
    fail that nobody waits for. `check` sees what else there is to see.
    """

    name: str
    build: Callable[[Path], TopologyGraph]
    rows: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    late: Mapping[str, set[str]] = field(default_factory=dict[str, set[str]])
    unanchored: int = 0
    check: Callable[[Batch], None] = lambda _: None
    wrap: Callable[[SinkWriter], SinkWriter] = same


CASES: list[Case] = []


def case(name: str, build: Callable[[Path], TopologyGraph], **what: object) -> None:
    """Add a case to the list."""
    CASES.append(Case(name, build, **what))  # type: ignore[arg-type]


def ones(words: Iterable[object]) -> Rows:
    return sorted(((word,) for word in words), key=repr)


def split(line: str) -> list[str]:
    return line.split()


def lines(t: TopologyGraph, payloads: list[bytes] | None = None) -> OutputStream:
    return t.spout("lines", MemorySource("lines", LINES if payloads is None else payloads))


def words(t: TopologyGraph, payloads: list[bytes] | None = None) -> OutputStream:
    return t.bolt("split", split, lines(t, payloads), schema="word string")


def out(t: TopologyGraph, tmp: Path, stream: OutputStream, name: str = "out") -> TopologyGraph:
    t.sink(MemorySink(name, staging=tmp), stream)
    return t


# --- word count, three ways ----------------------------------------------------------------------------------------


class SplitBasic(BasicBolt):
    streams = "word string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        for word in tuple["line"].split():
            emit(word)


class RunningCount(BasicBolt):
    streams = "word string, n long"

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        self.counts[tuple["word"]] += 1
        emit((tuple["word"], self.counts[tuple["word"]]))


class SplitExplicit(Bolt):
    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        for word in tuple["line"].split():
            self.collector.emit(word, anchors=tuple)
        self.collector.ack(tuple)


class HeldCount(Bolt):
    """Holds all tuples of a word to the batch's end; its count is anchored to each of them."""

    streams = "word string, n long"

    def __init__(self) -> None:
        self.held: dict[str, list[Tuple]] = {}

    def execute(self, tuple: Tuple, /) -> None:
        self.held.setdefault(tuple["word"], []).append(tuple)

    def finish(self) -> None:
        for word, tuples in self.held.items():
            self.collector.emit((word, len(tuples)), anchors=tuples)
            for one in tuples:
                self.collector.ack(one)


def count_by_functions(tmp: Path) -> TopologyGraph:
    t = Topology("functions")
    stream = t.stream("lines", MemorySource("lines", LINES)).flat_map(split, "line", schema="word string")
    stream.group_by("word").persistent_aggregate(n=count()).into(MemorySink("out", staging=tmp))
    return t


def count_by_basic_bolts(tmp: Path) -> TopologyGraph:
    t = Topology("basic")
    made = t.bolt("split", SplitBasic(), lines(t).shuffle())
    return out(t, tmp, t.bolt("count", RunningCount(), made.fields("word")))


def count_by_bolts(tmp: Path) -> TopologyGraph:
    t = Topology("explicit")
    made = t.bolt("split", SplitExplicit(), lines(t).shuffle())
    return out(t, tmp, t.bolt("count", HeldCount(), made.fields("word")))


def all_linked(*groups: set[str]) -> Callable[[Batch], None]:
    """Checks that messages are known to share tuples just where they do: which neighbours of a chain are named depends
    on the order of the tuples, so the connected groups are what counts.
    """

    def check(batch: Batch) -> None:
        found: list[set[str]] = []
        for pair in batch.together:
            touching = [group for group in found if group & pair]
            found = [group for group in found if not group & pair] + [set(pair).union(*touching)]
        assert sorted(map(sorted, found)) == sorted(map(sorted, groups))

    return check


RUNNING = sorted((word, n) for word, number in COUNTS for n in range(1, number + 1))
case("count-functions", count_by_functions, rows={"out": COUNTS})
case("count-basic-bolts", count_by_basic_bolts, rows={"out": RUNNING})
case("count-bolts", count_by_bolts, rows={"out": COUNTS}, check=all_linked({"0", "2", "4", "5"}))


# --- groupings -----------------------------------------------------------------------------------------------------


class Where(BasicBolt):
    """Says in which task each word came out."""

    streams = "word string, task int"

    def prepare(self, context: BoltContext, /) -> None:
        self.task = context.task

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        emit((tuple["word"], self.task))


class Upper(ArrowBolt):
    streams = "word string"

    def execute(self, rows: pa.RecordBatch, /) -> ArrowRows:
        made = [word.upper() for word in rows.column("word").to_pylist()]
        return pa.RecordBatch.from_arrays([pa.array(made, pa.string())], names=["word"]), np.arange(rows.num_rows)


def upper(word: str) -> list[str]:
    return [word.upper()]


def by_letter(rows: pa.RecordBatch, tasks: int) -> list[int]:
    return [ord(word[0]) % tasks for word in rows.column("word").to_pylist()]


GROUPINGS: dict[str, Callable[[OutputStream], Subscription]] = {
    "shuffle": lambda s: s.shuffle(),
    "fields": lambda s: s.fields("word"),
    "partial_key": lambda s: s.partial_key("word"),
    "all": lambda s: s.all(),
    "global": lambda s: s.global_(),
    "none": lambda s: s.none(),
    "local_or_shuffle": lambda s: s.local_or_shuffle(),
    "custom": lambda s: s.custom(by_letter),
}


def tasks_by_word(batch: Batch) -> dict[object, set[object]]:
    found: dict[object, set[object]] = {}
    for word, task in batch.sorted("out"):
        found.setdefault(word, set()).add(task)
    return found


def promised(kind: str) -> Callable[[Batch], None]:
    """What the grouping promises of tasks."""

    def check(batch: Batch) -> None:
        rows, tasks = batch.sorted("out"), tasks_by_word(batch)
        copies = PARALLELISM if kind == "all" else 1
        assert Counter(word for word, _ in rows) == {word: n * copies for word, n in COUNTS}
        most = {"fields": 1, "partial_key": 2, "all": PARALLELISM, "global": 1, "custom": 1}.get(kind, PARALLELISM)
        assert all(len(its) <= most for its in tasks.values())
        if kind == "all":
            assert all(len(its) == PARALLELISM for its in tasks.values())
        if kind == "global":
            assert set().union(*tasks.values()) == {0}
        if kind == "custom":
            assert tasks == {word: {ord(word) % PARALLELISM} for word, _ in COUNTS}

    return check


def grouped(kind: str, bolt: BoltOrFunction, schema: str | None) -> Callable[[Path], TopologyGraph]:
    def build(tmp: Path) -> TopologyGraph:
        t = Topology(f"grouped-{kind}")
        return out(t, tmp, t.bolt("to", bolt, GROUPINGS[kind](words(t)), schema=schema))

    return build


for _kind in GROUPINGS:
    _copies = PARALLELISM if _kind == "all" else 1
    _upper = ones(word.upper() for word in WORDS * _copies)
    case(f"grouping-{_kind}", grouped(_kind, Where(), None), check=promised(_kind))
    case(f"grouping-{_kind}-function", grouped(_kind, upper, "word string"), rows={"out": _upper})
    case(f"grouping-{_kind}-arrow", grouped(_kind, Upper(), None), rows={"out": _upper})


class Names(Bolt):
    """Names the task of each word."""

    streams = "word string"

    def prepare(self, context: BoltContext, collector: Collector, /) -> None:
        super().prepare(context, collector)
        self.tasks = context.consumers["to"]

    def execute(self, tuple: Tuple, /) -> None:
        for word in tuple["line"].split():
            self.collector.emit(word, anchors=tuple, task=ord(word) % self.tasks)
        self.collector.ack(tuple)


def direct(tmp: Path) -> TopologyGraph:
    t = Topology("direct")
    return out(t, tmp, t.bolt("to", Where(), t.bolt("names", Names(), lines(t)).direct()))


case("grouping-direct", direct, check=promised("custom"))


def nowhere(rows: pa.RecordBatch, tasks: int) -> list[int]:
    return [99 if word == "bad" else len(word) % tasks for word in rows.column("word").to_pylist()]


def custom_failing(tmp: Path) -> TopologyGraph:
    t = Topology("custom-failing")
    return out(t, tmp, t.bolt("to", upper, words(t, [b"aa b", b"bad c", b"d"]).custom(nowhere), schema="word string"))


case("custom-fails-early", custom_failing, rows={"out": ones(["AA", "B", "D"])}, failed={"1": "error at to"})


def custom_failing_late(tmp: Path) -> TopologyGraph:
    t = Topology("custom-failing-late")
    far = t.bolt("far", lambda w: [w], words(t, [b"aa b", b"bad c", b"d"]).shuffle(), schema="word string")
    return out(t, tmp, t.bolt("to", upper, far.custom(nowhere), schema="word string"))


case(
    "custom-fails-late",
    custom_failing_late,
    rows={"out": ones(["AA", "B", "C", "D"])},
    late={"1": {"error at to"}},
)


# --- streams, diamonds, inputs -------------------------------------------------------------------------------------


class Sorts(BasicBolt):
    """Short words to one stream, their lengths to another; a third has no subscriber."""

    streams: ClassVar[Streams] = {"default": "word string", "sizes": "n int, word string", "unheard": "word string"}

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        for word in tuple["line"].split():
            emit(word)
            emit((len(word), word), "sizes")
            emit(word, "unheard")


class SortsExplicit(Bolt):
    streams = Sorts.streams

    def execute(self, tuple: Tuple, /) -> None:
        for word in tuple["line"].split():
            self.collector.emit(word, anchors=tuple)
            self.collector.emit({"word": word, "n": len(word)}, stream="sizes", anchors=[tuple, tuple])
            self.collector.emit(word, stream="unheard", anchors=tuple)
        self.collector.ack(tuple)


def streams(bolt: BasicBolt | Bolt) -> Callable[[Path], TopologyGraph]:
    def build(tmp: Path) -> TopologyGraph:
        t = Topology("streams")
        made = t.bolt("sorts", bolt, lines(t).shuffle())
        again = t.bolt("again", lambda n, word: [(word, n)], made["sizes"].fields("n"), schema="word string, n int")
        out(t, tmp, made, "words")
        return out(t, tmp, again, "sizes")

    return build


SIZES: Rows = [(word, 1) for word in WORDS]
case("two-streams", streams(Sorts()), rows={"words": ones(WORDS), "sizes": SIZES})
case("two-streams-explicit", streams(SortsExplicit()), rows={"words": ones(WORDS), "sizes": SIZES})


def diamond(left: str, right: str) -> Callable[[Path], TopologyGraph]:
    """One side has two exchanges, the other one and no bolt between, so its rows pass through a stage."""

    def build(tmp: Path) -> TopologyGraph:
        t = Topology("diamond")
        made = words(t)
        once = t.bolt("once", lambda w: [w + "1"], GROUPINGS[left](made), schema="word string")
        twice = t.bolt("twice", lambda w: [w + "2", w + "2"], GROUPINGS[right](made), schema="word string")
        far = t.bolt("far", lambda w: [w], once.fields("word"), schema="word string")
        farther = t.bolt("farther", lambda w: [w], far.shuffle(), schema="word string")
        both = t.bolt("both", lambda w: [w], farther.none(), twice.fields("word"), made.all(), schema="word string")
        return out(t, tmp, both)

    return build


for _left, _right in (("shuffle", "none"), ("none", "shuffle"), ("none", "none"), ("all", "all"), ("global", "custom")):
    _diamond = [w + "1" for w in WORDS] * (PARALLELISM if _left == "all" else 1)
    _diamond += [w + "2" for w in WORDS * 2] * (PARALLELISM if _right == "all" else 1) + WORDS * PARALLELISM
    case(f"diamond-{_left}-{_right}", diamond(_left, _right), rows={"out": ones(_diamond)})


class From(BasicBolt):
    """Says where each of its tuples came from."""

    streams = "origin string, word string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        emit((f"{tuple.component}/{tuple.stream}", tuple[tuple.fields[0]]))


def near_and_far(tmp: Path) -> TopologyGraph:
    """A bolt that takes from its own stage, by an exchange, and one stream twice."""
    t = Topology("near-and-far")
    made = words(t)
    far = t.bolt("far", lambda w: [w], made.shuffle(), schema="far string")
    return out(t, tmp, t.bolt("both", From(), made.none(), far.fields("far"), made.shuffle(), made.none()))


_near: Rows = [*(("split/default", w) for w in WORDS * 3), *(("far/default", w) for w in WORDS)]
case("a-bolt-fed-directly-and-by-exchange", near_and_far, rows={"out": sorted(_near, key=repr)})


def twice_in_place(tmp: Path) -> TopologyGraph:
    t = Topology("twice-in-place")
    made = words(t)
    return out(t, tmp, t.bolt("both", From(), made.none(), made.local_or_shuffle()))


case("a-stream-twice-in-place", twice_in_place, rows={"out": [("split/default", w) for w in sorted(WORDS * 2)]})


def swapped_columns(tmp: Path) -> TopologyGraph:
    """Edges of the same types in other orders: whoever goes by position mixes them up."""
    t = Topology("swapped")
    made = t.bolt("split", lambda s: [(w, s) for w in s.split()], lines(t), schema="a string, b string")
    other = t.bolt("other", lambda a, b: [(b, a)], made.shuffle(), schema="b string, a string")

    class Picks(BasicBolt):
        streams = "b string, a string"

        def execute(self, tuple: Tuple, emit: Emit, /) -> None:
            emit({"a": tuple["a"], "b": tuple["b"]})

    return out(t, tmp, t.bolt("picks", Picks(), made.fields("b"), other.fields("a")))


_swapped: Rows = sorted((s, w) for s in (p.decode() for p in LINES) for w in s.split() * 2)
case("columns-by-name", swapped_columns, rows={"out": sorted(_swapped, key=repr)})


# --- several spouts, units, untracked ------------------------------------------------------------------------------


class Join(Bolt):
    """Joins what both spouts say of a key, at the batch's end; a key of one spout alone goes on alone."""

    streams = "key string, value string"

    def __init__(self) -> None:
        self.sides: dict[str, dict[str, list[Tuple]]] = {}

    def execute(self, tuple: Tuple, /) -> None:
        self.sides.setdefault(tuple["key"], {}).setdefault(tuple.component, []).append(tuple)

    def finish(self) -> None:
        for key, sides in self.sides.items():
            held = [one for side in sides.values() for one in side]
            if len(sides) == 2:
                for order in sides["orders"]:
                    for payment in sides["payments"]:
                        self.collector.emit((key, order["item"] + payment["sum"]), anchors=[order, payment])
            else:
                self.collector.emit((key, "alone"), anchors=held)
            for one in held:
                self.collector.ack(one)


def no_soap(key: str, value: str) -> list[tuple[str, str]]:
    if value.startswith("soap"):
        raise ValueError("no soap")
    return [(key, value)]


ORDERS = [b'{"key": "x", "item": "tea"}', b'{"key": "y", "item": "soap"}', b'{"key": "z", "item": "jam"}']
PAYMENTS = [b'{"key": "y", "sum": "1"}', b'{"key": "x", "sum": "2"}', b'{"key": "x", "sum": "3"}', b"{}"]


def joined(tmp: Path) -> TopologyGraph:
    t = Topology("join")
    orders = t.spout("orders", MemorySource("orders", ORDERS, schema="key string, item string"))
    payments = t.spout("payments", MemorySource("payments", PAYMENTS, schema="key string not null, sum string"))
    both = t.bolt("join", Join(), orders.fields("key"), payments.fields("key"))
    return out(t, tmp, t.bolt("no-soap", no_soap, both.shuffle(), schema="key string, value string"))


case(
    "two-spouts-joined",
    joined,
    rows={"out": [("x", "tea2"), ("x", "tea3"), ("z", "alone")]},
    failed={"payments:3": "bad_message at payments"},
    late={"orders:1": {"error at no-soap"}, "payments:0": {"error at no-soap"}},
    check=all_linked({"orders:0", "payments:1", "payments:2"}, {"orders:1", "payments:0"}),
)


def many_spouts(tmp: Path) -> TopologyGraph:
    """More spouts than tasks, some with fewer messages than tasks, and a bolt without exchange behind all of them."""
    t = Topology("many-spouts")
    spouts = [t.spout(f"s{n}", MemorySource(f"s{n}", [b"%d" % n] * (n + 1))) for n in range(PARALLELISM + 2)]
    both = t.bolt("both", From(), *spouts)
    return out(t, tmp, t.bolt("to", lambda o, w: [(o, w)], both.none(), schema="origin string, word string"))


_many: Rows = [(f"s{n}/default", str(n)) for n in range(PARALLELISM + 2) for _ in range(n + 1)]
case("more-spouts-than-tasks", many_spouts, rows={"out": sorted(_many)})


def many_spouts_and_an_exchange(tmp: Path) -> TopologyGraph:
    """The same, and the first stage has more tasks than the next, to which rows go without an exchange of their own."""
    t = Topology("many-spouts-exchange")
    spouts = [t.spout(f"s{n}", MemorySource(f"s{n}", [b"%d" % n] * (n + 1))) for n in range(PARALLELISM + 2)]
    return out(t, tmp, t.bolt("both", From(), spouts[0].shuffle(), *spouts[1:]))


case("more-spouts-than-tasks-and-an-exchange", many_spouts_and_an_exchange, rows={"out": sorted(_many)})


def refuse_bad(word: str) -> list[str]:
    if word == "bad":
        raise FailTuple("bad word")
    return [word]


def units(tmp: Path) -> TopologyGraph:
    """A blank line is a row; an empty message has none, as an empty array has none."""
    t = Topology("units")
    texts = t.spout("texts", MemorySource("texts", [b"a\n\nb\n", b"", b"c\nbad\nd", b"g\n\xff"], unit="lines"))
    rows = [b'[{"line": "e"}, {"line": "bad"}]', b"[]", b'[{"line": "f"}]', b"[1]"]
    arrays = t.spout("arrays", MemorySource("arrays", rows, schema="line string", unit="json"))
    early = t.bolt("early", refuse_bad, texts, schema="line string")
    late = t.bolt("late", refuse_bad, arrays.shuffle(), schema="line string")
    out(t, tmp, t.bolt("held", HeldLines(), early.none(), late.global_()))
    return out(t, tmp, early, "early-rows")


class HeldLines(Bolt):
    """Holds everything, and acks it without a word more."""

    streams = "line string"

    def __init__(self) -> None:
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        self.held.append(tuple)

    def finish(self) -> None:
        for one in self.held:
            self.collector.emit(one["line"], anchors=one)
            self.collector.ack(one)


case(
    "message-units",
    units,
    rows={"out": ones(["a", "b", "", "e", "f"]), "early-rows": ones(["a", "b", ""])},
    failed={
        "texts:2": "failed at early",
        "texts:3": "bad_message at texts",
        "arrays:3": "bad_message at arrays",
    },
    late={"arrays:0": {"failed at late"}},
)


def untracked_messages(tmp: Path) -> TopologyGraph:
    """A spout that gives some messages no id: what becomes of them is nobody's concern."""
    t = Topology("untracked")
    items: list[Item] = [
        ("k1", "a bad"),
        (None, "b bad"),
        ("k2", "c"),
        (None, "d"),
        (None, b"\xff"),
        ("k3", "e bad"),
        ("k4", ""),
    ]
    source = IteratorSource("lines", items, confirm=lambda ids: None, clock=ManualClock())
    made = t.bolt("split", split, t.spout("lines", source), schema="w string")
    near = t.bolt("near", refuse_bad, made, schema="w string")
    far = t.bolt("far", Passes(), near.shuffle())
    return out(t, tmp, far)


class Passes(Bolt):
    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple[tuple.fields[0]], anchors=[tuple])
        self.collector.ack(tuple)


def three_failures(batch: Batch) -> None:
    assert sorted(batch.failed.values()) == ["failed at near", "failed at near"]


case("untracked-messages", untracked_messages, rows={"out": ones("bcd")}, unanchored=2, check=three_failures)


class Unanchored(Bolt):
    """Emits each word twice, once with an anchor."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        for word in tuple["line"].split():
            self.collector.emit(word)
            self.collector.emit(word, anchors=tuple)
        self.collector.ack(tuple)


def unanchored(tmp: Path) -> TopologyGraph:
    t = Topology("unanchored")
    made = t.bolt("loose", Unanchored(), lines(t, [b"a b", b"bad", b"c"]))
    far = t.bolt("far", refuse_bad, made.shuffle(), schema="word string")
    out(t, tmp, far)
    t.following(far).group_by("word").agg(n=count()).into(MemorySink("counts", staging=tmp))
    return t


case(
    "unanchored-tuples",
    unanchored,
    rows={"out": ones("abc" * 2), "counts": [("a", 2), ("b", 2), ("c", 2)]},
    late={"1": {"failed at far"}},
    unanchored=1,
)


class OnlyUnanchored(Bolt):
    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.ack(tuple)
        for word in tuple["line"].split():
            self.collector.emit(word)


def only_unanchored(tmp: Path) -> TopologyGraph:
    """Groups of tuples that nobody waits for: the share of what goes into them is 0."""
    t = Topology("only-unanchored")
    made = t.bolt("loose", OnlyUnanchored(), lines(t))
    t.following(made).group_by("word").agg(n=count()).into(MemorySink("out", staging=tmp))
    return t


case("groups-of-unanchored-tuples", only_unanchored, rows={"out": COUNTS})


# --- aggregates ----------------------------------------------------------------------------------------------------


def groups_between_exchanges(tmp: Path) -> TopologyGraph:
    t = Topology("groups")
    made = t.bolt("split", split, lines(t).shuffle(), schema="word string")
    counts = t.following(made).group_by("word").agg(n=count(), name="group")
    again = t.bolt("again", lambda w, n: [(w, n)], counts.output.fields("n"), schema="word string, n long")
    out(t, tmp, again, "counts")
    by_n = t.following(again).group_by("n").agg(words=count(), total=sum_("n"), name="by-n")
    far = t.bolt("far", Rows3(), by_n.output.all(), counts.output.global_())
    return out(t, tmp, far)


class Rows3(BasicBolt):
    streams = "row string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        emit(repr(tuple.as_dict()))


case(
    "groups-between-exchanges",
    groups_between_exchanges,
    rows={
        "counts": COUNTS,
        "out": ones(
            [repr({"n": n, "words": 1, "total": n}) for _, n in COUNTS for _ in range(PARALLELISM)]
            + [repr({"word": word, "n": n}) for word, n in COUNTS]
        ),
    },
)


def groups_behind_multi_anchors(tmp: Path) -> TopologyGraph:
    t = Topology("groups-behind")
    held = t.bolt("held", HeldCount(), words(t).shuffle())
    t.following(held).group_by("word").agg(total=sum_("n")).into(MemorySink("out", staging=tmp))
    out(t, tmp, t.bolt("to", lambda w, n: [w], held.fields("word"), schema="word string"), "held-rows")
    return t


def every_word(batch: Batch) -> None:
    assert {word for (word,) in batch.sorted("held-rows")} == {"a", "b", "c"}


case("groups-behind-multi-anchors", groups_behind_multi_anchors, rows={"out": COUNTS}, check=every_word)


class AroundGroup(Bolt):
    """One tuple, anchored to a message, to a group's row, and to another message, in this order."""

    streams = "n int"

    def __init__(self) -> None:
        self.lines: list[Tuple] = []
        self.groups: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        (self.groups if tuple.component == "group" else self.lines).append(tuple)

    def finish(self) -> None:
        if self.groups:
            first, *rest = self.lines
            self.collector.emit(len(rest), anchors=[first, *self.groups, *rest])
        for one in [*self.lines, *self.groups]:
            self.collector.ack(one)


def around_a_group(tmp: Path) -> TopologyGraph:
    t = Topology("around-a-group")
    given = lines(t, [b"a", b"a"])
    counts = t.following(given).group_by("line").agg(n=count(), name="group")
    return out(t, tmp, t.bolt("around", AroundGroup(), given.global_(), counts.output.global_()))


case("anchors-around-a-group", around_a_group, rows={"out": [(1,)]}, check=all_linked({"0", "1"}))


# --- failures ------------------------------------------------------------------------------------------------------


def picky(line: str) -> Iterator[str]:
    for word in line.split():
        match word:
            case "raise":
                raise ValueError("bad \x00 \udcff")
            case "fail":
                raise FailTuple("no")
            case "number":
                yield 5  # type: ignore[misc]
            case _:
                yield word


FAILING = [b"a raise", b"b", b"c fail", b"d number", b"e \xff", b"f", b""]
FAILED = {"0": "error at picky", "2": "failed at picky", "3": "error at picky", "4": "bad_message at lines"}


def early(tmp: Path) -> TopologyGraph:
    """All failures come before anything has gone anywhere, in one of two branches: nothing is left in either."""
    t = Topology("early")
    given = lines(t, FAILING)
    out(t, tmp, given, "given")
    t.following(given).group_by("line").agg(n=count()).into(MemorySink("counts", staging=tmp))
    return out(t, tmp, t.bolt("picky", picky, given, schema="word string"))


case(
    "early-failures",
    early,
    rows={"given": ones(["b", "f", ""]), "counts": [("", 1), ("b", 1), ("f", 1)], "out": ones("bf")},
    failed=FAILED,
)


def late(tmp: Path) -> TopologyGraph:
    t = Topology("late")
    given = lines(t, FAILING)
    out(t, tmp, given, "given")
    return out(t, tmp, t.bolt("picky", picky, given.shuffle(), schema="word string"))


case(
    "late-failures",
    late,
    rows={"given": ones(["a raise", "b", "c fail", "d number", "f", ""]), "out": ones("bf")},
    failed={"4": "bad_message at lines"},
    late={id_: {what} for id_, what in FAILED.items() if id_ != "4"},
)


class PickyBasic(BasicBolt):
    streams = "word string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        for word in picky(tuple["line"]):
            emit(word)


class PickyExplicit(Bolt):
    """What was emitted before the exception stays emitted, as in Storm; what `fail` fails likewise."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        for word in tuple["line"].split():
            if word == "fail":
                self.collector.fail(tuple, "no")
                return
            for good in picky(word):
                self.collector.emit(good, anchors=tuple)
        self.collector.ack(tuple)


def bolt_fails(bolt: Bolt | BasicBolt) -> Callable[[Path], TopologyGraph]:
    def build(tmp: Path) -> TopologyGraph:
        t = Topology("bolt-fails")
        return out(t, tmp, t.bolt("picky", bolt, lines(t, FAILING)))

    return build


_late = {id_: {what} for id_, what in FAILED.items() if id_ != "4"}
case(
    "a-basic-bolt-fails",
    bolt_fails(PickyBasic()),
    rows={"out": ones("bf")},
    failed={"4": "bad_message at lines"},
    late=_late,
)
case(
    "a-bolt-fails",
    bolt_fails(PickyExplicit()),
    rows={"out": ones("abcdf")},
    failed={"4": "bad_message at lines"},
    late=_late,
)


def first_branch(bolt_first: bool) -> Callable[[Path], TopologyGraph]:
    """A message that fails in a function of one branch; whether a bolt of the other saw it before decides which way."""

    def build(tmp: Path) -> TopologyGraph:
        t = Topology("branches")
        given = lines(t, [b"good", b"bad", b"fine"])
        if bolt_first:
            out(t, tmp, t.bolt("bolt", PassesLine(), given), "bolt-rows")
        out(t, tmp, t.bolt("function", refuse_bad, given, schema="word string"))
        if not bolt_first:
            out(t, tmp, t.bolt("bolt", PassesLine(), given), "bolt-rows")
        return t

    return build


class PassesLine(Passes):
    streams = "line string"


_good = ones(["good", "fine"])
case(
    "a-bolt-saw-it-before-it-failed",
    first_branch(True),
    rows={"bolt-rows": ones(["good", "bad", "fine"]), "out": _good},
    late={"1": {"failed at function"}},
)
case(
    "it-failed-before-a-bolt-saw-it",
    first_branch(False),
    rows={"bolt-rows": _good, "out": _good},
    failed={"1": "failed at function"},
)


class Forgets(Bolt):
    """Acks what has an even length, and forgets the rest."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple["word"], anchors=tuple)
        if len(tuple["word"]) % 2 == 0:
            self.collector.ack(tuple)


def forgets(tmp: Path) -> TopologyGraph:
    t = Topology("forgets")
    made = words(t, [b"aa bb", b"aa b", b"cc", b"d", b""])
    return out(t, tmp, t.bolt("forgets", Forgets(), made.fields("word")))


case(
    "a-bolt-that-leaves-tuples-unacked",
    forgets,
    rows={"out": ones(["aa", "bb", "aa", "b", "cc", "d"])},
    late={"1": {"unacked at forgets"}, "3": {"unacked at forgets"}},
)


class FailsHeld(Bolt):
    """Raises in `finish`: everything that it holds fails."""

    def __init__(self) -> None:
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        if tuple["word"] == "a":
            self.collector.ack(tuple)
        else:
            self.held.append(tuple)

    def finish(self) -> None:
        if self.held:
            raise ValueError("not like that")


def fails_held(tmp: Path) -> TopologyGraph:
    """A topology whose only end is a bolt without output streams."""
    t = Topology("fails-held")
    t.bolt("held", FailsHeld(), words(t).global_())
    return t


case("a-bolt-that-raises-at-the-end", fails_held, late={id_: {"error at held"} for id_ in ("0", "2", "4", "5")})


class SelfAnchor(Bolt):
    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple["word"], anchors=[tuple, tuple])
        self.collector.emit(tuple["word"], anchors=[tuple, tuple, tuple])
        self.collector.ack(tuple)


def self_anchor(tmp: Path) -> TopologyGraph:
    t = Topology("self-anchor")
    first = t.bolt("first", SelfAnchor(), words(t).shuffle())
    second = t.bolt("second", SelfAnchor(), first.all())
    return out(t, tmp, t.bolt("to", refuse_bad, second.partial_key("word"), schema="word string"))


case("self-anchor", self_anchor, rows={"out": ones(WORDS * 4 * PARALLELISM)})


class Parts(ArrowBolt):
    """Each line to one stream, its words to another, upside down; bad lines raise."""

    streams: ClassVar[Streams] = {"default": "line string", "words": "n int, word string"}

    def execute(self, rows: pa.RecordBatch, /) -> Mapping[str, ArrowRows]:
        given = rows.column("line").to_pylist()
        if any("bad" in line for line in given):
            raise ValueError("bad among them")
        parent = [i for i, line in enumerate(given) for _ in line.split()][::-1]
        made = [word for line in given for word in line.split()][::-1]
        words = pa.RecordBatch.from_arrays(
            [pa.array(made, pa.string()), pa.array(map(len, made), pa.int32())], names=["word", "n"]
        )
        return {"default": (rows, np.arange(rows.num_rows)), "words": (words, np.array(parent, np.int64))}


def arrow(way: str) -> Callable[[Path], TopologyGraph]:
    def build(tmp: Path) -> TopologyGraph:
        t = Topology("arrow")
        parts = t.bolt("parts", Parts(), GROUPINGS[way](lines(t, [*LINES, b"bad a", b"d", b"e bad"])))
        out(t, tmp, parts, "given")
        far = t.bolt("far", lambda n, word: [(word, n)], parts["words"].shuffle(), schema="word string, n int")
        return out(t, tmp, far)

    return build


_parts = {"given": ones([*(p.decode() for p in LINES), "d"]), "out": sorted((w, 1) for w in [*WORDS, "d"])}
_bad_parts = {"6": "error at parts", "8": "error at parts"}
case("arrow-bolt-early", arrow("none"), rows=_parts, failed=_bad_parts)
case("arrow-bolt-late", arrow("shuffle"), rows=_parts, late={id_: {what} for id_, what in _bad_parts.items()})


class DirectFails(BasicBolt):
    """Names tasks, and for one word a task that there is not."""

    streams = "word string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        for word in tuple["line"].split():
            emit(word, task=99 if word == "bad" else ord(word) % PARALLELISM)


def direct_fails(tmp: Path) -> TopologyGraph:
    t = Topology("direct-fails")
    made = t.bolt("names", DirectFails(), lines(t, [b"a b", b"c bad", b"d"]).shuffle())
    return out(t, tmp, t.bolt("to", Where(), made.direct()))


_direct: Rows = [(word, ord(word) % PARALLELISM) for word in "abd"]
case("direct-to-a-task-that-is-not", direct_fails, rows={"out": _direct}, late={"1": {"error at names"}})


@dataclass(frozen=True)
class RefusesB:
    """A writer that cannot hold the word "b"."""

    writer: SinkWriter

    @property
    def sink(self) -> str:
        return self.writer.sink

    def check(self, rows: pa.RecordBatch) -> list[tuple[int, str]]:
        found = rows.column("word").to_pylist() if "word" in rows.schema.names else []
        return [(i, "column 'word': no b here") for i, word in enumerate(found) if word == "b"]

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        return self.writer.open_task(context, schema)

    def files_in(self) -> str | None:
        return self.writer.files_in()

    @property
    def names_messages(self) -> bool:
        return self.writer.names_messages

    def resource(self) -> object | None:
        return self.writer.resource()


SOME = [b"a b", b"c", b"b b", b"a d"]


def refused_early(tmp: Path) -> TopologyGraph:
    t = Topology("refused-early")
    made = words(t, SOME)
    t.following(made).group_by("word").agg(n=count()).into(MemorySink("counts", staging=tmp))
    return out(t, tmp, made)


case(
    "a-sink-refuses-early",
    refused_early,
    rows={"out": ones("acd"), "counts": [("a", 1), ("c", 1), ("d", 1)]},
    failed={"0": "sink_error at counts", "2": "sink_error at counts"},
    wrap=RefusesB,
)


def refused_late(tmp: Path) -> TopologyGraph:
    t = Topology("refused-late")
    made = t.bolt("far", refuse_bad, words(t, SOME).fields("word"), schema="word string")
    t.following(made).group_by("word").agg(n=count()).into(MemorySink("counts", staging=tmp))
    return out(t, tmp, made)


case(
    "a-sink-refuses-late",
    refused_late,
    rows={"out": ones("aacd"), "counts": [("a", 2), ("c", 1), ("d", 1)]},
    late={"0": {"sink_error at counts"}, "2": {"sink_error at counts"}},
    wrap=RefusesB,
)


def nulls_late(tmp: Path) -> TopologyGraph:
    t = Topology("nulls")
    made = t.bolt("maybe", lambda w: [None if w == "b" else w], words(t, SOME).shuffle(), schema="word string")
    t.following(made).group_by("word").agg(n=count(), name="group").into(MemorySink("counts", staging=tmp))
    return out(t, tmp, made)


case(
    "null-keys-late",
    nulls_late,
    rows={"out": ones([*"aacd", None, None, None]), "counts": [("a", 2), ("c", 1), ("d", 1)]},
    late={"0": {"sink_error at group"}, "2": {"sink_error at group"}},
)


# --- sizes, types, empty tasks -------------------------------------------------------------------------------------


def explode(line: str) -> range:
    return range(MANY_ROWS) if line == "many" else range(0)


class Again(ArrowBolt):
    streams = "n long"

    def execute(self, rows: pa.RecordBatch, /) -> ArrowRows:
        return rows, np.arange(rows.num_rows)


def chunks(kind: str) -> Callable[[Path], TopologyGraph]:
    """More rows at once than a chunk holds, to one task, two stages far: they pass through one, too."""

    def build(tmp: Path) -> TopologyGraph:
        t = Topology("chunks")
        made = t.bolt("explode", explode, lines(t, [b"few", b"many", b"none"]), schema="n long")
        far = t.bolt("far", Again(), made.global_())
        both = t.bolt("both", Again(), far.shuffle(), made.all() if kind == "all" else made.none())
        t.following(both).map(lambda n: n % 2, "n", schema="odd long", name="odd").group_by("odd").agg(n=count()).into(
            MemorySink("out", staging=tmp)
        )
        return t

    return build


for _kind in ("all", "none"):
    _copies = PARALLELISM + 1 if _kind == "all" else 2
    case(f"large-chunks-{_kind}", chunks(_kind), rows={"out": [(odd, MANY_ROWS // 2 * _copies) for odd in (0, 1)]})


class AnchorsAll(Bolt):
    """One tuple anchored to everything that came: as many pairs as there are messages."""

    streams = "n long, total long"

    def __init__(self) -> None:
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        self.held.append(tuple)

    def finish(self) -> None:
        for n in range(2 if self.held else 0):
            self.collector.emit((n, len(self.held)), anchors=self.held)
        for one in self.held:
            self.collector.ack(one)


def anchors_all(tmp: Path) -> TopologyGraph:
    t = Topology("anchors-all")
    held = t.bolt("held", AnchorsAll(), lines(t, [b"x"] * 3_000).global_())
    return out(t, tmp, t.bolt("to", lambda n, total: [(n, total)], held.shuffle(), schema="n long, total long"))


case("thousands-of-anchors", anchors_all, rows={"out": [(0, 3_000), (1, 3_000)]})


TYPES = (
    "i tinyint, b boolean, d double, m decimal(20,3), t timestamp, day date, raw binary, tags array<string>, "
    "at struct<x:int,y:string>, void string"
)


def typed(line: str) -> list[tuple[object, ...]]:
    n = int(line)
    at = {"x": n, "y": None if n else "y"}
    when = datetime(2026, 1, 1 + n, 12, tzinfo=UTC)
    return [(n, n > 0, n / 8, Decimal(n) / 8, when, date(2026, 1, 1 + n), b"\x00\xff" * n, ["a"] * n, at, None)]


def types(tmp: Path) -> TopologyGraph:
    t = Topology("types")
    made = t.bolt("typed", typed, lines(t, [b"0", b"1", b"2"]), schema=TYPES)
    far = t.bolt("far", lambda *values: [values], made.fields("m", "day", "i"), schema=TYPES)

    class Same(BasicBolt):
        streams = TYPES

        def execute(self, tuple: Tuple, emit: Emit, /) -> None:
            emit(tuple.values)

    return out(t, tmp, t.bolt("same", Same(), far.shuffle()))


def typed_rows() -> Rows:
    return sorted((typed(str(n))[0] for n in range(3)), key=repr)


def same_types(batch: Batch) -> None:
    found = [tuple(v.astimezone(UTC) if isinstance(v, datetime) else v for v in row) for row in batch.sorted("out")]
    assert sorted(found, key=lambda row: str(row[0])) == sorted(typed_rows(), key=lambda row: str(row[0]))


case("types", types, check=same_types)


def one_message(tmp: Path) -> TopologyGraph:
    """Nearly every task has nothing to do."""
    t = Topology("one")
    made = t.bolt("first", SplitBasic(), lines(t, [b"a"]).shuffle())
    held = t.bolt("held", HeldCount(), made.fields("word"))
    t.following(held).group_by("word").agg(n=sum_("n")).into(MemorySink("out", staging=tmp))
    return t


case("one-message", one_message, rows={"out": [("a", 1)]})


def nothing_left(tmp: Path) -> TopologyGraph:
    """Every message ends in the first stage."""
    t = Topology("nothing-left")
    made = t.bolt("split", lambda line: [], lines(t), schema="word string")
    return out(t, tmp, t.bolt("held", HeldCount(), made.fields("word")))


case("nothing-crosses", nothing_left, rows={"out": []})


def long_chain(tmp: Path) -> TopologyGraph:
    """Seven exchanges, and five ackers for three tasks."""
    t = TopologyGraph("chain", ackers=5)
    stream = words(t)
    for number in range(7):
        stream = t.bolt(f"b{number}", SelfAnchor() if number == 3 else Passes(), stream.shuffle())
    return out(t, tmp, stream)


case("a-long-chain", long_chain, rows={"out": ones(WORDS * 2)})
