"""A map in a Postgres table: key, value, previous value and txid in columns of their own; a txid is one transaction."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import pyarrow as pa
from psycopg import sql

from stormproof.core.base.errors import Json, SettingsError, SinkRefused, TopologyError
from stormproof.core.contract.sink import SinkInput, TableKey
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import CommitDecision, PreparedTransaction
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.postgres.columns import known_content
from stormproof.sinks.postgres.compare import compare
from stormproof.sinks.postgres.connection import key_of_name, locate
from stormproof.sinks.postgres.merge import RowsByKey
from stormproof.sinks.postgres.refusals import is_empty, require_durable
from stormproof.sinks.postgres.table import (
    MapKey,
    Table,
    TableName,
    check_flat_types,
    find_oid,
    map_keys,
    wire_schema,
    with_keys,
)
from stormproof.sinks.postgres.transactional_table import TransactionalTable
from stormproof.sinks.rows.comparison import Comparison, Progress, ReadRecord
from stormproof.sinks.rows.content import NOTHING, Content, Totals
from stormproof.sinks.rows.limits import Limits
from stormproof.trident.state.map import Backing, StoredMap, change_of, make_map, stored_schema
from stormproof.trident.state.matrix import as_state_kind
from stormproof.trident.state.protocol import StateContext, StateKind
from stormproof.trident.state.sink import StateSink


class PostgresBacking(Backing):
    """A map's rows in a Postgres table, fenced and guarded as a Postgres sink is."""

    def __init__(self, context: StateContext, kind: StateKind, database: Database, table: TableName) -> None:
        keys, stored = context.key_schema, stored_schema(context, kind)
        self._schema = pa.schema([*keys, *stored])
        self._keys = keys
        self._stored = stored
        self._input = SinkInput.for_upsert(self._schema, context.keys)
        self._table = TransactionalTable(database, table, context.identity, self._input, context.epoch)
        self._begun: _Begun | None = None
        self._map_keys: dict[str, MapKey] | None = None
        """How the table compares its keys, once it was read."""

    @property
    def record(self) -> TransactionalTable:
        """The table's guard and evidence."""
        return self._table

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """See `SupportsCompareRows`."""
        return compare(self._table, self._table.database, read, (first, last), progress)

    @property
    def limits(self) -> Limits:
        """What the table's columns can ours."""
        keys = self._compared_keys()
        return with_keys(self._table.limits, keys)

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Begin a database transaction, and lock fence and guard in it."""
        if self._begun is not None:
            self.close()
        ours, where = self._table, f"{self._table.where}, txid {transaction.txid}"
        with ours.link.errors(where):
            connection = ours.link.connection()
            connection.execute("begin")
            try:
                done = ours.begin(connection, transaction, checked=checked) is CommitDecision.SKIP
                table = ours.checked_table(connection, where)
                began_empty = transaction.previous is None and is_empty(connection, table.oid, table.name)
            except BaseException:
                self.close()  # or the next call would go on in this transaction, and leave its locks
                raise
        schema, partitioned = wire_schema(table, self._input), table.kind == "p"
        rows = RowsByKey(connection, table.name, self._input, schema, ours.where, partitioned=partitioned)
        self._map_keys = map_keys(table, self._input, ours.where)
        self._begun = _Begun(
            connection, transaction, table, rows, checked=checked, is_held=done, began_empty=began_empty
        )

    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of these keys, by one query."""
        name = self._table.name if self._begun is None else self._begun.table.name
        names = [_with_values(key) for key in self._keys.names]
        compared = self._compared_keys()
        arrays = [sql.SQL("%s::{}[]").format(sql.SQL(compared[key].type)) for key in self._keys.names]  # pyright: ignore[reportArgumentType]
        query = sql.SQL(
            "select {} from unnest({}) with ordinality as k ({}, place) left join {} as s on {} order by place"
        )
        statement = query.format(
            sql.SQL(", ").join(sql.SQL("s.{}").format(_with_values(column)) for column in self._stored.names),
            sql.SQL(", ").join(arrays),
            sql.SQL(", ").join(names),
            _with_values(*(part for part in (name.schema, name.table) if part is not None)),
            sql.SQL(" and ").join(sql.SQL("s.{0} = k.{0}").format(key) for key in names),
        )
        with self._table.link.errors():
            connection = self._table.link.connection() if self._begun is None else self._begun.connection
            rows = connection.execute(statement, [compared[n].own(keys.column(n)) for n in self._keys.names]).fetchall()
        columns = zip(*rows, strict=True) if rows else [() for _ in self._stored]
        return pa.RecordBatch.from_arrays(
            [pa.array(column, f.type) for column, f in zip(columns, self._stored, strict=True)], schema=self._stored
        )

    def _compared_keys(self) -> dict[str, MapKey]:
        if self._map_keys is None:
            with self._table.link.errors():
                connection = self._table.link.connection() if self._begun is None else self._begun.connection
                table = self._table.checked_table(connection, self._table.where)
            self._table.go_by(table)
            self._map_keys = map_keys(table, self._input, self._table.where)
        return self._map_keys

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch, held: pa.RecordBatch) -> None:
        """Copy the rows in, and upsert them in key order."""
        assert self._begun is not None
        self._begun.changed += change_of(keys, stored, held)
        rows = pa.RecordBatch.from_arrays([*keys.columns, *stored.columns], schema=self._schema)
        # Only on the connection of the open transaction: a new one would lack the earlier writes of this txid.
        with self._table.link.errors():
            moved = self._begun.rows.put([rows])
        if moved != rows.num_rows:
            raise SinkRefused(
                f"{self._table.where}: {moved} keys were stored instead of {rows.num_rows}; look for a trigger"
            )

    def end(self) -> None:
        """Move the guard, add the evidence, and commit: all of the txid or nothing."""
        assert self._begun is not None
        begun, transaction = self._begun, self._begun.transaction
        where = f"{self._table.where}, txid {transaction.txid}"
        with self._table.link.errors(where):
            if not begun.is_held:
                oid = find_oid(begun.connection, self._table.name)
                if oid is not None:
                    require_durable(begun.connection, oid, where)
                self._table.require_same(begun.connection, begun.table, where)
                self._table.guard.move(begun.connection, transaction, checked=begun.checked)
                totals = Totals(begun.rows.inserted, commits=1, content=begun.changed) if begun.checked else None
                said = None if totals is None else known_content(totals, began_empty=begun.began_empty)
                self._table.guard.add_evidence(
                    begun.connection, transaction, transaction.rows, again=True, content=said
                )
            begun.connection.execute("commit")
        self._begun = None

    def take(self, *, create: bool) -> None:
        """Open for a driver: raise the fence, make the table, refuse one that is another topology's.

        Raises:
            SinkRefused: it holds another state, or a key that is text in the stream and no text in the table.
        """
        self._table.take_over(create=create)
        self._map_keys = None
        self._compared_keys()
        with self._table.link.transaction() as connection:
            other = self._table.guard.other_sink(connection, self._table.table_id)
        if other is not None:
            raise SinkRefused(
                f"{self._table.where}: the table holds state {other[1]!r} of topology {other[0]!r}; a map has one writer: "
                "use another table"
            )

    def close(self) -> None:
        """Close the connection; a transaction that was begun and not ended is rolled back."""
        self._begun = None
        self._table.close()


