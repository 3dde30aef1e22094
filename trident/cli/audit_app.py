"""`stormproof audit ...`: its commands and their options."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from stormproof.trident.cli.options import AsJson, By, MessageId, TopologyName, Txid

app: Final = typer.Typer(help="Ask what happened, and check it.", no_args_is_help=True)

OneOrAll = Annotated[str | None, typer.Argument(metavar="TOPOLOGY", help="The topology's name; default: all.")]
OfTxid = Annotated[int | None, typer.Option("--txid", min=1, help="Of one txid.")]
OfSource = Annotated[str | None, typer.Option("--source", help="Of one source.")]
OfSink = Annotated[str | None, typer.Option("--sink", help="Of one sink.")]
OfMessage = Annotated[str | None, typer.Option("--message", metavar="ID", help="Of one message.")]
OfReason = Annotated[str | None, typer.Option("--reason", help="With this reason.")]
OfComponent = Annotated[str | None, typer.Option("--component", help="Of one component.")]
OfClass = Annotated[str | None, typer.Option("--class", metavar="CLASS", help="With errors of this class.")]
What = Annotated[str | None, typer.Option("--what", help="Of this kind: see the column `what`.")]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="From this time on: ISO 8601, or an age as 12h.")
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Before this time: ISO 8601, or an age.")]
Group = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="COLUMN", help="Count by this column, or by minute, hour or day; may be repeated."),
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Most rows; how many were left out is said.")]
LIMIT: Final = 100


@app.command()
def verify(
    topology: TopologyName,
    first: Annotated[int, typer.Option(min=1, help="The first txid.")] = 1,
    last: Annotated[int | None, typer.Option(min=1, help="The last txid; default: the newest.")] = None,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Check ledger, sinks and source against each other. The verdict is kept, with its scope: audit verdicts shows it.

    Exit status: 0 if all was compared and agrees, 1 if there is a violation, 4 if the evidence for an answer is gone.
    Example: stormproof audit verify orders --first 100
    """
    from stormproof.trident.cli.reports import show_verify

    show_verify(topology, first, last, by=by, as_json=as_json)


