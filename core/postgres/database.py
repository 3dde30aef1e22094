"""A Postgres database: read from a URL or from PG* variables, shown without secrets, connected to.

A session needs this to keep our promises: no time limit, no default of a role or a database that breaks one, UTF-8;
a backend of its own, which a pooler of transactions does not give, and no use of it in a fork.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import psycopg
import sqlalchemy
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import SettingsError, StoreUnavailable, UsageError
from stormproof.core.base.machine_faults import ADVICE
from stormproof.core.base.process import process_life

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


# ---- a connection of one process: in a fork of that process every use raises, and closing does nothing
#
# A fork has the parent's socket: one byte of its own there (a ROLLBACK, or the goodbye of a close) would end up in the
# middle of the parent's transaction.


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


# ---- connection poolers such as pgbouncer: one that pools transactions or statements is refused at the first
# connection

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


DATABASE_URL_FORM: Final = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
CONNECT_TIMEOUT_S: Final = 10
SCHEMES: Final = ("postgresql", "postgres", "postgresql+psycopg")

_NO_DETAILS: Final = "no error details available"

# A connection whose other end is gone is noticed within about a minute; an answer that never comes would hold a batch.
_DEFAULTS: Final[Mapping[str, str]] = {
    "connect_timeout": str(CONNECT_TIMEOUT_S),
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "client_encoding": "UTF8",
}
_SERVER: Final = (("host", "localhost"), ("port", "5432"))
_SECRET: Final = ("password", "sslpassword", "oauth_client_secret")


@dataclass(frozen=True, slots=True, repr=False)
class Database:
    """One Postgres database, as libpq's connection parameters.

    Guarantee:
        No text form (`str`, `repr`, `redacted`, `without_password`) has a password or another secret. Picklable:
        executors receive it.
        `conninfo`, `adbc_uri` and `sqlalchemy_url` do hold the password: pass them on, never print them.

    Threads: any number may share one object, which never changes. Forks: allowed, too; it holds no connection.
    """

    parameters: tuple[tuple[str, str], ...] = field(repr=False)

    @classmethod
    def from_url(cls, url: str, *, setting: str = "STORMPROOF_DATABASE_URL") -> Database:
        """Read a ``postgres://``, ``postgresql://`` or ``postgresql+psycopg://`` URL; `setting` is named in errors.

        Raises:
            SettingsError: it is not such a URL. The text never repeats any part of what was given.
        """
        scheme, separator, rest = url.strip().partition("://")
        if not separator or scheme not in SCHEMES:
            raise SettingsError(
                f"{setting} is not a Postgres URL: it must begin with {', '.join(s + '://' for s in SCHEMES)}, "
                f"as in {DATABASE_URL_FORM}",
                setting=setting,
            )
        problem = _unsafe_characters(rest)
        parsed: dict[str, str] = {}
        if problem is None:
            try:
                parsed = {k: str(v) for k, v in conninfo_to_dict(f"postgresql://{rest}").items()}
            except psycopg.ProgrammingError:  # its text may repeat a piece of the password
                problem = "libpq cannot read it (a bad percent escape, or a parameter that it does not know)"
        if problem is None and not re.fullmatch(r"[0-9,]*", parsed.get("port", "")):
            problem = "the port is not a number"
        if problem is not None:
            raise SettingsError(
                f"{setting} cannot be read: {problem}; the form is {DATABASE_URL_FORM}", setting=setting
            )
        return cls.of(parsed)

    @classmethod
    def given(cls, where: str, database: Database | str | None) -> Database | None:
        """The database that a queue, a table or a source was given, as itself or as a URL; None where it was given none.

        Raises:
            UsageError: it is neither.
            SettingsError: its URL cannot be read; the text never repeats any part of it.
        """
        if isinstance(database, str):
            return cls.from_url(database, setting=f"{where}: database")
        if database is not None and not isinstance(database, cls):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{where}: database is a {type(database).__name__}; it must be a URL, as in {DATABASE_URL_FORM}",
                argument="database",
            )
        return database

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Database:
        """From libpq's parameters by name (host, port, user, password, dbname, ...)."""
        return cls(tuple(sorted((k, v) for k, v in parameters.items() if v)))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Database:
        """From libpq's PG* variables, read now, so that executors on other machines get the same database.

        With PGSERVICE the service file decides; in libpq, too, it beats the other variables.
        """
        if service := environment.get("PGSERVICE"):
            return cls.of({"service": service})
        known = {
            option.envvar.decode(): option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.envvar
        }
        return cls.of({known[name]: value for name, value in environment.items() if name in known})

    @property
    def conninfo(self) -> str:
        """For `psycopg.connect` and anything else on libpq. Holds the password."""
        return make_conninfo("", **dict(self.parameters))

    @property
    def adbc_uri(self) -> str:
        """For ADBC's Postgres driver, as a URI. Holds the password."""
        return f"postgresql:///?{urlencode(self.parameters, quote_via=quote, safe='')}"

    @property
    def sqlalchemy_url(self) -> sqlalchemy.URL:
        """For `sqlalchemy.create_engine`, with psycopg. Holds the password (`str` hides only that)."""
        rest = dict(self.parameters)
        username, password, name = (rest.pop(key, None) for key in ("user", "password", "dbname"))
        query: dict[str, str | tuple[str, ...]] = {}
        host, port = rest.get("host", ""), rest.get("port", "")
        if "," in host:  # SQLAlchemy wants several hosts as host:port each
            hosts, ports = host.split(","), port.split(",") if port else [""]
            ports = ports * len(hosts) if len(ports) == 1 else ports
            query["host"] = tuple(f"{h}:{p}" if p else h for h, p in zip(hosts, ports, strict=True))
            rest = {k: v for k, v in rest.items() if k not in ("host", "port")}
        return sqlalchemy.URL.create(
            "postgresql+psycopg", username=username, password=password, database=name, query={**rest, **query}
        )

    @property
    def redacted(self) -> str:
        """User, host, port and name, or the service, as a URL for people; nothing else, so no secret."""
        known = dict(self.parameters)
        shown = ("service",) if "service" in known else ("user", "host", "port", "dbname")
        return Database.of({key: known.get(key, "") for key in shown}).url()

    def dataset(self, table: str) -> DatasetName:
        """A table (``SCHEMA.TABLE``) as others call it; neither user nor password is part of it.

        Of several hosts it is the first one; a socket's folder is written as in libpq's URLs.
        """
        known = dict(self.parameters)
        if "service" in known:
            return DatasetName(f"postgres://{known['service']}", table)
        host, port = (known.get(key, default).partition(",")[0] for key, default in _SERVER)
        shown = f"[{host}]" if ":" in host else quote(host or _SERVER[0][1], safe="")
        place = f"{shown}:{port or _SERVER[1][1]}"
        return DatasetName(f"postgres://{place}", f"{known.get('dbname') or known.get('user', 'postgres')}.{table}")

    @property
    def without_password(self) -> str:
        """All of it but the secrets, as a URL that `from_url` reads: for a record from which it is opened again."""
        known = [(key, value) for key, value in self.parameters if key not in _SECRET]
        return f"postgresql:///?{urlencode(known, quote_via=quote, safe='')}"

    @property
    def secrets(self) -> frozenset[str]:
        """The parameters that are never shown."""
        return frozenset(_SECRET)

    def url(self, *, show_password: bool = False) -> str:
        """All of it as a URL for people and for other programs; secrets are `***` unless they are asked for."""
        known = {k: v if show_password or k not in _SECRET else "***" for k, v in self.parameters}
        safe = "" if show_password else "*"
        user, password = (quote(known.pop(key, ""), safe=safe) for key in ("user", "password"))
        host, port, name = known.pop("host", ""), known.pop("port", ""), quote(known.pop("dbname", ""), safe="")
        if not re.fullmatch(r"[A-Za-z0-9.-]*", host):  # a socket's folder, several hosts, an IPv6 address
            known |= {"host": host, **({"port": port} if port else {})}
            host = port = ""
        who = f"{user}{f':{password}' if password else ''}@" if user or password else ""
        query = f"?{urlencode(known, quote_via=quote, safe='/*,')}" if known else ""
        return f"postgresql://{who}{host}{f':{port}' if port else ''}/{name}{query}"

    def with_name(self, name: str) -> Database:
        """Another database of the same server."""
        return Database.of({**dict(self.parameters), "dbname": name})

    def without_secrets(self, text: str) -> str:
        """`text` with every secret of this database replaced by ``***``, plain or percent-encoded."""
        for key, value in self.parameters:
            if key in _SECRET:
                text = text.replace(value, "***").replace(quote(value, safe=""), "***")
        return text

    def __repr__(self) -> str:
        return f"Database({self.redacted})"

    def __str__(self) -> str:
        return self.redacted


