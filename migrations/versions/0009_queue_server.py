"""A queue records the server whose transaction numbers its messages carry, and refuses messages put under another."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

REQUIRE_SERVER = """
create or replace function stormproof_queue.require_server() returns trigger language plpgsql as $$
begin
  if (select system_identifier::text from pg_catalog.pg_control_system()) <> tg_argv[0] then
    raise exception using errcode = 'SP001',
      message = format('queue %s: its messages were put under server %s, and this is server %s: their transaction '
        || 'numbers do not compare, so nothing may be put before the queue is adopted', tg_table_name, tg_argv[0],
        (select system_identifier from pg_catalog.pg_control_system())),
      hint = format('run: stormproof queue adopt %s', tg_table_name);
  end if;
  return null;
end $$
"""

# A reader checks the server each time that it starts; a queue without readers may hold rows of another server.
STAMP = """
do $$
declare
  q record;
  held regclass;
  above boolean;
  line bigint := ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint;
  here text := (select system_identifier::text from pg_control_system());
begin
  for q in
    select n.queue, s.server, s.timeline from stormproof.queue n left join lateral (
      select server, timeline from stormproof.queue_subscription r where r.queue = n.queue
      order by r.server = here desc, r.timeline = line desc, r.created_at desc limit 1
    ) s on true
  loop
    held := to_regclass(format('stormproof_queue.%I', q.queue));
    if q.server is null then
      q.server := here;
      q.timeline := line;
      if held is not null then
        execute format('select exists (select from %s where xid > pg_snapshot_xmax(pg_current_snapshot())'
          ' and xid <> pg_current_xact_id())', held) into above;
        if above then
          q.server := 'unknown';
        end if;
      end if;
    end if;
    update stormproof.queue set server = q.server, timeline = q.timeline where queue = q.queue;
    if held is not null then
      execute format('create or replace trigger stormproof_server before insert on %s for each statement'
        ' execute function stormproof_queue.require_server(%L)', held, q.server);
    end if;
  end loop;
end $$
"""


def upgrade() -> None:
    op.execute("create schema if not exists stormproof_queue")
    op.execute(REQUIRE_SERVER)
    op.add_column(
        "queue",
        sa.Column("server", sa.Text(), comment="system identifier of the server whose numbers the messages carry"),
        schema="stormproof",
    )
    op.add_column("queue", sa.Column("timeline", sa.BigInteger(), comment="and its timeline"), schema="stormproof")
    op.add_column(
        "queue",
        sa.Column(
            "xid_shift",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="added to the server's own transaction numbers: restored messages stay below new ones",
        ),
        schema="stormproof",
    )
    op.execute(STAMP)
    op.alter_column("queue", "server", nullable=False, schema="stormproof")
    op.alter_column("queue", "timeline", nullable=False, schema="stormproof")
    op.create_table(
        "queue_adoption",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("was", postgresql.JSONB(), nullable=False, comment="server, timeline and xid_shift before"),
        sa.Column("now", postgresql.JSONB(), nullable=False, comment="and since"),
        sa.Column("unproven", postgresql.JSONB(), nullable=False, comment="what was accepted without a proof"),
        sa.PrimaryKeyConstraint("number", name=op.f("queue_adoption_pkey")),
        schema="stormproof",
        comment="queues that an operator took over to another server or timeline",
    )


def downgrade() -> None:
    op.drop_table("queue_adoption", schema="stormproof")
    op.execute("drop function stormproof_queue.require_server() cascade")
    op.drop_column("queue", "xid_shift", schema="stormproof")
    op.drop_column("queue", "timeline", schema="stormproof")
    op.drop_column("queue", "server", schema="stormproof")
