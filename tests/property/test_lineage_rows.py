"""Each row's lineage is that of the message and the transaction that made it, whatever the cut into batches and tasks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory_run import World

from stormproof import MemorySink, Topology
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.task import ends
from stormproof.sink import Lineage
from stormproof.sinks.rows import by_key
from stormproof.sinks.stores.memory import FaultPoint


class Row(NamedTuple):
    """One row of a message; `made` is the message's number, which the test writes into the message's text."""

    k: str
    at: int
    n: int
    made: str


SCHEMA = "k string, at bigint, n bigint, made string"
PIECES = st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 2))
MESSAGES = st.lists(st.lists(PIECES, max_size=4), min_size=1, max_size=14)
NUMBERS = itertools.count()
UPSERT: dict[str, Any] = {"mode": "upsert", "key": "k", "order_by": "at"}


class Cut(NamedTuple):
    """How a run is cut: messages of a batch, tasks, and the batches whose commits' answers are lost."""

    batch: int
    tasks: int
    lost: tuple[int, ...]
    seed: int


CUTS = st.builds(
    Cut, st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2).map(tuple), st.integers(0, 99)
)


def rows_of(text: str) -> list[Row]:
    number, _, pieces = text.partition("|")
    return [Row(k, int(at), int(n), number) for k, at, n in (one.split(",") for one in pieces.split(";") if one)]


def text_of(number: int, pieces: list[tuple[str, int, int]]) -> bytes:
    return f"{number}|{';'.join(','.join(map(str, piece)) for piece in pieces)}".encode()


def ran(messages: list[list[tuple[str, int, int]]], cut: Cut, folder: Path) -> tuple[MemorySink, MemorySink]:
    """Every row appended, and the last row of each key; drivers die with lost answers on the way."""
    texts = [text_of(number, pieces) for number, pieces in enumerate(messages)]
    place = folder / str(next(NUMBERS))
    world = World(texts, place, batch_messages=cut.batch, seed=cut.seed)
    world.topology = Topology("words")
    added = MemorySink("added", staging=place / "added", lineage=True)
    newest = MemorySink("newest", staging=place / "newest", **UPSERT, lineage=Lineage("tx", "who"))
    made = world.topology.stream("lines", world.source).flat_map(rows_of, "line", schema=SCHEMA)
    made.into(added, newest)
    for txid in cut.lost:
        for sink in (added, newest):
            sink.store.fail(FaultPoint.AFTER if txid % 2 else FaultPoint.BEFORE, KeyboardInterrupt(), txid=txid)
    for _ in range(2 * len(cut.lost) + 1):
        try:
            world.run(engine=InlineEngine(cut.tasks, rng=world.rng, clock=world.clock))
        except KeyboardInterrupt:
            continue
        break
    return added, newest


def require_lineage(messages: list[list[tuple[str, int, int]]], cut: Cut, folder: Path) -> None:
    added, newest = ran(messages, cut, folder)
    wanted = [row for number, pieces in enumerate(messages) for row in rows_of(text_of(number, pieces).decode())]
    found: list[Any] = added.rows()
    assert Counter(Row(row["k"], row["at"], row["n"], row["made"]) for row in found) == Counter(wanted)
    assert all(row["_message_id"] == row["made"] for row in found)
    (log,) = added.store.logs.values()
    assert Counter(row["_txid"] for row in found) == Counter({e.txid: e.rows for e in log.entries if e.rows})
    txid_of = {row["made"]: row["_txid"] for row in found}
    assert len(txid_of) == len({(row["made"], row["_txid"]) for row in found}), "a message's rows have one txid"

    last = {key: max(row for row in wanted if row.k == key) for key in {row.k for row in wanted}}
    kept: list[Any] = newest.rows()
    assert {row["k"]: Row(row["k"], row["at"], row["n"], row["made"]) for row in kept} == last
    assert all(row["who"] == row["made"] for row in kept)
    assert all(row["tx"] == txid_of[row["made"]] for row in kept)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=MESSAGES, cut=CUTS)
def test_each_row_names_the_message_that_made_it(
    messages: list[list[tuple[str, int, int]]], cut: Cut, tmp_path: Path
) -> None:
    require_lineage(messages, cut, tmp_path)


MESSAGES_OF_TWO_ROWS = [[("a", 1, 0), ("b", 2, 1)], [("b", 3, 0)], [("c", 1, 1), ("a", 4, 2)], [("c", 2, 0)]]


def test_control_ids_that_are_moved_by_a_row_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of the right messages, on the wrong rows."""
    whole = ends.single_messages

    def moved(messages: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        number, origin = whole(messages)
        return number.take(pa.array(np.roll(np.arange(len(number)), 1))), origin

    require_lineage(MESSAGES_OF_TWO_ROWS, Cut(4, 1, (), 0), tmp_path)
    monkeypatch.setattr("stormproof.core.task.ends.single_messages", moved)
    with pytest.raises(AssertionError):
        require_lineage(MESSAGES_OF_TWO_ROWS, Cut(4, 1, (), 0), tmp_path)


def txid_after_equal_rows(folder: Path) -> int:
    """Two messages, in two batches, with the same row."""
    world = World([b"a", b"a"], folder, batch_messages=1)
    world.topology = Topology("words")
    sink = MemorySink("newest", staging=folder / "s", **UPSERT, lineage=True)
    world.topology.stream("lines", world.source).map(lambda k: (k, 1), "line", schema="k string, at int").into(sink)
    world.run()
    (row,) = sink.rows()
    assert isinstance(row["_txid"], int)
    return row["_txid"]


def test_an_equal_row_does_not_replace_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where the lineage columns told which row is later, the second batch would win."""
    assert txid_after_equal_rows(tmp_path / "one") == 1
    whole = by_key.compared_columns
    monkeypatch.setattr(by_key, "compared_columns", lambda input_, *more: whole(replace(input_, lineage=None), *more))
    assert txid_after_equal_rows(tmp_path / "two") == 2
