"""Rows of several keys that exclude each other: a table is as if each message came by itself, whatever the cut into batches.

The model is a Postgres table with the same rules that is given one row at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import sql
from support.named_rows import with_messages

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import PreparedFile, SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database, connect
from stormproof.core.tracking.share import Anchors, MetMessages
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, SinkIdentity, SinkSession
from stormproof.sinks.postgres.judge import RowsInOrder
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.prepare import rejected_messages as rejects

pytestmark = pytest.mark.postgres

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("p", pa.int64()), ("x", pa.int64())])
UPSERT = SinkInput.for_upsert(SCHEMA, ("k",), ("v",))
APPEND = SinkInput(SCHEMA)
RULES = {
    "unique": "unique (p)",
    "deferrable": "unique (p) deferrable initially deferred",
    "exclude": "exclude using gist (int8range(p, p + 2) with &&)",
    "two": "unique (p, x), exclude (p with =) where (v > 2)",
}
_NUMBER = itertools.count()


class Row(NamedTuple):
    """A message's one row; the table refuses those whose `x` is below zero."""

    k: int
    v: int
    p: int | None
    x: int


ROWS = st.lists(
    st.builds(
        Row, st.integers(1, 4), st.integers(1, 5), st.none() | st.integers(1, 9), st.sampled_from([1, 1, 2, 3, -1])
    ),
    max_size=14,
)


