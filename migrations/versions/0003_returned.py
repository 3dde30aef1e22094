"""Batches say how many of their messages were returned together with failed ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "txn",
        sa.Column(
            "returned", sa.BigInteger(), server_default="0", nullable=False, comment="went back with failed ones"
        ),
        schema="stormproof",
    )
    op.alter_column(
        "attempt",
        "outcome",
        existing_type=sa.Text(),
        existing_nullable=False,
        comment="running, complete, job_failed, unverified, moot, dead",
        existing_comment="running, complete, job_failed, unverified, dead",
        schema="stormproof",
    )


def downgrade() -> None:
    op.alter_column(
        "attempt",
        "outcome",
        existing_type=sa.Text(),
        existing_nullable=False,
        comment="running, complete, job_failed, unverified, dead",
        existing_comment="running, complete, job_failed, unverified, moot, dead",
        schema="stormproof",
    )
    op.drop_column("txn", "returned", schema="stormproof")
