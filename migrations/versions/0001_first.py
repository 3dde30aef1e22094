"""The ledger and the queues, as they first were."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

revision = "0001"
down_revision = None


class Xid8(UserDefinedType[int]):
    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "xid8"


class PgSnapshot(UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "pg_snapshot"


def upgrade() -> None:
    op.create_table(
        "attempt",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("excluded", JSONB(), nullable=False, comment="numbers of the messages left out"),
        sa.Column("expected_messages", sa.BigInteger(), nullable=False),
        sa.Column("expected_xor", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False, comment="running, complete, job_failed, unverified, dead"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("incarnation", "txid", "attempt", name=op.f("pk_attempt")),
        schema="stormproof",
        comment="one try at a batch, written before its job runs",
    )
    op.create_table(
        "backend",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "pid", "started_at", name=op.f("pk_backend")),
        schema="stormproof",
        comment="server processes of a driver's connections; a take-over ends those of older epochs",
    )
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("sink", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True, comment="a message's id as people see it"),
        sa.Column("number", sa.BigInteger(), nullable=True, comment="a message's number in its source"),
        sa.Column("origin", sa.BigInteger(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("component", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("input", sa.Text(), nullable=True),
        sa.Column("detail", JSONB(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
        schema="stormproof",
        comment="append-only: failures, replays, suppressed duplicates, recoveries, operator actions",
    )
    op.create_index(
        op.f("ix_event_incarnation_kind_id"), "event", ["incarnation", "kind", "id"], unique=False, schema="stormproof"
    )
    op.create_index(
        op.f("ix_event_incarnation_message"), "event", ["incarnation", "message"], unique=False, schema="stormproof"
    )
    op.create_index(
        op.f("ix_event_incarnation_txid"), "event", ["incarnation", "txid"], unique=False, schema="stormproof"
    )
    op.create_table(
        "topology",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False, comment="one life of this name"),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="one run of its driver; fences older ones"),
        sa.Column("fingerprint", sa.Text(), nullable=False, comment="hash of the graph's shape, names and schemas"),
        sa.Column("guarantee", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, comment="of the present epoch"),
        sa.Column("driver_host", sa.Text(), nullable=False),
        sa.Column("driver_pid", sa.BigInteger(), nullable=False),
        sa.Column("driver_started", sa.Double(), nullable=False, comment="start of that process, seconds since 1970"),
        sa.Column(
            "stopped_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="set when the driver of the present epoch ended in order",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_topology")),
        sa.UniqueConstraint("incarnation", name=op.f("uq_topology_incarnation")),
        schema="stormproof",
        comment="one row a topology: the fence that every transaction locks first",
    )
    op.create_table(
        "topology_sink",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("sink", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("table_id", sa.Text(), nullable=False),
        sa.Column("description", JSONB(), nullable=True, comment="how to open it for inspection; no secrets"),
        sa.Column("first_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "sink", name=op.f("pk_topology_sink")),
        schema="stormproof",
        comment="the table behind each sink",
    )
    op.create_table(
        "txn",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("guarantee", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="of the driver that opened it"),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="the latest; the one that counts once prepared"),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("position", JSONB(), nullable=False, comment="the slice, as its source describes it"),
        sa.Column("messages", sa.BigInteger(), nullable=False, comment="opened"),
        sa.Column("failed", sa.BigInteger(), server_default="0", nullable=False, comment="messages that failed in it"),
        sa.Column("tuples", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("retry", sa.Boolean(), nullable=False, comment="its messages failed before"),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("prepared_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True, comment="why it is blocked, aborted or abandoned"),
        sa.Column("steps_ms", JSONB(), nullable=True, comment="how long each step took"),
        sa.CheckConstraint(
            "state in ('open', 'prepared', 'blocked', 'committed', 'aborted', 'abandoned')",
            name=op.f("ck_txn_state_known"),
        ),
        sa.PrimaryKeyConstraint("incarnation", "txid", name=op.f("pk_txn")),
        schema="stormproof",
        comment="one row a batch",
    )
    op.create_index(
        "ix_txn_unresolved",
        "txn",
        ["incarnation", "txid"],
        unique=False,
        schema="stormproof",
        postgresql_where=sa.text("ended_at is null"),
    )
    op.create_table(
        "txn_sink",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sink", sa.Text(), nullable=False),
        sa.Column("previous", sa.BigInteger(), nullable=True, comment="the txid that the sink must hold before"),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("files", JSONB(), nullable=False),
        sa.Column(
            "committed_at", sa.DateTime(timezone=True), nullable=True, comment="set once the sink is known to hold it"
        ),
        sa.Column("outcome", sa.Text(), nullable=True, comment="applied, already_held, held_unfinished"),
        sa.PrimaryKeyConstraint("incarnation", "txid", "sink", name=op.f("pk_txn_sink")),
        schema="stormproof",
        comment="what each batch writes to each sink, fixed before any sink is touched",
    )
    op.create_index(
        "ix_txn_sink_held",
        "txn_sink",
        ["incarnation", "sink", "txid"],
        unique=False,
        schema="stormproof",
        postgresql_where=sa.text("committed_at is not null"),
    )
    op.create_table(
        "dead_letter",
        sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("xid", Xid8(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("times_opened", sa.Integer(), nullable=False),
        sa.Column("times_failed", sa.Integer(), nullable=False),
        sa.Column("history", JSONB(), nullable=False),
        sa.Column("dead_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("disposal", sa.Text(), nullable=True),
        sa.Column("disposed_by", sa.Text(), nullable=True),
        sa.Column("disposed_why", sa.Text(), nullable=True),
        sa.Column("disposed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("disposal in ('requeue', 'drop')", name="dead_letter_disposal"),
        sa.CheckConstraint(
            "(disposal is null) = (disposed_by is null) and (disposal is null) = (disposed_at is null)",
            name="dead_letter_disposed",
        ),
        sa.PrimaryKeyConstraint("number"),
        schema="stormproof",
        comment="messages that failed too often; never removed by the library",
    )
    op.create_index(
        "dead_letter_waiting",
        "dead_letter",
        ["queue", "subscription", "id"],
        unique=False,
        schema="stormproof",
        postgresql_where=sa.text("disposal is null"),
    )
    op.create_table(
        "queue",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column(
            "partition_messages", sa.BigInteger(), nullable=False, comment="ids to a partition of the message table"
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("queue"),
        schema="stormproof",
        comment="one row a queue",
    )
    op.create_table(
        "queue_subscription",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False, comment="the newest epoch that acts for the subscription"),
        sa.Column("from_snapshot", PgSnapshot(), nullable=False, comment="everything that it sees was opened once"),
        sa.Column(
            "to_snapshot", PgSnapshot(), nullable=True, comment="the span in hand ends here; null between two spans"
        ),
        sa.Column(
            "after_xid", Xid8(), nullable=True, comment="within the span in hand, everything up to here was opened once"
        ),
        sa.Column("after_id", sa.BigInteger(), nullable=True),
        sa.Column(
            "server", sa.Text(), nullable=False, comment="system identifier of the server that the snapshots are from"
        ),
        sa.Column("timeline", sa.BigInteger(), nullable=False, comment="and its timeline"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["queue"], ["stormproof.queue.queue"], ondelete="cascade"),
        sa.PrimaryKeyConstraint("queue", "subscription"),
        schema="stormproof",
        comment="how far each reader of a queue has come",
    )
    op.create_table(
        "queue_lapse",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("lapsed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["queue", "subscription"],
            ["stormproof.queue_subscription.queue", "stormproof.queue_subscription.subscription"],
            ondelete="cascade",
        ),
        schema="stormproof",
        comment="leases that ran out and whose messages were handed to another: their owners must not confirm",
    )
    op.create_index(
        "queue_lapse_key", "queue_lapse", ["queue", "subscription", "owner", "epoch"], unique=False, schema="stormproof"
    )
    op.create_table(
        "queue_retry",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("xid", Xid8(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("times_opened", sa.Integer(), nullable=False),
        sa.Column("times_failed", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("history", JSONB(), nullable=False),
        sa.Column("slice", sa.BigInteger(), nullable=True, comment="the slice that has it now; null while it waits"),
        sa.ForeignKeyConstraint(
            ["queue", "subscription"],
            ["stormproof.queue_subscription.queue", "stormproof.queue_subscription.subscription"],
            ondelete="cascade",
        ),
        sa.PrimaryKeyConstraint("queue", "subscription", "id"),
        schema="stormproof",
        comment="failed messages, with their payloads: the partition that they came from may be gone",
    )
    op.create_index(
        "queue_retry_slice",
        "queue_retry",
        ["slice", "id"],
        unique=False,
        schema="stormproof",
        postgresql_where=sa.text("slice is not null"),
    )
    op.create_index(
        "queue_retry_waiting",
        "queue_retry",
        ["queue", "subscription", "not_before"],
        unique=False,
        schema="stormproof",
        postgresql_where=sa.text("slice is null"),
    )
    op.create_table(
        "queue_slice",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("subscription", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("from_snapshot", PgSnapshot(), nullable=True),
        sa.Column("to_snapshot", PgSnapshot(), nullable=True),
        sa.Column("after_xid", Xid8(), nullable=True),
        sa.Column("after_id", sa.BigInteger(), nullable=True),
        sa.Column("last_xid", Xid8(), nullable=True),
        sa.Column("last_id", sa.BigInteger(), nullable=True),
        sa.Column("messages", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("min_id", sa.BigInteger(), nullable=False),
        sa.Column("max_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
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
        sa.CheckConstraint("(state = 'returned') = (owner is null)", name="queue_slice_owner"),
        sa.CheckConstraint("kind in ('main', 'retry')", name="queue_slice_kind"),
        sa.CheckConstraint("state in ('open', 'held', 'returned')", name="queue_slice_state"),
        sa.ForeignKeyConstraint(
            ["queue", "subscription"],
            ["stormproof.queue_subscription.queue", "stormproof.queue_subscription.subscription"],
            ondelete="cascade",
        ),
        sa.PrimaryKeyConstraint("id"),
        schema="stormproof",
        comment="messages that were opened and are not resolved: leased, or returned and to be opened again",
    )
    op.create_index(
        "queue_slice_owner_key", "queue_slice", ["queue", "subscription", "owner"], unique=True, schema="stormproof"
    )


def downgrade() -> None:
    op.drop_table("queue_slice", schema="stormproof")
    op.drop_table("queue_retry", schema="stormproof")
    op.drop_table("queue_lapse", schema="stormproof")
    op.drop_table("queue_subscription", schema="stormproof")
    op.drop_table("queue", schema="stormproof")
    op.drop_table("dead_letter", schema="stormproof")
    op.drop_table("txn_sink", schema="stormproof")
    op.drop_table("txn", schema="stormproof")
    op.drop_table("topology_sink", schema="stormproof")
    op.drop_table("topology", schema="stormproof")
    op.drop_table("event", schema="stormproof")
    op.drop_table("backend", schema="stormproof")
    op.drop_table("attempt", schema="stormproof")
