"""Attacks on what the stages promise: wire rows that go astray, messages of odd kinds, failures by the thousand."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.jobs import run_job, source
from support.memory_run import World

from stormproof import MemorySink, MemorySource, Topology, count, sum_
from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import ArrowBolt, ArrowRows, BasicBolt, Bolt, BoltContext, Collector, Emit, Tuple
from stormproof.core.contract.sink import SinkWriter, TaskContext, TaskWriter
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.aggregation import ReducerAggregator
from stormproof.core.graph.components import OutputStream
from stormproof.core.graph.plan import FUSED_MAX, compile_topology
from stormproof.core.pending.memory import MemorySliceReader
from stormproof.core.source.iterator import UntrackedSliceReader
from stormproof.core.task.job import WireRow

FIRST_ID = 100


class Pass(Bolt):
    """Gives each tuple on, anchored to it."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple.values[0], anchors=tuple)
        self.collector.ack(tuple)


class Refuse(Bolt):
    """Fails each tuple."""

    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.fail(tuple, "no")


class Neighbours(Bolt):
    """Holds all, pairs neighbours on two streams, says one word without an anchor, and tells each on a stream of nobody."""

    streams = {"default": "word string", "odd": "word string", "unheard": "word string"}  # noqa: RUF012

    def prepare(self, context: BoltContext, collector: Collector, /) -> None:
        self.collector = collector
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        self.held.append(tuple)
        self.collector.emit("nobody hears", stream="unheard", anchors=tuple)

    def finish(self) -> None:
        for number, (one, other) in enumerate(pairwise(self.held)):
            stream = "odd" if number % 2 else "default"
            self.collector.emit(f"{one['word']}+{other['word']}", anchors=[one, other, one], stream=stream)
        self.collector.emit("unanchored")
        for held in self.held:
            self.collector.ack(held)


class ByLength(BasicBolt):
    """Names the task of each tuple by the length of its word."""

    streams = "word string, n long"

    def prepare(self, context: BoltContext, /) -> None:
        self.tasks = context.consumers["behind"]

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        n = len(tuple["word"])
        emit((tuple["word"], n), task=n % self.tasks)


def bad(word: str) -> list[str]:
    raise ValueError("bad")


# -- wire rows that go astray ----------------------------------------------------------------------------------------

LINES = [b"a b a", b"", b"b c", b"d a"]


def everything(tmp: Path) -> Topology:
    """Every way that rows can travel: five exchanges, relays, copies, direct tasks, groups, pairs, words of nobody."""
    t = Topology("everything")
    lines = t.spout("lines", source())
    words = t.bolt("split", str.split, lines.shuffle(), schema="word string")
    paired = t.bolt("paired", Neighbours(), words.fields("word"), words.none())
    sized = t.bolt("sized", ByLength(), paired.shuffle(), paired["odd"].global_(), words.shuffle())
    behind = t.bolt("behind", lambda word, n: [(word, n)], sized.direct(), schema="word string, n long")
    t.sink(MemorySink("copies", staging=tmp), t.bolt("copied", lambda w: [w], words.all(), schema="word string"))
    grouped = t.following(behind).group_by("word").agg(n=count(), total=sum_("n"))
    t.sink(MemorySink("groups", staging=tmp), grouped.output)
    t.following(words).group_by("word").persistent_aggregate(n=count()).into(MemorySink("counts", staging=tmp))
    return t


class Astray:
    """Loses, doubles, triples or misleads one wire row before a stage; `rows` is how many there were before each."""

    def __init__(self, stage: int = -1, place: int = 0, how: str = "") -> None:
        self.stage, self.place, self.how = stage, place, how
        self.rows: dict[int, int] = {}

    def __call__(self, stage: int, given: list[WireRow]) -> list[WireRow]:
        rows = [*given]
        self.rows[stage] = len(rows)
        if stage != self.stage:
            return rows
        row = rows[self.place % len(rows)]
        match self.how:
            case "lost":
                rows.remove(row)
            case "misled":
                rows.remove(row)
                rows.append(WireRow((row.dest + 1) % 2, row.source, row.edge, row.seq, row.payload))
            case _:
                rows += [row] * (1 if self.how == "doubled" else 2)
        return rows


