"""The table of one queue's messages: its name, its partitions ahead and behind, and how messages are put into it.

Messages go by a binary COPY, streamed in bounded memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pgpq
import psycopg
import pyarrow as pa
from psycopg import Cursor
from psycopg.errors import CheckViolation

from stormproof.core.base.errors import UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.numbering import assigned_xid_sql, record_new, stored_xid_sql
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA, SCHEMA

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
    chunks = _chunks(payloads, size)
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


def _chunks(payloads: Iterable[bytes], messages: int) -> Iterator[list[bytes]]:
    """Lists of payloads, bounded in number and, but for one payload, in bytes."""
    part, size = list[bytes](), 0
    for payload in payloads:
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
