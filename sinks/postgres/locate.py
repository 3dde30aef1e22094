"""Which table a name means in a database, before it is opened: what two sinks of one topology must not share."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import psycopg

from stormproof.core.errors import SinkRefused, StoreUnavailable
from stormproof.core.postgres.database import Database, connect, may_pass
from stormproof.core.postgres.rights import explained
from stormproof.core.sink import TableKey
from stormproof.sinks.postgres.table import TableName

LOCATE: Final = """
    select
        (select system_identifier from pg_control_system())::text,
        extract(epoch from pg_postmaster_start_time())::text,
        d.oid::text,
        coalesce(n.nspname, %(schema)s::name, current_schema())::text,
        coalesce(c.relname, %(table)s::name)::text
    from pg_database d
    left join pg_class c on c.oid = to_regclass(%(name)s)
    left join pg_namespace n on n.oid = c.relnamespace
    where d.datname = current_database()
"""


def key_of_name(database: Database | None, name: TableName) -> TableKey:
    """Equal for names that are spelled alike in databases that are, or that are both the run's."""
    return "postgres by name", database, name


def locate(database: Database, name: TableName, where: str) -> TableKey:
    """The server, the database, and the table's schema and name there, where it is or would be made.

    A cluster that was copied has its original's identifier: the instant of its start tells the two servers apart.

    Raises:
        StoreUnavailable: there is no connection to be had.
        SinkRefused: the database does not say.
    """
    with closing(connect(database, application_name="stormproof sinks", autocommit=True)) as connection:
        try:
            row = connection.execute(
                LOCATE,
                {"schema": name.schema, "table": name.table, "name": name.identifier.as_string(connection)},
            ).fetchone()
        except psycopg.Error as error:
            said = explained(error, database, where)
            if said is not None:
                raise said from error
            text = database.without_secrets(str(error)).strip()
            if isinstance(error, psycopg.OperationalError) or may_pass(error):
                raise StoreUnavailable(f"{where}: {text}; nothing was written", sqlstate=error.sqlstate) from error
            raise SinkRefused(f"{where}: which table it is cannot be told: {text}", sqlstate=error.sqlstate) from error
    assert row is not None
    return "postgres", *row
