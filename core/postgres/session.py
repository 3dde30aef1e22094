"""What a session needs to keep our promises: no time limit, no default of a role or a database that breaks one, UTF-8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq

from stormproof.core.base.errors import SettingsError

T = TypeVar("T")

ENCODING: Final = "UTF8"

_LIMITS: Final = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout")
_TRIED: Final = ((*_LIMITS, "transaction_timeout"), _LIMITS, ())
"""Limits to lift, until the server takes them: before Postgres 17 it knows no transaction_timeout, and a pooler may forbid
options altogether."""
_FORBIDS_OPTIONS: Final = ("unsupported startup parameter", "unrecognized configuration parameter")
"""Errors of pgbouncer, unless its ignore_startup_parameters names them, and of a pooler that takes options for its own
settings."""
_taken = dict[tuple[str | None, ...], int]()
"""Which of `_TRIED` each server took, so that only the first connection of this process needs several tries."""

_SETTINGS: Final = {
    # Else a COMMIT that has returned may be lost in a crash: a prepared batch, a put message, a sink's rows.
    "synchronous_commit": "on",
    # What waits for a lock reads again afterwards: an older snapshot would fail the statement, or miss what was written.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    # A batch takes as long as it takes; what waits for a lock has a bound of its own.
    **dict.fromkeys(_TRIED[0], "0"),
    # How values and names are read and written as text: floats in all their digits, arrays with NULL, types' names.
    "extra_float_digits": "1",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    # A short statement is not worth a compiler.
    "jit": "off",
}
"""What our sessions set where role, database or server have another default. Options in the URL are the user's choice and
stay."""

_DURABLE: Final = ("on", "local", "remote_write", "remote_apply")

_OVERRIDE: Final = """
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


def override_defaults(connection: psycopg.Connection[Any]) -> None:
    """Override the defaults of role, database and server that would break a promise, in one statement."""
    connection.execute(_OVERRIDE, (list(_SETTINGS), list(_SETTINGS.values()), list(_DURABLE)))


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