def test_what_goes_astray_below_is_complete_otherwise(tmp_path: Path) -> None:
    whole = Astray()
    ran = run_job(InlineEngine(2, tamper=whole), everything(tmp_path), LINES, tmp_path, per_message=True)
    assert (ran.mismatches, ran.lost()) == ((), [])
    assert sorted(whole.rows) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("how", ["lost", "doubled", "tripled", "misled"])
@pytest.mark.parametrize(
    ("stage", "per_message"), [(stage, mode) for stage in range(1, 7) for mode in (False, True) if stage < 6 or mode]
)
def test_no_wire_row_goes_astray_unseen(tmp_path: Path, stage: int, per_message: bool, how: str) -> None:
    """One row before each stage; for a larger case all 1,592 ways were tried once."""
    engine = InlineEngine(2, tamper=Astray(stage, 7 * stage, how))
    ran = run_job(engine, everything(tmp_path), LINES, tmp_path, per_message=per_message)
    assert ran.mismatches


class InTurn(BasicBolt):
    """Names the tasks of `behind` in turn, and gives each word on a second stream, too."""

    streams = {"default": "word string", "rest": "word string"}  # noqa: RUF012

    def prepare(self, context: BoltContext, /) -> None:
        self.tasks = context.consumers["behind"]
        self.next = 0

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        emit(tuple["line"], task=self.next % self.tasks)
        emit(tuple["line"], stream="rest")
        self.next += 1


def test_a_direct_stream_has_the_tasks_of_its_own_subscriber_alone(tmp_path: Path) -> None:
    """However few tasks another subscriber of the same bolt asks for."""
    t = Topology("t")
    given = t.bolt("given", InTurn(), t.spout("lines", source()))
    t.sink(MemorySink("out", staging=tmp_path), t.bolt("behind", Pass(), given.direct()))
    counted = t.following(given["rest"]).group_by("word").parallelism(1).agg(n=count())
    counted.into(MemorySink("counts", staging=tmp_path))
    ran = run_job(InlineEngine(3), t, [b"a", b"b", b"c"] * 3, tmp_path)
    assert (ran.mismatches, ran.late(), ran.failed()) == ((), {}, {})
    assert len(ran.rows["out"]) == 9


# -- messages that nobody tracks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_message", [False, True])
def test_an_untracked_message_that_does_not_decode_leaves_no_row(tmp_path: Path, per_message: bool) -> None:
    t = Topology("t")
    t.sink(MemorySink("out", staging=tmp_path), t.spout("lines", source()))
    payloads = [b"a", b"\xff", b"c", b"\xfe"]
    reader = UntrackedSliceReader(MemorySliceReader((100, 101, 102, 103), tuple(payloads)), frozenset({101, 102}))
    ran = run_job(InlineEngine(1), t, payloads, tmp_path, readers=(reader,), per_message=per_message)
    assert ran.sorted("out") == [("a",), ("c",)]
    assert ran.failed() == {3: "bad_message at lines"}
    assert ran.report.unanchored == 1
    assert ran.lost() == []


# -- failures by the thousand ----------------------------------------------------------------------------------------


class RefusingKeys:
    """A sink writer that can hold no key."""

    def __init__(self, writer: SinkWriter) -> None:
        self._writer = writer
        self.sink = writer.sink

    def check(self, rows: pa.RecordBatch) -> list[tuple[int, str]]:
        return [(row, f"no key like {rows.column(0)[row]}") for row in range(rows.num_rows)]

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        return self._writer.open_task(context, schema)

    def files_in(self) -> str | None:
        return self._writer.files_in()

    @property
    def names_messages(self) -> bool:
        return self._writer.names_messages

    def resource(self) -> object | None:
        return self._writer.resource()


