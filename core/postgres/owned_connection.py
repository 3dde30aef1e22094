"""A connection of one process: in a fork of that process every use raises, and closing does nothing.

A fork has the parent's socket: one byte of its own there (a ROLLBACK, or the goodbye of a close) would end up in the
middle of the parent's transaction.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import TupleRow

from stormproof.core.errors import UsageError
from stormproof.core.forks import process_life


class OwnedConnection(psycopg.Connection[TupleRow]):
    """A connection that only the process that made it can use."""

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
