"""What each component and each edge of a topology did in each batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_TOPOLOGY = ("topology", "the topology's name")
_TXID = ("txid", "the batch's number")
_AT = ("at", "when the batch's content was fixed; of a batch whose messages all failed, when it ended")

VIEWS: tuple[tuple[str, str, tuple[tuple[str, str], ...], str], ...] = (
    (
        "audit_components",
        "what each component did in each batch, in the attempt that fixed the batch's content; add the rows up",
        (
            _TOPOLOGY,
            _TXID,
            _AT,
            ("component", "the component or sink; `__acker` is the tracking"),
            ("kind", "spout, operation, bolt, aggregate, join, sink or acker"),
            ("executed", "tuples that it took in; of a spout, messages that were read; of the acker, acks"),
            ("emitted", "tuples that it made, whoever subscribes to them; of the acker, messages with a verdict"),
            ("acked", "tuples that it took in and did not fail; of spout and acker, messages that were complete"),
            ("failed", "messages that failed in it, in whichever attempt; of a spout and the acker, anywhere"),
            ("busy_ms", "time that its code took, over all tasks"),
        ),
        """
select t.name, c.txid, c.at, c.component, c.kind, c.executed, c.emitted, c.acked, c.failed, c.busy_ms
from stormproof.txn_component c
join stormproof.topology t on t.incarnation = c.incarnation
""",
    ),
    (
        "audit_edges",
        "how many tuples of each batch went from one component to another, or to a sink, in that attempt",
        (
            _TOPOLOGY,
            _TXID,
            ("origin", "the component that emitted them"),
            ("stream", "the stream that they were emitted to"),
            ("target", "the component or sink that took them; each copy that a grouping makes counts"),
            ("tuples", "how many"),
        ),
        """
select t.name, e.txid, e.origin, e.stream, e.target, e.tuples
from stormproof.txn_edge e
join stormproof.topology t on t.incarnation = e.incarnation
""",
    ),
)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def upgrade() -> None:
    op.create_table(
        "txn_component",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("component", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "executed",
            sa.BigInteger(),
            nullable=False,
            comment="tuples that it took in; of a spout, messages that were read; of the acker, acks",
        ),
        sa.Column(
            "emitted",
            sa.BigInteger(),
            nullable=False,
            comment="tuples that it made; of the acker, messages with a verdict",
        ),
        sa.Column(
            "acked",
            sa.BigInteger(),
            nullable=False,
            comment="tuples that it took in and did not fail; of spout and acker, messages that were complete",
        ),
        sa.Column(
            "failed",
            sa.BigInteger(),
            nullable=False,
            comment="messages that failed in it; of a spout and the acker, anywhere",
        ),
        sa.Column("busy_ms", sa.Double(), nullable=False, comment="time that it took, over all tasks"),
        sa.CheckConstraint(
            "kind in ('spout', 'operation', 'bolt', 'aggregate', 'join', 'sink', 'acker')",
            name=op.f("ck_txn_component_kind_known"),
        ),
        sa.PrimaryKeyConstraint("incarnation", "txid", "component", name=op.f("pk_txn_component")),
        schema="stormproof",
        comment="what each component did in the attempt that fixed a batch's content; an attempt before it has no row",
    )
    op.create_table(
        "txn_edge",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("txid", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("tuples", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", "txid", "origin", "stream", "target", name=op.f("pk_txn_edge")),
        schema="stormproof",
        comment="how many tuples of that attempt went from one component to another, or to a sink",
    )
    for name, about, columns, query in VIEWS:
        listed = ", ".join(f'"{column}"' for column, _ in columns)
        op.execute(f"create view stormproof.{name} ({listed}) as {query.strip()}")
        op.execute(f"comment on view stormproof.{name} is {_quoted(about)}")
        for column, text in columns:
            op.execute(f'comment on column stormproof.{name}."{column}" is {_quoted(text)}')


def downgrade() -> None:
    for name, _, _, _ in reversed(VIEWS):
        op.execute(f"drop view stormproof.{name}")
    op.drop_table("txn_edge", schema="stormproof")
    op.drop_table("txn_component", schema="stormproof")
