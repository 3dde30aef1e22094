"""A sink of your own: rows appended to a table in an SQLite file, exactly once.

It promises what every sink promises (`stormproof.sinks.protocol`): rows and evidence are committed in one transaction,
by the table of `decide`; a newer epoch fences an older driver out; a table that was dropped and created again is not taken
for the old one. With `plugins = "examples/sqlite_sink.py"` in stormproof.toml, the command line knows it, too.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa

from stormproof.core.errors import Fenced, Json, PositionMismatch, SinkRefused, StoreUnavailable, TopologyError
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput, TableKey
from stormproof.sinks.limits import ColumnLimit, Limits
from stormproof.sinks.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitResult,
    Decision,
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    Sink,
    SinkIdentity,
    SinkProblem,
    SinkSession,
    decide,
)
from stormproof.sinks.registry import register_sink
from stormproof.sinks.staging import prepared_batches, remove_staged, require_files, sweep_folder
from stormproof.sinks.writer import FileWriter

BOOKS = """
create table if not exists stormproof_guard (
  application text primary key, epoch integer, txid integer, digest text, tab text);
create table if not exists stormproof_evidence (
  application text, txid integer, digest text, rows integer, primary key (application, txid));
"""
TYPES = {
    "int64": "integer",
    "int32": "integer",
    "double": "real",
    "string": "text",
    "binary": "blob",
    "bool": "integer",
}


class SqliteSink(Sink):
    """Appends to a table of an SQLite file; creates the table if it is missing."""

    def __init__(
        self, file: str | Path, table: str, *, name: str | None = None, staging: str | Path | None = None
    ) -> None:
        if not table.isidentifier():
            raise TopologyError(f"SQLite table {table!r}: use letters, digits and '_'")
        self._file, self._table, self._name = Path(file).absolute(), table, name or table
        self._staging = None if staging is None else str(Path(staging).absolute())

    @property
    def name(self) -> str:
        return self._name

    @property
    def target(self) -> str:
        return f"{self._file}:{self._table}"

    def table_key(self) -> TableKey:
        return "sqlite", str(self._file), self._table

    def description(self, input_: SinkInput) -> dict[str, Json]:
        return {"kind": "sqlite", "file": str(self._file), "table": self._table}

    def placed(self, database: Database, staging: Path) -> Sink:
        return SqliteSink(self._file, self._table, name=self._name, staging=self._staging or staging / self._name)

    def files_in(self, input_: SinkInput) -> str | None:
        return self._staging

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        for field in input_.schema:
            if str(field.type) not in TYPES:
                raise TopologyError(f"sink {self._name!r}: SQLite has no type for column {field.name!r} ({field.type})")

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> SinkSession:
        session = self._session(identity, input_, epoch)
        session.take_over(create=create)
        return session

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> SinkSession:
        return self._session(identity, input_, 0)

    def _session(self, identity: SinkIdentity, input_: SinkInput, epoch: int) -> SqliteSession:
        staging = self._staging or str(self._file.with_suffix(".staging"))
        return SqliteSession(self._file, self._table, staging, identity, input_.schema, epoch)


class SqliteSession(SinkSession):
    """The sink as opened by one driver. Each call has a connection of its own, so any thread may call."""

    def __init__(
        self, file: Path, table: str, staging: str, identity: SinkIdentity, schema: pa.Schema, epoch: int
    ) -> None:
        self._file, self._table, self._staging, self._schema, self._epoch = file, table, staging, schema, epoch
        self._identity, self._id = identity, identity.application_id
        self._where = f"sink {identity.sink!r} ({file}:{table})"

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Generator[sqlite3.Connection]:
        """A transaction; when its commit has returned, it is on the disk."""
        try:
            with closing(sqlite3.connect(self._file, timeout=10, isolation_level=None)) as connection:
                connection.execute("pragma synchronous = full")
                connection.executescript(BOOKS)
                connection.execute("begin immediate" if write else "begin")
                yield connection
                connection.execute("commit")
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(f"{self._where}: {error}", sink=self._identity.sink) from error
        except sqlite3.IntegrityError as error:
            raise SinkRefused(f"{self._where}: {error}", sink=self._identity.sink) from error

    def take_over(self, *, create: bool) -> None:
        """Create the table if it is missing, and fence older epochs out."""
        with self._transaction(write=True) as connection:
            if self._found(connection) is None:
                if not create:
                    raise SinkRefused(f"{self._where}: there is no such table", problem=SinkProblem.TABLE_GONE)
                columns = ", ".join(f'"{field.name}" {TYPES[str(field.type)]}' for field in self._schema)
                # The comment is the table's identity: SQLite keeps it until the table is dropped.
                connection.execute(f"create table {self._table} ({columns} /* {uuid.uuid4()} */)")
            connection.execute("insert or ignore into stormproof_guard (application, epoch) values (?, 0)", [self._id])
            self._require_epoch(connection)
            connection.execute("update stormproof_guard set epoch = ? where application = ?", [self._epoch, self._id])

    def _require_epoch(self, connection: sqlite3.Connection) -> None:
        query = "select epoch from stormproof_guard where application = ?"
        (newest,) = connection.execute(query, [self._id]).fetchone() or (0,)
        if newest > self._epoch:
            raise Fenced(f"{self._where}: epoch {newest} holds it, this is epoch {self._epoch}", epoch=self._epoch)

    def _found(self, connection: sqlite3.Connection) -> str | None:
        """The identity that tells this table from another of its name; None: there is no table."""
        row = connection.execute("select sql from sqlite_master where name = ?", [self._table]).fetchone()
        return None if row is None else str(row[0]).rpartition("/* ")[2].partition(" */")[0] or "not made here"

    def _table_id(self, connection: sqlite3.Connection) -> str:
        found = self._found(connection)
        if found is None:
            raise SinkRefused(f"{self._where}: the table is gone", problem=SinkProblem.TABLE_GONE)
        return found

    @property
    def identity(self) -> SinkIdentity:
        return self._identity

    @property
    def table_id(self) -> str:
        with self._transaction() as connection:
            return self._table_id(connection)

    def writer(self) -> FileWriter:
        limits = Limits(tuple(ColumnLimit(field.name, str(field.type)) for field in self._schema))
        return FileWriter(self._identity.sink, self._staging, limits)

    def other_incarnations(self) -> tuple[str, ...]:
        with self._transaction() as connection:
            query = "select application from stormproof_guard where txid is not null and tab = ?"
            rows = connection.execute(query, [self._table_id(connection)]).fetchall()
        found = {self._identity.other_life(application) for (application,) in rows}
        return tuple(sorted(life for life in found if life is not None))

    def held(self) -> Held | None:
        with self._transaction() as connection:
            return self._held(connection)

    def _held(self, connection: sqlite3.Connection) -> Held | None:
        query = "select txid, digest, tab from stormproof_guard where application = ? and txid is not null"
        row = connection.execute(query, [self._id]).fetchone()
        if row is None:
            return None
        table = self._table_id(connection)
        if row[2] != table:
            raise PositionMismatch(
                f"{self._where}: txid {row[0]} went to table {row[2]}, this is {table}", held=row[0], table_id=table
            )
        return Held(row[0], row[1])

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        with self._transaction(write=True) as connection:
            self._require_epoch(connection)
            held = self._held(connection)
            if checked and decide(self._identity, transaction, held) is Decision.SKIP:
                return ALREADY_HELD
            table = self._table_id(connection)
            self._insert(connection, transaction)
            txid, digest = transaction.txid, transaction.digest
            connection.execute(
                "insert or replace into stormproof_evidence values (?, ?, ?, ?)",
                [self._id, txid, digest, transaction.rows],
            )
            if checked or held is None or txid >= held.txid:
                change = "update stormproof_guard set txid = ?, digest = ?, tab = ? where application = ?"
                connection.execute(change, [txid, digest, table, self._id])
        return APPLIED

    def _insert(self, connection: sqlite3.Connection, transaction: PreparedTransaction) -> None:
        where = f"{self._where}, txid {transaction.txid}"
        require_files(self._staging, transaction.files, where=where, digests=True)
        marks, rows = ", ".join("?" * len(self._schema)), 0
        for batch in prepared_batches(self._staging, transaction.files):
            columns = [column.to_pylist() for column in batch.columns]
            connection.executemany(f"insert into {self._table} values ({marks})", zip(*columns, strict=True))
            rows += batch.num_rows
        if rows != transaction.rows:
            raise SinkRefused(f"{where}: {rows} rows in the prepared files instead of {transaction.rows}")

    def sweep(self, is_dead: Callable[[int, int, str], bool]) -> int:
        return sweep_folder(self._staging, self._identity.incarnation, is_dead)

    def finished(self, transaction: PreparedTransaction) -> None:
        remove_staged(self._staging, self._identity.incarnation, transaction.txid)

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        with self._transaction() as connection:
            query = "select txid, digest, rows from stormproof_evidence where application = ? order by txid"
            entries = [Evidence(*row) for row in connection.execute(query, [self._id])]
            query = "select txid, tab from stormproof_guard where application = ? and txid is not null"
            txid, went_to = connection.execute(query, [self._id]).fetchone() or (None, None)
            table = self._found(connection)
            (found,) = connection.execute(f"select count(*) from {self._table}").fetchone() if table else (None,)
        wrong = () if went_to in (None, table) else (f"txid {txid} went to table {went_to}, there is now {table}",)
        chosen = tuple(e for e in entries if e.txid >= first and (last is None or e.txid <= last))
        return EvidenceReport(table, chosen, txid, problems=wrong, rows_found=found)

    def close(self) -> None:
        """Do nothing: no connection stays open between two calls."""


register_sink(
    "sqlite",
    lambda address: SqliteSink(address.text("file"), address.text("table"), name=address.name, staging=address.files),
)
