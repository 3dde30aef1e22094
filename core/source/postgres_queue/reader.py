"""Reads a part of a slice inside an executor: from Postgres's binary COPY straight into Arrow, by ADBC."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace

import adbc_driver_manager
import numpy as np
import pyarrow as pa
from adbc_driver_postgresql import dbapi

from stormproof.core.errors import StoreUnavailable
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.session import started
from stormproof.core.source.protocol import READER_SCHEMA

# Idle connections of this process, by (process, database). A forked child finds its parent's under another process id
# and must neither use nor close them: they stay where they are.
_idle: dict[tuple[int, str], list[dbapi.Connection]] = {}

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
    it gives the same messages each time. Picklable, and as secret as the database's password.
    """

    database: Database
    rows: str
    above: int | None
    upto: int | None

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, in id order, with their tokens as the database computes them.

        Raises:
            StoreUnavailable: the database could not be reached or did not answer; nothing was changed there.
        """
        table = self._fetch(self._sql(seed))
        table = table.set_column(1, "origin", _xids(table.column("origin")))
        ids = table.column("id").to_numpy()
        if np.any(ids[1:] < ids[:-1]):
            table = table.take(pa.array(np.argsort(ids)))
        if excluded:
            ids = table.column("id").to_numpy()
            table = table.filter(pa.array(~np.isin(ids, np.fromiter(excluded, np.int64))))
        for batch in table.combine_chunks().to_batches(max_chunksize=batch_rows):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=READER_SCHEMA)

    def _sql(self, seed: int) -> str:
        bounds = [f"id > {self.above}"] if self.above is not None else []
        bounds += [f"id <= {self.upto}"] if self.upto is not None else []
        return (
            f"select id, xid as origin, hashint8extended(id, {seed}) as token, payload"
            f" from ({self.rows}) m where {' and '.join(bounds) or 'true'}"
        )

    def _fetch(self, sql: str) -> pa.Table:
        """The query's rows; a connection that went stale while it lay idle is replaced once."""
        key = (os.getpid(), self.database.adbc_uri)
        idle = _idle.setdefault(key, [])
        while True:
            fresh = not idle
            try:
                connection = self._connect() if fresh else idle.pop()
                try:
                    with closing(connection.cursor()) as cursor:
                        cursor.execute(sql)
                        table = cursor.fetch_arrow_table()
                except BaseException:
                    with suppress(adbc_driver_manager.Error):
                        connection.close()
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

    def _connect(self) -> dbapi.Connection:
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
                return connection
        # ADBC has read the names of the types by now, all of them in quotes, and knows none of them.
        connection.close()
        known = dict(self.database.parameters)
        options = f"{known.get('options', '')} -c quote_all_identifiers=off".strip()
        return replace(self, database=Database.of({**known, "options": options}))._connect()


def _xids(column: pa.ChunkedArray) -> pa.Array:
    """Transaction numbers from the bytes that COPY gives for `xid8`: Postgres has no cheap cast to bigint."""
    array = column.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not len(array):
        return pa.array([], pa.int64())
    start = int.from_bytes(array.buffers()[1].slice(4 * array.offset, 4).to_pybytes(), sys.byteorder)
    values = np.frombuffer(array.buffers()[2], ">i8", count=len(array), offset=start)
    return pa.array(values.astype(np.int64))
