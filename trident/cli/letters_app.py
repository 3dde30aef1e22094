"""The commands of `dead-letters` and their options; what each does is in `letters`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.trident.cli.canary import Canary, DryRun, MaxFailures, Wait, rules_of
from stormproof.trident.cli.decided import add_decisions
from stormproof.trident.cli.options import AsJson, By, MessageId, TopologyName, Why

app = typer.Typer(
    help="Messages that failed too often, or that a sink rejected, since its table refuses their rows: look at them, mend "
    "them, hand them out again.",
    no_args_is_help=True,
)

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The messages' ids.")]
IdsFile = Annotated[
    str | None, typer.Option("--ids", metavar="FILE", help="The messages' ids, one a line; - is standard input.")
]
All = Annotated[bool, typer.Option("--all", help="Every undecided dead letter of the topology.")]
OfSource = Annotated[str | None, typer.Option("--source", help="Of this source (or spout) only.")]
OfReason = Annotated[
    str | None, typer.Option("--reason", help="Its last failure has this reason: error, bad_message, refused, ...")
]
OfComponent = Annotated[
    str | None, typer.Option("--component", help="Its last failure was in this component; of a rejected one, the sink.")
]
OfClass = Annotated[
    str | None,
    typer.Option(
        "--error-class",
        help="Died of this class of error, as in ValueError; or refused with this SQLSTATE, or a class of them: 23505, 23.",
    ),
]
Matching = Annotated[
    str | None, typer.Option("--match", metavar="TEXT", help="TEXT is in the error, the payload, or the refused row.")
]
AtSink = Annotated[str | None, typer.Option("--sink", help="Rejected by this sink, and only there.")]
FromTxid = Annotated[
    str | None, typer.Option("--first", metavar="TXID", help="Rejected by a sink in this txid or later.")
]
ToTxid = Annotated[
    str | None, typer.Option("--last", metavar="TXID", help="Rejected by a sink in this txid or earlier.")
]
Since = Annotated[str | None, typer.Option("--since", metavar="TIME", help="Dead since this time, or age as 2h.")]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Dead before this time, or age as 2h.")]
Where = Annotated[
    list[str] | None, typer.Option("--where", metavar="KEY=VALUE", help="The same filters, as in reason=error.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("list")
def letters_list(
    topology: Annotated[str | None, typer.Argument(metavar="TOPOLOGY", help="Default: every topology.")] = None,
    *,
    source: OfSource = None,
    reason: OfReason = None,
    component: OfComponent = None,
    error_class: OfClass = None,
    match: Matching = None,
    since: Since = None,
    until: Until = None,
    sink: AtSink = None,
    first: FromTxid = None,
    last: ToTxid = None,
    where: Where = None,
    decided: Annotated[bool, typer.Option("--decided", help="Those, too, about which an operator decided.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Only count them, by class of error.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show at most so many; default: 50, and with --json all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters that wait for a decision, with payload, error and a count for each class of error.

    They are the messages that failed too often, which no sink holds, and those that one sink rejected, with the refused row;
    the other sinks hold these. One that was requeued, edited or dropped leaves the list; it stays on record.

    Example: stormproof dead-letters list orders --sink invoices --error-class 23 --since 2h
    """
    from stormproof.trident.cli.letters import list_letters
    from stormproof.trident.decisions.letter_filter import filter_of

    chosen = filter_of(
        where or (),
        source=source,
        reason=reason,
        component=component,
        error_class=error_class,
        match=match,
        since=since,
        until=until,
        sink=sink,
        first=first,
        last=last,
    )
    list_letters(topology, chosen, undecided=not decided, count=count, limit=limit, as_json=as_json)


@app.command("show")
def letters_show(topology: TopologyName, message: MessageId, as_json: AsJson = False) -> None:
    """Show one dead letter: its whole payload, each failure with its error, refused rows, batches, what was decided."""
    from stormproof.trident.cli.letters import show_letter

    show_letter(topology, message, as_json=as_json)


