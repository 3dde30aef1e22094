"""Several spouts and message units through a whole job, on every engine: rows, failures and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.jobs import SEED, Ran

from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import BasicBolt, Emit, Tuple
from stormproof.core.contract.sink import files_of
from stormproof.core.contract.source import Lease, Limit, SliceReader, Source
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.source.group import SourceGroup, SpoutReader
from stormproof.core.source.memory import MemorySource
from stormproof.core.task.job import Job
from stormproof.core.tracking.verdict import mismatches
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.prepare.staging import prepared_batches
from stormproof.sinks.stores.memory import MemorySink

LINES = [b"a b\nc", b"", b"d\nfail e\nf", b"g\n\xff", b"a\n"]
CLICKS = [b'[{"n": 1, "at": "x"}, {"n": 2, "at": "a"}]', b"[]", b'[{"n": -1, "at": "y"}, {"n": 3, "at": "z"}]', b"[1]"]


@pytest.fixture(params=["inline", pytest.param("spark", marks=pytest.mark.spark)])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "inline":
        return InlineEngine(3)
    from stormproof.core.engine.spark import SparkEngine

    return SparkEngine(request.getfixturevalue("spark"), 3)


def split(line: str) -> list[str]:
    if line.startswith("fail"):
        raise ValueError("asked to fail")
    return line.split()


def checked(n: int, at: str) -> list[tuple[int, str]]:
    if n < 0:
        raise ValueError("negative")
    return [(n, at)]


class Merged(BasicBolt):
    """Takes tuples of both spouts."""

    streams = "word string, n int"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        if tuple.component == "split":
            emit((tuple["word"], 0))
        else:
            emit((tuple["at"], tuple["n"]))


def two_spouts(staging: Path) -> TopologyGraph:
    """Lines and clicks, each a message unit, each to a sink of its own and both to a third."""
    t = TopologyGraph("mixed")
    lines = t.spout("lines", MemorySource("lines", LINES, unit="lines"))
    clicks = t.spout("clicks", MemorySource("clicks", CLICKS, schema="n int not null, at string", unit="json"))
    words = t.bolt("split", split, lines.none(), schema="word string")
    good = t.bolt("checked", checked, clicks.shuffle(), schema="n int, at string")
    both = t.bolt("merged", Merged(), words.fields("word"), good.fields("at"))
    for name, stream in (("words", words), ("good", good), ("both", both)):
        t.sink(MemorySink(name, staging=staging), stream)
    return t


def one_spout(staging: Path) -> TopologyGraph:
    t = TopologyGraph("units")
    words = t.bolt(
        "split", split, t.spout("lines", MemorySource("lines", LINES, unit="lines")).none(), schema="word string"
    )
    t.sink(MemorySink("words", staging=staging), words)
    return t


@dataclass(frozen=True)
class Batch:
    """One batch of a topology's source, run once."""

    source: Source
    ran: Ran

    def failures(self) -> dict[str, str]:
        """Early and late, by shown id."""
        found = [*self.ran.report.failures, *self.ran.report.late]
        return {self.source.shown_id(f.id, f.origin): f"{f.reason} at {f.component}" for f in found}

    def rows(self, sink: str) -> list[tuple[object, ...]]:
        return self.ran.sorted(sink)


def run(
    engine: Engine,
    t: TopologyGraph,
    staging: Path,
    *,
    per_message: bool = False,
    excluded: Sequence[str] = (),
    spoil: bool = False,
) -> Batch:
    """Open all messages as one slice and run it; `spoil` mistakes readers of one spout for those of another."""
    source = t.source
    source.subscribe("s", 1)
    slice_ = source.open(Lease("a", 1), Limit(), SEED)
    assert slice_ is not None
    readers: tuple[SliceReader, ...] = source.readers(slice_, engine.parallelism)
    ids = {
        source.shown_id(row["id"], row["origin"]): row["id"]
        for reader in readers
        for rows in reader.read(SEED, frozenset(), 100)
        for row in rows.to_pylist()
    }
    out = frozenset(ids[shown] for shown in excluded)
    if spoil:
        readers = tuple(replace(r, index=0) if isinstance(r, SpoutReader) else r for r in readers)
    plan = compile_topology(t, Guarantee.EXACTLY_ONCE)
    sinks = [sink for sink in t.sinks if isinstance(sink, MemorySink)]
    writers = {
        s.name: s.open(SinkIdentity(t.name, "life", s.name), plan.sinks[s.name], epoch=1).writer() for s in sinks
    }
    report = engine.run(Job(plan, readers, writers, "life", 1, 1, SEED, True, out, per_message))
    rows = {
        s.name: [row for b in prepared_batches(str(staging), files_of(report.files, s.name)) for row in b.to_pylist()]
        for s in sinks
    }
    wrong = mismatches(report, source.expect(slice_, SEED, out), tracked=True)
    return Batch(source, Ran(report, rows, wrong))


@pytest.mark.parametrize("per_message", [False, True])
def test_a_message_unit_is_complete_or_fails_as_one(engine: Engine, tmp_path: Path, per_message: bool) -> None:
    batch = run(engine, one_spout(tmp_path), tmp_path, per_message=per_message)
    assert batch.ran.mismatches == batch.ran.report.violations == ()
    assert batch.ran.report.lost == ()
    assert batch.failures() == {"2": "error at split", "3": "bad_message at lines"}
    assert batch.rows("words") == [("a",), ("a",), ("b",), ("c",)]
    assert batch.ran.report.read_messages == 5


@pytest.mark.parametrize("per_message", [False, True])
def test_several_spouts_in_one_batch(engine: Engine, tmp_path: Path, per_message: bool) -> None:
    t = two_spouts(tmp_path)
    assert isinstance(t.source, SourceGroup)
    batch = run(engine, t, tmp_path, per_message=per_message)
    assert batch.ran.mismatches == batch.ran.report.violations == ()
    assert batch.ran.report.lost == ()
    assert batch.failures() == {
        "lines:2": "error at split",
        "lines:3": "bad_message at lines",
        "clicks:2": "error at checked",
        "clicks:3": "bad_message at clicks",
    }
    assert batch.ran.report.read_messages == 9


def test_without_the_messages_that_failed_the_rest_is_whole(engine: Engine, tmp_path: Path) -> None:
    batch = run(engine, two_spouts(tmp_path), tmp_path, excluded=["lines:2", "clicks:2"])
    assert batch.ran.mismatches == ()
    assert batch.rows("words") == [("a",), ("a",), ("b",), ("c",)]
    assert batch.rows("good") == [(1, "x"), (2, "a")]
    assert batch.rows("both") == [("a", 0), ("a", 0), ("a", 2), ("b", 0), ("c", 0), ("x", 1)]
    assert batch.ran.report.read_messages == 7


def test_messages_that_are_read_as_another_spouts_are_seen(engine: Engine, tmp_path: Path) -> None:
    """The negative control: the number is right, the tokens are not."""
    batch = run(engine, two_spouts(tmp_path), tmp_path, spoil=True)
    assert batch.ran.report.read_messages == 9
    assert batch.ran.mismatches != ()
