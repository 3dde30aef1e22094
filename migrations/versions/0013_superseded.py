"""Each batch records how many rows of an upsert changed nothing at a sink."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "txn_sink",
        sa.Column(
            "superseded",
            sa.BigInteger(),
            server_default="0",
            nullable=False,
            comment="rows of an upsert that changed nothing: a later one of their key was there",
        ),
        schema="stormproof",
    )
    op.create_index(
        "ix_txn_sink_superseded",
        "txn_sink",
        ["incarnation", "sink", "superseded"],
        schema="stormproof",
        postgresql_where=sa.text("superseded > 0"),
    )


def downgrade() -> None:
    op.drop_index("ix_txn_sink_superseded", table_name="txn_sink", schema="stormproof")
    op.drop_column("txn_sink", "superseded", schema="stormproof")