def seconds(
    build: Callable[[Path], Topology],
    messages: int,
    folder: Path,
    expected: tuple[int, int],
    wrap: Callable[[SinkWriter], SinkWriter] = lambda writer: writer,
) -> float:
    """How long one job takes, the best of two; `expected` is how many fail early, and late."""
    took: list[float] = []
    for number in range(2):
        part = folder / f"{messages}-{number}"
        topology, payloads = build(part), [b"m%d" % i for i in range(messages)]
        started = time.thread_time()
        ran = run_job(InlineEngine(1), topology, payloads, part, wrap=wrap)
        took.append(time.thread_time() - started)
        assert (len(ran.report.failures), len(ran.report.late), ran.mismatches) == (*expected, ())
    return min(took)


def refused_keys(tmp: Path) -> Topology:
    t = Topology("t")
    t.stream("lines", source()).group_by("line").persistent_aggregate(n=count()).into(MemorySink("out", staging=tmp))
    return t


def refused_words(tmp: Path, exchange: bool = False) -> Topology:
    t = Topology("t")
    words = t.bolt("words", lambda line: [line] * 20, t.spout("lines", source()), schema="word string")
    t.sink(MemorySink("out", staging=tmp), t.bolt("refuse", Refuse(), words.shuffle() if exchange else words))
    return t


def test_keys_that_a_sink_refuses_are_traced_in_one_pass(tmp_path: Path) -> None:
    few, many = (seconds(refused_keys, n, tmp_path, (n, 0), RefusingKeys) for n in (300, 2_400))
    assert many < 24 * few + 0.05, f"8 times the keys took {many / few:.0f} times as long; {many:.3f} s"


CALLS: Counter[str] = Counter()


class NoThrees(ReducerAggregator):
    """Counts; a three raises."""

    result = "long"

    def init(self) -> int:
        return 0

    def reduce(self, value: Any, /, *values: Any) -> object:
        CALLS["reduce"] += 1
        if values[0].endswith("3"):
            raise ValueError("a three")
        return value + 1


def refused_reductions(tmp: Path) -> Topology:
    t = Topology("t")
    whole = t.following(t.spout("lines", source())).aggregate(n=NoThrees())
    whole.into(MemorySink("out", staging=tmp))
    return t


def test_tuples_that_a_reducer_refuses_are_found_in_one_go(tmp_path: Path) -> None:
    """Not in one go each: then 40 of 400 would take some 40 * 200 calls."""
    CALLS.clear()
    ran = run_job(InlineEngine(1), refused_reductions(tmp_path), [b"m%d" % i for i in range(400)], tmp_path)
    assert (len(ran.report.late), ran.mismatches) == (40, ())
    assert CALLS["reduce"] <= 3 * 400


def test_a_task_names_a_message_once_however_many_of_its_tuples_fail_behind_an_exchange(tmp_path: Path) -> None:
    ran = run_job(InlineEngine(1), refused_words(tmp_path, exchange=True), [b"a", b"b"], tmp_path)
    assert [f.id - FIRST_ID for f in ran.report.late] == [0, 1]
    assert ran.mismatches == ()


# -- everything hangs together ---------------------------------------------------------------------------------------


class Total(Bolt):
    """Counts all tuples of the batch: the total is anchored to each, and each goes on by itself, too."""

    streams = {"default": "word string", "each": "word string"}  # noqa: RUF012

    def __init__(self) -> None:
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        self.held.append(tuple)
        self.collector.emit(tuple["line"], stream="each", anchors=tuple)

    def finish(self) -> None:
        if self.held:
            self.collector.emit(f"total {len(self.held)}", anchors=self.held)
        for held in self.held:
            self.collector.ack(held)


class FirstFails(Bolt):
    """Fails the first tuple of whatever it gets: in each run another message fails late."""

    streams = "word string"
    first = True

    def execute(self, tuple: Tuple, /) -> None:
        if self.first:
            self.first = False
            self.collector.fail(tuple, "the first")
            return
        self.collector.emit(tuple["line"], anchors=tuple)
        self.collector.ack(tuple)


def not_bad(word: str) -> list[str]:
    if word.startswith("bad"):
        raise ValueError("bad")
    return [word]


def total(t: Topology, lines: OutputStream) -> OutputStream:
    counted = t.bolt("total", Total(), lines.global_())
    checked = t.bolt("checked", not_bad, counted["each"].shuffle(), schema="word string")
    return t.bolt("both", lambda word: [word], checked, counted, schema="word string")