class Tables:
    """The sink's table and the model's, with one rule."""

    def __init__(self, connection: psycopg.Connection, rule: str, input_: SinkInput) -> None:
        self.connection, self.input, self.name = connection, input_, f"t_{next(_NUMBER)}"
        key = "primary key" if input_.is_by_key else ""
        for table in (self.name, f"{self.name}_model"):
            self.run(
                f"create table {table} (k bigint {key}, v bigint, p bigint, x bigint check (x >= 0), {RULES[rule]})"
            )

    def run(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        found = self.connection.execute(statement.encode(), values or None)
        return found.fetchall() if found.description else []

    def read(self, table: str) -> list[tuple[object, ...]]:
        return self.run(f"select k, v, p, x from {table} order by 1, 2, 3, 4")

    def put(self, row: Row) -> bool:
        """Put a row into the model; whether it takes it, or knows a later one."""
        table, update = f"{self.name}_model", ""
        if self.input.is_by_key:
            held = self.run(f"select v, coalesce(p, -9), x from {table} where k = %s", row.k)
            if held and held[0] >= (row.v, -9 if row.p is None else row.p, row.x):
                return True
            update = "on conflict (k) do update set v = excluded.v, p = excluded.p, x = excluded.x"
        with suppress(psycopg.Error):
            self.run(f"insert into {table} values (%s, %s, %s, %s) {update}", *row)
            return True
        return False


def prepared(session: SinkSession, txid: int, rows: Sequence[tuple[int, Row]], life: str) -> PreparedTransaction:
    """Rows of a message each, by two tasks, to which they go by their key; each gets them in two parts."""
    files = list[PreparedFile]()
    for task in (0, 1):
        part = [(number, row) for number, row in rows if row.k % 2 == task]
        numbers, messages = np.array([number for number, _ in part], np.int64), MetMessages()
        messages.append(numbers, np.full(len(part), 7, np.int64))
        batch = pa.RecordBatch.from_pylist([row._asdict() for _, row in part], SCHEMA)
        named = with_messages(batch, Anchors(len(part), None, np.arange(len(part)), None), messages)
        writer = session.writer().open_task(TaskContext(life, txid, 1, task), named.schema)
        for some in (named.slice(0, len(part) // 2), named.slice(len(part) // 2)):
            writer.write(some)
        files += writer.close()
    n = sum(f.rows for f in files)
    return PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), n, tuple(files), rejects_max=100)


def require_one_by_one(
    database: Database, folder: Path, rule: str, input_: SinkInput, rows: Sequence[Row], cuts: Sequence[int]
) -> None:
    """Commit the rows cut into batches, and compare the table and the refused messages with the model's."""
    with connect(database, application_name="test", autocommit=True) as connection:
        tables = Tables(connection, rule, input_)
        sink = PostgresSink(tables.name, database=database, staging=folder)
        sink.check(input_, Guarantee.EXACTLY_ONCE)
        refused = set[int]()
        with closing(sink.open(SinkIdentity("t", tables.name, "postgres"), input_, 1)) as session:
            batches = itertools.pairwise([0, *sorted({cut for cut in cuts if 0 < cut < len(rows)}), len(rows)])
            for txid, (first, stop) in enumerate(batches, start=1):
                part = list(enumerate(rows))[first:stop]
                transaction = prepared(session, txid, part, tables.name)
                done = session.commit(transaction, checked=True)
                assert done.outcome is CommitOutcome.APPLIED
                refused |= {number for row in done.refused for number, _ in row.messages}
                assert session.commit(transaction, checked=True).refused == done.refused
                (entry,) = session.evidence(txid, None).entries
                assert entry.rows + entry.rejected == transaction.rows + entry.reinstated
                before = transaction.superseded - entry.reinstated
                assert before <= (entry.superseded or 0) <= before + entry.rows
        if input_.is_by_key:  # what a deep verify compares with the table
            inserted = tables.run(
                "select coalesce(sum((content::json->>'rows')::int), 0) from stormproof_sink.evidence"
                " where sink = 'postgres' and incarnation = %s",
                tables.name,
            )
            assert inserted == tables.run(f"select count(*) from {tables.name}")
        wanted = {number for number, row in enumerate(rows) if not tables.put(row)}
        assert tables.read(tables.name) == tables.read(f"{tables.name}_model")
        assert refused == wanted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("input_", [UPSERT, APPEND], ids=["upsert", "append"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, cuts=st.lists(st.integers(1, 13), max_size=4))
@example(rows=[Row(1, 1, 1, 1), Row(3, 1, 1, 1), Row(1, 2, 2, 1)], cuts=[])
def test_the_table_is_as_if_rows_came_one_by_one(
    rows: list[Row], cuts: list[int], rule: str, input_: SinkInput, tmp_path: Path, database: Database
) -> None:
    require_one_by_one(database, tmp_path, rule, input_, rows, cuts)


def in_order_of_files(messages: rejects.RowMessages, *, apart: bool) -> rejects.Order:
    return rejects.Order(np.arange(messages.rows), np.arange(messages.rows + 1))


ALL = rejects.Rejects.all


def without_superseded(found: rejects.Rejects) -> Iterator[tuple[rejects.FileRows, Rows]]:
    """Files have the superseded rows first."""
    return (given for given in ALL(found) if given[0].numbers[0] > 0)


def nothing_in_common(rows: RowsInOrder, keys: Sequence[str], columns: Sequence[str]) -> sql.SQL:
    return sql.SQL("select null::bigint")


@pytest.mark.parametrize(
    ("rows", "owner", "name", "broken"),
    [
        ([Row(1, 1, 1, 1), Row(2, 1, 1, 1)], rejects.RowMessages, "order", in_order_of_files),
        ([Row(1, 1, 1, 1), Row(3, 1, 1, 1), Row(1, 2, 2, 1)], rejects.Rejects, "all", without_superseded),
        ([Row(1, 1, 1, 1), Row(3, 1, 1, 1), Row(1, 2, 2, 1)], RowsInOrder, "_in_common", nothing_in_common),
    ],
    ids=["order", "superseded rows", "rows in common"],
)
def test_control_another_order_is_seen(
    rows: list[Row],
    owner: type,
    name: str,
    broken: Callable[..., object],
    tmp_path: Path,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_one_by_one(database, tmp_path, "unique", UPSERT, rows, [])
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, SinkRefused)):
        require_one_by_one(database, tmp_path, "unique", UPSERT, rows, [])
