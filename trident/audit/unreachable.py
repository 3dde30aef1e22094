"""Messages that no reader reaches as things stand: their queue is of another server, and not adopted."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import cast

import psycopg
import sqlalchemy as sa
from psycopg.rows import tuple_row

from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.numbering import standing
from stormproof.core.source.postgres_queue.slices import index_ranges_only
from stormproof.trident.audit.evidence import Finding


@contextmanager
def by_index(connection: sa.Connection) -> Generator[psycopg.Cursor[tuple[object, ...]]]:
    """A cursor in the same transaction, for ranges of a message table."""
    driver = cast("psycopg.Connection", connection.connection.driver_connection)
    with driver.cursor(row_factory=tuple_row) as cursor, index_ranges_only(cursor):
        yield cursor


def count(connection: sa.Connection, table: MessageTable, conditions: Iterable[str]) -> int:
    """How many messages meet one of the (disjoint) conditions."""
    with by_index(connection) as cursor:
        found = query(cursor, f"select count(*)::int from ({table.select('1', conditions)}) m").fetchone()
    return cast("int", found[0]) if found else 0


def unreachable(connection: sa.Connection, table: MessageTable, unopened: Iterable[str]) -> list[Finding]:
    """Whether readers of the queue are refused, and how many of its unopened messages that leaves behind.

    `unopened` are disjoint SQL conditions for the messages that were never opened.
    """
    with by_index(connection) as cursor:
        refusal = standing(cursor, table.queue, table.sql).refusal
    left = 0 if refusal is None else count(connection, table, unopened)
    if not left:
        return []
    return [Finding(f"no reader reaches {left} messages of queue {table.queue}: {refusal}", unreachable=True)]


def unreachable_without_reader(connection: sa.Connection, queues: Iterable[str]) -> list[Finding]:
    """The same for queues of which a topology has no subscription yet: its start was refused."""
    known = connection.execute(
        sa.text("select queue from stormproof.queue where queue = any(:queues) order by 1"), {"queues": list(queues)}
    ).scalars()
    return [finding for queue in known for finding in unreachable(connection, MessageTable(queue), ["true"])]
