"""What a verdict of `audit verify` covers together with the verdicts before it, and whether it read the tables."""

from __future__ import annotations

import importlib
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

COLUMNS: tuple[tuple[str, str], ...] = (
    ("deep", "whether the rows of the sinks' tables were compared, too"),
    ("tables", "how the tables were read: of which sinks, and whether other writers may add rows; null: they were not"),
    ("basis", "number of the verdict that it continues (--since last); null: it stands by itself"),
    ("chain_from", "the first batch that it covers, together with the clean verdicts that it continues"),
    ("settled_upto", "the next one may begin behind this batch; null: none may continue it"),
)
_VIEW = """
create or replace view stormproof.audit_verdicts as
select t.name as topology, v.id, v.at, v.by, v.verdict, v.first_txid, v.last_txid, v.pruned_upto, v.violations, v.unknowns,
  v.notices, v.kinds, v.txids, v.sinks, v.evidence, v.messages, v.took_ms{more}
from stormproof.verdict v
join stormproof.topology t on t.incarnation = v.incarnation
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def upgrade() -> None:
    json = postgresql.JSONB(astext_type=sa.Text())
    comments = dict(COLUMNS)
    added: tuple[sa.Column[Any], ...] = (
        sa.Column("deep", sa.Boolean(), nullable=False, server_default=sa.false(), comment=comments["deep"]),
        sa.Column("tables", json, nullable=True, comment=comments["tables"]),
        sa.Column("basis", sa.BigInteger(), nullable=True, comment=comments["basis"]),
        sa.Column("chain_from", sa.BigInteger(), nullable=True, comment=comments["chain_from"]),
        sa.Column("settled_upto", sa.BigInteger(), nullable=True, comment=comments["settled_upto"]),
        sa.Column(
            "furthest", json, nullable=True, comment="the batches that had read furthest into the source by then"
        ),
    )
    for column in added:
        op.add_column("verdict", column, schema="stormproof")
    op.execute(_VIEW.format(more="".join(f", v.{name}" for name, _ in COLUMNS)))
    for name, text in COLUMNS:
        op.execute(f"comment on column stormproof.audit_verdicts.{name} is {_quoted(text)}")


def downgrade() -> None:
    # `create or replace` takes no column away; what else depends on the view is a user's, and an error.
    op.execute("drop view stormproof.audit_verdicts")
    op.execute(_VIEW.format(more=""))
    before = importlib.import_module("stormproof.migrations.versions.0018_audit_views").VIEWS
    for name, comment, columns, _ in before:
        if name == "audit_verdicts":
            op.execute(f"comment on view stormproof.{name} is {_quoted(comment)}")
            for column, text in columns:
                op.execute(f'comment on column stormproof.{name}."{column}" is {_quoted(text)}')
    for name in ("furthest", "settled_upto", "chain_from", "basis", "tables", "deep"):
        op.drop_column("verdict", name, schema="stormproof")
