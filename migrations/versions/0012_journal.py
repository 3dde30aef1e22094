"""A journal of the messages that a server delivered which cannot deliver the same set again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "pending_message",
        sa.Column("subscription", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column(
            "number",
            sa.BigInteger(),
            autoincrement=False,
            nullable=False,
            comment="without gaps, as they were received",
        ),
        sa.Column(
            "stable_id",
            sa.Text(),
            nullable=False,
            comment="the message's id at its server, the same each time it comes",
        ),
        sa.Column(
            "payload", sa.LargeBinary(), nullable=True, comment="null some time after the message left its first slice"
        ),
        sa.Column(
            "digest",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the payload: an id must not come with another",
        ),
        sa.Column(
            "received_at",
            sa.DateTime(timezone=True),
            nullable=False,
            server_default=sa.text("clock_timestamp()"),
        ),
        sa.Column(
            "resolved_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="when its first slice was confirmed; null until then",
        ),
        sa.Column(
            "owed",
            sa.Boolean(),
            nullable=False,
            server_default=sa.text("false"),
            comment="the server waits for its confirmation",
        ),
        sa.Column(
            "suppressed",
            sa.BigInteger(),
            nullable=False,
            server_default=sa.text("0"),
            comment="how often it came again after that",
        ),
        sa.ForeignKeyConstraint(["subscription"], ["stormproof.pending_subscription.id"], ondelete="cascade"),
        sa.PrimaryKeyConstraint("subscription", "number"),
        sa.UniqueConstraint("subscription", "stable_id", name="pending_message_stable_id"),
        schema="stormproof",
        comment="what servers delivered that cannot open a set of messages a second time",
    )
    op.create_index(
        "pending_message_owed",
        "pending_message",
        ["subscription", "number"],
        schema="stormproof",
        postgresql_where=sa.text("owed"),
    )
    op.create_index(
        "pending_message_resolved",
        "pending_message",
        ["subscription", "resolved_at"],
        schema="stormproof",
        postgresql_where=sa.text("resolved_at is not null"),
    )


def downgrade() -> None:
    op.drop_table("pending_message", schema="stormproof")
