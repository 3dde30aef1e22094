"""Spans of a message table: what they hold, and where a limit cuts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from psycopg import Cursor

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.source import Expectation, Limit
from stormproof.core.pending.connector import Piece
from stormproof.core.pending.rows import At
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.messages import MessageTable, first_by_index
from stormproof.core.source.postgres_queue.position import Place, Range, Span

BULK: Final = 5_000
"""From so many messages in a slice on it pays to ask whether one transaction put all of them."""


class Totals(NamedTuple):
    """What messages there are, counted by the database; `xor` is of the tokens under one seed, `content` of the messages'
    hashes, with their payloads.
    """

    messages: int
    bytes: int
    xor: int
    min_id: int
    max_id: int
    content: int

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
            self.content ^ other.content,
        )


class _First(NamedTuple):
    """The first messages of a span.

    `last` is the place of the last of them, None where no message lies behind it; `xid` is the transaction that put all of
    them, None where there may be several.
    """

    totals: Totals
    last: Place | None
    xid: int | None


def content(cursor: Cursor[Any]) -> str:
    """The XOR of the payloads' hashes of messages `m`, each seeded with its id, so that none goes out against another.

    The hash of a record of one column is that of the column: both ways give the same number. Postgres has the faster one,
    a third of the time, since version 18.
    """
    since_18 = cursor.connection.info.server_version >= 180_000
    hashed = "hashbyteaextended(m.payload, m.id)" if since_18 else "hash_record_extended(row(m.payload), m.id)"
    return f"coalesce(bit_xor({hashed}), 0)"


def first_of(cursor: Cursor[Any], table: MessageTable, span: Span, limit: Limit, seed: int) -> Piece:
    """The first messages of a span, as many as the limit admits; at least one where it holds any."""
    found = _first(cursor, table, span, max(1, limit.messages), seed)
    last, have = found.last, found.totals
    if have.bytes > limit.bytes and have.messages > 1:
        last = _within(cursor, table, span if last is None else span.upto(last), limit.bytes)
        found = _first(cursor, table, span.upto(last), have.messages, seed)
        have = found.totals
    part = span if last is None else span.upto(last)
    rest = None if last is None else at_of(span.beyond(last))
    at: At = {**at_of(part), "ids": [have.min_id, have.max_id, have.messages], "content": have.content}
    if found.xid is not None:
        at["xid"] = found.xid
    return Piece(at, have.messages, have.bytes, Expectation(have.messages, have.xor), rest)


def _first(cursor: Cursor[Any], table: MessageTable, span: Span, messages: int, seed: int) -> _First:
    """The first messages of a span, at most so many, and all of them where it has fewer.

    One range after the other, so that each is a walk along the index that ends where it should: over a union of them
    Postgres sorts everything that lies ahead.
    """
    have, xids, ranges = Totals(0, 0, 0, 0, 0, 0), set[int | None](), deque(span.ranges())
    tries_one, hashed = messages >= BULK, content(cursor)
    while ranges:
        range_ = ranges.popleft()
        walk = _Walk(table.sql, span, range_, messages - have.messages, seed, hashed)
        row = first_by_index(cursor, walk.of_one_or_all if tries_one else walk.of_all)
        totals = Totals(*row[:6])
        xid, id_, is_more, is_of_one = row[6:]
        if not totals.messages:
            continue
        have = have.plus(totals)
        xids.add(int(xid) if is_of_one else range_.xid)
        if have.messages == messages:
            last = Place(int(xid), id_) if is_more or ranges else None
            return _First(have, last, _only(xids))
        if is_of_one:  # its ids have gaps
            ranges.extendleft(reversed(range_.beyond(Place(int(xid), id_))))
            tries_one = False
    return _First(have, None, _only(xids))


def _only(xids: set[int | None]) -> int | None:
    return next(iter(xids)) if len(xids) == 1 else None


class _Walk(NamedTuple):
    """Queries for the first messages of one range.

    They give the totals of the first `want` messages, the transaction and the id of the last of them, whether the range has
    more, and whether all of them are known to be of one transaction. Where the range has fewer than `want`, they give all
    of it, and the transaction and the id have no meaning.
    """

    table: str
    span: Span
    range_: Range
    want: int
    seed: int
    content: str

    @property
    def of_all(self) -> str:
        """In the order of the table, whatever transactions the messages are of."""
        if self.range_.xid is not None:
            xid, id_ = f"'{self.range_.xid}'", "coalesce(max(id), 0)"
        else:
            xid, id_ = f"(array_agg(xid))[{self.want}]", f"(array_agg(id))[{self.want}]"
        return (
            f"select {_COLUMNS}, f.xid::text, f.id, {self._has_beyond('f.xid', 'f.id')}, false from ("
            f"select {self._totals}, {xid}::xid8 as xid, {id_} as id from ("
            f"select m.xid, m.id, m.payload from {self.table} m where {self._condition}"
            f" order by m.xid, m.id limit {self.want}) m) f"
        )

    @property
    def of_one_or_all(self) -> str:
        """`of_all`; or, where the first message's transaction has ids enough, its messages among the next `want` ids.

        Without a limit, an order and a look for the last message the walk takes two thirds of the time. Where the ids have
        gaps, it gives fewer than `want`.
        """
        return (
            f"with first as materialized (select m.xid, m.id from {self.table} m where {self._condition}"
            " order by m.xid, m.id limit 1),"
            " bulk as materialized (select xid, id from first where exists ("
            f"select from {self.table} m where {self._condition} and m.xid = first.xid"
            f" and m.id >= first.id + {self.want - 1}))"
            f" select {_COLUMNS}, bulk.xid::text, f.high, {self._has_beyond('bulk.xid', 'f.high')}, true"
            f" from bulk cross join lateral (select {self._totals} from {self.table} m"
            f" where m.xid = bulk.xid and m.id >= bulk.id and m.id < bulk.id + {self.want}) f"
            f" union all select * from ({self.of_all}) a where (select count(*) from bulk) = 0"
        )

    @property
    def _condition(self) -> str:
        return self.span.condition(self.range_)

    @property
    def _totals(self) -> str:
        return (
            "count(*) as messages, coalesce(sum(octet_length(m.payload)), 0)::bigint as bytes,"
            f" coalesce(bit_xor(hashint8extended(m.id, {self.seed})), 0) as xor,"
            f" coalesce(min(m.id), 0) as low, coalesce(max(m.id), 0) as high, {self.content} as content"
        )

    def _has_beyond(self, xid: str, id_: str) -> str:
        """Two looks into the index: over `(xid, id) > (...)` Postgres walks all that the range has before it."""
        of_one = f"exists (select from {self.table} m where {self._condition} and m.xid = {xid} and m.id > {id_})"
        if self.range_.xid is not None:
            return of_one
        return f"({of_one} or exists (select from {self.table} m where {self._condition} and m.xid > {xid}))"


_COLUMNS: Final = "f.messages, f.bytes, f.xor, f.low, f.high, f.content"


def _within(cursor: Cursor[Any], table: MessageTable, span: Span, size: int) -> Place:
    """The last message of a span up to which its payloads have at most `size` bytes; its first message at least."""
    row = first_by_index(
        cursor,
        "select xid::text, id from ("
        " select xid, id, row_number() over w as n, sum(octet_length(payload)) over w as total"
        f" from ({table.select('xid, id, payload', span.conditions())}) m window w as (order by xid, id)"
        f") r where total <= {size} or n = 1 order by n desc limit 1",
    )
    return Place(int(row[0]), row[1])


def expectation(
    cursor: Cursor[Any], table: MessageTable, span: Span, seed: int, excluded: frozenset[int]
) -> Expectation:
    """Number and XOR of the tokens, some messages left out."""
    row = query(
        cursor,
        f"select count(*), coalesce(bit_xor(hashint8extended(m.id, {seed})), 0)"
        f" from ({table.select('id', span.conditions())}) m"
        " left join unnest(%s::bigint[]) as e (id) on e.id = m.id where e.id is null",
        sorted(excluded),
    ).fetchone()
    assert row is not None
    return Expectation(*row)


def at_of(span: Span) -> At:
    """A span as the pending store keeps it."""
    return {"span": span.to_json()}


def span_of(at: Mapping[str, Json]) -> Span:
    """What `at_of` wrote.

    Raises:
        UsageError: it is no slice of a queue.
    """
    span = at.get("span")
    if not isinstance(span, dict):
        raise UsageError(f"not a slice of a Postgres queue: {sorted(at)}")
    return Span.from_json(span)


def xid_of(at: Mapping[str, Json]) -> int | None:
    """The transaction that put all messages of a slice; None where there may be several."""
    xid = at.get("xid")
    return xid if isinstance(xid, int) else None


def ids_of(at: Mapping[str, Json]) -> tuple[int, int, int]:
    """The lowest and the highest id of a slice, and how many messages it has."""
    match at.get("ids"):
        case [int(low), int(high), int(messages)]:
            return low, high, messages
        case _:
            raise UsageError(f"not a slice of a Postgres queue: {sorted(at)}")
