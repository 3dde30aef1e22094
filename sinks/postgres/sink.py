"""PostgresSink: a Postgres table, as a topology names it; and what a start would do with it, by its catalog, which is read
in a read-only transaction.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from stormproof.core.base.arguments import require_flag, require_path
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import Json, SettingsError, SinkRefused
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import Lineage, SinkInput, SinkMode, TableKey
from stormproof.core.graph.checks import fitting_name
from stormproof.core.postgres.database import Database
from stormproof.core.storage.files import NOWHERE
from stormproof.core.storage.protocol import absolute
from stormproof.sinks.contract.preview import TableAction, TablePreview
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.contract.registry import SinkAddress
from stormproof.sinks.contract.row_rule import (
    Columns,
    RowRule,
    SchemaChange,
    SchemaContract,
    TableSink,
    check_fold_input,
    check_upsert_input,
)
from stormproof.sinks.postgres.columns import cast_of, column_type
from stormproof.sinks.postgres.connection import asked, has_records, key_of_name, locate
from stormproof.sinks.postgres.refusals import has_row_security, what_can_refuse
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.sinks.postgres.table import Table, TableName, as_changed, check_types, find_oid, wire_schema

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
            if table_id is None or not has_records(connection)
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
        columns = tuple(SchemaChange(f.name, None, column_type(f.type) or "") for f in self._input.schema)
        return as_changed(Table(0, self._name, "r", "p", (), (frozenset(self._input.keys),)), columns)


STAGING_FOLDER = Path(".stormproof", "staging")


class PostgresSink(TableSink):
    """Appends to, upserts or folds into, a Postgres table; made where it is missing.

    For `mode` and the arguments of an upsert see `DeltaSink`. A table that is upserted into, or folded into, has a primary
    key or a unique index on exactly the key's columns. For `schema_contract` see there, too.

    `content_digests`: appended rows are hashed as they are written, in the tasks. Without it `audit verify --deep` compares
    no appended row.

    `database` and `staging` may be left to the run's settings (`placed`). Guard and evidence are in the schema
    `stormproof_sink` of the same database, and are written in the same transaction as the rows.

    Guarantee:
        Exactly-once, also where Postgres is restarted or the answer to a COMMIT is lost. An unlogged table, which a crash of
        the server empties, is refused.

    Threads: a description, which any number of threads and topologies may share; each run opens a session of its own.
    Forks: one may use it, and opens its own.
    """

    def __init__(
        self,
        table: str,
        *,
        mode: SinkMode | str | None = None,
        key: Columns | None = None,
        order_by: Columns | None = None,
        delete_when: str | None = None,
        keep: Columns | None = None,
        lineage: Lineage | bool = False,
        schema_contract: SchemaContract | str = SchemaContract.FREEZE,
        name: str | None = None,
        database: Database | str | None = None,
        staging: str | Path | None = None,
        content_digests: bool = True,
    ) -> None:
        where = f"PostgresSink({table!r})"
        self._table = TableName.parse(table)
        self._rule = RowRule.given(where, mode, key, order_by, delete_when, keep, lineage)
        self._contract = SchemaContract.given(where, schema_contract)
        if staging is not None:
            require_path(where, "staging", staging)
        self._name = fitting_name(f"postgres.{self._table}") if name is None else name
        self._database = Database.given(where, database)
        require_flag(where, "content_digests", content_digests)
        self._content_digests = content_digests
        self._staging = None if staging is None else absolute(staging)

    @property
    def target(self) -> str:
        """The table, with its database where one is given; no secrets."""
        return str(self._table) if self._database is None else f"{self._table} at {self._database.redacted}"

    @property
    def dataset(self) -> DatasetName | None:
        """The table; without a schema of its own it is called as in `public`."""
        table = f"{self._table.schema or 'public'}.{self._table.table}"
        return None if self._database is None else self._database.dataset(table)

    @property
    def table(self) -> str:
        """The table's name, with its schema where one was given."""
        return str(self._table)

    @property
    def database(self) -> Database | None:
        """The database that was given."""
        return self._database

    def description(self, input_: SinkInput) -> dict[str, Json]:
        """Its kind, its table and its database."""
        database = None if self._database is None else self._database.without_password
        contract = {} if self._contract is SchemaContract.FREEZE else {"schema_contract": self._contract.value}
        return {"kind": "postgres", "table": self.table, "database": database, **contract}

    def table_key(self) -> TableKey:
        """The database and the name as they were given."""
        return key_of_name(self._database, self._table)

    def find_table(self) -> TableKey:
        """The table that has this name in the database, or would be made."""
        return locate(self._known_database(), self._table, f"sink {self._name!r} ({self.target})")

    def refusals(self, input_: SinkInput, database: Database | None = None) -> list[str]:
        """The rules of the table that can refuse rows at a commit; none where there is no table yet, or no database is
        known. `database` is asked where the sink names none.

        Raises:
            StoreUnavailable: there is no connection, or it is lost.
            SinkRefused: the database refuses to answer.
        """
        database = self._database or database
        if database is None:
            return []
        with asked(database, f"sink {self._name!r} ({self.target})") as connection:
            oid = find_oid(connection, self._table)
            return [] if oid is None else what_can_refuse(connection, oid, input_)

    def files_in(self, input_: SinkInput) -> str:
        """The staging folder."""
        return absolute(STAGING_FOLDER / self._name) if self._staging is None else self._staging

    def placed(self, database: Database, staging: str) -> PostgresSink:
        """This sink with the run's database, and a folder below `staging` named after it, where it names none itself."""
        made = copy.copy(self)
        made._database = self._database or database
        made._staging = os.path.join(staging, self._name) if self._staging is None else self._staging
        return made

    def check(self, input_: SinkInput, guarantee: Guarantee) -> None:
        """Raise TopologyError where no Postgres table can take such rows; every guarantee is served."""
        where = f"sink {self._name!r}"
        check_types(input_.schema, where)
        check_upsert_input(input_, where)
        check_fold_input(input_, where)

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> PostgresSession:
        """Fence older epochs out, make the table if it is missing and `create`, and check that it can hold the rows."""
        session = self._session(identity, input_, epoch)
        try:
            session.take_over(create=create)
        except BaseException:
            session.close()
            raise
        return session

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> PostgresSession:
        """Open for reading only."""
        return self._session(identity, input_, None)

    def preview(self, identity: SinkIdentity, input_: SinkInput, database: Database | None = None) -> TablePreview:
        """By the table's catalog, or by what it would be made of."""
        database = self._database or database
        session = PostgresSession(
            database or Database.of({}),
            self._table,
            staging=NOWHERE,
            identity=identity,
            input_=input_,
            epoch=None,
            contract=self._contract,
            content_digests=False,
        )
        return PostgresPreview(database, session).now()

    def operate(self, identity: SinkIdentity, input_: SinkInput, epoch: int, staging: str) -> PostgresSession:
        """Open under an epoch that stands, for a command on a batch whose driver has stopped: fences nobody."""
        return self._session(identity, input_, epoch, staging)

    def _session(
        self, identity: SinkIdentity, input_: SinkInput, epoch: int | None, staging: str | None = None
    ) -> PostgresSession:
        return PostgresSession(
            self._known_database(),
            self._table,
            staging=staging or self.files_in(input_),
            identity=identity,
            input_=input_,
            epoch=epoch,
            contract=self._contract,
            content_digests=self._content_digests,
        )

    def _known_database(self) -> Database:
        if self._database is None:
            raise SettingsError(f"sink {self._name!r}: no database is given; pass PostgresSink(..., database=URL)")
        return self._database


def described(address: SinkAddress) -> PostgresSink:
    """The sink of a ledger's description."""
    contract = str(address.description.get("schema_contract", SchemaContract.FREEZE))
    return PostgresSink(address.text("table"), name=address.name, database=address.database, schema_contract=contract)
