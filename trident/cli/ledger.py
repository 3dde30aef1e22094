"""`ledger migrate`, `ledger sql`: the ledger's schema, and the least rights of each kind of role.

One list of rights serves `ledger sql --grants`, which prints the statements, and `doctor`, which checks that the present
role has them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from stormproof.core.postgres.rights import quoted
from stormproof.core.postgres.role import RoleKind
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA, SCHEMA
from stormproof.migrations import SCHEMA as LEDGER_SCHEMA
from stormproof.migrations import migrate, sql, state
from stormproof.sinks.postgres.connection import SCHEMA as SINK_SCHEMA
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import emit, printed, say

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
