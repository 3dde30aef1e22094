"""`stormproof audit ...`: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from stormproof.trident.cli.options import AsJson, By, MessageId, TopologyName, Txid

app: Final = typer.Typer(help="Ask what happened, and check it.", no_args_is_help=True)

OneOrAll = Annotated[str | None, typer.Argument(metavar="TOPOLOGY", help="The topology's name; default: all.")]
OfTxid = Annotated[int | None, typer.Option("--txid", min=1, help="Of one txid.")]
OfSource = Annotated[str | None, typer.Option("--source", help="Of one source.")]
OfSink = Annotated[str | None, typer.Option("--sink", help="Of one sink.")]
OfMessage = Annotated[
    str | None, typer.Option("--message", metavar="ID", help="Of one message, by its id or its server's.")
]
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
    *,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="POINT",
            help="Check what came since: last (the last clean verdict of the same scope), a txid, or a time.",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the sinks' tables, too, and compare their rows with what was written.")
    ] = False,
    sink: Annotated[
        list[str] | None,
        typer.Option("--sink", help="With --deep: read the table of this sink alone; may be repeated."),
    ] = None,
    others_write: Annotated[
        bool, typer.Option("--others-write", help="With --deep: rows that other writers added are no violation.")
    ] = False,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Check ledger, sinks and source against each other. The verdict is kept, with its scope: audit verdicts shows it.

    With --deep it also finds rows that were changed, deleted, added or doubled by other means, and committed messages that
    were altered or removed while their source keeps them; it names what it cannot compare. With --since last it looks at
    what came since the last clean verdict; its verdict is of that alone.

    Exit status: 0 if all agrees, 1 if there is a violation, 4 if the evidence for an answer is gone, or if --deep could
    not compare all rows of the tables that it read, or all messages; the last line says which.
    Example: stormproof audit verify orders --first 100
    """
    from stormproof.trident.cli.verify import VerifyOptions, show_verify

    asked = VerifyOptions(first, last, since=since, deep=deep, sinks=sink, others_write=others_write)
    show_verify(topology, asked, by=by, as_json=as_json)


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

    With a filter or --group, or for all topologies: one row a replay, or a count of them. --json always has those rows; for
    one topology without a filter also `histories`: each message with its failures, and the duplicates.
    Example: stormproof audit replays orders --since 1d --group reason --group component --group hour
    """
    from stormproof.trident.cli import questions, reports

    asked = questions.asked_for(
        since,
        until,
        group,
        topology=topology,
        txid=txid,
        message=message,
        reason=reason,
        component=component,
        error_class=error_class,
        what=what,
        limit=limit,
    )
    reports.show_replays(asked, as_json=as_json)


@app.command()
def txn(topology: TopologyName, txid: Txid, as_json: AsJson = False) -> None:
    """Show what a txid read, wrote and replayed, sink by sink."""
    from stormproof.trident.cli.reports import show_txn

    show_txn(topology, txid, as_json=as_json)


@app.command()
def components(topology: TopologyName, *, since: Since = None, as_json: AsJson = False) -> None:
    """Show what each component did, and how many tuples went over each edge: emitted, acked, failed, time.

    Sums over batches, of each the attempt that fixed its content. With --since from the first batch on that was fixed then.
    Example: stormproof audit components orders --since 1h
    """
    from stormproof.trident.cli.components import show_components

    show_components(topology, since=since, as_json=as_json)


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
    what: Annotated[str | None, typer.Option("--what", help="dead_letter, reject or skip.")] = None,
    since: Since = None,
    until: Until = None,
    group: Group = None,
    limit: Limit = LIMIT,
    as_json: AsJson = False,
) -> None:
    """Show dead letters, rejects, and batches given up at a sink, with the class of the error and what was decided.

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
    """Show each sink's last txid, and how many txids and rows are fixed for it that it does not have, by its own record.

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


@app.command()
def report(
    topology: TopologyName,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; it must not be there.")],
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Of batches opened from then on: ISO 8601, or an age.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Of batches opened before then: ISO 8601, or an age.")
    ] = None,
    message: Annotated[
        list[str] | None, typer.Option("--message", metavar="ID", help="With this message's history; may be repeated.")
    ] = None,
    verdict: Annotated[
        int | None,
        typer.Option("--verdict", min=1, metavar="N", help="With this verdict on record; default: verify is run."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare the rows of the sinks' tables, too, as audit verify --deep does.")
    ] = False,
    others_write: Annotated[
        bool, typer.Option("--others-write", help="With --deep: rows that other writers have added are no violation.")
    ] = False,
    payload_digests: Annotated[
        bool,
        typer.Option(
            "--payload-digests",
            help="With SHA-256 and length of dead letters' and rejects' payloads; short ones can be guessed.",
        ),
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, max=10_000, help="Most rows of each list.")] = 200,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Write what an auditor is handed: the verdict and the answers to the twelve questions, as JSON with their digests.

    It has no payload and no text of an error. Exit status: the verdict's, 0 clean, 1 violation, 4 cannot tell. It is signed
    by a tool for that: ssh-keygen -Y sign -n stormproof-report -f ~/.ssh/id_ed25519 orders.json. Example:
    stormproof audit report orders --since 30d --out orders.json
    """
    from stormproof.trident.cli.audit_report import make_report

    make_report(
        topology,
        out,
        deep=deep,
        others_write=others_write,
        since=since,
        until=until,
        by=by,
        as_json=as_json,
        rows=rows,
        messages=tuple(message or ()),
        verdict=verdict,
        payload_digests=payload_digests,
    )
