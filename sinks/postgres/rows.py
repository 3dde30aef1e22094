"""How rows get into a Postgres table: by COPY, or by key with COPY into a temporary table and one INSERT ... ON CONFLICT,
where `held` is the table's row, and `excluded` the added one: see `sinks.merge_sql`.

Parallel loads: tasks copy their own files into logged staging tables, and the commit moves them by INSERT ... SELECT. A
staging table and its row in `stormproof_sink.load` are made in one transaction. The row names the prepared file; the ledger
names the files of a batch. So a staging table of a dead attempt is never read, and nothing rests on one: a file without a
staging table is copied by the driver.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, LiteralString, cast

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql

from stormproof.core.base.errors import SinkRefused, StormproofError
from stormproof.core.contract.sink import PreparedFile, SinkInput, TaskContext, TaskWriter
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.rights import quoted
from stormproof.sinks.merge_sql import POSTGRES, assignments, later_condition, written_where_held
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.bookkeeping import MINE, SCHEMA
from stormproof.sinks.postgres.columns import cast_of, sent_type, to_wire
from stormproof.sinks.postgres.table import Table, TableName, wire_schema
from stormproof.sinks.protocol import SinkIdentity
from stormproof.sinks.staging import IsDead, file_digest, parse_prepared_name, prepared_batches
from stormproof.sinks.writer import FileWriter

ADDED: Final = sql.Identifier("pg_temp", "stormproof_added")
"""With its schema: the user's own table of this name must be neither hidden by it nor taken for it."""

_TEXTS: Final = sql.Identifier("pg_temp", "stormproof_texts")

PLACE: Final = "stormproof place"
"""A column of the temporary table that numbers its rows, where they are put in an order, or merged one by one."""


def identifiers(names: Iterable[str]) -> sql.Composed:
    """Column names, with commas between them."""
    return sql.SQL(", ").join(map(sql.Identifier, names))


def copy_rows(
    connection: psycopg.Connection,
    into: sql.Identifier,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    where: str,
) -> int:
    """COPY rows into a table, in the forms of the wire schema `schema`; returns how many it took. Texts that are cast go
    through a temporary table.

    Raises:
        SinkRefused: a value does not fit its column.
    """
    values = [(field, cast_of(field, sql.Identifier(field.name))) for field in schema]
    if not any(cast for _, cast in values):
        return _copy(connection, into, schema, batches, where)
    columns = [
        sql.SQL("{} {}").format(sql.Identifier(f.name), sql.SQL(sent_type(f)))  # pyright: ignore[reportArgumentType]
        for f in schema
    ]
    connection.execute(sql.SQL("drop table if exists {}").format(_TEXTS))
    made = sql.SQL("create temporary table {} ({}) on commit drop")
    connection.execute(made.format(_TEXTS, sql.SQL(", ").join(columns)))
    _copy(connection, _TEXTS, schema, batches, where)
    cast_values = sql.SQL(", ").join(cast or sql.Identifier(field.name) for field, cast in values)
    moved = sql.SQL("insert into {} ({}) select {} from {}").format(
        into, identifiers(schema.names), cast_values, _TEXTS
    )
    return connection.execute(moved).rowcount


def _copy(
    connection: psycopg.Connection,
    into: sql.Identifier,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    where: str,
) -> int:
    encoder = ArrowToPostgresBinaryEncoder(schema)
    cursor = connection.cursor()
    statement = sql.SQL("copy {} ({}) from stdin with (format binary)").format(into, identifiers(schema.names))
    with cursor.copy(statement) as copy:
        copy.write(encoder.write_header())
        for batch in batches:
            try:
                copy.write(encoder.write_batch(to_wire(batch, schema)))
            except pa.ArrowInvalid as error:
                raise SinkRefused(f"{where}: a value does not fit its column: {error}") from error
        copy.write(encoder.finish())
    return cursor.rowcount


