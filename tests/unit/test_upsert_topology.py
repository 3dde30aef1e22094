"""Upserts in a topology: the exchange on the key, one row a key, keys that are refused, counts, and wrong arguments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from stormproof import DeltaSink, MemorySink, MemorySource, PostgresSink, Topology, count
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.plan import SendNode, compile_topology
from stormproof.testing import Faults, simulate
from stormproof.testing.simulation import run_driver
from stormproof.trident.driver.jobs import JobsInTurn
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import memory_ledger_engine
from stormproof.trident.ledger.graphs import changes, graph_of
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.terms.observers import RunStatistics

SCHEMA = "id string, v long, name string, gone boolean"


def parsed(line: str) -> tuple[str | None, int | None, str, bool]:
    key, v, name = line.split(",")
    return key or None, int(v) if v else None, name, name == "gone"


def upsert(name: str = "people", **more: Any) -> MemorySink:
    return MemorySink(name, mode="upsert", key="id", order_by="v", delete_when="gone", **more)


def topology(sink: Any, lines: list[bytes] | None = None, source: MemorySource | None = None) -> Topology:
    made = Topology("people-by-id")
    stream = made.stream("lines", source or MemorySource("lines", lines or []))
    stream.map(parsed, "line", schema=SCHEMA).into(sink)
    return made


def run(sink: MemorySink, lines: list[bytes], batch: int) -> tuple[RunStatistics, int]:
    """The run's statistics, and the superseded rows by the ledger."""
    clock, rng = ManualClock(), random.Random(0)
    source = MemorySource("lines", lines, max_attempts=1, clock=clock, rng=rng)
    engine = memory_ledger_engine()
    plan = compile_topology(topology(sink, source=source), Guarantee.EXACTLY_ONCE)
    statistics = run_driver(
        plan,
        source,
        Ledger(engine, clock, lambda: "life"),
        InlineEngine(2, rng=rng, clock=clock),
        RunOptions(guarantee=Guarantee.EXACTLY_ONCE, limit=Limit(batch), until_idle=True),
        clock=clock,
        rng=rng,
        jobs=JobsInTurn(None),
    )
    with engine.execution_options(schema_translate_map={t.SCHEMA: None}).connect() as connection:
        recorded = connection.execute(sa.select(sa.func.sum(t.txn_sink.c.superseded))).scalar_one()
    return statistics, int(recorded)


LINES = [b"a,1,x", b"b,2,y", b"a,3,z", b"a,2,w", b"b,3,gone", b"b,2,late", b"c,1,c"]


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_the_last_of_each_key_is_left_whatever_the_batches(tmp_path: Path, batch: int) -> None:
    sink = upsert(staging=tmp_path)
    statistics, recorded = run(sink, LINES, batch)
    assert sorted((r["id"], r["v"], r["name"], r["gone"]) for r in sink.rows()) == [
        ("a", 3, "z", False),
        ("b", 3, "gone", True),
        ("c", 1, "c", False),
    ]
    assert statistics.superseded == recorded
    assert 2 <= recorded <= 4, "late rows always, and of a batch all but the last of a key"


@pytest.mark.parametrize("bad", [b",1,x", b"d,,x"], ids=["key", "order"])
def test_a_null_key_or_order_fails_its_message_alone(tmp_path: Path, bad: bytes) -> None:
    sink = upsert(staging=tmp_path)
    statistics, _ = run(sink, [*LINES, bad], 4)
    assert statistics.dead_letters == 1
    assert statistics.failed_by_reason == {"sink_error": 1}
    assert statistics.attempts == statistics.batches, "it failed before the exchange, so nothing ran again"
    assert {r["id"] for r in sink.rows()} == {"a", "b", "c"}


def exchanges(made: Topology) -> list[str]:
    plan = compile_topology(made, Guarantee.EXACTLY_ONCE)
    return [n.component for stage in plan.stages for n in stage.nodes.values() if isinstance(n, SendNode)]


def test_an_exchange_on_the_key_is_put_before_the_sink_unless_there_is_one() -> None:
    assert exchanges(topology(upsert())) == ["people-by-key"]
    made = Topology("t")
    stream = made.stream("lines", MemorySource("lines", [])).map(parsed, "line", schema=SCHEMA)
    stream.partition_by("id").filter(bool, "name").into(upsert("one"))
    stream.partition_by("id").project("id", "v", "name", "gone").into(upsert("two"))
    stream.global_().into(upsert("three"))
    assert not [name for name in exchanges(made) if name.endswith("-by-key")]
    stream.partition_by("name").filter(bool, "name").into(upsert("four"))
    stream.partition_by("id").project("v", "gone", id="name").into(upsert("five"))
    stream.partition_by("id").shuffle().into(upsert("six"))
    assert [name for name in exchanges(made) if name.endswith("-by-key")] == [
        "four-by-key",
        "five-by-key",
        "six-by-key",
    ]


