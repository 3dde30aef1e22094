"""Queues for tests: a database with the schema, and messages in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cache

from stormproof import PostgresQueue
from stormproof.core.postgres.database import Database
from stormproof.migrations import sql
from support.databases import at, create_database, drop_database

TEMPLATE = "prepared"
"""A database of each server with the schema and nothing else, of which others are made."""

_UNTOUCHED = b"""
    select current_database() from pg_database one, pg_database plain
    where one.datname = current_database() and plain.datname = 'template0' and one.datacl is null
      and (one.datdba, one.encoding, one.datcollate) = (plain.datdba, plain.encoding, plain.datcollate)
      and (select usesuper from pg_user where usename = current_user)
      and not exists (select from pg_db_role_setting where setdatabase = one.oid)
      and not exists (select from pg_stat_activity where datid = one.oid and pid <> pg_backend_pid())
      and not exists (select from pg_class where oid >= 16384)
      and not exists (select from pg_proc where oid >= 16384)
      and not exists (select from pg_type where oid >= 16384)
      and not exists (select from pg_namespace where oid >= 16384)
"""


def prepared_database(database: Database) -> Database:
    """The database, with ledger and queue tables; nothing is done where they are.

    An untouched one is made anew, of a template. Any other gets the script that `ledger sql` prints, as the template did.
    """
    with at(database) as connection:
        if connection.execute("select to_regnamespace('stormproof')").fetchone() != (None,):
            return database
        untouched = connection.execute(_UNTOUCHED).fetchone()
        if untouched is None:
            connection.execute(_schema())
            return database
    server, (name,) = database.with_name("postgres"), untouched
    _make_template(server)
    with at(server) as connection:
        connection.execute(f"drop database {name}".encode())
        connection.execute(f"create database {name} template {TEMPLATE} strategy file_copy".encode())
    return database


@cache
def _make_template(server: Database) -> None:
    drop_database(server, TEMPLATE)  # of an earlier process
    with at(create_database(server, TEMPLATE)) as connection:
        connection.execute(_schema())


@cache
def _schema() -> bytes:
    return sql().encode()


def put(database: Database, queue: str, payloads: Sequence[bytes]) -> None:
    """Put messages, in one transaction."""
    with closing(PostgresQueue(queue, schema="line string", database=database)) as source:
        source.put(payloads)
