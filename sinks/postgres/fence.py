"""The fence of a Postgres sink: a row with the epoch that may write. It is locked while rows are written; the next epoch
moves it, after it has ended the older epochs' backends.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, LiteralString, NamedTuple

import psycopg

from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import Fenced, StoreUnavailable
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.bookkeeping import MINE
from stormproof.sinks.postgres.connection import Link
from stormproof.sinks.protocol import SinkIdentity

BACKEND_END_TIMEOUT_S: Final = 10.0
BACKEND_POLL_S: Final = 0.01
TAKE_OVER_LOCK_TIMEOUT_MS: Final = 2_000
TAKE_OVER_TRIES_MAX: Final = 5
"""An older epoch may connect again after its backends were ended, before the fence is moved: they are then ended again."""


class Fence:
    """One epoch's hold on the fence. `epoch` None: for reading only, so `lock` is refused."""

    def __init__(self, identity: SinkIdentity, epoch: int | None, where: str) -> None:
        self._epoch = epoch
        self._where = where
        self._mine = {**bookkeeping.mine(identity), "epoch": epoch}

    def take_over(self, link: Link) -> None:
        """End the backends of older epochs, and move the fence to this epoch.

        Raises:
            Fenced: a newer epoch holds this sink.
            StoreUnavailable: another session holds the fence and does not let it go.
        """
        for attempt in range(TAKE_OVER_TRIES_MAX):
            with link.transaction(fenced=False) as connection:
                bookkeeping.make(connection)
                older = connection.execute(
                    f"select pid, backend_start from stormproof_sink.backend where {MINE} and epoch < %(epoch)s",
                    self._mine,
                ).fetchall()
            # Outside of any transaction, so that we hold no lock while we wait for them to end.
            with link.errors():
                terminate_backends(link.connection(fenced=False), older)
            try:
                with link.transaction(fenced=False) as connection:
                    connection.execute("select set_config('lock_timeout', %s, true)", (str(TAKE_OVER_LOCK_TIMEOUT_MS),))
                    self._move(connection)
                return
            except StoreUnavailable as error:
                if error.details.get("sqlstate") != psycopg.errors.LockNotAvailable.sqlstate:
                    raise
                if attempt == TAKE_OVER_TRIES_MAX - 1:
                    raise

    def enter(self, connection: psycopg.Connection) -> None:
        """Record a new connection's backend under its epoch, so that the next epoch can end it.

        Raises:
            Fenced: a newer epoch holds this sink.
        """
        self.lock(connection)
        self._record_backend(connection)

    def lock(self, connection: psycopg.Connection) -> None:
        """Lock the fence until this transaction ends. A check without the lock would let a fenced driver's rows land later.

        Raises:
            Fenced: a newer epoch holds this sink.
        """
        self.require(connection, self.ask(connection))

    def ask(self, connection: psycopg.Connection) -> psycopg.Cursor[tuple[Any, ...]]:
        """Lock it, without waiting for the answer where the connection is in a pipeline; `require` reads it."""
        return connection.execute(
            f"select 1 from stormproof_sink.fence where {MINE} and epoch = %(epoch)s for share", self._mine
        )

    def require(self, connection: psycopg.Connection, asked: psycopg.Cursor[tuple[Any, ...]]) -> None:
        """Read the answer. Raises as `lock`."""
        if asked.fetchone() is None:
            raise self._fenced(connection)

    def _move(self, connection: psycopg.Connection) -> None:
        raised = connection.execute(
            "insert into stormproof_sink.fence (topology, incarnation, sink, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(epoch)s) "
            "on conflict (topology, incarnation, sink) do update set epoch = excluded.epoch "
            "where fence.epoch <= excluded.epoch",
            self._mine,
        ).rowcount
        if raised != 1:
            raise self._fenced(connection)
        connection.execute(f"delete from stormproof_sink.backend where {MINE} and epoch < %(epoch)s", self._mine)
        self._record_backend(connection)

    def _record_backend(self, connection: psycopg.Connection) -> None:
        backend = backend_identity(connection)
        connection.execute(
            "insert into stormproof_sink.backend (topology, incarnation, sink, pid, backend_start, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(pid)s, %(backend_start)s, %(epoch)s) "
            "on conflict do nothing",
            {**self._mine, "pid": backend.pid, "backend_start": backend.backend_start},
        )

    def _fenced(self, connection: psycopg.Connection) -> Fenced:
        row = connection.execute(f"select epoch from stormproof_sink.fence where {MINE}", self._mine).fetchone()
        newest = None if row is None else int(row[0])
        return Fenced(f"{self._where}: epoch {newest} holds it, this is epoch {self._epoch}", epoch=self._epoch)


class Backend(NamedTuple):
    """One connection as the server knows it. The start time tells it from a later one with the same pid."""

    pid: int
    backend_start: datetime


def backend_identity(connection: psycopg.Connection) -> Backend:
    """The backend of this connection, as `terminate_backends` takes it."""
    row = connection.execute(
        "select pid, backend_start from pg_stat_activity where pid = pg_catalog.pg_backend_pid()"
    ).fetchone()
    if row is None:
        raise StoreUnavailable("Postgres does not list this very connection in pg_stat_activity")
    return Backend(*row)


def terminate_backends(
    connection: psycopg.Connection, backends: Iterable[tuple[int, datetime]], *, clock: Clock | None = None
) -> int:
    """End these backends, wait until they are gone, and return how many of them were still running at the call.

    All are told to end before the first is waited for. A pid whose start time differs is somebody else's by now and is left
    alone; so is `connection` itself.

    Raises:
        StoreUnavailable: one of them did not end within `BACKEND_END_TIMEOUT_S`.
    """
    clock = clock or SystemClock()
    wanted = list(backends)
    pids, starts = [pid for pid, _ in wanted], [start for _, start in wanted]
    there = """
        from pg_stat_activity a
        join unnest(%s::int[], %s::timestamptz[]) as w (pid, backend_start) using (pid, backend_start)
        where a.pid <> pg_backend_pid()
    """

    def query(columns: LiteralString) -> list[int]:
        connection.execute("select pg_stat_clear_snapshot()")  # else a transaction sees its first answer again
        return [row[0] for row in connection.execute("select " + columns + there, (pids, starts))]

    found = query("a.pid, pg_terminate_backend(a.pid)")
    until_s = clock.monotonic_s() + BACKEND_END_TIMEOUT_S
    while left := query("a.pid"):
        if clock.monotonic_s() > until_s:
            raise StoreUnavailable(
                f"Postgres backends {left} did not end within {BACKEND_END_TIMEOUT_S:.0f} s of pg_terminate_backend; "
                "look at them in pg_stat_activity",
                pids=list(left),
            )
        clock.sleep(BACKEND_POLL_S)
    return len(found)
