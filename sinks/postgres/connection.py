"""The connection of one sink to its database: made when it is needed, made anew after a loss; Postgres's errors as ours.
Which table a name stands for there is asked before any sink is opened: two sinks of one topology must not share a table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from typing import Final

import psycopg

from stormproof.core.errors import SinkRefused, StoreUnavailable, StormproofError
from stormproof.core.message import storable_text
from stormproof.core.postgres.database import Database, connect, may_pass
from stormproof.core.postgres.rights import explained
from stormproof.core.sink import TableKey
from stormproof.sinks.postgres.refusals import is_of_a_row
from stormproof.sinks.postgres.table import TableName

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
