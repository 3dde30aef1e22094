"""Each batch records its tuning: the limits that it was opened with, and how they were chosen."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "txn",
        sa.Column("tuning", postgresql.JSONB(), comment="how batches were to be when it was opened"),
        schema="stormproof",
    )


def downgrade() -> None:
    op.drop_column("txn", "tuning", schema="stormproof")