@dataclass(slots=True)
class _Begun:
    """An open database transaction for a txid. `is_held`: the table holds the txid already. `changed` is of the content."""

    connection: psycopg.Connection
    transaction: PreparedTransaction
    table: Table
    rows: RowsByKey
    checked: bool
    is_held: bool
    began_empty: bool
    changed: Content = NOTHING


def _with_values(*name: str) -> sql.Identifier:
    """A name in a statement that has parameters, where a percent sign would begin one."""
    return sql.Identifier(*(part.replace("%", "%%") for part in name))


class PostgresMap:
    """A map in a Postgres table, made where it is missing; executors can query it.

    Each key's row has the value columns, `txid` and `life` (the incarnation that wrote it), and for an opaque map
    `previous_*` columns with the value before that txid.

    Guarantee:
        A txid's keys, the guard and the evidence are one database transaction under the topology's fence: after any
        crash all of it is there or nothing, and an older driver is refused.

    Threads: a description, which any number of threads and topologies may share; each run opens a session of its own.
    Forks: one may use it, and opens its own.
    """

    def __init__(
        self, table: str, kind: StateKind | str = StateKind.OPAQUE, *, database: Database | str | None = None
    ) -> None:
        where = f"PostgresMap({table!r})"
        self._table = TableName.parse(table)
        self._kind = as_state_kind(kind, where)
        if self._kind is StateKind.NON_TRANSACTIONAL:
            raise TopologyError(
                f"PostgresMap({table!r}): a map in one database transaction is never less than transactional; "
                "choose 'transactional' or 'opaque'"
            )
        self._database = Database.given(where, database)

    @property
    def kind(self) -> StateKind:
        """What it promises about a txid that comes again."""
        return self._kind

    @property
    def target(self) -> str:
        """The table; no secrets."""
        return str(self._table) if self._database is None else f"{self._table} at {self._database.redacted}"

    def table_key(self, database: Database | None) -> TableKey:
        """The database and the name as they were given."""
        return key_of_name(self._database or database, self._table)

    def find_table(self, database: Database | None) -> TableKey | None:
        """The table that has this name in the database, or would be made."""
        chosen = self._database or database
        return None if chosen is None else locate(chosen, self._table, f"PostgresMap({str(self._table)!r})")

    def check(self, schema: pa.Schema, where: str) -> None:
        """Raise TopologyError for a column that has no Postgres type here."""
        check_flat_types(schema, where)

    def description(self, database: Database | None) -> dict[str, Json]:
        """What the ledger keeps of it."""
        chosen = self._database or database
        return {
            "kind": "postgres-map",
            "table": str(self._table),
            "database": None if chosen is None else chosen.without_password,
            "state": self._kind.value,
        }

    def make(self, context: StateContext) -> StoredMap:
        """Connect; a driver fences older epochs out and makes what is missing."""
        database = self._database or context.database
        if database is None:
            raise SettingsError(
                f"state {context.identity.sink!r}: no database is given; pass PostgresMap(..., database=URL)"
            )
        backing = PostgresBacking(context, self._kind, database, self._table)
        try:
            if context.epoch is not None:
                backing.take(create=context.create)
        except BaseException:
            backing.close()
            raise
        return make_map(context, self._kind, backing)


def described(address: SinkAddress) -> StateSink:
    """The state of a ledger's description."""
    state = PostgresMap(address.text("table"), address.text("state"), database=address.database)
    return StateSink.described(address, state)
