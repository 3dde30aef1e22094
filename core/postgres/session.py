"""A connection of ours: one process's alone, and set up so that no default of a role or a database breaks a promise."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

import psycopg
from psycopg.rows import TupleRow

from stormproof.core.errors import UsageError
from stormproof.core.forks import process_life

_SETTINGS: Final = {
    # Else a COMMIT that has returned may be lost in a crash: a prepared batch, a put message, a sink's rows.
    "synchronous_commit": "on",
    # What waits for a lock reads again afterwards: an older snapshot would fail the statement, or miss what was written.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    # A batch takes as long as it takes; what waits for a lock has a bound of its own.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    # How values and names are read and written as text: floats in all their digits, arrays with NULL, types' names.
    "extra_float_digits": "1",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    # A short statement is not worth a compiler.
    "jit": "off",
}
"""What our sessions set where role, database or server have another default. Options in the URL are a user's own word."""

_DURABLE: Final = ("on", "local", "remote_write", "remote_apply")

_SET_UP: Final = """
    select set_config(s.name, w.value, false)
    from unnest(%s::text[], %s::text[]) as w (name, value)
    join pg_catalog.pg_settings s on s.name = w.name
    where s.source <> 'client' and s.context in ('user', 'superuser') and s.setting <> w.value
    and not (s.name = 'synchronous_commit' and s.setting = any(%s::text[]))
    union all
    select pg_catalog.set_config('DateStyle', 'ISO', false)
    union all
    select pg_catalog.set_config('IntervalStyle', 'postgres', false)
"""


class OwnedConnection(psycopg.Connection[TupleRow]):
    """A connection that only the process that made it can use; in a fork of it every use raises, and closing does nothing.

    A fork has the parent's socket: one byte of its own there (a ROLLBACK, or the goodbye of a close) would end up in the
    middle of the parent's transaction.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._owner = process_life()
        super().__init__(*arguments, **keywords)

    @property
    def lock(self) -> Any:
        """Psycopg's own lock, which every use of the connection takes first.

        Raises:
            UsageError: this process is a fork of the one that made the connection.
        """
        self._require_owner()
        return self._own_lock

    @lock.setter
    def lock(self, lock: Any) -> None:
        self._own_lock = lock

    def wait(self, *arguments: Any, **keywords: Any) -> Any:
        """Psycopg's own, in the process that made the connection."""
        self._require_owner()
        return super().wait(*arguments, **keywords)

    def close(self) -> None:
        """Close it, in the process that made it; nothing in a fork."""
        if process_life() == self._owner:
            super().close()

    def _require_owner(self) -> None:
        life = process_life()
        if life != self._owner:
            raise UsageError(
                f"process {life.pid} is a fork of process {self._owner.pid}, whose connection to Postgres this is: a fork "
                "must not use it; have it make its own (a PostgresQueue does so by itself), or end it by os._exit()",
                process=life.pid,
                owner=self._owner.pid,
            )


def set_up(connection: OwnedConnection, *, autocommit: bool) -> OwnedConnection:
    """Override the defaults that would break a promise, in one statement; closes the connection where that fails."""
    with ExitStack() as undo:
        undo.callback(connection.close)
        connection.execute(_SET_UP, (list(_SETTINGS), list(_SETTINGS.values()), list(_DURABLE)))
        connection.autocommit = autocommit
        undo.pop_all()
    return connection
