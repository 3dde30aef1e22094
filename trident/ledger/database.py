"""The ledger's database: its engine, its schema, and one open transaction in it, with errors that say what to do.

Production runs on Postgres; an SQLite database serves unit tests with the same statements. A statement that every batch
runs is made into SQL once: making one costs the driver more than Postgres takes to run it.

A form of the page is good for one decision, whichever process gets it, and however often it is sent: its secret is recorded,
as a digest, in the transaction of the decision itself. Either both are there or neither is. So a page that was started anew,
or another one that serves the same ledger, can tell whether a form was acted on.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, cast

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import Json, SettingsError, StoreUnavailable, StormproofError, UsageError
from stormproof.core.base.message import MessageFailure
from stormproof.core.postgres.database import Database, connect, may_pass
from stormproof.core.postgres.rights import explained
from stormproof.migrations import migrate, state
from stormproof.trident.ledger import tables
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import Event, Run, names_of, to_event
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction


class ConfirmedBefore(UsageError):
    """The form was confirmed before, and acted on; nothing was done now."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A form that was acted on: which decision, by whom, when."""

    action: str
    by: str
    at: datetime

    def __str__(self) -> str:
        return (
            f"It was confirmed before, by {self.by} at {self.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, and done then"
        )


@dataclass(frozen=True, slots=True)
class Confirmation:
    """One sending of a form. A decision that takes several transactions records it in the first that changes something."""

    digest: str
    action: str
    by: str
    click: str = field(default_factory=lambda: secrets.token_hex(16))

    @staticmethod
    def of(secret: str, action: str, by: str) -> Confirmation:
        """By the form's secret."""
        return Confirmation(digest_of(secret), action, by)

    def take(self, connection: sa.Connection, incarnation: str, now: datetime) -> None:
        """Record it in this transaction, which holds up another one that does the same until it has ended.

        Raises:
            ConfirmedBefore: another sending of the form was recorded.
        """
        values = {**asdict(self), "incarnation": incarnation, "at": now}
        connection.execute(postgresql.insert(t.confirmation).values(values).on_conflict_do_nothing())
        row = connection.execute(sa.select(t.confirmation).where(t.confirmation.c.digest == self.digest)).one()
        if row.click != self.click:
            raise ConfirmedBefore(f"{Confirmed(row.action, row.by, row.at)}: nothing was done now")


def digest_of(secret: str) -> str:
    """Under which a form is known; nobody can confirm a form by what the ledger holds."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def confirmed(connection: sa.Connection, secret: str) -> Confirmed | None:
    """What is recorded of a form; None: it was never acted on, or the record was pruned."""
    row = connection.execute(
        sa.select(t.confirmation).where(t.confirmation.c.digest == digest_of(secret))
    ).one_or_none()
    return None if row is None else Confirmed(row.action, row.by, row.at)


@dataclass(frozen=True, slots=True)
class Tx:
    """One open ledger transaction of one run, under the fence; `Ledger.transaction` opens it."""

    connection: sa.Connection
    run: Run
    clock: Clock
    confirmation: Confirmation | None = None
    """The page's form that was confirmed, where a decision on the page opened it."""

    def confirm(self) -> None:
        """Record that the form was acted on; every function that records a decision calls it, in its transaction.

        Raises:
            ConfirmedBefore: it was acted on before.
        """
        if self.confirmation is not None:
            self.confirmation.take(self.connection, self.run.incarnation, self.clock.now())

    @property
    def raw(self) -> object:
        """The driver's own connection (psycopg's on Postgres), for a source that joins the transaction."""
        return self.connection.connection.driver_connection

    def record(self, events: Iterable[Event]) -> None:
        """Append events."""
        now = self.clock.now()
        rows = [
            {
                **{name: getattr(e, name) for name in names_of(Event)},
                "incarnation": self.run.incarnation,
                "at": now,
                "kind": e.kind.value,
                "action": None if e.action is None else e.action.value,
            }
            for e in events
        ]
        if rows:
            self.connection.execute(sa.insert(t.event), rows)

    def decided(
        self,
        action: OperatorAction,
        *,
        by: str,
        why: str,
        about: str = "",
        txid: int | None = None,
        sink: str | None = None,
        message: str | None = None,
        error: str | None = None,
        detail: Mapping[str, Json] | None = None,
    ) -> None:
        """Record what an operator decided, who and why. Its prose is the action, what it is `about`, and who decided.

        Raises:
            ConfirmedBefore: it was decided by a form of the page that was acted on before.
        """
        self.confirm()
        words = " ".join([*action.value.split("_"), *([about] if about else []), "by", by])
        whole: dict[str, Json] = {"action": action.value, "by": by, "why": why, **(detail or {})}
        event = Event(
            EventKind.OPERATOR, action, txid=txid, sink=sink, message=message, reason=words, error=error, detail=whole
        )
        self.record([event])

    def events(self, txid: int, *kinds: EventKind) -> list[Event]:
        """A batch's events of these kinds, in order."""
        c = t.event.c
        mine = c.incarnation == self.run.incarnation, c.txid == txid, c.kind.in_([kind.value for kind in kinds])
        return [to_event(row) for row in self.connection.execute(sa.select(t.event).where(*mine).order_by(c.id))]

    def failures(self, txid: int) -> list[MessageFailure]:
        """The messages that failed in a batch or were returned, in any of its attempts; recorded once, at its end."""
        return [event.to_failure() for event in self.events(txid, EventKind.FAILURE, EventKind.RETURNED)]

    def blocking_sink(self, txid: int) -> str | None:
        """The sink at which a batch was blocked last."""
        found = self.events(txid, EventKind.BLOCKED)
        return found[-1].sink if found else None

    def kept_messages(self, txid: int) -> dict[str, str]:
        """The sinks at which an operator gave up a batch's rows and kept its messages; with who decided, and why."""
        return {
            one.sink: f"skipped by {one.detail['by']}: {one.detail['why']}"
            for one in self.events(txid, EventKind.OPERATOR)
            if one.sink is not None and one.detail is not None and one.detail.get("messages") is True
        }


