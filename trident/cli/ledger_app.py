"""The commands of `ledger`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli.options import AsJson, add_decisions, does, gone

app = typer.Typer(help="The ledger: its schema, its size, and decisions about topologies.", no_args_is_help=True)


@app.command("migrate")
@does("psql.migrate_schema")
def ledger_migrate(as_json: AsJson = False) -> None:
    """Create the schema of ledger and queues. The schema of another version is refused, and left as it is."""
    from stormproof.trident.cli.psql import migrate_schema

    migrate_schema(as_json=as_json)


add_decisions(app, "ledger")
gone(app, "ledger check", "doctor --no-spark")
gone(app, "ledger retry", "retry")


@app.command("sql")
@does("psql.print_sql")
def ledger_sql(
    grants: Annotated[
        str | None,
        typer.Option(
            "--grants", metavar="ROLE", help="Print GRANT statements for this role instead: the least that it needs."
        ),
    ] = None,
    kind: Annotated[
        RoleKind,
        typer.Option(
            "--for",
            metavar="KIND",
            help="With --grants: the role is a producer, driver or auditor.",
            case_sensitive=False,
        ),
    ] = RoleKind.DRIVER,
    driver: Annotated[
        str | None, typer.Option(metavar="ROLE", help="With --grants: the role that will create queues.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the SQL that `migrate` runs, or a role's GRANT statements. Needs no database."""
