"""Opens slices: finds the messages, cuts them to the limit, and writes down who has them."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from psycopg import Cursor

from stormproof.core.errors import Fenced, Json, PositionMismatch, UsageError
from stormproof.core.postgres.store import query
from stormproof.core.source.parts import inner_ends
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.numbering import SERVER_SQL, TIMELINE_SQL, Numbering, above_sql
from stormproof.core.source.postgres_queue.position import Place, Snapshot, Span, place_of
from stormproof.core.source.postgres_queue.tables import SCHEMA
from stormproof.core.source.protocol import Expectation, Lease, Limit, Slice

DEATHS_BEFORE_HALVING = 2
_UNKNOWN = 1 << 62
"""More messages than any limit: the number is not known yet."""

_PLANNER = {"enable_seqscan": "off", "enable_bitmapscan": "off", "max_parallel_workers_per_gather": "0"}

_ROW = (
    "id, kind, from_snapshot::text, to_snapshot::text, after_xid::text, after_id, last_xid::text, last_id,"
    " messages, bytes, min_id, max_id, owner, epoch, opened, deaths"
)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One subscription of one queue."""

    table: MessageTable
    subscription: str

    @property
    def key(self) -> tuple[str, str]:
        """The key of its rows."""
        return self.table.queue, self.subscription


@dataclass(frozen=True, slots=True)
class Position:
    """How far a subscription is: what `start` sees was opened once, and of the span to `end` all up to `after`."""

    epoch: int
    start: Snapshot
    end: Snapshot | None
    after: Place | None
    server: str
    timeline: int

    @property
    def newest(self) -> Snapshot:
        """The newest snapshot of the position."""
        return self.end or self.start

    def unopened(self, now: Snapshot) -> tuple[Span, ...]:
        """What was not opened yet, as seen by `now`."""
        if self.end is None:
            return (Span(self.start, now),)
        return Span(self.start, self.end, self.after), Span(self.end, now)

    def unopened_conditions(self) -> list[str]:
        """SQL conditions for every message that was not opened yet, now or ever."""
        conditions = [f"xid = '{xid}'::xid8" for xid in self.newest.running]
        conditions.append(f"xid >= '{self.newest.xmax}'::xid8")
        if self.end is not None:
            conditions += Span(self.start, self.end, self.after).conditions()
        return conditions


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


class Totals(NamedTuple):
    """What a slice holds, counted by the database; `xor` is of the tokens under one seed."""

    messages: int
    bytes: int
    xor: int
    min_id: int
    max_id: int

    def plus(self, other: Totals) -> Totals:
        """Of both together."""
        if not (self.messages and other.messages):
            return self if self.messages else other
        return Totals(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.xor ^ other.xor,
            min(self.min_id, other.min_id),
            max(self.max_id, other.max_id),
        )


@dataclass(frozen=True, slots=True)
class SliceRow:
    """One row of `queue_slice`: a span of the message table, or (`span` None) the retry rows that point at it."""

    id: int
    span: Span | None
    messages: int
    bytes: int
    min_id: int
    max_id: int
    owner: str | None
    epoch: int
    opened: int
    deaths: int
    replayed: tuple[Place, ...] = ()

    @classmethod
    def of(cls, row: Sequence[Any]) -> SliceRow:
        """From a query of `_ROW`."""
        span = None
        if row[1] == "main":
            span = Span(Snapshot.parse(row[2]), Snapshot.parse(row[3]), _place(row[4], row[5]), _place(row[6], row[7]))
        return cls(row[0], span, *row[8:])

    def to_json(self) -> dict[str, Json]:
        """The slice's own description, for the ledger."""
        return {
            "slice": self.id,
            "span": None if self.span is None else self.span.to_json(),
            "messages": self.messages,
            "bytes": self.bytes,
            "ids": [self.min_id, self.max_id],
            "opened": self.opened,
            "deaths": self.deaths,
            "replayed": [list(place) for place in self.replayed],
        }

    @classmethod
    def from_json(cls, value: dict[str, Json]) -> SliceRow:
        """What `to_json` wrote."""
        match value:
            case {
                "slice": int(id_),
                "span": span,
                "messages": int(messages),
                "bytes": int(size),
                "ids": [int(low), int(high)],
                "opened": int(opened),
                "deaths": int(deaths),
                "replayed": list(replayed),
            }:
                at = Span.from_json(span) if isinstance(span, dict) else None
                places = tuple(place for value in replayed if (place := place_of(value)) is not None)
                return cls(id_, at, messages, size, low, high, None, 0, opened, deaths, places)
            case _:
                raise UsageError(f"not a position in a Postgres queue: {sorted(value)}")

    def rows_sql(self, who: Subscriber, columns: str = "id, xid, payload", last: Place | None = None) -> str:
        """A query of the slice's messages, or of those up to a place."""
        if self.span is not None:
            span = self.span if last is None else self.span.upto(last)
            return who.table.select(columns, span.conditions())
        upto = "" if last is None else f" and (xid, id) <= ('{last.xid}'::xid8, {last.id})"
        return f"select {columns} from {SCHEMA}.queue_retry where slice = {self.id}{upto}"


