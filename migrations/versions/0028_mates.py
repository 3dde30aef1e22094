"""Messages that failed together come again in one batch: what is pending has the name that it shares with its mates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def _mates(comment: str) -> sa.Column[str]:
    return sa.Column("mates", sa.Text, nullable=False, server_default="", comment=comment)


def upgrade() -> None:
    op.add_column("pending_slice", _mates("slices of one name are opened together"), schema="stormproof")
    op.add_column("pending_retry", _mates("retries of one name come in one batch"), schema="stormproof")
    op.add_column(
        "pending_retry",
        sa.Column("mates_messages", sa.Integer, nullable=False, server_default="1", comment="how many have that name"),
        schema="stormproof",
    )


def downgrade() -> None:
    op.drop_column("pending_retry", "mates_messages", schema="stormproof")
    op.drop_column("pending_retry", "mates", schema="stormproof")
    op.drop_column("pending_slice", "mates", schema="stormproof")
