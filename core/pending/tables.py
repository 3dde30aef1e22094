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
    Column("kind", Text, nullable=False, comment="the connector's: queue, files, ..."),
    Column("source", Text, nullable=False, comment="the source's name among its kind"),
    Column(
        "subscription",
        Text,
        nullable=False,
        comment="who reads it: a topology's incarnation, and its spout where there are several",
    ),
    Column("epoch", BigInteger, nullable=False, comment="the newest epoch that acts for the subscription"),
    Column(
        "position", JSONB, nullable=False, comment="everything before it was opened once; the connector's own words"
    ),
    Column(
        "created_at", DateTime(timezone=True), nullable=False, server_default=text("now()"), comment="when it was made"
    ),
    UniqueConstraint("kind", "source", "subscription", name="pending_subscription_name"),
    comment="how far each reader of a source is",
)

pending_slice = Table(
    "pending_slice",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True, comment="what the ledger calls the slice by"),
    _of_subscription(),
    Column("at", JSONB, comment="which messages, in the connector's own words; null: the retries that point here"),
    Column("path", Text, nullable=False, server_default=text("''"), comment="of a part: its place; else empty"),
    Column("mates", Text, nullable=False, server_default=text("''"), comment="slices of one name are opened together"),
    Column("messages", BigInteger, nullable=False, comment="how many it has"),
    Column("bytes", BigInteger, nullable=False, comment="of their payloads"),
    Column("state", Text, nullable=False, comment="open, held (its batch is prepared) or returned"),
    Column("owner", Text, comment="the batch that has it; null: returned"),
    Column("epoch", BigInteger, nullable=False, comment="of that batch's driver"),
    Column("expires_at", DateTime(timezone=True), comment="when the lease runs out; null: it does not"),
    Column("opened", Integer, nullable=False, server_default=text("0"), comment="how often it was opened"),
    Column("deaths", Integer, nullable=False, server_default=text("0"), comment="how many drivers died on it"),
    Column("death_counted", Boolean, nullable=False, server_default=text("false"), comment="for the present opening"),
    CheckConstraint("state in ('open', 'held', 'returned')", name="pending_slice_state"),
    CheckConstraint("(state = 'returned') = (owner is null)", name="pending_slice_owner"),
    Index("pending_slice_owner_key", "subscription", "owner", unique=True),
    comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
)

pending_lapse = Table(
    "pending_lapse",
    metadata,
    _of_subscription(),
    Column("owner", Text, nullable=False, comment="the batch that had the lease"),
    Column("epoch", BigInteger, nullable=False, comment="of that batch's driver"),
    Column(
        "lapsed_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()"), comment="when"
    ),
    Index("pending_lapse_key", "subscription", "owner", "epoch"),
    comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
)

pending_retry = Table(
    "pending_retry",
    metadata,
    _of_subscription(primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False, comment="the message's number in its source"),
    Column("origin", BigInteger, nullable=False, comment="what the source shows before the number"),
    Column("payload", LargeBinary, nullable=False, comment="as the source delivered it"),
    Column("times_opened", Integer, nullable=False, comment="how often it was opened"),
    Column("times_failed", Integer, nullable=False, comment="how often it failed"),
    Column("not_before", DateTime(timezone=True), nullable=False, comment="when it may be opened again"),
    Column("reason", Text, nullable=False, comment="why it failed last, in a word"),
    Column("history", JSONB, nullable=False, comment="its failures and what was decided about it"),
    Column("slice", BigInteger, comment="the slice that has it now; null while it waits"),
    Column("mates", Text, nullable=False, server_default=text("''"), comment="retries of one name come in one batch"),
    Column("mates_messages", Integer, nullable=False, server_default=text("1"), comment="how many have that name"),
    Column("digest", LargeBinary, comment="SHA-256 of the payload when the message was set aside"),
    Index("pending_retry_waiting", "subscription", "not_before", postgresql_where=text("slice is null")),
    Index("pending_retry_slice", "slice", "id", postgresql_where=text("slice is not null")),
    comment="failed messages, with their payloads: where they came from may be gone",
)

pending_message = Table(
    "pending_message",
    metadata,
    _of_subscription(primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False, comment="without gaps, as they were received"),
    Column("stable_id", Text, nullable=False, comment="the message's id at its server, the same each time it comes"),
    Column("payload", LargeBinary, comment="null some time after the message left its first slice"),
    Column("digest", LargeBinary, nullable=False, comment="SHA-256 of the payload: an id must not come with another"),
    Column(
        "received_at",
        DateTime(timezone=True),
        nullable=False,
        server_default=text("clock_timestamp()"),
        comment="when the server delivered it first",
    ),
    Column("resolved_at", DateTime(timezone=True), comment="when its first slice was confirmed; null until then"),
    Column(
        "owed", Boolean, nullable=False, server_default=text("false"), comment="the server waits for its confirmation"
    ),
    Column(
        "suppressed", BigInteger, nullable=False, server_default=text("0"), comment="how often it came again after that"
    ),
    UniqueConstraint("subscription", "stable_id", name="pending_message_stable_id"),
    # No index has a column that changes when a message is resolved and then confirmed, and each page has room for another
    # version of its rows: so both changes stay within the page (heap-only tuples). New pages are half full for that. To
    # forget a payload, once for each message and off the path of a batch, still writes the other indexes.
    Index("pending_message_payload", "subscription", "number", postgresql_where=text("payload is not null")),
    Index("pending_message_suppressed", "subscription", postgresql_where=text("suppressed > 0")),
    postgresql_with={"fillfactor": 50},
    comment="what servers delivered that cannot open a set of messages a second time",
)

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True, comment="later ones are higher"),
    Column("kind", Text, nullable=False, comment="the connector's: queue, files, ..."),
    Column("source", Text, nullable=False, comment="the source's name among its kind"),
    Column("subscription", Text, nullable=False, comment="who read it"),
    Column("id", BigInteger, nullable=False, comment="the message's number in its source"),
    Column("origin", BigInteger, nullable=False, comment="what the source shows before the number"),
    Column("payload", LargeBinary, nullable=False, comment="as the source delivered it"),
    Column("reason", Text, nullable=False, comment="why it failed last, in a word"),
    Column("error", Text, nullable=False, comment="class and text of the exception"),
    Column("times_opened", Integer, nullable=False, comment="how often it was opened"),
    Column("times_failed", Integer, nullable=False, comment="how often it failed"),
    Column("history", JSONB, nullable=False, comment="its failures and what was decided about it"),
    Column(
        "dead_at",
        DateTime(timezone=True),
        nullable=False,
        server_default=text("clock_timestamp()"),
        comment="when it had failed too often",
    ),
    Column("disposal", Text, comment="requeue, drop or edit; null: nobody has decided"),
    Column("disposed_by", Text, comment="who decided"),
    Column("disposed_why", Text, comment="why, in that person's words"),
    Column("disposed_at", DateTime(timezone=True), comment="when"),
    Column("new_payload", LargeBinary, comment="what an edit put in the place of the payload"),
    Column("digest", LargeBinary, comment="SHA-256 of the payload when the message was set aside"),
    CheckConstraint("disposal in ('requeue', 'drop', 'edit')", name="dead_letter_disposal"),
    CheckConstraint(
        "(disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)",
        name="dead_letter_disposed",
    ),
    CheckConstraint("(new_payload is not null) = (disposal is not distinct from 'edit')", name="dead_letter_edited"),
    Index("dead_letter_waiting", "kind", "source", "subscription", "id", postgresql_where=text("disposal is null")),
    comment="messages that failed too often; removed with their reader alone",
)