def _unsafe_characters(rest: str) -> str | None:
    """What is wrong where an unencoded ``@``, ``/`` or ``?`` would end a password, and errors show its rest as a host."""
    before, at, after = rest.partition("@")
    if at and ("@" in after or "/" in before or "?" in before):
        return "a character of the password or the user is not percent-encoded (@ is %40, / is %2F, ? is %3F)"
    return None


# Connection lost or refused; state of a transaction (read-only for a while, idle for too long); conflict; too few
# resources; object in use; shut down or cancelled; error of the system.
_MAY_PASS: Final = ("08", "25", "40", "53", "55", "57", "58")


def may_pass(error: object) -> bool:
    """Whether an error of Postgres may pass by itself, by its SQLSTATE: a standby that is not promoted yet, a database that
    is read-only for a while, too many connections, a server that shuts down.
    """
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return state is not None and state[:2] in _MAY_PASS


def connect(database: Database, *, application_name: str, autocommit: bool = False) -> psycopg.Connection:
    """Connect, with a bounded wait, keep-alives and UTF-8, unless the database's own parameters say otherwise.

    Defaults of the role or the database that would break a promise are overridden, such as `synchronous_commit = off`
    (`stormproof.core.postgres.database`). No lock_timeout is set: whoever takes a lock knows how long to wait for it.

    Threads: one at a time in a transaction. Forks: a fork can neither use nor close the connection.

    Raises:
        StoreUnavailable: no connection can be made (the server is down, unknown, or refuses); without secrets.
        SettingsError: the database is not in UTF-8, or it is a pooler that gives another backend in each transaction.
    """
    parameters = {**_DEFAULTS, **dict(database.parameters), "application_name": application_name}

    def opened(known: Mapping[str, str]) -> OwnedConnection:
        return OwnedConnection.connect(make_conninfo("", **known), autocommit=True)

    def start(known: Mapping[str, str]) -> OwnedConnection:
        connection = opened(known)
        with ExitStack() as undo:
            undo.callback(connection.close)
            require_encoding(connection, database.redacted)
            require_own_backend(connection, partial(opened, known), database.redacted)
            override_defaults(connection)
            undo.pop_all()
        connection.autocommit = autocommit
        return connection

    try:
        return started(parameters, start, psycopg.OperationalError)
    except psycopg.OperationalError as error:
        lines = (line.strip() for line in database.without_secrets(str(error)).splitlines())
        text = " ".join(
            line for line in lines if line and not line.startswith("Is the server running")
        )  # we ask that, too
        if _NO_DETAILS in text and (own := _of_this_machine()) is not None:
            text = own
        state = error.sqlstate
    # Raised outside the handler: the driver's own error, with what it may hold, is neither cause nor context of this.
    raise StoreUnavailable(
        f"no connection to Postgres at {database.redacted}: {text}; check that the server runs there and that "
        "STORMPROOF_DATABASE_URL (or the PG* variables) names it; see what is wrong with: stormproof doctor",
        database=database.redacted,
        sqlstate=state,
    )


def _of_this_machine() -> str | None:
    """Why this machine cannot open a further file, if so: libpq gives no details where it runs out of handles."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return f"{error.strerror}: {ADVICE.get(error.errno or 0, 'see the logs of this machine')}"
    return None
