"""P13: rows upserted by key and order, exactly once, beside COPY with ON CONFLICT and MERGE INTO by hand."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final, TypedDict

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pgpq import ArrowToPostgresBinaryEncoder

from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench, require_total, timed
from stormproof.core.contract.sink import SinkInput, TaskContext, transaction_digest
from stormproof.sinks.contract.protocol import PreparedTransaction, Sink, SinkIdentity, SinkSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink

SCHEMA: Final = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("word", pa.string()), ("x", pa.float64())])
INPUT: Final = SinkInput.for_upsert(SCHEMA, ("id",), ("v",))
HELD: Final = 10
"""Unless said otherwise, the table has this many times the rows of a batch. Nine tenths of a batch update rows, one tenth
are new keys.
"""


def batch_of(rows: int, version: int, held: int = HELD) -> pa.RecordBatch:
    """A batch: old keys, spread over the table, and new ones."""
    old = np.arange(rows - rows // 10) * held
    new = rows * held + version * (rows // 10) + np.arange(rows // 10)
    return rows_with(np.concatenate((old, new)), version)


def rows_with(ids: np.ndarray, version: int) -> pa.RecordBatch:
    """Rows of these keys."""
    words = pa.array([f"word-{n}" for n in range(50_000)]).take(pa.array(ids % 50_000))
    return pa.record_batch([ids, np.full(len(ids), version), words, ids * 0.5], schema=SCHEMA)


class _Few(TypedDict, total=False):
    pairs_most: int
    warm_ups: int


class Ours:
    """A sink whose prepared files are written before the clock starts."""

    def __init__(self, sink: Sink, folder: Path, rows: int, held: int) -> None:
        self._session: SinkSession = sink.open(SinkIdentity("bench", "life", sink.name), INPUT, 1)
        self._folder, self._rows, self._held, self._txid = folder, rows, held, 0
        self.files: list[str] = []
        self._commit(rows_with(np.arange(rows * held), 0))

    def _prepared(self, rows: pa.RecordBatch) -> PreparedTransaction:
        self._txid += 1
        writer = self._session.writer().open_task(TaskContext("life", self._txid, 1, 0), SCHEMA)
        writer.write(rows)
        files = tuple(writer.close())
        return PreparedTransaction(
            self._txid, self._txid - 1 or None, transaction_digest(files), sum(f.rows for f in files), files
        )

    def _commit(self, rows: pa.RecordBatch) -> None:
        self._session.commit(self._prepared(rows), checked=True)

    def seconds(self) -> float:
        """The time of one commit."""
        prepared = self._prepared(batch_of(self._rows, self._txid + 1, self._held))

        def commit() -> None:
            result = self._session.commit(prepared, checked=True)
            require_total(result.superseded, 0, "superseded rows")

        took_s = timed(commit)
        self._session.finished(prepared)
        return took_s

    def close(self) -> None:
        """Let the session go."""
        self._session.close()


@contextmanager
def against_copy(bench: Workbench, rows: int, name: str, held: int = HELD) -> Generator[Case]:
    """Beside COPY into a temporary table and INSERT ... ON CONFLICT, by hand."""
    table = bench.unused("upserted")
    folder = bench.path("staged")
    sink = PostgresSink(table, database=bench.database, staging=folder)
    with closing(Ours(sink, folder, rows, held)) as ours, bench.connect() as connection:
        connection.autocommit = False
        _make_plain(connection, table, rows * held)
        versions = itertools.count(1)
        path = bench.path("batch")

        def theirs() -> float:
            pq.write_table(pa.Table.from_batches([batch_of(rows, next(versions), held)]), path)
            return timed(lambda: _by_hand(connection, f"plain_{table}", path))

        yield Case(
            key=f"P13-postgres@{name}",
            title=f"{name} rows upserted by key and version into {held} times as many in Postgres, exactly-once; COPY "
            "into a temporary table and INSERT ... ON CONFLICT",
            unit=Unit.SECONDS,
            goal=Goal(ratio=1.1),
            ours=ours.seconds,
            theirs=theirs,
            **_few(rows),
        )


def _make_plain(connection: psycopg.Connection, table: str, rows: int) -> None:
    connection.execute(
        f"create table plain_{table} (id bigint primary key, v bigint, word text, x double precision)".encode()
    )
    connection.execute(
        f"insert into plain_{table} select n, 0, 'word-' || n % 50000, n * 0.5 "
        f"from generate_series(0, {rows - 1}) n".encode()
    )
    connection.commit()


def _by_hand(connection: psycopg.Connection, table: str, path: Path) -> None:
    connection.execute(f"create temporary table added on commit drop as select * from {table} with no data".encode())
    encoder = ArrowToPostgresBinaryEncoder(SCHEMA)
    with connection.cursor() as cursor, cursor.copy("copy added from stdin with (format binary)") as copy:
        copy.write(encoder.write_header())
        for batch in pq.ParquetFile(path).iter_batches():
            copy.write(encoder.write_batch(batch))
        copy.write(encoder.finish())
    connection.execute(
        f"insert into {table} select * from added on conflict (id) do update set v = excluded.v, word = excluded.word, "
        "x = excluded.x".encode()
    )
    connection.commit()


@contextmanager
def against_merge(bench: Workbench, rows: int, name: str, goal: float, held: int = HELD) -> Generator[Case]:
    """Beside a MERGE INTO by Spark."""
    ours = Ours(DeltaSink(bench.path("upserted")), bench.path("unused"), rows, held)
    spark, plain = bench.rival_session, bench.path("plain")
    first = bench.path("batch")
    pq.write_table(pa.Table.from_batches([rows_with(np.arange(rows * held), 0)]), first)
    spark.read.parquet(str(first)).write.format("delta").save(str(plain))
    versions = itertools.count(1)

    def theirs() -> float:
        path = bench.path("batch")
        pq.write_table(pa.Table.from_batches([batch_of(rows, next(versions), held)]), path)
        statement = (
            f"merge into delta.`{plain}` t using parquet.`{path}` s on t.id = s.id when matched and s.v > t.v then "
            "update set * when not matched then insert *"
        )
        return timed(lambda: spark.sql(statement).collect())

    with closing(ours):
        yield Case(
            key=f"P13-delta@{name}",
            title=f"{name} rows upserted by key and version into {held} times as many in a Delta table, exactly-once; MERGE "
            "INTO by Spark",
            unit=Unit.SECONDS,
            goal=Goal(ratio=goal),
            ours=ours.seconds,
            theirs=theirs,
            **_few(rows),
        )
    found = DeltaTable(plain).to_pyarrow_dataset().count_rows()
    require_total(found, rows * held + (next(versions) - 1) * (rows // 10), "the table of MERGE INTO")


def _few(rows: int) -> _Few:
    """A run of millions of rows takes long, and says the same each time."""
    return {"pairs_most": 3, "warm_ups": 1} if rows > 1_000_000 else {}


def p13(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P13."""
    for rows, name in ((1_000, "1k"), (100_000, "100k")):
        yield against_copy(bench, rows, name)
    yield against_copy(bench, 5_000_000, "5M", held=1)
    yield against_merge(bench, 1_000, "1k", 0.15)
    yield against_merge(bench, 100_000, "100k", 0.6)
    yield against_merge(bench, 5_000_000, "5M", 0.6, held=1)
