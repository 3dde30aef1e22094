"""Dead letters may be edited: requeued with another payload, which is kept beside the old one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES = ("dead_letter", "file_dead_letter")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(
            table,
            sa.Column("new_payload", sa.LargeBinary(), comment="what an edit put in the place of the payload"),
            schema="stormproof",
        )
        op.drop_constraint(f"{table}_disposal", table, schema="stormproof")
        op.create_check_constraint(
            f"{table}_disposal", table, "disposal in ('requeue', 'drop', 'edit')", schema="stormproof"
        )
        op.create_check_constraint(
            f"{table}_edited",
            table,
            "(new_payload is not null) = (disposal is not distinct from 'edit')",
            schema="stormproof",
        )


def downgrade() -> None:
    for table in TABLES:
        op.drop_constraint(f"{table}_edited", table, schema="stormproof")
        op.drop_constraint(f"{table}_disposal", table, schema="stormproof")
        # An edit was a requeue with another payload; what it was is not known to the older version.
        op.execute(f"update stormproof.{table} set disposal = 'requeue' where disposal = 'edit'")
        op.create_check_constraint(f"{table}_disposal", table, "disposal in ('requeue', 'drop')", schema="stormproof")
        op.drop_column(table, "new_payload", schema="stormproof")
