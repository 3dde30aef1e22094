"""What a start would do with a Postgres table: its catalog is read in a read-only transaction."""

from __future__ import annotations

from typing import Final

import psycopg

from stormproof.core.errors import SinkRefused
from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput
from stormproof.core.storage.local_files import NOWHERE
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.connection import asked
from stormproof.sinks.postgres.evolve import as_changed, changes_for
from stormproof.sinks.postgres.guard import Guard
from stormproof.sinks.postgres.refusals import (
    require_deterministic_keys,
    require_durable,
    require_writable,
    what_can_refuse,
)
from stormproof.sinks.postgres.table import (
    Table,
    TableName,
    column_limits,
    find_oid,
    kept_otherwise,
    read_table,
    require_table,
)
from stormproof.sinks.postgres.wire import column_type
from stormproof.sinks.preview import TableAction, TablePreview
from stormproof.sinks.protocol import SinkIdentity
from stormproof.sinks.row_rule import Change, SchemaContract
from stormproof.sinks.writer import FileWriter

_MAY_CREATE: Final = """
    select coalesce(has_schema_privilege(coalesce(%(schema)s::text, current_schema()::text), 'CREATE'), false),
           current_user::text, coalesce(%(schema)s::text, current_schema()::text)
    where %(schema)s::text is null or exists (select from pg_namespace where nspname = %(schema)s)
"""
_MAY_WRITE: Final = """
    select has_any_column_privilege(%(oid)s::oid, 'INSERT')
           and (not %(by_key)s or has_any_column_privilege(%(oid)s::oid, 'UPDATE')
                and has_any_column_privilege(%(oid)s::oid, 'SELECT')), current_user::text
"""


class PostgresPreview:
    """What is looked at. `database` None: there is no database yet."""

    def __init__(
        self,
        database: Database | None,
        name: TableName,
        identity: SinkIdentity,
        input_: SinkInput,
        contract: SchemaContract,
    ) -> None:
        self._database = database
        self._name = name
        self._identity = identity
        self._input = input_
        self._contract = contract
        where = "a database that is not there yet" if database is None else database.redacted
        self._where = f"sink {identity.sink!r} (table {name} at {where})"

    def now(self) -> TablePreview:
        """By the catalog as it is now.

        Raises:
            StoreUnavailable: there is no connection, or it is lost.
        """
        if self._database is None:
            return self._of_new_table()
        try:
            with asked(self._database, self._where) as connection, connection.transaction():
                connection.execute("set transaction isolation level repeatable read, read only")
                oid = find_oid(connection, self._name)
                if oid is not None:
                    return self._of_table(connection, oid)
                return self._may_not_create(connection) or self._of_new_table()
        except SinkRefused as refused:
            return TablePreview(TableAction.REFUSE, refused.message)

    def _of_table(self, connection: psycopg.Connection, oid: int) -> TablePreview:
        found = read_table(connection, oid)
        changes: tuple[Change, ...] = ()
        if self._contract is SchemaContract.EVOLVE:
            changes = changes_for(found, self._input)
        table = as_changed(found, changes)
        guard = Guard(self._identity, self._name, None, self._where)
        table_id = guard.table_id(connection)
        try:
            require_table(table, self._input, self._where)
            require_durable(connection, oid, self._where)
            require_writable(connection, oid, self._input, self._where)
            require_deterministic_keys(connection, oid, self._input, self._where)
        except SinkRefused as refused:
            return TablePreview(TableAction.REFUSE, refused.message, table_id=table_id)
        can_refuse = tuple(what_can_refuse(connection, oid, self._input))
        rights = connection.execute(_MAY_WRITE, {"oid": oid, "by_key": self._input.is_by_key}).fetchone()
        if rights is not None and not rights[0]:
            why = f"{self._where}: role {rights[1]!r} has not the rights to write to the table; see: stormproof doctor"
            return TablePreview(TableAction.REFUSE, why, can_refuse=can_refuse, table_id=table_id)
        holds, claims = (
            ((), ())
            if table_id is None or not bookkeeping.is_made(connection)
            else (guard.other_lives(connection, table_id, committed=committed) for committed in (True, False))
        )
        return TablePreview(
            TableAction.ALTER if changes else TableAction.USE,
            changes=tuple(map(str, changes)),
            can_refuse=can_refuse,
            table_id=table_id,
            other_lives=holds,
            claimed_by=claims,
            writer=self._writer(table),
        )

    def _may_not_create(self, connection: psycopg.Connection) -> TablePreview | None:
        found = connection.execute(_MAY_CREATE, {"schema": self._name.schema}).fetchone()
        if found is not None and found[0]:
            return None
        if found is None:
            why = f"{self._where}: there is no schema {self._name.schema!r}"
        else:
            why = f"{self._where}: there is no table, and role {found[1]!r} may not make one in schema {found[2]!r}"
        return TablePreview(TableAction.REFUSE, why)

    def _of_new_table(self) -> TablePreview:
        columns = tuple(Change(f.name, None, column_type(f.type) or "") for f in self._input.schema)
        made = as_changed(Table(0, self._name, "r", "p", (), (frozenset(self._input.keys),)), columns)
        told = ", ".join(f"{column.column} {column.becomes}" for column in columns)
        key = f"; primary key {', '.join(self._input.keys)}" if self._input.is_by_key else ""
        return TablePreview(TableAction.CREATE, changes=(f"columns: {told}{key}",), writer=self._writer(made))

    def _writer(self, table: Table) -> FileWriter:
        return FileWriter(
            self._identity.sink,
            NOWHERE,
            column_limits(table, self._input),
            input=self._input,
            discards=self._contract is SchemaContract.DISCARD_VALUE,
            leaves_out=self._contract is SchemaContract.DISCARD_ROW,
            names_messages=True,
            undecided=kept_otherwise(table, self._input),
        )