@dataclass(frozen=True, slots=True)
class UnfencedTx:
    """One open ledger transaction without the fence, for an operator's decision on several topologies."""

    connection: sa.Connection
    clock: Clock

    def of(self, run: Run) -> Tx:
        """The same transaction, for one topology."""
        return Tx(self.connection, run, self.clock)


class _Text(NamedTuple):
    """A statement's SQL, the values that are part of it, and how others are given to the driver."""

    sql: str
    fixed: Mapping[str, Any]
    processors: Mapping[str, Callable[[Any], Any] | None]


def given(name: str) -> sa.BindParameter[Any]:
    """A value that `Statement.run` is given under this name, which may be a column's."""
    return sa.bindparam(f"given_{name}")


class Statement:
    """A query, or changes of which none needs another's.

    On Postgres several changes are one statement, and one round trip; elsewhere one follows the other.
    """

    def __init__(self, *parts: sa.Select[Any] | sa.Insert | sa.Update) -> None:
        self._parts = parts
        self._text: _Text | None = None

    def run(self, connection: sa.Connection, **values: Any) -> sa.CursorResult[Any]:
        """Run it with values for all that is `given`; returns the result of the last part."""
        if connection.dialect.name != "postgresql":
            named = {f"given_{name}": value for name, value in values.items()}
            return [connection.execute(part, named) for part in self._parts][-1]
        if self._text is None:
            self._text = self._made(connection.dialect)
        sql, fixed, processors = self._text
        parameters = dict(fixed)
        for name, value in values.items():
            process = processors[f"given_{name}"]
            parameters[f"given_{name}"] = value if process is None else process(value)
        return connection.exec_driver_sql(sql, parameters)

    def _made(self, dialect: sa.Dialect) -> _Text:
        *others, last = self._parts
        for number, part in enumerate(others):
            last = last.add_cte(part.cte(f"part_{number}"))
        compiled = last.compile(dialect=dialect)
        processors = {
            name: bind.type.dialect_impl(dialect).bind_processor(dialect) for bind, name in compiled.bind_names.items()
        }
        fixed = {name: bind.value for bind, name in compiled.bind_names.items() if not bind.required}
        return _Text(str(compiled), fixed, processors)


# ---- the connection and the schema

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


# ---- a ledger in memory

_STATEMENTS: Final[dict[object, object]] = {}
"""SQLAlchemy's compiled statements, shared by all of these databases: else each one would compile every statement."""


class _ClosedWithItsEngine(sqlite3.Connection):
    """From Python 3.13 on, a connection warns where it is still open when it is no longer used."""

    def __del__(self) -> None:
        self.close()


def memory_ledger_engine() -> sa.Engine:
    """A new database in memory with the ledger's tables. It lasts as long as the engine."""
    model, content = _model()

    def connect() -> DBAPIConnection:
        connection = sqlite3.connect(":memory:", check_same_thread=False, factory=_ClosedWithItsEngine)
        connection.deserialize(content)
        return cast("DBAPIConnection", connection)

    engine = sa.Engine(sa.pool.StaticPool(connect), model.dialect, model.url)
    return engine.execution_options(compiled_cache=_STATEMENTS)


@functools.cache
def _model() -> tuple[sa.Engine, bytes]:
    """An engine whose dialect the others share, and a database with the ledger's empty tables. Made once a process."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    with engine.execution_options(schema_translate_map={tables.SCHEMA: None}).begin() as connection:
        tables.metadata.create_all(connection)
    with engine.connect() as connection:
        held: sqlite3.Connection | None = connection.connection.driver_connection
        assert held is not None
        return engine, held.serialize()
