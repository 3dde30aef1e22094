"""One driver's Postgres table: connection, fence and guard, the checks of the table, the count of its rows.

Rows get in by COPY, or by key: see `merge`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, LiteralString

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import (
    CommitDecision,
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    StoreRecord,
    decide,
    least_rows,
    warning_of,
)
from stormproof.sinks.contract.row_rule import SchemaChange, SchemaContract
from stormproof.sinks.postgres import refusals
from stormproof.sinks.postgres.columns import cast_of, hashed_columns, sent_type, to_wire
from stormproof.sinks.postgres.connection import Fence, Link, has_records, make_records, one_at_a_time
from stormproof.sinks.postgres.guard import Guard
from stormproof.sinks.postgres.schema_changes import change, changes_for, changes_of
from stormproof.sinks.postgres.table import (
    Table,
    TableName,
    as_changed,
    column_limits,
    create_statement,
    find_oid,
    kept_otherwise,
    read_table,
    require_table,
)
from stormproof.sinks.rows.limits import Limits

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


def same_columns(one: LiteralString, other: LiteralString, names: Iterable[str]) -> sql.Composed:
    """That these columns are equal in two tables of a query."""
    return sql.SQL(" and ").join(
        sql.SQL("{0}.{2} = {1}.{2}").format(sql.SQL(one), sql.SQL(other), sql.Identifier(name)) for name in names
    )


def make_added(connection: psycopg.Connection, name: TableName, columns: sql.Composed) -> None:
    """Make the temporary table for rows on their way into a table, where it is missing."""
    # Each time, since a savepoint that was rolled back may have taken the temporary table with it.
    connection.execute(
        sql.SQL("create temporary table if not exists {} on commit drop as select {} from {} with no data").format(
            ADDED, columns, name.identifier
        )
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


log = logging.getLogger("stormproof.sink")

COUNTED_ROWS_MAX: Final = 5_000_000
"""Where the evidence says more rows than this, an audit does not count the table's: it would take more than a second."""


# ---- the table


