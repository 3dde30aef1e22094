"""From what Spark planned each micro-batch that was taken."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "stream_batch",
        sa.Column(
            "plan",
            sa.Text(),
            comment="from what Spark planned it: its times, then the offset at which each source ends",
        ),
        schema="stormproof",
    )


def downgrade() -> None:
    op.drop_column("stream_batch", "plan", schema="stormproof")
