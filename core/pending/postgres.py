"""`PostgresPendingStore`: what is pending, in the tables of a Postgres database."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pyarrow as pa

from stormproof.core.base.errors import StoreUnavailable, UsageError
from stormproof.core.contract.source import SliceReader
from stormproof.core.pending.batches import batches_of
from stormproof.core.pending.postgres_rows import MINE, PostgresRows
from stormproof.core.pending.rows import PendingRows, Subscriber
from stormproof.core.pending.tables import SCHEMA
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.store import StoreConnection, query

_MADE_BY: Final = "`stormproof ledger migrate` makes it"


@dataclass(frozen=True, slots=True)
class RetryReader:
    """A part of a slice of retries: the subscription's retries with these numbers. As secret as the database's password."""

    database: Database
    who: Subscriber
    ids: tuple[int, ...]
    unpack: Callable[[Sequence[bytes]], Any] | None

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, in id order.

        Raises:
            StoreUnavailable: the database could not be reached or did not answer.
        """
        wanted = [id_ for id_ in self.ids if id_ not in excluded]
        if not wanted:
            return
        # By number, not by slice: a slice may have another number than when the ledger wrote it down.
        found = fetched(
            self.database,
            "a slice of retries",
            f"select id, origin, payload from {SCHEMA}.pending_retry where {MINE} and id = any(%s) order by id",
            *self.who,
            wanted,
        )
        ids, origins, payloads = [row[0] for row in found], [row[1] for row in found], [bytes(row[2]) for row in found]
        yield from batches_of(ids, origins, payloads, seed, batch_rows, self.unpack)


def fetched(database: Database, what: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """A statement's rows, read in binary form over a connection made for it: readers keep no connection.

    Raises:
        StoreUnavailable: the database could not be reached or did not answer; `what` could not be read.
    """
    try:
        with (
            closing(connect(database, application_name=f"stormproof {what}", autocommit=True)) as connection,
            connection.cursor(binary=True) as cursor,
        ):
            return query(cursor, statement, *parameters).fetchall()
    except psycopg.OperationalError as error:
        raise StoreUnavailable(
            f"{what} could not be read from {database.redacted}: {database.without_secrets(str(error)).strip()}",
            sqlstate=error.sqlstate,
        ) from error


class PostgresPendingStore:
    """The pending store's tables in one database: the one named, else the run's, else what `default` gives.

    `noun` and `name` say whose it is, in errors ("queue lines") and in their details; `missing` says what makes a table
    that is not there. Pickles without its connections.

    Threads: any number may use one object; each transaction has a connection of its own.
    Forks: a fork makes connections of its own, and never touches its parent's.
    """

    def __init__(
        self,
        noun: str,
        name: str,
        *,
        database: Database | str | None = None,
        default: Callable[[], Database] | None = None,
        missing: str = _MADE_BY,
    ) -> None:
        self._noun = noun
        self._name = name
        self._where = f"{noun} {name}"
        self._named = Database.given(self._where, database)
        self._default = default
        self._lent = dict[str, Database]()
        self._own = StoreConnection(noun, name, application=noun, missing=missing)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": self._own.apart()}

    @property
    def database(self) -> Database:
        """The database.

        Raises:
            UsageError: none is known; or runs on different ones share this object, and none was named.
        """
        if self._named is not None:
            return self._named
        lent = list(self._lent.values())
        if len(lent) > 1:
            raise UsageError(
                f"{self._where}: runs on {lent[0]} and {lent[1]} share this object, so which one it means cannot be told; "
                "name one where the object is made: database=URL",
                **{self._noun: self._name},
            )
        if lent:
            return lent[0]
        if self._default is None:
            raise UsageError(
                f"{self._where} keeps its position in Postgres and has none yet: a topology's run binds its own; "
                "elsewhere call bind(database)",
                **{self._noun: self._name},
            )
        self._named = self._default()
        return self._named

    def is_known(self, database: Database | None) -> bool:
        """Whether a database is given here, or was named or lent before; one that would be made first is none."""
        return database is not None or self._named is not None or bool(self._lent)

    def bind(self, database: Database) -> None:
        """Use this database, where none was named."""
        self._lent.setdefault(database.redacted, database)

    def for_run(self, database: Database) -> PostgresPendingStore:
        """The same for one run: with connections of its own, in `database` where none is named."""
        view = object.__new__(PostgresPendingStore)
        view.__dict__.update(self.__getstate__(), _lent={database.redacted: database})
        return view

    @contextmanager
    def transaction(self, tx: object | None = None) -> Generator[psycopg.Cursor[Any]]:
        """A cursor in `tx`, or in a transaction of its own that is committed at the end.

        Raises:
            StoreUnavailable: the database cannot be reached, or a lock was not to be had; its answer may be lost.
            UsageError: `tx` is no psycopg connection, or a table is missing.
            MissingRight: the role may not do it.
        """
        with self._own.transaction(lambda: self.database, tx) as cursor:
            yield cursor

    @contextmanager
    def rows(self, who: Subscriber, tx: object | None = None) -> Generator[PendingRows]:
        """The subscription's rows; see `transaction`."""
        with self.transaction(tx) as cursor:
            yield PostgresRows(cursor, who, self._where)

    def readers(
        self,
        who: Subscriber,
        slice_id: int,
        parts: Sequence[Sequence[int]],
        unpack: Callable[[Sequence[bytes]], Any] | None,
    ) -> tuple[SliceReader, ...]:
        """Readers of a slice of retries, one for each part."""
        return tuple(RetryReader(self.database, who, tuple(ids), unpack) for ids in parts)

    def subscriptions(self, kind: str, source: str) -> Sequence[str]:
        """The names of a source's subscriptions."""
        with self.transaction() as cursor:
            return subscriptions_of(cursor, kind, source)

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in this very server and database."""
        return self._own.joins(lambda: self.database, tx)

    def close(self) -> None:
        """Let idle connections go; the next use makes others."""
        self._own.close()


def subscriptions_of(cursor: psycopg.Cursor[Any], kind: str, source: str) -> Sequence[str]:
    """The names of a source's subscriptions, ascending."""
    found = query(
        cursor,
        f"select subscription from {SCHEMA}.pending_subscription where kind = %s and source = %s order by 1",
        kind,
        source,
    )
    return [name for (name,) in found]