def first_fails(t: Topology, lines: OutputStream) -> OutputStream:
    early = t.bolt("early", not_bad, lines, schema="line string")
    return t.bolt("first", FirstFails(), early.global_())


class Hung(World):
    """One bolt or two between memory source and memory sink; whatever failed comes again at once."""

    def __init__(
        self,
        payloads: list[bytes],
        folder: Path,
        build: Callable[[Topology, OutputStream], OutputStream],
        attempts: int,
    ) -> None:
        super().__init__([], folder, batch_messages=9)
        self.source = MemorySource(
            "lines", payloads, max_attempts=attempts, backoff_base_s=0.0, clock=self.clock, rng=self.rng
        )
        self.sinks = [MemorySink("out", staging=folder / "out")]
        self.topology = t = Topology("hung")
        t.sink(self.sinks[0], build(t, t.spout("lines", self.source)))

    def dead(self) -> list[int]:
        return sorted(d.id for d in self.source.dead_letters())


def messages(number: int, *bad_ones: int) -> list[bytes]:
    return [b"bad%d" % i if i in bad_ones else b"m%d" % i for i in range(number)]


@pytest.mark.parametrize("poisons", [(4,), (1, 4, 7), tuple(range(9))], ids=len)
def test_messages_that_all_hang_together_come_as_often_as_their_poison_may_fail(
    tmp_path: Path, poisons: tuple[int, ...]
) -> None:
    """Returned messages count no failure: what bounds their coming is that the poison counts one each time."""
    world = Hung(messages(9, *poisons), tmp_path, total, attempts=3)
    statistics = world.run(max_batches=20)
    assert world.dead() == list(poisons)
    good = 9 - len(poisons)
    assert statistics.batches == (4 if good else 3)
    assert (statistics.failed, statistics.returned) == (3 * len(poisons), 3 * good)
    expected = {f"m{i}": 1 for i in range(9) if i not in poisons} | ({f"total {good}": 1} if good else {})
    assert world.counts() == Counter(expected)


def test_batches_that_hang_together_stay_apart(tmp_path: Path) -> None:
    world = Hung(messages(25, *range(0, 25, 5)), tmp_path, total, attempts=3)
    statistics = world.run(max_batches=40)
    assert world.dead() == list(range(0, 25, 5))
    words = world.counts()
    assert {word: n for word, n in words.items() if word.startswith("m")} == {f"m{i}": 1 for i in range(25) if i % 5}
    assert sum(int(word.split()[1]) * n for word, n in words.items() if word.startswith("total")) == 20
    assert statistics.batches <= 3 * 4
    assert world.source.backlog().waiting == 0


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_bolt_that_fails_another_message_each_time_ends(tmp_path: Path, guarantee: Guarantee) -> None:
    """Early failures beside late ones, batches that are split after their reruns, retries that fail late: all end."""
    world = Hung(messages(9, 2, 5), tmp_path, first_fails, attempts=2)
    statistics = world.run(guarantee, max_batches=60)
    words = world.counts()
    dead = world.dead()
    assert {2, 5} <= set(dead)
    assert sorted([f"m{i}" for i in range(9) if i not in dead]) == sorted(words.elements())
    assert statistics.failed <= 2 * 9
    assert world.source.backlog().waiting == 0


# -- wrong use that would lose tuples silently -----------------------------------------------------------------------


class YieldingBolt(BasicBolt):
    streams = "word string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> Any:
        yield tuple["line"]


class AsyncBolt(Bolt):
    streams = "word string"

    async def execute(self, tuple: Tuple, /) -> Any:  # type: ignore[override]
        self.collector.ack(tuple)


class LateYieldingBolt(Pass):
    def finish(self) -> Any:
        yield "the rest"


class Columns(ArrowBolt):
    streams = "word string"

    def execute(self, rows: pa.RecordBatch, /) -> ArrowRows:
        return rows, np.arange(rows.num_rows)


async def later(line: str) -> list[str]:
    return [line]


async def late_ones(line: str) -> AsyncIterator[str]:
    yield line


def yielding(line: str) -> Iterator[str]:
    yield line


