"""Which micro-batches of streaming queries were taken."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "stream_batch",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False, comment="from 1, as they were taken"),
        sa.Column("query", sa.Text(), nullable=False, comment="the streaming query's id, which its checkpoint keeps"),
        sa.Column("batch", sa.BigInteger(), nullable=False, comment="the micro-batch's id in that query, from 0"),
        sa.Column(
            "txid", sa.BigInteger(), comment="the transaction that it is, where it goes to sinks without a topology"
        ),
        sa.Column("first_id", sa.BigInteger(), comment="the first of its messages, where it feeds a topology"),
        sa.Column("stop_id", sa.BigInteger(), comment="the message behind its last one"),
        sa.Column("adopted_from", sa.Text(), comment="the place that it follows by a person's word: query:batch"),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "number", name="pk_stream_batch"),
        schema="stormproof",
        comment="micro-batches of streaming queries; the highest number is where the query stands",
    )


def downgrade() -> None:
    op.drop_table("stream_batch", schema="stormproof")
