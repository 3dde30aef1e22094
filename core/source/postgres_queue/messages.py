"""The table of one queue's messages: its name, its partitions ahead, its partitions behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Cursor

from stormproof.core.base.errors import UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.numbering import record_new
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