def built(add: Callable[[Topology, OutputStream], object]) -> None:
    t = Topology("t")
    add(t, t.spout("lines", source()))


WRONG: list[tuple[Callable[[Topology, OutputStream], object], str]] = [
    (lambda t, s: t.bolt("b", YieldingBolt(), s), "YieldingBolt.execute is a generator function"),
    (lambda t, s: t.bolt("b", AsyncBolt(), s), "AsyncBolt.execute is async"),
    (lambda t, s: t.bolt("b", LateYieldingBolt(), s), "LateYieldingBolt.finish is a generator function"),
    (lambda t, s: t.bolt("b", Pass, s, schema="word string"), "Pass is a class; give an object of it: Pass()"),
    (lambda t, s: t.following(s).filter(yielding, "line"), "its function is a generator function"),
    (lambda t, s: t.following(s).map(yielding, "line", schema="word string"), "use flat_map for one that yields"),
    (lambda t, s: t.following(s).arrow(partial(later), schema="word string"), "its function is async"),
    (lambda t, s: t.following(s).map(late_ones, "line", schema="word string"), "use flat_map for one that yields"),
    (lambda t, s: t.following(s).filter(bool, "line", concurrency=0), "concurrency is 0; it must be a whole number"),
    (lambda t, s: t.following(s).filter(bool, "line", concurrency=1025), "a whole number, 1 to 1024"),
    (lambda t, s: t.following(s).filter(bool, "line", concurrency=True), "concurrency is True"),
    (lambda t, s: t.sink(MemorySink("out"), s.shuffle()), "is no output stream; a sink takes one as it is"),  # type: ignore[arg-type]
    (lambda t, s: t.bolt("c", Pass(), t.bolt("b", Columns(), s).direct()), "'b' is an ArrowBolt, which cannot"),
]


@pytest.mark.parametrize(("add", "said"), WRONG, ids=[said for _, said in WRONG])
def test_refused_before_it_runs(add: Callable[[Topology, OutputStream], object], said: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(said)):
        built(add)


def chain(number: int, every: int = 1_000) -> Topology:
    """So many functions one behind the other, with an exchange after `every` of them."""
    t = Topology("chain")
    stream = t.spout("lines", source())
    for i in range(number):
        stream = t.bolt(f"b{i}", yielding, stream.shuffle() if i % every == every - 1 else stream, schema="line string")
    t.sink(MemorySink("out"), stream)
    return t


def test_more_functions_without_an_exchange_than_pythons_stack_holds_are_refused() -> None:
    assert len(compile_topology(chain(FUSED_MAX - 2), Guarantee.EXACTLY_ONCE).stages) == 1
    assert len(compile_topology(chain(FUSED_MAX, every=150), Guarantee.EXACTLY_ONCE).stages) == 2
    with pytest.raises(TopologyError, match="more than 200 components follow each other without an exchange"):
        compile_topology(chain(FUSED_MAX), Guarantee.EXACTLY_ONCE)


def test_a_function_that_yields_is_a_flat_map(tmp_path: Path) -> None:
    t = Topology("t")
    t.sink(MemorySink("out", staging=tmp_path), t.bolt("b", yielding, t.spout("lines", source()), schema="word string"))
    assert run_job(InlineEngine(1), t, [b"a", b"b"], tmp_path).sorted("out") == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"word": "a"}, "got the dict {'word': 'a'}; give [it] for one value"),
        (b"a", "got the bytes b'a'"),
        ("a", "got the text 'a'"),
        (None, "got None; give [] for nothing"),
    ],
    ids=["dict", "bytes", "text", "none"],
)
def test_a_single_value_is_not_taken_for_several(tmp_path: Path, value: Any, said: str) -> None:
    """The keys of a dict are iterable, too, and would be words like any others."""
    t = Topology("t")
    words = t.bolt("b", lambda line: value, t.spout("lines", source()), schema="word string")
    t.sink(MemorySink("out", staging=tmp_path), words)
    ran = run_job(InlineEngine(1), t, [b"x"], tmp_path)
    assert ran.failed() == {0: "error at b"}
    assert said in ran.report.failures[0].error
