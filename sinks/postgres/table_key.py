"""Which table a name stands for, asked before any sink is opened: two sinks of one topology must not share a table."""

from __future__ import annotations

from typing import Final

from stormproof.core.postgres.database import Database
from stormproof.core.sink import TableKey
from stormproof.sinks.postgres.connection import asked
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
    """Equal where both the databases and the names are spelled alike. `database` None: the run's."""
    return "postgres by name", database, name


def locate(database: Database, name: TableName, where: str) -> TableKey:
    """The server, the database, and the table's schema and name there, where it is or would be made.

    A copied cluster has its original's system identifier: the instant of its start tells the two servers apart.

    Raises:
        StoreUnavailable: there is no connection, or it is lost.
        SinkRefused: the database refuses to answer.
    """
    with asked(database, where) as connection:
        row = connection.execute(
            LOCATE, {"schema": name.schema, "table": name.table, "name": name.identifier.as_string(connection)}
        ).fetchone()
    assert row is not None
    return "postgres", *row
