"""The lineage columns of sinks: whose id a row has, what is refused, and what they are kept out of; in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.memory_run import World

from stormproof import MemorySink, MemorySource, Topology, count
from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.contract.source import OriginIds, ShownIds
from stormproof.core.graph.plan import compile_topology
from stormproof.core.pending.connector import Connector
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.spouts import key_of
from stormproof.core.task.ends import message_columns, single_messages
from stormproof.core.tracking.share import MANY, Anchors, MetMessages
from stormproof.sink import Lineage
from stormproof.sinks.contract.protocol import describe_sink
from stormproof.sinks.contract.registry import described_sink, register_sink
from stormproof.sinks.rows.by_key import compared_columns
from stormproof.sinks.stores.memory import MemoryTable

KEYS = [0, 1, 7, 123_456, 2**40]
UPSERT: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at"}


class FromQueue(MemorySource):
    """A source in memory whose messages are shown as a queue's are."""

    shown_id = Connector.shown_id  # pyright: ignore[reportAssignmentType]

    def shown_ids(self) -> ShownIds:
        return OriginIds()


def source(name: str = "lines", lines: Sequence[bytes] = ()) -> MemorySource:
    return MemorySource(name, lines, schema="line string")


# -- ids as a column ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [source(), FromQueue("q", schema="line string")])
def test_ids_of_a_column_are_those_that_people_see(made: MemorySource) -> None:
    ids, origins = pa.array([*KEYS, None]), pa.array([*range(len(KEYS)), -1])
    shown = [made.shown_id(id_, origin) for origin, id_ in enumerate(KEYS)]
    assert made.shown_ids().shown(ids, origins).to_pylist() == [*shown, None]


def test_ids_of_several_spouts_name_the_spout() -> None:
    group = SourceGroup({"lines": source(), "orders": FromQueue("q", schema="line string")})
    keys = [key_of(id_, number % 2, "s") for number, id_ in enumerate(KEYS)]
    ids = group.shown_ids()
    assert ids is not None
    shown = [group.shown_id(key, origin) for origin, key in enumerate(keys)]
    assert shown[:2] == ["lines:0", "orders:1-1"]
    assert ids.shown(pa.array([*keys, None]), pa.array([*range(len(keys)), -1])).to_pylist() == [*shown, None]


def test_a_row_of_several_messages_or_of_a_group_has_no_id() -> None:
    messages = MetMessages()
    messages.append(np.array([5, 6]), np.array([1, 1]))
    anchors = Anchors(4, np.array([0, 1, 1, 3]), np.array([0, 0, 1, MANY]), None)
    number, origin = single_messages(message_columns(anchors, messages))
    assert OriginIds().shown(number, origin).to_pylist() == ["1-5", None, None, None]


# -- what is refused ---------------------------------------------------------------------------------------------------


def rows_into(sink: MemorySink, made: MemorySource | None = None) -> Topology:
    topology = Topology("t")
    stream = topology.stream("lines", made or source())
    stream.map(lambda line: (line, 1, 1), "line", schema="k string, at int, _txid int").into(sink)
    return topology


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (lambda: MemorySink(lineage=True), "a column '_txid' of their own: name the lineage columns otherwise"),
        (lambda: MemorySink(lineage=Lineage("_TXID")), "a column '_txid' of their own"),
        (lambda: MemorySink(mode="upsert", key="k", order_by="T", lineage=Lineage("T")), "'T' is a lineage column"),
        (lambda: MemorySink(**UPSERT, keep="T", lineage=Lineage("T")), "'T' is a lineage column"),
    ],
)
def test_a_name_that_is_taken_is_refused(sink: Any, said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        rows_into(sink())


def test_a_fold_has_no_message() -> None:
    topology = Topology("t")
    counted = topology.stream("lines", source()).group_by("line").persistent_aggregate(n=count())
    with pytest.raises(TopologyError, match=r"made of many messages.*Lineage\(message=None\)"):
        counted.into(MemorySink(lineage=True))


def test_a_source_without_ids_for_columns_is_refused() -> None:
    class Without(MemorySource):
        def shown_ids(self) -> Any:
            return None

    class Otherwise(MemorySource):
        shown_id = Connector.shown_id  # pyright: ignore[reportAssignmentType]

    lineage = Lineage("t")
    for made, said in (
        (Without, r"has none for whole columns: give the source"),
        (Otherwise, "as '89-123456' by shown_id"),
    ):
        with pytest.raises(TopologyError, match=said):
            compile_topology(
                rows_into(MemorySink(lineage=lineage), made("lines", schema="line string")), Guarantee.EXACTLY_ONCE
            )
    plain = MemorySink(lineage=Lineage("t", None))
    assert (
        compile_topology(rows_into(plain, Without("w", schema="line string")), Guarantee.EXACTLY_ONCE).shown_ids is None
    )


def test_a_table_without_the_columns_is_refused(tmp_path: Path) -> None:
    table = MemoryTable()
    table.create(pa.schema([("word", pa.string())]))
    world = World([b"a b"], tmp_path)
    world.topology = Topology("words")
    words = world.topology.stream("lines", world.source).map(lambda line: line, "line", schema="word string")
    words.into(MemorySink("old", store=table, staging=tmp_path / "old", lineage=True))
    with pytest.raises(
        SinkRefused, match=r"the table has \['word'\], the rows have \['word', '_txid', '_message_id'\]"
    ):
        world.run()


@pytest.mark.parametrize("guarantee", Guarantee)
def test_under_every_guarantee_a_row_names_its_message(guarantee: Guarantee, tmp_path: Path) -> None:
    world = World([b"0", b"1", b"2"], tmp_path, batch_messages=2)
    world.topology = Topology("words")
    sink = MemorySink("m", staging=tmp_path / "m", lineage=True)
    world.topology.stream("lines", world.source).map(lambda n: n, "line", schema="n string").into(sink)
    world.run(guarantee)
    assert sorted(tuple(row.values()) for row in sink.rows()) == [("0", 1, "0"), ("1", 1, "1"), ("2", 2, "2")]


# -- what they are kept out of -----------------------------------------------------------------------------------------


def test_they_decide_nothing_in_an_upsert() -> None:
    schema = pa.schema([("k", pa.string()), ("at", pa.int64()), ("n", pa.int64()), ("_txid", pa.int64())])
    input_ = SinkInput(schema, ("k",), {}, SinkMode.UPSERT, ("at",), lineage=Lineage(message=None))
    assert compared_columns(input_) == ("at", "n")


def test_the_ledger_keeps_their_names() -> None:
    """A command that opens the sink by the ledger alone must keep them out of its comparison, too."""
    sink = MemorySink("m", **UPSERT, lineage=Lineage("t", "who"))
    input_ = sink.input_of(SinkInput(pa.schema([("k", pa.string()), ("at", pa.int64())])))
    register_sink("for_lineage", _opened)
    description = {**describe_sink(sink, input_), "kind": "for_lineage"}
    assert described_sink("m", "m", description, Any)[1] == input_  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert "lineage" not in describe_sink(MemorySink(), SinkInput(pa.schema([("k", pa.string())])))


def _opened(address: Any) -> MemorySink:
    return MemorySink(address.name)