def _place(xid: str | None, id_: int | None) -> Place | None:
    return None if xid is None or id_ is None else Place(int(xid), id_)


@contextmanager
def index_ranges_only(cursor: Cursor[Any]) -> Generator[None]:
    """Have the planner use the index of the message table: its statistics lag behind a queue's growth."""
    cursor.execute("; ".join(f"set local {name} = {off}" for name, off in _PLANNER.items()).encode())
    yield
    # Not in a `finally`: after an error the transaction is rolled back, and the settings with it.
    cursor.execute("; ".join(f"set local {name} to default" for name in _PLANNER).encode())


def look(cursor: Cursor[Any], who: Subscriber) -> Server:
    """The server's snapshot and identity now, and the queue's numbering; within `index_ranges_only`.

    Guarantee: one's own transaction does not count as ended in the snapshot. So messages that it has put, or will put,
    come with a later slice, also where producer and reader share a transaction.
    """
    table = who.table
    row = query(
        cursor,
        "with here as materialized (select pg_current_snapshot() as snapshot, pg_current_xact_id()::text::bigint as xid)"
        f" select here.snapshot::text, here.xid, {SERVER_SQL}, {TIMELINE_SQL}, q.server, q.timeline, q.xid_shift,"
        f" exists (select {above_sql(table.sql, 'here.snapshot', 'q.xid_shift')}"
        "  and m.xid <> ((here.xid + q.xid_shift)::text)::xid8)"
        f" from here cross join {SCHEMA}.queue q where q.queue = %s",
        table.queue,
    ).fetchone()
    if row is None:
        raise UsageError(f"there is no queue {table.queue!r}: put() or subscribe() makes it", queue=table.queue)
    numbers = Numbering(row[4], row[5], row[6])
    snapshot = Snapshot.parse(row[0]).before(int(row[1])).shifted(numbers.shift)
    return Server(snapshot, row[2], row[3], numbers, row[7])


def lock(cursor: Cursor[Any], who: Subscriber, epoch: int) -> Position:
    """Lock the subscription, in a statement of its own, and read its position.

    A statement that waits for this lock goes on with a snapshot from before the wait. So the lock comes first, and
    snapshots are taken in later statements; together in one statement the position could go backwards.

    Raises:
        Fenced: a newer epoch has taken the subscription over.
    """
    position = position_of(cursor, who, locked=True)
    if position is None:
        raise UsageError(
            f"queue {who.table.queue} has no subscription {who.subscription!r}: subscribe() comes first",
            queue=who.table.queue,
            subscription=who.subscription,
        )
    if epoch < position.epoch:
        raise fenced(who, epoch, position.epoch)
    return position


def fenced(who: Subscriber, epoch: int, newer: int) -> Fenced:
    """The error of an epoch that was replaced."""
    return Fenced(
        f"queue {who.table.queue}: epoch {epoch} of subscription {who.subscription} was replaced by epoch {newer}",
        queue=who.table.queue,
        subscription=who.subscription,
        epoch=epoch,
        newer_epoch=newer,
    )


def check_server(who: Subscriber, position: Position, server: Server) -> None:
    """Refuse a queue or a position whose transaction numbers are not this server's, or that lie ahead of it.

    Raises:
        PositionMismatch: after a dump and restore, or a fail-over: messages would be skipped for ever.
    """
    where = f"queue {who.table.queue}, subscription {who.subscription}"
    way_on = f"Nothing was opened. See what is proven, and go on, with: stormproof queue adopt {who.table.queue}"
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


def totals(cursor: Cursor[Any], rows_sql: str, seed: int) -> Totals:
    """Number, bytes and XOR of the tokens of the messages that a query of id and payload gives."""
    row = query(
        cursor,
        f"select count(*), coalesce(sum(octet_length(payload)), 0)::bigint,"
        f" coalesce(bit_xor(hashint8extended(id, {seed})), 0), coalesce(min(id), 0), coalesce(max(id), 0)"
        f" from ({rows_sql}) m",
    ).fetchone()
    assert row is not None
    return Totals(*row)


