"""Queues for tests: a database with the schema, and messages in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import sqlalchemy as sa

from stormproof import PostgresQueue
from stormproof.core.postgres.database import Database
from stormproof.migrations import migrate


def prepared_database(database: Database) -> Database:
    """The database, with ledger and queue tables."""
    engine = sa.create_engine(database.sqlalchemy_url)
    migrate(engine)
    engine.dispose()
    return database


def put(database: Database, queue: str, payloads: Sequence[bytes]) -> None:
    """Put messages, in one transaction."""
    with closing(PostgresQueue(queue, schema="line string", database=database)) as source:
        source.put(payloads)
