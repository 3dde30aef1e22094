"""The ledger remembers each shape of a topology's graph, and up to which txid it was pruned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "graph",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False, comment="the first run of this shape"),
        sa.Column("after_txid", sa.BigInteger(), nullable=False, comment="the highest txid that was allotted before"),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("description", JSONB(), nullable=False, comment="source, components, sinks with their schemas"),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "epoch", name=op.f("pk_graph")),
        schema="stormproof",
        comment="one row each time that a topology's graph or its sinks changed",
    )
    op.create_table(
        "prune",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column(
            "upto", sa.BigInteger(), autoincrement=False, nullable=False, comment="nothing up to here is complete"
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("ended_before", sa.DateTime(timezone=True), nullable=False, comment="the horizon that was asked for"),
        sa.Column("removed", JSONB(), nullable=False, comment="number of rows by table"),
        sa.PrimaryKeyConstraint("incarnation", "upto", name=op.f("pk_prune")),
        schema="stormproof",
        comment="one row a prune: how far the ledger's own record was cut, when and by whom",
    )
    _comment_outcomes("applied, already_held, held_unfinished, skipped", "applied, already_held, held_unfinished")


def downgrade() -> None:
    _comment_outcomes("applied, already_held, held_unfinished", "applied, already_held, held_unfinished, skipped")
    op.drop_table("prune", schema="stormproof")
    op.drop_table("graph", schema="stormproof")


def _comment_outcomes(comment: str, before: str) -> None:
    op.alter_column(
        "txn_sink",
        "outcome",
        existing_type=sa.Text(),
        existing_nullable=True,
        comment=comment,
        existing_comment=before,
        schema="stormproof",
    )
