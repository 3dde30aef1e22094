"""Paths of files may be longer than Postgres takes into an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_constraint("file_entry_path", "file_entry", schema="stormproof", type_="unique")
    op.create_index(
        "file_entry_path",
        "file_entry",
        ["source", "subscription", sa.text("md5(path)")],
        schema="stormproof",
        unique=True,
    )


def downgrade() -> None:
    op.drop_index("file_entry_path", "file_entry", schema="stormproof")
    op.create_unique_constraint(
        "file_entry_path", "file_entry", ["source", "subscription", "path"], schema="stormproof"
    )
