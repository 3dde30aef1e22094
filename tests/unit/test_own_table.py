"""Two sinks of one topology on one table are refused, as early as it can be known."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from support.jobs import source

from stormproof import exactly_once
from stormproof.core.base.errors import SinkRefused, StoreUnavailable, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkSpec
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.stores.memory import MemorySink, MemoryTable
from stormproof.trident.driver.opening import require_own_stores, require_own_tables
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.key_value import (
    KeyValueStore,
    MemoryMap,
    MemoryStore,
    NonTransactionalMap,
    OpaqueMap,
    TransactionalMap,
)
from stormproof.trident.state.map import total
from stormproof.trident.state.postgres import PostgresMap
from stormproof.trident.state.protocol import StateContext, StateFactory
from stormproof.trident.state.sink import StateSession, StateSink
from stormproof.trident.topology.aggregate import count
from stormproof.trident.topology.stream import Topology

HERE = Database.from_url("postgresql://one@here/db")
THERE = Database.from_url("postgresql://one@there/db")


def built(*sinks: SinkSpec, fold: bool = True) -> Topology:
    topology = Topology("t")
    words = topology.stream("lines", source()).flat_map(str.split, "line", schema="word string")
    (words.group_by("word").persistent_aggregate(n=count()) if fold else words).into(*sinks)
    return topology


def plan(*sinks: SinkSpec, fold: bool = True) -> Plan:
    return compile_topology(built(*sinks, fold=fold), Guarantee.AT_LEAST_ONCE)


STORE, SINK_STORE = MemoryStore(), MemoryTable()

ONE_TABLE: dict[str, Callable[[], Sequence[SinkSpec]]] = {
    "postgres": lambda: [PostgresSink("t"), PostgresSink("t", name="b")],
    "postgres, one database": lambda: [PostgresSink("t", database=HERE), PostgresSink("t", database=HERE, name="b")],
    "postgres, sink and map": lambda: [PostgresSink("s.t"), StateSink("b", PostgresMap("s.t"))],
    "postgres, two maps": lambda: [StateSink("a", PostgresMap("t")), StateSink("b", PostgresMap("t", "transactional"))],
    "delta": lambda: [DeltaSink("lake/t"), DeltaSink("lake/t", name="b")],
    "delta, relative and absolute": lambda: [DeltaSink("lake/t"), DeltaSink(Path("lake/t").absolute(), name="b")],
    "delta, a slash behind it": lambda: [DeltaSink("lake/t"), DeltaSink("lake//t/", name="b")],
    "delta, sink and map": lambda: [DeltaSink("lake/t"), StateSink("b", DeltaMap("./lake/t"))],
    "delta, two maps": lambda: [StateSink("a", DeltaMap("t")), StateSink("b", DeltaMap("t"))],
    "memory": lambda: [MemorySink("a", store=SINK_STORE), MemorySink("b", store=SINK_STORE)],
    "memory maps": lambda: [StateSink("a", MemoryMap(store=STORE)), StateSink("b", MemoryMap(store=STORE))],
    "the third": lambda: [PostgresSink("t"), DeltaSink("t"), PostgresSink("t", name="b")],
}


@pytest.mark.parametrize("sinks", ONE_TABLE.values(), ids=ONE_TABLE)
@pytest.mark.parametrize("guarantee", [None, "at-least-once", "at-most-once"])
def test_two_sinks_on_one_table_are_refused_when_the_topology_is_built(
    sinks: Callable[[], Sequence[SinkSpec]], guarantee: str | None
) -> None:
    topology = Topology("t", guarantee)
    words = topology.stream("lines", source()).flat_map(str.split, "line", schema="word string")
    *before, last = sinks()
    into = words.group_by("word").persistent_aggregate(n=count()).into(*before)
    with pytest.raises(
        TopologyError, match=r"topology 't': sinks '\S+' and 'b' have one table: .*a\.merge\(b\)"
    ) as refused:
        into.into(last)
    assert refused.value.details["sinks"] == [before[0].name, "b"]
    assert topology.sinks == tuple(before)


def test_appended_rows_and_streaming_queries_are_no_exception() -> None:
    with pytest.raises(TopologyError, match="have one table"):
        built(PostgresSink("t"), PostgresSink("t", name="b"), fold=False)
    with pytest.raises(TopologyError, match="have one table"):
        exactly_once(PostgresSink("t"), PostgresSink("t", name="b"), name="rows")


APART: dict[str, Callable[[], Sequence[SinkSpec]]] = {
    "names": lambda: [PostgresSink("t"), PostgresSink("u"), DeltaSink("t"), DeltaSink("u")],
    "databases": lambda: [PostgresSink("t", database=HERE), PostgresSink("t", database=THERE, name="b")],
    "schemas": lambda: [PostgresSink("s.t"), PostgresSink("u.t")],
    "memory": lambda: [MemorySink("a"), MemorySink("b"), StateSink("c", MemoryMap()), StateSink("d", MemoryMap())],
    "opened each time": lambda: [StateSink("a", OpaqueMap(MemoryStore)), StateSink("b", OpaqueMap(MemoryStore))],
}


@pytest.mark.parametrize("sinks", APART.values(), ids=APART)
def test_control_sinks_on_tables_of_their_own_are_not_refused(sinks: Callable[[], Sequence[SinkSpec]]) -> None:
    assert len(plan(*sinks()).sink_specs) == len(sinks())


# -- by what the store says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False], ids=["the table is there", "not yet"])
@pytest.mark.parametrize("by", ["symlink", "dots", "a symlink above it", "nothing"])
def test_a_folder_is_one_however_it_is_reached(tmp_path: Path, by: str, there: bool) -> None:
    lake = tmp_path / "lake"
    (lake / "t" if there else lake).mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(lake / "t")
    (tmp_path / "above").symlink_to(lake)
    path = {
        "symlink": tmp_path / "link",
        "dots": Path(f"{tmp_path}/other/../lake/t"),
        "a symlink above it": tmp_path / "above" / "t",
        "nothing": lake / "t2",
    }[by]
    for second in (DeltaSink(path, name="b"), StateSink("b", DeltaMap(path))):
        made = plan(DeltaSink(lake / "t", name="a"), second)  # the names alone do not tell
        if by == "nothing":
            require_own_tables(made)
            continue
        with pytest.raises(TopologyError, match=rf"'a' and 'b' have one table: {lake}/t, which is {path}\."):
            require_own_tables(made)
    assert os.path.exists(lake / "t") is there
    assert not os.path.exists(lake / "t2")


def test_a_copied_table_is_another_one(tmp_path: Path) -> None:
    """Its Delta id is the same."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    require_own_tables(plan(DeltaSink(tmp_path / "a"), DeltaSink(tmp_path / "b")))


