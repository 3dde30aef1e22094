"""`PostgresQueue`: a durable queue in Postgres, as a pending source and for its producers.

A queue is read only in the server that gave its transaction numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal, Self, Unpack

import psycopg
from psycopg import Cursor
from psycopg.rows import tuple_row

from stormproof.core.base import arguments
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import MissingRight, PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.source import Backlog, Expectation, Limit, SliceReader, SourcePreview
from stormproof.core.pending.connector import NextMessages, Piece
from stormproof.core.pending.postgres import PostgresPendingStore, subscriptions_of
from stormproof.core.pending.postgres_rows import PostgresRows
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.pending.source import PendingArguments, PendingSource
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue import reader
from stormproof.core.source.postgres_queue.audit import QueueAudit
from stormproof.core.source.postgres_queue.message_table import (
    OTHER_SERVER,
    SERVER_SQL,
    TIMELINE_SQL,
    MessageTable,
    Numbering,
    Receipt,
    above_sql,
    copy_in,
    first_by_index,
    index_ranges_only,
    lines_from,
    standing,
    unopened,
)
from stormproof.core.source.postgres_queue.position import NOTHING, QueuePosition, Range, Snapshot
from stormproof.core.source.postgres_queue.reader import PostgresSliceReader
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA, SCHEMA
from stormproof.core.start.preflight import DatabaseProbe, Probe


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


def check_server(queue: str, subscription: str, position: QueuePosition, server: Server) -> None:
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


# ---- the queue

_LOG = logging.getLogger("stormproof.queue")

PARTITION_MESSAGES = 2_000_000
MAINTAIN_INTERVAL_S = 10.0
_MISSING: Final = (
    "run `stormproof ledger migrate`, which makes Stormproof's own; "
    "the first put() or subscribe() then makes the queue's"
)
_DENSE: Final = 1.25
"""Up to this many ids for each message, equal ranges of ids hold about equal numbers of messages."""


@dataclass(frozen=True, slots=True)
class Peeked:
    """A message as it lies in the queue."""

    shown_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue at one moment. `messages_put` counts ids given out, those of rolled back producers included.

    `refused` says why nobody may open the queue before ``stormproof queue adopt``; None where readers may go on.
    """

    queue: str
    messages_put: int
    partitions: int
    bytes_on_disk: int
    subscriptions: dict[str, Backlog]
    refused: str | None = None
    schema: str | None = None
    """What its messages are, as `stormproof queue create` was told."""


