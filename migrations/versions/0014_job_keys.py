"""The keys of batch jobs whose rows are written once for each key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_key",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False, comment="what the program calls the job, as it is given"),
        sa.Column(
            "txid",
            sa.BigInteger(),
            autoincrement=False,
            nullable=False,
            comment="the transaction that wrote, or is to write, its rows",
        ),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False, comment="when its content was fixed"),
        sa.PrimaryKeyConstraint("incarnation", "key", name="pk_job_key"),
        sa.UniqueConstraint("incarnation", "txid", name="uq_job_key_txid"),
        schema="stormproof",
        comment="jobs that are written, or will be: a key that is here is never written again",
    )


def downgrade() -> None:
    op.drop_table("job_key", schema="stormproof")
