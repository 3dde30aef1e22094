"""One pending store for every source: the rows of queues and files move into it as they are.

A slice of files gets a number above those of the queues' slices; what the ledger keeps of a slice names its messages, so
nothing depends on the number.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def of_subscription() -> sa.Column[int]:
    return sa.Column("subscription", sa.BigInteger(), autoincrement=False, nullable=False)


def to_subscription() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["subscription"], ["stormproof.pending_subscription.id"], ondelete="cascade")


MOVE_SUBSCRIPTIONS = """
insert into stormproof.pending_subscription (kind, source, subscription, epoch, position, created_at)
select 'queue', queue, subscription, epoch, jsonb_build_object(
    'from', from_snapshot::text, 'to', to_snapshot::text,
    'after', case when after_xid is not null then jsonb_build_array(after_xid::text::bigint, after_id) end,
    'server', server, 'timeline', timeline
  ), created_at
from stormproof.queue_subscription
union all
select 'files', source, subscription, epoch, jsonb_build_object('next', next_id, 'format', format), created_at
from stormproof.file_subscription
"""

MOVE_SLICES_OF_QUEUES = """
insert into stormproof.pending_slice (id, subscription, at, messages, bytes, state, owner, epoch, expires_at, opened,
  deaths, death_counted)
overriding system value
select o.id, s.id, case when o.kind = 'main' then jsonb_build_object(
    'span', jsonb_build_object(
      'start', o.from_snapshot::text, 'end', o.to_snapshot::text,
      'after', case when o.after_xid is not null then jsonb_build_array(o.after_xid::text::bigint, o.after_id) end,
      'last', case when o.last_xid is not null then jsonb_build_array(o.last_xid::text::bigint, o.last_id) end
    ),
    'ids', jsonb_build_array(o.min_id, o.max_id, o.messages)
  ) end, o.messages, o.bytes, o.state, o.owner, o.epoch, o.expires_at, o.opened, o.deaths, o.death_counted
from stormproof.queue_slice o join stormproof.pending_subscription s
  on s.kind = 'queue' and s.source = o.queue and s.subscription = o.subscription
"""

ABOVE_QUEUES = "(select coalesce(max(id), 0) from stormproof.queue_slice)"

MOVE_SLICES_OF_FILES = f"""
insert into stormproof.pending_slice (id, subscription, at, messages, bytes, state, owner, epoch, expires_at, opened,
  deaths, death_counted)
overriding system value
select {ABOVE_QUEUES} + o.id, s.id,
  case when o.first_id is not null then jsonb_build_object('range', jsonb_build_array(o.first_id, o.stop_id)) end,
  o.messages, o.bytes, o.state, o.owner, o.epoch, o.expires_at, o.opened, o.deaths, o.death_counted
from stormproof.file_slice o join stormproof.pending_subscription s
  on s.kind = 'files' and s.source = o.source and s.subscription = o.subscription
"""

# Above every number that was given out before, also where its slice is resolved.
GO_ON_NUMBERING = """
select setval(pg_get_serial_sequence('stormproof.pending_slice', 'id'), greatest(1,
  (select coalesce(max(id), 0) from stormproof.pending_slice)
  + coalesce(pg_sequence_last_value(pg_get_serial_sequence('stormproof.queue_slice', 'id')::regclass), 0)
  + coalesce(pg_sequence_last_value(pg_get_serial_sequence('stormproof.file_slice', 'id')::regclass), 0)))
"""

MOVE_LAPSES = """
insert into stormproof.pending_lapse (subscription, owner, epoch, lapsed_at)
select s.id, o.owner, o.epoch, o.lapsed_at
from stormproof.queue_lapse o join stormproof.pending_subscription s
  on s.kind = 'queue' and s.source = o.queue and s.subscription = o.subscription
union all
select s.id, o.owner, o.epoch, o.lapsed_at
from stormproof.file_lapse o join stormproof.pending_subscription s
  on s.kind = 'files' and s.source = o.source and s.subscription = o.subscription
"""

MOVE_RETRIES = f"""
insert into stormproof.pending_retry (subscription, id, origin, payload, times_opened, times_failed, not_before, reason,
  history, slice)
select s.id, o.id, o.xid::text::bigint, o.payload, o.times_opened, o.times_failed, o.not_before, o.reason, o.history,
  o.slice
from stormproof.queue_retry o join stormproof.pending_subscription s
  on s.kind = 'queue' and s.source = o.queue and s.subscription = o.subscription
union all
select s.id, o.id, o.file, o.payload, o.times_opened, o.times_failed, o.not_before, o.reason, o.history,
  {ABOVE_QUEUES} + o.slice
from stormproof.file_retry o join stormproof.pending_subscription s
  on s.kind = 'files' and s.source = o.source and s.subscription = o.subscription
"""

MOVE_DEAD_LETTERS_OF_FILES = """
insert into stormproof.dead_letter (kind, source, subscription, id, origin, payload, reason, error, times_opened,
  times_failed, history, dead_at, disposal, disposed_by, disposed_why, disposed_at, new_payload)
