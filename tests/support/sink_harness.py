"""The package's own sinks, and the example, as the suite for sinks sees them."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
from deltalake import DeltaTable, Schema
from sqlite_sink import SqliteSink

from stormproof.core.postgres.database import Database, connect
from stormproof.core.storage.object_files import ObjectFiles, key_of, root_of
from stormproof.sinks.contract.protocol import Sink
from stormproof.sinks.delta.features import AskedCommitter
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.sinks.stores.memory import MemorySink
from stormproof.testing import SinkHarness as BaseHarness
from stormproof.testing.sinks.harness import APPEND, FOLD, SCHEMA, UPSERT

__all__ = ["APPEND", "FOLD", "KINDS", "SCHEMA", "UPSERT", "ObjectStoreHarness", "SinkHarness"]

KINDS = (
    *(f"{store}-{how}" for store in ("memory", "postgres", "delta") for how in ("append", "upsert", "fold")),
    "sqlite-append",
)


class ObjectStoreHarness(BaseHarness):
    """The Delta sink over a table in an object store."""

    def __init__(self, how: str, url: str, options: dict[str, str]) -> None:
        self.url, self.options = url, options
        self.input = {"append": APPEND, "upsert": UPSERT, "fold": FOLD}[how]
        self.private = self.input is not APPEND
        self.sink: Sink = DeltaSink(f"{url}/counts", name="counts", storage_options=options)

    def table(self) -> DeltaTable:
        """By delta-rs alone."""
        return DeltaTable(f"{self.url}/counts", storage_options=self.options)

    def rows(self) -> Counter[tuple[str, int]]:
        """What the table holds now."""
        return Counter((row["word"], row["n"]) for row in self.values())

    def values(self) -> list[dict[str, Any]]:
        """What the table holds now, column by column."""
        if not DeltaTable.is_deltatable(f"{self.url}/counts", storage_options=self.options):
            return []
        found: list[dict[str, Any]] = self.table().to_pyarrow_table().to_pylist()
        return found

    def refuse(self, word: str | None) -> None:
        """By a constraint."""
        alter = self.table().alter
        if word is None:
            alter.drop_constraint("refused")
        else:
            alter.add_constraint({"refused": f"word NOT LIKE '{word}%'"})

    def drop(self) -> None:
        """Drop the table behind the sink's back."""
        files = ObjectFiles(root_of(self.url))
        store = files.store(f"{self.url}/counts")
        for chunk in obstore.list(store, prefix=key_of(f"{self.url}/counts")):
            obstore.delete(store, [meta["path"] for meta in chunk])


class SinkHarness(BaseHarness):
    """One sink of one kind, and the ways of a test to reach around it."""

    def __init__(
        self, kind: str, folder: Path, database: Database | None, *, committer: AskedCommitter = "auto"
    ) -> None:
        self.kind, self.folder, self.database = kind, folder, database
        self.committer: AskedCommitter = committer
        self.store, _, how = self.kind.partition("-")
        self.fold = how == "fold"
        self.input = {"append": APPEND, "upsert": UPSERT, "fold": FOLD}[how]
        self.private = self.kind != "delta-append"
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
                return DeltaSink(self.delta_path, name="counts", committer=self.committer)

    @property
    def staging(self) -> Path:
        """Where prepared files lie."""
        if self.store != "delta":
            return self.folder / "staged"
        return self.folder / "lake" / ".stormproof-staging" / "counts" if self.input.is_by_key else self.delta_path

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

    def values(self) -> list[dict[str, Any]]:
        """What the table holds now, column by column."""
        names = self.input.schema.names
        match self.store:
            case "memory":
                assert isinstance(self.sink, MemorySink)
                return self.sink.rows()
            case "postgres":
                listed = ", ".join(f'"{name}"' for name in names)
                return [dict(zip(names, row, strict=True)) for row in self.sql(f"select {listed} from counts")]
            case _:
                found: list[dict[str, Any]] = DeltaTable(self.delta_path).to_pyarrow_table().to_pylist()
                return found

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Behind the sink's back."""
        assert self.database is not None
        with connect(self.database, application_name="test", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def sqlite(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "tables.db", isolation_level=None)) as connection:
            return connection.execute(statement).fetchall()

    def refuse(self, word: str | None) -> None:
        """By a constraint, or by the memory sink's own rule."""
        if isinstance(self.sink, MemorySink):
            self.sink.refuse = None if word is None else lambda row: "no" if row["word"].startswith(word) else None
            return
        if self.store == "delta":
            alter = DeltaTable(self.delta_path).alter
            if word is None:
                alter.drop_constraint("refused")
            else:
                alter.add_constraint({"refused": f"word NOT LIKE '{word}%'"})
            return
        self.sql("alter table counts drop constraint if exists refused")
        if word is not None:
            self.sql(f"alter table counts add constraint refused check (not starts_with(word, '{word}'))")

    def discard_row(self) -> tuple[str | None, int | None]:
        """By a table whose column `word` takes no NULL; in memory, whose tables take it but for keys, `word` is one."""
        kept: dict[str, Any] = {"name": "counts", "schema_contract": "discard_row"}
        match self.store:
            case "memory":
                self.sink = MemorySink("counts", staging=self.folder / "staged", schema_contract="discard_row")
            case "postgres":
                assert self.database is not None
                self.sql("create table counts (word text primary key, n bigint)")
                self.sink = PostgresSink("counts", database=self.database, staging=self.folder / "staged", **kept)
            case _:
                strict = pa.schema([SCHEMA.field("word").with_nullable(False), SCHEMA.field("n")])
                DeltaTable.create(self.delta_path, Schema.from_arrow(strict))
                self.sink = DeltaSink(self.delta_path, **kept)
        return (None, 2)

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
