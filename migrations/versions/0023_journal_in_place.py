"""Messages of a journal are resolved and confirmed within their pages, and no index is written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def _alone() -> None:
    """Keep drivers away from the beginning: one that writes while an index is made would lock out the change behind it."""
    op.execute("lock table stormproof.pending_message in access exclusive mode")


def upgrade() -> None:
    _alone()
    op.create_index(
        "pending_message_payload",
        "pending_message",
        ["subscription", "number"],
        schema="stormproof",
        postgresql_where=sa.text("payload is not null"),
    )
    op.drop_index("pending_message_resolved", "pending_message", schema="stormproof")
    op.drop_index("pending_message_owed", "pending_message", schema="stormproof")
    # Of pages that are new from here on.
    op.execute("alter table stormproof.pending_message set (fillfactor = 50)")


def downgrade() -> None:
    _alone()
    op.execute("alter table stormproof.pending_message reset (fillfactor)")
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
    op.drop_index("pending_message_payload", "pending_message", schema="stormproof")
