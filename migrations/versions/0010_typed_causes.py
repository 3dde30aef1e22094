"""Typed causes: columns for why a batch is blocked or was given up, and for what an operator decided."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# Each pattern is a text that the version before wrote; anything else is `other`, and keeps its prose.
CAUSES = r"""
update stormproof.txn set cause = case
  when state = 'aborted' and reason = 'every message failed' then 'every_message_failed'
  when state in ('aborted', 'abandoned') and (reason = 'in flight when its driver ended'
    or reason ~ '^in flight when its driver ended; set apart what was in hand: [0-9]+ messages$') then 'driver_ended'
  when state = 'aborted' and reason ~ '^(halved|[0-9]+ suspects set apart) after (job_failed|unverified|moot): '
    then substring(reason from ' after (job_failed|unverified|moot): ')
  when state = 'abandoned' and reason ~ '^(job_failed|unverified): '
    then substring(reason from '^(job_failed|unverified): ')
  when state = 'blocked' and (reason ~ '^sink .*: file lost: version [0-9]+ holds txid '
    or reason ~ '^sink .*: [0-9]+ of [0-9]+ prepared files are not as prepared: '
    or reason ~ '^sink .*: the prepared file .* is missing; nothing was written; ') then 'file_lost'
  when state = 'blocked' and reason ~ '^sink .*: (the table is gone|there is no (such |Delta )?table)' then 'table_gone'
  when state = 'blocked' and reason ~ '^sink .*: ' then 'sink_refused'
  else 'other'
end
where state in ('blocked', 'aborted', 'abandoned') and reason is not null
"""

ACTIONS = """
update stormproof.event set action = case
  when reason = 'adopted' then 'adopt'
  when reason = 'accepted_loss' then 'accept_loss'
  when reason = 'accept_change' then 'accept_change'
  when detail ->> 'action' in ('retry', 'skip', 'skip_rows', 'adopt_table', 'release_table', 'adopt_stream')
    then detail ->> 'action'
  when detail ->> 'action' = 'adopt queue' then 'adopt_queue'
  else 'other'
end
where kind = 'operator'
"""


def upgrade() -> None:
    op.add_column(
        "txn",
        sa.Column("cause", sa.Text(), comment="kind of the reason why it is blocked, aborted or abandoned"),
        schema="stormproof",
    )
    op.alter_column("txn", "reason", comment="the same in words", schema="stormproof")
    op.add_column("event", sa.Column("action", sa.Text(), comment="what an operator decided"), schema="stormproof")
    op.execute(CAUSES)
    op.execute(ACTIONS)
    op.create_check_constraint(
        op.f("ck_txn_cause_known"),
        "txn",
        "cause in ('every_message_failed', 'driver_ended', 'job_failed', 'unverified', 'moot', 'sink_refused',"
        " 'file_lost', 'table_gone', 'other')",
        schema="stormproof",
    )
    op.create_check_constraint(
        op.f("ck_event_action_known"),
        "event",
        "action in ('retry', 'skip', 'skip_rows', 'adopt', 'adopt_table', 'accept_loss', 'release_table',"
        " 'accept_change', 'adopt_stream', 'adopt_queue', 'other')",
        schema="stormproof",
    )


def downgrade() -> None:
    op.drop_column("event", "action", schema="stormproof")
    op.drop_column("txn", "cause", schema="stormproof")
    op.alter_column("txn", "reason", comment="why it is blocked, aborted or abandoned", schema="stormproof")
