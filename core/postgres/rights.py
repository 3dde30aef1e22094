"""Errors of Postgres about rights, with the GRANT that mends them, and about servers that take no writes.

The one place for SQLSTATE 42501 (insufficient privilege) and 25006 (read-only server): whatever uses Postgres passes its
errors to `explained`.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from stormproof.core.base.errors import MissingRight, StoreUnavailable, StormproofError
from stormproof.core.postgres.database import Database, connect

INSUFFICIENT_PRIVILEGE: Final = "42501"
READ_ONLY: Final = "25006"

_DENIED: Final = re.compile(r"(permission denied for|must be owner of) ([a-z ]+?) \"?([^\"\n]+?)\"?$", re.MULTILINE)
_TABLE_RIGHTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
_RIGHTS: Final = {
    "table": _TABLE_RIGHTS,
    "view": _TABLE_RIGHTS,
    "sequence": ("USAGE", "SELECT", "UPDATE"),
    "schema": ("USAGE", "CREATE"),
    "database": ("CREATE", "CONNECT", "TEMPORARY"),
    "function": ("EXECUTE",),
}
_VERBS: Final = re.compile(r"\b(select|insert|update|delete|truncate|references|create|copy)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Lacking:
    """The rights that a role lacks on one object; none where only the object's owner may do it."""

    role: str
    kind: str
    object: str
    rights: tuple[str, ...]
    owner: str | None

    @property
    def grant(self) -> str:
        """The statement that the object's owner runs."""
        if self.rights:
            return f"GRANT {', '.join(self.rights)} ON {self.kind.upper()} {self.object} TO {quoted(self.role)};"
        return f"GRANT {quoted(self.owner or 'OWNER')} TO {quoted(self.role)};"

    def __str__(self) -> str:
        what = f"has no right to {', '.join(self.rights)}" if self.rights else "is not the owner"
        of = f" on {self.kind} {self.object}" if self.rights else f" of {self.kind} {self.object}"
        return f"role {quoted(self.role)} {what}{of}"


def quoted(name: str) -> str:
    """A name quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


def note_statement(error: psycopg.Error, statement: str) -> None:
    """Keep the statement with a refusal, so that `explained` can tell which right it needed."""
    if error.sqlstate == INSUFFICIENT_PRIVILEGE:
        error.add_note(statement)


def explained(
    error: BaseException | None, database: Database, where: str, *, statement: str | None = None
) -> StormproofError | None:
    """The error to raise for a refusal; None for an error of another kind. Asks the database on another connection."""
    if not isinstance(error, psycopg.Error):
        return None
    if error.sqlstate == READ_ONLY:
        return StoreUnavailable(
            f"{where} at {database.redacted}: the server takes no writes: it is a standby, or default_transaction_read_only "
            "is on for it, for the database or for the role. Name the primary in STORMPROOF_DATABASE_URL; commands that "
            "only read work here",
            sqlstate=READ_ONLY,
        )
    if error.sqlstate != INSUFFICIENT_PRIVILEGE:
        return None
    text = error.diag.message_primary or str(error)
    asked = statement or " ".join(getattr(error, "__notes__", ()))
    lacking = _lacking(text, asked, database)
    if lacking is None:
        return MissingRight(f"{where} at {database.redacted}: {text}; as its owner grant what is missing", said=text)
    return MissingRight(
        f"{where} at {database.redacted}: {lacking}. As its owner run: {lacking.grant} "
        "(stormproof ledger sql --grants ROLE prints all that a role needs)",
        role=lacking.role,
        object=f"{lacking.kind} {lacking.object}",
        rights=list(lacking.rights),
        grant=lacking.grant,
    )


def _lacking(text: str, statement: str, database: Database) -> Lacking | None:
    match = _DENIED.search(text)
    if match is None:
        return None
    owned, kind, name = match[1].startswith("must"), match[2].strip(), match[3]
    kind = "table" if kind in ("relation", "index", "partitioned table") else kind
    try:
        with closing(connect(database, application_name="stormproof rights", autocommit=True)) as connection:
            (role,) = connection.execute("select current_user::text").fetchone() or ("",)
            shown, owner = _identified(connection, kind, name, statement)
            possible = () if owned else _RIGHTS.get(kind, ())
            rights = tuple(right for right in possible if not _has(connection, kind, shown, right))
    except (StormproofError, psycopg.Error):
        return None  # then Postgres's own words have to do
    verbs = {"INSERT" if verb.upper() == "COPY" else verb.upper() for verb in _VERBS.findall(statement)}
    if kind == "schema":
        verbs = {"USAGE", *verbs} if "USAGE" in rights else verbs
    needed = tuple(right for right in rights if right in verbs) or rights[:1]
    return Lacking(role, kind, shown, needed, owner)


def _identified(connection: psycopg.Connection[Any], kind: str, name: str, statement: str) -> tuple[str, str | None]:
    """An object's full name, and its owner; Postgres's error has the bare name only."""
    if kind in ("table", "view", "sequence"):
        rows = connection.execute(
            "select quote_ident(n.nspname) || '.' || quote_ident(c.relname), pg_get_userbyid(c.relowner),"
            " n.nspname || '.' || c.relname as plain, pg_table_is_visible(c.oid)"
            " from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.relname = %s order by 4 desc, 1",
            (name,),
        ).fetchall()
        named = [row for row in rows if row[2] in statement.replace('"', "")] or rows
        return (named[0][0], named[0][1]) if named else (quoted(name), None)
    catalogue = {"schema": ("pg_namespace", "nspname", "nspowner"), "database": ("pg_database", "datname", "datdba")}
    if kind in catalogue:
        table, column, owner = catalogue[kind]
        row = connection.execute(
            f"select quote_ident({column}), pg_get_userbyid({owner}) from {table} where {column} = %s".encode(), (name,)
        ).fetchone()
        if row is not None:
            return row[0], row[1]
    return quoted(name), None


def _has(connection: psycopg.Connection[Any], kind: str, name: str, right: str) -> bool:
    function = {"view": "table"}.get(kind, kind)
    row = connection.execute(
        f"select has_{function}_privilege(%s, %s)".encode(),
        (name.replace('"', "") if kind in ("schema", "database") else name, right),
    ).fetchone()
    return row is not None and bool(row[0])
