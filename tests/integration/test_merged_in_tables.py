"""Columns that a function merges, where other writers come between reading and writing, and where they left a mess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from psycopg import sql
from support.fold_harness import Folded, FoldHarness, rows_of

from stormproof import approx_count_distinct, count
from stormproof.core.errors import SinkRefused
from stormproof.core.postgres.database import Database
from stormproof.core.sink import MESSAGE_COLUMNS
from stormproof.core.sketches import sketches_of_groups
from stormproof.sinks.delta import merging as delta_merging
from stormproof.sinks.memory import MemorySink
from stormproof.sinks.postgres.merging import MergedPut

pytestmark = pytest.mark.sampled(0.5)

KEPT = Folded({}, {"n": count(), "x": approx_count_distinct("int64")})
Row = dict[str, Any]


def batch(**values: Sequence[int]) -> pa.RecordBatch:
    """Rows by key: `k1=[5, 6]`."""
    return KEPT.batch(rows_of({"key": int(key[1:]), "int64": v} for key, of_key in values.items() for v in of_key))


def row(key: int, values: Sequence[int], n: int) -> Row:
    column = pa.array(values, pa.int64())
    sketch = sketches_of_groups(np.zeros(len(values), np.int64), column, 1)[0].as_py()
    return {"n": n, "x": len(values), "x_sketch": sketch}


def insert(database: Database, key: int, values: Sequence[int], n: int) -> None:
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("set lock_timeout = '300ms'")
        made = row(key, values, n)
        statement = "insert into counts (key, n, x, x_sketch) values (%s, %s, %s, %s)"
        connection.execute(statement, [key, made["n"], made["x"], made["x_sketch"]])


def after_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Act when the sink has read what is held, and before it writes, round by round: there are two at most."""
    rounds, merge = iter(range(2)), MergedPut._merge  # pyright: ignore[reportPrivateUsage]

    def merge_and_act(self: MergedPut) -> None:
        merge(self)
        act(next(rounds))

    monkeypatch.setattr(MergedPut, "_merge", merge_and_act)


@pytest.fixture
def harness(database: Database, tmp_path: Path) -> FoldHarness:
    return FoldHarness("postgres-fold", tmp_path, database).take(KEPT)