@app.command("edit")
def letters_edit(
    topology: TopologyName,
    message: MessageId,
    *,
    payload: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The new payload; - is standard input. Default: edit it in $EDITOR."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep a newline at the new payload's end that the old one did not have.")
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Hand a dead letter out again with another payload; the old one, and who replaced it, stay on record.

    What a sink rejected is not edited: the other sinks hold it as it is.

    Example: stormproof dead-letters edit orders 753-12 --payload mended.json --why "a comma for a point"
    """
    from stormproof.trident.cli.letters_decided import edit_letter

    edit_letter(topology, message, payload, exact=exact, by=by, why=why, as_json=as_json)


add_decisions(app, "dead-letters")


@app.command("requeue")
def letters_requeue(
    topology: TopologyName,
    ids: Ids = None,
    *,
    ids_file: IdsFile = None,
    every: All = False,
    source: OfSource = None,
    reason: OfReason = None,
    component: OfComponent = None,
    error_class: OfClass = None,
    match: Matching = None,
    since: Since = None,
    until: Until = None,
    sink: AtSink = None,
    first: FromTxid = None,
    last: ToTxid = None,
    where: Where = None,
    dry_run: DryRun = False,
    canary: Canary = None,
    max_failures: MaxFailures = None,
    wait: Wait = None,
    yes: Yes = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Hand dead letters out again: those named, those that a filter chooses, or all.

    What a sink rejected is opened again for that sink alone: the other sinks hold it. Repair the table first: what it
    refuses again is rejected again, and a canary counts it as failed.

    With --canary the first N are handed out, then, once each of them is confirmed or has failed again, the rest in growing
    waves, while at most --max-failures of a wave fail; the topology's driver must run. Exit status 1: some were not handed
    out, and it says why. Example: stormproof dead-letters requeue orders --where reason=error --canary 10
    """
    from stormproof.trident.cli.letters_decided import chosen_ids, dispose
    from stormproof.trident.decisions.letter_filter import filter_of

    chosen = filter_of(
        where or (),
        source=source,
        reason=reason,
        component=component,
        error_class=error_class,
        match=match,
        since=since,
        until=until,
        sink=sink,
        first=first,
        last=last,
    )
    dispose(
        topology,
        chosen_ids(ids, ids_file),
        chosen,
        every=every,
        yes=yes,
        requeue=True,
        by=by,
        why=why,
        as_json=as_json,
        dry_run=dry_run,
        careful=rules_of(canary, max_failures, wait),
    )


@app.command("drop")
def letters_drop(
    topology: TopologyName,
    ids: Ids = None,
    *,
    ids_file: IdsFile = None,
    every: All = False,
    source: OfSource = None,
    reason: OfReason = None,
    component: OfComponent = None,
    error_class: OfClass = None,
    match: Matching = None,
    since: Since = None,
    until: Until = None,
    sink: AtSink = None,
    first: FromTxid = None,
    last: ToTxid = None,
    where: Where = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give dead letters up for good: those named, those that a filter chooses, or all. That is recorded.

    What a sink rejected is given up at that sink: the other sinks hold it.

    Example: stormproof dead-letters drop orders 753-12 --why "a test message"
    """
    from stormproof.trident.cli.letters_decided import chosen_ids, dispose
    from stormproof.trident.decisions.letter_filter import filter_of

    chosen = filter_of(
        where or (),
        source=source,
        reason=reason,
        component=component,
        error_class=error_class,
        match=match,
        since=since,
        until=until,
        sink=sink,
        first=first,
        last=last,
    )
    dispose(
        topology,
        chosen_ids(ids, ids_file),
        chosen,
        every=every,
        yes=yes,
        requeue=False,
        by=by,
        why=why,
        as_json=as_json,
        dry_run=dry_run,
    )
