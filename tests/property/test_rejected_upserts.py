"""An upsert into a table that refuses some rows equals a plain fold of those that it takes, whatever the cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.named_rows import with_messages

from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database, connect
from stormproof.core.tracking.share import Anchors, MetMessages
from stormproof.sinks.contract.protocol import CommitOutcome, PreparedTransaction, Sink, SinkIdentity, SinkSession
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.prepare import rejected_messages as rejects
from stormproof.sinks.stores.memory import MemorySink

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("x", pa.int64())])
INPUT = SinkInput.for_upsert(SCHEMA, ("k",), ("v",))
MOST = 100


class Row(NamedTuple):
    """A message's one row; the table refuses those whose `x` is below zero."""

    k: str
    v: int
    x: int


ROWS = st.builds(Row, st.sampled_from("ab"), st.integers(1, 5), st.integers(-2, 2))
BATCHES = st.lists(st.lists(ROWS, max_size=8), min_size=1, max_size=4)


def prepared(session: SinkSession, txid: int, rows: Sequence[Row], incarnation: str) -> PreparedTransaction:
    """Rows of a message each, in two parts."""
    messages = MetMessages()
    messages.append(np.arange(len(rows), dtype=np.int64), np.arange(len(rows), dtype=np.int64))
    batch = pa.RecordBatch.from_pylist([row._asdict() for row in rows], SCHEMA)
    named = with_messages(batch, Anchors(len(rows), None, np.arange(len(rows)), None), messages)
    writer = session.writer().open_task(TaskContext(incarnation, txid, 1, 0), named.schema)
    half = len(rows) // 2
    for part in (named.slice(0, half), named.slice(half)):
        writer.write(part)
    files = tuple(writer.close())
    n = sum(f.rows for f in files)
    return PreparedTransaction(txid, txid - 1 or None, transaction_digest(files), n, files, rejects_max=MOST)


def require_fold(sink: Sink, read: Callable[[], list[Row]], batches: list[list[Row]], incarnation: str) -> None:
    """Commit the batches, each twice, and compare the table, the counts and the rejected rows with a plain fold."""
    held: dict[str, Row] = {}
    sink.check(INPUT, Guarantee.EXACTLY_ONCE)
    with closing(sink.open(SinkIdentity("t", incarnation, sink.name), INPUT, 1)) as session:
        for txid, rows in enumerate(batches, start=1):
            before = dict(held)
            for row in sorted(rows):
                if row.x >= 0 and (row.k not in held or row[1:] > held[row.k][1:]):
                    held[row.k] = row
            transaction = prepared(session, txid, rows, incarnation)
            done = session.commit(transaction, checked=True)
            changed = sum(held[k] is not before.get(k) for k in held)
            assert done.outcome is CommitOutcome.APPLIED
            assert changed + done.superseded + len(done.refused) == len(rows)
            # Of a row behind one that the table took, or held, it never hears.
            known = [*(row for row in rows if row.x >= 0), *before.values()]
            latest = {k: max((r[1:] for r in known if r.k == k), default=()) for k, *_ in rows}
            must = sum(1 for r in rows if r.x < 0 and r[1:] > latest[r.k])
            assert len(done.refused) == must
            again = session.commit(transaction, checked=True)
            assert again == type(done)(CommitOutcome.ALREADY_HELD, done.superseded, done.refused)
    assert sorted(read()) == sorted(held.values())


def in_memory(batches: list[list[Row]], folder: Path) -> None:
    sink = MemorySink("memory", staging=folder, refuse=lambda row: "below zero" if row["x"] < 0 else None)
    require_fold(
        sink, lambda: [Row(str(r["k"]), int(str(r["v"])), int(str(r["x"]))) for r in sink.rows()], batches, "life"
    )


_NUMBER = itertools.count()


def in_postgres(batches: list[list[Row]], database: Database, folder: Path) -> None:
    number = next(_NUMBER)
    table = f"strict_{number}"
    with connect(database, application_name="test", autocommit=True) as connection:
        connection.execute(f"create table {table} (k text primary key, v bigint, x bigint check (x >= 0))".encode())

        def read() -> list[Row]:
            return [Row(*row) for row in connection.execute(f"select k, v, x from {table}".encode()).fetchall()]

        sink = PostgresSink(table, name="postgres", database=database, staging=folder)
        require_fold(sink, read, batches, f"life-{number}")


@settings(max_examples=80, deadline=None)
@given(batches=BATCHES)
def test_in_memory(batches: list[list[Row]], tmp_path_factory: pytest.TempPathFactory) -> None:
    in_memory(batches, tmp_path_factory.mktemp("staged"))


@pytest.mark.postgres
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=BATCHES)
def test_in_a_postgres_table(batches: list[list[Row]], tmp_path: Path, database: Database) -> None:
    in_postgres(batches, database, tmp_path)


def test_control_without_the_superseded_rows_the_key_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sink did that keeps the last row of each key alone."""
    monkeypatch.setattr(rejects.Rejects, "_next", lambda _: np.empty(0, np.int64))
    with pytest.raises(AssertionError):
        in_memory([[Row("a", 1, 1), Row("a", 2, -1)]], tmp_path)
