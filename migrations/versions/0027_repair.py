"""The decision to repair a table."""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_ACTIONS = (
    "action in ('retry', 'skip', 'skip_rows', 'adopt', 'adopt_table', 'accept_loss', 'release_table',"
    " 'accept_change', 'adopt_stream', 'adopt_queue', 'retry_reject', 'drop_reject', 'pause', 'resume', 'drain',"
    " 'stop', 'compact', 'vacuum', {}'other')"
)


def _replace_actions(more: str) -> None:
    op.drop_constraint(op.f("ck_event_action_known"), "event", schema="stormproof")
    op.create_check_constraint(op.f("ck_event_action_known"), "event", _ACTIONS.format(more), schema="stormproof")


def upgrade() -> None:
    _replace_actions("'repair', ")


def downgrade() -> None:
    op.execute("update stormproof.event set action = 'other' where action = 'repair'")
    _replace_actions("")
