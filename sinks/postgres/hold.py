"""One driver's hold on a Postgres table: connection, fence and guard, the checks of the table, the count of its rows; and
how the table follows its rows' schema: columns are added and widened in the first batch that needs them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Final

import psycopg
import pyarrow as pa
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
from stormproof.sinks.contract.row_rule import Change, SchemaContract
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.bookkeeping import MINE
from stormproof.sinks.postgres.columns import Column, column_type, hashed_columns
from stormproof.sinks.postgres.connection import Fence, Link
from stormproof.sinks.postgres.guard import Guard
from stormproof.sinks.postgres.refusals import (
    require_deterministic_keys,
    require_durable,
    require_writable,
    volatile_relations,
    what_can_refuse,
    why_uncounted,
)
from stormproof.sinks.postgres.table import (
    Table,
    TableName,
    column_limits,
    create_statement,
    find_oid,
    kept_otherwise,
    read_table,
    require_table,
)
from stormproof.sinks.rows.limits import Limits

log = logging.getLogger("stormproof.sink")

COUNTED_ROWS_MAX: Final = 5_000_000
"""Where the evidence says more rows than this, an audit does not count the table's: it would take more than a second."""


class TableHold(StoreRecord):
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
            raise self.guard.gone()
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
                    raise self.guard.gone()
                bookkeeping.one_at_a_time(connection)
                connection.execute(create_statement(self.name, self.input))
            table, _ = self.check(connection)
            refusing = what_can_refuse(connection, table.oid, self.input)
            self._table_id = self.guard.table_id(connection)
        if refusing:
            log.warning("%s: %s", self.where, warning_of(refusing))

    def check(self, connection: psycopg.Connection) -> tuple[Table, tuple[Change, ...]]:
        """The table as the first batch will have changed it, which is what the checks of its rows go by; and the changes.

        Raises:
            SinkRefused: it cannot hold the rows.
        """
        table = self._table(connection)
        changes = self._changes(table)
        table = as_changed(table, changes)
        require_table(table, self.input, self.where)
        require_durable(connection, table.oid, self.where)
        require_writable(connection, table.oid, self.input, self.where)
        require_deterministic_keys(connection, table.oid, self.input, self.where)
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

    def _changes(self, table: Table) -> tuple[Change, ...]:
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
            bookkeeping.one_at_a_time(connection)
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
            return bookkeeping.is_made(connection) and self.guard.release(connection)

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to the table, by their guards."""
        with self.link.transaction() as connection:
            if not bookkeeping.is_made(connection):
                return ()
            return self.guard.other_lives(connection, self.table_id, committed=True)

    def held(self) -> Held | None:
        """The last transaction by the guard row, read afresh.

        Raises:
            PositionMismatch: the guard was moved with another table of this name.
            SinkRefused: the table is gone.
        """
        with self.link.transaction() as connection:
            return self.guard.held(connection) if bookkeeping.is_made(connection) else None

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The sink's own evidence rows, and whether guard and table agree with them; all read in one snapshot."""
        with self.link.snapshot() as connection:
            if not bookkeeping.is_made(connection):
                return EvidenceReport(self.guard.table_id(connection), (), None)
            entries = self.guard.entries(connection, first, last)
            oid = find_oid(connection, self.name)
            # A map's number of rows does not follow from what was written: several rows may have one key, or none be kept.
            counts = self.input.mode is not SinkMode.UPSERT and oid is not None
            uncounted = why_uncounted(connection, oid) if counts and oid is not None else None
            least = least_rows([entry.rows for entry in entries], fold=self.input.is_by_key)
            counts = counts and uncounted is None and least <= COUNTED_ROWS_MAX
            found = self._count(connection, least) if counts else None
            volatile = [] if oid is None else volatile_relations(connection, oid)
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
            bookkeeping.make(connection)
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
            raise self.guard.gone()
        return read_table(connection, oid)


_WIDER: Final = ("smallint", "integer", "bigint")


