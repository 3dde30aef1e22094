"""`queue create|put|peek|list|import`. An import is a topology from a source into a queue, run to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import sqlalchemy as sa

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import Guarantee, storable_text
from stormproof.core.contract.source import Source
from stormproof.core.graph.checks import fitting_name
from stormproof.core.source.postgres_queue import PostgresQueue, QueueStats
from stormproof.core.source.postgres_queue.message_table import MessageTable
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA
from stormproof.core.start.settings import Settings
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.trident.cli.loading import load_source
from stormproof.trident.cli.logs import run_text
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import emit, finish, say, table
from stormproof.trident.cli.run import drive, ends_with, engine_named, rehearse
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.terms.wording import counted
from stormproof.trident.topology.stream import Topology

PAYLOAD: Final = "payload"
SCHEMA: Final = pa.schema([pa.field(PAYLOAD, pa.binary())])


def import_topology(queue: str, source: Source, name: str | None = None) -> Topology:
    """A topology that puts each message of `source`, byte by byte, into the queue of the ledger's database.

    The messages are rows of the queue's table, written in the transaction in which the sink's guard says that they are.
    Its `name` is by default made of both: run again under the same name, it goes on where it was.

    Raises:
        UsageError: the source does not give payloads as they are, or is the queue itself.
        TopologyError: it is no source.
    """
    MessageTable(queue)  # refuses what is no queue's name
    made = Topology(name or fitting_name(f"import-{source.name}-into-{queue}"))
    stream = made.stream("messages", source)
    found = source.decoder.schema
    if found.names != SCHEMA.names or found.field(0).type not in (pa.binary(), pa.large_binary()):
        raise UsageError(
            f"{source.name} gives tuples of ({', '.join(found.names)}), and a queue takes payloads as they are: make "
            "it with schema='payload binary', and without unit and metadata",
            source=source.name,
        )
    if isinstance(source, PostgresQueue) and source.queue == queue:
        raise UsageError(f"queue {queue} cannot be imported into itself", queue=queue)
    stream.into(PostgresSink(f'{MESSAGE_SCHEMA}."{queue}"', name=fitting_name(f"queue.{queue}")))
    return made


SHOWN_CHARACTERS = 200


def put_lines(queue: str, lines: str, *, as_json: bool) -> None:
    """Put a file's lines: all of them, or none if it fails."""
    if lines != "-" and not Path(lines).is_file():
        raise UsageError(f"--lines {lines}: there is no such file", file=lines)
    with opened(makes=True) as stores, closing(PostgresQueue(queue, database=stores.database)) as into:
        receipt = into.put_lines(lines)
    report = {"queue": queue, "messages": receipt.messages, "first": receipt.first, "last": receipt.last}
    ids = {0: "", 1: f", {receipt.first}"}.get(receipt.messages, f", {receipt.first} to {receipt.last}")
    emit(report, as_json=as_json, text=lambda: say(f"{queue}: {counted(receipt.messages, 'message')} put{ids}"))


def create(queue: str, schema: str | None, *, as_json: bool) -> None:
    """Make a queue, and keep what its messages are."""
    with (
        opened(makes=True) as stores,
        closing(PostgresQueue(queue, schema or "line string", database=stores.database)) as made,
    ):
        made.make_ready()
        with stores.engine.begin() as connection:
            named = {"queue": queue, "schema": schema}
            connection.execute(
                sa.text("update stormproof.queue set schema = :schema where queue = :queue and schema is null"), named
            )
            kept = connection.execute(
                sa.text("select schema from stormproof.queue where queue = :queue"), named
            ).scalar_one()
    if schema not in (None, kept):
        raise UsageError(
            f"queue {queue} was made with the schema {kept!r}; nothing was changed", queue=queue, schema=kept
        )
    code = f"PostgresQueue({queue!r})" if kept is None else f"PostgresQueue({queue!r}, {kept!r})"
    report = {"queue": queue, "schema": kept, "table": made.table.sql}
    text = f"{queue} is there: its messages lie in {made.table.sql} (column payload, bytea); it is read by {code}"
    emit(report, as_json=as_json, text=lambda: say(text))


def peek(queue: str, count: int, *, as_json: bool) -> None:
    """Show the first messages."""
    with opened() as stores, closing(PostgresQueue(queue, database=stores.database)) as of:
        found = of.peek(count)
    shown = [(m, storable_text(m.payload.decode("utf-8", "backslashreplace"))) for m in found]
    report = {
        "queue": queue,
        "messages": [{"id": m.shown_id, "bytes": len(m.payload), "text": text} for m, text in shown],
    }

    def text() -> None:
        table(["id", "text"], [(m.shown_id, text[:SHOWN_CHARACTERS]) for m, text in shown])
        if not shown:
            say("no messages: the queue is empty, or all of its readers have read what was put")

    emit(report, as_json=as_json, text=text)


