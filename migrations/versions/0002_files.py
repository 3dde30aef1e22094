"""Files as a source: the files of each subscription, and which of their messages are pending, waiting or dead."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"


def of_subscription() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["source", "subscription"],
        ["stormproof.file_subscription.source", "stormproof.file_subscription.subscription"],
        ondelete="cascade",
    )


def key() -> list[sa.Column[str]]:
    return [sa.Column("source", sa.Text(), nullable=False), sa.Column("subscription", sa.Text(), nullable=False)]


def upgrade() -> None:
    op.create_table(
        "file_subscription",
        *key(),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="the newest epoch that acts for the subscription"),
        sa.Column("format", sa.Text(), nullable=False, comment="parquet, jsonl or text; it never changes"),
        sa.Column(
            "next_id", sa.BigInteger(), server_default=sa.text("0"), nullable=False, comment="all below was opened once"
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("source", "subscription"),
        schema="stormproof",
        comment="how far each reader of files has come",
    )
    op.create_table(
        "file_entry",
        *key(),
        sa.Column(
            "number", sa.BigInteger(), autoincrement=False, nullable=False, comment="from 1, as the files were found"
        ),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("first_id", sa.BigInteger(), nullable=False, comment="number of its first row's message"),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("modified_ns", sa.BigInteger(), nullable=False, comment="since 1970"),
        sa.Column(
            "fingerprint",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of a Parquet file's footer, of the whole of another",
        ),
        sa.Column(
            "marks",
            sa.LargeBinary(),
            nullable=False,
            comment="where blocks of rows begin: 64-bit numbers, little-endian",
        ),
        sa.Column(
            "registered_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        of_subscription(),
        sa.PrimaryKeyConstraint("source", "subscription", "number"),
        sa.UniqueConstraint("source", "subscription", "path", name="file_entry_path"),
        schema="stormproof",
        comment="files as they were when they were found; they must not change any more",
    )
    op.create_table(
        "file_slice",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        *key(),
        sa.Column("first_id", sa.BigInteger(), nullable=True, comment="null: the slice is of retries"),
        sa.Column("stop_id", sa.BigInteger(), nullable=True, comment="the first message behind it"),
        sa.Column("messages", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "opened", sa.Integer(), server_default=sa.text("0"), nullable=False, comment="how often it was opened"
        ),
        sa.Column(
            "deaths", sa.Integer(), server_default=sa.text("0"), nullable=False, comment="how many drivers died on it"
        ),
        sa.Column(
            "death_counted",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="for the present opening",
        ),
        sa.CheckConstraint("(first_id is null) = (stop_id is null)", name="file_slice_range"),
        sa.CheckConstraint("state in ('open', 'held', 'returned')", name="file_slice_state"),
        sa.CheckConstraint("(state = 'returned') = (owner is null)", name="file_slice_owner"),
        of_subscription(),
        sa.PrimaryKeyConstraint("id"),
        schema="stormproof",
        comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
    )
    op.create_index(
        "file_slice_owner_key", "file_slice", ["source", "subscription", "owner"], unique=True, schema="stormproof"
    )
    op.create_table(
        "file_lapse",
        *key(),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("lapsed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        of_subscription(),
        schema="stormproof",
        comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
    )
    op.create_index("file_lapse_key", "file_lapse", ["source", "subscription", "owner", "epoch"], schema="stormproof")
    op.create_table(
        "file_retry",
        *key(),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("file", sa.BigInteger(), nullable=False),
        sa.Column(
            "payload", sa.LargeBinary(), nullable=False, comment="a line's bytes, or a Parquet row as an Arrow stream"
        ),
        sa.Column("times_opened", sa.Integer(), nullable=False),
        sa.Column("times_failed", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("history", JSONB(), nullable=False),
        sa.Column("slice", sa.BigInteger(), nullable=True, comment="the slice that has it now; null while it waits"),
        of_subscription(),
        sa.PrimaryKeyConstraint("source", "subscription", "id"),
        schema="stormproof",
        comment="failed messages, with their payloads: the file that they came from may be gone",
    )
    op.create_index(
        "file_retry_waiting",
        "file_retry",
        ["source", "subscription", "not_before"],
        schema="stormproof",
        postgresql_where=sa.text("slice is null"),
    )
    op.create_index(
        "file_retry_slice",
        "file_retry",
        ["slice", "id"],
        schema="stormproof",
        postgresql_where=sa.text("slice is not null"),
    )
    op.create_table(
        "file_dead_letter",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        *key(),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("file", sa.BigInteger(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("times_opened", sa.Integer(), nullable=False),
        sa.Column("times_failed", sa.Integer(), nullable=False),
        sa.Column("history", JSONB(), nullable=False),
        sa.Column("dead_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("disposal", sa.Text(), nullable=True),
        sa.Column("disposed_by", sa.Text(), nullable=True),
        sa.Column("disposed_why", sa.Text(), nullable=True),
        sa.Column("disposed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("disposal in ('requeue', 'drop')", name="file_dead_letter_disposal"),
        sa.CheckConstraint(
            "(disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)",
            name="file_dead_letter_disposed",
        ),
        sa.PrimaryKeyConstraint("number"),
        schema="stormproof",
        comment="messages that failed too often; never removed by the library",
    )
    op.create_index(
        "file_dead_letter_waiting",
        "file_dead_letter",
        ["source", "subscription", "id"],
        schema="stormproof",
        postgresql_where=sa.text("disposal is null"),
    )


def downgrade() -> None:
    for table in ("file_dead_letter", "file_retry", "file_lapse", "file_slice", "file_entry", "file_subscription"):
        op.drop_table(table, schema="stormproof")
