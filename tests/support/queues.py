"""Queues for tests: a database with the schema, and messages in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cache

from stormproof import PostgresQueue
from stormproof.core.postgres.database import Database, connect
from stormproof.migrations import sql


def prepared_database(database: Database) -> Database:
    """The database, with ledger and queue tables; nothing is done where they are.

    Made by the script that `ledger sql` prints: a fifth of what `ledger migrate` costs, which asks Alembic for each
    statement anew. `tests/migrations` shows that both make the same.
    """
    with connect(database, application_name="tests", autocommit=True) as connection:
        if connection.execute("select to_regnamespace('stormproof')").fetchone() == (None,):
            connection.execute(_schema())
    return database


@cache
def _schema() -> bytes:
    printed: list[str] = []
    sql(printed.append)
    return "\n".join(printed).encode()


def put(database: Database, queue: str, payloads: Sequence[bytes]) -> None:
    """Put messages, in one transaction."""
    with closing(PostgresQueue(queue, schema="line string", database=database)) as source:
        source.put(payloads)
