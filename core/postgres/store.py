"""Connections of a source to its database: statements in a transaction of its own, or in one that it is given."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from stormproof.core.base.errors import StoreUnavailable, UsageError
from stormproof.core.base.process import ProcessLife, process_life
from stormproof.core.postgres.database import Database, connect, may_pass
from stormproof.core.postgres.rights import explained, note_statement

LOCK_WAIT_S: Final = 10
IDLE_IN_TRANSACTION_S: Final = 30
IDLE_MAX: Final = 4


def query(cursor: psycopg.Cursor[Any], text: str, *parameters: object) -> psycopg.Cursor[Any]:
    """Run a statement whose text was made of our own words, checked names and numbers."""
    try:
        return cursor.execute(text.encode(), parameters or None)
    except psycopg.errors.InsufficientPrivilege as error:
        note_statement(error, text)
        raise


class StoreConnection:
    """Connections of a source to its database, each made when it is needed: one for each transaction that runs.

    `kind` and `name` say whose they are ("queue", "lines"), in errors and in their details; `missing` says how to make a
    missing table. Pickles without connections.

    Threads: any number may begin a transaction, and none is ever inside another's. Forks: a fork makes connections of its
    own, and leaves its parent's alone. Between transactions `IDLE_MAX` connections are kept.
    """

    def __init__(self, kind: str, name: str, *, application: str, missing: str) -> None:
        self._kind = kind
        self._name = name
        self._application = application
        self._missing = missing
        self._idle: dict[ProcessLife, deque[psycopg.Connection]] = {}
        self._identity: tuple[str, str] | None = None
        self._joined = WeakKeyDictionary[psycopg.Connection, bool]()  # a connection never changes its database

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_joined"} | {"_idle": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _joined=WeakKeyDictionary[psycopg.Connection, bool]())

    def apart(self) -> StoreConnection:
        """The same, with connections of its own."""
        return copy.copy(self)

    @contextmanager
    def transaction(self, database: Callable[[], Database], tx: object | None) -> Generator[psycopg.Cursor[Any]]:
        """A cursor in `tx`, or in a transaction of our own in `database`, which is committed at the end.

        Raises:
            StoreUnavailable: the database cannot be reached, or a lock took too long; its answer may be lost.
            UsageError: `tx` is no psycopg connection, or a table is missing.
            MissingRight: the role may not do it.
        """
        who = f"{self._kind} {self._name}"
        if tx is not None and not isinstance(tx, psycopg.Connection):
            raise UsageError(f"{who}: tx is a {type(tx).__name__}, not a psycopg connection")
        try:
            if tx is not None:
                with tx.cursor(row_factory=tuple_row) as cursor:
                    yield cursor
                return
            with ExitStack() as stack:
                connection = self._begun(database(), stack)
                yield stack.enter_context(connection.cursor(row_factory=tuple_row))
        except psycopg.errors.UndefinedTable as error:
            raise UsageError(
                f"{who} at {database().redacted}: a table is missing ({error.diag.message_primary}); {self._missing}",
                **{self._kind: self._name},
            ) from None
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as error:
            raise explained(error, database(), who) or error from error
        except psycopg.errors.ProgramLimitExceeded as error:
            raise UsageError(  # no wait mends it
                f"{who} at {database().redacted}: a name is too long for the database ({error.diag.message_primary}); give "
                "it a shorter one",
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
        known = self._joined.get(tx)
        if known is None:
            if self._identity is None:
                with self.transaction(database, None) as cursor:
                    self._identity = _identity_of(cursor)
            with tx.cursor(row_factory=tuple_row) as cursor:
                known = self._joined[tx] = _identity_of(cursor) == self._identity
        return known

    def close(self) -> None:
        """Close the idle connections; one in use is closed when its transaction ends. The next use makes another."""
        idle = self._idle.pop(process_life(), None)
        while idle:
            idle.popleft().close()

    def _begun(self, database: Database, stack: ExitStack) -> psycopg.Connection:
        """A connection inside a new transaction, which ends with `stack`.

        BEGIN fails on a connection that went stale while idle, when nothing is decided yet: then all idle ones are closed,
        and a new one is made.
        """
        while True:
            idle = self._idle.setdefault(process_life(), deque())  # in atomic steps: a lock might be held at a fork
            try:
                connection = idle.pop()
            except IndexError:
                return self._enter(self._connect(database), idle, stack)
            with suppress(psycopg.OperationalError):
                return self._enter(connection, idle, stack)
            self.close()

    def _enter(
        self, connection: psycopg.Connection, idle: deque[psycopg.Connection], stack: ExitStack
    ) -> psycopg.Connection:
        with ExitStack() as entered:
            entered.callback(self._put_back, connection, idle)
            entered.enter_context(connection.transaction())
            stack.push(entered.pop_all())
        return connection

    def _put_back(self, connection: psycopg.Connection, idle: deque[psycopg.Connection]) -> None:
        is_whole = connection.pgconn.transaction_status == TransactionStatus.IDLE
        if is_whole and len(idle) < IDLE_MAX and self._idle.get(process_life()) is idle:
            idle.append(connection)
        else:
            connection.close()

    def _connect(self, database: Database) -> psycopg.Connection:
        application = f"stormproof {self._application} {self._name}"
        connection = connect(database, application_name=application, autocommit=True)
        with ExitStack() as undo:
            undo.callback(connection.close)
            connection.execute(f"set lock_timeout = '{LOCK_WAIT_S}s'".encode())
            # A process that is paused inside a transaction must not block the others for ever.
            connection.execute(f"set idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'".encode())
            undo.pop_all()
        return connection


def _identity_of(cursor: psycopg.Cursor[Any]) -> tuple[str, str]:
    """Server and database that a connection is in."""
    row = query(cursor, "select (pg_control_system()).system_identifier::text, current_database()").fetchone()
    assert row is not None
    return row[0], row[1]
