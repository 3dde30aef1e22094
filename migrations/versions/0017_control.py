"""What operators ask of running drivers (pause, resume, drain, stop), and the drivers' signs of life."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_ACTIONS = (
    "action in ('retry', 'skip', 'skip_rows', 'adopt', 'adopt_table', 'accept_loss', 'release_table',"
    " 'accept_change', 'adopt_stream', 'adopt_queue', 'retry_reject', 'drop_reject', {}'other')"
)


def _replace_actions(more: str) -> None:
    op.drop_constraint(op.f("ck_event_action_known"), "event", schema="stormproof")
    op.create_check_constraint(op.f("ck_event_action_known"), "event", _ACTIONS.format(more), schema="stormproof")


def upgrade() -> None:
    op.create_table(
        "control",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("request", sa.BigInteger(), nullable=False, comment="number of the newest request"),
        sa.Column("paused", sa.Boolean(), nullable=False, comment="no driver opens a batch, until resume"),
        sa.Column("ending", sa.Text(), comment="how the driver of ending_epoch is to end"),
        sa.Column("ending_epoch", sa.BigInteger(), comment="the one driver that is to end"),
        sa.Column("by", sa.Text(), nullable=False, comment="who asked last"),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False, comment="by the database's clock"),
        sa.Column("heard_at", sa.DateTime(timezone=True), comment="when a driver took note of the newest request"),
        sa.Column("heard_epoch", sa.BigInteger(), comment="of that driver"),
        sa.PrimaryKeyConstraint("incarnation", name="pk_control"),
        sa.CheckConstraint("ending in ('drain', 'stop')", name="ck_control_ending_known"),
        sa.CheckConstraint("(ending is null) = (ending_epoch is null)", name="ck_control_ending"),
        schema="stormproof",
        comment="one row a topology: what an operator asked of its driver last",
    )
    op.create_table(
        "heartbeat",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, comment="by the database's clock"),
        sa.Column("doing", sa.Text(), nullable=False),
        sa.Column("in_flight", sa.Integer(), nullable=False, comment="batches that are open or prepared"),
        sa.PrimaryKeyConstraint("incarnation", name="pk_heartbeat"),
        schema="stormproof",
        comment="one row a topology: its driver's newest sign of life",
    )
    _replace_actions("'pause', 'resume', 'drain', 'stop', ")


def downgrade() -> None:
    op.execute("update stormproof.event set action = 'other' where action in ('pause', 'resume', 'drain', 'stop')")
    _replace_actions("")
    op.drop_table("heartbeat", schema="stormproof")
    op.drop_table("control", schema="stormproof")
