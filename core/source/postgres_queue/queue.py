"""`PostgresQueue`: a durable queue in Postgres, as a pending source and for its producers."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Literal

import psycopg
from psycopg.rows import tuple_row

from stormproof.core.arguments import require_seconds, require_text, require_whole, said_of
from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import Fenced, Json, MissingRight, PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.store import StoreConnection, query
from stormproof.core.preflight import DatabaseProbe, Probe
from stormproof.core.source.backoff import Backoff
from stormproof.core.source.dead_letter import DeadLetter, Disposal
from stormproof.core.source.decode import Unit, decoder_for
from stormproof.core.source.kind import SourceKind
from stormproof.core.source.postgres_queue import failures, slices
from stormproof.core.source.postgres_queue.failures import RetryPolicy
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.numbering import OTHER_SERVER, standing
from stormproof.core.source.postgres_queue.position import NOTHING
from stormproof.core.source.postgres_queue.produce import Receipt, copy_in, lines_from
from stormproof.core.source.postgres_queue.reader import PostgresSliceReader
from stormproof.core.source.postgres_queue.slices import SliceRow, Subscriber
from stormproof.core.source.postgres_queue.tables import SCHEMA
from stormproof.core.source.protocol import Backlog, Decoder, Expectation, Lease, Limit, Resolution, Slice, SliceReader
from stormproof.core.tracking.share import signed

_LOG = logging.getLogger("stormproof.queue")

PARTITION_MESSAGES = 2_000_000
MAINTAIN_INTERVAL_S = 10.0
LAPSE_KEPT_DAYS = 7
_DENSE = 1.25
"""Up to so many ids for each message, equal ranges of ids are parts of about equal length."""


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


class PostgresQueue:
    """Messages in an append-only Postgres table, read in slices between two database snapshots.

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

    def __init__(
        self,
        queue: str,
        schema: str = "line string",
        *,
        unit: Unit | None = None,
        name: str | None = None,
        database: Database | str | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        max_attempts: int = 5,
        backoff_base_s: float = 1.0,
        backoff_max_s: float = 300.0,
        partition_messages: int = PARTITION_MESSAGES,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        where = f"queue {queue}"
        self.table = MessageTable(queue)
        require_whole(where, "max_attempts", max_attempts, 1)
        require_whole(where, "partition_messages", partition_messages, 2)
        require_seconds(where, "backoff_base_s", backoff_base_s)
        require_seconds(where, "backoff_max_s", backoff_max_s)
        if start not in ("earliest", "latest"):
            raise UsageError(f"queue {queue}: start is {start!r}; it is 'earliest' or 'latest'")
        if name is not None:
            require_text(where, "name", name, "lines")
        self.name = name or queue
        with said_of(where):
            self._decoder: Decoder = decoder_for(schema, unit)
        self._database = Database.given(where, database)
        self._lent = dict[str, Database]()
        self._start = start
        self._policy = RetryPolicy(max_attempts, Backoff(backoff_base_s, backoff_max_s))
        self._partition_messages = partition_messages
        self._rng = rng or Random()  # noqa: S311 - jitter, not a secret
        self._clock: Clock | None = clock
        self._acts_for = dict[str, str]()
        self._own = StoreConnection(
            "queue",
            queue,
            application="queue",
            missing="the queue's are made by its first put() or subscribe(), Stormproof's own by "
            "`stormproof ledger migrate`",
        )
        self._maintained_s = -math.inf
        self._ready_to = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": self._own.apart(), "_clock": None, "_maintained_s": -math.inf}

    @property
    def queue(self) -> str:
        """The queue's name in the database."""
        return self.table.queue

    @property
    def decoder(self) -> Decoder:
        """Turns payloads into tuples."""
        return self._decoder

    @property
    def kind(self) -> SourceKind:
        """A slice can be read again, for as long as it is not confirmed."""
        return SourceKind.TRANSACTIONAL

    def serves(self, guarantee: Guarantee) -> str | None:
        """All of them."""
        del guarantee
        return None

    def shown_id(self, message: int, origin: int) -> str:
        """``XID-N``: the transaction that put the message, and its number."""
        return failures.shown_id(message, origin)

    # ---- where the store is

    @property
    def database(self) -> Database:
        """The database: the one named, else the run's, else the settings' one.

        An embedded one gets its schema here, without a word.

        Raises:
            UsageError: runs on different databases share this object, and none was named.
        """
        if self._database is not None:
            return self._database
        lent = list(self._lent.values())
        if len(lent) > 1:
            raise UsageError(
                f"queue {self.queue}: runs on {lent[0]} and {lent[1]} share this object, so which one it puts into cannot "
                "be told; name one: PostgresQueue(..., database=URL)",
                queue=self.queue,
            )
        if lent:
            return lent[0]
        from stormproof.core.settings import Settings

        settings = Settings()
        database = settings.resolve_database()
        if settings.uses_embedded:
            _bring_up_to_date(database)
        self._database = database
        return database

    def probes(self) -> tuple[Probe, ...]:
        """Executors read the queue's database."""
        return (DatabaseProbe(f"the database of queue {self.name!r}", self.database),)

    def bind(self, database: Database) -> None:
        """Use this database, where none was named."""
        self._lent.setdefault(database.redacted, database)

    def for_run(self, database: Database) -> PostgresQueue:
        """The same queue for one run: with a subscription and connections of its own, in `database` if none is named."""
        view = object.__new__(PostgresQueue)
        view.__dict__.update(self.__getstate__(), _clock=self._clock, _acts_for={}, _lent={database.redacted: database})
        return view

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in this queue's own database."""
        return self._own.joins(lambda: self.database, tx)

    def drop_connections(self) -> None:
        """Let the connection go; the next call makes another."""
        self._own.close()

    def close(self) -> None:
        """Let idle connections go; the next use makes others."""
        self._own.close()

    # ---- the pending source

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; makes queue and subscription where they are missing.

        Raises:
            UsageError: this object acts for another one already.
            Fenced: a newer epoch has the subscription.
            PositionMismatch: the subscription's position was not taken from this server.
        """
        who = Subscriber(self.table, subscription)
        acts_for = self._acts_for.setdefault("subscription", subscription)
        if acts_for != subscription:
            raise UsageError(
                f"queue {self.queue}: this object acts for subscription {acts_for!r}, so it cannot act for "
                f"{subscription!r}; make another PostgresQueue({self.queue!r}, ...) for that",
                queue=self.queue,
                subscription=subscription,
            )
        with self._transaction(None) as cursor:
            self.table.create(cursor, self._partition_messages)
        with self._transaction(None) as cursor, slices.index_ranges_only(cursor):
            server = slices.look(cursor, who)
            query(
                cursor,
                f"insert into {SCHEMA}.queue_subscription (queue, subscription, epoch, from_snapshot, server, timeline)"
                " values (%s, %s, %s, %s, %s, %s) on conflict do nothing",
                *who.key,
                epoch,
                str(NOTHING if self._start == "earliest" else server.snapshot),
                server.identifier,
                server.timeline,
            )
            position = slices.lock(cursor, who, epoch)
            slices.check_server(who, position, slices.look(cursor, who))
            self._raise_epoch(cursor, who, epoch)

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then new ones."""
        who = self._who()
        seed = signed(seed)
        with self._transaction(tx) as cursor:
            position = slices.lock(cursor, who, lease.epoch)
            try:
                with slices.index_ranges_only(cursor):
                    server = slices.look(cursor, who)
                    slices.check_server(who, position, server)
                    return (
                        slices.reopen(cursor, who, lease, limit, seed)
                        or (slices.open_due(cursor, who, lease, limit, seed) if limit.retries else None)
                        or slices.open_new(cursor, who, position, server.snapshot, lease=lease, limit=limit, seed=seed)
                    )
            except psycopg.errors.UniqueViolation as error:
                raise UsageError(
                    f"queue {self.queue}: {lease.owner} holds a slice already; each lease needs a key of its own"
                ) from error

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position."""
        return slices.slice_of(position, expected)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed or with messages left out, counted by the database."""
        rows = SliceRow.from_json(slice_.position).rows_sql(self._who(), "id")
        with self._transaction(tx) as cursor, slices.index_ranges_only(cursor):
            return slices.expectation(cursor, rows, signed(seed), excluded)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as parts by ranges of ids."""
        who, row = self._who(), SliceRow.from_json(slice_.position)
        rows = row.rows_sql(who)
        bounds = self._bounds(who, row, parallelism)
        return tuple(
            PostgresSliceReader(self.database, rows, above, upto)
            for above, upto in zip((None, *bounds), (*bounds, None), strict=True)
        )

    def _bounds(self, who: Subscriber, row: SliceRow, parallelism: int) -> tuple[int, ...]:
        """The ids at which the slice is cut in parts."""
        ids = row.max_id - row.min_id + 1
        if parallelism <= 1:
            return ()
        if ids <= row.messages * _DENSE:
            return tuple(row.min_id - 1 + ids * part // parallelism for part in range(1, parallelism))
        shares = [part / parallelism for part in range(1, parallelism)]
        with self._transaction(None) as cursor, slices.index_ranges_only(cursor):
            found = query(
                cursor,
                f"select percentile_disc(%s::float8[]) within group (order by id) from ({row.rows_sql(who, 'id')}) m",
                shares,
            ).fetchone()
        return tuple(found[0]) if found and found[0] else (row.max_id,) * (parallelism - 1)

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """Open to held; Fenced where the lease lapsed, was returned, or belongs to another epoch."""
        self._touch(lease, tx, "state = 'held', expires_at = null")

    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry; Fenced where it is not ours any more."""
        expiry = f"clock_timestamp() + make_interval(secs => {float(lease.seconds)})"
        self._touch(lease, None, f"expires_at = case when state = 'open' then {expiry} end")

    def _touch(self, lease: Lease, tx: object | None, change: str) -> None:
        who = self._who()
        with self._transaction(tx) as cursor:
            done = query(
                cursor,
                f"update {SCHEMA}.queue_slice set {change}"
                " where queue = %s and subscription = %s and owner = %s and epoch = %s"
                " and (state = 'held' or (state = 'open' and expires_at > clock_timestamp()))",
                *who.key,
                lease.owner,
                lease.epoch,
            )
            if done.rowcount != 1:
                self._explain(cursor, who, lease)
                raise Fenced(
                    f"queue {self.queue}: the lease of {lease.owner} (epoch {lease.epoch}) has lapsed or was returned",
                    queue=self.queue,
                    owner=lease.owner,
                )

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named.

        Raises:
            Fenced: the lease lapsed and its messages were handed to another, or it belongs to another epoch.
        """
        who = self._who()
        with self._transaction(tx) as cursor:
            row = slices.take(cursor, who, lease, delete=True)
            if row is None:
                self._explain(cursor, who, lease)
                return Resolution()
            resolution = Resolution()
            if failed:
                resolution = failures.resolve_failed(cursor, who, row, failed, policy=self._policy, rng=self._rng)
            if row.span is None:
                query(cursor, f"delete from {SCHEMA}.queue_retry where slice = %s", row.id)
            return resolution

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return all of the lease's messages; no failure is counted."""
        who = self._who()
        with self._transaction(tx) as cursor:
            done = query(
                cursor,
                f"update {SCHEMA}.queue_slice set state = 'returned', owner = null, expires_at = null"
                " where queue = %s and subscription = %s and owner = %s and epoch = %s",
                *who.key,
                lease.owner,
                lease.epoch,
            )
            if done.rowcount != 1:
                self._explain(cursor, who, lease, lapsed=False)

    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """Return the lease's messages in parts: suspects alone, else two halves; a single message is returned whole."""
        del slice_
        who = self._who()
        with self._transaction(tx) as cursor:
            row = slices.take(cursor, who, lease, delete=False)
            if row is None:
                self._explain(cursor, who, lease, lapsed=False)
            elif row.messages > 1:
                with slices.index_ranges_only(cursor):
                    slices.part(cursor, who, row, alone)
            else:
                self.abort(lease, cursor.connection)

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Every lease, mine from here on; an open one of an older epoch counts a death."""
        who = self._who()
        with self._transaction(tx) as cursor:
            slices.lock(cursor, who, epoch)
            self._raise_epoch(cursor, who, epoch)
            rows = query(
                cursor,
                f"with taken as (update {SCHEMA}.queue_slice"
                " set deaths = deaths + (state = 'open' and epoch < %s and not death_counted)::int,"
                " death_counted = death_counted or (state = 'open' and epoch < %s), epoch = %s"
                " where queue = %s and subscription = %s and owner is not null returning id, owner)"
                " select owner from taken order by id",
                epoch,
                epoch,
                epoch,
                *who.key,
            ).fetchall()
            return tuple(row[0] for row in rows)

    def backlog(self) -> Backlog:
        """What is left for this subscription. Counts the unopened messages: its cost grows with them."""
        who = self._who()
        with self._transaction(None) as cursor:
            return self._backlog(cursor, who)

    def _backlog(self, cursor: psycopg.Cursor[Any], who: Subscriber) -> Backlog:
        free = "(state = 'returned' or (state = 'open' and expires_at <= clock_timestamp()))"
        slice_row = query(
            cursor,
            f"select coalesce(sum(messages) filter (where kind = 'main' and {free}), 0)::bigint,"
            f" coalesce(sum(messages) filter (where not {free}), 0)::bigint,"
            f" coalesce(sum(messages) filter (where kind = 'retry' and {free}), 0)::bigint"
            f" from {SCHEMA}.queue_slice where queue = %s and subscription = %s",
            *who.key,
        ).fetchone()
        retry_row = query(
            cursor,
            "select count(*), extract(epoch from min(not_before) - clock_timestamp())::float8"
            f" from {SCHEMA}.queue_retry where queue = %s and subscription = %s and slice is null",
            *who.key,
        ).fetchone()
        dead_row = query(
            cursor,
            f"select count(*) from {SCHEMA}.dead_letter where queue = %s and subscription = %s and disposal is null",
            *who.key,
        ).fetchone()
        assert slice_row is not None
        assert retry_row is not None
        assert dead_row is not None
        returned, pending, returned_retries = slice_row
        fresh, age_s = self._unopened(cursor, who)
        return Backlog(
            ready=fresh + returned,
            pending=pending,
            waiting=retry_row[0] + returned_retries,
            dead=dead_row[0],
            next_retry_in_s=0.0 if returned_retries else (None if retry_row[1] is None else max(0.0, retry_row[1])),
            oldest_ready_age_s=age_s,
        )

    def _unopened(self, cursor: psycopg.Cursor[Any], who: Subscriber) -> tuple[int, float | None]:
        """Number of the messages that were never opened, and how long the first of them has waited."""
        # Not up to a snapshot of now: messages that lie above the server's numbers are left, too, though none reaches them.
        position = slices.position_of(cursor, who)
        conditions = [] if position is None else position.unopened_conditions()
        with slices.index_ranges_only(cursor):
            count = query(cursor, f"select count(*) from ({self.table.select('id', conditions)}) m").fetchone()
            first = query(
                cursor,
                "select extract(epoch from clock_timestamp() - min(put_at))::float8 from ("
                + " union all ".join(
                    f"(select m.put_at from {self.table.sql} m where {condition} order by m.xid, m.id limit 1)"
                    for condition in conditions or ["false"]
                )
                + ") f",
            ).fetchone()
        return (count[0] if count else 0), (first[0] if first else None)

    # ---- dead letters

    def look_at(self, subscription: str) -> None:
        """Act for a subscription that is there already, without its epoch and its position: for its dead letters."""
        self._acts_for["subscription"] = subscription

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, those that were disposed of included, oldest first."""
        who = self._who()
        with self._transaction(None) as cursor:
            return failures.dead_letters(cursor, who)

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with their failures counted from 0; returns those that were dead."""
        who = self._who()
        with self._transaction(None) as cursor:
            return failures.dispose(cursor, who, ids, Disposal.REQUEUE, by=by, why=why)

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that were dead."""
        who = self._who()
        with self._transaction(None) as cursor:
            return failures.dispose(cursor, who, ids, Disposal.DROP, by=by, why=why)

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Hand a dead letter out again with another payload; the old one stays on record. False where it is none."""
        who = self._who()
        with self._transaction(None) as cursor:
            done = failures.dispose(cursor, who, [message], Disposal.EDIT, by=by, why=why, payload=payload)
        failpoint("dead_letter.after")
        return bool(done)

    # ---- producers

    def put(self, payloads: Iterable[bytes], *, connection: psycopg.Connection | None = None) -> Receipt:
        """Put messages, in a transaction of its own: when it returns they are durable, and when it raises none is there.

        With `connection` they are put inside the user's own transaction there (an outbox): they are there when that one
        commits, and as durable as it is. Where its `synchronous_commit` is off, a crash of Postgres may lose a
        transaction whose commit had returned, with all that it wrote. The queue must exist already.

        Streams: the payloads are never all in memory.

        Raises:
            UsageError: `connection` commits each statement by itself (autocommit), and no transaction is open on it.
            StoreUnavailable: the database did not answer. Where it was the answer to the commit that was lost, the
                messages may be there.
            PositionMismatch: the queue was restored from another server and is not adopted: new messages would get numbers
                that do not compare with the restored ones. The database refuses plain SQL inserts likewise.
        """
        if connection is not None:
            self._require_transaction(connection)
            with self._server_required(), connection.cursor(row_factory=tuple_row) as cursor:
                receipt = copy_in(cursor, self.table, payloads)
            failpoint("queue.put.before_commit")
            return receipt
        self._make_ready()
        with self._server_required(), self._transaction(None) as cursor:
            half = self._partition_messages // 2  # so much always stands ready
            receipt = copy_in(cursor, self.table, payloads, statement_messages=half, between=self._make_ready)
            failpoint("queue.put.before_commit")
        return receipt

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
        with self._transaction(None) as cursor, slices.index_ranges_only(cursor):
            rows = query(
                cursor,
                f"select id, xid::text, payload from {self.table.sql} m order by m.xid, m.id limit {max(0, messages)}",
            ).fetchall()
        return tuple(Peeked(failures.shown_id(row[0], int(row[1])), bytes(row[2])) for row in rows)

    def stats(self) -> QueueStats:
        """The queue as a whole, and the backlog of each subscription."""
        with self._transaction(None) as cursor:
            names = query(
                cursor, f"select subscription from {SCHEMA}.queue_subscription where queue = %s order by 1", self.queue
            ).fetchall()
            parts = self.table.partitions(cursor)
            size = query(
                cursor,
                "select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits"
                " where inhparent = %s::regclass",
                self.table.sql,
            ).fetchone()
            return QueueStats(
                queue=self.queue,
                messages_put=self.table.last_id(cursor),
                partitions=len(parts),
                bytes_on_disk=size[0] if size else 0,
                subscriptions={name: self._backlog(cursor, Subscriber(self.table, name)) for (name,) in names},
                refused=self._refused(cursor),
            )

    def _refused(self, cursor: psycopg.Cursor[Any]) -> str | None:
        with slices.index_ranges_only(cursor):
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
        with self._transaction(None) as cursor:
            query(
                cursor,
                f"delete from {SCHEMA}.queue_lapse where queue = %s"
                f" and lapsed_at < clock_timestamp() - make_interval(days => {LAPSE_KEPT_DAYS})",
                self.queue,
            )
        try:
            self.drop_consumed()
        except MissingRight as error:
            _LOG.warning("queue %s keeps messages that everybody has read: %s", self.queue, error)

    def drop_consumed(self) -> tuple[str, ...]:
        """Drop the partitions in which no subscription has anything left; returns their names.

        A partition in which somebody works is left for the next time. A queue without subscriptions drops nothing.
        """
        dropped = list[str]()
        with self._transaction(None) as cursor:
            last = self.table.last_id(cursor)
            behind = [part for part in self.table.partitions(cursor) if part.stop is None or part.stop <= last]
            with slices.index_ranges_only(cursor):
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
                with self._transaction(None) as cursor, slices.index_ranges_only(cursor):
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
        names = query(
            cursor, f"select subscription from {SCHEMA}.queue_subscription where queue = %s", self.queue
        ).fetchall()
        if not names:
            return None
        conditions = list[str]()
        for (name,) in names:
            who = Subscriber(self.table, name)
            # Positions first, slices after: what is opened in between stands in both, never in neither.
            position = slices.position_of(cursor, who)
            if position is None:
                continue
            conditions += position.unopened_conditions()
            for row in slices.unresolved(cursor, who):
                conditions += row.span.conditions() if row.span is not None else ()
        return conditions

    def _make_ready(self) -> None:
        """See that queue and partitions stand ready; costs one look at the sequence where they do."""
        with self._transaction(None) as cursor:
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

    # ---- shared steps

    def _who(self) -> Subscriber:
        if not self._acts_for:
            raise UsageError(f"queue {self.queue}: subscribe() comes before any other call of a reader")
        return Subscriber(self.table, self._acts_for["subscription"])

    def _raise_epoch(self, cursor: psycopg.Cursor[Any], who: Subscriber, epoch: int) -> None:
        query(
            cursor,
            f"update {SCHEMA}.queue_subscription set epoch = %s where queue = %s and subscription = %s and epoch < %s",
            epoch,
            *who.key,
            epoch,
        )

    def _explain(self, cursor: psycopg.Cursor[Any], who: Subscriber, lease: Lease, *, lapsed: bool = True) -> None:
        """Say why a lease's slice is not there: Fenced where another has it; nothing where it is resolved already."""
        row = query(
            cursor,
            f"select (select epoch from {SCHEMA}.queue_subscription where queue = %s and subscription = %s),"
            f" (select epoch from {SCHEMA}.queue_slice where queue = %s and subscription = %s and owner = %s),"
            f" exists (select from {SCHEMA}.queue_lapse where queue = %s and subscription = %s and owner = %s"
            " and epoch = %s)",
            *who.key,
            *who.key,
            lease.owner,
            *who.key,
            lease.owner,
            lease.epoch,
        ).fetchone()
        assert row is not None
        newer = max((epoch for epoch in row[:2] if epoch is not None), default=lease.epoch)
        if newer > lease.epoch:
            raise slices.fenced(who, lease.epoch, newer)
        if lapsed and row[2]:
            raise Fenced(
                f"queue {self.queue}: the lease of {lease.owner} ran out and its messages were handed to another",
                queue=self.queue,
                owner=lease.owner,
            )

    def _transaction(self, tx: object | None) -> AbstractContextManager[psycopg.Cursor[Any]]:
        """A cursor in `tx`, or in a transaction of its own that is committed at the end."""
        return self._own.transaction(lambda: self.database, tx)


def _bring_up_to_date(database: Database) -> None:
    """Give our own Postgres the schema that this version needs; nobody else could have done it before the first put."""
    import sqlalchemy as sa

    from stormproof.migrations import migrate, state

    engine = sa.create_engine(
        database.sqlalchemy_url,
        creator=lambda: connect(database, application_name="stormproof queue"),
        poolclass=sa.NullPool,
    )
    if not state(engine).up_to_date:
        migrate(engine)
