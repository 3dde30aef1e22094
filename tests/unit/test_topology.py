"""Topologies that cannot be built are refused by name, when they are built."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.jobs import source

from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.graph.plan import CombineNode, OperationNode, WriteNode, compile_topology
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.ledger.graphs import Graph, changes, graph_of
from stormproof.trident.topology.aggregate import ReadyAggregate, count, max_, min_, sum_
from stormproof.trident.topology.stream import Stream, Topology


class AppendOnly(MemorySink):
    """A sink that serves no folds, and not every guarantee."""

    @property
    def modes(self) -> frozenset[SinkMode]:
        return frozenset({SinkMode.APPEND})

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        if guarantee is Guarantee.EXACTLY_ONCE:
            raise TopologyError(f"sink {self.name!r} can't serve {guarantee}")


def lines(schema: str = "line string", guarantee: str | None = None) -> Stream:
    return Topology("t", guarantee).stream("lines", source(schema=schema))


def words() -> Stream:
    return lines().flat_map(str.split, "line", schema="word string")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Topology("no spaces here"), "topology name 'no spaces here'"),
        (lambda: Topology(""), "topology name"),
        (lambda: Topology("a/b"), "topology name"),
        (lambda: Topology("x" * 65), "at most 64"),
        (lambda: Topology("t", "exactly-twice"), "no guarantee 'exactly-twice'; known: at-most-once"),
        (lambda: Topology("t").stream("a b", source()), "spout name 'a b'"),
        (lambda: lines().map(len, "lin", schema="n long"), "unknown field 'lin'; known: line"),
        (lambda: lines().filter(bool, "line", "line"), "'line' stands twice"),
        (lambda: lines().map("len", "line", schema="n long"), "needs a function, got 'len'"),  # type: ignore[arg-type]
        (lambda: lines().map(len, schema="n lon"), "n lon"),
        (lambda: lines().map(len, schema="n long", name="lines"), "two components called 'lines'"),
        (lambda: words().group_by().agg(n=count()), "at least one field"),
        (lambda: words().group_by("wrd").agg(n=count()), "unknown field 'wrd'; known: word"),
        (lambda: words().group_by("word").agg(), "no results"),
        (lambda: words().group_by("word").agg(n=sum_("x")), "n sums the unknown field 'x'; known: word"),
        (lambda: words().group_by("word").agg(n=sum_("word")), "'word' is string, which has no sum"),
        (lambda: words().group_by("word").agg(word=count()), "'word' stands twice"),
        (lambda: words().group_by("word").agg(n=len), "is no aggregate"),  # type: ignore[arg-type]
        (lambda: lines("x double, n long").group_by("x").agg(n=count()), "'x' is double, which can't be a group's key"),
        (lambda: lines("x array<int>").group_by("x").agg(n=count()), "'x' is list"),
        (lambda: words().group_by("word").persistent_aggregate(n=count()).map(len, schema="n long"), "only .into"),
        (lambda: words().into(), "at least one sink"),
        (lambda: words().into(MemorySink("a"), MemorySink("a")), "two components called 'a'"),
        (lambda: words().into(MemorySink("A"), MemorySink("a")), "two components called 'a'"),
        (lambda: words().into(MemorySink("a sink")), "sink name 'a sink'"),
        (
            lambda: words().group_by("word").persistent_aggregate(n=count()).into(AppendOnly("a")),
            "sink 'a' (memory:a) cannot fold rows; it serves append",
        ),
    ],
)
def test_refused(build: Callable[[], object], said: str) -> None:
    with pytest.raises(TopologyError) as raised:
        build()
    assert said in str(raised.value)


def test_several_spouts_each_have_a_source_of_their_own() -> None:
    t = Topology("t")
    first = source()
    t.stream("a", first)
    t.stream("b", source())
    assert [spout.name for spout in t.spouts] == ["a", "b"]
    with pytest.raises(TopologyError, match=r"spouts 'a' and 'c' have the same source"):
        t.spout("c", first)


def test_incomplete_topologies_are_refused_as_a_whole() -> None:
    t = Topology("t")
    with pytest.raises(TopologyError, match="empty"):
        compile_topology(t, Guarantee.EXACTLY_ONCE)
    stream = t.stream("lines", source())
    with pytest.raises(TopologyError, match="no sink"):
        compile_topology(t, Guarantee.EXACTLY_ONCE)
    stream.into(MemorySink("a"))
    stream.map(len, schema="n long", name="idle")
    with pytest.raises(TopologyError, match="'idle' leads nowhere"):
        compile_topology(t, Guarantee.EXACTLY_ONCE)


def test_a_sink_that_cannot_serve_the_guarantee() -> None:
    with pytest.raises(TopologyError, match="can't serve exactly-once"):
        lines(guarantee="exactly-once").into(AppendOnly("a"))
    t = Topology("t")
    t.stream("lines", source()).into(AppendOnly("a"))
    assert compile_topology(t, Guarantee.AT_LEAST_ONCE).sinks["a"].folds == {}
    with pytest.raises(TopologyError, match="can't serve exactly-once"):
        compile_topology(t, Guarantee.EXACTLY_ONCE)


def test_components_are_named_after_their_functions() -> None:
    t = Topology("t")
    stream = t.stream("lines", source())
    names = [stream.map(len, schema="n long").name for _ in range(2)]
    names.append(stream.map(lambda line: line, schema="line string").name)
    names.append(stream.filter(bool, name="mine").name)
    assert names == ["len", "len-2", "map", "mine"]


def test_what_the_plan_of_a_word_count_is() -> None:
    t = Topology("t")
    stream = t.stream("lines", source()).flat_map(str.split, "line", schema="word string", name="split")
    sinks = MemorySink("a"), MemorySink("b")
    stream.group_by("word").persistent_aggregate(n=count(), name="counts").into(*sinks)
    plan = compile_topology(t, Guarantee.EXACTLY_ONCE)
    first, second = plan.stages
    (name,) = first.entries[0].children
    split = first.nodes[name]
    assert isinstance(split, OperationNode)
    (combine,) = (first.nodes[key] for key in split.children)
    assert isinstance(combine, CombineNode)
    assert combine.sinks == ("a", "b")
    (entry,) = second.entries
    assert entry.edge is not None
    assert (entry.edge.number, entry.edge.hops) == (combine.edge, 1) == (0, 1)
    assert [second.nodes[key] for key in entry.children] == [WriteNode("a"), WriteNode("b")]
    assert plan.sinks["a"].keys == ("word",)
    assert plan.sinks["b"].folds == {"n": Fold.SUM}
    assert plan.sink_specs == sinks


def fingerprint(schema: str = "word string", sink: str = "a", function: Callable[[str], object] = str.split) -> str:
    t = Topology("t")
    t.stream("lines", source()).flat_map(function, schema=schema, name="f").into(MemorySink(sink))
    return compile_topology(t, Guarantee.EXACTLY_ONCE).fingerprint


def test_another_fold_of_the_same_column_is_another_graph() -> None:
    def graph(how: ReadyAggregate) -> Graph:
        t = Topology("t")
        words = t.stream("lines", source()).flat_map(str.split, schema="word string", name="f")
        words.each(len, schema="size long").group_by("word").persistent_aggregate(x=how).into(MemorySink("a"))
        return graph_of(compile_topology(t, Guarantee.EXACTLY_ONCE), "memory")

    assert changes(graph(min_("size")), graph(min_("size"))) == ()
    for how in (max_("size"), sum_("size")):
        change, *_ = changes(graph(min_("size")), graph(how))
        assert change.needs_acceptance
        assert "column x was bigint (folded by min), is bigint (folded by" in change.text


def test_a_fingerprint_tells_shapes_apart_and_nothing_of_functions() -> None:
    assert fingerprint() == fingerprint(function=str.splitlines)
    assert len({fingerprint(), fingerprint("word string not null"), fingerprint(sink="b")}) == 3
