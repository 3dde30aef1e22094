"""The commands of `rejects` and their options; what each does is in `rejects`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.trident.cli.canary import Canary, DryRun, MaxFailures, Wait, rules_of
from stormproof.trident.cli.options import AsJson, By, TopologyName, Why

app = typer.Typer(
    help="Messages that a sink rejected, since its table refuses their rows: look at them, retry them, drop them.",
    no_args_is_help=True,
)

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The messages' ids.")]
IdsFile = Annotated[
    str | None, typer.Option("--ids", metavar="FILE", help="The messages' ids, one a line; - is standard input.")
]
All = Annotated[bool, typer.Option("--all", help="Every undecided reject of the topology.")]
AtSink = Annotated[str | None, typer.Option("--sink", help="At this sink only.")]
OfClass = Annotated[
    str | None,
    typer.Option("--sqlstate", help="Refused with this SQLSTATE, or with one of this class: 23505, or 23."),
]
FromTxid = Annotated[int | None, typer.Option("--first", min=1, metavar="TXID", help="In this txid or later.")]
ToTxid = Annotated[int | None, typer.Option("--last", min=1, metavar="TXID", help="In this txid or earlier.")]
Since = Annotated[str | None, typer.Option("--since", metavar="TIME", help="Since this time, or age as 2h.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def rejects_list(
    topology: TopologyName,
    *,
    sink: AtSink = None,
    sqlstate: OfClass = None,
    first: FromTxid = None,
    last: ToTxid = None,
    since: Since = None,
    undecided: Annotated[bool, typer.Option("--undecided", help="Only those that no operator decided about.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show at most so many; default: 50, and with --json all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List rejected messages: at which sink, in which txid, and why; with a count for each sink and SQLSTATE.

    Example: stormproof rejects list orders --sink invoices --sqlstate 23 --since 2h
    """
    from stormproof.trident.cli.rejects import list_rejects
    from stormproof.trident.decisions.rejects import filter_of

    chosen = filter_of(sink, sqlstate, first, last, since, undecided=undecided)
    list_rejects(topology, chosen, limit=limit, as_json=as_json)


@app.command("show")
def rejects_show(
    topology: TopologyName,
    message: Annotated[str, typer.Argument(metavar="ID", help="The message's id, as `rejects list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Show a rejected message: its payload, the refused row, each sink that rejected it, and what was decided."""
    from stormproof.trident.cli.rejects import show_reject

    show_reject(topology, message, as_json=as_json)


@app.command("retry")
def rejects_retry(
    topology: TopologyName,
    ids: Ids = None,
    *,
    ids_file: IdsFile = None,
    every: All = False,
    sink: AtSink = None,
    sqlstate: OfClass = None,
    first: FromTxid = None,
    last: ToTxid = None,
    since: Since = None,
    dry_run: DryRun = False,
    canary: Canary = None,
    max_failures: MaxFailures = None,
    wait: Wait = None,
    yes: Yes = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Open rejected messages again, for the sinks that rejected them alone: the other sinks hold them.

    They keep their ids and histories. Repair the table first: what it refuses again is rejected again. --canary is that of
    `dead-letters requeue`; a message that is rejected again has failed.

    Example: stormproof rejects retry orders --sink invoices --sqlstate 23503 --why "the customers are there now"
    """
    from stormproof.trident.cli.letters_decided import chosen_ids
    from stormproof.trident.cli.rejects import decide_rejects
    from stormproof.trident.decisions.rejects import filter_of

    decide_rejects(
        topology,
        chosen_ids(ids, ids_file),
        filter_of(sink, sqlstate, first, last, since, undecided=True),
        every=every,
        yes=yes,
        retry=True,
        by=by,
        why=why,
        as_json=as_json,
        dry_run=dry_run,
        careful=rules_of(canary, max_failures, wait),
    )


@app.command("drop")
def rejects_drop(
    topology: TopologyName,
    ids: Ids = None,
    *,
    ids_file: IdsFile = None,
    every: All = False,
    sink: AtSink = None,
    sqlstate: OfClass = None,
    first: FromTxid = None,
    last: ToTxid = None,
    since: Since = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give rejected messages up for good, at the sinks that rejected them. That is recorded.

    Example: stormproof rejects drop orders 753-12 --why "a test message"
    """
    from stormproof.trident.cli.letters_decided import chosen_ids
    from stormproof.trident.cli.rejects import decide_rejects
    from stormproof.trident.decisions.rejects import filter_of

    decide_rejects(
        topology,
        chosen_ids(ids, ids_file),
        filter_of(sink, sqlstate, first, last, since, undecided=True),
        every=every,
        yes=yes,
        retry=False,
        by=by,
        why=why,
        as_json=as_json,
        dry_run=dry_run,
    )
