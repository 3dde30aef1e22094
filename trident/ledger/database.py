"""The ledger's connection to its database, with the errors that a driver can act on.

Production runs on Postgres; an SQLite database serves unit tests with the same statements.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from stormproof.core.errors import StoreUnavailable
from stormproof.core.postgres.database import may_pass
from stormproof.trident.ledger import tables as t

READ_ONLY: Final = "25006"
"""SQLSTATE of a write in a read-only transaction."""
LOCK_NOT_AVAILABLE: Final = "55P03"
"""SQLSTATE of a lock that could not be had within `lock_timeout`."""


class LockTimeout(StoreUnavailable):
    """A lock could not be had in time."""


class LedgerDatabase:
    """Transactions in the ledger's database; `on_lost` is called when a connection was lost."""

    def __init__(self, engine: sa.Engine, on_lost: Callable[[], None]) -> None:
        self.is_postgres = engine.dialect.name == "postgresql"
        # SQLite has no schemas; the unit tests' ledger has the bare names.
        self._engine = engine if self.is_postgres else engine.execution_options(schema_translate_map={t.SCHEMA: None})
        self._on_lost = on_lost

    @contextmanager
    def begin(self) -> Generator[sa.Connection]:
        """One transaction, behind no fence.

        Raises:
            StoreUnavailable: the connection was lost, or the database takes no writes. After a lost answer to COMMIT the
                outcome is unknown: read again.
            LockTimeout: a lock could not be had in time.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            sqlstate = getattr(error.orig, "sqlstate", None)
            if sqlstate == READ_ONLY:
                raise StoreUnavailable(
                    "the ledger's database takes no writes (default_transaction_read_only is on there, or it is a standby): "
                    f"{_first_line(error.orig)}; let it take writes, or name another one in STORMPROOF_DATABASE_URL",
                    sqlstate=sqlstate,
                ) from error
            if sqlstate == LOCK_NOT_AVAILABLE:
                raise LockTimeout(
                    "another session of the ledger's database holds a lock for too long; see pg_locks",
                    sqlstate=sqlstate,
                ) from error
            if (
                error.connection_invalidated
                or isinstance(error, OperationalError | InterfaceError)
                or may_pass(error.orig)
            ):
                self._on_lost()
                raise StoreUnavailable(
                    f"the ledger's database does not answer ({type(error.orig).__name__}: {_first_line(error.orig)})",
                    sqlstate=sqlstate,
                ) from error
            raise

    def drop_connections(self) -> None:
        """Close the connections; the next transaction opens a new one. SQLite in memory is its connection, and stays."""
        self._on_lost()
        if self.is_postgres:
            self._engine.dispose()

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else ""
