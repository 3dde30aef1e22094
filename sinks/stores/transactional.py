"""`TransactionalSink`: what a sink is made of where its store has transactions; one is written in some 40 lines.

The store's own part is a transaction, a table and the insertion of rows. The rest is here: the guard and the evidence (two
tables beside the rows' own), the decision, the fence, staged files. `examples/sqlite_sink.py` is one.
"""

from __future__ import annotations

import copy
import os
import uuid
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import pyarrow as pa

from stormproof.core.base.errors import Fenced, Json, PositionMismatch, SinkRefused, StoreUnavailable, TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkInput, TableKey
from stormproof.core.postgres.database import Database
from stormproof.core.storage.protocol import absolute
from stormproof.sinks.contract.protocol import (
    ALREADY_HELD,
    APPLIED,
    CommitDecision,
    CommitResult,
    Evidence,
    EvidenceReport,
    Held,
    PreparedTransaction,
    Sink,
    SinkIdentity,
    SinkProblem,
    decide,
)
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.prepare.staging import StagedSession, prepared_batches, require_files
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.sinks.rows.limits import ColumnLimit, Limits

C = TypeVar("C")
"""The store's connection, inside a transaction."""

BOOKS = (
    "create table if not exists stormproof_guard (application varchar(500) primary key, epoch bigint, txid bigint,"
    " digest varchar(64), table_id varchar(200))",
    "create table if not exists stormproof_evidence (application varchar(500), txid bigint, digest varchar(64),"
    " rows_written bigint, primary key (application, txid))",
)
"""The sink's own tables: what it holds for each life of a topology, and every transaction that it took."""


