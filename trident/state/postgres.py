"""A map in a Postgres table: key, value, previous value and txid in columns of their own; a txid is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql

from stormproof.core.errors import Json, SettingsError, SinkRefused, TopologyError
from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput, TableKey
from stormproof.sinks.abilities import SupportsTakeTable
from stormproof.sinks.limits import Limits
from stormproof.sinks.postgres.durable import require_durable
from stormproof.sinks.postgres.locate import key_of_name, locate
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.sinks.postgres.table import TableName, check_types, column_type, find_oid, require_table, wire_schema
from stormproof.sinks.protocol import Decision, PreparedTransaction, decide
from stormproof.trident.state.checks import as_state_kind
from stormproof.trident.state.map import Backing, StoredMap, make_map, stored_schema
from stormproof.trident.state.protocol import StateContext, StateKind

_MINE: Final = "topology = %(topology)s and incarnation = %(incarnation)s and sink = %(sink)s"


class PostgresBacking(PostgresSession, Backing):
    """A map's rows in a Postgres table, fenced and guarded as a Postgres sink is."""

    def __init__(self, context: StateContext, kind: StateKind, database: Database, table: TableName) -> None:
        keys, stored = context.key_schema, stored_schema(context, kind)
        schema = pa.schema([*keys, *stored])
        columns = SinkInput.for_upsert(schema, context.keys)
        super().__init__(
            database,
            table,
            staging="",
            identity=context.identity,
            input_=columns,
            epoch=context.epoch,
        )
        self._keys = keys
        self._stored = stored
        self._schema = schema
        self._columns = sql.SQL(", ").join(map(sql.Identifier, schema.names))
        self._wire: pa.Schema | None = None
        self._begun: tuple[psycopg.Connection, PreparedTransaction, bool, bool] | None = None
        self._staged = False

    @property
    def table(self) -> SupportsTakeTable:
        """This one."""
        return self

    @property
    def limits(self) -> Limits:
        """What the table's columns can hold."""
        return self._limits

    def begin(self, transaction: PreparedTransaction, *, checked: bool) -> None:
        """Begin a database transaction under the fence."""
        self._undo()
        where = f"{self._where}, txid {transaction.txid}"
        with self._errors(where):
            connection = self._connected()
            connection.execute("begin")
            self._lock_fence(connection)
            held = self._lock_guard(connection, same_table=checked)
            done = checked and decide(self._identity, transaction, held) is Decision.SKIP
            table = self._table(connection)
            require_table(table, self._input, where)
            self._wire = wire_schema(table, self._input)
        self._begun = connection, transaction, checked, done
        self._staged = False

    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """What is stored of these keys, by one query."""
        names = [sql.Identifier(name) for name in self._keys.names]
        arrays = [
            sql.SQL("%s::{}[]").format(sql.SQL(column_type(f.type) or ""))  # pyright: ignore[reportArgumentType]
            for f in self._keys
        ]
        query = sql.SQL(
            "select {} from unnest({}) with ordinality as k ({}, place) left join {} as s on {} order by place"
        )
        statement = query.format(
            sql.SQL(", ").join(sql.SQL("s.{}").format(sql.Identifier(name)) for name in self._stored.names),
            sql.SQL(", ").join(arrays),
            sql.SQL(", ").join(names),
            self._name.identifier,
            sql.SQL(" and ").join(sql.SQL("s.{0} = k.{0}").format(name) for name in names),
        )
        with self._errors(self._where):
            connection = self._connected() if self._begun is None else self._begun[0]
            rows = connection.execute(statement, [keys.column(n).to_pylist() for n in self._keys.names]).fetchall()
        columns = zip(*rows, strict=True) if rows else [() for _ in self._stored]
        return pa.RecordBatch.from_arrays(
            [pa.array(column, f.type) for column, f in zip(columns, self._stored, strict=True)], schema=self._stored
        )

    def write(self, keys: pa.RecordBatch, stored: pa.RecordBatch) -> None:
        """Copy the rows in, and upsert them in key order."""
        assert self._wire is not None
        assert self._begun is not None
        connection = self._begun[0]  # one that was lost is not made anew: what was written on it is undone
        rows = pa.RecordBatch.from_arrays([*keys.columns, *stored.columns], schema=self._schema)
        added, ordered = sql.Identifier("stormproof_added"), sql.SQL(", ").join(map(sql.Identifier, self._keys.names))
        with self._errors(self._where):
            if self._staged:
                connection.execute(sql.SQL("truncate {}").format(added))
            else:
                connection.execute(
                    sql.SQL("create temporary table {} on commit drop as select {} from {} with no data").format(
                        added, self._columns, self._name.identifier
                    )
                )
                self._staged = True
            encoder = ArrowToPostgresBinaryEncoder(self._wire)
            copying = sql.SQL("copy {} ({}) from stdin with (format binary)").format(added, self._columns)
            with connection.cursor().copy(copying) as copy:
                copy.write(encoder.write_header())
                try:
                    copy.write(encoder.write_batch(rows.cast(self._wire)))
                except pa.ArrowInvalid as error:
                    raise SinkRefused(f"{self._where}: a value does not fit its column: {error}") from error
                copy.write(encoder.finish())
            moved = connection.execute(
                sql.SQL("insert into {} ({}) select {} from {} order by {} on conflict ({}) do update set {}").format(
                    self._name.identifier,
                    self._columns,
                    self._columns,
                    added,
                    ordered,
                    ordered,
                    sql.SQL(", ").join(
                        sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in self._stored.names
                    ),
                )
            ).rowcount
        if moved != rows.num_rows:
            raise SinkRefused(f"{self._where}: {moved} keys were stored instead of {rows.num_rows}; look for a trigger")

    def end(self) -> None:
        """Move the guard, add the evidence, commit: all or nothing of the txid."""
        assert self._begun is not None
        connection, transaction, checked, done = self._begun
        with self._errors(f"{self._where}, txid {transaction.txid}"):
            if not done:
                oid = find_oid(connection, self._name)
                if oid is not None:
                    require_durable(connection, oid, f"{self._where}, txid {transaction.txid}")
                self._move_guard(connection, transaction, checked=checked)
                connection.execute(
                    "insert into stormproof_sink.evidence (topology, incarnation, sink, txid, rows, digest, epoch) "
                    "values (%(topology)s, %(incarnation)s, %(sink)s, %(txid)s, %(rows)s, %(digest)s, %(epoch)s) "
                    "on conflict (topology, incarnation, sink, txid) do update "
                    "set rows = excluded.rows, digest = excluded.digest, epoch = excluded.epoch, committed_at = now()",
                    {**self._mine, **self._said(transaction)},
                )
            connection.execute("commit")
        self._begun = None

    def take(self, *, create: bool) -> None:
        """Open for a driver: raise the fence, make the table, refuse one that is another topology's."""
        self.take_over(create=create)
        with self._transaction() as connection:
            other = connection.execute(
                "select topology, sink from stormproof_sink.guard where table_id = %(table_id)s "
                "and last_txid is not null and (topology, sink) <> (%(topology)s, %(sink)s) limit 1",
                {**self._mine, "table_id": self.table_id},
            ).fetchone()
        if other is not None:
            raise SinkRefused(
                f"{self._where}: the table holds state {other[1]!r} of topology {other[0]!r}; a map has one writer: use "
                "another table"
            )

    def close(self) -> None:
        """Let the connection go; what was begun and not ended is undone."""
        self._begun = None
        super().close()

    def _rows_held(self, connection: psycopg.Connection, written: Sequence[int]) -> int | None:
        """Not told by what was written: several rows may be of one key, and an updater may write none."""
        del connection, written
        return None

    def _undo(self) -> None:
        if self._begun is not None:
            self.close()


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
        check_types(schema, where)

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
        done = False
        try:
            if context.epoch is not None:
                backing.take(create=context.create)
            done = True
        finally:
            if not done:
                backing.close()
        return make_map(context, self._kind, backing)
