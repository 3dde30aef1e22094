"""The connection of one sink to its database: made when it is needed, made anew after a loss; Postgres's errors as ours; and
the sink's own tables there: fence, backends, guard and evidence. By the fence an older driver is kept from writing. Which
table a name stands for is asked before any sink is opened: two sinks of one topology must not share a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final, LiteralString, NamedTuple

import psycopg

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Fenced, SettingsError, SinkRefused, StoreUnavailable, StormproofError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import TableKey
from stormproof.core.postgres.database import Database, connect, may_pass
from stormproof.core.postgres.rights import explained
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.postgres.refusals import is_of_a_row
from stormproof.sinks.postgres.table import TableName

SCHEMA: Final = "stormproof_sink"
_LOCK: Final = 0x53746F726D  # "Storm"

MINE: Final = "topology = %(topology)s and incarnation = %(incarnation)s and sink = %(sink)s"
"""The condition for the rows of one sink of one life; `mine_of` gives its parameters."""

_TABLES: Final = (
    """
    create table if not exists stormproof_sink.fence (
        topology text not null,
        incarnation text not null,
        sink text not null,
        epoch bigint not null,
        primary key (topology, incarnation, sink)
    )
    """,
    # Backends that may hold locks, with their epoch: a take-over ends older ones, so as not to wait for a paused driver.
    """
    create table if not exists stormproof_sink.backend (
        topology text not null,
        incarnation text not null,
        sink text not null,
        pid integer not null,
        backend_start timestamptz not null,
        epoch bigint not null,
        primary key (topology, incarnation, sink, pid, backend_start)
    )
    """,
    # Never pruned: it tells a repeated transaction from a new one.
    """
    create table if not exists stormproof_sink.guard (
        topology text not null,
        incarnation text not null,
        sink text not null,
        table_name text not null,
        table_id text not null,
        last_txid bigint,
        last_digest text,
        epoch bigint not null,
        updated_at timestamptz not null default now(),
        primary key (topology, incarnation, sink)
    )
    """,
    """
    create table if not exists stormproof_sink.evidence (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        rows bigint not null,
        digest text not null,
        epoch bigint not null,
        committed_at timestamptz not null default now(),
        dropped bigint not null default 0,
        content text,
        primary key (topology, incarnation, sink, txid)
    )
    """,
    # The rows that the table refused.
    """
    create table if not exists stormproof_sink.reject (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        file text not null,
        row bigint not null,
        input text not null,
        sqlstate text,
        error text not null,
        rejected_at timestamptz not null default now(),
        messages bigint[] not null default '{}',
        origins bigint[] not null default '{}',
        goes_with_others boolean not null default false,
        primary key (topology, incarnation, sink, txid, file, row)
    )
    """,
    # How many rows of an upsert changed nothing.
    """
    create table if not exists stormproof_sink.superseded (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        rows bigint not null,
        reinstated bigint not null,
        primary key (topology, incarnation, sink, txid)
    )
    """,
    # What batches changed of the table's columns.
    """
    create table if not exists stormproof_sink.schema_change (
        topology text not null,
        incarnation text not null,
        sink text not null,
        txid bigint not null,
        number integer not null,
        change text not null,
        changed_at timestamptz not null default now(),
        primary key (topology, incarnation, sink, txid, number)
    )
    """,
)

_COLUMNS: Final = {
    re.findall(r"stormproof_sink\.(\w+)", statement)[0]: frozenset(
        re.findall(r"^ +(?!primary|create)(\w+) ", statement, re.M)
    )
    for statement in _TABLES
}
"""The columns of each table."""
_FOUND: Final = """
    select c.relname::text, array_agg(a.attname::text)
    from pg_catalog.pg_namespace n join pg_catalog.pg_class c on c.relnamespace = n.oid
    join pg_catalog.pg_attribute a on a.attrelid = c.oid
    where n.nspname = 'stormproof_sink' and c.relname = any(%s) and a.attnum > 0 and not a.attisdropped
    group by c.relname order by c.relname
    """


def mine_of(identity: SinkIdentity) -> dict[str, Any]:
    """The parameters of `MINE`, in the order of the tables' columns."""
    return asdict(identity)


