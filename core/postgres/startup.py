"""How a connection starts: time limits are lifted; a pooler or a database that cannot serve is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq

from stormproof.core.errors import SettingsError

T = TypeVar("T")

ENCODING: Final = "UTF8"

_LIMITS: Final = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")
_TRIED: Final = ((*_LIMITS, "transaction_timeout"), _LIMITS, ())
"""Limits to lift, until the server takes them: before Postgres 17 it knows no transaction_timeout, and a pooler may forbid
options altogether."""
_FORBIDS_OPTIONS: Final = ("unsupported startup parameter", "unrecognized configuration parameter")
"""Of pgbouncer, unless its ignore_startup_parameters names them; of a pooler that reads options as settings of its own."""
_ROUNDS: Final = 4


_taken = dict[tuple[str | None, ...], int]()
"""Which of `_TRIED` was taken, by server: so that each connection of this process but the first costs one try."""


def started(parameters: Mapping[str, str], start: Callable[[dict[str, str]], T], errors: type[Exception]) -> T:
    """What `start` makes of libpq's parameters, with the server's time limits lifted by `options`.

    A limit that a role or a database sets by default, of a millisecond perhaps, cancels even the statement that would
    lift it. The user's own options come after ours, and win. Where a pooler forbids options, it starts without ours.
    `errors` is what `start` raises where there is no connection.
    """
    server = tuple(parameters.get(key) for key in ("host", "hostaddr", "port", "service"))
    for tried in range(_taken.get(server, 0), len(_TRIED)):
        try:
            made = start(_lifted(parameters, _TRIED[tried]))
        except errors as error:
            if not _TRIED[tried] or not any(text in str(error) for text in _FORBIDS_OPTIONS):
                raise
        else:
            _taken[server] = tried
            return made
    raise AssertionError("the last try lifts nothing, and raises what it meets")


def _lifted(parameters: Mapping[str, str], limits: tuple[str, ...]) -> dict[str, str]:
    known = dict(parameters)
    options = known.get("options")
    if options is None:
        if not limits or "service" in known:
            return known  # only libpq reads the service's file, and options of ours would replace those in it
        defaults = {option.keyword: option.val for option in pq.Conninfo.get_defaults()}  # PGOPTIONS, and PGSERVICE's
        options = (defaults.get(b"options") or b"").decode()
    return {**known, "options": " ".join([*(f"-c {name}=0" for name in limits), options]).strip()}


_session_pools = set[tuple[int, str]]()


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


def require_encoding(connection: psycopg.Connection[Any], where: str) -> None:
    """Refuse a database (`where`, without secrets) that cannot hold every text: payloads, names and errors are UTF-8.

    Raises:
        SettingsError: its encoding is another one.
    """
    found = connection.info.parameter_status("server_encoding")
    if found not in (ENCODING, None):
        raise SettingsError(
            f"the database {where} has encoding {found}; Stormproof needs {ENCODING}, since other encodings "
            "cannot hold every message. Make one, and name it instead: CREATE DATABASE name ENCODING 'UTF8' TEMPLATE "
            "template0 LOCALE 'C'",
            encoding=found,
        )