def make_added(connection: psycopg.Connection, name: TableName, columns: sql.Composed) -> None:
    """Make the temporary table for rows on their way into a table, where it is missing."""
    # Each time, since a savepoint that was rolled back may have taken the temporary table with it.
    connection.execute(
        sql.SQL("create temporary table if not exists {} on commit drop as select {} from {} with no data").format(
            ADDED, columns, name.identifier
        )
    )


def same_columns(one: LiteralString, other: LiteralString, names: Iterable[str]) -> sql.Composed:
    """That these columns are equal in two tables of a query."""
    return sql.SQL(" and ").join(
        sql.SQL("{0}.{2} = {1}.{2}").format(sql.SQL(one), sql.SQL(other), sql.Identifier(name)) for name in names
    )


def insert_rows(
    connection: psycopg.Connection,
    name: TableName,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    where: str,
) -> int:
    """Append rows by INSERT, by way of a temporary table: row-level security forbids COPY. Returns how many it took."""
    columns = identifiers(schema.names)
    make_added(connection, name, columns)
    connection.execute(sql.SQL("truncate {}").format(ADDED))
    copy_rows(connection, ADDED, schema, batches, where)
    statement = sql.SQL("insert into {} ({}) select {} from {}").format(name.identifier, columns, columns, ADDED)
    return connection.execute(statement).rowcount


@dataclass(slots=True)
class AppendedRows:
    """Appends rows to a table by `put`, which returns how many it took; none is superseded, and none is counted."""

    put: Callable[[Iterable[pa.RecordBatch]], int]
    superseded: int = 0
    inserted: int = 0
    change: int = 0