def has_records(connection: psycopg.Connection) -> bool:
    """Whether the sink's own tables are there.

    Raises:
        SettingsError: another version made them.
    """
    found = {table: frozenset(columns) for table, columns in connection.execute(_FOUND, ([*_COLUMNS],)).fetchall()}
    if not found:
        return False
    for table, expected in _COLUMNS.items():
        if (has := found.get(table, frozenset())) != expected:
            raise SettingsError(
                f"database {connection.info.dbname}: schema {SCHEMA} is another version's: the columns of its table {table} "
                f"differ by {', '.join(sorted(has ^ expected))}. End what is prepared with that version. Then put the "
                f"schema aside (alter schema {SCHEMA} rename to {SCHEMA}_before), and take each sink's table over: "
                "stormproof ledger adopt-table TOPOLOGY SINK",
                table=table,
            )
    return True


def one_at_a_time(connection: psycopg.Connection) -> None:
    """Hold the lock for making tables until the transaction ends.

    Two first starts at the same time collide even with `if not exists`, so one waits for the other.
    """
    connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))


def make_records(connection: psycopg.Connection) -> None:
    """Make the sink's own tables where they are missing."""
    if has_records(connection):
        return
    with connection.transaction():
        one_at_a_time(connection)
        # `create schema if not exists` needs the right to create schemas even where the schema exists.
        if connection.execute("select to_regnamespace('stormproof_sink') is null").fetchone() == (True,):
            connection.execute("create schema stormproof_sink")
        for statement in _TABLES:
            connection.execute(statement)


LOCK_TIMEOUT_MS: Final = 30_000
"""How long a commit waits for another session's lock on the table before it gives up."""


_LOCK_HOLDERS: Final = """
    select l.relation::regclass::text, a.application_name, l.pid, a.state
    from pg_locks l join pg_stat_activity a using (pid) join pg_class c on c.oid = l.relation
    where l.granted and l.database = (select oid from pg_database where datname = current_database())
      and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
      and c.relkind in ('r', 'p') and c.relnamespace <> 'pg_catalog'::regnamespace
    order by a.xact_start limit 5
"""


class Link:
    """One connection at a time. `enter` is called in a transaction on each new connection that is to be `fenced`."""

    def __init__(
        self, database: Database, sink: str, where: str, enter: Callable[[psycopg.Connection], None] | None
    ) -> None:
        self._database = database
        self._sink = sink
        self._where = where
        self._enter = enter
        self._connection: psycopg.Connection | None = None

    def connection(self, *, fenced: bool = True) -> psycopg.Connection:
        """The connection, made anew where it was lost."""
        if self._connection is not None and not self._connection.closed:
            return self._connection
        made = connect(self._database, application_name=f"stormproof sink {self._sink}"[:63], autocommit=True)
        # Every rule here reads again after it has waited for a lock: no older snapshot may stand in its way.
        made.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        with self.errors(), ExitStack() as undo:
            undo.callback(made.close)
            made.execute("select set_config('lock_timeout', %s, false)", (str(LOCK_TIMEOUT_MS),))
            if fenced and self._enter is not None:
                with made.transaction():
                    self._enter(made)
            undo.pop_all()
        self._connection = made
        return made

    @contextmanager
    def transaction(self, where: str | None = None, *, fenced: bool = True) -> Generator[psycopg.Connection]:
        """A transaction; `where` is what errors name."""
        with self.errors(where):
            connection = self.connection(fenced=fenced)
            with connection.transaction():
                yield connection

    @contextmanager
    def snapshot(self) -> Generator[psycopg.Connection]:
        """A read-only transaction with one snapshot: a commit of the driver meanwhile is seen as a whole, or not at all."""
        with self.transaction() as connection:
            connection.execute("set transaction isolation level repeatable read, read only")
            yield connection

    @contextmanager
    def errors(self, where: str | None = None) -> Generator[None]:
        """Turn Postgres's errors into ours: what may pass by itself is transient, all else is permanent."""
        where = self._where if where is None else where
        try:
            yield
        except psycopg.Error as error:
            state = error.sqlstate
            # A policy of row-level security refuses a row with the SQLSTATE of a missing right.
            explanation = None if is_of_a_row(error) else explained(error, self._database, where)
            if explanation is not None:
                self.close()
                raise explanation from error
            if state is None or may_pass(error):
                # The answer to a COMMIT may be lost with the connection: a new connection tells whether it took place.
                self.close()
                holders = self._lock_holders() if isinstance(error, psycopg.errors.LockNotAvailable) else ""
                raise StoreUnavailable(
                    f"{where}: {self._database.without_secrets(str(error)).strip()}{holders}; read again before acting",
                    sqlstate=state,
                ) from error
            raise _refused(error, where) from error

    def _lock_holders(self) -> str:
        """Who holds locks on whole tables that keep writers out, in words; nothing where that cannot be told."""
        try:
            with closing(connect(self._database, application_name="stormproof locks", autocommit=True)) as connection:
                found = connection.execute(_LOCK_HOLDERS).fetchall()
        except (StormproofError, psycopg.Error):
            return ""  # the error that this belongs to is on its way already
        held = "; ".join(f"{table} by {name!r} (pid {pid}) in state {state!r}" for table, name, pid, state in found)
        return f". Locked now: {storable_text(held)}" if held else ""

    def close(self) -> None:
        """Close the connection; what was not committed on it is rolled back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def asked(database: Database, where: str) -> Generator[psycopg.Connection]:
    """A connection for one question, without a fence; errors are those of `Link.errors`, and name `where`."""
    with closing(Link(database, "question", where, None)) as link, link.errors():
        yield link.connection()


def _refused(error: psycopg.Error, where: str) -> SinkRefused:
    diagnosis = error.diag
    parts = [
        f"{label} {text!r}"
        for label, text in (
            ("constraint", diagnosis.constraint_name),
            ("column", diagnosis.column_name),
            ("row", diagnosis.message_detail),
            ("at", diagnosis.context),
        )
        if text
    ]
    shown = storable_text(diagnosis.message_primary or str(error))
    return SinkRefused(
        f"{where}: Postgres refuses it, and nothing was written: {shown}"
        f"{' (' + ', '.join(parts) + ')' if parts else ''}",
        sqlstate=error.sqlstate,
        constraint=diagnosis.constraint_name,
        column=diagnosis.column_name,
        row=diagnosis.message_detail,
    )


LOCATE: Final = """
    select
        (select system_identifier from pg_control_system())::text,
        extract(epoch from pg_postmaster_start_time())::text,
        d.oid::text,
        coalesce(n.nspname, %(schema)s::name, current_schema())::text,
        coalesce(c.relname, %(table)s::name)::text
    from pg_database d
    left join pg_class c on c.oid = to_regclass(%(name)s)
    left join pg_namespace n on n.oid = c.relnamespace
    where d.datname = current_database()
