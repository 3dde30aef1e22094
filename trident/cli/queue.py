"""`queue put|peek|stats|list`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import sqlalchemy as sa

from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.core.source.postgres_queue import PostgresQueue, QueueStats
from stormproof.trident.cli.output import counted, emit, say, table
from stormproof.trident.cli.stores import Stores, opened

SHOWN_CHARACTERS = 200


def put_lines(queue: str, source: str, *, as_json: bool) -> None:
    """Put a file's lines; all of them or, where it fails, none."""
    if source != "-" and not Path(source).is_file():
        raise UsageError(f"--lines {source}: there is no such file", file=source)
    with opened(makes=True) as stores:
        into = PostgresQueue(queue, database=stores.database)
        try:
            receipt = into.put_lines(source)
        finally:
            into.close()
    report = {"queue": queue, "messages": receipt.messages, "first": receipt.first, "last": receipt.last}
    ids = {0: "", 1: f", {receipt.first}"}.get(receipt.messages, f", {receipt.first} to {receipt.last}")
    emit(report, as_json=as_json, text=lambda: say(f"{queue}: {counted(receipt.messages, 'message')} put{ids}"))


def peek(queue: str, count: int, *, as_json: bool) -> None:
    """Show the first messages."""
    with opened() as stores:
        of = PostgresQueue(queue, database=stores.database)
        try:
            found = of.peek(count)
        finally:
            of.close()
    shown = [(m.shown_id, storable_text(m.payload.decode("utf-8", "backslashreplace"))) for m in found]
    report = {
        "queue": queue,
        "messages": [
            {"id": m.shown_id, "bytes": len(m.payload), "text": text} for m, (_, text) in zip(found, shown, strict=True)
        ],
    }
    emit(report, as_json=as_json, text=lambda: table(["id", "text"], [(i, t[:SHOWN_CHARACTERS]) for i, t in shown]))


def stats(queue: str, *, as_json: bool) -> None:
    """Show how much there is."""
    with opened() as stores:
        found = _stats_of(queue, stores)
        readers = _readers(stores, [found])

    def text() -> None:
        say(
            f"{queue}: {counted(found.messages_put, 'id')} given out, {counted(found.partitions, 'partition')}, "
            f"{counted(found.bytes_on_disk, 'byte')}"
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

    emit({**_fields(found), "topologies": readers}, as_json=as_json, text=text)


def list_queues(*, as_json: bool) -> None:
    """Show every queue with its readers; also where there is none yet."""
    with opened(may_be_empty=True) as stores:
        names: list[str] = []
        if not stores.is_empty:
            with stores.engine.connect() as connection:
                names += connection.execute(sa.text("select queue from stormproof.queue order by 1")).scalars()
        found = [_stats_of(name, stores) for name in names]
        readers = _readers(stores, found)

    def text() -> None:
        if not found:
            say("no queues yet; one is made by its first put: stormproof queue put QUEUE --lines FILE")
            return
        rows: list[tuple[str, int, int, str, int, int, int, int]] = []
        for queue in found:
            known = [
                (readers[name] or name, b.ready, b.pending, b.waiting, b.dead)
                for name, b in queue.subscriptions.items()
            ]
            rows += [
                (queue.queue, queue.messages_put, queue.bytes_on_disk, *reader)
                for reader in known or [("-", 0, 0, 0, 0)]
            ]
        table(["queue", "put", "bytes", "read by", "ready", "pending", "waiting", "dead"], rows)

    report = {
        "queues": [{**_fields(queue), "topologies": {s: readers[s] for s in queue.subscriptions}} for queue in found]
    }
    emit(report, as_json=as_json, text=text)


def _stats_of(queue: str, stores: Stores) -> QueueStats:
    with closing(PostgresQueue(queue, database=stores.database)) as of:
        return of.stats()


def _fields(of: QueueStats) -> dict[str, object]:
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _readers(stores: Stores, queues: Sequence[QueueStats]) -> dict[str, str | None]:
    """The topology behind each subscription, with the spout that reads where there are several; None where none is known.

    A topology subscribes under its incarnation, not under its name: a new life of the name begins anew.
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
