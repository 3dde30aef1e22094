"""The pending store's tables: how far each subscription of each source is, and what is pending, waiting and dead of it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from stormproof.core.postgres.columns import key, may, must

SCHEMA = "stormproof"

metadata = MetaData(schema=SCHEMA)


def _of_subscription(*, primary_key: bool = False) -> Column[Any]:
    return Column(
        "subscription",
        BigInteger,
        ForeignKey(f"{SCHEMA}.pending_subscription.id", ondelete="cascade"),
        nullable=False,
        primary_key=primary_key,
        autoincrement=False,
        comment="whose it is",
    )


pending_subscription = Table(
    "pending_subscription",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="what the other tables name it by"),
    must("kind", Text, "the connector's: queue, files, ..."),
    must("source", Text, "the source's name among its kind"),
    must("subscription", Text, "who reads it: a topology's incarnation, and its spout where there are several"),
    must("epoch", BigInteger, "the newest epoch that acts for the subscription"),
    must("position", JSONB, "everything before it was opened once; the connector's own words"),
    must("created_at", DateTime(timezone=True), "when it was made", server_default=text("now()")),
    UniqueConstraint("kind", "source", "subscription", name="pending_subscription_name"),
    comment="how far each reader of a source is",
)

pending_slice = Table(
    "pending_slice",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="what the ledger calls the slice by"),
    _of_subscription(),
    may("at", JSONB, "which messages, in the connector's own words; null: the retries that point here"),
    must("path", Text, "of a part: its place; else empty", server_default=text("''")),
    must("mates", Text, "slices of one name are opened together", server_default=text("''")),
    must("messages", BigInteger, "how many it has"),
    must("bytes", BigInteger, "of their payloads"),
    must("state", Text, "open, pinned (its batch is prepared) or returned"),
    may("owner", Text, "the batch that has it; null: returned"),
    must("epoch", BigInteger, "of that batch's driver"),
    may("expires_at", DateTime(timezone=True), "when the lease runs out; null: it does not"),
    must("opened", Integer, "how often it was opened", server_default=text("0")),
    must("deaths", Integer, "how many drivers died on it", server_default=text("0")),
    must("death_counted", Boolean, "for the present opening", server_default=text("false")),
    CheckConstraint("state in ('open', 'pinned', 'returned')", name="pending_slice_state"),
    CheckConstraint("(state = 'returned') = (owner is null)", name="pending_slice_owner"),
    Index("pending_slice_owner_key", "subscription", "owner", unique=True),
    comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
)

pending_lapse = Table(
    "pending_lapse",
    metadata,
    _of_subscription(),
    must("owner", Text, "the batch that had the lease"),
    must("epoch", BigInteger, "of that batch's driver"),
    must("lapsed_at", DateTime(timezone=True), "when", server_default=text("clock_timestamp()")),
    Index("pending_lapse_key", "subscription", "owner", "epoch"),
    comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
)

pending_retry = Table(
    "pending_retry",
    metadata,
    _of_subscription(primary_key=True),
    key("id", BigInteger, "the message's number in its source"),
    must("origin", BigInteger, "what the source shows before the number"),
    must("payload", LargeBinary, "as the source delivered it"),
    must("times_opened", Integer, "how often it was opened"),
    must("times_failed", Integer, "how often it failed"),
    must("not_before", DateTime(timezone=True), "when it may be opened again"),
    must("reason", Text, "why it failed last, in a word"),
    must("history", JSONB, "its failures and what was decided about it"),
    may("slice", BigInteger, "the slice that has it now; null while it waits"),
    must("mates", Text, "retries of one name come in one batch", server_default=text("''")),
    must("mates_messages", Integer, "how many have that name", server_default=text("1")),
    may("digest", LargeBinary, "SHA-256 of the payload when the message was set aside"),
    Index("pending_retry_waiting", "subscription", "not_before", postgresql_where=text("slice is null")),
    Index("pending_retry_slice", "slice", "id", postgresql_where=text("slice is not null")),
    comment="failed messages, with their payloads: where they came from may be gone",
)

pending_message = Table(
    "pending_message",
    metadata,
    _of_subscription(primary_key=True),
    key("number", BigInteger, "without gaps, as they were received"),
    must("stable_id", Text, "the message's id at its server, the same each time it comes"),
    may("payload", LargeBinary, "null some time after the message left its first slice"),
    must("digest", LargeBinary, "SHA-256 of the payload: an id must not come with another"),
    must(
        "received_at",
        DateTime(timezone=True),
        "when the server delivered it first",
        server_default=text("clock_timestamp()"),
    ),
    may("resolved_at", DateTime(timezone=True), "when its first slice was confirmed; null until then"),
    must("owed", Boolean, "the server waits for its confirmation", server_default=text("false")),
    must("suppressed", BigInteger, "how often it came again after that", server_default=text("0")),
    UniqueConstraint("subscription", "stable_id", name="pending_message_stable_id"),
    # No index has a column that changes when a message is resolved and then confirmed, and each page has room for another
    # version of its rows: so both changes stay within the page (heap-only tuples). New pages are half full for that. To
    # forget a payload, once for each message and off the path of a batch, still writes the other indexes.
    Index("pending_message_payload", "subscription", "number", postgresql_where=text("payload is not null")),
    Index("pending_message_suppressed", "subscription", postgresql_where=text("suppressed > 0")),
    info={"fillfactor": 50},  # SQLAlchemy takes it as a table's option from 2.1 on only
    comment="what servers delivered that cannot open a set of messages a second time",
)

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True, comment="later ones are higher"),
    must("kind", Text, "the connector's: queue, files, ..."),
    must("source", Text, "the source's name among its kind"),
    must("subscription", Text, "who read it"),
    must("id", BigInteger, "the message's number in its source"),
    must("origin", BigInteger, "what the source shows before the number"),
    must("payload", LargeBinary, "as the source delivered it"),
    must("reason", Text, "why it failed last, in a word"),
    must("error", Text, "class and text of the exception"),
    must("times_opened", Integer, "how often it was opened"),
    must("times_failed", Integer, "how often it failed"),
    must("history", JSONB, "its failures and what was decided about it"),
    must("dead_at", DateTime(timezone=True), "when it had failed too often", server_default=text("clock_timestamp()")),
    may("disposal", Text, "requeue, drop or edit; null: nobody has decided"),
    may("disposed_by", Text, "who decided"),
    may("disposed_why", Text, "why, in that person's words"),
    may("disposed_at", DateTime(timezone=True), "when"),
    may("new_payload", LargeBinary, "what an edit put in the place of the payload"),
    may("digest", LargeBinary, "SHA-256 of the payload when the message was set aside"),
    CheckConstraint("disposal in ('requeue', 'drop', 'edit')", name="dead_letter_disposal"),
    CheckConstraint(
        "(disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)",
        name="dead_letter_disposed",
    ),
    CheckConstraint("(new_payload is not null) = (disposal is not distinct from 'edit')", name="dead_letter_edited"),
    Index("dead_letter_waiting", "kind", "source", "subscription", "id", postgresql_where=text("disposal is null")),
    comment="messages that failed too often; removed with their reader alone",
)
