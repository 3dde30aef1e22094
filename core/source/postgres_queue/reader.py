"""What a slice of a queue holds, where a limit cuts it, and how an executor reads a part of it.

It reads from Postgres's binary COPY straight into Arrow, by ADBC.

The tokens of a queue's messages are Postgres's `hashint8extended`, which its database counts in SQL; computed here for whole
arrays they need not be sent. Postgres keeps the function as it is, since the rows of hash-partitioned tables are
where it says; all the same a reader compares some values before it relies on this one (`agrees`).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import adbc_driver_manager
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from adbc_driver_postgresql import dbapi
from psycopg import Cursor

from stormproof.core.base.arrow import Words
from stormproof.core.base.errors import Json, StoreUnavailable, UsageError
from stormproof.core.contract.source import READER_SCHEMA, Expectation, Limit
from stormproof.core.pending.connector import Piece
from stormproof.core.pending.rows import At
from stormproof.core.postgres.database import Database, started
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.message_table import MessageTable, first_by_index
from stormproof.core.source.postgres_queue.position import QueuePlace, Range, Span
from stormproof.core.tracking.share import as_words

BULK: Final = 5_000
"""From so many messages in a slice on it pays to ask whether one transaction put all of them."""


class MessageTotals(NamedTuple):
    """What messages there are, counted by the database; `xor` is of the tokens under one seed, `content` of the messages'
    hashes, with their payloads.
    """

    messages: int
    bytes: int
    xor: int
    min_id: int
    max_id: int
    content: int

    def plus(self, other: MessageTotals) -> MessageTotals:
        """Of both together."""
        if not (self.messages and other.messages):
            return self if self.messages else other
        return MessageTotals(
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

    totals: MessageTotals
    last: QueuePlace | None
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
    have, xids, ranges = MessageTotals(0, 0, 0, 0, 0, 0), set[int | None](), deque(span.ranges())
    tries_one, hashed = messages >= BULK, content(cursor)
    while ranges:
        range_ = ranges.popleft()
        walk = _Walk(table.sql, span, range_, messages - have.messages, seed, hashed)
        row = first_by_index(cursor, walk.of_one_or_all if tries_one else walk.of_all)
        totals = MessageTotals(*row[:6])
        xid, id_, is_more, is_of_one = row[6:]
        if not totals.messages:
            continue
        have = have.plus(totals)
        xids.add(int(xid) if is_of_one else range_.xid)
        if have.messages == messages:
            last = QueuePlace(int(xid), id_) if is_more or ranges else None
            return _First(have, last, _only(xids))
        if is_of_one:  # its ids have gaps
            ranges.extendleft(reversed(range_.beyond(QueuePlace(int(xid), id_))))
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


def _within(cursor: Cursor[Any], table: MessageTable, span: Span, size: int) -> QueuePlace:
    """The last message of a span up to which its payloads have at most `size` bytes; its first message at least."""
    row = first_by_index(
        cursor,
        "select xid::text, id from ("
        " select xid, id, row_number() over w as n, sum(octet_length(payload)) over w as total"
        f" from ({table.select('xid, id, payload', span.conditions())}) m window w as (order by xid, id)"
        f") r where total <= {size} or n = 1 order by n desc limit 1",
    )
    return QueuePlace(int(row[0]), row[1])


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


_Halves = npt.NDArray[np.uint32]

_BITS: Final = 0xFFFFFFFF
_START: Final = (0x9E3779B9 + 4 + 3_923_095) & _BITS
_FINAL: Final = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))
"""Jenkins's final rounds on (a, b, c): which word is changed, by which, and how far that one is rotated."""

_TRIED: Final = (0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**31), 10**12 + 7, 2**63 - 1, -(2**63))
_TRIED_SEEDS: Final = (0, 1, -1, 2**62 - 12_345)

AGREES_SQL: Final = (
    "select hashint8extended(i, s) as token"
    f" from unnest(array{[str(seed) for seed in _TRIED_SEEDS]}::bigint[]) with ordinality as s (s, m)"
    f" cross join unnest(array{[str(id_) for id_ in _TRIED]}::bigint[]) with ordinality as i (i, n) order by m, n"
)
"""The database's values for `agrees`."""