def test_a_group_by_the_key_needs_no_exchange(tmp_path: Path) -> None:
    made = Topology("t")
    lines = made.stream("lines", MemorySource("lines", [])).map(parsed, "line", schema=SCHEMA)
    lines.group_by("id").agg(n=count()).into(MemorySink("n", mode="upsert", key="id", order_by="n", staging=tmp_path))
    assert exchanges(made) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "merge"}, "mode='merge' is none; use 'append', 'upsert', 'fold'"),
        ({"mode": "upsert"}, "needs key="),
        ({"mode": "upsert", "key": "id"}, "needs order_by="),
        ({"mode": "upsert", "key": [], "order_by": "v"}, "key=.* names no columns"),
        ({"mode": "upsert", "key": "id", "order_by": 3}, "order_by=3 names no columns"),
        ({"mode": "upsert", "key": "id", "order_by": "v", "delete_when": 3}, "delete_when=3 is no column"),
        ({"key": "id"}, "key without a mode: only mode='upsert' takes it"),
        ({"mode": "append", "order_by": "v"}, "order_by with mode='append'"),
    ],
)
@pytest.mark.parametrize("kind", [MemorySink, DeltaSink, PostgresSink])
def test_wrong_arguments_are_named(kind: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        kind("people", **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"key": "nobody", "order_by": "v"}, "key names 'nobody', and there is no such column; there are id, v"),
        ({"key": "id", "order_by": "id"}, "order_by names 'id' and so does key"),
        ({"key": ["id", "id"], "order_by": "v"}, "names 'id' twice"),
        ({"key": "id", "order_by": "v", "delete_when": "name"}, "delete_when names 'name', which is string"),
        ({"key": "w", "order_by": "v"}, "'w' is double, which can't be the key of an upsert"),
        ({"key": "id", "order_by": "l"}, "order_by names 'l', which is list"),
    ],
)
def test_columns_that_do_not_fit_are_named(arguments: dict[str, Any], said: str) -> None:
    made = Topology("t")
    stream = made.stream("lines", MemorySource("lines", [])).map(
        parsed, "line", schema="id string, v long, name string, w double, l array<string>"
    )
    for kind in (MemorySink, DeltaSink, PostgresSink):
        with pytest.raises(TopologyError, match=said):
            stream.into(kind("people", mode="upsert", **arguments))


def test_a_mode_and_a_stream_that_do_not_fit_are_refused() -> None:
    made = Topology("t")
    stream = made.stream("lines", MemorySource("lines", [])).map(parsed, "line", schema=SCHEMA)
    with pytest.raises(TopologyError, match="behind a persistent aggregate"):
        stream.group_by("id").persistent_aggregate(n=count()).into(upsert())
    with pytest.raises(TopologyError, match="mode='fold' takes the results of a persistent aggregate"):
        stream.into(MemorySink("counts", mode="fold"))
    stream.into(MemorySink("log", mode="append"))
    stream.group_by("id").persistent_aggregate(n=count()).into(MemorySink("counts", mode="fold"))


def test_a_changed_order_is_a_changed_sink() -> None:
    def graph(sink: MemorySink) -> Any:
        return graph_of(compile_topology(topology(sink), Guarantee.EXACTLY_ONCE), "lines")

    before = graph(upsert())
    assert not changes(before, graph(upsert()))
    (change,) = [
        c
        for c in changes(before, graph(MemorySink("people", mode="upsert", key="id", order_by="name")))
        if c.sink is not None
    ]
    assert "order_by was v, is name; delete_when was gone, is none" in change.text


def test_a_simulation_upserts(tmp_path: Path) -> None:
    made = topology(upsert(staging=tmp_path), LINES)
    for seed in range(8):
        found = simulate(made, LINES, seed=seed, faults=Faults(driver_deaths=0.02, drops=0.02), batch_messages=3)
        assert sorted((r["id"], r["v"]) for r in found.rows("people")) == [("a", 3), ("b", 3), ("c", 1)]
