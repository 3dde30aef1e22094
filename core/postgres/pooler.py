"""Connection poolers such as pgbouncer: one that pools transactions or statements is refused at the first connection."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

import psycopg

from stormproof.core.errors import SettingsError

_ROUNDS: Final = 4

_session_pools = set[tuple[int, str]]()
"""Poolers that this process has found to pool sessions, by process id and address."""


def require_own_backend(
    connection: psycopg.Connection[Any], again: Callable[[], psycopg.Connection[Any]], where: str
) -> None:
    """Refuse a pooler that gives another backend in each transaction: `connection` leads to it, `where` names it.

    The server tells a client its backend's number when it connects; a pooler tells one that it made up. Only behind a
    pooler a second connection is opened by `again`, once in each process, and both are asked in turn: a session that
    is ours alone answers the same each time, and never the other's number.

    Raises:
        SettingsError: it pools transactions or statements.
    """
    if connection.info.backend_pid == _backend(connection) or (os.getpid(), where) in _session_pools:
        return
    with closing(again()) as other:
        found = [(_backend(connection), _backend(other)) for _ in range(_ROUNDS)]
    if len(set(found)) == 1 and found[0][0] != found[0][1]:
        _session_pools.add((os.getpid(), where))
        return
    raise SettingsError(
        f"{where} is a connection pooler that gives another backend in each transaction; Stormproof needs a session of its "
        "own for its settings, locks and fencing. Set pool_mode = session there (pgbouncer), or name the server itself in "
        "STORMPROOF_DATABASE_URL",
        database=where,
        pool_mode="transaction",
    )


def _backend(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])
