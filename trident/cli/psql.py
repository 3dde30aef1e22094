"""`psql`, `ledger migrate|sql`: the database that the settings name, its schema, and the least rights of each kind of role.

One list of rights serves `ledger sql --grants`, which prints the statements, and `doctor`, which checks that the present
role has them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import pq

from stormproof.core.base.errors import SettingsError, StoreUnavailable, UsageError
from stormproof.core.postgres.binaries import find_binaries
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.rights import quoted
from stormproof.core.postgres.role import RoleKind
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA, SCHEMA
from stormproof.core.start.settings import Settings
from stormproof.migrations import SCHEMA as LEDGER_SCHEMA
from stormproof.migrations import migrate, sql, state
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import emit, finish, note, printed, say, table

if TYPE_CHECKING:
    from collections.abc import Iterator
from stormproof.sinks.postgres.connection import SCHEMA as SINK_SCHEMA

assert SCHEMA == LEDGER_SCHEMA


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights on one schema, one table of the ledger's schema, or (`name` None) all tables or sequences of a schema."""

    rights: tuple[str, ...]
    kind: str
    schema: str
    name: str | None = None

    def sql(self, role: str) -> str:
        """The statement, for the owner of the schema."""
        on = f"SCHEMA {self.schema}"
        if self.kind != "schema":
            on = f"ALL {self.kind.upper()}S IN SCHEMA {self.schema}" if self.name is None else f"TABLE {self._full}"
        return f"GRANT {', '.join(self.rights)} ON {on} TO {quoted(role)};"

    def future_sql(self, role: str, maker: str | None) -> str:
        """The statement for objects that `maker` (None: the role that runs the statement) makes later."""
        of = "" if maker is None else f" FOR ROLE {quoted(maker)}"
        rights, kinds = ", ".join(self.rights), f"{self.kind.upper()}S"
        return f"ALTER DEFAULT PRIVILEGES{of} IN SCHEMA {self.schema} GRANT {rights} ON {kinds} TO {quoted(role)};"

    @property
    def is_of_all(self) -> bool:
        """Whether it is on all tables or all sequences of a schema."""
        return self.kind != "schema" and self.name is None

    @property
    def _full(self) -> str:
        return f"{self.schema}.{self.name}"

    def lacking(self, connection: psycopg.Connection[Any]) -> list[str]:
        """The rights of this grant that the connection's role lacks, as ``RIGHT on OBJECT``."""
        if self.kind == "schema":
            objects = [(self.schema,)]
        else:
            kinds = "{S}" if self.kind == "sequence" else "{r,p}"
            objects = connection.execute(
                "select quote_ident(n.nspname) || '.' || quote_ident(c.relname) from pg_class c"
                " join pg_namespace n on n.oid = c.relnamespace"
                " where n.nspname = %s and (%s::text is null or c.relname = %s) and c.relkind = any(%s::char[])"
                " and not c.relispartition order by 1",
                (self.schema, self.name, self.name, kinds),
            ).fetchall()
        test = f"select has_{self.kind}_privilege(%s, %s)".encode()
        return [
            f"{right} on {self.kind} {name}"
            for (name,) in objects
            for right in self.rights
            if connection.execute(test, (name, right)).fetchone() != (True,)
        ]


_SEES: Final = Grant(("USAGE",), "schema", SCHEMA)
_SEES_QUEUES: Final = Grant(("USAGE",), "schema", MESSAGE_SCHEMA)

GRANTS: Final[dict[RoleKind, Sequence[Grant]]] = {
    RoleKind.PRODUCER: (
        _SEES,
        _SEES_QUEUES,
        Grant(("SELECT",), "table", SCHEMA, "alembic_version"),
        Grant(("SELECT",), "table", SCHEMA, "queue"),
        # SELECT: a receipt names the first and the last message that was put.
        Grant(("SELECT", "INSERT"), "table", MESSAGE_SCHEMA),
        Grant(("SELECT",), "sequence", MESSAGE_SCHEMA),
    ),
    RoleKind.DRIVER: (
        _SEES,
        Grant(("USAGE", "CREATE"), "schema", MESSAGE_SCHEMA),
        Grant(("SELECT", "INSERT", "UPDATE", "DELETE"), "table", SCHEMA),
        Grant(("USAGE", "SELECT"), "sequence", SCHEMA),
        Grant(("SELECT", "INSERT"), "table", MESSAGE_SCHEMA),
        Grant(("SELECT",), "sequence", MESSAGE_SCHEMA),
    ),
    RoleKind.AUDITOR: (
        _SEES,
        _SEES_QUEUES,
        Grant(("SELECT",), "table", SCHEMA),
        # An auditor's verdicts are kept; it cannot change one.
        Grant(("INSERT",), "table", SCHEMA, "verdict"),
        Grant(("SELECT",), "table", MESSAGE_SCHEMA),
        Grant(("SELECT",), "sequence", MESSAGE_SCHEMA),
    ),
}


