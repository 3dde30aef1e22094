"""Micro-batches into upserts: the rows of a key come to one task, late rows change nothing, and a repeat is suppressed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from support.queues import prepared_database
from support.streams import ArrowFrames, Form, Handout, StreamCell

from stormproof import DeltaSink, PostgresSink, exactly_once
from stormproof.core.postgres.database import Database, connect

pytestmark = pytest.mark.postgres
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("day", pa.int64()), pa.field("v", pa.int64())])
QUERY = str(uuid.UUID(int=9))
Rows = list[tuple[int, int, int]]


def handout(rows: Rows) -> Handout:
    columns = [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)]
    return Handout(QUERY, lambda: pa.table(columns, schema=SCHEMA), SCHEMA)


@pytest.mark.parametrize("second", [("id",), ("id", "day"), ("day",)])
def test_upserts_of_micro_batches(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: tuple[str, ...]
) -> None:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    cell = StreamCell("upserts", Form.SINKS, tmp_path, prepared_database(database))
    function = exactly_once(
        DeltaSink(tmp_path / "lake" / "one", mode="upsert", key="id", order_by="v"),
        PostgresSink("two", mode="upsert", key=second, order_by="v"),
        name="upserts",
        settings=cell.settings(),
        frames=ArrowFrames(),
    )
    batches: list[Rows] = [
        [(n % 5, n % 3, n) for n in range(40)],
        [(n % 7, n % 2, 20 - n) for n in range(30)],
        [(1, 1, 100), (2, 1, 0)],
    ]
    for number, rows in [*enumerate(batches), (2, batches[2])]:
        function(handout(rows), number)
    function.close()
    rows = [row for batch in batches for row in batch]
    one = DeltaTable(tmp_path / "lake" / "one").to_pyarrow_table().to_pylist()
    assert sorted((r["id"], r["v"]) for r in one) == last_of(rows, (0,))
    with connect(database, application_name="test", autocommit=True) as connection:
        two = connection.execute(f"select {', '.join(second)}, v from two".encode()).fetchall()
    assert sorted(two) == last_of(rows, tuple(SCHEMA.names.index(name) for name in second))
    assert function.statistics.superseded == 2 * len(rows) - sum(
        changed(batches, tuple(SCHEMA.names.index(name) for name in key)) for key in (("id",), second)
    )


def last_of(rows: Rows, key: tuple[int, ...]) -> list[tuple[int, ...]]:
    last: dict[tuple[int, ...], int] = {}
    for row in rows:
        found = tuple(row[place] for place in key)
        last[found] = max(row[2], last.get(found, row[2]))
    return sorted((*found, v) for found, v in last.items())


def changed(batches: list[Rows], key: tuple[int, ...]) -> int:
    """How many rows of the table the batches changed, batch by batch."""
    total, seen = 0, Rows()
    for batch in batches:
        before, seen = set(last_of(seen, key)), seen + batch
        total += len(set(last_of(seen, key)) - before)
    return total
