"""`psql`: the database that the settings name, by the server's own program, or by a plain one where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import pq

from stormproof.core.base.errors import SettingsError, StoreUnavailable, UsageError
from stormproof.core.postgres.binaries import find_binaries
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.trident.cli.output import emit, finish, note, say, table

PSQL: Final = "psql"


@dataclass(frozen=True, slots=True)
class StatementResult:
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


def _run(database: Database, statement: str) -> Iterator[StatementResult]:
    with connect(database, application_name="stormproof psql", autocommit=True) as connection:
        try:
            cursor = connection.execute(statement.encode())
            more: bool | None = True
            while more:
                columns = tuple(column.name for column in cursor.description or ())
                rows = tuple(tuple(map(_plain, row)) for row in cursor) if columns else ()
                yield StatementResult(cursor.statusmessage or "", columns, rows)
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


def _text(answers: Sequence[StatementResult]) -> None:
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