def grants_sql(role: str, kind: RoleKind, driver: str | None = None) -> Generator[str]:
    """The statements, which a superuser or the owner of schema and queues runs after `ledger migrate`.

    `driver` is the role that makes queues: the rights are granted on what it makes later, too.
    """
    yield f"-- Stormproof: the least rights of a {kind}. Run them after stormproof ledger migrate, as a superuser,"
    yield f"-- or as the owner of schema {SCHEMA} and of the queues in schema {MESSAGE_SCHEMA}."
    for grant in GRANTS[kind]:
        yield grant.sql(role)
        if grant.is_of_all:
            yield grant.future_sql(role, None)
            if driver is not None and driver != role and grant.schema == MESSAGE_SCHEMA:
                yield grant.future_sql(role, driver)
    if kind is RoleKind.DRIVER:
        yield "-- A queue's owner makes its partitions and drops them. A queue that another role made, give to the driver:"
        yield f'--   ALTER TABLE {MESSAGE_SCHEMA}."QUEUE" OWNER TO {quoted(role)};  -- and each of its partitions'
        yield "-- In each database with tables of Postgres sinks, as a role that may make schemas:"
        yield f"CREATE SCHEMA IF NOT EXISTS {SINK_SCHEMA} AUTHORIZATION {quoted(role)};"
        yield f"--   GRANT INSERT, SELECT ON TABLE YOUR_TABLE TO {quoted(role)};  -- appends; SELECT: the audit"
        yield f"--   GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE YOUR_TABLE TO {quoted(role)};  -- by key; to make it:"
        yield f"--   GRANT CREATE ON SCHEMA public TO {quoted(role)};"
    elif driver is None:
        yield "-- Queues that another role makes later: name that role with --driver, or run this again."
    if kind is RoleKind.AUDITOR:
        yield "-- In each database with tables of Postgres sinks, so that the audit can compare their own records:"
        yield f"--   GRANT USAGE ON SCHEMA {SINK_SCHEMA} TO {quoted(role)};"
        yield f"--   GRANT SELECT ON ALL TABLES IN SCHEMA {SINK_SCHEMA} TO {quoted(role)};"
        yield f"--   GRANT SELECT ON TABLE YOUR_TABLE TO {quoted(role)};"


def lacking(connection: psycopg.Connection[Any], kind: RoleKind) -> list[str]:
    """The rights that the connection's role lacks to be a role of this kind."""
    return [one for grant in GRANTS[kind] for one in grant.lacking(connection)]


PSQL: Final = "psql"


