"""Spans of a message table: what they hold, and where a limit cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from psycopg import Cursor

from stormproof.core.errors import Json, UsageError
from stormproof.core.pending.connector import Piece
from stormproof.core.pending.rows import At
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.messages import MessageTable, first_by_index
from stormproof.core.source.postgres_queue.position import Place, Span
from stormproof.core.source.protocol import Expectation, Limit


class Totals(NamedTuple):
    """What messages there are, counted by the database; `xor` is of the tokens under one seed."""

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


def first_of(cursor: Cursor[Any], table: MessageTable, span: Span, limit: Limit, seed: int) -> Piece:
    """The first messages of a span, as many as the limit admits; at least one where it holds any."""
    last, have = _first(cursor, table, span, max(1, limit.messages), seed)
    if have.bytes > limit.bytes and have.messages > 1:
        last = _within(cursor, table, span if last is None else span.upto(last), limit.bytes)
        _, have = _first(cursor, table, span.upto(last), have.messages, seed)
    part = span if last is None else span.upto(last)
    rest = None if last is None else at_of(span.beyond(last))
    at: At = {**at_of(part), "ids": [have.min_id, have.max_id, have.messages]}
    return Piece(at, have.messages, have.bytes, Expectation(have.messages, have.xor), rest)


def _first(
    cursor: Cursor[Any], table: MessageTable, span: Span, messages: int, seed: int
) -> tuple[Place | None, Totals]:
    """The place of the n-th message (None where there are no more behind it), and what the span has up to there.

    One range after the other, so that each is a walk along the index that ends where it should: over a union of them
    Postgres sorts everything that lies ahead.
    """
    have, conditions = Totals(0, 0, 0, 0, 0), span.conditions()
    for condition in conditions:
        want = messages - have.messages
        row = first_by_index(
            cursor,
            "select f.messages, f.bytes, f.xor, f.low, f.high, f.xid::text, f.id,"
            f" exists (select from {table.sql} m where {condition} and (m.xid, m.id) > (f.xid, f.id)) from ("
            "select count(*) as messages, coalesce(sum(bytes), 0)::bigint as bytes,"
            f" coalesce(bit_xor(hashint8extended(id, {seed})), 0) as xor, coalesce(min(id), 0) as low,"
            f" coalesce(max(id), 0) as high, (array_agg(xid))[{want}] as xid, (array_agg(id))[{want}] as id"
            f" from (select m.xid, m.id, octet_length(m.payload) as bytes from {table.sql} m where {condition}"
            f" order by m.xid, m.id limit {want}) m) f",
        )
        have = have.plus(Totals(*row[:5]))
        if row[5] is not None:
            return (Place(int(row[5]), row[6]) if row[7] or condition is not conditions[-1] else None), have
    return None, have


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


def ids_of(at: Mapping[str, Json]) -> tuple[int, int, int]:
    """The lowest and the highest id of a slice, and how many messages it has; 0 where an earlier version did not say."""
    match at.get("ids"):
        case [int(low), int(high)]:
            return low, high, 0
        case [int(low), int(high), int(messages)]:
            return low, high, messages
        case _:
            raise UsageError(f"not a slice of a Postgres queue: {sorted(at)}")
