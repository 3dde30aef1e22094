"""The commands of `queue`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.trident.cli.options import AsJson, MaxMessages, Params, QueueName, add_decisions, does, gone

app = typer.Typer(help="Postgres queues: put messages, import them, look at them.", no_args_is_help=True)


@app.command("put")
@does("queue.put_lines")
def queue_put(
    queue: QueueName,
    lines: Annotated[
        str, typer.Option("--lines", metavar="FILE", help="A file with one message per line; - is standard input.")
    ],
    as_json: AsJson = False,
) -> None:
    """Put a file's lines into a queue, all or none. The queue is created if missing.

    Example: stormproof queue put lines --lines words.txt
    """


@app.command("create")
@does("queue.create")
def queue_create(
    queue: QueueName,
    schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="The schema of its messages, as readers declare it; `list` shows it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a queue before its first message or reader: for producers in SQL, an outbox, or another role.

    An existing queue is left as it is; a schema other than the recorded one is refused.
    Example: stormproof queue create orders --schema "order_id long, total decimal(10, 2)"
    """


@app.command("import")
@does("queue.import_messages")
def queue_import(
    queue: QueueName,
    source: Annotated[
        str,
        typer.Argument(metavar="FILE.py:NAME", help="A source such as KafkaSource, or a function that returns one."),
    ],
    *,
    param: Params = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the import in the ledger. Default: made of the names of source and queue."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with later messages, until stopped.")] = False,
    engine: Annotated[str, typer.Option(help="inline, in this process; or spark.")] = "inline",
    batch_messages: MaxMessages = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the first batch would do, and do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move the messages of a broker, or of another queue, into a queue, exactly once.

    The source needs schema='payload binary'; payloads are copied byte by byte. Called again, it continues. The ledger has it
    as a topology. Exit status: as of run. Example: stormproof queue import jobs sources.py:rabbit
    """


@app.command("peek")
@does("queue.peek")
def queue_peek(
    queue: QueueName,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a queue's first messages. Opens nothing."""


@app.command("list")
@does("queue.list_queues")
def queue_list(
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", help="One in detail; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show every queue's messages and size, and each reader's position; or one queue in detail, with its readers' names."""


gone(app, "queue stats", "queue list QUEUE")


add_decisions(app, "queue")
