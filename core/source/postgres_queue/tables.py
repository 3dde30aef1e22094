"""The queues' tables: which queues there are; what is pending of them stands in the pending store's (`core.pending.tables`).

A message table lies in schema `stormproof_queue` under its queue's name and is made with its queue:
`(xid xid8, id bigint, put_at timestamptz, payload bytea)`, partitioned by id, never updated. Its primary key is
(xid, id): the order in which slices are cut, and the only index that a producer pays for. `xid` is the number of the
transaction that put the message plus the queue's `xid_shift`, which is 0 until the queue is adopted by another server.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, Identity, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from stormproof.core.postgres.columns import key, may, must

SCHEMA = "stormproof"
MESSAGE_SCHEMA = "stormproof_queue"

metadata = MetaData(schema=SCHEMA)


queue = Table(
    "queue",
    metadata,
    key("queue", Text, "name of the queue and of its table of messages"),
    must("partition_messages", BigInteger, "ids to a partition of the message table"),
    must("created_at", DateTime(timezone=True), "when it was made", server_default=text("now()")),
    must("server", Text, "system identifier of the server whose numbers the messages carry"),
    must("timeline", BigInteger, "and its timeline"),
    must(
        "xid_shift",
        BigInteger,
        "added to the server's own transaction numbers: restored messages stay below new ones",
        server_default=text("0"),
    ),
    may("schema", Text, "what its messages are, as its maker said; null: that was not said"),
    comment="one row a queue",
)

queue_adoption = Table(
    "queue_adoption",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True, comment="later ones are higher"),
    must("queue", Text, "name of the queue"),
    must("at", DateTime(timezone=True), "when", server_default=text("clock_timestamp()")),
    must("by", Text, "who"),
    must("why", Text, "why, in that person's words"),
    must("was", JSONB, "server, timeline and xid_shift before"),
    must("now", JSONB, "and since"),
    must("unproven", JSONB, "what was accepted without a proof"),
    comment="queues that an operator took over to another server or timeline",
)
