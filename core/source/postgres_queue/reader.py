"""Reads a part of a slice inside an executor: from Postgres's binary COPY straight into Arrow, by ADBC.

The tokens of a queue's messages are Postgres's `hashint8extended`, which its database counts in SQL; computed here for whole
arrays they need not be sent. Postgres keeps the function as it is, since the rows of hash-partitioned tables are
where it says; all the same a reader compares some values before it relies on this one (`agrees`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import adbc_driver_manager
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from adbc_driver_postgresql import dbapi

from stormproof.core.base.arrow import Words
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.contract.source import READER_SCHEMA
from stormproof.core.postgres.database import Database, started
from stormproof.core.tracking.share import as_words

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
