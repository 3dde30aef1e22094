"""Reads a part of a slice inside an executor: from Postgres's binary COPY straight into Arrow, by ADBC."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import adbc_driver_manager
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from adbc_driver_postgresql import dbapi

from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.contract.source import READER_SCHEMA
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.session import started
from stormproof.core.source.postgres_queue import tokens


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
                columns["token"] if "token" in columns else pa.array(tokens.tokens(ids, seed)),
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
                cursor.execute(tokens.AGREES_SQL)
                return _Connection(connection, tokens.agrees(cursor.fetch_arrow_table().column("token").to_pylist()))
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