class PostgresQueue(PendingSource):
    """Messages in an append-only Postgres table, read in slices between two database snapshots.

    `PendingArguments` has the arguments of every pending source.

    Guarantee:
        Every committed message is opened once by each subscription, and again only when it was returned, failed, or its
        lease ran out; however many producers there are, however late they commit and whatever their ids are.
        A lease is confirmed only by its owner in its epoch. Failed messages wait for a retry or are dead letters.

    Not guaranteed:
        An order between slices. Within a slice, messages come in id order.

    A description: it connects at its first use, and pickles without its connections.

    Threads: any number may use one object at once. Each call has a connection of its own, so a `put` that returned is
    durable whatever the others do; topologies that share the object read it under subscriptions of their own. `subscribe`
    makes an object act for one subscription: a second one is refused.
    Forks: a fork of this process makes connections of its own, and never touches its parent's.
    """

    KEEPS_MESSAGES: ClassVar[bool] = True
    KIND: ClassVar[str] = "queue"
    AUDIT = QueueAudit
    NOUN: ClassVar[str] = "queue"
    SHOWN_FORM: ClassVar[str] = "XID-NUMBER"

    def __init__(
        self,
        queue: str,
        schema: str = "line string",
        *,
        unit: Unit | None = None,
        name: str | None = None,
        database: Database | str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        partition_messages: int = PARTITION_MESSAGES,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        where = f"queue {queue}"
        self.table = MessageTable(queue)
        arguments.require_whole(where, "partition_messages", partition_messages, 2)
        arguments.require_choice(where, "start", start, ("earliest", "latest"))
        arguments.require_text_if_given(where, "name", name, "lines")
        with arguments.error_prefix(where):
            decoder = decoder_for(schema, unit)
        self._tables = PostgresPendingStore(
            "queue", queue, database=database, default=_settings_database, missing=_MISSING
        )
        super().__init__(name or queue, decoder=decoder, store=self._tables, **pending)
        self._start = start
        self._partition_messages = partition_messages
        self._clock: Clock | None = clock
        self._acts_for = dict[str, str]()
        self._maintained_s = -math.inf
        self._ready_to = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clock": None, "_maintained_s": -math.inf}

    @property
    def queue(self) -> str:
        """The queue's name in the database."""
        return self.table.queue

    @property
    def key(self) -> str:
        """The queue's name in the database, whatever topologies call the source."""
        return self.table.queue

    @property
    def database(self) -> Database:
        """The database: the one named, else the run's, else the settings' one.

        An embedded one gets its schema here, without a word.

        Raises:
            UsageError: runs on different databases share this object, and none was named.
        """
        return self._tables.database

    def datasets(self) -> tuple[DatasetName, ...]:
        """The table that holds the queue's messages."""
        return (self.database.dataset(f"{MESSAGE_SCHEMA}.{self.queue}"),)

    def probes(self) -> tuple[Probe, ...]:
        """Executors read the queue's database."""
        return (DatabaseProbe(f"the database of queue {self.name!r}", self.database),)

    def for_run(self, database: Database) -> Self:
        """The same queue for one run: with a subscription and connections of its own, in `database` if none is named."""
        view = super().for_run(database)
        view._store = view._tables = self._tables.for_run(database)
        view._clock, view._acts_for = self._clock, {}
        return view

    # ---- the pending source

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; makes queue and subscription where they are missing.

        Raises:
            UsageError: this object acts for another one already.
            Fenced: a newer epoch has the subscription.
            PositionMismatch: the subscription's position was not taken from this server.
        """
        acts_for = self._acts_for.setdefault("subscription", subscription)
        if acts_for != subscription:
            raise UsageError(
                f"queue {self.queue}: this object acts for subscription {acts_for!r}, so it cannot act for "
                f"{subscription!r}; make another PostgresQueue({self.queue!r}, ...) for that",
                queue=self.queue,
                subscription=subscription,
            )
        with self._tables.transaction() as cursor:
            self.table.create(cursor, self._partition_messages)
        super().subscribe(subscription, epoch)

    def look_at(self, subscription: str) -> None:
        """Act for a subscription that is there already, without its epoch and its position: for its dead letters."""
        self._acts_for["subscription"] = subscription
        super().look_at(subscription)

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """By the snapshot of now, as `open` cuts a slice."""
        return self._preview_next(subscription, limit, database)

    def start(self, cursor: psycopg.Cursor[Any]) -> At:
        """Before the first message, or behind all that is there now."""
        server = look(cursor, self.table)
        snapshot = NOTHING if self._start == "earliest" else server.snapshot
        return QueuePosition(snapshot, None, None, server.identifier, server.timeline).to_json()

    def check(self, who: Subscriber, position: At, cursor: psycopg.Cursor[Any]) -> At:
        """Refuse a position of another server; gives it with the snapshot of now, up to which messages may be opened."""
        server = look(cursor, self.table)
        check_server(self.queue, who.subscription, QueuePosition.of(position), server)
        return {**position, "now": str(server.snapshot)}

    def next(self, position: At, limit: Limit, seed: int, cursor: psycopg.Cursor[Any]) -> NextMessages | None:
        """The rest of the span that was cut, else the messages between its end and now."""
        at = QueuePosition.of(position)
        for span in at.unopened(Snapshot.parse(str(position["now"]))):
            if not span.conditions():
                continue
            piece = reader.first_of(cursor, self.table, span, limit, seed)
            if piece.messages:
                return NextMessages(piece, at.behind(span, reader.span_of(piece.at).last).to_json())
        return None

    def head(self, at: At, limit: Limit, seed: int, cursor: psycopg.Cursor[Any]) -> Piece:
        """The first messages, by transaction and number."""
        return reader.first_of(cursor, self.table, reader.span_of(at), limit, seed)

    def places(self, at: At, ids: Sequence[int], cursor: psycopg.Cursor[Any]) -> Sequence[int]:
        """Counted by the database."""
        with index_ranges_only(cursor):
            found = query(
                cursor,
                "select n - 1 from (select m.id, row_number() over (order by m.xid, m.id) as n"
                f" from ({self._select('xid, id', at)}) m) r where id = any(%s::bigint[]) order by 1",
                sorted(ids),
            ).fetchall()
        return [place for (place,) in found]

    def expected(self, at: At, seed: int, excluded: frozenset[int], cursor: psycopg.Cursor[Any]) -> Expectation:
        """Counted by the database."""
        with index_ranges_only(cursor):
            return reader.expectation(cursor, self.table, reader.span_of(at), seed, excluded)

    def parts(self, at: At, parallelism: int) -> tuple[SliceReader, ...]:
        """Ranges of ids."""
        xid, bounds = reader.xid_of(at), self._bounds(at, parallelism)
        if xid is None:
            rows = self._select("id, xid, payload", at)
        else:
            low, high, _ = reader.ids_of(at)
            rows = self.table.select("id, xid, payload", (Range(xid, low - 1, high).sql,))
        return tuple(
            PostgresSliceReader(self.database, rows, above, upto, xid)
            for above, upto in zip((None, *bounds), (*bounds, None), strict=True)
        )

    def _bounds(self, at: At, parallelism: int) -> tuple[int, ...]:
        """The ids at which a slice is cut in parts."""
        low, high, messages = reader.ids_of(at)
        ids = high - low + 1
        if parallelism <= 1:
            return ()
        if ids <= messages * _DENSE:
            return tuple(low - 1 + ids * part // parallelism for part in range(1, parallelism))
        shares = [part / parallelism for part in range(1, parallelism)]
        with self._tables.transaction() as cursor, index_ranges_only(cursor):
            found = query(
                cursor,
                f"select percentile_disc(%s::float8[]) within group (order by id) from ({self._select('id', at)}) m",
                shares,
            ).fetchone()
        return tuple(found[0]) if found and found[0] else (high,) * (parallelism - 1)

    def payloads(self, at: At, ids: Sequence[int], cursor: psycopg.Cursor[Any]) -> Mapping[int, bytes]:
        """From the message table."""
        with index_ranges_only(cursor):
            found = query(
                cursor, f"select id, payload from ({self._select('id, payload', at)}) m where id = any(%s)", list(ids)
            ).fetchall()
        return {id_: bytes(payload) for id_, payload in found}

    def _select(self, columns: str, at: At) -> str:
        return self.table.select(columns, reader.span_of(at).conditions())

    def unopened(self, position: At, cursor: psycopg.Cursor[Any]) -> tuple[int, float | None]:
        """Counted in the message table: the cost grows with them."""
        # Without an upper bound: messages above the server's own numbers count, though no reader reaches them yet.
        return unopened(cursor, self.table, QueuePosition.of(position).unopened_conditions())

    # ---- producers

    def put(self, payloads: Iterable[bytes], *, connection: psycopg.Connection | None = None) -> Receipt:
        """Put messages, in a transaction of its own: when it returns they are durable, and when it raises none is there.

        With `connection` they are put inside the user's own transaction there (an outbox): they are there when that one
        commits, and as durable as it is. Where its `synchronous_commit` is off, a crash of Postgres may lose a
        transaction whose commit had returned, with all that it wrote. The queue must exist already.

        Streams: the payloads are never all in memory.

        Raises:
            UsageError: `payloads` is one payload, or has what is not bytes; `connection` commits each statement by itself
                (autocommit), and no transaction is open on it.
            StoreUnavailable: the database did not answer. Where it was the answer to the commit that was lost, the
                messages may be there.
            PositionMismatch: the queue was restored from another server and is not adopted: new messages would get numbers
                that do not compare with the restored ones. The database refuses plain SQL inserts likewise.
        """
        arguments.require_payloads(f"queue {self.queue}", payloads)
        if connection is not None:
            self._require_transaction(connection)
            with self._server_required(), connection.cursor(row_factory=tuple_row) as cursor:
                receipt = copy_in(cursor, self.table, payloads)
            failpoint("queue.put.before_commit")
            return receipt
        self._make_ready()
        with self._server_required(), self._tables.transaction() as cursor:
            half = self._partition_messages // 2  # so much always stands ready
            receipt = copy_in(cursor, self.table, payloads, statement_messages=half, between=self._make_ready)
            failpoint("queue.put.before_commit")
        return receipt

    def make_ready(self) -> None:
        """Make the queue and its next partitions where they are missing: for a sink that writes into its table."""
        self._make_ready()

    def _require_transaction(self, connection: object) -> None:
        if not isinstance(connection, psycopg.Connection):
            raise UsageError(
                f"queue {self.queue}: connection is a {type(connection).__name__}; put() takes a psycopg.Connection",
                queue=self.queue,
            )
        if connection.autocommit and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            raise UsageError(
                f"queue {self.queue}: the connection commits each statement by itself (autocommit), so the messages would "
                "not belong to any transaction of yours; put them inside `with connection.transaction():`, or leave "
                "connection= out",
                queue=self.queue,
            )

    @contextmanager
    def _server_required(self) -> Generator[None]:
        """Say in our own words that the message table refused to mix this server's numbers with another's."""
        try:
            yield
        except psycopg.errors.UndefinedTable as error:
            raise UsageError(
                f"queue {self.queue}: a table is missing ({error.diag.message_primary}); {_MISSING}, as make_ready() does: "
                "a put() inside your transaction needs a queue that is there",
                queue=self.queue,
            ) from None
        except psycopg.DatabaseError as error:
            if error.sqlstate != OTHER_SERVER:
                raise
            raise PositionMismatch(
                f"{error.diag.message_primary}. Nothing was put. See what is proven, and go on, with: "
                f"stormproof queue adopt {self.queue}",
                queue=self.queue,
            ) from error

    def put_lines(self, source: str | Path | BinaryIO, *, connection: psycopg.Connection | None = None) -> Receipt:
        r"""Put the lines of a file (or of standard input: ``-``), split at ``\n`` only; empty lines are messages."""
        return self.put(lines_from(source), connection=connection)

    def peek(self, messages: int = 10) -> tuple[Peeked, ...]:
        """The first messages in the queue's table, whatever was opened of them."""
        with self._tables.transaction() as cursor, index_ranges_only(cursor):
            rows = query(
                cursor,
                f"select id, xid::text, payload from {self.table.sql} m order by m.xid, m.id limit {max(0, messages)}",
            ).fetchall()
        return tuple(Peeked(self.shown_id(row[0], int(row[1])), bytes(row[2])) for row in rows)

    def stats(self) -> QueueStats:
        """The queue as a whole, and the backlog of each subscription."""
        with self._tables.transaction() as cursor:
            parts = self.table.partitions(cursor)
            size = query(
                cursor,
                "select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits"
                " where inhparent = %s::regclass",
                self.table.sql,
            ).fetchone()
            made = query(cursor, "select schema from stormproof.queue where queue = %s", self.queue).fetchone()
            return QueueStats(
                queue=self.queue,
                messages_put=self.table.last_id(cursor),
                partitions=len(parts),
                bytes_on_disk=size[0] if size else 0,
                subscriptions={name: self._backlog(rows) for name, rows in self._readers(cursor)},
                refused=self._refused(cursor),
                schema=made[0] if made else None,
            )

    def _refused(self, cursor: psycopg.Cursor[Any]) -> str | None:
        with index_ranges_only(cursor):
            return standing(cursor, self.queue, self.table.sql).refusal

    # ---- housekeeping

    def maintain(self) -> None:
        """Make partitions ahead, drop those that every subscription is done with; at most every 10 seconds.

        Only the owner of the message table may do that. Under another role messages collect in the default partition, and
        nothing is dropped; that is logged.
        """
        clock = self._clock = self._clock or SystemClock()
        if clock.monotonic_s() - self._maintained_s < MAINTAIN_INTERVAL_S:
            return
        self._maintained_s = clock.monotonic_s()
        self._make_ready()
        for name in self._tables.subscriptions(self.KIND, self.queue):
            with self._tables.rows(Subscriber(self.KIND, self.queue, name)) as rows:
                rows.forget_lapses()
        try:
            self.drop_consumed()
        except MissingRight as error:
            _LOG.warning("queue %s keeps messages that everybody has read: %s", self.queue, error)

    def drop_consumed(self) -> tuple[str, ...]:
        """Drop the partitions in which no subscription has anything left; returns their names.

        A partition in which somebody works is left for the next time. A queue without subscriptions drops nothing.
        """
        dropped = list[str]()
        with self._tables.transaction() as cursor:
            last = self.table.last_id(cursor)
            behind = [part for part in self.table.partitions(cursor) if part.stop is None or part.stop <= last]
            with index_ranges_only(cursor):
                conditions = self._unresolved(cursor)
                due = [
                    part
                    for part in behind
                    if conditions is not None
                    and not self.table.has_any(cursor, part, conditions)
                    and (part.stop is not None or self.table.has_any(cursor, part, ["true"]))
                ]
        for part in due:
            try:
                with self._tables.transaction() as cursor, index_ranges_only(cursor):
                    if self.table.drop(cursor, part, partial(self.unresolved_conditions, cursor)):
                        dropped.append(part.table)
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                    raise
        return tuple(dropped)

    def unresolved_conditions(self, cursor: psycopg.Cursor[Any]) -> Sequence[str]:
        """SQL conditions on xid and id for every message that some subscription still needs; all, if there is none."""
        return self._unresolved(cursor) or ("true",)

    def _unresolved(self, cursor: psycopg.Cursor[Any]) -> list[str] | None:
        """Conditions for every message that some subscription still needs; None where there is no subscription."""
        readers = self._readers(cursor)
        if not readers:
            return None
        conditions = list[str]()
        for _, rows in readers:
            # Positions first, slices after: what is opened in between stands in both, never in neither.
            position = rows.position()
            if position is None:
                continue
            conditions += QueuePosition.of(position).unopened_conditions()
            for row in rows.unresolved():
                conditions += reader.span_of(row.at).conditions() if row.at is not None else ()
        return conditions

    def _readers(self, cursor: psycopg.Cursor[Any]) -> list[tuple[str, PostgresRows]]:
        """Every subscription's name and rows."""
        return [
            (name, PostgresRows(cursor, Subscriber(self.KIND, self.queue, name), self.where))
            for name in subscriptions_of(cursor, self.KIND, self.queue)
        ]

    def _make_ready(self) -> None:
        """See that queue and partitions stand ready; costs one look at the sequence where they do."""
        with self._tables.transaction() as cursor:
            if not self._ready_to:
                self.table.create(cursor, self._partition_messages)
            elif self.table.last_id(cursor) + self._partition_messages // 2 < self._ready_to:
                return
            try:
                with cursor.connection.transaction():
                    self._ready_to = self.table.make_ahead(cursor)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege):
                # A slow producer has rows in the default partition, or this role may only put: then the reader's makes
                # partitions, or the next time will do. Until then messages go to the default partition.
                self._ready_to = 1


def _settings_database() -> Database:
    """What the settings say."""
    from stormproof.core.start.settings import Settings

    settings = Settings()
    database = settings.resolve_database()
    if settings.uses_embedded:
        _bring_up_to_date(database)
    return database


def _bring_up_to_date(database: Database) -> None:
    """Make the schema in our own Postgres, where nobody else could have done it before the first put."""
    import sqlalchemy as sa

    from stormproof.migrations import migrate

    engine = sa.create_engine(
        database.sqlalchemy_url,
        creator=lambda: connect(database, application_name="stormproof queue"),
        poolclass=sa.NullPool,
    )
    migrate(engine)
