"""Which server's transaction numbers a queue's messages carry, and how a queue goes on under another server.

Messages are ordered by the number of the transaction that put them. After a dump and restore the new server counts from
elsewhere: restored messages may lie above its numbers, and new messages below every position. So each queue keeps the
server and timeline of its numbers. A reader compares both in each transaction that opens; a trigger on the message table
compares the server for each statement that puts, whatever the client.

`adopt` makes the queue this server's: from then on `shift` is added to the server's own numbers, so that every new message
comes after every restored one. Messages, positions, slices and the ledger's records stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg import Cursor
from psycopg.types.json import Jsonb

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.position import Snapshot
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA, SCHEMA

OTHER_SERVER: Final = "SP001"
"""The SQLSTATE with which the message table refuses a statement on a server that has not adopted the queue."""

SERVER_SQL: Final = "(select system_identifier::text from pg_control_system())"
TIMELINE_SQL: Final = (
    "case when pg_is_in_recovery() then (select timeline_id::bigint from pg_control_checkpoint())"
    " else ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint end"
)
"""In recovery the server writes no log of its own; it follows the timeline of its last checkpoint."""


_OF_QUEUE: Final = "kind = 'queue' and source = %s"
_READS_QUEUE: Final = f"subscription in (select id from {SCHEMA}.pending_subscription where {_OF_QUEUE})"


@dataclass(frozen=True, slots=True)
class Numbering:
    """A server, its timeline, and what is added to its transaction numbers."""

    server: str
    timeline: int
    shift: int

    @property
    def is_of(self) -> tuple[str, int]:
        """The server and its timeline."""
        return self.server, self.timeline

    def to_json(self) -> dict[str, Json]:
        """For the record of an adoption."""
        return {"server": self.server, "timeline": self.timeline, "xid_shift": self.shift}

    def __str__(self) -> str:
        return f"server {self.server}, timeline {self.timeline}"


@dataclass(frozen=True, slots=True)
class Newest:
    """The message of a queue that was put last; `xid` and `id` as in its shown id."""

    xid: int
    id: int
    put_at: datetime


@dataclass(frozen=True, slots=True)
class Standing:
    """A queue and its subscriptions beside the server that they are in now."""

    queue: str
    was: Numbering
    now: Numbering
    """What an adoption would make it."""
    subscriptions: tuple[str, ...]
    newest: Newest | None
    above: int
    """Messages above the server's own numbers: no reader reaches them before the adoption."""
    lagging: tuple[str, ...]
    """Subscriptions whose positions are of yet another server or timeline than the queue's messages."""

    @property
    def is_adopted(self) -> bool:
        """Whether readers and producers may go on as it is."""
        return self.was == self.now and not self.above and not self.lagging

    @property
    def refusal(self) -> str | None:
        """Why readers are refused; None where they are not."""
        if self.is_adopted:
            return None
        why = f"it is of {self.was}, and this is {self.now}"
        if self.was.is_of == self.now.is_of:
            why = f"its subscriptions {', '.join(self.lagging)} are of another server than {self.now}"
            if not self.lagging:
                why = f"{self.above} messages lie above this server's transaction numbers"
        return f"{why}; readers are refused until: stormproof queue adopt {self.queue}"


def record_new(cursor: Cursor[Any], queue: str, sql: str, partition_messages: int) -> None:
    """Write a new queue's row, and set its message table's trigger.

    A table that was there before (restored without the queue's row) keeps the server that its trigger names.
    """
    named = query(
        cursor,
        "select convert_from(substring(tgargs for octet_length(tgargs) - 1), 'UTF8') from pg_trigger"
        " where tgrelid = %s::regclass and tgname = 'stormproof_server' and octet_length(tgargs) > 0",
        sql,
    ).fetchone()
    server = query(cursor, f"select {SERVER_SQL}").fetchone()
    assert server is not None
    query(
        cursor,
        f"insert into {SCHEMA}.queue (queue, partition_messages, server, timeline)"
        f" select %s, %s, %s, {TIMELINE_SQL} on conflict do nothing",
        queue,
        partition_messages,
        named[0] if named else server[0],
    )
    if named is None:
        _set_trigger(cursor, sql, server[0])


def _set_trigger(cursor: Cursor[Any], sql: str, server: str) -> None:
    if not server.isalnum():
        raise AssertionError(f"not a system identifier: {server!r}")
    query(
        cursor,
        f"create or replace trigger stormproof_server before insert on {sql} for each statement"
        f" execute function {MESSAGE_SCHEMA}.require_server('{server}')",
    )


def stored_xid_sql(queue: str) -> str:
    """SQL for this transaction's number as the queue's messages carry it; assigns one where there is none yet."""
    return f"pg_current_xact_id()::text::bigint + {_shift_sql(queue)}"


def assigned_xid_sql(queue: str) -> str:
    """The same, null where this transaction has no number yet."""
    return f"pg_current_xact_id_if_assigned()::text::bigint + {_shift_sql(queue)}"


def _shift_sql(queue: str) -> str:
    return f"(select xid_shift from {SCHEMA}.queue where queue = '{queue}')"


def above_sql(sql: str, snapshot: str, shift: str) -> str:
    """A condition's end, "from TABLE where ...": visible messages that the snapshot's own server cannot have put yet."""
    return f"from {sql} m where m.xid >= ((pg_snapshot_xmax({snapshot})::text::bigint + {shift})::text)::xid8"


