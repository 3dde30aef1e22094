"""The table of one queue's messages: its partitions, how messages are put into it, and whose transaction numbers they carry.

Messages are put by a binary COPY, streamed in bounded memory. They are ordered by the number of the transaction that put
them. After a dump and restore the new server counts from elsewhere: restored messages may lie above its numbers, and new
messages below every position. So each queue keeps the server and timeline of its numbers. A reader compares both in each
transaction that opens; a trigger on the message table compares the server for each statement that puts, whatever the
client.

`adopt` makes the queue this server's: from then on `shift` is added to the server's own numbers, so that every new message
comes after every restored one. Messages, positions, slices and the ledger's records stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import pgpq
import psycopg
import pyarrow as pa
from psycopg import Cursor
from psycopg.errors import CheckViolation
from psycopg.types.json import Jsonb

from stormproof.core.base.arguments import payload_of
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.failpoint import failpoint
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
class QueueStanding:
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


def standing(cursor: Cursor[Any], queue: str, sql: str, *, locked: bool = False) -> QueueStanding:
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
    return QueueStanding(
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


def adopt(cursor: Cursor[Any], sql: str, found: QueueStanding, *, by: str, why: str, unproven: Sequence[str]) -> None:
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


# ---- the table of messages

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,39}")
LOCK_WAIT_MS = 250
"""How long housekeeping waits for a lock: everybody else queues behind it meanwhile."""

_INDEX_RANGES_ONLY = (
    "set local enable_seqscan = off; set local enable_bitmapscan = off; set local max_parallel_workers_per_gather = 0"
)
"""Has the planner use the index of the message table: its statistics lag behind a queue."""
_AS_BEFORE = (
    "set local enable_seqscan to default; set local enable_bitmapscan to default;"
    " set local max_parallel_workers_per_gather to default"
)
_SETTINGS = 3

_BOUNDS = re.compile(r"FROM \('(\d+)'\) TO \('(\d+)'\)")


@contextmanager
def index_ranges_only(cursor: Cursor[Any]) -> Generator[None]:
    """Have the planner use indexes only, for some statements."""
    query(cursor, _INDEX_RANGES_ONLY)
    yield
    # Not in a `finally`: after an error the transaction is rolled back, and the settings with it.
    query(cursor, _AS_BEFORE)


def first_by_index(cursor: Cursor[Any], text: str) -> Any:
    """The first row of a query without parameters, None where it has none; the planner uses indexes only.

    Settings, query and their end are sent as one message.
    """
    query(cursor, f"{_INDEX_RANGES_ONLY}; {text}; {_AS_BEFORE}")
    for _ in range(_SETTINGS):
        cursor.nextset()
    return cursor.fetchone()


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition: ids from `start` up to but not including `stop`; the default partition has no bounds."""

    table: str
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class MessageTable:
    """One queue's message table. Its name is checked, so that SQL can be put together with it."""

    queue: str

    def __post_init__(self) -> None:
        if not isinstance(self.queue, str) or not NAME.fullmatch(self.queue):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"queue {self.queue!r}: a queue's name is 1 to 40 letters, digits, '_' and '-', a letter first"
            )

    @property
    def sql(self) -> str:
        """The table's name, quoted."""
        return f'{MESSAGE_SCHEMA}."{self.queue}"'

    def _partition_sql(self, suffix: str) -> str:
        return f'{MESSAGE_SCHEMA}."{self.queue}.{suffix}"'

    def select(self, columns: str, conditions: Iterable[str]) -> str:
        """The messages for which one of the (disjoint) conditions holds."""
        parts = [f"select {columns} from {self.sql} where {condition}" for condition in conditions]
        return " union all ".join(parts or [f"select {columns} from {self.sql} where false"])

    def create(self, cursor: Cursor[Any], partition_messages: int) -> None:
        """Make the queue, where it is missing. Two may try at once."""
        if query(cursor, f"select 1 from {SCHEMA}.queue where queue = %s", self.queue).fetchone():
            return
        query(cursor, "select pg_advisory_xact_lock(hashtextextended('stormproof.queue', 0))")
        query(
            cursor,
            f"create table if not exists {self.sql} ("
            " xid xid8 not null default pg_current_xact_id(),"
            " id bigint generated always as identity,"
            " put_at timestamptz not null default now(),"
            " payload bytea not null,"
            " primary key (xid, id)"
            ") partition by range (id)",
        )
        query(cursor, f"create table if not exists {self._partition_sql('rest')} partition of {self.sql} default")
        record_new(cursor, self.queue, self.sql, partition_messages)
        self.make_ahead(cursor)

    def partitions(self, cursor: Cursor[Any]) -> list[Partition]:
        """All partitions, in id order, the default one last."""
        found = list[Partition]()
        rows = query(
            cursor,
            "select c.relname, pg_get_expr(c.relpartbound, c.oid)"
            " from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = %s::regclass",
            self.sql,
        ).fetchall()
        for name, bounds in rows:
            if bounds is None:
                continue  # dropped by another since the catalog was read
            match = _BOUNDS.search(bounds)
            start, stop = (int(match[1]), int(match[2])) if match else (None, None)
            found.append(Partition(f'{MESSAGE_SCHEMA}."{name}"', start, stop))
        return sorted(found, key=lambda part: (part.start is None, part.start or 0))

    def last_id(self, cursor: Cursor[Any]) -> int:
        """The highest id handed to a producer so far; 0 before the first."""
        row = query(
            cursor,
            "select coalesce(pg_sequence_last_value(pg_get_serial_sequence(%s, 'id')::regclass), 0)",
            self.sql,
        ).fetchone()
        return int(row[0]) if row else 0

    def make_ahead(self, cursor: Cursor[Any]) -> int:
        """See that at least half a partition stands ready ahead of the producers; returns the id that it reaches to.

        Where the default partition already holds ids of the next range (plain SQL inserts outran it), that range is
        left to the default partition, and the one after it is made.

        Raises:
            psycopg.errors.LockNotAvailable: a slow producer's transaction has rows in the default partition; try later.
        """
        size_row = query(
            cursor, f"select partition_messages from {SCHEMA}.queue where queue = %s", self.queue
        ).fetchone()
        if size_row is None:
            raise UsageError(f"queue {self.queue} does not exist yet: put() or subscribe() makes it")
        size = int(size_row[0])
        query(cursor, "select pg_advisory_xact_lock(hashtextextended('stormproof.queue.' || %s, 0))", self.queue)
        last = self.last_id(cursor)
        stop = max((part.stop for part in self.partitions(cursor) if part.stop is not None), default=1)
        if stop > last + size // 2:
            return stop
        query(cursor, f"set local lock_timeout = {LOCK_WAIT_MS}")
        start = stop if stop > last else (last // size) * size + 1
        for _ in range(4):
            name = self._partition_sql(f"p{start}")
            try:
                with cursor.connection.transaction():
                    # Attached, not made as a partition: that needs no lock that producers would have to wait for.
                    query(cursor, f"create table {name} (like {self.sql} including defaults including constraints)")
                    query(
                        cursor,
                        f"alter table {self.sql} attach partition {name} for values from ({start}) to ({start + size})",
                    )
            except psycopg.errors.CheckViolation:
                start += size
            else:
                stop = start + size
                break
        query(cursor, "set local lock_timeout to default")
        return stop

    def has_any(self, cursor: Cursor[Any], partition: Partition, conditions: Iterable[str]) -> bool:
        """Whether one of the partition's visible messages meets one of the conditions; False where it was dropped.

        It is named by its ids, for another may drop it at any time. The default partition is never dropped.
        """
        within = "true" if partition.stop is None else f"id >= {partition.start} and id < {partition.stop}"
        table = partition.table if partition.stop is None else self.sql
        return any(
            query(cursor, f"select 1 from {table} where ({condition}) and {within} limit 1").fetchone() is not None
            for condition in conditions
        )

    def drop(self, cursor: Cursor[Any], partition: Partition, unresolved: Callable[[], Sequence[str]]) -> bool:
        """Drop a consumed partition (empty the default one), in a transaction of its own; False where it must stay.

        The check is repeated under the exclusive lock: a DROP that waits for a slow producer's lock goes on as soon as that
        producer has committed, and takes its messages along.

        Raises:
            psycopg.errors.LockNotAvailable: somebody works in it; try later.
        """
        query(cursor, f"set local lock_timeout = {LOCK_WAIT_MS}")
        if partition.stop is not None:  # a drop locks the parent as well; taken first, as everybody else does
            query(cursor, f"lock table only {self.sql} in access exclusive mode")
            found = query(cursor, "select to_regclass(%s)", partition.table).fetchone()
            if found is None or found[0] is None:
                return False  # another was first
        query(cursor, f"lock table {partition.table} in access exclusive mode")
        if self.has_any(cursor, partition, unresolved()):
            return False
        failpoint("queue.drop.after_lock")
        query(cursor, f"drop table {partition.table}" if partition.stop is not None else f"truncate {partition.table}")
        return True


def unopened(cursor: Cursor[Any], table: MessageTable, conditions: Sequence[str]) -> tuple[int, float | None]:
    """How many messages meet one of the (disjoint) conditions, and how many seconds the first of them has waited."""
    with index_ranges_only(cursor):
        count = query(cursor, f"select count(*) from ({table.select('id', conditions)}) m").fetchone()
        first = query(
            cursor,
            "select extract(epoch from clock_timestamp() - min(put_at))::float8 from ("
            + " union all ".join(
                f"(select m.put_at from {table.sql} m where {condition} order by m.xid, m.id limit 1)"
                for condition in conditions or ["false"]
            )
            + ") f",
        ).fetchone()
    return (count[0] if count else 0), (first[0] if first else None)


# ---- how messages are put

CHUNK_MESSAGES = 10_000
CHUNK_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024

_SCHEMA = pa.schema([pa.field("payload", pa.binary(), nullable=False)])


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was put: how many messages, and the shown ids of the first and the last; None where there were none."""

    messages: int
    first: str | None
    last: str | None


def copy_in(
    cursor: Cursor[Any],
    table: MessageTable,
    payloads: Iterable[bytes],
    *,
    statement_messages: int | None = None,
    between: Callable[[], None] | None = None,
) -> Receipt:
    """Copy the payloads into the queue, inside the cursor's transaction.

    Each COPY is of one chunk in memory, in a savepoint, and can be repeated. After about each `statement_messages`
    `between` may make partitions, on a connection of its own.
    """
    before = query(cursor, f"select ({assigned_xid_sql(table.queue)})::text").fetchone()
    above = _edge(cursor, table, before[0], "desc") if before and before[0] else None
    size = CHUNK_MESSAGES if statement_messages is None else min(CHUNK_MESSAGES, max(1, statement_messages))
    chunks = _chunks(payloads, size, f"queue {table.queue}")
    chunk = next(chunks, None)
    messages = since = 0
    while chunk is not None:
        if since and since + len(chunk) > max(size, statement_messages or sys.maxsize) and between is not None:
            between()
            since = 0
        _copy(cursor, table, chunk)
        messages += len(chunk)
        since += len(chunk)
        chunk = next(chunks, None)
    if not messages:
        return Receipt(0, None, None)
    row = query(cursor, f"select ({stored_xid_sql(table.queue)})::text").fetchone()
    xid = row[0] if row else "0"
    first, last = _edge(cursor, table, xid, "asc", above or 0), _edge(cursor, table, xid, "desc")
    return Receipt(messages, f"{xid}-{first}", f"{xid}-{last}")


def _copy(cursor: Cursor[Any], table: MessageTable, payloads: list[bytes]) -> None:
    """Copy one chunk. Where partitions are attached meanwhile, once more, with that locked out.

    A COPY sees the partitions that stood when it began. A row that it routes to the default partition, while another
    session attaches the partition that the row belongs to, is refused by the default partition's constraint.
    """
    try:
        with cursor.connection.transaction():
            _copy_once(cursor, table, payloads)
    except CheckViolation as error:
        if error.diag.constraint_name is not None:
            raise  # one that somebody gave the table; a partition's own has no name
        with cursor.connection.transaction():
            # The partitions' locks as well: ATTACH needs the default partition's in full. By the parent's name, since a
            # producer has no rights on partitions.
            query(cursor, f"lock table {table.sql} in row exclusive mode")
            _copy_once(cursor, table, payloads)


def _copy_once(cursor: Cursor[Any], table: MessageTable, payloads: list[bytes]) -> None:
    encoder = pgpq.ArrowToPostgresBinaryEncoder(_SCHEMA)
    with cursor.copy(f"copy {table.sql} (payload) from stdin (format binary)".encode()) as copy:
        copy.write(encoder.write_header())
        copy.write(encoder.write_batch(pa.record_batch([pa.array(payloads, pa.binary())], schema=_SCHEMA)))
        copy.write(encoder.finish())


def _edge(cursor: Cursor[Any], table: MessageTable, xid: str, order: str, above: int = 0) -> int | None:
    row = query(
        cursor, f"select id from {table.sql} where xid = %s::xid8 and id > %s order by id {order} limit 1", xid, above
    ).fetchone()
    return int(row[0]) if row else None


def _chunks(payloads: Iterable[Any], messages: int, where: str) -> Iterator[list[Any]]:
    """Lists of payloads, bounded in number and, but for one payload, in bytes."""
    part, size = list[Any](), 0
    for number, given in enumerate(payloads):
        payload = given if given.__class__ is bytes else payload_of(where, number, given)
        part.append(payload)
        size += len(payload)
        if len(part) >= messages or size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    r"""The stream's lines, split at ``\n`` only, other bytes kept; an empty line is a line, an empty end is not."""
    rest = list[bytes]()
    while block := stream.read(BLOCK_BYTES):
        head, *tail = block.split(b"\n")
        rest.append(head)
        if tail:
            yield b"".join(rest)
            yield from tail[:-1]
            rest = [tail[-1]]
    if last := b"".join(rest):
        yield last


def lines_from(source: str | Path | BinaryIO) -> Iterator[bytes]:
    """The lines of a file, of standard input (``-``), or of an open stream."""
    if source == "-":
        yield from lines_of(sys.stdin.buffer)
    elif isinstance(source, str | Path):
        with Path(source).open("rb") as stream:
            yield from lines_of(stream)
    else:
        yield from lines_of(source)