"""


def key_of_name(database: Database | None, name: TableName) -> TableKey:
    """Equal where both the databases and the names are spelled alike. `database` None: the run's."""
    return "postgres by name", database, name


def locate(database: Database, name: TableName, where: str) -> TableKey:
    """The server, the database, and the table's schema and name there, where it is or would be made.

    A copied cluster has its original's system identifier: the instant of its start tells the two servers apart.

    Raises:
        StoreUnavailable: there is no connection, or it is lost.
        SinkRefused: the database refuses to answer.
    """
    with asked(database, where) as connection:
        row = connection.execute(
            LOCATE, {"schema": name.schema, "table": name.table, "name": name.identifier.as_string(connection)}
        ).fetchone()
    assert row is not None
    return "postgres", *row


BACKEND_END_TIMEOUT_S: Final = 10.0
BACKEND_POLL_S: Final = 0.01
TAKE_OVER_LOCK_TIMEOUT_MS: Final = 2_000
TAKE_OVER_TRIES_MAX: Final = 5
"""An older epoch may connect again after its backends were ended, before the fence is moved: they are then ended again."""


class Fence:
    """One epoch's hold on the fence. `epoch` None: for reading only, so `lock` is refused."""

    def __init__(self, identity: SinkIdentity, epoch: int | None, where: str) -> None:
        self._epoch = epoch
        self._where = where
        self._mine = {**mine_of(identity), "epoch": epoch}

    def take_over(self, link: Link) -> None:
        """End the backends of older epochs, and move the fence to this epoch.

        Raises:
            Fenced: a newer epoch holds this sink.
            StoreUnavailable: another session holds the fence and does not let it go.
        """
        for attempt in range(TAKE_OVER_TRIES_MAX):
            with link.transaction(fenced=False) as connection:
                make_records(connection)
                older = connection.execute(
                    f"select pid, backend_start from stormproof_sink.backend where {MINE} and epoch < %(epoch)s",
                    self._mine,
                ).fetchall()
            # Outside of any transaction, so that we hold no lock while we wait for them to end.
            with link.errors():
                terminate_backends(link.connection(fenced=False), older)
            try:
                with link.transaction(fenced=False) as connection:
                    connection.execute("select set_config('lock_timeout', %s, true)", (str(TAKE_OVER_LOCK_TIMEOUT_MS),))
                    self._move(connection)
                return
            except StoreUnavailable as error:
                if error.details.get("sqlstate") != psycopg.errors.LockNotAvailable.sqlstate:
                    raise
                if attempt == TAKE_OVER_TRIES_MAX - 1:
                    raise

    def enter(self, connection: psycopg.Connection) -> None:
        """Record a new connection's backend under its epoch, so that the next epoch can end it.

        Raises:
            Fenced: a newer epoch holds this sink.
        """
        self.lock(connection)
        self._record_backend(connection)

    def lock(self, connection: psycopg.Connection) -> None:
        """Lock the fence until this transaction ends. A check without the lock would let a fenced driver's rows land later.

        Raises:
            Fenced: a newer epoch holds this sink.
        """
        self.require(connection, self.ask(connection))

    def ask(self, connection: psycopg.Connection) -> psycopg.Cursor[tuple[Any, ...]]:
        """Lock it, without waiting for the answer where the connection is in a pipeline; `require` reads it."""
        return connection.execute(
            f"select 1 from stormproof_sink.fence where {MINE} and epoch = %(epoch)s for share", self._mine
        )

    def require(self, connection: psycopg.Connection, asked: psycopg.Cursor[tuple[Any, ...]]) -> None:
        """Read the answer. Raises as `lock`."""
        if asked.fetchone() is None:
            raise self._fenced(connection)

    def _move(self, connection: psycopg.Connection) -> None:
        raised = connection.execute(
            "insert into stormproof_sink.fence (topology, incarnation, sink, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(epoch)s) "
            "on conflict (topology, incarnation, sink) do update set epoch = excluded.epoch "
            "where fence.epoch <= excluded.epoch",
            self._mine,
        ).rowcount
        if raised != 1:
            raise self._fenced(connection)
        connection.execute(f"delete from stormproof_sink.backend where {MINE} and epoch < %(epoch)s", self._mine)
        self._record_backend(connection)

    def _record_backend(self, connection: psycopg.Connection) -> None:
        backend = backend_identity(connection)
        connection.execute(
            "insert into stormproof_sink.backend (topology, incarnation, sink, pid, backend_start, epoch) "
            "values (%(topology)s, %(incarnation)s, %(sink)s, %(pid)s, %(backend_start)s, %(epoch)s) "
            "on conflict do nothing",
            {**self._mine, "pid": backend.pid, "backend_start": backend.backend_start},
        )

    def _fenced(self, connection: psycopg.Connection) -> Fenced:
        row = connection.execute(f"select epoch from stormproof_sink.fence where {MINE}", self._mine).fetchone()
        newest = None if row is None else int(row[0])
        return Fenced(f"{self._where}: epoch {newest} holds it, this is epoch {self._epoch}", epoch=self._epoch)


