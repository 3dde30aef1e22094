"""The file sources' tables: which files a subscription has, and what is pending, waiting and dead of them."""

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
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

SCHEMA = "stormproof"

metadata = MetaData(schema=SCHEMA)


def _key() -> list[Column[Any]]:
    return [Column("source", Text, nullable=False), Column("subscription", Text, nullable=False)]


def _of_subscription() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(
        ["source", "subscription"],
        [f"{SCHEMA}.file_subscription.source", f"{SCHEMA}.file_subscription.subscription"],
        ondelete="cascade",
    )


file_subscription = Table(
    "file_subscription",
    metadata,
    Column("source", Text, primary_key=True),
    Column("subscription", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False, comment="the newest epoch that acts for the subscription"),
    Column("format", Text, nullable=False, comment="parquet, jsonl or text; it never changes"),
    Column("next_id", BigInteger, nullable=False, server_default=text("0"), comment="all below was opened once"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    comment="how far each reader of files has come",
)

file_entry = Table(
    "file_entry",
    metadata,
    Column("source", Text, primary_key=True),
    Column("subscription", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False, comment="from 1, as the files were found"),
    Column("path", Text, nullable=False),
    Column("first_id", BigInteger, nullable=False, comment="number of its first row's message"),
    Column("rows", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("modified_ns", BigInteger, nullable=False, comment="since 1970"),
    Column("fingerprint", Text, nullable=False, comment="SHA-256 of a Parquet file's footer, of another's digests"),
    Column("marks", LargeBinary, nullable=False, comment="where blocks of rows begin: 64-bit numbers, little-endian"),
    Column("digests", LargeBinary, comment="8 bytes of the SHA-256 of each block of rows; null: an older version's"),
    Column("digested", ARRAY(Text), comment="the columns of a Parquet file that the digests are of"),
    Column("registered_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    UniqueConstraint("source", "subscription", "path", name="file_entry_path"),
    _of_subscription(),
    comment="files as they were when they were found; they must not change any more",
)

file_slice = Table(
    "file_slice",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    *_key(),
    Column("first_id", BigInteger, comment="null: the slice is of retries"),
    Column("stop_id", BigInteger, comment="the first message behind it"),
    Column("messages", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("owner", Text),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    Column("opened", Integer, nullable=False, server_default=text("0"), comment="how often it was opened"),
    Column("deaths", Integer, nullable=False, server_default=text("0"), comment="how many drivers died on it"),
    Column("death_counted", Boolean, nullable=False, server_default=text("false"), comment="for the present opening"),
    CheckConstraint("(first_id is null) = (stop_id is null)", name="file_slice_range"),
    CheckConstraint("state in ('open', 'held', 'returned')", name="file_slice_state"),
    CheckConstraint("(state = 'returned') = (owner is null)", name="file_slice_owner"),
    _of_subscription(),
    Index("file_slice_owner_key", "source", "subscription", "owner", unique=True),
    comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
)

file_lapse = Table(
    "file_lapse",
    metadata,
    *_key(),
    Column("owner", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("lapsed_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    _of_subscription(),
    Index("file_lapse_key", "source", "subscription", "owner", "epoch"),
    comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
)

file_retry = Table(
    "file_retry",
    metadata,
    Column("source", Text, primary_key=True),
    Column("subscription", Text, primary_key=True),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("file", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False, comment="a line's bytes, or a Parquet row as an Arrow stream"),
    Column("times_opened", Integer, nullable=False),
    Column("times_failed", Integer, nullable=False),
    Column("not_before", DateTime(timezone=True), nullable=False),
    Column("reason", Text, nullable=False),
    Column("history", JSONB, nullable=False),
    Column("slice", BigInteger, comment="the slice that has it now; null while it waits"),
    _of_subscription(),
    Index("file_retry_waiting", "source", "subscription", "not_before", postgresql_where=text("slice is null")),
    Index("file_retry_slice", "slice", "id", postgresql_where=text("slice is not null")),
    comment="failed messages, with their payloads: the file that they came from may be gone",
)

file_dead_letter = Table(
    "file_dead_letter",
    metadata,
    Column("number", BigInteger, Identity(always=True), primary_key=True),
    *_key(),
    Column("id", BigInteger, nullable=False),
    Column("file", BigInteger, nullable=False),
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
    CheckConstraint("disposal in ('requeue', 'drop', 'edit')", name="file_dead_letter_disposal"),
    CheckConstraint(
        "(disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)",
        name="file_dead_letter_disposed",
    ),
    CheckConstraint(
        "(new_payload is not null) = (disposal is not distinct from 'edit')", name="file_dead_letter_edited"
    ),
    Index("file_dead_letter_waiting", "source", "subscription", "id", postgresql_where=text("disposal is null")),
    comment="messages that failed too often; never removed by the library",
)
