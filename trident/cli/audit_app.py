"""`stormproof audit ...`: its commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from stormproof.trident.cli.options import AsJson, By, MessageId, TopologyName, Txid
from stormproof.trident.cli.questions import command_of
from stormproof.trident.declarations.questions import QUESTIONS

app: Final = typer.Typer(help="Questions about what happened, and the check of it.", no_args_is_help=True)

Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="From this time on: ISO 8601, or an age such as 12h.")
]


@app.command()
def verify(
    topology: TopologyName,
    first: Annotated[int, typer.Option(min=1, help="The first txid.")] = 1,
    last: Annotated[int | None, typer.Option(min=1, help="The last txid. Default: the newest.")] = None,
    *,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="POINT",
            help="Check what came since a txid, a time, or `last`: the last clean verdict of the same scope.",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the sinks' tables, and compare their rows with what was written.")
    ] = False,
    sink: Annotated[
        list[str] | None,
        typer.Option("--sink", help="With --deep: read only this sink's table; may be repeated."),
    ] = None,
    others_write: Annotated[
        bool, typer.Option("--others-write", help="With --deep: allow rows that other writers added.")
    ] = False,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Check ledger, sinks and source against each other, and record the verdict with its scope.

    With --deep it also finds rows that others changed, deleted, added or doubled, and committed messages that were altered
    or removed while their source keeps them; it names what it cannot compare.

    Exit status: 0 if all agrees; 1 if there is a violation; 4 if the evidence is gone, or if --deep could not compare all
    rows and messages; the last line says which. Example: stormproof audit verify orders --first 100
    """
    from stormproof.trident.cli.verify import VerifyOptions, show_verify

    asked = VerifyOptions(first, last, since=since, deep=deep, sinks=sink, others_write=others_write)
    show_verify(topology, asked, by=by, as_json=as_json)


@app.command()
def txn(topology: TopologyName, txid: Txid, as_json: AsJson = False) -> None:
    """Show what a txid read, replayed, and wrote to each sink."""
    from stormproof.trident.cli.reports import show_txn

    show_txn(topology, txid, as_json=as_json)


@app.command()
def components(topology: TopologyName, *, since: Since = None, as_json: AsJson = False) -> None:
    """Show each component's tuples emitted, acked and failed, its time, and the tuples of each edge.

    Sums over batches; of each, the attempt that was prepared, and --since takes the time of that.
    Example: stormproof audit components orders --since 1h
    """
    from stormproof.trident.cli.reports import show_components

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
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; it must not exist.")],
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only batches opened from this time on: ISO 8601, or an age."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Only batches opened before this time: ISO 8601, or an age."),
    ] = None,
    message: Annotated[
        list[str] | None, typer.Option("--message", metavar="ID", help="Add this message's history; may be repeated.")
    ] = None,
    verdict: Annotated[
        int | None,
        typer.Option("--verdict", min=1, metavar="N", help="Take this recorded verdict. Default: run verify."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare the rows of the sinks' tables, as audit verify --deep does.")
    ] = False,
    others_write: Annotated[
        bool, typer.Option("--others-write", help="With --deep: allow rows that other writers added.")
    ] = False,
    payload_digests: Annotated[
        bool,
        typer.Option(
            "--payload-digests",
            help="Add SHA-256 and length of dead letters' and rejects' payloads; short payloads can be guessed from them.",
        ),
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, max=10_000, help="Most rows of each list.")] = 200,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Write a report for an auditor: the verdict and the answers to the twelve questions, as JSON with digests.

    It has no payloads and no error texts. Sign it with `ssh-keygen -Y sign -n stormproof-report -f KEY FILE`.
    Exit status: of the verdict, 0 clean, 1 violation, 4 cannot tell.
    Example: stormproof audit report orders --since 30d --out orders.json
    """
    from stormproof.trident.cli.verify import make_report

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