def standing(cursor: Cursor[Any], queue: str, sql: str, *, locked: bool = False) -> Standing:
    """Look at a queue; `locked` keeps readers and producers out until the transaction ends.

    Raises:
        UsageError: there is no such queue.
        StoreUnavailable: somebody works in it for longer than a lock is worth waiting for.
    """
    if locked:
        # In the order in which readers and housekeeping take them.
        query(cursor, f"select 1 from {SCHEMA}.pending_subscription where {_OF_QUEUE} for update", queue)
        query(cursor, f"lock table {sql} in access exclusive mode")
    row = query(
        cursor,
        f"select q.server, q.timeline, q.xid_shift, {SERVER_SQL}, {TIMELINE_SQL}, pg_current_snapshot()::text,"
        f" (select count(*) {above_sql(sql, 'pg_current_snapshot()', 'q.xid_shift')})"
        f" from {SCHEMA}.queue q where q.queue = %s",
        queue,
    ).fetchone()
    if row is None:
        raise UsageError(f"there is no queue {queue!r}: put() or subscribe() makes it", queue=queue)
    was = Numbering(row[0], row[1], row[2])
    server, timeline, above = row[3], row[4], row[6]
    subscriptions = query(
        cursor,
        "select subscription, position ->> 'server', (position ->> 'timeline')::bigint"
        f" from {SCHEMA}.pending_subscription where {_OF_QUEUE} order by 1",
        queue,
    ).fetchall()
    last = query(
        cursor, f"select m.xid::text, m.id, m.put_at from {sql} m order by m.xid desc, m.id desc limit 1"
    ).fetchone()
    newest = None if last is None else Newest(int(last[0]), last[1], last[2])
    shift = _shift_for(Snapshot.parse(row[5]), was, server, _highest(cursor, queue, newest), is_set_back=above > 0)
    return Standing(
        queue,
        was,
        Numbering(server, timeline, shift),
        tuple(name for name, _, _ in subscriptions),
        newest,
        above,
        tuple(name for name, *at in subscriptions if tuple(at) != was.is_of),
    )


def _shift_for(now: Snapshot, was: Numbering, server: str, highest: int, *, is_set_back: bool) -> int:
    """The shift under which each new message lies above `highest`, the highest number that the queue knows.

    A standby that was promoted goes on with its primary's numbers, also with those of prepared transactions that are
    still open: there the shift must stay. On another server whatever runs now may put messages later, so its oldest
    transaction has to lie above.
    """
    carried_on = server == was.server and not is_set_back and now.xmax + was.shift > highest
    return was.shift if carried_on or now.xmin + was.shift > highest else highest + 1 - now.xmin


def _highest(cursor: Cursor[Any], queue: str, newest: Newest | None) -> int:
    """The highest transaction number that a message, a position or a failed message of the queue has; 0: none."""
    found = query(
        cursor,
        "select greatest("
        " (select max(greatest(pg_snapshot_xmax((position ->> 'from')::pg_snapshot)::text::bigint,"
        "   coalesce(pg_snapshot_xmax((position ->> 'to')::pg_snapshot)::text::bigint, 0))) - 1"
        f" from {SCHEMA}.pending_subscription where {_OF_QUEUE}),"
        f" (select max(pg_snapshot_xmax((at -> 'span' ->> 'end')::pg_snapshot)::text::bigint) - 1"
        f" from {SCHEMA}.pending_slice where {_READS_QUEUE}),"
        f" (select max(origin) from {SCHEMA}.pending_retry where {_READS_QUEUE}),"
        f" (select max(origin) from {SCHEMA}.dead_letter where {_OF_QUEUE}), %s::bigint, 0)",
        queue,
        queue,
        queue,
        queue,
        None if newest is None else newest.xid,
    ).fetchone()
    assert found is not None
    return int(found[0])


def adopt(cursor: Cursor[Any], sql: str, found: Standing, *, by: str, why: str, unproven: Sequence[str]) -> None:
    """Make the queue this server's, all its subscriptions with it; `found` comes from `standing(locked=True)`."""
    now = found.now
    query(
        cursor,
        f"update {SCHEMA}.queue set server = %s, timeline = %s, xid_shift = %s where queue = %s",
        now.server,
        now.timeline,
        now.shift,
        found.queue,
    )
    query(
        cursor,
        f"update {SCHEMA}.pending_subscription set position = position"
        f" || jsonb_build_object('server', %s::text, 'timeline', %s::bigint) where {_OF_QUEUE}",
        now.server,
        now.timeline,
        found.queue,
    )
    if now.shift != found.was.shift:
        put_by = f"(((pg_current_xact_id())::text::bigint + {now.shift})::text)::xid8"
        query(cursor, f"alter table {sql} alter column xid set default {put_by}")
    if now.server != found.was.server:
        _set_trigger(cursor, sql, now.server)
    query(
        cursor,
        f"insert into {SCHEMA}.queue_adoption (queue, by, why, was, now, unproven) values (%s, %s, %s, %s, %s, %s)",
        found.queue,
        by,
        why,
        Jsonb(found.was.to_json()),
        Jsonb(now.to_json()),
        Jsonb(list(unproven)),
    )