def put_between(harness: FoldHarness, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> dict[int, Row]:
    with closing(harness.open()) as session:
        harness.commit(session, 1, batch(k1=[1, 2]))
        after_read(monkeypatch, act)
        harness.commit(session, 2, batch(k1=[2, 3], k2=[5], k3=[6]))
    return harness.content()


@pytest.mark.postgres
def test_a_key_that_another_writer_inserts_after_it_was_looked_for_is_merged(
    harness: FoldHarness, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = put_between(harness, monkeypatch, lambda n: None if n else insert(database, 2, [5, 9, 10], 4))
    assert found == {1: row(1, [1, 2, 3], 4), 2: row(2, [5, 9, 10], 5), 3: row(3, [6], 1)}


@pytest.mark.postgres
def test_control_such_a_key_is_lost_where_each_row_in_the_way_is_replaced(
    harness: FoldHarness, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MergedPut, "was_read", sql.SQL("true").format())
    found = put_between(harness, monkeypatch, lambda n: None if n else insert(database, 2, [5, 9, 10], 4))
    assert found[2]["x"] == 1


@pytest.mark.postgres
def test_a_row_that_was_read_stays_as_read_until_the_commit(
    harness: FoldHarness, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(_: int) -> None:
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute("set lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                connection.execute("update counts set x_sketch = null where key = 1")
            connection.execute("insert into counts (key, n) values (77, 1)")

    found = put_between(harness, monkeypatch, update)
    assert found[1] == row(1, [1, 2, 3], 4)
    assert found[77] == {"n": 1, "x": None, "x_sketch": None}


@pytest.mark.postgres
def test_rows_that_triggers_drop_are_told_from_rows_of_other_writers(
    harness: FoldHarness, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.open().close()
    harness.sql(
        "create function drop3() returns trigger language plpgsql as "
        "'begin if new.key = 3 or old.key = 1 then return null; end if; return new; end';"
        "create trigger drop3 before insert or update on counts for each row execute function drop3()"
    )

    found = put_between(harness, monkeypatch, lambda n: None if n else insert(database, 2, [5, 9], 4))
    assert found == {1: row(1, [1, 2], 2), 2: row(2, [5, 9], 5)}


STORES = ("memory", "postgres", "delta", "delta-streamed")


@pytest.fixture(params=STORES)
def every(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FoldHarness:
    store, _, streamed = str(request.param).partition("-")
    if streamed:
        monkeypatch.setattr(delta_merging, "BYTES_IN_MEMORY_MAX", 0)
        monkeypatch.setattr("stormproof.sinks.merging.ROWS_AT_ONCE", 1)
    database = request.getfixturevalue("database") if store == "postgres" else None
    return FoldHarness(f"{store}-fold", tmp_path, database).take(KEPT)


def spoil(harness: FoldHarness, key: int, sketch: bytes | None) -> None:
    """As another program might."""
    if harness.store == "postgres":
        value = "null" if sketch is None else f"'\\x{sketch.hex()}'::bytea"
        harness.sql(f"update counts set x_sketch = {value} where key = {key}")
        return
    is_memory = isinstance(harness.sink, MemorySink)
    store = harness.sink.store if isinstance(harness.sink, MemorySink) else None
    held = store.content if store is not None else pa.table(DeltaTable(harness.delta_path).to_pyarrow_table())
    assert held is not None
    rows = [one | ({"x_sketch": sketch} if one["key"] == key else {}) for one in held.to_pylist()]
    changed = pa.Table.from_pylist(rows, KEPT.group.schema)
    if store is not None and is_memory:
        store.content = changed
    else:
        write_deltalake(harness.delta_path, changed, mode="overwrite")


@pytest.mark.postgres
@pytest.mark.parametrize(("sketch", "told"), [(b"no sketch", "mismatch|expected"), (None, "NULL beside an estimate")])
def test_a_held_value_that_cannot_be_merged_is_refused_by_its_key(
    every: FoldHarness, sketch: bytes | None, told: str
) -> None:
    with closing(every.open()) as session:
        every.commit(session, 1, batch(k1=[1], k2=[2], k3=[3]))
        spoil(every, 3, sketch)
        with pytest.raises(SinkRefused, match=rf"'x_sketch' cannot be merged for the key .*3.*({told})"):
            every.commit(session, 2, batch(k1=[1], k2=[4], k3=[5]))
        every.commit(session, 2, batch(k1=[1], k2=[4]))  # which the spoiled row is no part of
    found = every.content()
    assert (found[1]["n"], found[2]["x"], found[3]["x_sketch"]) == (2, 2, sketch)


def test_a_key_that_a_delta_table_has_twice_is_refused_by_name(tmp_path: Path) -> None:
    harness = FoldHarness("delta-fold", tmp_path, None).take(KEPT)
    with closing(harness.open()) as session:
        harness.commit(session, 1, batch(k1=[1]))
        write_deltalake(harness.delta_path, pa.Table.from_batches([batch(k1=[2], k2=[2])]), mode="append")
        with pytest.raises(SinkRefused, match=r"has the key \{'key': 1\} more than once"):
            harness.commit(session, 2, batch(k1=[3]))


@pytest.mark.parametrize("reads_again", [True, False], ids=["", "control"])
def test_a_commit_of_another_writer_after_the_reading_is_a_conflict_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_again: bool
) -> None:
    harness = FoldHarness("delta-fold", tmp_path, None).take(KEPT)
    read, seen = delta_merging.MergedRows.source, list[Any]()

    def read_and_append(self: delta_merging.MergedRows) -> Any:
        found = read(self)
        seen.append(found)
        if len(seen) == 1:
            write_deltalake(harness.delta_path, pa.Table.from_batches([batch(k2=[5, 9])]), mode="append")
        return found if reads_again else seen[0]

    with closing(harness.open()) as session:
        harness.commit(session, 1, batch(k1=[1]))
        monkeypatch.setattr(delta_merging.MergedRows, "source", read_and_append)
        harness.commit(session, 2, batch(k1=[2], k2=[5, 6]))
    assert len(seen) == 2
    expected = {1: row(1, [1, 2], 2), 2: row(2, [5, 6, 9], 4)}
    assert (harness.content() == expected) is reads_again


def test_spark_as_committer_is_refused_by_name_without_starting_it(tmp_path: Path) -> None:
    harness = FoldHarness("delta-fold", tmp_path, None, committer="spark").take(KEPT)
    with pytest.raises(SinkRefused, match="Spark commits to this table, and column 'x_sketch' is merged by a function"):
        harness.open()


@pytest.mark.postgres
def test_a_group_that_the_table_refuses_is_left_out_and_the_others_are_merged(harness: FoldHarness) -> None:
    with closing(harness.open()) as session:
        harness.commit(session, 1, batch(k1=[1], k2=[2], k4=[8, 9]))
        harness.sql("alter table counts add check (key <> 2 or x < 2), add check (key <> 3)")
        added = batch(k1=[4], k2=[5], k3=[6], k4=[7])
        named = [pa.array([[7, 8, 9, 10], [0] * 4][n], pa.int64()) for n in range(2)]
        columns = [*added.columns, *named, pa.nulls(4, MESSAGE_COLUMNS.field(2).type)]
        rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema([*added.schema, *MESSAGE_COLUMNS]))
        prepared = replace(harness.prepare_rows(session, 2, 1, [rows]), rejects_max=10)
        result = session.commit(prepared, checked=True)
    assert len(result.refused) == 2
    expected = {1: row(1, [1, 4], 2), 2: row(2, [2], 1), 4: row(4, [7, 8, 9], 3)}
    assert harness.content() == expected