# ---- the commands


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one statement."""

    status: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


def open_psql(
    *,
    arguments: Sequence[str] | None,
    command: Sequence[str] | None,
    url: bool,
    show_password: bool,
    as_json: bool,
) -> None:
    """Run the statements; without any, run the program psql, and end with its exit status. With `url`, only print that.

    An embedded server runs at least as long as this does.

    Raises:
        UsageError: Postgres refuses a statement, or both statements and arguments for psql were given.
        SettingsError: there is no program psql.
    """
    if url:
        _show_url(show_password=show_password, as_json=as_json)
        return
    if command and arguments:
        raise UsageError("-c runs without the program psql, which the arguments after -- are for: give one of them")
    if as_json and not command:
        raise UsageError("--json goes with -c SQL")
    settings = Settings()
    database = settings.resolve_database()
    if command:
        answers = [answer for statement in command for answer in _run(database, statement)]
        emit(answers, as_json=as_json, text=lambda: _text(answers))
        return
    program = _find_psql(prefer_embedded=settings.uses_embedded)
    known, rest = _as_environment(database)
    words = [program, *(["-d", rest] if rest else []), *(arguments or ())]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is psql's: it cancels a statement
    try:
        child = subprocess.Popen(words, env={**os.environ, **known}, preexec_fn=_take_interrupts)  # noqa: PLW1509
        status = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    finish(status)


def _take_interrupts() -> None:
    """Undo the ignoring of SIGINT, which a child process inherits, so that psql sees Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _show_url(*, show_password: bool, as_json: bool) -> None:
    """Print the database's URL; for an embedded one, note on standard error how long it runs."""
    settings = Settings()
    database = settings.resolve_database()
    url = database.url(show_password=show_password)
    report = {
        "url": url,
        "parameters": {k: v for k, v in database.parameters if show_password or k not in database.secrets},
        "embedded": settings.uses_embedded,
        "home": str(settings.home.absolute()) if settings.uses_embedded else None,
    }
    emit(report, as_json=as_json, text=lambda: say(url))
    if settings.uses_embedded:
        note(
            "the embedded Postgres runs only while a Stormproof program uses it; for another client, leave `stormproof "
            "psql` open beside it"
        )
    elif not show_password and any(k in database.secrets for k, _ in database.parameters):
        note("the password is shown with --show-password")


def _run(database: Database, statement: str) -> Iterator[Answer]:
    with connect(database, application_name="stormproof psql", autocommit=True) as connection:
        try:
            cursor = connection.execute(statement.encode())
            more: bool | None = True
            while more:
                columns = tuple(column.name for column in cursor.description or ())
                rows = tuple(tuple(map(_plain, row)) for row in cursor) if columns else ()
                yield Answer(cursor.statusmessage or "", columns, rows)
                more = cursor.nextset()
        except psycopg.OperationalError as error:
            raise StoreUnavailable(
                f"the answer of {database.redacted} is lost: {_one_line(database, error)}"
            ) from error
        except psycopg.Error as error:
            raise UsageError(
                f"Postgres refuses the statement: {_one_line(database, error)}", sqlstate=error.sqlstate
            ) from error


def _plain(value: object) -> object:
    """The value if JSON has such a value, else its text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _one_line(database: Database, error: psycopg.Error) -> str:
    return " ".join(database.without_secrets(str(error)).split())


def _text(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.columns:
            table(answer.columns, answer.rows)
        else:
            say(answer.status)


def _find_psql(*, prefer_embedded: bool) -> str:
    """The program psql: for an embedded server the one of its version, else preferably the one on PATH."""
    on_path = shutil.which(PSQL)
    try:
        folder = find_binaries().folder
        own = str(folder / PSQL) if os.access(folder / PSQL, os.X_OK) else None
    except SettingsError:
        own = None
    found = (own or on_path) if prefer_embedded else (on_path or own)
    if found is None:
        raise SettingsError(
            "there is no program psql here; run a statement without it: stormproof psql -c 'select 1'; or install it: pip "
            "install 'stormproof[embedded]', or: apt-get install postgresql-client"
        )
    return found


def _as_environment(database: Database) -> tuple[dict[str, str], str]:
    """The parameters as variables of libpq, which no list of processes shows; and a conninfo of those without a variable."""
    variables = {o.keyword.decode(): o.envvar.decode() for o in pq.Conninfo.get_defaults() if o.envvar}
    known = {variables[key]: value for key, value in database.parameters if key in variables}
    rest = {key: value for key, value in database.parameters if key not in variables}
    return known, Database.of(rest).conninfo if rest else ""


def migrate_schema(*, as_json: bool) -> None:
    """Make the schema where there is none."""
    with opened(checked=False) as stores:
        before = state(stores.engine)
        after = migrate(stores.engine)
        report = {"database": stores.database.redacted, "before": before.current, "after": after.current}
    changed = "nothing to do" if before.up_to_date else "made"
    emit(report, as_json=as_json, text=lambda: say(f"{report['database']}: revision {after.current} ({changed})"))


def print_sql(*, grants: str | None, kind: RoleKind, driver: str | None, as_json: bool) -> None:
    """Print the schema's SQL, or a role's GRANT statements, for a person to run; needs no database."""
    text = sql() if grants is None else "\n".join(grants_sql(grants, kind, driver))
    emit({"sql": text}, as_json=as_json, text=lambda: printed(text))