def test_a_file_in_the_way_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="Not a directory"):
        require_own_tables(plan(DeltaSink(tmp_path / "file" / "t"), MemorySink("m")))


# -- key-value stores ----------------------------------------------------------------------------------------------------


class Prefixed(MemoryStore):
    """A connection to a store in which each prefix has keys of its own."""

    def __init__(self, items: dict[bytes, bytes], prefix: str) -> None:
        self.items = items
        self.prefix = prefix

    @property
    def store_identity(self) -> str:
        return self.prefix

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        return [self.items.get(self.prefix.encode() + key) for key in keys]


def opened(made: Plan, epoch: int = 1) -> dict[str, StateSession]:
    sessions: dict[str, StateSession] = {}
    for sink in made.sink_specs:
        assert isinstance(sink, StateSink)
        identity = SinkIdentity("t", "life", sink.name)
        sessions[sink.name] = sink.open(identity, made.sinks[sink.name], epoch)
        require_own_stores(made, sessions)
    return sessions


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap, NonTransactionalMap])
def test_two_states_on_one_store_object_are_refused(kind: type[OpaqueMap]) -> None:
    store = MemoryStore()
    made = plan(StateSink("a", kind(lambda: store, name="kv")), StateSink("b", kind(lambda: store, name="kv")))
    with pytest.raises(TopologyError, match=r"sinks 'a' and 'b' have one table: kv\."):
        opened(made)
    assert not any(b'"txid":1' in value for value in store.items.values())
    opened(plan(StateSink("b", kind(lambda: store, name="kv"))), epoch=2)  # nothing is left of the refused one


def test_two_connections_to_one_store_are_refused_by_what_the_store_says_of_itself() -> None:
    items: dict[bytes, bytes] = {}

    def state(prefix: str) -> StateFactory:
        return NonTransactionalMap(lambda: Prefixed(items, prefix))

    with pytest.raises(TopologyError, match="have one table"):
        opened(plan(StateSink("a", state("x")), StateSink("b", state("x"))))
    opened(plan(StateSink("a", state("x")), StateSink("b", state("y"))))


class Connection(MemoryStore):
    """Another object for the same keys, which says nothing of that."""

    def __init__(self, items: dict[bytes, bytes]) -> None:
        super().__init__()
        self.items = items


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap])
def test_two_connections_that_say_nothing_are_told_by_what_the_first_one_wrote(kind: type[OpaqueMap]) -> None:
    items: dict[bytes, bytes] = {}
    states = [StateSink(name, kind(lambda: Connection(items))) for name in ("a", "b")]
    with pytest.raises(TopologyError, match=r"'a' and 'b' have one table: key-value store"):
        opened(plan(*states))


def context(topology: str, sink: str) -> StateContext:
    schema = pa.schema([("word", pa.string()), ("n", pa.int64())])
    return StateContext(SinkIdentity(topology, "life", sink), schema, ("word",), {"n": total}, epoch=1, create=True)


def adopt(factory: StateFactory, topology: str, store: KeyValueStore) -> None:
    """One commit, of a map that was opened before the other one's."""
    with closing(factory.make(context(topology, "s"))) as state:
        transaction = PreparedTransaction(1, None, "digest", 0, ())
        state.announce(transaction, checked=True)  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
        state.begin_commit(1)
        state.commit(1)


@pytest.mark.parametrize("kind", [OpaqueMap, TransactionalMap])
def test_a_store_that_another_topology_took_meanwhile_is_refused_at_the_commit(kind: type[OpaqueMap]) -> None:
    """Both were opened while it was empty; txid 1 of the second would be taken for txid 1 of the first, and dropped."""
    store = MemoryStore()
    factory = kind(lambda: store)
    with closing(factory.make(context("one", "s"))) as first:
        adopt(factory, "two", store)
        before = dict(store.items)
        with pytest.raises(SinkRefused, match=r"holds state 's' of topology 'two'; a map has one writer"):
            first.begin_commit(1)
        assert store.items == before
