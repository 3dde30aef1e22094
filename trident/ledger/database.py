"""The ledger's connection to its database, and its schema there, with errors that say what to do.

Production runs on Postgres; an SQLite database serves unit tests with the same statements.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from stormproof.core.base.errors import SettingsError, StoreUnavailable, StormproofError
from stormproof.core.postgres.database import Database, connect, may_pass
from stormproof.core.postgres.rights import explained
from stormproof.migrations import migrate, state
from stormproof.trident.ledger import tables as t

LOCK_TIMEOUT_S: Final = 15.0
IDLE_IN_TRANSACTION_S: Final = 60

READ_ONLY: Final = "25006"
"""SQLSTATE of a write in a read-only transaction."""
IN_RECOVERY: Final = "0A000"
"""SQLSTATE of a standby that is asked for a transaction which writes, on a connection that was read-only before."""
LOCK_NOT_AVAILABLE: Final = "55P03"
"""SQLSTATE of a lock that could not be had within `lock_timeout`."""
_SCHEMA_MISSING: Final = ("42P01", "42703", "3F000")
"""SQLSTATEs of an undefined table, column and schema."""


def ledger_engine(
    database: Database,
    *,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    connections: int = 1,
    statement_timeout_s: float | None = None,
) -> sa.Engine:
    """SQLAlchemy's engine for the ledger: one connection, which is not checked before use (recovery replaces a lost one).

    No statement waits for a lock for longer than `lock_timeout_s`, or runs for longer than `statement_timeout_s`, and the
    server ends a session that sits idle in a transaction: a suspended process must not block a take-over for ever. Of
    several `connections`, each is checked before use: one that was lost while nobody asked is replaced unseen.
    """

    def connected() -> psycopg.Connection:
        connection = connect(database, application_name="stormproof ledger", autocommit=True)
        connection.execute(f"set lock_timeout = {int(lock_timeout_s * 1000)}".encode())
        connection.execute(f"set idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'".encode())
        if statement_timeout_s is not None:
            connection.execute(f"set statement_timeout = {int(statement_timeout_s * 1000)}".encode())
        connection.autocommit = False
        return connection

    def explain(context: Any) -> None:
        said = explained(context.original_exception, database, "the ledger", statement=context.statement)
        if said is not None:
            raise said from context.original_exception

    engine = sa.create_engine(
        database.sqlalchemy_url,
        creator=connected,
        pool_size=connections,
        max_overflow=1,
        pool_pre_ping=connections > 1,
    )
    event.listen(engine, "handle_error", explain)
    return engine


def require_schema(engine: sa.Engine, database: Database, *, own: bool, makes: bool = True) -> None:
    """Require that the ledger's schema is the one that this version needs.

    A missing schema is made if `makes` is true: nothing is there that could be lost. `own`: the database is the embedded
    one.

    Raises:
        SettingsError: another version's schema is there, or none, and none is to be made.
        StoreUnavailable: the database does not answer.
        MissingRight: the role may not read the schema, or not make it.
    """
    try:
        found = state(engine)
    except OperationalError as error:
        reason = database.without_secrets(str(error.orig)).strip().splitlines()[0]
        raise StoreUnavailable(
            f"the database {database.redacted} does not answer: {reason}; check with: stormproof doctor"
        ) from error
    if found.up_to_date:
        return
    if found.current is None and not makes:
        where = "; an embedded Postgres belongs to one folder: is this the project's?" if own else ""
        raise SettingsError(
            f"the database {database.redacted} has no Stormproof schema yet: the first stormproof run or stormproof queue "
            f"put makes it, or, as a role that may: stormproof ledger migrate{where}",
            current=None,
            head=found.head,
        )
    if found.current is None:
        migrate(engine)
        return
    raise SettingsError(
        f"the database {database.redacted} has schema revision {found.current}, this version needs {found.head}; "
        f"{found.advice}",
        current=found.current,
        head=found.head,
    )


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
        """One transaction, without the fence.

        Raises:
            StoreUnavailable: the connection was lost, or the database takes no writes. After a lost answer to COMMIT the
                outcome is unknown: read again.
            LockTimeout: a lock could not be had in time.
        """
        try:
            with self._engine.connect() as connection:
                connection.begin()
                yield connection
                connection.commit()
        except DBAPIError as error:
            known = known_error(error)
            if known is None:
                raise
            if type(known) is StoreUnavailable and known.details["sqlstate"] not in (READ_ONLY, IN_RECOVERY):
                self._on_lost()
            raise known from error

    def drop_connections(self) -> None:
        """Close the connections; the next transaction opens a new one. SQLite in memory is its connection, and stays."""
        self._on_lost()
        if self.is_postgres:
            self._engine.dispose()

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


def known_error(error: DBAPIError) -> StormproofError | None:
    """The error to raise in place of the ledger's database's own; None for one that only a fault of ours explains."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    if sqlstate in _SCHEMA_MISSING:
        return SettingsError(
            "the database has no Stormproof schema, or another version's; see: stormproof doctor",
            sqlstate=sqlstate,
        )
    if sqlstate in (READ_ONLY, IN_RECOVERY):
        return StoreUnavailable(
            "the ledger's database takes no writes (default_transaction_read_only is on there, or it is a standby): "
            f"{_first_line(error.orig)}; let it take writes, or name another one in STORMPROOF_DATABASE_URL",
            sqlstate=sqlstate,
        )
    if sqlstate == LOCK_NOT_AVAILABLE:
        return LockTimeout(
            "another session of the ledger's database holds a lock for too long; see pg_locks", sqlstate=sqlstate
        )
    if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError) or may_pass(error.orig):
        return StoreUnavailable(
            f"the ledger's database does not answer ({type(error.orig).__name__}: {_first_line(error.orig)})",
            sqlstate=sqlstate,
        )
    return None


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else ""
