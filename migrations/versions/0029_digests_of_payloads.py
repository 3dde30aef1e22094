"""What a message's payload was when it was set aside: as a retry, as a dead letter or as a reject."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_DIGESTED = {
    "pending_retry": ("sha256(payload)", "SHA-256 of the payload when the message was set aside"),
    "dead_letter": ("sha256(payload)", "SHA-256 of the payload when the message was set aside"),
    "reject": (
        "sha256(coalesce(payload, ''::bytea) || convert_to(\"row\", 'UTF8'))",
        "SHA-256 of payload and row when the message was set aside",
    ),
}


def upgrade() -> None:
    for table, (digest, comment) in _DIGESTED.items():
        op.add_column(table, sa.Column("digest", sa.LargeBinary(), comment=comment), schema="stormproof")
        op.execute(f"update stormproof.{table} set digest = {digest}")


def downgrade() -> None:
    for table in _DIGESTED:
        op.drop_column(table, "digest", schema="stormproof")
