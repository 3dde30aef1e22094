"""The queues' tables: what is pending, waiting and dead; the messages themselves stand in one table a queue.

A message table lies in schema `stormproof_queue` under its queue's name and is made with its queue:
`(xid xid8, id bigint, put_at timestamptz, payload bytea)`, partitioned by id, never updated. Its primary key is
(xid, id): the order in which slices are cut, and the only index that a producer pays for. `xid` is the number of the
transaction that put the message plus the queue's `xid_shift`, which is 0 until the queue is adopted by another server.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

SCHEMA = "stormproof"
MESSAGE_SCHEMA = "stormproof_queue"

metadata = MetaData(schema=SCHEMA)


class Xid8(UserDefinedType[int]):
    """Postgres's 64-bit transaction number."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        """The type's name in Postgres."""
        del kw
        return "xid8"


class PgSnapshot(UserDefinedType[str]):
    """Postgres's `pg_snapshot`."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        """The type's name in Postgres."""
        del kw
        return "pg_snapshot"


def _key() -> list[Column[Any]]:
    return [Column("queue", Text, nullable=False), Column("subscription", Text, nullable=False)]


def _of_subscription() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["queue", "subscription"],
        [f"{SCHEMA}.queue_subscription.queue", f"{SCHEMA}.queue_subscription.subscription"],
        ondelete="cascade",
    )


queue = Table(
    "queue",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("partition_messages", BigInteger, nullable=False, comment="ids to a partition of the message table"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    Column("server", Text, nullable=False, comment="system identifier of the server whose numbers the messages carry"),
    Column("timeline", BigInteger, nullable=False, comment="and its timeline"),
    Column(
        "xid_shift",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        comment="added to the server's own transaction numbers: restored messages stay below new ones",
    ),
    comment="one row a queue",
)

queue_adoption = Table(
    "queue_adoption",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    Column("queue", Text, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("by", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("was", JSONB, nullable=False, comment="server, timeline and xid_shift before"),
    Column("now", JSONB, nullable=False, comment="and since"),
    Column("unproven", JSONB, nullable=False, comment="what was accepted without a proof"),
    comment="queues that an operator took over to another server or timeline",
)

queue_subscription = Table(
    "queue_subscription",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("subscription", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False, comment="the newest epoch that acts for the subscription"),
    Column("from_snapshot", PgSnapshot, nullable=False, comment="everything that it sees was opened once"),
    Column("to_snapshot", PgSnapshot, comment="the span in hand ends here; null between two spans"),
    Column("after_xid", Xid8, comment="within the span in hand, everything up to here was opened once"),
    Column("after_id", BigInteger),
    Column("server", Text, nullable=False, comment="system identifier of the server that the snapshots are from"),
    Column("timeline", BigInteger, nullable=False, comment="and its timeline"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    ForeignKeyConstraint(["queue"], [f"{SCHEMA}.queue.queue"], ondelete="cascade"),
    comment="how far each reader of a queue has come",
)

queue_slice = Table(
    "queue_slice",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    *_key(),
    Column("kind", Text, nullable=False),
    Column("from_snapshot", PgSnapshot),
    Column("to_snapshot", PgSnapshot),
    Column("after_xid", Xid8),
    Column("after_id", BigInteger),
    Column("last_xid", Xid8),
    Column("last_id", BigInteger),
    Column("messages", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("min_id", BigInteger, nullable=False),
    Column("max_id", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("owner", Text),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    Column("opened", Integer, nullable=False, server_default=text("0"), comment="how often it was opened"),
    Column("deaths", Integer, nullable=False, server_default=text("0"), comment="how many drivers died on it"),
    Column("death_counted", Boolean, nullable=False, server_default=text("false"), comment="for the present opening"),
    CheckConstraint("kind in ('main', 'retry')", name="queue_slice_kind"),
    CheckConstraint("state in ('open', 'held', 'returned')", name="queue_slice_state"),
    CheckConstraint("(state = 'returned') = (owner is null)", name="queue_slice_owner"),
    _of_subscription(),
    Index("queue_slice_owner_key", "queue", "subscription", "owner", unique=True),
    comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
)

queue_lapse = Table(
    "queue_lapse",
    metadata,
    *_key(),
    Column("owner", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("lapsed_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    _of_subscription(),
    Index("queue_lapse_key", "queue", "subscription", "owner", "epoch"),
    comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
)

queue_retry = Table(
    "queue_retry",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("subscription", Text, primary_key=True),
    Column("id", BigInteger, primary_key=True),
    Column("xid", Xid8, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("times_opened", Integer, nullable=False),
    Column("times_failed", Integer, nullable=False),
    Column("not_before", DateTime(timezone=True), nullable=False),
    Column("reason", Text, nullable=False),
    Column("history", JSONB, nullable=False),
    Column("slice", BigInteger, comment="the slice that has it now; null while it waits"),
    _of_subscription(),
    Index("queue_retry_waiting", "queue", "subscription", "not_before", postgresql_where=text("slice is null")),
    Index("queue_retry_slice", "slice", "id", postgresql_where=text("slice is not null")),
    comment="failed messages, with their payloads: the partition that they came from may be gone",
)

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    *_key(),
    Column("id", BigInteger, nullable=False),
    Column("xid", Xid8, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("reason", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("times_opened", Integer, nullable=False),
    Column("times_failed", Integer, nullable=False),
    Column("history", JSONB, nullable=False),
    Column("dead_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("disposal", Text),
    Column("disposed_by", Text),
    Column("disposed_why", Text),
    Column("disposed_at", DateTime(timezone=True)),
    Column("new_payload", LargeBinary, comment="what an edit put in the place of the payload"),
    CheckConstraint("disposal in ('requeue', 'drop', 'edit')", name="dead_letter_disposal"),
    CheckConstraint(
        "(disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)",
        name="dead_letter_disposed",
    ),
    CheckConstraint("(new_payload is not null) = (disposal is not distinct from 'edit')", name="dead_letter_edited"),
    Index("dead_letter_waiting", "queue", "subscription", "id", postgresql_where=text("disposal is null")),
    comment="messages that failed too often; never removed by the library",
)
