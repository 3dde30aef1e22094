"""What a start would do with a Postgres table: its catalog is read in a read-only transaction."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import sql

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.preview import TableAction, TablePreview
from stormproof.sinks.contract.row_rule import Change
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.columns import cast_of, column_type
from stormproof.sinks.postgres.connection import asked
from stormproof.sinks.postgres.hold import as_changed
from stormproof.sinks.postgres.refusals import has_row_security, what_can_refuse
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.sinks.postgres.table import Table, find_oid, wire_schema

_MAY_CREATE: Final = """
    select coalesce(has_schema_privilege(coalesce(%(schema)s::text, current_schema()::text), 'CREATE'), false),
           current_user::text, coalesce(%(schema)s::text, current_schema()::text)
    where %(schema)s::text is null or exists (select from pg_namespace where nspname = %(schema)s)
"""
# COPY asks for INSERT on each column; a temporary table with the types of the table's columns for SELECT on them.
_LACKING: Final = """
    select asked.right || ' on column ' || quote_ident(a.attname)
    from pg_attribute a cross join unnest(%(rights)s::text[]) as asked ("right")
    where a.attrelid = %(oid)s and a.attname = any (%(columns)s)
      and not (asked.right = 'UPDATE' and a.attname = any (%(not_updated)s))
      and not has_column_privilege(a.attrelid, a.attnum, asked.right)
    union all
    select 'USAGE on sequence ' || s.oid::regclass
    from pg_attribute a join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
    join pg_depend n on n.classid = 'pg_attrdef'::regclass and n.objid = d.oid and n.refclassid = 'pg_class'::regclass
    join pg_class s on s.oid = n.refobjid
    where a.attrelid = %(oid)s and a.attname <> all (%(columns)s)
      and case when s.relkind = 'S' then not has_sequence_privilege(s.oid, 'USAGE, UPDATE') end
    union all
    select asked.right || ' on the table' from unnest(%(of_table)s::text[]) as asked ("right")
    where not has_table_privilege(%(oid)s::oid, asked.right)
    union all
    select 'of its owner, who alone may change it'
    from pg_class where oid = %(oid)s and %(alters)s and not pg_has_role(relowner, 'USAGE')
    union all
    select 'TEMPORARY on database ' || quote_ident(current_database())
    where %(temporary)s and not has_database_privilege(current_database(), 'TEMPORARY')
"""


def lacking_rights(connection: psycopg.Connection, table: Table, input_: SinkInput, *, alters: bool) -> str:
    """The rights that the role lacks to write such rows to a table, in words; of a table that is not there (its oid is 0),
    those that its owner lacks.
    """
    secured = table.oid != 0 and has_row_security(connection, table.oid)
    is_cast = any(cast_of(field, sql.SQL("")) is not None for field in wire_schema(table, input_))
    by_key = input_.is_by_key
    # What an upsert did it tells by the row's xmax, which is a column of no grant; a partitioned table gives none back.
    of_table = [*(["SELECT"] if by_key and table.kind != "p" else []), *(["DELETE"] if input_.delete_when else [])]
    rights = ["INSERT", *(["SELECT"] if secured or by_key else []), *(["UPDATE"] if by_key else [])]
    found = connection.execute(
        _LACKING,
        {
            "oid": table.oid,
            "rights": rights,
            "columns": input_.schema.names,
            "not_updated": [*input_.keys, *input_.keep],
            "of_table": of_table,
            "alters": alters,
            "temporary": secured or is_cast or by_key,
        },
    ).fetchall()
    (role,) = connection.execute("select current_user::text").fetchone() or ("",)
    return f"role {role!r} has not the rights {', '.join(right for (right,) in found)}" if found else ""


class PostgresPreview:
    """What is looked at; `session` is opened for reading only. `database` None: there is no database yet."""

    def __init__(self, database: Database | None, session: PostgresSession) -> None:
        self._database = database
        self._session = session
        self._name, self._input, self._where = session.name, session.input, session.where

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
                if find_oid(connection, self._name) is not None:
                    return self._of_table(connection)
                return self._may_not_create(connection) or self._of_new_table()
        except SinkRefused as refused:
            return TablePreview(TableAction.REFUSE, refused.message)

    def _of_table(self, connection: psycopg.Connection) -> TablePreview:
        guard = self._session.guard
        table_id = guard.table_id(connection)
        try:
            table, changes = self._session.check(connection)
        except SinkRefused as refused:
            return TablePreview(TableAction.REFUSE, refused.message, table_id=table_id)
        can_refuse = tuple(what_can_refuse(connection, table.oid, self._input))
        lacking = lacking_rights(connection, table, self._input, alters=bool(changes))
        if lacking:
            why = f"{self._where}: {lacking}. Grant them (GRANT ... TO ...), and start again"
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
            writer=self._session.writer(),
        )

    def _may_not_create(self, connection: psycopg.Connection) -> TablePreview | None:
        found = connection.execute(_MAY_CREATE, {"schema": self._name.schema}).fetchone()
        if found is not None and found[0]:
            lacking = lacking_rights(connection, self._made(), self._input, alters=False)
            return TablePreview(TableAction.REFUSE, f"{self._where}: {lacking}") if lacking else None
        if found is None:
            why = f"{self._where}: there is no schema {self._name.schema!r}"
        else:
            why = f"{self._where}: there is no table, and role {found[1]!r} may not make one in schema {found[2]!r}"
        return TablePreview(TableAction.REFUSE, why)

    def _of_new_table(self) -> TablePreview:
        told = ", ".join(f"{field.name} {column_type(field.type)}" for field in self._input.schema)
        key = f"; primary key {', '.join(self._input.keys)}" if self._input.is_by_key else ""
        self._session.go_by(self._made())
        return TablePreview(TableAction.CREATE, changes=(f"columns: {told}{key}",), writer=self._session.writer())

    def _made(self) -> Table:
        columns = tuple(Change(f.name, None, column_type(f.type) or "") for f in self._input.schema)
        return as_changed(Table(0, self._name, "r", "p", (), (frozenset(self._input.keys),)), columns)
