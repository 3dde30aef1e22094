"""What explain says of a topology: stages, exchanges, tasks, sinks; and its pictures."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from support.jobs import source
from support.operations import OPERATIONS, add_all, words_of
from typer.testing import CliRunner

from stormproof.core.base.errors import TopologyError
from stormproof.core.source.memory import MemorySource
from stormproof.sinks.stores.memory import MemorySink
from stormproof.testing import simulate
from stormproof.trident.cli.app import app
from stormproof.trident.state.key_value import MemoryMap
from stormproof.trident.state.protocol import MapState, State
from stormproof.trident.topology.aggregate import count
from stormproof.trident.topology.explain import explain
from stormproof.trident.topology.stream import GroupedStream, Stream, Topology

ROOT = Path(__file__).parents[2]


def word_count() -> Topology:
    topology = Topology("word-count")
    words = words_of(topology, source())
    words.group_by("word").parallelism(3).persistent_aggregate(n=count()).into(MemorySink("counts"))
    upper = words.shuffle().map(str.upper, schema="up string")
    upper.join(words.filter(str.isupper), {"up": "word"}, how="left").into(MemorySink("pairs"))
    return topology


def test_the_text() -> None:
    text = str(word_count().explain())
    assert text.splitlines() == [
        "topology word-count, exactly-once",
        "  at-most-once: yes",
        "  at-least-once: yes",
        "  exactly-once: yes",
        "  batches: several may be in flight; they commit in order",
        '  message timeout: on Spark; engine="inline" runs your functions itself, and cannot end a call',
        "",
        "stage 0, tasks: one for each part of the source",
        "  lines: spout of lines (line string)",
        "  split: flat_map split(line) <- lines (word string)",
        "  isupper: filter isupper(word) <- split (word string)",
        "",
        "stage 1, tasks: the engine's number",
        "  <= split to aggregate: fields by word, combined before; tasks: 3",
        "  <= split to upper: shuffle; tasks: the engine's number",
        "  aggregate: aggregate count() by word, across batches <- split (word string, n bigint)",
        "  upper: map upper(word) <- split (up string)",
        "  => counts: memory:counts, fold by word <- aggregate",
        "  (passes through: isupper to join)",
        "",
        "stage 2, tasks: the engine's number",
        "  <= upper to join: fields by up; tasks: the engine's number",
        "  <= isupper to join: fields by word; tasks: the engine's number",
        "  join: left join on up = word <- upper, isupper (up string)",
        "  => pairs: memory:pairs, append <- join",
    ]


def test_the_number_of_tasks_where_the_engine_is_known() -> None:
    found = explain(word_count(), "at-least-once", parallelism=2)
    assert [s.tasks for s in found.stages] == [None, 3, 2]
    assert [(e.from_stage, e.to_stage, e.tasks) for e in found.exchanges] == [
        (0, 1, 3),
        (0, 1, 2),
        (1, 2, 2),
        (0, 2, 2),
    ]
    assert found.guarantee == "at-least-once"


def test_a_guarantee_that_cannot_be_had_is_named_with_its_reason() -> None:
    topology = Topology("untracked", ackers=0)
    words_of(topology, source()).into(MemorySink("out"))
    found = topology.explain()
    assert found.serves["at-most-once"] is None
    assert "ackers=0" in (found.serves["exactly-once"] or "")
    with pytest.raises(TopologyError, match="ackers=0"):
        topology.explain("exactly-once")


def test_every_component_is_in_one_stage_and_in_the_picture() -> None:
    topology = add_all(Topology("all"), source(), Path("/nowhere"))
    found = topology.explain()
    placed = [c.name for s in found.stages for c in s.components] + [s.name for s in found.sinks]
    assert sorted(placed) == sorted(c.name for c in topology.components)
    dot = found.to_dot()
    assert all(f'    "{name}" [' in dot for name in placed)
    inputs = {(origin.partition("[")[0], c.name) for s in found.stages for c in s.components for origin in c.inputs}
    arrows = inputs | {(sink.component, sink.name) for sink in found.sinks}
    assert all(f'  "{origin}" -> "{to}"' in dot for origin, to in arrows)
    assert dot.count("subgraph") == len(found.stages)
    assert dot.count("style=dashed") == len(found.exchanges)
    json.dumps(found.to_json())


def doubled(state: State, keys: pa.RecordBatch) -> pa.RecordBatch:
    return cast("MapState", state).multi_get(keys)


def test_what_reads_a_state_says_which_and_is_drawn_behind_it() -> None:
    topology = Topology("queries")
    words = words_of(topology, source())
    kept = words.group_by("word").persistent_aggregate(n=count(), state=MemoryMap(), state_name="seen", name="counts")
    kept.new_values_stream(name="newest").into(MemorySink("values"))
    asked = words.state_query("seen", "word", schema="before long", name="ask")
    asked.state_query("seen", "word", schema="twice long", query=doubled, name="again").into(MemorySink("out"))
    found = topology.explain()
    text = str(found)
    assert "  ask: state_query of seen by word <- split (word string, before bigint)" in text
    assert "  again: state_query of seen by word, with doubled <- ask" in text
    assert "  newest: new_values_stream of seen <- counts" in text
    assert (
        "stage 0, tasks: one for each part of the source\n  <- state seen to ask: read by word; what the batches"
        in text
    )
    assert found.to_json()["reads"] == [
        {"state": "seen", "component": "newest", "stage": 1, "keys": ["word"]},
        {"state": "seen", "component": "ask", "stage": 0, "keys": ["word"]},
        {"state": "seen", "component": "again", "stage": 0, "keys": ["word"]},
    ]
    dot = found.to_dot()
    for reader in ("newest", "ask", "again"):
        assert f'"seen" -> "{reader}" [style=dotted, constraint=false, label="read by word"];' in dot
    assert dot.count("style=dotted") == len(found.reads)


def test_names_that_need_escapes_are_escaped() -> None:
    topology = Topology("t")
    topology.stream("lines", MemorySource('li"n\\es', schema="line string")).into(MemorySink("a"))
    assert r'[label="lines: spout of li\"n\\es"]' in topology.explain().to_dot()


FILE = """
from stormproof import MemorySink, MemorySource, Topology

