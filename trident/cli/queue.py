"""`queue put|peek|stats`."""

from __future__ import annotations

from pathlib import Path

from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.trident.cli.output import counted, emit, say, table
from stormproof.trident.cli.stores import opened

SHOWN_CHARACTERS = 200


def put_lines(queue: str, source: str, *, as_json: bool) -> None:
    """Put a file's lines; all of them or, where it fails, none."""
    if source != "-" and not Path(source).is_file():
        raise UsageError(f"--lines {source}: there is no such file", file=source)
    with opened() as stores:
        into = PostgresQueue(queue, database=stores.database)
        try:
            receipt = into.put_lines(source)
        finally:
            into.close()
    report = {"queue": queue, "messages": receipt.messages, "first": receipt.first, "last": receipt.last}
    ids = f", {receipt.first} to {receipt.last}" if receipt.messages else ""
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
        of = PostgresQueue(queue, database=stores.database)
        try:
            found = of.stats()
        finally:
            of.close()

    def text() -> None:
        say(
            f"{queue}: {counted(found.messages_put, 'id')} given out, {counted(found.partitions, 'partition')}, "
            f"{counted(found.bytes_on_disk, 'byte')}"
        )
        table(
            ["subscription", "ready", "pending", "waiting", "dead"],
            [(name, b.ready, b.pending, b.waiting, b.dead) for name, b in found.subscriptions.items()],
        )

    emit(found, as_json=as_json, text=text)
