"""The commands of `ledger`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.core.errors import UsageError
from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli.options import AsJson, By, SinkName, TopologyName, Txid, Why

app = typer.Typer(
    help="The ledger: its schema, its size, and what a person decides about a topology.", no_args_is_help=True
)


@app.command("migrate")
def ledger_migrate(as_json: AsJson = False) -> None:
    """Make the schema of ledger and queues where there is none; that of another version is refused and left as it is."""
    from stormproof.trident.cli.schema import migrate_schema

    migrate_schema(as_json=as_json)


@app.command("check")
def ledger_check(as_json: AsJson = False) -> None:
    """Show the version of the database's schema; exit status 1 if this program needs another one."""
    from stormproof.trident.cli.schema import check_schema

    check_schema(as_json=as_json)


@app.command("adopt")
def ledger_adopt(
    topology: TopologyName,
    incarnation: Annotated[str, typer.Argument(metavar="[NAME/]INCARNATION", help="As the refused start names it.")],
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let a topology write to a table with rows of another incarnation: of a lost ledger, or of another topology."""
    from stormproof.trident.cli.operate import adopt_incarnation

    adopt_incarnation(topology, incarnation, by=by, why=why, as_json=as_json)


@app.command("retry", help="Let a blocked txid be tried again; the same as `stormproof retry`.")
def retry(
    topology: TopologyName,
    txid: Txid,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let a blocked txid be tried again, once its cause is repaired; the topology's next start commits it.

    Example: stormproof retry orders 17 --why "the disk has room again"
    """
    from stormproof.trident.cli.operate import retry_txid

    retry_txid(topology, txid, by=by, why=why, as_json=as_json)


@app.command("skip")
def ledger_skip(
    topology: TopologyName,
    txid: Txid,
    sink: SinkName,
    rows: Annotated[
        bool, typer.Option("--rows", help="Only the rows that the sink's Postgres table refuses; it gets the others.")
    ] = False,
    messages: Annotated[
        bool,
        typer.Option("--messages", help="Its messages are rejects of the sink, which can be retried for it alone."),
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give up the rows of a blocked or prepared txid at one sink: they become rejects, on record.

    The sink goes on from what it holds. The other sinks get the txid at the next start, and its messages are confirmed.
    With --rows the sink gets, at once, every message whose rows its table takes, and only the others are given up.

    With --messages the next start reads the txid's messages from the source, while it has them, and keeps each as a reject
    of the sink: `stormproof dead-letters requeue` runs them again. For where the prepared files are gone, and the messages
    are not.
    """
    from stormproof.trident.cli.skip import skip_rows, skip_sink

    if rows and messages:
        raise UsageError("give --rows or --messages: with --rows the messages of the given up rows are rejects anyway")
    if rows:
        skip_rows(topology, txid, sink, by=by, why=why, as_json=as_json)
    else:
        skip_sink(topology, txid, sink, messages=messages, by=by, why=why, as_json=as_json)


@app.command("accept-change")
def ledger_accept_change(
    topology: TopologyName,
    fingerprint: Annotated[str, typer.Argument(metavar="FINGERPRINT", help="As the refused start names it.")],
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let a topology go on although its sinks are given other columns, keys or folds than before."""
    from stormproof.trident.cli.operate import accept_change

    accept_change(topology, fingerprint, by=by, why=why, as_json=as_json)


@app.command("release-table")
def ledger_release_table(
    topology: TopologyName,
    sink: SinkName,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give up a table that a topology has claimed and never wrote to, so that another topology can claim it.

    The next start of this topology claims a table again, and is refused if another topology has it by then.
    """
    from stormproof.trident.cli.sink_tables import release_table

    release_table(topology, sink, by=by, why=why, as_json=as_json)


@app.command("adopt-table")
def ledger_adopt_table(
    topology: TopologyName,
    sink: SinkName,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Give up rows of committed txids that are gone; create the table if it is gone."
        ),
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Make a table that was restored from a dump a sink's own; it must be able to hold what the ledger says.

    If rows are missing, they are named; `--accept-loss` gives them up, on record. Their messages are not handed out again.
    """
    from stormproof.trident.cli.sink_tables import adopt_table

    adopt_table(topology, sink, accept_loss=accept_loss, by=by, why=why, as_json=as_json)


@app.command("accept-loss")
def ledger_accept_loss(
    topology: TopologyName,
    fingerprint: Annotated[
        str | None, typer.Argument(metavar="FINGERPRINT", help="As shown without it; default: only show.")
    ] = None,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Accept, on record, what a source's server removed or lost, or where it cannot be told.

    Without FINGERPRINT it shows what is on record and was not accepted, and the fingerprint that accepts exactly that.
    `audit verify` then has it as a note `loss_accepted`, and its verdict is of all else. What is noted later stays open.
    """
    from stormproof.trident.cli.operate import accept_loss

    accept_loss(topology, fingerprint, by=by, why=why, as_json=as_json)


@app.command("prune")
def ledger_prune(
    topology: Annotated[str | None, typer.Argument(metavar="TOPOLOGY", help="Default: every topology.")] = None,
    older_than: Annotated[str, typer.Option("--older-than", metavar="AGE", help="As in 30d, 12h, 2w.")] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Remove old batches from the ledger, but nothing that a sink, a waiting message or an open batch needs.

    Rejects, skips and operators' decisions stay. The audit then begins after the pruned txids, and says so.
    """
    from stormproof.trident.cli.prune import prune_ledger

    prune_ledger(topology, older_than=older_than, dry_run=dry_run, by=by, why=why, as_json=as_json)


@app.command("sql")
def ledger_sql(
    grants: Annotated[
        str | None, typer.Option("--grants", metavar="ROLE", help="Print the least rights of this role instead.")
    ] = None,
    kind: Annotated[
        RoleKind,
        typer.Option(
            "--for",
            metavar="KIND",
            help="With --grants: what the role is for: producer, driver or auditor.",
            case_sensitive=False,
        ),
    ] = RoleKind.DRIVER,
    driver: Annotated[
        str | None, typer.Option(metavar="ROLE", help="With --grants: the role that makes queues later.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the schema, as the SQL that `migrate` runs, or the GRANT statements for a role. Needs no database."""
    from stormproof.trident.cli.schema import print_grants, print_sql

    if grants is None:
        print_sql(as_json=as_json)
    else:
        print_grants(grants, kind, driver, as_json=as_json)
