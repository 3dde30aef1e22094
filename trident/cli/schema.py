"""`ledger migrate|check|sql`."""

from __future__ import annotations

from stormproof.core.postgres.role import RoleKind
from stormproof.migrations import migrate, sql, state
from stormproof.trident.cli.output import Exit, emit, finish, printed, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.grants import grants_sql


def migrate_schema(*, as_json: bool) -> None:
    """Make the schema where there is none."""
    with opened(checked=False) as stores:
        before = state(stores.engine)
        after = migrate(stores.engine)
        report = {"database": stores.database.redacted, "before": before.current, "after": after.current}
    changed = "nothing to do" if before.up_to_date else "made"
    emit(report, as_json=as_json, text=lambda: say(f"{report['database']}: revision {after.current} ({changed})"))


def check_schema(*, as_json: bool) -> None:
    """Show the schema's revision; status 1 if it is not the needed one."""
    with opened(checked=False) as stores:
        found = state(stores.engine)
        where = stores.database.redacted
    report = {"database": where, "current": found.current, "head": found.head, "up_to_date": found.up_to_date}
    verdict = "up to date" if found.up_to_date else f"needs {found.head}; {found.advice}"
    emit(report, as_json=as_json, text=lambda: say(f"{where}: revision {found.current or 'none'}, {verdict}"))
    finish(Exit.DONE if found.up_to_date else Exit.FAILED)


def print_sql(*, as_json: bool) -> None:
    """Print the schema's SQL, for a person to run; needs no database."""
    emit({"sql": sql()}, as_json=as_json, text=lambda: printed(sql()))


def print_grants(role: str, kind: RoleKind, driver: str | None, *, as_json: bool) -> None:
    """Print a role's GRANT statements, for a person to run; needs no database."""
    text = "\n".join(grants_sql(role, kind, driver))
    emit({"sql": text}, as_json=as_json, text=lambda: printed(text))
