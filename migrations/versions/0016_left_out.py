"""Each batch records the refused rows of groups at a sink, whose messages what it writes there has nothing of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "txn_sink",
        sa.Column(
            "left_out",
            sa.JSON().with_variant(postgresql.JSONB(), "postgresql"),
            comment="refused rows of groups, whose messages its files have nothing of",
        ),
        schema="stormproof",
    )


def downgrade() -> None:
    op.drop_column("txn_sink", "left_out", schema="stormproof")
