"""Streams that end in states and read them: what is held, new values, queries, one batch at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from support.memory_run import World
from support.operations import Greatest, Letters, words_of

from stormproof.core.base.errors import StoreUnavailable, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.source.memory import MemorySource
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.state.key_value import MemoryMap, MemoryStore
from stormproof.trident.state.protocol import MapState, State
from stormproof.trident.topology.aggregate import count, distinct_count, max_, min_, sum_
from stormproof.trident.topology.stream import Stream, Topology

LINES = [f"w{i % 3} w{i % 5} w{i}".encode() for i in range(12)]
BATCHES = [LINES[start : start + 4] for start in range(0, 12, 4)]


def counts(lines: list[bytes]) -> Counter[str]:
    return Counter(word for line in lines for word in line.decode().split())


class StateWorld(World):
    """A world of another topology, four messages a batch."""

    def __init__(
        self, folder: Path, build: Callable[[Stream], object], *, in_flight: int = 1, max_attempts: int = 2
    ) -> None:
        super().__init__(LINES, folder, in_flight=in_flight, max_attempts=max_attempts)
        self.topology = Topology("words")
        build(words_of(self.topology, self.source))


def held(state: MemoryMap) -> dict[object, dict[str, object]]:
    """The values of each key, without what the map keeps beside them."""
    own = ("previous_", "txid", "life")
    return {key[0]: {n: v for n, v in row.items() if not n.startswith(own)} for key, row in state.items().items()}


def test_a_persistent_aggregate_is_kept_in_a_state(tmp_path: Path) -> None:
    state = MemoryMap()
    world = StateWorld(
        tmp_path,
        lambda w: w.each(len, schema="size long").group_by("word").persistent_aggregate(
            n=count(), total=sum_("size"), lo=min_("size"), hi=max_("size"), best=Greatest().over("word"), state=state
        ),
    )  # fmt: skip
    assert world.run().batches == len(BATCHES)
    assert held(state) == {
        word: {"n": n, "total": n * len(word), "lo": len(word), "hi": len(word), "best": word}
        for word, n in counts(LINES).items()
    }


def test_what_has_no_key_is_kept_under_one_for_everything(tmp_path: Path) -> None:
    state, table = MemoryMap(), MemorySink("table", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        words.persistent_aggregate(n=count(), best=Greatest(), lo=min_("word"), state=state)
        words.persistent_aggregate(n=count()).into(table)

    StateWorld(tmp_path, build).run()
    assert held(state) == {True: {"n": 36, "best": "w9", "lo": "w0"}}
    assert table.rows() == [{"everything": True, "n": 36}]


ODD: dict[str, float | None] = {"w0": None, "w1": math.nan, "w2": -0.5, "w3": math.inf}
"""What is odd about some words: nothing, no number, less than all others, more."""


def test_tables_and_states_fold_alike_whatever_the_batches(tmp_path: Path) -> None:
    state, table = MemoryMap(), MemorySink("table", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        marked = words.each(lambda w: w[-1], "word", schema="mark string")
        rated = marked.each(lambda w: ODD.get(w, float(len(w))), "word", schema="rate double")
        kept = rated.group_by("mark").persistent_aggregate(
            n=count(), lo=min_("rate"), hi=max_("rate"), first=min_("word"), last=max_("word"), state=state
        )
        kept.into(table)

    assert StateWorld(tmp_path, build, in_flight=2).run().batches == len(BATCHES)
    rows: dict[Any, dict[str, Any]] = {row["mark"]: row for row in table.rows()}
    for mark, values in held(state).items():
        for name, value in values.items():  # the map keeps JSON, where numbers that are none are text
            assert str(rows[mark][name]) == str(value)
    whole = sorted(word for line in LINES for word in line.decode().split())
    for mark, row in rows.items():
        found = [word for word in whole if word[-1] == mark]
        assert (row["n"], row["first"], row["last"]) == (len(found), found[0], found[-1])
    assert [(rows[mark]["lo"], rows[mark]["hi"]) for mark in ("0", "1", "2", "3")] == [
        (3.0, 3.0), (3.0, 3.0), (-0.5, -0.5), (math.inf, math.inf)
    ]  # fmt: skip


class Longest:
    """An updater: keeps the longest list of words that came under each first letter."""

    def update(self, state: State, rows: pa.RecordBatch) -> None:
        cast("MapState", state).multi_put(rows)


def test_partition_persist_brings_rows_into_a_state_by_an_updater(tmp_path: Path) -> None:
    state = MemoryMap()
    world = StateWorld(
        tmp_path, lambda w: w.each(len, schema="size int").partition_persist("sizes", state, Longest(), keys=["word"])
    )
    world.run()
    assert held(state) == {word: {"size": len(word)} for word in counts(LINES)}


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("kind", ["transactional", "opaque"])
def test_new_values_are_what_the_state_will_hold(tmp_path: Path, kind: str, in_flight: int) -> None:
    state, seen = MemoryMap(kind), MemorySink("seen", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        kept = words.group_by("word").persistent_aggregate(n=count(), best=Greatest(), state=state)
        kept.new_values_stream().into(seen)

    world = StateWorld(tmp_path, build, in_flight=in_flight)
    assert compile_topology(world.topology, Guarantee.EXACTLY_ONCE).serial
    world.run()
    wanted: Counter[tuple[object, ...]] = Counter()
    sofar: Counter[str] = Counter()
    for lines in BATCHES:
        touched = counts(lines)
        sofar += touched
        wanted.update((word, sofar[word], word) for word in touched)
    assert Counter(tuple(row.values()) for row in seen.rows()) == wanted
    assert {word: row["n"] for word, row in held(state).items()} == sofar


def test_batches_that_do_not_wait_read_what_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without `serial` the new values are wrong."""
    state, seen = MemoryMap(), MemorySink("seen", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        words.group_by("word").persistent_aggregate(n=count(), state=state).new_values_stream().into(seen)

    def unserial(topology: Topology, guarantee: Guarantee) -> Plan:
        return replace(compile_topology(topology, guarantee), serial=False)

    monkeypatch.setattr("support.memory_run.compile_topology", unserial)
    StateWorld(tmp_path, build, in_flight=4).run()
    assert {word: row["n"] for word, row in held(state).items()} == counts(LINES)
    assert max(row["n"] for row in seen.rows() if row["word"] == "w0") < counts(LINES)["w0"]  # type: ignore[operator, type-var]


def test_a_query_finds_what_the_batches_before_committed(tmp_path: Path) -> None:
    state, seen = MemoryMap(), MemorySink("seen", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        words.group_by("word").persistent_aggregate(n=count(), state=state, state_name="counts")
        words.state_query("counts", "word", schema="before long").shuffle().into(seen)

    StateWorld(tmp_path, build, in_flight=4).run()
    wanted: Counter[tuple[object, ...]] = Counter()
    sofar: Counter[str] = Counter()
    for lines in BATCHES:
        for word, n in counts(lines).items():
            wanted[word, sofar.get(word)] += n
        sofar += counts(lines)
    assert Counter(tuple(row.values()) for row in seen.rows()) == wanted


class Flaky(MemoryStore):
    """A store that is away now and then."""

    reads = 0

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        self.reads += 1
        if self.reads in {7, 8, 12, 18, 19, 22}:
            raise StoreUnavailable("away for a moment")
        return super().multi_get(keys)


def test_no_message_answers_for_a_state_that_is_away(tmp_path: Path) -> None:
    """Each message has but one attempt, and none fails."""
    store, seen = Flaky(), MemorySink("seen", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        kept = words.group_by("word").persistent_aggregate(n=count(), state=MemoryMap(store=store))
        kept.new_values_stream().into(seen)

    world = StateWorld(tmp_path, build, max_attempts=1)
    statistics = world.run()
    assert store.reads > 22
    assert statistics.dead_letters == 0  # batches that a recovery rolled forward are not in its messages
    newest = {row["word"]: max(r["n"] for r in seen.rows() if r["word"] == row["word"]) for row in seen.rows()}  # type: ignore[type-var]
    assert newest == counts(LINES)


def doubled(state: State, keys: pa.RecordBatch) -> pa.RecordBatch:
    found = cast("MapState", state).multi_get(keys).column(0).to_pylist()
    return pa.record_batch({"n": pa.array([2 * (n or 0) for n in found], pa.int64())})


def test_a_query_of_ones_own(tmp_path: Path) -> None:
    state, seen = MemoryMap(), MemorySink("seen", staging=tmp_path / "files")

    def build(words: Stream) -> None:
        found = words.state_query("counts", "word", schema="twice long", query=doubled, name="ask")
        found.filter(lambda twice: twice > 0, "twice").into(seen)
        words.group_by("word").persistent_aggregate(n=count(), state=state, state_name="counts")

    world = StateWorld(tmp_path, build)
    world.run()
    assert all(row["twice"] % 2 == 0 for row in seen.rows())  # type: ignore[operator]
    assert "ask" in str(world.topology.explain())
    assert "one at a time" in str(world.topology.explain())


def words() -> Stream:
    return words_of(Topology("t"), MemorySource("lines", [], schema="line string"))


def compiled(stream: Stream) -> None:
    compile_topology(stream.topology, Guarantee.EXACTLY_ONCE)


def asks(stream: Stream, state: str, field: str) -> None:
    sized = stream.each(len, "word", schema="size int")
    sized.group_by("word").persistent_aggregate(n=count(), state=MemoryMap(), state_name="counts")
    compiled(sized.state_query(state, field, schema="n long").into(MemorySink("out")))


def asks_for(stream: Stream, schema: str) -> None:
    sized = stream.each(len, "word", schema="size long")
    sized.group_by("word").persistent_aggregate(n=count(), most=max_("size"), state=MemoryMap(), state_name="s")
    compiled(sized.state_query("s", "word", schema=schema).into(MemorySink("out")))


def test_what_a_map_holds_may_get_other_names() -> None:
    asks_for(words(), "n long, most long")
    asks_for(words(), "before long, longest long")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda w: asks_for(w, "n long"), "wants n int64 of state 's', which gives n int64, most int64: name all"),
        (lambda w: asks_for(w, "most long, n long"), "in this order"),
        (lambda w: asks_for(w, "before long, n long"), "in this order"),
        (lambda w: asks_for(w, "n long, most string"), "wants n int64, most string"),
        (lambda w: asks(w, "count", "word"), "reads the state 'count', which is none of topology 't'; known: counts"),
        (lambda w: asks(w, "counts", "wrd"), "unknown field 'wrd'; known: word, size"),
        (lambda w: asks(w, "counts", "size"), "looks up size int32; the keys of state 'counts' are word string"),
        (lambda w: w.state_query("counts", "word", schema="word long"), "'word' stands twice"),
        (lambda w: w.new_values_stream(), "no persistent_aggregate"),
        (lambda w: w.group_by("word").persistent_aggregate(n=count()).new_values_stream(), "no persistent_aggregate"),
        (
            lambda w: (
                w.each(len, schema="n int")
                .group_by("word")
                .persistent_aggregate(m=distinct_count("n"), state=MemoryMap())
            ),
            "two distinct counts do not make one",
        ),
        (
            lambda w: w.group_by("word").persistent_aggregate(m=Letters(), state=MemoryMap()),
            "a reducer's values of two batches do not make one",
        ),
        (
            lambda w: compiled(
                w.group_by("word").persistent_aggregate(n=count(), state=MemoryMap("non-transactional"))
            ),
            "non-transactional",
        ),
    ],
)
def test_refused(build: Callable[[Stream], object], said: str) -> None:
    with pytest.raises(TopologyError, match=said):
        build(words())