def made(name: str = "t") -> Topology:
    topology = Topology(name)
    topology.stream("lines", MemorySource("lines", [], schema="line string")).shuffle().into(MemorySink("out"))
    return topology
"""


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "explained_topology.py"
    file.write_text(FILE)
    run = CliRunner()
    shown = run.invoke(app, ["explain", f"{file}:made", "--param", "name=other"])
    assert shown.exit_code == 0, shown.output
    assert "topology other, exactly-once" in shown.stdout
    plot = tmp_path / "graph.dot"
    as_json = run.invoke(app, ["explain", f"{file}:made", "--json", "--plot", str(plot)])
    assert json.loads(as_json.stdout)["exchanges"][0]["grouping"] == "shuffle"
    assert "repartition" in plot.read_text()
    refused = run.invoke(app, ["explain", f"{file}:made", "--plot", str(tmp_path / "graph.svg")])
    assert refused.exit_code == 2


OPERATION = re.compile(r"`(?:group_by\(\.\.\.\))?\.?(\w+)\(")


def test_the_page_has_every_operation() -> None:
    page = (ROOT / "docs" / "stream_operations.md").read_text()
    page = re.sub(r"\n## What a function gets.*?(?=\n## )", "", page, flags=re.DOTALL)  # its rows are types
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in OPERATION.findall(row)}
    own = {
        name
        for cls in (Stream, GroupedStream)
        for name, _ in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name != "settled"
    }
    assert own == named
    assert len(OPERATIONS) > 20


def test_the_code_on_the_page_runs() -> None:
    page = (ROOT / "docs" / "stream_operations.md").read_text()
    readings, aggregates, queries = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made: dict[str, object] = {}
    exec(compile(readings, "stream_operations.md", "exec"), made)  # noqa: S102 - our own page
    kept = made["t"]
    assert isinstance(kept, Topology)
    run = simulate(kept, ["a 1 20.5", "b 1 3", "a 2 18"], batch_messages=1)
    assert sorted(tuple(row.values()) for row in run.rows("sensors")) == [
        ("a", 2, 38.5, 18.0, 20.5, 18.0, 2),
        ("b", 1, 3.0, 3.0, 3.0, 3.0, 1),
    ]
    exec(compile(aggregates, "stream_operations.md", "exec"), made)  # noqa: S102 - our own page
    by_size = made["by_size"]
    assert isinstance(by_size, Stream)
    assert by_size.schema.names == ["size", "rank", "top", "n", "longest"]
    exec(compile(queries, "stream_operations.md", "exec"), made)  # noqa: S102 - our own page
    asked = made["t"]
    assert isinstance(asked, Topology)
    asked.explain()