class TransactionalSink(Sink, Generic[C]):
    """Appends rows to a table of a store with transactions, exactly once.

    A subclass names the arguments by which its table is found (`places`, attributes that its constructor takes first, as
    text, in this order), the column type for each Arrow type (`types`), and the store's errors: those after which it may
    answer again (`transient`), and those by which it refuses rows (`row_errors`).
    """

    places: ClassVar[tuple[str, ...]]
    types: ClassVar[Mapping[str, str]]
    transient: ClassVar[tuple[type[Exception], ...]]
    row_errors: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, name: str, staging: str | Path | None = None) -> None:
        self._name = name
        self._staging = None if staging is None else absolute(staging)

    # -- what a subclass writes ----------------------------------------------------------------------------------------

    @abstractmethod
    def transaction(self) -> AbstractContextManager[C]:
        """Connect, begin a transaction that excludes other writers, and commit it at the end of the block; an error rolls
        it back. When the commit has returned, it is durable.
        """

    @abstractmethod
    def execute(self, connection: C, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of plain SQL, with ``?`` for each value; returns its rows."""

    @abstractmethod
    def found_table(self, connection: C) -> str | None:
        """The id that `create` gave to the table of this name; another text where it was made elsewhere; None where there
        is no table.
        """

    @abstractmethod
    def create(self, connection: C, columns: str, table_id: str) -> None:
        """Make the table with these columns (``"a" integer, "b" text``), and keep its id for as long as it lives."""

    @abstractmethod
    def insert(self, connection: C, rows: pa.RecordBatch) -> None:
        """Insert the rows; columns go by name."""

    def count_rows(self, connection: C) -> int | None:
        """How many rows the table has, for the audit; None: not counted."""
        return None

    # -- what it gets for that -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Unique within a topology."""
        return self._name

    @property
    def target(self) -> str:
        """The table, as people see it."""
        return ":".join(self._place.values())

    @property
    def _place(self) -> dict[str, str]:
        return {place: str(getattr(self, place)) for place in self.places}

    def table_key(self) -> TableKey:
        """Equal where two sinks have one table."""
        return type(self).__qualname__, *self._place.values()

    def description(self, input_: SinkInput) -> dict[str, Json]:
        """What the ledger keeps: the class's name as the kind, and where the table is."""
        return {"kind": type(self).__name__, **self._place}

    @classmethod
    def described(cls, address: SinkAddress) -> Self:
        """The sink that the ledger describes: for `register_sink(CLASS.__name__, CLASS.described)`."""
        make: Callable[..., Self] = cls
        return make(*(address.text(place) for place in cls.places), name=address.name, staging=address.files)

    def placed(self, database: Database, staging: str) -> Self:
        """This sink with the run's folder for staged files, where it names none."""
        made = copy.copy(self)
        made._staging = self._staging or os.path.join(staging, self._name)
        return made

    def files_in(self, input_: SinkInput) -> str | None:
        """The folder of its staged files."""
        return self._staging

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError for a column whose type is not among `types`."""
        for field in input_.schema:
            if str(field.type) not in self.types:
                raise TopologyError(
                    f"sink {self._name!r} ({self.target}) has no type for column {field.name!r} ({field.type}); it has "
                    f"{', '.join(self.types)}",
                    sink=self._name,
                    field=field.name,
                )

    def open(
        self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True
    ) -> TransactionalSession[C]:
        """Make the table if it is missing and `create`, and fence older epochs out."""
        session = TransactionalSession(self, self._staging, identity, input_.schema, epoch)
        session.take_over(create=create)
        return session

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> TransactionalSession[C]:
        """Open for reading only."""
        return TransactionalSession(self, self._staging, identity, input_.schema, 0)


class TransactionalSession(StagedSession, Generic[C]):
    """The sink as opened by one driver. Each call has a transaction of its own, so any thread may call."""

    def __init__(
        self, sink: TransactionalSink[C], staging: str | None, identity: SinkIdentity, schema: pa.Schema, epoch: int
    ) -> None:
        self._sink, self._schema, self._epoch = sink, schema, epoch
        self.staging = staging or absolute(Path("stormproof-staging", sink.name))
        self._identity, self._id = identity, identity.application_id
        self._where = f"sink {identity.sink!r} ({sink.target})"

    @contextmanager
    def _transaction(self) -> Generator[C]:
        try:
            with self._sink.transaction() as connection:
                for statement in BOOKS:
                    self._sink.execute(connection, statement)
                yield connection
        except self._sink.row_errors as error:
            raise SinkRefused(f"{self._where}: {error}", sink=self._identity.sink) from error
        except self._sink.transient as error:
            raise StoreUnavailable(f"{self._where}: {error}", sink=self._identity.sink) from error

    def take_over(self, *, create: bool) -> None:
        """Make the table if it is missing and `create`, and fence older epochs out."""
        execute = self._sink.execute
        with self._transaction() as connection:
            if self._sink.found_table(connection) is None:
                if not create:
                    raise SinkRefused(f"{self._where}: there is no such table", problem=SinkProblem.TABLE_GONE)
                columns = ", ".join(f'"{field.name}" {self._sink.types[str(field.type)]}' for field in self._schema)
                self._sink.create(connection, columns, str(uuid.uuid4()))
            if self._require_epoch(connection) is None:
                execute(connection, "insert into stormproof_guard (application) values (?)", [self._id])
            execute(connection, "update stormproof_guard set epoch = ? where application = ?", [self._epoch, self._id])

    def _require_epoch(self, connection: C) -> int | None:
        query = "select epoch from stormproof_guard where application = ?"
        found = self._sink.execute(connection, query, [self._id])
        newest: int | None = found[0][0] if found else None
        if newest is not None and newest > self._epoch:
            raise Fenced(f"{self._where}: epoch {newest} holds it, this is epoch {self._epoch}", epoch=self._epoch)
        return newest

    def _table(self, connection: C) -> str:
        found = self._sink.found_table(connection)
        if found is None:
            raise SinkRefused(f"{self._where}: the table is gone", problem=SinkProblem.TABLE_GONE)
        return found

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """Changes when the table is dropped and made again."""
        with self._transaction() as connection:
            return self._table(connection)

    def writer(self) -> FileWriter:
        """Parquet files in the staging folder."""
        limits = Limits(tuple(ColumnLimit(field.name, str(field.type)) for field in self._schema))
        return FileWriter(self._identity.sink, self.staging, limits)

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to this table."""
        query = "select application from stormproof_guard where txid is not null and table_id = ?"
        with self._transaction() as connection:
            rows = self._sink.execute(connection, query, [self._table(connection)])
        return self._identity.other_lives(application for (application,) in rows)

    def held(self) -> Held | None:
        """The last transaction, read afresh.

        Raises:
            PositionMismatch: it went to another table of this name.
        """
        with self._transaction() as connection:
            return self._held(connection)

    def _held(self, connection: C) -> Held | None:
        last = self._last(connection)
        if last is None:
            return None
        txid, digest, went_to = last
        table = self._table(connection)
        if went_to != table:
            raise PositionMismatch(
                f"{self._where}: txid {txid} went to table {went_to}, this is {table}",
                held=txid,
                table_id=table,
                expected=went_to,
            )
        return Held(txid, digest)

    def _last(self, connection: C) -> tuple[int, str, str] | None:
        query = "select txid, digest, table_id from stormproof_guard where application = ? and txid is not null"
        found = self._sink.execute(connection, query, [self._id])
        return (found[0][0], found[0][1], found[0][2]) if found else None

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Insert the rows and move the guard, in one transaction."""
        execute, key = self._sink.execute, [self._id, transaction.txid]
        with self._transaction() as connection:
            self._require_epoch(connection)
            held = self._held(connection)
            if checked and decide(self._identity, transaction, held) is CommitDecision.SKIP:
                return ALREADY_HELD
            table = self._table(connection)
            self._insert(connection, transaction)
            execute(connection, "delete from stormproof_evidence where application = ? and txid = ?", key)
            values = [*key, transaction.digest, transaction.rows]
            execute(connection, "insert into stormproof_evidence values (?, ?, ?, ?)", values)
            if checked or held is None or transaction.txid >= held.txid:
                change = "update stormproof_guard set txid = ?, digest = ?, table_id = ? where application = ?"
                execute(connection, change, [transaction.txid, transaction.digest, table, self._id])
        return APPLIED

    def _insert(self, connection: C, transaction: PreparedTransaction) -> None:
        where, rows = f"{self._where}, txid {transaction.txid}", 0
        require_files(self.staging, transaction.files, where=where, digests=True)
        for batch in prepared_batches(self.staging, transaction.files):
            self._sink.insert(connection, batch)
            rows += batch.num_rows
        if rows != transaction.rows:
            raise SinkRefused(f"{where}: {rows} rows in the prepared files instead of {transaction.rows}")

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The sink's own record."""
        query = "select txid, digest, rows_written from stormproof_evidence where application = ? order by txid"
        with self._transaction() as connection:
            entries = [Evidence(*row) for row in self._sink.execute(connection, query, [self._id])]
            held, table = self._last(connection), self._sink.found_table(connection)
            found = None if table is None else self._sink.count_rows(connection)
        txid, _, went_to = held or (None, None, None)
        wrong = () if went_to in (None, table) else (f"txid {txid} went to table {went_to}, there is now {table}",)
        chosen = tuple(e for e in entries if e.txid >= first and (last is None or e.txid <= last))
        return EvidenceReport(table, chosen, txid, problems=wrong, rows_found=found)

    def close(self) -> None:
        """Do nothing: no connection stays open between two calls."""
