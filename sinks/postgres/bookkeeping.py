"""The sink's own tables, in the sink's own database: fence, backends, guard and evidence."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any, Final

import psycopg

from stormproof.core.base.errors import SettingsError
from stormproof.sinks.contract.protocol import SinkIdentity

SCHEMA: Final = "stormproof_sink"
_LOCK: Final = 0x53746F726D  # "Storm"

MINE: Final = "topology = %(topology)s and incarnation = %(incarnation)s and sink = %(sink)s"
"""The condition for the rows of one sink of one life; `mine` gives its parameters."""

_TABLES: Final = (
    """
    create table if not exists stormproof_sink.fence (
        topology text not null,
        incarnation text not null,
        sink text not null,
        epoch bigint not null,
        primary key (topology, incarnation, sink)
    )
    """,
    # Backends that may hold locks, with their epoch: a take-over ends older ones, so as not to wait for a paused driver.
    """
    create table if not exists stormproof_sink.backend (
        topology text not null,
        incarnation text not null,
        sink text not null,
        pid integer not null,
        backend_start timestamptz not null,
        epoch bigint not null,
        primary key (topology, incarnation, sink, pid, backend_start)
    )
    """,
    # Never pruned: it tells a repeated transaction from a new one.
    """
    create table if not exists stormproof_sink.guard (
        topology text not null,
        incarnation text not null,
        sink text not null,
        table_name text not null,
        table_id text not null,
        last_txid bigint,
        last_digest text,
        epoch bigint not null,
        updated_at timestamptz not null default now(),
        primary key (topology, incarnation, sink)
    )
    """,
    """
    create table if not exists stormproof_sink.evidence (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        rows bigint not null,
        digest text not null,
        epoch bigint not null,
        committed_at timestamptz not null default now(),
        dropped bigint not null default 0,
        content text,
        primary key (topology, incarnation, sink, txid)
    )
    """,
    # The rows that the table refused.
    """
    create table if not exists stormproof_sink.reject (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        file text not null,
        row bigint not null,
        input text not null,
        sqlstate text,
        error text not null,
        rejected_at timestamptz not null default now(),
        messages bigint[] not null default '{}',
        origins bigint[] not null default '{}',
        goes_with_others boolean not null default false,
        primary key (topology, incarnation, sink, txid, file, row)
    )
    """,
    # How many rows of an upsert changed nothing.
    """
    create table if not exists stormproof_sink.superseded (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        rows bigint not null,
        reinstated bigint not null,
        primary key (topology, incarnation, sink, txid)
    )
    """,
    # What batches changed of the table's columns.
    """
    create table if not exists stormproof_sink.schema_change (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        number integer not null,
        change text not null,
        changed_at timestamptz not null default now(),
        primary key (topology, incarnation, sink, txid, number)
    )
    """,
)

_COLUMNS: Final = {
    re.findall(r"stormproof_sink\.(\w+)", statement)[0]: frozenset(
        re.findall(r"^ +(?!primary|create)(\w+) ", statement, re.M)
    )
    for statement in _TABLES
}
"""The columns of each table."""
_FOUND: Final = """
    select c.relname::text, array_agg(a.attname::text)
    from pg_catalog.pg_namespace n join pg_catalog.pg_class c on c.relnamespace = n.oid
    join pg_catalog.pg_attribute a on a.attrelid = c.oid
    where n.nspname = 'stormproof_sink' and c.relname = any(%s) and a.attnum > 0 and not a.attisdropped
    group by c.relname order by c.relname
    """


def mine(identity: SinkIdentity) -> dict[str, Any]:
    """The parameters of `MINE`, in the order of the tables' columns."""
    return asdict(identity)


def is_made(connection: psycopg.Connection) -> bool:
    """Whether the sink's own tables are there.

    Raises:
        SettingsError: another version made them.
    """
    found = {table: frozenset(columns) for table, columns in connection.execute(_FOUND, ([*_COLUMNS],)).fetchall()}
    if not found:
        return False
    for table, expected in _COLUMNS.items():
        if (has := found.get(table, frozenset())) != expected:
            raise SettingsError(
                f"database {connection.info.dbname}: schema {SCHEMA} is another version's: the columns of its table {table} "
                f"differ by {', '.join(sorted(has ^ expected))}. End what is prepared with that version. Then put the "
                f"schema aside (alter schema {SCHEMA} rename to {SCHEMA}_before), and take each sink's table over: "
                "stormproof ledger adopt-table TOPOLOGY SINK",
                table=table,
            )
    return True


def one_at_a_time(connection: psycopg.Connection) -> None:
    """Hold the lock for making tables until the transaction ends.

    Two first starts at the same time collide even with `if not exists`, so one waits for the other.
    """
    connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))


def make(connection: psycopg.Connection) -> None:
    """Make the sink's own tables where they are missing."""
    if is_made(connection):
        return
    with connection.transaction():
        one_at_a_time(connection)
        # `create schema if not exists` needs the right to create schemas even where the schema exists.
        if connection.execute("select to_regnamespace('stormproof_sink') is null").fetchone() == (True,):
            connection.execute("create schema stormproof_sink")
        for statement in _TABLES:
            connection.execute(statement)
