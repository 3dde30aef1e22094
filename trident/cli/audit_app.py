"""`stormproof audit ...`: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from stormproof.trident.cli.options import AsJson, By, MessageId, TopologyName, Txid
from stormproof.trident.cli.questions import command_of
from stormproof.trident.declarations.questions import QUESTIONS

app: Final = typer.Typer(help="Ask what happened, and check it.", no_args_is_help=True)

Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="From this time on: ISO 8601, or an age as 12h.")
]


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


for _one in QUESTIONS.values():
    if _one.order:
        app.command(_one.name)(command_of(_one))


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
