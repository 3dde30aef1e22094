"""The server that a queue is in now: its snapshot, and whether the queue's transaction numbers are of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import Cursor

from stormproof.core.base.errors import PositionMismatch, UsageError
from stormproof.core.source.postgres_queue.messages import MessageTable, first_by_index
from stormproof.core.source.postgres_queue.numbering import SERVER_SQL, TIMELINE_SQL, Numbering, above_sql
from stormproof.core.source.postgres_queue.position import Position, Snapshot
from stormproof.core.source.postgres_queue.tables import SCHEMA


@dataclass(frozen=True, slots=True)
class Server:
    """The server at this moment, as a queue sees it.

    `snapshot` is in the queue's own numbers, and takes this very transaction for running. `numbers` is whose numbers the
    queue's messages carry; `above` says that some lie above the server's.
    """

    snapshot: Snapshot
    identifier: str
    timeline: int
    numbers: Numbering
    above: bool


def look(cursor: Cursor[Any], table: MessageTable) -> Server:
    """The server's snapshot and identity now, and the queue's numbering.

    Guarantee: one's own transaction does not count as ended in the snapshot. So messages that it has put, or will put,
    come with a later slice, also where producer and reader share a transaction.
    """
    row = first_by_index(
        cursor,
        "with here as materialized (select pg_current_snapshot() as snapshot, pg_current_xact_id()::text::bigint as xid)"
        f" select here.snapshot::text, here.xid, {SERVER_SQL}, {TIMELINE_SQL}, q.server, q.timeline, q.xid_shift,"
        f" exists (select {above_sql(table.sql, 'here.snapshot', 'q.xid_shift')}"
        "  and m.xid <> ((here.xid + q.xid_shift)::text)::xid8)"
        f" from here cross join {SCHEMA}.queue q where q.queue = '{table.queue}'",
    )
    if row is None:
        raise UsageError(f"there is no queue {table.queue!r}: put() or subscribe() makes it", queue=table.queue)
    numbers = Numbering(row[4], row[5], row[6])
    snapshot = Snapshot.parse(row[0]).before(int(row[1])).shifted(numbers.shift)
    return Server(snapshot, row[2], row[3], numbers, row[7])


def check_server(queue: str, subscription: str, position: Position, server: Server) -> None:
    """Refuse a queue or a position whose transaction numbers are not this server's, or that lie ahead of it.

    Raises:
        PositionMismatch: after a dump and restore, or a fail-over: messages would be skipped for ever.
    """
    where = f"queue {queue}, subscription {subscription}"
    way_on = f"Nothing was opened. See what is proven, and go on, with: stormproof queue adopt {queue}"
    here = (server.identifier, server.timeline)
    for what, numbers in (
        ("its messages were put", server.numbers.is_of),
        ("its position was taken", (position.server, position.timeline)),
    ):
        if numbers != here:
            raise PositionMismatch(
                f"{where}: {what} under server {numbers[0]}, timeline {numbers[1]}, and this is server {here[0]}, "
                f"timeline {here[1]}: transaction numbers of the two need not compare. {way_on}",
                position=list(numbers),
                server=list(here),
            )
    if server.above:
        raise PositionMismatch(
            f"{where}: it has messages whose transaction numbers lie above this server's own ({server.snapshot.xmax}): "
            f"they were restored from another server, or this one was set back. {way_on}",
            server=str(server.snapshot),
        )
    if position.newest.xmax > server.snapshot.xmax:
        raise PositionMismatch(
            f"{where}: its position is at transaction {position.newest.xmax}, but the server is only at "
            f"{server.snapshot.xmax}: it was restored or set back, and new messages would be skipped. {way_on}",
            position=str(position.newest),
            server=str(server.snapshot),
        )
