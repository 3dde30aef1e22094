"""Rejects: messages that a sink does not hold, since its table refuses one of their rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_CAUSES = (
    "cause in ('every_message_failed', 'driver_ended', 'job_failed', 'unverified', 'moot', 'sink_refused',"
    " 'file_lost', 'table_gone', {}'other')"
)
_ACTIONS = (
    "action in ('retry', 'skip', 'skip_rows', 'adopt', 'adopt_table', 'accept_loss', 'release_table',"
    " 'accept_change', 'adopt_stream', 'adopt_queue', {}'other')"
)

# An operator gave these up row by row: each is a reject of a row that no single message has.
ROWS_GIVEN_UP = """
insert into stormproof.reject (incarnation, txid, sink, rows, sqlstate, error, row, at, state, decided_by, decided_why,
  decided_at)
select e.incarnation, e.txid, e.sink, 1, e.detail ->> 'sqlstate', coalesce(e.error, ''), coalesce(e.input, ''), e.at,
  case when d.at is null then 'open' else 'dropped' end, d.by, d.why, d.at
from stormproof.event e
left join lateral (
  select o.at, o.detail ->> 'by' as by, o.detail ->> 'why' as why from stormproof.event o
  where o.incarnation = e.incarnation and o.txid = e.txid and o.sink = e.sink and o.action = 'skip_rows'
  order by o.id limit 1
) d on true
where e.kind = 'reject' and e.reason = 'refused' and e.txid is not null and e.sink is not null
order by e.id
"""


def _replace(name: str, table: str, condition: str) -> None:
    op.drop_constraint(op.f(name), table, schema="stormproof")
    op.create_check_constraint(op.f(name), table, condition, schema="stormproof")


def upgrade() -> None:
    op.create_table(
        "reject",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), nullable=False),
        sa.Column("sink", sa.Text(), nullable=False),
        sa.Column(
            "message",
            sa.Text(),
            nullable=True,
            comment="a message's id as people see it; null: a row of no single message",
        ),
        sa.Column("number", sa.BigInteger(), nullable=True),
        sa.Column("origin", sa.BigInteger(), nullable=True),
        sa.Column("rows", sa.BigInteger(), nullable=False, comment="of the message, which the sink does not hold"),
        sa.Column("sqlstate", sa.Text(), nullable=True, comment="null: not refused by an error of Postgres"),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("row", sa.Text(), nullable=False, comment="the refused row, as JSON"),
        sa.Column(
            "payload", sa.LargeBinary(), nullable=True, comment="the message's; null where its source gives none"
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=True),
        sa.Column("decided_why", sa.Text(), nullable=True),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "retried_in",
            sa.BigInteger(),
            nullable=True,
            comment="the txid that wrote it anew to the sink, or rejected it again",
        ),
        sa.CheckConstraint("state in ('open', 'retrying', 'retried', 'dropped')", name=op.f("ck_reject_state_known")),
        sa.CheckConstraint("(state = 'open') = (decided_at is null)", name=op.f("ck_reject_decided")),
        sa.CheckConstraint("(state = 'retried') = (retried_in is not null)", name=op.f("ck_reject_retried")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reject")),
        schema="stormproof",
        comment="messages that a sink does not hold, since its table refuses a row of theirs; never removed by the library",
    )
    op.create_index(
        op.f("ix_reject_incarnation_txid_sink"), "reject", ["incarnation", "txid", "sink"], schema="stormproof"
    )
    op.create_index(op.f("ix_reject_incarnation_message"), "reject", ["incarnation", "message"], schema="stormproof")
    op.add_column(
        "txn",
        sa.Column(
            "rejected",
            sa.BigInteger(),
            nullable=False,
            server_default=sa.text("0"),
            comment="messages that a sink rejected",
        ),
        schema="stormproof",
    )
    _replace("ck_txn_cause_known", "txn", _CAUSES.format("'too_many_rejects', "))
    _replace("ck_event_action_known", "event", _ACTIONS.format("'retry_reject', 'drop_reject', "))
    op.execute(ROWS_GIVEN_UP)


def downgrade() -> None:
    op.execute("update stormproof.txn set cause = 'sink_refused' where cause = 'too_many_rejects'")
    op.execute("update stormproof.event set action = 'other' where action in ('retry_reject', 'drop_reject')")
    _replace("ck_event_action_known", "event", _ACTIONS.format(""))
    _replace("ck_txn_cause_known", "txn", _CAUSES.format(""))
    op.drop_column("txn", "rejected", schema="stormproof")
    op.drop_table("reject", schema="stormproof")