class RowsByKey:
    """Upserts or folds rows into a table, within one transaction of the connection; a key comes once in a call.

    `superseded` counts the rows so far that changed nothing, since the table has a later one of their key, and `inserted`
    those whose key the table did not have; `change` is by how much the sum of `hashed` over the table is more, where that
    is given. `may_drop`: the table has triggers that may drop rows without an error; then the rows that changed nothing
    are looked at. `undecided` columns do not tell which of two rows is later. `passes_over`: such a row is not given to
    the table at all, which would ask its rules about it: of a row that changes nothing they say nothing.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        name: TableName,
        input_: SinkInput,
        schema: pa.Schema,
        where: str,
        *,
        may_drop: bool = False,
        undecided: Sequence[str] = (),
        partitioned: bool = False,
        passes_over: bool = False,
        hashed: sql.Composable | None = None,
    ) -> None:
        self._connection = connection
        self._name = name
        self._input = input_
        self._schema = schema
        self._where = where
        self._is_made = False
        self._may_drop = may_drop
        self._passes_over = passes_over
        later = later_condition(input_, POSTGRES, undecided)
        self._later = None if later is None else sql.SQL(later)  # pyright: ignore[reportArgumentType]
        self._partitioned = partitioned
        self._hash = hashed
        self.superseded = self.inserted = self.change = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The key's columns."""
        return self._input.keys

    def held(self) -> int:
        """How many of the added rows' keys the table has."""
        counted = sql.SQL(
            "select count(*) from (select distinct {} from {}) as added where exists (select from {} as held where {})"
        )
        keys = counted.format(
            *(identifiers(self.keys), ADDED, self._name.identifier, same_columns("held", "added", self.keys))
        )
        (found,) = self._connection.execute(keys).fetchone() or (0,)
        return int(found)

    def content(self) -> int:
        """The sum of the hashes of those rows of the table whose keys were added; 0 where there is no hash."""
        if self._hash is None:
            return 0
        asked = sql.SQL("select coalesce(sum({}), 0) from {} as held where exists (select from {} as added where {})")
        query = asked.format(self._hash, self._name.identifier, ADDED, same_columns("held", "added", self.keys))
        found = self._connection.execute(query).fetchone() or (0,)
        return int(found[0])

    def put(self, batches: Iterable[pa.RecordBatch]) -> int:
        """Upsert or fold these rows by way of a temporary table. Returns how many were taken: all, superseded ones among
        them, but for those that triggers dropped.
        """
        make_added(self._connection, self._name, identifiers(self._schema.names))
        if self._is_made:
            self._connection.execute(sql.SQL("truncate {}").format(ADDED))
        self._is_made = True
        copied = copy_rows(self._connection, ADDED, self._schema, batches, self._where)
        # In key order: the index is walked along (a third faster at 100,000 rows), and two writers lock in one order.
        insert, before = self.insert(ADDED, identifiers(self._input.keys)), self.content()
        changed = self._changed(insert)
        self.change += self.content() - before
        return self.taken(ADDED, copied, changed)

    def insert(self, added: sql.Composable, order: sql.Composable) -> sql.Composed:
        """The statement that puts the rows of `added` in this order."""
        columns = identifiers(self._schema.names)
        return sql.SQL(
            "insert into {} as held ({}) select {} from {} as excluded{} order by {} on conflict ({}) do {}"
        ).format(
            *(self._name.identifier, columns, columns, added, self._but_superseded, order),
            *(identifiers(self._input.keys), self._update()),
        )

    def taken(self, added: sql.Composable, given: int, changed: int) -> int:
        """How many rows of `added` were taken, superseded ones among them, which are counted; the others were dropped."""
        if self._later is None and self._updates:
            return changed
        dropped = self._dropped(added) if self._may_drop and changed < given else 0
        self.superseded += given - changed - dropped
        return given - dropped

    def _changed(self, insert: sql.Composed) -> int:
        """Run the statement. Returns how many rows it changed, and counts those that it inserted."""
        if not self._partitioned:
            # A row that was there is locked by this transaction before it is updated, which its new version shows.
            counted = sql.SQL(
                "with done as ({} returning held.xmax = 0 as new) select count(*), count(*) filter (where new) from done"
            )
            changed, new = self._connection.execute(counted.format(insert)).fetchone() or (0, 0)
        else:  # a partitioned table does not return a row's xmax
            asked = sql.SQL(
                "select count(*) from {} as added where not exists (select from {} as held where {})"
            ).format(ADDED, self._name.identifier, same_columns("held", "added", self._input.keys))
            (new,) = self._connection.execute(asked).fetchone() or (0,)
            changed = self._connection.execute(insert).rowcount
        self.inserted += int(new)
        return int(changed)

    @property
    def _but_superseded(self) -> sql.Composable:
        if not self._passes_over or (self._later is None and self._updates):
            return sql.SQL("")
        return sql.SQL(" where not exists (select from {} as held where {}{})").format(
            self._name.identifier,
            same_columns("held", "excluded", self._input.keys),
            sql.SQL("") if self._later is None else sql.SQL(" and not ({})").format(self._later),
        )

    def _dropped(self, added: sql.Composable) -> int:
        """The rows that should have changed the table and did not: it lacks their key, or has an earlier row of it."""
        keys = same_columns("held", "excluded", self._input.keys)
        row = self._connection.execute(
            sql.SQL("select count(*) from {} as excluded left join {} as held on {} where held.{} is null{}").format(
                added,
                self._name.identifier,
                keys,
                sql.Identifier(self._input.keys[0]),
                sql.SQL("") if self._later is None else sql.SQL(" or {}").format(self._later),
            )
        ).fetchone()
        return 0 if row is None else int(row[0])

    @property
    def _updates(self) -> bool:
        return bool(written_where_held(self._input))

    def _update(self) -> sql.Composable:
        if not self._updates:
            return sql.SQL("nothing")
        changed = ", ".join(f"{name} = {value}" for name, value in assignments(self._input, POSTGRES).items())
        update = sql.SQL("update set {}").format(sql.SQL(changed))  # pyright: ignore[reportArgumentType]
        return update if self._later is None else sql.SQL("{} where {}").format(update, self._later)


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
