"""The Postgres that a source lives in: statements in a transaction of its own, or in one that it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg.rows import tuple_row

from stormproof.core.errors import StoreUnavailable, UsageError
from stormproof.core.postgres.database import Database, connect, may_pass

LOCK_WAIT_S: Final = 10
IDLE_IN_TRANSACTION_S: Final = 30


def query(cursor: psycopg.Cursor[Any], text: str, *parameters: object) -> psycopg.Cursor[Any]:
    """Run a statement whose text was put together from our own words, checked names and numbers."""
    return cursor.execute(text.encode(), parameters or None)


class StoreConnection:
    """One connection of a source, made at its first use.

    `kind` and `name` say whose it is ("queue", "lines"), in errors and in their details; `missing` says what makes a table
    that is not there. Pickles without the connection.
    """

    def __init__(self, kind: str, name: str, *, application: str, missing: str) -> None:
        self._kind = kind
        self._name = name
        self._application = application
        self._missing = missing
        self._connection: psycopg.Connection | None = None
        self._identity: tuple[str, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def apart(self) -> StoreConnection:
        """The same, with a connection of its own."""
        return copy.copy(self)

    @contextmanager
    def transaction(self, database: Callable[[], Database], tx: object | None) -> Generator[psycopg.Cursor[Any]]:
        """A cursor in `tx`, or in a transaction of our own in `database`, which is committed at the end.

        Raises:
            StoreUnavailable: the database cannot be reached, or a lock was not to be had; its answer may be lost.
            UsageError: `tx` is no psycopg connection, or a table is missing.
        """
        who = f"{self._kind} {self._name}"
        if tx is not None and not isinstance(tx, psycopg.Connection):
            raise UsageError(f"{who}: tx is a {type(tx).__name__}, not a psycopg connection")
        try:
            if tx is not None:
                with tx.cursor(row_factory=tuple_row) as cursor:
                    yield cursor
                return
            connection = self._connected(database())
            with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
                yield cursor
        except psycopg.errors.UndefinedTable as error:
            raise UsageError(
                f"{who} at {database().redacted}: a table is missing ({error.diag.message_primary}); {self._missing}",
                **{self._kind: self._name},
            ) from error
        except psycopg.Error as error:
            if not isinstance(error, psycopg.OperationalError) and not may_pass(error):
                raise
            raise StoreUnavailable(
                f"{who} at {database().redacted}: {database().without_secrets(str(error)).strip()}",
                **{self._kind: self._name},
                sqlstate=error.sqlstate,
            ) from error

    def joins(self, database: Callable[[], Database], tx: object) -> bool:
        """Whether `tx` is a transaction in this very server and database."""
        if not isinstance(tx, psycopg.Connection):
            return False
        if self._identity is None:
            with self.transaction(database, None) as cursor:
                self._identity = _identity_of(cursor)
        with tx.cursor(row_factory=tuple_row) as cursor:
            return _identity_of(cursor) == self._identity

    def close(self) -> None:
        """Let the connection go; the next use makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self, database: Database) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            connection = connect(
                database, application_name=f"stormproof {self._application} {self._name}", autocommit=True
            )
            connection.execute(f"set lock_timeout = '{LOCK_WAIT_S}s'".encode())
            # A process that is paused inside a transaction must not hold up the others for ever.
            connection.execute(f"set idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'".encode())
            self._connection = connection
        return self._connection


def _identity_of(cursor: psycopg.Cursor[Any]) -> tuple[str, str]:
    """Server and database that a connection is in."""
    row = query(cursor, "select (pg_control_system()).system_identifier::text, current_database()").fetchone()
    assert row is not None
    return row[0], row[1]
