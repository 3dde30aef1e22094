"""Attacks on what the stages promise: wire rows that go astray, messages of odd kinds, failures by the thousand."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from support.jobs import run_job, source

from stormproof import MemorySink, Topology, count, sum_
from stormproof.core.bolt import BasicBolt, Bolt, BoltContext, Collector, Emit, Tuple
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.sink import SinkWriter, TaskContext, TaskWriter
from stormproof.core.source.iterator import UntrackedSliceReader
from stormproof.core.source.memory import MemorySliceReader
from stormproof.core.wire import WireRow, wire_batch, wire_rows

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

    def __call__(self, stage: int, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        rows = [row for batch in batches for row in wire_rows(batch)]
        self.rows[stage] = len(rows)
        if stage != self.stage:
            return batches
        row = rows[self.place % len(rows)]
        match self.how:
            case "lost":
                rows.remove(row)
            case "misled":
                rows.remove(row)
                rows.append(WireRow((row.dest + 1) % 2, row.source, row.edge, row.seq, row.payload))
            case _:
                rows += [row] * (1 if self.how == "doubled" else 2)
        return [wire_batch(rows)]


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


def seconds(build: Callable[[Path], Topology], messages: int, folder: Path, expected: tuple[int, int]) -> float:
    """How long one job takes, the best of two; `expected` is how many fail early, and late."""
    took: list[float] = []
    for number in range(2):
        part = folder / f"{messages}-{number}"
        topology, payloads = build(part), [b"m%d" % i for i in range(messages)]
        started = time.thread_time()
        ran = run_job(InlineEngine(1), topology, payloads, part, wrap=RefusingKeys)
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
    few, many = (seconds(refused_keys, n, tmp_path, (n, 0)) for n in (300, 2_400))
    assert many < 24 * few + 0.05, f"8 times the keys took {many / few:.0f} times as long; {many:.3f} s"


def test_tuples_that_a_bolt_fails_are_looked_up_at_once(tmp_path: Path) -> None:
    few, many = (seconds(refused_words, n, tmp_path, (0, n)) for n in (30, 240))
    assert many < 24 * few + 0.05, f"8 times the tuples took {many / few:.0f} times as long; {many:.3f} s"


def test_a_task_names_a_message_once_however_many_of_its_tuples_fail_behind_an_exchange(tmp_path: Path) -> None:
    ran = run_job(InlineEngine(1), refused_words(tmp_path, exchange=True), [b"a", b"b"], tmp_path)
    assert [f.id - FIRST_ID for f in ran.report.late] == [0, 1]
    assert ran.mismatches == ()