def changes_for(table: Table, input_: SinkInput) -> tuple[Change, ...]:
    """What has to change before the table can hold such rows; a type that cannot be widened is left to `require_table`.

    Integers, `real` and `numeric` are widened to what holds both the rows' values and the table's. A key column is never
    added: rows that are there would have none.
    """
    there = {column.name: column for column in table.columns}
    found: list[Change] = []
    for field in input_.schema:
        made = column_type(field.type)
        column = there.get(field.name)
        if made is None:
            continue
        if column is None:
            if field.name not in input_.keys:
                found.append(Change(field.name, None, made))
            continue
        wider = _wider(field.type, column, made)
        if wider is not None and not column.generated:
            found.append(Change(field.name, column.type, wider))
    return tuple(found)


def _wider(kind: pa.DataType, column: Column, made: str) -> str | None:
    """The type that the column is to be widened to; None where it is wide enough, or of another kind."""
    if column.type != column.base and not column.type.startswith("numeric("):
        return None  # a domain, or a length
    if made in _WIDER and column.base in _WIDER:
        return made if _WIDER.index(made) > _WIDER.index(column.base) else None
    if made == "double precision" and column.base == "real":
        return made
    if pa.types.is_decimal128(kind) and column.base == "numeric" and column.modifier >= 4:
        precision, scale = (column.modifier - 4) >> 16, (column.modifier - 4) & 0x7FF
        digits, fraction = max(precision - scale, kind.precision - kind.scale), max(scale, kind.scale)
        return (
            f"numeric({digits + fraction},{fraction})" if (digits + fraction, fraction) != (precision, scale) else None
        )
    return None


def as_changed(table: Table, changes: tuple[Change, ...]) -> Table:
    """The table as it will be, for the checks of rows that are written before it is changed."""
    columns = {column.name: column for column in table.columns}
    for change in changes:
        base, modifier = change.becomes, -1
        if base.startswith("numeric("):
            precision, scale = (int(digits) for digits in base[8:-1].split(","))
            base, modifier = "numeric", (precision << 16 | scale) + 4
        new = Column(change.column, change.becomes, base, modifier, not_null=False, has_default=False, generated=False)
        old = columns.get(change.column)
        kept = new if old is None else replace(old, type=new.type, base=new.base, modifier=new.modifier)
        columns[change.column] = kept
    return replace(table, columns=tuple(columns.values()))


def change(
    connection: psycopg.Connection, table: Table, changes: tuple[Change, ...], identity: SinkIdentity, txid: int
) -> None:
    """Change the table, and record it with the txid, in the caller's transaction."""
    if not changes:
        return
    parts = [
        sql.SQL("add column {} {}" if one.was is None else "alter column {} type {}").format(
            sql.Identifier(one.column),
            sql.SQL(one.becomes),  # pyright: ignore[reportArgumentType]
        )
        for one in changes
    ]
    connection.execute(sql.SQL("alter table {} {}").format(table.name.identifier, sql.SQL(", ").join(parts)))
    mine = {**bookkeeping.mine(identity), "txid": txid}
    # Unchecked, a later attempt may write a txid again, and need further changes.
    (first,) = connection.execute(
        f"select coalesce(max(number) + 1, 0) from stormproof_sink.schema_change where {MINE} and txid = %(txid)s", mine
    ).fetchone() or (0,)
    connection.cursor().executemany(
        "insert into stormproof_sink.schema_change (topology, incarnation, sink, txid, number, change) "
        "values (%s, %s, %s, %s, %s, %s)",
        [(*mine.values(), n, str(one)) for n, one in enumerate(changes, start=first)],
    )


def changes_of(connection: psycopg.Connection, identity: SinkIdentity, txid: int) -> tuple[str, ...]:
    """What a txid changed, by the sink's own record."""
    rows = connection.execute(
        f"select change from stormproof_sink.schema_change where {MINE} and txid = %(txid)s order by number",
        {**bookkeeping.mine(identity), "txid": txid},
    ).fetchall()
    return tuple(str(text) for (text,) in rows)
