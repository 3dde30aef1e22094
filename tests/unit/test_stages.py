"""Topologies of several stages and streams in one process: exchanges, diamonds, relays, verdicts message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from support.jobs import Ran, run_job, source

from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.components import Subscription
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.task.job import WireRow
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.aggregate import count
from stormproof.trident.topology.stream import Topology

LINES = [b"a b a", b"", b"b", b"  ", b"c a\tb", b"b b"]


def split(line: str) -> list[str]:
    return line.split()


def pick(word: str) -> Iterator[str]:
    if word == "bad":
        raise ValueError("bad word")
    yield word.upper()


def good(ran: Ran) -> Ran:
    assert ran.mismatches == ()
    assert ran.report.violations == ()
    return ran


def words(tmp: Path, grouping: str, *fields: str) -> TopologyGraph:
    t = Topology("words")
    lines = t.spout("lines", source())
    made = t.bolt("split", split, lines.shuffle(), schema="word string")
    upper = t.bolt("upper", pick, getattr(made, grouping)(*fields), schema="up string")
    t.sink(MemorySink("ups", staging=tmp), upper)
    return t


GROUPINGS = [("shuffle",), ("fields", "word"), ("partial_key", "word"), ("global_",), ("none",), ("local_or_shuffle",)]
EXPECTED = sorted((word.upper(),) for line in LINES for word in line.decode().split())


@pytest.mark.parametrize("per_message", [False, True])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=lambda g: g[0])
def test_every_grouping_carries_rows_and_their_tracking(
    tmp_path: Path, grouping: Sequence[str], tracked: bool, per_message: bool
) -> None:
    ran = good(
        run_job(InlineEngine(3), words(tmp_path, *grouping), LINES, tmp_path, tracked=tracked, per_message=per_message)
    )
    assert ran.sorted("ups") == EXPECTED
    assert ran.lost() == []
    assert (ran.report.ack_xor != 0) is tracked


@pytest.mark.parametrize("per_message", [False, True])
def test_the_all_grouping_tracks_every_copy(tmp_path: Path, per_message: bool) -> None:
    ran = good(run_job(InlineEngine(3), words(tmp_path, "all"), LINES, tmp_path, per_message=per_message))
    assert ran.sorted("ups") == sorted(EXPECTED * 3)
    assert ran.lost() == []


@pytest.mark.parametrize("per_message", [False, True])
def test_a_failure_behind_an_exchange_is_late_and_its_share_accounted_for(tmp_path: Path, per_message: bool) -> None:
    payloads = [b"a b", b"a bad b", b"c"]
    ran = good(run_job(InlineEngine(2), words(tmp_path, "fields", "word"), payloads, tmp_path, per_message=per_message))
    assert ran.late() == {1: "error at upper"}
    assert ran.report.failures == ()
    assert ran.report.late_xor != 0
    assert ran.lost() == []
    assert ran.sorted("ups") == [("A",), ("A",), ("B",), ("B",), ("C",)]


def diamond(tmp: Path, left: str = "shuffle", right: str = "none") -> TopologyGraph:
    t = Topology("diamond")
    lines = t.spout("lines", source())
    made = t.bolt("split", split, lines, schema="word string")
    once = t.bolt("once", lambda w: [w + "1"], getattr(made, left)(), schema="word string")
    twice = t.bolt("twice", lambda w: [w + "2", w + "2"], getattr(made, right)(), schema="word string")
    far = t.bolt("far", lambda w: [w], once.fields("word"), schema="word string")
    both = t.bolt("both", lambda w: [w], far.none(), twice.fields("word"), schema="word string")
    t.sink(MemorySink("out", staging=tmp), both)
    return t


@pytest.mark.parametrize("per_message", [False, True])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("sides", [("shuffle", "none"), ("none", "shuffle"), ("none", "none"), ("shuffle", "all")])
def test_a_diamond_whose_sides_have_different_lengths(
    tmp_path: Path, sides: tuple[str, str], tracked: bool, per_message: bool
) -> None:
    engine = InlineEngine(2)
    ran = good(run_job(engine, diamond(tmp_path, *sides), LINES, tmp_path, tracked=tracked, per_message=per_message))
    copies = 2 if sides[1] == "all" else 1
    plain = [word for line in LINES for word in line.decode().split()]
    assert ran.sorted("out") == sorted([(w + "1",) for w in plain] + [(w + "2",) for w in plain * 2 * copies])
    assert ran.lost() == []


@pytest.mark.parametrize("per_message", [False, True])
def test_groups_between_exchanges(tmp_path: Path, per_message: bool) -> None:
    t = Topology("groups")
    lines = t.spout("lines", source())
    made = t.bolt("split", split, lines.shuffle(), schema="word string")
    counts = t.following(made).group_by("word").agg(n=count())
    again = t.bolt("again", lambda word, n: [(word, n)], counts.output.fields("n"), schema="word string, n long")
    t.sink(MemorySink("counts", staging=tmp_path), again)
    ran = good(run_job(InlineEngine(3), t, LINES, tmp_path, per_message=per_message))
    assert ran.sorted("counts") == [("a", 3), ("b", 5), ("c", 1)]
    assert ran.lost() == []


def by_length(rows: pa.RecordBatch, tasks: int) -> list[int]:
    return [len(word) % tasks for word in rows.column("word").to_pylist()]


def test_a_custom_grouping_fails_the_rows_that_it_has_no_task_for(tmp_path: Path) -> None:
    t = Topology("custom")
    lines = t.spout("lines", source())
    made = t.bolt("split", split, lines.shuffle(), schema="word string")

    def where(rows: pa.RecordBatch, tasks: int) -> list[int]:
        return [99 if word == "bad" else len(word) % tasks for word in rows.column("word").to_pylist()]

    t.sink(MemorySink("ups", staging=tmp_path), t.bolt("upper", pick, made.custom(where), schema="up string"))
    ran = good(run_job(InlineEngine(2), t, [b"aa b", b"bad c", b"d"], tmp_path))
    assert ran.late() == {1: "error at upper"}
    assert ran.sorted("ups") == [("AA",), ("B",), ("C",), ("D",)]


@pytest.mark.parametrize("copies", [0, 2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_per_message_mode_names_the_messages_of_a_chunk_that_was_lost_or_copied(
    tmp_path: Path, stage: int, copies: int
) -> None:
    payloads = [f"w{i} w{i + 1}".encode() for i in range(6)]
    done: list[int] = []

    def tamper(at: int, rows: list[WireRow]) -> list[WireRow]:
        if at != stage:
            return rows
        chunk = next(row for row in rows if row.edge >= 0)
        done.append(chunk.edge)
        return [kept for row in rows for kept in [row] * (copies if row is chunk else 1)]

    topology = words(tmp_path, "fields", "word")
    ran = run_job(InlineEngine(2, tamper=tamper), topology, payloads, tmp_path, per_message=True)
    assert done
    assert ran.report.violations != ()
    assert 0 < len(ran.lost()) < len(payloads)
    whole = run_job(InlineEngine(2), topology, payloads, tmp_path, per_message=True)
    assert whole.lost() == []


def test_a_subscription_is_what_a_stream_gives() -> None:
    t = Topology("t")
    assert isinstance(t.spout("lines", source()).shuffle(), Subscription)
