"""The commands of `queue`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.trident.cli.decided import add_decisions
from stormproof.trident.cli.options import AsJson, By, QueueName, Why

app = typer.Typer(help="Put messages into a queue, and look at it.", no_args_is_help=True)


@app.command("put")
def queue_put(
    queue: QueueName,
    lines: Annotated[str, typer.Option("--lines", metavar="FILE", help="One message a line; - is standard input.")],
    as_json: AsJson = False,
) -> None:
    """Put a file's lines into a queue, all of them or none; the queue is created if it is missing.

    Example: stormproof queue put lines --lines words.txt
    """
    from stormproof.trident.cli.queue import put_lines

    put_lines(queue, lines, as_json=as_json)


@app.command("create")
def queue_create(
    queue: QueueName,
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEMA", help="What its messages are, as its readers declare it: kept, and shown by stats."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a queue before its first message or reader: for producers in SQL, an outbox, or another role.

    One that is there stays as it is; a schema that differs from the one on record is refused.
    Example: stormproof queue create orders --schema "order_id long, total decimal(10, 2)"
    """
    from stormproof.trident.cli.queue import create

    create(queue, schema, as_json=as_json)


@app.command("import")
def queue_import(
    queue: QueueName,
    source: Annotated[
        str,
        typer.Argument(metavar="FILE.py:NAME", help="A source such as KafkaSource, or a function that returns one."),
    ],
    *,
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the function.")] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the import in the ledger; default: made of the source's and the queue's."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what arrives later, until stopped.")] = False,
    engine: Annotated[str, typer.Option(help="inline: in this process; or spark.")] = "inline",
    max_messages: Annotated[int | None, typer.Option(min=1, help="Most messages in one batch.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the first batch would do; do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move what lies in a broker, or in another queue, into a queue: each message once, whatever dies meanwhile.

    The source has schema='payload binary': payloads are carried byte by byte. Called again, it goes on where it was; the
    ledger knows it as a topology, under its name. Exit status: as of run. Example: stormproof queue import jobs
    sources.py:rabbit
    """
    from stormproof.trident.cli.queue_import import import_messages

    import_messages(
        queue,
        source,
        param or (),
        name=name,
        follow=follow,
        engine=engine,
        dry_run=dry_run,
        as_json=as_json,
        batch_messages=max_messages,
    )


@app.command("peek")
def queue_peek(
    queue: QueueName,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the first messages in a queue's table; opens nothing."""
    from stormproof.trident.cli.queue import peek

    peek(queue, count, as_json=as_json)


@app.command("stats")
def queue_stats(queue: QueueName, as_json: AsJson = False) -> None:
    """Show how much is in a queue, and how far each of its readers has come."""
    from stormproof.trident.cli.queue import stats

    stats(queue, as_json=as_json)


@app.command("list")
def queue_list(as_json: AsJson = False) -> None:
    """Show every queue: its messages, its size, and how far each of its readers has come."""
    from stormproof.trident.cli.queue import list_queues

    list_queues(as_json=as_json)


add_decisions(app, "queue")


@app.command("adopt")
def queue_adopt(
    queue: QueueName,
    accept_unproven: Annotated[
        bool,
        typer.Option("--accept-unproven", help="Adopt even if something is not proven; needs --why, and is recorded."),
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Take a queue over to this server, after a dump and restore, a fail-over to a standby, or pg_upgrade.

    Compares ledger, sinks and queue first. Status 0: adopted, or nothing to adopt. Status 4: something is not proven; each
    is named, and nothing was changed.
    """
    from stormproof.trident.cli.queue import adopt

    adopt(queue, accept_unproven=accept_unproven, by=by, why=why, as_json=as_json)
