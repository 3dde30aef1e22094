"""A verdict that not all of the sinks' rows were compared, though their tables were read."""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_KNOWN = "verdict in ('clean', 'violation', 'cannot_tell'{})"


def upgrade() -> None:
    op.drop_constraint(op.f("ck_verdict_verdict_known"), "verdict", schema="stormproof")
    op.create_check_constraint(
        op.f("ck_verdict_verdict_known"), "verdict", _KNOWN.format(", 'not_compared'"), schema="stormproof"
    )


def downgrade() -> None:
    op.execute("update stormproof.verdict set verdict = 'cannot_tell' where verdict = 'not_compared'")
    op.drop_constraint(op.f("ck_verdict_verdict_known"), "verdict", schema="stormproof")
    op.create_check_constraint(op.f("ck_verdict_verdict_known"), "verdict", _KNOWN.format(""), schema="stormproof")
