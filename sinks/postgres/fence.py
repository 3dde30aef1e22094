"""The fence of a Postgres sink: a row with the epoch that may write, held while rows are written, and moved by the next."""

from __future__ import annotations

from typing import Final

import psycopg

from stormproof.core.errors import Fenced, StoreUnavailable
from stormproof.core.postgres.database import backend_identity, terminate_backends
from stormproof.sinks.postgres import bookkeeping
from stormproof.sinks.postgres.bookkeeping import MINE
from stormproof.sinks.postgres.link import Link
from stormproof.sinks.protocol import SinkIdentity

TAKE_OVER_LOCK_TIMEOUT_MS: Final = 2_000
TAKE_OVER_TRIES_MAX: Final = 5
"""A backend of an older epoch may come anew between its siblings' end and the new epoch: then it is ended, too."""


class Fence:
    """One epoch's hold on it; none where the epoch is None, of one who only reads: whoever locks it then is refused."""

    def __init__(self, identity: SinkIdentity, epoch: int | None, where: str) -> None:
        self._epoch = epoch
        self._where = where
        self._mine = {**bookkeeping.mine(identity), "epoch": epoch}

    def take_over(self, link: Link) -> None:
        """End older epochs' backends, and have the fence name this epoch.

        Raises:
            Fenced: a newer epoch holds this sink.
            StoreUnavailable: somebody holds the fence and will not let go.
        """
        for attempt in range(TAKE_OVER_TRIES_MAX):
            with link.transaction(fenced=False) as connection:
                bookkeeping.make(connection)
                older = connection.execute(
                    f"select pid, backend_start from stormproof_sink.backend where {MINE} and epoch < %(epoch)s",
                    self._mine,
                ).fetchall()
            # Outside of any transaction: nothing of ours is locked while we wait for them to end.
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
        """Record a new connection under its epoch, so that the next epoch can end it.

        Raises:
            Fenced: a newer epoch holds this sink.
        """
        self.lock(connection)
        self._record_backend(connection)

    def lock(self, connection: psycopg.Connection) -> None:
        """Hold the fence until this transaction ends; checked without the lock, a zombie's rows could land after.

        Raises:
            Fenced: a newer epoch holds this sink.
        """
        row = connection.execute(
            f"select 1 from stormproof_sink.fence where {MINE} and epoch = %(epoch)s for share", self._mine
        ).fetchone()
        if row is None:
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
