"""The commands of `rejects` and their options; what each does is in `rejects`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.trident.cli.options import AsJson, By, TopologyName, Why

app = typer.Typer(
    help="Messages that a sink rejected, since its table refuses their rows: look at them, retry them, drop them.",
    no_args_is_help=True,
)

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The messages' ids.")]
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


def _deciding(name: str, help_: str, *, retry: bool) -> None:
    """Add the command `retry` or `drop`, which have the same options."""

    @app.command(name, help=help_)
    def rejects_decide(
        topology: TopologyName,
        ids: Ids = None,
        *,
        every: All = False,
        sink: AtSink = None,
        sqlstate: OfClass = None,
        first: FromTxid = None,
        last: ToTxid = None,
        since: Since = None,
        yes: Yes = False,
        by: By = "",
        why: Why = "",
        as_json: AsJson = False,
    ) -> None:
        from stormproof.trident.cli.rejects import decide_rejects
        from stormproof.trident.decisions.rejects import filter_of

        chosen = filter_of(sink, sqlstate, first, last, since, undecided=True)
        decide_rejects(topology, ids or (), chosen, every=every, yes=yes, retry=retry, by=by, why=why, as_json=as_json)


_deciding(
    "retry",
    """Open rejected messages again, for the sinks that rejected them alone: the other sinks hold them.

    They keep their ids and histories. Repair the table first: what it refuses again is rejected again.

    Example: stormproof rejects retry orders --sink invoices --sqlstate 23503 --why "the customers are there now"
    """,
    retry=True,
)
_deciding(
    "drop",
    """Give rejected messages up for good, at the sinks that rejected them. That is recorded.

    Example: stormproof rejects drop orders 753-12 --why "a test message"
    """,
    retry=False,
)
