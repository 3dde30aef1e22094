"""Registered files keep a digest of each block of their rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_FINGERPRINT = "SHA-256 of a Parquet file's footer, of another's digests"
_BEFORE = "SHA-256 of a Parquet file's footer, of the whole of another"


def upgrade() -> None:
    of_blocks = "8 bytes of the SHA-256 of each block of rows; null: an older version's"
    of_columns = "the columns of a Parquet file that the digests are of"
    digests = sa.Column("digests", sa.LargeBinary(), comment=of_blocks)
    digested: sa.Column[list[str]] = sa.Column("digested", postgresql.ARRAY(sa.Text()), comment=of_columns)
    op.add_column("file_entry", digests, schema="stormproof")
    op.add_column("file_entry", digested, schema="stormproof")
    op.alter_column("file_entry", "fingerprint", comment=_FINGERPRINT, existing_comment=_BEFORE, schema="stormproof")


def downgrade() -> None:
    op.alter_column("file_entry", "fingerprint", comment=_BEFORE, existing_comment=_FINGERPRINT, schema="stormproof")
    op.drop_column("file_entry", "digested", schema="stormproof")
    op.drop_column("file_entry", "digests", schema="stormproof")