def expectation(cursor: Cursor[Any], rows_sql: str, seed: int, excluded: frozenset[int]) -> Expectation:
    """Number and XOR of the tokens, some messages left out."""
    row = query(
        cursor,
        f"select count(*), coalesce(bit_xor(hashint8extended(m.id, {seed})), 0) from ({rows_sql}) m"
        " left join unnest(%s::bigint[]) as e (id) on e.id = m.id where e.id is null",
        sorted(excluded),
    ).fetchone()
    assert row is not None
    return Expectation(*row)


def cut(cursor: Cursor[Any], who: Subscriber, row: SliceRow, limit: Limit, seed: int) -> tuple[Place | None, Totals]:
    """Where the limit ends the slice (None: it holds all), and what the part up to there has; at least one message."""
    last: Place | None = None
    messages = max(1, limit.messages)
    if messages < row.messages:
        last, have = _first(cursor, who, row, messages, seed)
    else:
        have = totals(cursor, row.rows_sql(who, "id, payload"), seed)
    if have.bytes > limit.bytes and have.messages > 1:
        found = query(
            cursor,
            "select xid::text, id from ("
            " select xid, id, row_number() over w as n, sum(octet_length(payload)) over w as total"
            f" from ({row.rows_sql(who, 'xid, id, payload', last)}) m window w as (order by xid, id)"
            f") r where total <= {limit.bytes} or n = 1 order by n desc limit 1",
        ).fetchone()
        last = found and Place(int(found[0]), found[1])
        have = totals(cursor, row.rows_sql(who, "id, payload", last), seed)
    if last is not None and have.messages == row.messages:
        last = None
    return last, have


def _first(
    cursor: Cursor[Any], who: Subscriber, row: SliceRow, messages: int, seed: int
) -> tuple[Place | None, Totals]:
    """The place of the n-th message (None where there are fewer), and what the slice has up to there.

    One range after the other, so that each is a walk along the index that ends where it should: over a union of them
    Postgres sorts everything that lies ahead.
    """
    have = Totals(0, 0, 0, 0, 0)
    if row.span is None:
        ranges: tuple[tuple[int | None, str], ...] = ((None, f"slice = {row.id}"),)
        table = f"{SCHEMA}.queue_retry"
    else:
        xids = (range_.xid for range_ in row.span.ranges())
        ranges = tuple(zip(xids, row.span.conditions(), strict=True))
        table = who.table.sql
    for xid, condition in ranges:
        want = messages - have.messages
        ordered = f"from {table} m where {condition} order by m.xid, m.id"
        found = totals(cursor, f"select m.id, m.payload {ordered} limit {want}", seed)
        have = have.plus(found)
        if found.messages == want:
            if xid is not None:
                return Place(xid, found.max_id), have
            at = query(cursor, f"select m.xid::text, m.id {ordered} offset {want - 1} limit 1").fetchone()
            return (at and Place(int(at[0]), at[1])), have
    return None, have


def open_new(
    cursor: Cursor[Any], who: Subscriber, position: Position, now: Snapshot, *, lease: Lease, limit: Limit, seed: int
) -> Slice | None:
    """Open messages that were never opened, and move the subscription's position on."""
    spans = position.unopened(now)
    for span in spans:
        if not span.conditions():
            continue
        row = SliceRow(0, span, _UNKNOWN, 0, 0, 0, lease.owner, lease.epoch, 1, 0)
        last, have = cut(cursor, who, row, limit, seed)
        if have.messages:
            break
    else:
        return None
    part = span if last is None else span.upto(last)
    id_ = _insert(cursor, who, "main", span=part, have=have, lease=lease, opened=1, deaths=0)
    start, end = (span.end, None) if last is None else (span.start, span.end)
    query(
        cursor,
        f"update {SCHEMA}.queue_subscription set from_snapshot = %s, to_snapshot = %s, after_xid = %s, after_id = %s"
        " where queue = %s and subscription = %s",
        str(start),
        None if end is None else str(end),
        None if last is None else str(last.xid),
        None if last is None else last.id,
        *who.key,
    )
    return describe(replace(row, id=id_, span=part), have)