select 'files', source, subscription, id, file, payload, reason, error, times_opened,
  times_failed, history, dead_at, disposal, disposed_by, disposed_why, disposed_at, new_payload
from stormproof.file_dead_letter order by number
"""


def upgrade() -> None:
    _make_tables()
    _widen_dead_letters()
    for move in (
        MOVE_SUBSCRIPTIONS,
        MOVE_SLICES_OF_QUEUES,
        MOVE_SLICES_OF_FILES,
        GO_ON_NUMBERING,
        MOVE_LAPSES,
        MOVE_RETRIES,
        MOVE_DEAD_LETTERS_OF_FILES,
    ):
        op.execute(move)
    op.drop_constraint("file_entry_source_subscription_fkey", "file_entry", schema="stormproof")
    for table in ("slice", "lapse", "retry"):
        op.drop_table(f"queue_{table}", schema="stormproof")
        op.drop_table(f"file_{table}", schema="stormproof")
    for table in ("queue_subscription", "file_dead_letter", "file_subscription"):
        op.drop_table(table, schema="stormproof")


def _widen_dead_letters() -> None:
    op.add_column(
        "dead_letter",
        sa.Column("kind", sa.Text(), server_default="queue", nullable=False),
        schema="stormproof",
    )
    op.alter_column("dead_letter", "kind", server_default=None, schema="stormproof")
    op.drop_index("dead_letter_waiting", "dead_letter", schema="stormproof")
    op.alter_column("dead_letter", "queue", new_column_name="source", schema="stormproof")
    op.alter_column("dead_letter", "xid", new_column_name="origin", schema="stormproof")
    op.alter_column(
        "dead_letter",
        "origin",
        type_=sa.BigInteger(),
        postgresql_using="origin::text::bigint",
        schema="stormproof",
    )
    op.create_index(
        "dead_letter_waiting",
        "dead_letter",
        ["kind", "source", "subscription", "id"],
        schema="stormproof",
        postgresql_where=sa.text("disposal is null"),
    )


def _make_tables() -> None:
    op.create_table(
        "pending_subscription",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False, comment="the connector's: queue, files, ..."),
        sa.Column("source", sa.Text(), nullable=False, comment="the source's name among its kind"),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="the newest epoch that acts for the subscription"),
        sa.Column(
            "position",
            JSONB(),
            nullable=False,
            comment="everything before it was opened once; the connector's own words",
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("kind", "source", "subscription", name="pending_subscription_name"),
        schema="stormproof",
        comment="how far each reader of a source is",
    )
    op.create_table(
        "pending_slice",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        of_subscription(),
        sa.Column(
            "at", JSONB(), comment="which messages, in the connector's own words; null: the retries that point here"
        ),
        sa.Column(
            "path", sa.Text(), server_default=sa.text("''"), nullable=False, comment="of a part: its place; else empty"
        ),
        sa.Column("messages", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text()),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column(
            "opened", sa.Integer(), server_default=sa.text("0"), nullable=False, comment="how often it was opened"
        ),
        sa.Column(
            "deaths", sa.Integer(), server_default=sa.text("0"), nullable=False, comment="how many drivers died on it"
        ),
        sa.Column(
            "death_counted",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="for the present opening",
        ),
        sa.CheckConstraint("state in ('open', 'held', 'returned')", name="pending_slice_state"),
        sa.CheckConstraint("(state = 'returned') = (owner is null)", name="pending_slice_owner"),
        to_subscription(),
        sa.PrimaryKeyConstraint("id"),
        schema="stormproof",
        comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
    )
    op.create_index(
        "pending_slice_owner_key", "pending_slice", ["subscription", "owner"], unique=True, schema="stormproof"
    )
    op.create_table(
        "pending_lapse",
        of_subscription(),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("lapsed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        to_subscription(),
        schema="stormproof",
        comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
    )
    op.create_index("pending_lapse_key", "pending_lapse", ["subscription", "owner", "epoch"], schema="stormproof")
    op.create_table(
        "pending_retry",
        of_subscription(),
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("origin", sa.BigInteger(), nullable=False, comment="what the source shows before the number"),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("times_opened", sa.Integer(), nullable=False),
        sa.Column("times_failed", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("history", JSONB(), nullable=False),
        sa.Column("slice", sa.BigInteger(), comment="the slice that has it now; null while it waits"),
        to_subscription(),
        sa.PrimaryKeyConstraint("subscription", "id"),
        schema="stormproof",
        comment="failed messages, with their payloads: where they came from may be gone",
    )
    op.create_index(
        "pending_retry_waiting",
        "pending_retry",
        ["subscription", "not_before"],
        schema="stormproof",
        postgresql_where=sa.text("slice is null"),
    )
    op.create_index(
        "pending_retry_slice",
        "pending_retry",
        ["slice", "id"],
        schema="stormproof",
        postgresql_where=sa.text("slice is not null"),
    )


def downgrade() -> None:
    raise NotImplementedError(
        "what is pending is not moved back into a table for each kind of source: restore a backup"
    )