class TransactionalTable(StoreRecord):
    """What a Postgres sink and a map in a Postgres table have in common. `epoch` None: for reading only."""

    def __init__(
        self,
        database: Database,
        name: TableName,
        identity: SinkIdentity,
        input_: SinkInput,
        epoch: int | None,
        contract: SchemaContract = SchemaContract.FREEZE,
    ) -> None:
        self.name = name
        self.contract = contract
        self._identity = identity
        self.input = input_
        self.where = f"sink {identity.sink!r} (table {name} at {database.redacted})"
        self.limits = Limits()
        self.undecided: tuple[str, ...] = ()
        self.hashed: tuple[str, ...] = ()
        self.database = database
        self.guard = Guard(identity, name, epoch, self.where)
        self._fence = Fence(identity, epoch, self.where)
        self.link = Link(database, identity.sink, self.where, None if epoch is None else self._fence.enter)
        self._table_id: str | None = None

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """Server, database and oid: it changes with DROP and CREATE, and with dump and restore."""
        if self._table_id is None:
            with self.link.transaction() as connection:
                self._table_id = self.guard.table_id(connection)
                if self._table_id is None:
                    raise self.guard.gone(connection)
        return self._table_id

    def take_over(self, *, create: bool) -> None:
        """Make what is missing, end older epochs' backends, raise the fence, and check the table.

        Raises:
            Fenced: a newer epoch holds this sink.
            SinkRefused: the table is missing and not to be made, or cannot hold the rows.
            StoreUnavailable: Postgres cannot be reached, or another session holds the fence and does not let it go.
        """
        if not create:
            # Checked before anything is made: this may be another database than the table's.
            with self.link.transaction(fenced=False) as connection:
                self._table(connection)
        self._fence.take_over(self.link)
        with self.link.transaction() as connection:
            self._fence.lock(connection)
            if find_oid(connection, self.name) is None:
                if not create:
                    raise self.guard.gone(connection)
                one_at_a_time(connection)
                connection.execute(create_statement(self.name, self.input))
            table, _ = self.check(connection)
            refusing = refusals.what_can_refuse(connection, table.oid, self.input)
            self._table_id = self.guard.table_id(connection)
        if refusing:
            log.warning("%s: %s", self.where, warning_of(refusing))

    def check(self, connection: psycopg.Connection) -> tuple[Table, tuple[SchemaChange, ...]]:
        """The table as the first batch will have changed it, which is what the checks of its rows go by; and the changes.

        Raises:
            SinkRefused: it cannot hold the rows.
        """
        table = self._table(connection)
        changes = self._changes(table)
        table = as_changed(table, changes)
        require_table(table, self.input, self.where)
        refusals.require_durable(connection, table.oid, self.where)
        refusals.require_writable(connection, table.oid, self.input, self.where)
        refusals.require_deterministic_keys(connection, table.oid, self.input, self.where)
        self.go_by(table)
        return table, changes

    def go_by(self, table: Table) -> None:
        """Check rows by what this table's columns hold."""
        self.limits = column_limits(table, self.input)
        self.undecided = kept_otherwise(table, self.input)
        if self.input.mode is SinkMode.APPEND:
            self.hashed = hashed_columns(table.columns, self.input.schema)

    def begin(
        self, connection: psycopg.Connection, transaction: PreparedTransaction, *, checked: bool
    ) -> CommitDecision:
        """Lock fence and guard in this database transaction; whether to commit, by the table of `decide`."""
        with connection.pipeline():  # two locks, one round trip
            fence, guard = self._fence.ask(connection), self.guard.ask(connection)
            self._fence.require(connection, fence)
            held = self.guard.locked(connection, guard, same_table=checked)
        return decide(self.identity, transaction, held) if checked else CommitDecision.COMMIT

    def checked_table(self, connection: psycopg.Connection, where: str) -> Table:
        """The table as it is now.

        Raises:
            SinkRefused: it is gone, or cannot hold the rows.
        """
        table = self._table(connection)
        require_table(table, self.input, where)
        return table

    def evolve(self, connection: psycopg.Connection, txid: int) -> None:
        """Change the table where its contract allows that and the rows need it, as part of this txid."""
        if self.contract is SchemaContract.EVOLVE:
            table = self._table(connection)
            if not self._changes(table):
                return
            # Another writer may have changed the table since: what lacks is seen under the lock that the change needs.
            connection.execute(sql.SQL("lock table {} in access exclusive mode").format(table.name.identifier))
            table = self._table(connection)
            change(connection, table, self._changes(table), self.identity, txid)

    def changed(self, connection: psycopg.Connection, txid: int) -> tuple[str, ...]:
        """What was changed as part of this txid."""
        return changes_of(connection, self.identity, txid) if self.contract is SchemaContract.EVOLVE else ()

    def _changes(self, table: Table) -> tuple[SchemaChange, ...]:
        return changes_for(table, self.input) if self.contract is SchemaContract.EVOLVE else ()

    def require_same(self, connection: psycopg.Connection, table: Table, where: str) -> None:
        """Refuse rows that went to another table than the one that was checked. Written, it cannot be renamed or dropped.

        Raises:
            SinkRefused: the name stands for another table since.
        """
        if find_oid(connection, table.name) != table.oid:
            raise SinkRefused(
                f"{where}: another table took the name {table.name} during the commit; nothing was written. Retry the txid "
                "once the tables have their names"
            )

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Insert a guard row without a txid for the table; see the protocol."""
        with self.link.transaction() as connection:
            self._fence.lock(connection)
            one_at_a_time(connection)
            if self.guard.is_claimed(connection, self.table_id):
                return ()
            lives = self.guard.other_lives(connection, self.table_id, committed=False)
            strangers = tuple(life for life in lives if life not in accepted)
            if not strangers:
                self.guard.claim(connection)
        return strangers

    def release(self) -> bool:
        """Remove that row, if it has no txid."""
        with self.link.transaction() as connection:
            return has_records(connection) and self.guard.release(connection)

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to the table, by their guards."""
        with self.link.transaction() as connection:
            if not has_records(connection):
                return ()
            return self.guard.other_lives(connection, self.table_id, committed=True)

    def held(self) -> Held | None:
        """The last transaction by the guard row, read afresh.

        Raises:
            PositionMismatch: the guard was moved with another table of this name.
            SinkRefused: the table is gone.
        """
        with self.link.transaction() as connection:
            return self.guard.held(connection) if has_records(connection) else None

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The sink's own evidence rows, and whether guard and table agree with them; all read in one snapshot."""
        with self.link.snapshot() as connection:
            if not has_records(connection):
                return EvidenceReport(self.guard.table_id(connection), (), None)
            entries = self.guard.entries(connection, first, last)
            oid = find_oid(connection, self.name)
            if oid is None and (hidden := self.guard.out_of_path(connection)) is not None:
                raise hidden
            # A map's number of rows does not follow from what was written: several rows may have one key, or none be kept.
            counts = self.input.mode is not SinkMode.UPSERT and oid is not None
            uncounted = refusals.why_uncounted(connection, oid) if counts and oid is not None else None
            least = least_rows([entry.rows for entry in entries], fold=self.input.is_by_key)
            counts = counts and uncounted is None and least <= COUNTED_ROWS_MAX
            found = self._count(connection, least) if counts else None
            volatile = [] if oid is None else refusals.volatile_relations(connection, oid)
            problems = [f"{name} is {what}: a crash of the server loses its rows" for name, what in volatile]
            report = self.guard.report(connection, entries, rows_found=found, problems=problems)
            return replace(report, uncounted=uncounted)

    def count_rows(self, limit: int) -> int:
        """The rows that are visible now."""
        with self.link.transaction() as connection:
            return self._count(connection, limit)

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Point the guard at this table and at `last`, whose evidence is added where it is missing."""
        with self.link.transaction() as connection:
            make_records(connection)
            self.guard.take_table(connection, last)

    def close(self) -> None:
        """Let the connection go."""
        self.link.close()

    def _count(self, connection: psycopg.Connection, limit: int) -> int:
        row = connection.execute(
            # Without parameters, where a % in the name would be read as one.
            sql.SQL("select count(*) from (select 1 from {} limit {}) as counted").format(
                self.name.identifier, sql.Literal(limit)
            )
        ).fetchone()
        return 0 if row is None else int(row[0])

    def _table(self, connection: psycopg.Connection) -> Table:
        oid = find_oid(connection, self.name)
        if oid is None:
            raise self.guard.gone(connection)
        return read_table(connection, oid)
