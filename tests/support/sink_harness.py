"""One way to drive every sink in tests: open, prepare files, look at the rows, drop the table behind its back."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from sqlite_sink import SqliteSink

from stormproof.core.postgres.database import Database, connect
from stormproof.core.sink import Fold, SinkInput, TaskContext, transaction_digest
from stormproof.sinks.delta import DeltaSink
from stormproof.sinks.memory import MemorySink
from stormproof.sinks.postgres import PostgresSink
from stormproof.sinks.protocol import PreparedTransaction, Sink, SinkIdentity, SinkSession

SCHEMA = pa.schema([pa.field("word", pa.string()), pa.field("n", pa.int64())])
APPEND = SinkInput(SCHEMA)
FOLD = SinkInput.for_fold(SCHEMA, ("word",), {"n": Fold.SUM})
KINDS = (
    *(f"{store}-{how}" for store in ("memory", "postgres", "delta") for how in ("append", "fold")),
    "sqlite-append",
)


@dataclass
class SinkHarness:
    """One sink of one kind, and the ways of a test to reach around it."""

    kind: str
    folder: Path
    database: Database | None

    def __post_init__(self) -> None:
        self.store, _, how = self.kind.partition("-")
        self.fold = how == "fold"
        self.input = FOLD if self.fold else APPEND
        self.identity = SinkIdentity("topology", "inc-1", "counts")
        self.delta_path = self.folder / "lake" / "counts"
        self.sink = self._sink()

    def _sink(self) -> Sink:
        match self.store:
            case "memory":
                return MemorySink("counts", staging=self.folder / "staged")
            case "postgres":
                assert self.database is not None
                return PostgresSink("counts", name="counts", database=self.database, staging=self.folder / "staged")
            case "sqlite":
                return SqliteSink(self.folder / "tables.db", "counts", staging=self.folder / "staged")
            case _:
                return DeltaSink(self.delta_path, name="counts")

    @property
    def private(self) -> bool:
        """Whether its prepared files are in a staging folder, and not the table's own."""
        return self.kind != "delta-append"

    @property
    def staging(self) -> Path:
        """Where prepared files lie."""
        if self.store != "delta":
            return self.folder / "staged"
        return self.folder / "lake" / ".stormproof-staging" / "counts" if self.fold else self.delta_path

    def open(self, epoch: int = 1, *, create: bool = True) -> SinkSession:
        return self.sink.open(self.identity, self.input, epoch, create=create)

    def prepare(
        self,
        session: SinkSession,
        txid: int,
        previous: int | None,
        rows: Mapping[str, int] | Sequence[tuple[str | None, int | None]],
        *,
        attempt: int = 1,
        tasks: int = 1,
    ) -> PreparedTransaction:
        """Write rows as `tasks` tasks would, and put them together as prepare does."""
        pairs = list(rows.items()) if isinstance(rows, Mapping) else list(rows)
        files = [
            file
            for task in range(tasks)
            for file in self._task(
                session, TaskContext(self.identity.incarnation, txid, attempt, task), pairs[task::tasks]
            )
        ]
        return PreparedTransaction(txid, previous, transaction_digest(files), sum(f.rows for f in files), tuple(files))

    def _task(self, session: SinkSession, context: TaskContext, pairs: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
        writer = session.writer().open_task(context, SCHEMA)
        writer.write(
            pa.record_batch(
                [pa.array([w for w, _ in pairs], pa.string()), pa.array([n for _, n in pairs], pa.int64())],
                schema=SCHEMA,
            )
        )
        return writer.close()

    def rows(self) -> Counter[tuple[str, int]]:
        """What the table holds now."""
        match self.store:
            case "memory":
                assert isinstance(self.sink, MemorySink)
                found: list[Any] = self.sink.rows()
            case "postgres":
                found = [{"word": w, "n": n} for w, n in self.sql("select word, n from counts")]
            case "sqlite":
                found = [{"word": w, "n": n} for w, n in self.sqlite("select word, n from counts")]
            case _:
                found = DeltaTable(self.delta_path).to_pyarrow_table().to_pylist()
        return Counter((row["word"], row["n"]) for row in found)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Behind the sink's back."""
        assert self.database is not None
        with connect(self.database, application_name="test", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def sqlite(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "tables.db", isolation_level=None)) as connection:
            return connection.execute(statement).fetchall()

    def drop(self) -> None:
        """Drop the table behind the sink's back."""
        match self.store:
            case "memory":
                assert isinstance(self.sink, MemorySink)
                self.sink.store.drop()
            case "postgres":
                self.sql("drop table counts")
            case "sqlite":
                self.sqlite("drop table counts")
            case _:
                shutil.rmtree(self.delta_path)