def list_queues(queue: str | None, *, as_json: bool) -> None:
    """Show every queue with its readers, or one in detail. An empty database is no error, unless a queue is named."""
    with opened(may_be_empty=queue is None) as stores:
        names = [] if queue is None else [queue]
        if queue is None and not stores.is_empty:
            with stores.engine.connect() as connection:
                names += connection.execute(sa.text("select queue from stormproof.queue order by 1")).scalars()
        found = [_stats_of(name, stores) for name in names]
        readers = _readers(stores, found)
    told = [{**asdict(one), "topologies": {s: readers[s] for s in one.subscriptions}} for one in found]
    if queue is None:
        emit({"queues": told}, as_json=as_json, text=partial(_all_text, found, readers))
    else:
        emit(told[0], as_json=as_json, text=partial(_one_text, found[0], readers))


def _all_text(found: Sequence[QueueStats], readers: Mapping[str, str | None]) -> None:
    if not found:
        say("no queues yet; one is made by its first put: stormproof queue put QUEUE --lines FILE")
        return
    rows: list[tuple[str, int, int, str, int, int, int, int]] = []
    for queue in found:
        known = [
            (readers[name] or name, b.ready, b.pending, b.waiting, b.dead) for name, b in queue.subscriptions.items()
        ]
        rows += [
            (queue.queue, queue.messages_put, queue.bytes_on_disk, *reader) for reader in known or [("-", 0, 0, 0, 0)]
        ]
    table(["queue", "put", "bytes", "read by", "ready", "pending", "waiting", "dead"], rows)


def _one_text(found: QueueStats, readers: Mapping[str, str | None]) -> None:
    say(
        f"{found.queue}: {counted(found.messages_put, 'id')} given out, {counted(found.partitions, 'partition')}, "
        f"{counted(found.bytes_on_disk, 'byte')}" + (f", of {found.schema}" if found.schema else "")
    )
    table(
        ["topology", "subscription", "ready", "pending", "waiting", "dead"],
        [
            (readers[name] or "-", name, b.ready, b.pending, b.waiting, b.dead)
            for name, b in found.subscriptions.items()
        ],
    )
    if found.refused is not None:
        say(f"refused: {found.refused}")


def _stats_of(queue: str, stores: Stores) -> QueueStats:
    with closing(PostgresQueue(queue, database=stores.database)) as of:
        return of.stats()


def _readers(stores: Stores, queues: Sequence[QueueStats]) -> dict[str, str | None]:
    """The topology behind each subscription, with its spout if it has several; None if none is known.

    A topology subscribes under its incarnation, not its name: a new incarnation reads the queue from the start.
    """
    if not queues:
        return {}
    with stores.engine.connect() as connection:
        rows = connection.execute(sa.text("select incarnation, name from stormproof.topology")).all()
    names: dict[str, str] = {row.incarnation: row.name for row in rows}
    found: dict[str, str | None] = {}
    for subscription in (name for queue in queues for name in queue.subscriptions):
        incarnation, _, spout = subscription.partition(":")
        name = names.get(incarnation)
        found[subscription] = name if name is None or not spout else f"{name}:{spout}"
    return found


def import_messages(
    queue: str,
    source: str,
    *,
    param: Sequence[str] | None,
    name: str | None,
    follow: bool,
    engine: str,
    dry_run: bool,
    as_json: bool,
    **chosen: int | None,
) -> None:
    """Import the messages of the source that `source` names; with `follow` until a signal stops it."""
    choice = engine_named(engine)
    settings = Settings(**{setting: value for setting, value in chosen.items() if value is not None})
    found, module = load_source(source, param or ())
    topology = import_topology(queue, found, name)
    if dry_run:
        rehearse(topology, Guarantee.EXACTLY_ONCE, settings, as_json=as_json)
    with opened(makes=True) as stores, closing(PostgresQueue(queue, database=stores.database)) as into:
        into.make_ready()
        statistics = drive(
            topology,
            module,
            Guarantee.EXACTLY_ONCE,
            settings,
            choice,
            until_idle=not follow,
            on_batch=lambda _: into.make_ready(),
        )
    report = {
        "queue": queue,
        "source": found.name,
        "topology": topology.name,
        "messages": statistics.messages,
        "dead_letters": statistics.dead_letters,
        "rejected": statistics.rejected,
        "stopped": statistics.stopped,
    }

    def text() -> None:
        say(run_text(statistics))
        say(f"{counted(statistics.messages, 'message')} of {found.name} put into queue {queue}")

    emit(report, as_json=as_json, text=text)
    finish(ends_with(statistics))
