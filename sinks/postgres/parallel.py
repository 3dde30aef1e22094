"""Parallel loads: tasks copy their own files into logged staging tables, and the commit moves them by INSERT ... SELECT.

A staging table and its row in `stormproof_sink.load` are made in one transaction. The row names the prepared file; the
ledger names the files of a batch. So a staging table of a dead attempt is never read, and nothing rests on one: a file
without a staging table is copied by the driver.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, cast

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.errors import SinkRefused, StormproofError
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.rights import quoted
from stormproof.core.sink import PreparedFile, SinkInput, TaskContext, TaskWriter
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.bookkeeping import MINE, SCHEMA
from stormproof.sinks.postgres.rows import copy_rows, identifiers
from stormproof.sinks.postgres.table import Table, wire_schema
from stormproof.sinks.protocol import SinkIdentity
from stormproof.sinks.staging import IsDead, file_digest, parse_prepared_name, prepared_batches
from stormproof.sinks.writer import FileWriter

log = logging.getLogger("stormproof.sink")

_LOADS: Final = """
    create table if not exists stormproof_sink.load (
        topology text not null,
        incarnation text not null,
        sink text not null,
        file text not null,
        txid bigint not null,
        attempt bigint not null,
        digest text not null,
        rows bigint not null,
        columns text not null,
        loaded_at timestamptz not null default now(),
        primary key (topology, incarnation, sink, file)
    )
    """


@dataclass(frozen=True, slots=True)
class Load:
    """How a task copies one of its files: where to, and as which columns; picklable. `types` are Postgres's, by name."""

    database: Database
    identity: SinkIdentity
    schema: pa.Schema
    types: tuple[str, ...]
    rows_min: int

    @property
    def columns(self) -> str:
        """The staging table's columns as text: a table whose columns were changed since is not loaded from it."""
        return json.dumps([[f.name, str(f.type), kind] for f, kind in zip(self.schema, self.types, strict=True)])

    def put(self, directory: str, file: PreparedFile) -> None:
        """Copy a prepared file into a staging table of its own, and record it: both or neither.

        Raises:
            SinkRefused: the file does not read as it was written.
            psycopg.Error, StoreUnavailable: the database does not take it.
        """
        where, name = f"parallel load of {file.path}", parse_prepared_name(file.path)
        assert name is not None
        if file_digest(os.path.join(directory, file.path)) != file.digest:
            raise SinkRefused(f"{where}: the file does not have the digest that was written", files=[file.path])
        table = staging_table(self.identity, file.path)
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(f.name), sql.SQL(kind))  # pyright: ignore[reportArgumentType]
            for f, kind in zip(self.schema, self.types, strict=True)
        )
        with connect(self.database, application_name=f"stormproof load {self.identity.sink}"[:63]) as connection:
            connection.execute(sql.SQL("create table {} ({}) with (autovacuum_enabled = off)").format(table, columns))
            copied = copy_rows(
                connection, table, self.schema, prepared_batches(directory, [file], self.schema.names), where
            )
            if copied != file.rows:
                raise SinkRefused(f"{where}: {copied} rows were copied instead of {file.rows}")
            connection.execute(
                "insert into stormproof_sink.load (topology, incarnation, sink, file, txid, attempt, digest, rows, columns)"
                " values (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
                (
                    *asdict(self.identity).values(),
                    file.path,
                    name.txid,
                    name.attempt,
                    file.digest,
                    file.rows,
                    self.columns,
                ),
            )