# ---- the connection


class Backend(NamedTuple):
    """One connection as the server knows it. The start time tells it from a later one with the same pid."""

    pid: int
    backend_start: datetime


def backend_identity(connection: psycopg.Connection) -> Backend:
    """The backend of this connection, as `terminate_backends` takes it."""
    row = connection.execute(
        "select pid, backend_start from pg_stat_activity where pid = pg_catalog.pg_backend_pid()"
    ).fetchone()
    if row is None:
        raise StoreUnavailable("Postgres does not list this very connection in pg_stat_activity")
    return Backend(*row)


def terminate_backends(
    connection: psycopg.Connection, backends: Iterable[tuple[int, datetime]], *, clock: Clock | None = None
) -> int:
    """End these backends, wait until they are gone, and return how many of them were still running at the call.

    All are told to end before the first is waited for. A pid whose start time differs is somebody else's by now and is left
    alone; so is `connection` itself.

    Raises:
        StoreUnavailable: one of them did not end within `BACKEND_END_TIMEOUT_S`.
    """
    clock = clock or SystemClock()
    wanted = list(backends)
    pids, starts = [pid for pid, _ in wanted], [start for _, start in wanted]
    there = """
        from pg_stat_activity a
        join unnest(%s::int[], %s::timestamptz[]) as w (pid, backend_start) using (pid, backend_start)
        where a.pid <> pg_backend_pid()
    """

    def query(columns: LiteralString) -> list[int]:
        connection.execute("select pg_stat_clear_snapshot()")  # else a transaction sees its first answer again
        return [row[0] for row in connection.execute("select " + columns + there, (pids, starts))]

    found = query("a.pid, pg_terminate_backend(a.pid)")
    until_s = clock.monotonic_s() + BACKEND_END_TIMEOUT_S
    while left := query("a.pid"):
        if clock.monotonic_s() > until_s:
            raise StoreUnavailable(
                f"Postgres backends {left} did not end within {BACKEND_END_TIMEOUT_S:.0f} s of pg_terminate_backend; "
                "look at them in pg_stat_activity",
                pids=list(left),
            )
        clock.sleep(BACKEND_POLL_S)
    return len(found)