@app.command()
def replays(
    topology: OneOrAll = None,
    *,
    txid: OfTxid = None,
    message: OfMessage = None,
    reason: OfReason = None,
    component: OfComponent = None,
    error_class: OfClass = None,
    what: What = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show which messages were replayed, why, how often, and which txid committed them.

    With a filter or --group, or for all topologies: one row a replay, or a count of them.
    Example: stormproof audit replays orders --since 1d --group reason --group component --group hour
    """
    from stormproof.trident.cli import questions, reports

    filters = (txid, message, reason, component, error_class, what, since, until, group)
    if topology is not None and limit == LIMIT and not any(filters):
        reports.show_replays(topology, as_json=as_json)
        return
    questions.show(
        "replays",
        as_json=as_json,
        since=since,
        until=until,
        group=group,
        topology=topology,
        txid=txid,
        message=message,
        reason=reason,
        component=component,
        error_class=error_class,
        what=what,
        limit=limit,
    )


@app.command()
def txn(topology: TopologyName, txid: Txid, as_json: AsJson = False) -> None:
    """Show what a txid read, wrote and replayed, sink by sink."""
    from stormproof.trident.cli.reports import show_txn

    show_txn(topology, txid, as_json=as_json)


@app.command()
def message(topology: TopologyName, message: MessageId, as_json: AsJson = False) -> None:
    """Show what became of a message: the batches that opened it, its failures, and its state now.

    Example: stormproof audit message orders 753-12
    """
    from stormproof.trident.cli.reports import show_message

    show_message(topology, message, as_json=as_json)


@app.command()
def duplicates(
    topology: OneOrAll = None,
    *,
    txid: OfTxid = None,
    sink: OfSink = None,
    what: What = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show the duplicates that were suppressed, each with the evidence: which record had it already.

    Example: stormproof audit duplicates orders --since 7d
    """
    from stormproof.trident.cli import questions

    questions.show(
        "duplicates",
        as_json=as_json,
        since=since,
        until=until,
        group=group,
        topology=topology,
        txid=txid,
        sink=sink,
        what=what,
        limit=limit,
    )


@app.command()
def pending(
    topology: OneOrAll = None, *, source: OfSource = None, limit: Limit = LIMIT, as_json: AsJson = False
) -> None:
    """Show what is pending of each source, since when, and what waits there that was never opened.

    Example: stormproof audit pending --json
    """
    from stormproof.trident.cli import questions

    questions.show("pending", as_json=as_json, topology=topology, source=source, limit=limit)


@app.command("dead-letters")
def dead_letters(
    topology: OneOrAll = None,
    *,
    txid: OfTxid = None,
    message: OfMessage = None,
    source: OfSource = None,
    sink: OfSink = None,
    reason: OfReason = None,
    error_class: OfClass = None,
    state: Annotated[str | None, typer.Option("--state", help="In this state, as undecided or open.")] = None,
    what: Annotated[str | None, typer.Option("--what", help="dead_letter or reject.")] = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show dead letters and rejects with the class of their errors, and what was decided about them.

    Example: stormproof audit dead-letters --group topology --group error_class
    """
    from stormproof.trident.cli import questions

    questions.show(
        "dead-letters",
        as_json=as_json,
        since=since,
        until=until,
        group=group,
        topology=topology,
        txid=txid,
        message=message,
        source=source,
        sink=sink,
        reason=reason,
        error_class=error_class,
        state=state,
        what=what,
        limit=limit,
    )


@app.command()
def attempts(
    topology: OneOrAll = None,
    *,
    what: Annotated[str | None, typer.Option("--what", help="message or batch.")] = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show how often messages failed, and how often the jobs of batches were begun, as a histogram.

    Example: stormproof audit attempts orders --what message
    """
    from stormproof.trident.cli import questions

    questions.show("attempts", as_json=as_json, topology=topology, what=what, limit=limit)


@app.command()
def recovered(
    topology: OneOrAll = None,
    *,
    message: OfMessage = None,
    txid: Annotated[int | None, typer.Option("--txid", min=1, help="Committed in this txid.")] = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show the messages that failed, or were returned, before a txid committed them.

    Example: stormproof audit recovered orders --since 1d
    """
    from stormproof.trident.cli import questions

    questions.show(
        "recovered",
        as_json=as_json,
        since=since,
        until=until,
        group=group,
        topology=topology,
        message=message,
        txid=txid,
        limit=limit,
    )


@app.command()
def behind(topology: OneOrAll = None, *, sink: OfSink = None, limit: Limit = LIMIT, as_json: AsJson = False) -> None:
    """Show each sink's last txid, and how many txids and rows are fixed for it that it is not known to hold.

    Exit status: 1 if a sink is behind because a txid is blocked, else 0. Example: stormproof audit behind --json
    """
    from stormproof.trident.cli import questions

    questions.show("behind", as_json=as_json, topology=topology, sink=sink, limit=limit)


@app.command()
def aborted(
    topology: OneOrAll = None,
    *,
    txid: OfTxid = None,
    sink: OfSink = None,
    what: Annotated[
        str | None, typer.Option("--what", help="aborted, abandoned, blocked (now) or was_blocked.")
    ] = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show the txids that were aborted, abandoned or blocked, and why.

    Exit status: 1 if a txid that is shown is blocked now, else 0. Example: stormproof audit aborted orders --what blocked
    """
    from stormproof.trident.cli import questions

    questions.show(
        "aborted",
        as_json=as_json,
        since=since,
        until=until,
        group=group,
        topology=topology,
        txid=txid,
        sink=sink,
        what=what,
        limit=limit,
    )


@app.command()
def actions(
    topology: OneOrAll = None,
    *,
    txid: OfTxid = None,
    sink: OfSink = None,
    message: OfMessage = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show what operators decided, by whom and why.

    Example: stormproof audit actions orders --since 30d
    """
    from stormproof.trident.cli import questions

    questions.show(
        "actions",
        as_json=as_json,
        since=since,
        until=until,
        group=group,
        topology=topology,
        txid=txid,
        sink=sink,
        message=message,
        limit=limit,
    )


@app.command()
def verdicts(
    topology: OneOrAll = None,
    *,
    since: Since = None,
    until: Until = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show the verdicts of audit verify on record, each with what it looked at.

    Exit status, by the newest verdict of each topology: 1 if one is a violation; 4 if one cannot tell, or a topology has
    none; else 0. Example: stormproof audit verdicts orders --since 1d
    """
    from stormproof.trident.cli import questions

    questions.show("verdicts", as_json=as_json, since=since, until=until, topology=topology, limit=limit)