class _LoadingTask(TaskWriter):
    """A task's writer whose file is also copied into a staging table, where it has rows enough."""

    def __init__(self, inner: TaskWriter, directory: str, load: Load) -> None:
        self._inner = inner
        self._directory = directory
        self._load = load

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows."""
        self._inner.write(rows)

    def close(self) -> Sequence[PreparedFile]:
        """Finish the file, then copy it. A copy that fails costs no batch: the driver copies the file."""
        files = self._inner.close()
        for file in files:
            if file.rows < self._load.rows_min:
                continue
            try:
                self._load.put(self._directory, file)
            except (psycopg.Error, StormproofError, OSError) as error:
                log.warning("%s was not loaded by its task, and is left to the driver: %s", file.path, error)
        return files

    def discard(self) -> None:
        """Remove what was written."""
        self._inner.discard()


@dataclass(frozen=True, slots=True)
class LoadingWriter(FileWriter):
    """A writer whose tasks also load."""

    load: Load | None = None

    def open_task(self, context: TaskContext, schema: pa.Schema) -> TaskWriter:
        """A writer for one task."""
        inner = FileWriter.open_task(self, context, schema)
        return inner if self.load is None else _LoadingTask(inner, self.directory, self.load)


def staging_table(identity: SinkIdentity, file: str) -> sql.Identifier:
    """The staging table of a prepared file."""
    return sql.Identifier(
        SCHEMA, f"load_{hashlib.sha256(json.dumps([*asdict(identity).values(), file]).encode()).hexdigest()[:40]}"
    )


@dataclass(frozen=True, slots=True)
class Loads:
    """The driver's side of parallel loads. `rows_min` None: tasks load nothing; what was loaded before is still swept."""

    identity: SinkIdentity
    database: Database
    rows_min: int | None
    load: Load | None = None

    def prepared(self, connection: psycopg.Connection, table: Table, input_: SinkInput, where: str) -> Loads:
        """The same with what tasks need to know; the record is made where it is missing.

        Tasks load only where the role may make tables beside the record, which is said, and only what is appended: rows by
        key go through a temporary table in the commit anyway.
        """
        if self.rows_min is None or input_.is_by_key:
            return self
        if connection.execute("select has_schema_privilege('stormproof_sink', 'create')").fetchone() != (True,):
            (role,) = connection.execute("select current_user::text").fetchone() or ("",)
            log.warning(
                "%s: tasks load nothing, and the driver copies every row: role %s may not make staging tables. As the "
                "schema's owner run: GRANT CREATE ON SCHEMA stormproof_sink TO %s;",
                where,
                quoted(role),
                quoted(role),
            )
            return self
        if not _has_record(connection):
            bookkeeping.one_at_a_time(connection)
            connection.execute(_LOADS)
        there = {column.name: column.base for column in table.columns}
        types = tuple(there[field.name] for field in input_.schema)
        return replace(self, load=Load(self.database, self.identity, wire_schema(table, input_), types, self.rows_min))

    def writer(self, plain: FileWriter) -> FileWriter:
        """The executors' side."""
        if self.load is None:
            return plain
        given = {field.name: getattr(plain, field.name) for field in fields(plain) if field.init}
        return LoadingWriter(**given, load=self.load)

    def split(
        self, connection: psycopg.Connection, files: Sequence[PreparedFile], table: Table, input_: SinkInput
    ) -> tuple[tuple[PreparedFile, ...], tuple[PreparedFile, ...]]:
        """Of a batch's files, those that have a staging table with just their rows, and the others."""
        if self.load is None or not any(file.rows >= self.load.rows_min for file in files):
            return (), tuple(files)
        now = replace(self.load, schema=wire_schema(table, input_))
        there = {column.name: column.base for column in table.columns}
        now = replace(now, types=tuple(there[field.name] for field in input_.schema))
        rows = connection.execute(
            f"select file, digest, rows, columns from stormproof_sink.load where {MINE} and file = any(%(files)s)",
            {**bookkeeping.mine(self.identity), "files": [file.path for file in files]},
        ).fetchall()
        found = {name: rest for name, *rest in rows}
        staged = tuple(f for f in files if found.get(f.path) == [f.digest, f.rows, now.columns])
        return staged, tuple(f for f in files if f not in staged)

    def move(
        self, connection: psycopg.Connection, into: Table, files: Sequence[PreparedFile], names: Sequence[str]
    ) -> tuple[int, int]:
        """Move staged rows into the table, and drop their staging tables, in this transaction. Returns how many rows the
        table took, and how many there were.
        """
        taken = there = 0
        for file in files:
            table = staging_table(self.identity, file.path)
            moved = connection.execute(
                sql.SQL("insert into {} ({}) select {} from {}").format(
                    into.name.identifier, identifiers(names), identifiers(names), table
                )
            ).rowcount
            taken += moved
            there += moved if moved == file.rows else _count(connection, table)
            _drop(connection, self.identity, file.path)
        return taken, there

    def sweep(self, connection: psycopg.Connection, is_dead: IsDead) -> int:
        """Drop the staging tables of dead attempts; returns how many."""
        if not _has_record(connection):
            return 0
        rows = connection.execute(
            f"select txid, attempt, file from stormproof_sink.load where {MINE}", bookkeeping.mine(self.identity)
        ).fetchall()
        dead = [str(file) for txid, attempt, file in rows if is_dead(txid, attempt, file)]
        for file in dead:
            _drop(connection, self.identity, file)
        return len(dead)


def _has_record(connection: psycopg.Connection) -> bool:
    return connection.execute("select to_regclass('stormproof_sink.load') is not null").fetchone() == (True,)


def _count(connection: psycopg.Connection, table: sql.Identifier) -> int:
    row = cast("tuple[int]", connection.execute(sql.SQL("select count(*) from {}").format(table)).fetchone())
    return row[0]


def _drop(connection: psycopg.Connection, identity: SinkIdentity, file: str) -> None:
    connection.execute(sql.SQL("drop table if exists {}").format(staging_table(identity, file)))
    connection.execute(
        f"delete from stormproof_sink.load where {MINE} and file = %(file)s",
        {**bookkeeping.mine(identity), "file": file},
    )
