"""Moves the messages of any source into a Postgres queue, exactly once: a topology of one stream and one sink."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from stormproof.core.errors import UsageError
from stormproof.core.graph.checks import fitting_name
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA
from stormproof.core.source.protocol import Source
from stormproof.sinks.postgres import PostgresSink
from stormproof.trident.stream import Topology

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
