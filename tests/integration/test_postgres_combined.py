"""Where two abilities of a Postgres sink meet: rejects, upserts, triggers, weaker guarantees."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from support.sink_harness import SinkHarness

from stormproof.core.contract.sink import MESSAGE_COLUMNS, TaskContext, transaction_digest
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import Evidence, PreparedTransaction, SinkSession

pytestmark = pytest.mark.postgres

POSITIVE = "alter table counts add constraint positive check (n > 0)"


@pytest.fixture
def append(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-append", tmp_path, database)


@pytest.fixture
def upsert(tmp_path: Path, database: Database) -> SinkHarness:
    return SinkHarness("postgres-upsert", tmp_path, database)


def named(
    harness: SinkHarness, session: SinkSession, txid: int, rows: Sequence[tuple[str, int]], attempt: int = 1
) -> PreparedTransaction:
    """A transaction whose every row has a message of its own, of which the table may refuse any number."""
    schema = pa.schema([*harness.input.schema, *MESSAGE_COLUMNS])
    task = session.writer().open_task(TaskContext(harness.identity.incarnation, txid, attempt, 0), schema)
    count = len(rows)
    columns = [pa.array([word for word, _ in rows]), pa.array([n for _, n in rows], pa.int64())]
    messages = [pa.array(range(count), pa.int64()), pa.array([0] * count, pa.int64()), pa.nulls(count, schema[-1].type)]
    task.write(pa.RecordBatch.from_arrays([*columns, *messages], schema=schema))
    files = tuple(task.close())
    return PreparedTransaction(
        txid, txid - 1 or None, transaction_digest(files), sum(f.rows for f in files), files, rejects_max=count
    )


def entries(session: SinkSession) -> list[Evidence]:
    return list(session.evidence(0, None).entries)


def test_a_txid_written_again_has_the_rejects_of_the_last_time_alone(append: SinkHarness) -> None:
    """Under at-least-once the first attempt's rejects do not stand beside what the second one wrote."""
    with closing(append.open()) as session:
        append.sql(POSITIVE)
        rows = [("a", 1), ("b", -1)]
        assert len(session.commit(named(append, session, 1, rows), checked=False).refused) == 1
        append.sql("alter table counts drop constraint positive")
        assert session.commit(named(append, session, 1, rows, attempt=2), checked=False).refused == ()
        (entry,) = entries(session)
        assert (entry.rows, entry.rejected) == (2, 0)


def test_a_txid_written_again_has_the_superseded_rows_of_the_last_time_alone(upsert: SinkHarness) -> None:
    with closing(upsert.open()) as session:
        session.commit(upsert.prepare(session, 1, None, {"a": 5}), checked=False)
        assert session.commit(upsert.prepare(session, 2, 1, {"a": 1}), checked=False).superseded == 1
        assert session.commit(upsert.prepare(session, 2, 1, {"b": 1}, attempt=2), checked=False).superseded == 0
        assert [entry.superseded for entry in entries(session)] == [0, 0]


def test_all_records_are_made_at_the_start(upsert: SinkHarness) -> None:
    """With the first such row a role that may make no tables would block its batch, long after the start."""
    upsert.open().close()
    made = upsert.sql("select table_name::text from information_schema.tables where table_schema = 'stormproof_sink'")
    assert {"reject", "superseded", "schema_change"} <= {name for (name,) in made}