def reopen(cursor: Cursor[Any], who: Subscriber, lease: Lease, limit: Limit, seed: int) -> Slice | None:
    """Open the first slice that was returned, or whose lease ran out.

    A slice on which drivers died is opened in halves; a half is halved again as soon as one more driver dies on it.
    """
    found = query(
        cursor,
        f"select {_ROW} from {SCHEMA}.queue_slice where queue = %s and subscription = %s"
        " and (state = 'returned' or (state = 'open' and expires_at <= clock_timestamp()))"
        " order by id limit 1 for update skip locked",
        *who.key,
    ).fetchone()
    if found is None:
        return None
    row = SliceRow.of(found)
    if row.owner is not None:
        query(
            cursor,
            f"insert into {SCHEMA}.queue_lapse (queue, subscription, owner, epoch) values (%s, %s, %s, %s)",
            *who.key,
            row.owner,
            row.epoch,
        )
    if row.deaths >= DEATHS_BEFORE_HALVING and row.messages > 1:
        row = replace(row, deaths=1)
        limit = replace(limit, messages=min(limit.messages, math.ceil(row.messages / 2)))
    last, have = cut(cursor, who, row, limit, seed)
    if last is None and have.messages != row.messages:
        raise PositionMismatch(
            f"queue {who.table.queue}: a slice of subscription {who.subscription} held {row.messages} messages when it "
            f"was opened, and {have.messages} now: messages were deleted or changed by hand",
            slice=row.to_json(),
            found=have.messages,
        )
    if last is not None:
        row = split(cursor, who, row, last, have)
    query(
        cursor,
        f"update {SCHEMA}.queue_slice set state = 'open', owner = %s, epoch = %s, opened = opened + 1, deaths = %s,"
        " death_counted = false, expires_at = clock_timestamp() + make_interval(secs => %s) where id = %s",
        lease.owner,
        lease.epoch,
        row.deaths,
        lease.seconds,
        row.id,
    )
    replayed: tuple[Place, ...] = ()
    if row.span is None:
        found_ids = query(cursor, f"select r.xid::text, r.id from ({row.rows_sql(who, 'xid, id')}) r order by r.id")
        replayed = tuple(Place(int(xid), id_) for xid, id_ in found_ids)
    return describe(replace(row, owner=lease.owner, epoch=lease.epoch, opened=row.opened + 1, replayed=replayed), have)


def open_due(cursor: Cursor[Any], who: Subscriber, lease: Lease, limit: Limit, seed: int) -> Slice | None:
    """Open retries that are due, as a slice of their own."""
    due = (
        f"select id from {SCHEMA}.queue_retry where queue = %s and subscription = %s and slice is null"
        f" and not_before <= clock_timestamp() order by not_before, id limit {max(1, limit.messages)}"
    )
    ids = [row[0] for row in query(cursor, due, *who.key)]
    if not ids:
        return None
    nothing = Totals(len(ids), 0, 0, ids[0], ids[-1])
    id_ = _insert(cursor, who, "retry", span=None, have=nothing, lease=None, opened=0, deaths=0)
    query(
        cursor,
        f"update {SCHEMA}.queue_retry set slice = %s where queue = %s and subscription = %s and id = any(%s)",
        id_,
        *who.key,
        ids,
    )
    have = totals(cursor, f"select id, payload from {SCHEMA}.queue_retry where slice = {id_}", seed)
    query(cursor, f"update {SCHEMA}.queue_slice set bytes = %s where id = %s", have.bytes, id_)
    return reopen(cursor, who, lease, limit, seed)


def split(cursor: Cursor[Any], who: Subscriber, row: SliceRow, last: Place, have: Totals) -> SliceRow:
    """Cut a slice in two rows that are both returned; gives the first part's. The rest keeps its place in the order."""
    first = row.span and row.span.upto(last)
    kind = "retry" if row.span is None else "main"
    id_ = _insert(cursor, who, kind, span=first, have=have, lease=None, opened=row.opened, deaths=row.deaths)
    query(
        cursor,
        f"update {SCHEMA}.queue_slice set state = 'returned', owner = null, expires_at = null, after_xid = %s,"
        " after_id = %s, messages = messages - %s, bytes = bytes - %s, deaths = %s where id = %s",
        None if first is None else str(last.xid),
        None if first is None else last.id,
        have.messages,
        have.bytes,
        row.deaths,
        row.id,
    )
    if row.span is None:
        query(
            cursor,
            f"update {SCHEMA}.queue_retry set slice = %s where slice = %s and (xid, id) <= (%s::xid8, %s)",
            id_,
            row.id,
            str(last.xid),
            last.id,
        )
    return replace(row, id=id_, span=first, messages=have.messages, bytes=have.bytes)


