"""The queues' tables: which queues there are; what is pending of them stands in the pending store's (`core.pending.tables`).

A message table lies in schema `stormproof_queue` under its queue's name and is made with its queue:
`(xid xid8, id bigint, put_at timestamptz, payload bytea)`, partitioned by id, never updated. Its primary key is
(xid, id): the order in which slices are cut, and the only index that a producer pays for. `xid` is the number of the
transaction that put the message plus the queue's `xid_shift`, which is 0 until the queue is adopted by another server.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, DateTime, Identity, MetaData, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA = "stormproof"
MESSAGE_SCHEMA = "stormproof_queue"

metadata = MetaData(schema=SCHEMA)


queue = Table(
    "queue",
    metadata,
    Column("queue", Text, primary_key=True, comment="name of the queue and of its table of messages"),
    Column("partition_messages", BigInteger, nullable=False, comment="ids to a partition of the message table"),
    Column(
        "created_at", DateTime(timezone=True), nullable=False, server_default=text("now()"), comment="when it was made"
    ),
    Column("server", Text, nullable=False, comment="system identifier of the server whose numbers the messages carry"),
    Column("timeline", BigInteger, nullable=False, comment="and its timeline"),
    Column(
        "xid_shift",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        comment="added to the server's own transaction numbers: restored messages stay below new ones",
    ),
    Column("schema", Text, comment="what its messages are, as its maker said; null: that was not said"),
    comment="one row a queue",
)

queue_adoption = Table(
    "queue_adoption",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True, comment="later ones are higher"),
    Column("queue", Text, nullable=False, comment="name of the queue"),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()"), comment="when"),
    Column("by", Text, nullable=False, comment="who"),
    Column("why", Text, nullable=False, comment="why, in that person's words"),
    Column("was", JSONB, nullable=False, comment="server, timeline and xid_shift before"),
    Column("now", JSONB, nullable=False, comment="and since"),
    Column("unproven", JSONB, nullable=False, comment="what was accepted without a proof"),
    comment="queues that an operator took over to another server or timeline",
)