def tokens(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """What ``hashint8extended(id, seed)`` gives for each id."""
    words = as_words(ids)
    low, high = words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    a, b, c = _seeded(seed)
    state: list[_Halves] = [
        np.uint32(a) + (low ^ np.where(ids >= 0, high, ~high)),
        np.full(len(ids), b, np.uint32),
        np.full(len(ids), c, np.uint32),
    ]
    for changed, by, bits in _FINAL:
        other = state[by]
        state[changed] = (state[changed] ^ other) - (other << np.uint32(bits) | other >> np.uint32(32 - bits))
    hashed: Words = state[1].astype(np.uint64) << np.uint64(32) | state[2]
    return hashed.view(np.int64)


def _seeded(seed: int) -> tuple[int, int, int]:
    """Jenkins's state (a, b, c) with the seed mixed into it."""
    a = b = c = _START
    if seed:
        a, b = (a + (seed >> 32)) & _BITS, (b + seed) & _BITS
        for bits in (4, 6, 8, 16, 19, 4):
            a = (a - c) & _BITS ^ ((c << bits | c >> (32 - bits)) & _BITS)
            c = (c + b) & _BITS
            a, b, c = b, c, a
    return a, b, c


def agrees(found: Sequence[int]) -> bool:
    """Whether the database's hash, as `AGREES_SQL` found it, is the one that `tokens` computes."""
    ids = np.array(_TRIED, np.int64)
    own = [int(token) for seed in _TRIED_SEEDS for token in tokens(ids, seed)]
    return list(found) == own


# ---- what a task reads


class _Connection(NamedTuple):
    """A connection, and whether its server's tokens are those of `tokens`, so that they need not be sent."""

    adbc: dbapi.Connection
    own_tokens: bool


# Idle connections of this process, by (process, database). A forked child finds its parent's under another process id
# and must neither use nor close them: they stay where they are.
_idle: dict[tuple[int, str], list[_Connection]] = {}

# A slice is always an index range; the planner's statistics lag behind a queue and would have it read everything. How
# long reading takes is the lease keeper's business, unless the URL itself says otherwise.
_SETUP = (
    "set enable_seqscan = off",
    "set enable_bitmapscan = off",
    "set jit = off",
    "select set_config(name, '0', false) from pg_settings where name = 'statement_timeout' and source <> 'client'",
)


@dataclass(frozen=True, slots=True)
class PostgresSliceReader:
    """A part of a slice: the messages of `rows` whose ids lie above `above` and not above `upto`.

    `rows` is a query that yields `id`, `xid` and `payload`; it names the slice by what cannot change any more, so that
    it gives the same messages each time. `xid` is the transaction that put all of them, None where there may be several.
    Picklable, and as secret as the database's password.
    """

    database: Database
    rows: str
    above: int | None
    upto: int | None
    xid: int | None = None

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, in id order, with the tokens that the database counted.

        Raises:
            StoreUnavailable: the database could not be reached or did not answer; nothing was changed there.
        """
        table = self._fetch(seed)
        ids = table.column("id").to_numpy()
        if np.any(ids[1:] < ids[:-1]):
            table = table.take(pa.array(np.argsort(ids)))
            ids = table.column("id").to_numpy()
        if excluded:
            table = table.filter(pa.array(~np.isin(ids, np.fromiter(excluded, np.int64))))
            ids = table.column("id").to_numpy()
        columns = {name: table.column(name) for name in table.column_names}
        origins = np.full(len(ids), self.xid) if self.xid is not None else _xids(columns["origin"])
        whole = pa.table(
            [
                columns["id"],
                pa.array(origins, pa.int64()),
                columns["token"] if "token" in columns else pa.array(tokens(ids, seed)),
                columns["payload"],
            ],
            names=READER_SCHEMA.names,
        )
        for batch in whole.combine_chunks().to_batches(max_chunksize=batch_rows):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=READER_SCHEMA)

    def _sql(self, seed: int, *, own_tokens: bool) -> str:
        """Each column costs about a tenth of the time: what is known here is not asked for."""
        bounds = [f"id > {self.above}"] if self.above is not None else []
        bounds += [f"id <= {self.upto}"] if self.upto is not None else []
        origin = "" if self.xid is not None else " xid as origin,"
        token = "" if own_tokens else f" hashint8extended(id, {seed}) as token,"
        return f"select id,{origin}{token} payload from ({self.rows}) m where {' and '.join(bounds) or 'true'}"

    def _fetch(self, seed: int) -> pa.Table:
        """The query's rows; a connection that went stale while it lay idle is replaced once."""
        key = (os.getpid(), self.database.adbc_uri)
        idle = _idle.setdefault(key, [])
        while True:
            fresh = not idle
            try:
                connection = self._connect() if fresh else idle.pop()
                try:
                    with closing(connection.adbc.cursor()) as cursor:
                        cursor.execute(self._sql(seed, own_tokens=connection.own_tokens))
                        table = cursor.fetch_arrow_table()
                except BaseException:
                    with suppress(adbc_driver_manager.Error):
                        connection.adbc.close()
                    raise
            except adbc_driver_manager.Error as error:
                if not fresh:
                    continue
                text, state = self.database.without_secrets(str(error)), error.sqlstate
            else:
                idle.append(connection)
                return table
            raise StoreUnavailable(
                f"a queue's slice could not be read from {self.database.redacted}: {text}",
                database=self.database.redacted,
                sqlstate=state,
            )

    def _connect(self) -> _Connection:
        connection = started(
            dict(self.database.parameters),
            lambda known: dbapi.connect(Database.of(known).adbc_uri, autocommit=True),
            adbc_driver_manager.Error,
        )
        with closing(connection.cursor()) as cursor:
            for statement in _SETUP:
                cursor.execute(statement)
            cursor.execute("select 1 from pg_settings where name = 'quote_all_identifiers' and setting = 'on'")
            if not cursor.fetch_arrow_table().num_rows:
                cursor.execute(AGREES_SQL)
                return _Connection(connection, agrees(cursor.fetch_arrow_table().column("token").to_pylist()))
        # ADBC has read the names of the types by now, all of them in quotes, and knows none of them.
        connection.close()
        known = dict(self.database.parameters)
        options = f"{known.get('options', '')} -c quote_all_identifiers=off".strip()
        return replace(self, database=Database.of({**known, "options": options}))._connect()


def _xids(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Transaction numbers from the bytes that COPY gives for `xid8`: Postgres has no cheap cast to bigint."""
    array = column.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not len(array):
        return np.zeros(0, np.int64)
    start = int.from_bytes(array.buffers()[1].slice(4 * array.offset, 4).to_pybytes(), sys.byteorder)
    values = np.frombuffer(array.buffers()[2], ">i8", count=len(array), offset=start)
    return values.astype(np.int64)
