"""One driver's hold on a Postgres table: connection, fence and guard, the checks of the table, the count of its rows; and
how the table follows its rows' schema: columns are added and widened in the first batch that needs them.

Rows get in by COPY, or by key with COPY into a temporary table and one INSERT ... ON CONFLICT, where `held` is the table's
row, and `excluded` the added one: see `sinks.rows.merge_sql`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
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
from stormproof.sinks.contract.row_rule import Change, SchemaContract
from stormproof.sinks.postgres.columns import Column, cast_of, column_type, hashed_columns, sent_type, to_wire
from stormproof.sinks.postgres.connection import MINE, Fence, Link, has_records, make_records, mine_of, one_at_a_time
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
from stormproof.sinks.rows.merge_sql import POSTGRES, assignments, later_condition, written_where_held

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

COUNTED_ROWS_MAX: Final = 5_000_000
"""Where the evidence says more rows than this, an audit does not count the table's: it would take more than a second."""


# ---- the hold


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
                one_at_a_time(connection)
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
    mine = {**mine_of(identity), "txid": txid}
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
        {**mine_of(identity), "txid": txid},
    ).fetchall()
    return tuple(str(text) for (text,) in rows)