def _insert(
    cursor: Cursor[Any],
    who: Subscriber,
    kind: str,
    *,
    span: Span | None,
    have: Totals,
    lease: Lease | None,
    opened: int,
    deaths: int,
) -> int:
    after, last = (None, None) if span is None else (span.after, span.last)
    row = query(
        cursor,
        f"insert into {SCHEMA}.queue_slice (queue, subscription, kind, from_snapshot, to_snapshot, after_xid, after_id,"
        " last_xid, last_id, messages, bytes, min_id, max_id, state, owner, epoch, expires_at, opened, deaths)"
        " values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,"
        " clock_timestamp() + make_interval(secs => %s), %s, %s) returning id",
        *who.key,
        kind,
        None if span is None else str(span.start),
        None if span is None else str(span.end),
        None if after is None else str(after.xid),
        None if after is None else after.id,
        None if last is None else str(last.xid),
        None if last is None else last.id,
        have.messages,
        have.bytes,
        have.min_id,
        have.max_id,
        "returned" if lease is None else "open",
        None if lease is None else lease.owner,
        0 if lease is None else lease.epoch,
        None if lease is None else lease.seconds,
        opened,
        deaths,
    ).fetchone()
    assert row is not None
    return int(row[0])


def describe(row: SliceRow, have: Totals) -> Slice:
    """What the topology gets to know of an opened slice."""
    row = replace(row, messages=have.messages, bytes=have.bytes, min_id=have.min_id, max_id=have.max_id)
    return slice_of(row.to_json(), Expectation(have.messages, have.xor))


def slice_of(position: dict[str, Json], expected: Expectation) -> Slice:
    """A slice from its JSON form."""
    row = SliceRow.from_json(position)
    return Slice(
        position,
        expected,
        row.bytes,
        retry=row.span is None,
        deaths=row.deaths,
        replayed=tuple((place.id, place.xid) for place in row.replayed),
    )


def position_of(cursor: Cursor[Any], who: Subscriber, *, locked: bool = False) -> Position | None:
    """The subscription's position, locked if so wished; None where there is no such subscription."""
    row = query(
        cursor,
        "select epoch, from_snapshot::text, to_snapshot::text, after_xid::text, after_id, server, timeline"
        f" from {SCHEMA}.queue_subscription where queue = %s and subscription = %s{' for update' if locked else ''}",
        *who.key,
    ).fetchone()
    if row is None:
        return None
    end = None if row[2] is None else Snapshot.parse(row[2])
    return Position(row[0], Snapshot.parse(row[1]), end, _place(row[3], row[4]), row[5], row[6])


def take(cursor: Cursor[Any], who: Subscriber, lease: Lease, *, delete: bool) -> SliceRow | None:
    """The slice of a lease, locked or deleted; None where this owner has none in this epoch."""
    where = "queue = %s and subscription = %s and owner = %s and epoch = %s"
    statement = (
        f"delete from {SCHEMA}.queue_slice where {where} returning {_ROW}"
        if delete
        else f"select {_ROW} from {SCHEMA}.queue_slice where {where} for update"
    )
    found = query(cursor, statement, *who.key, lease.owner, lease.epoch).fetchone()
    return None if found is None else SliceRow.of(found)


def unresolved(cursor: Cursor[Any], who: Subscriber) -> list[SliceRow]:
    """Every slice that is leased or returned."""
    rows = query(
        cursor, f"select {_ROW} from {SCHEMA}.queue_slice where queue = %s and subscription = %s", *who.key
    ).fetchall()
    return [SliceRow.of(row) for row in rows]


def part(cursor: Cursor[Any], who: Subscriber, row: SliceRow, alone: Sequence[int]) -> None:
    """Return a slice of several messages in parts: each of the messages in `alone` by itself, else two halves."""
    row = replace(row, deaths=min(row.deaths, 1))
    suspects: list[int] = []
    if alone:
        found = query(
            cursor,
            "select n - 1 from (select m.id, row_number() over (order by m.xid, m.id) as n"
            f" from ({row.rows_sql(who, 'xid, id')}) m) r where id = any(%s::bigint[])",
            sorted(alone),
        )
        suspects = [place for (place,) in found]
    cut_off = 0
    for end in inner_ends(row.messages, suspects):
        last, have = cut(cursor, who, row, Limit(end - cut_off, row.bytes), 0)
        if last is None:
            break  # fewer messages than when it was opened: the next opening says so
        split(cursor, who, row, last, have)
        row, cut_off = replace(row_of(cursor, row.id), deaths=row.deaths), end


def row_of(cursor: Cursor[Any], id_: int) -> SliceRow:
    """The slice with this number, as it stands now."""
    found = query(cursor, f"select {_ROW} from {SCHEMA}.queue_slice where id = %s", id_).fetchone()
    assert found is not None
    return SliceRow.of(found)
