"""One reason for a reject in every view, batches given up among the dead letters, and confirmations that are used once."""

from __future__ import annotations

import importlib

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

Columns = tuple[tuple[str, str], ...]
View = tuple[str, str, Columns, str]

_BEFORE: dict[str, View] = {
    view[0]: view
    for module in ("0018_audit_views", "0019_audit_record")
    for view in importlib.import_module(f"stormproof.migrations.versions.{module}").VIEWS
}
_REASON = "case when e.kind <> 'operator' then e.reason end, case when e.kind <> 'operator' then "


def _of_rejects(query: str) -> str:
    """The view of messages with a reject's reason as the view of rejects has it: the SQLSTATE, or ``refused``."""
    said = "coalesce(e.detail ->> 'sqlstate', e.reason)"
    begin = query.index(_REASON)
    end = query.index(" end, e.action,", begin)
    error_class = query[begin + len(_REASON) : end]
    anew = (
        f"case when e.kind = 'reject' then {said} when e.kind <> 'operator' then e.reason end,"
        f" case when e.kind = 'reject' then {said} when e.kind <> 'operator' then {error_class}"
    )
    return query[:begin] + anew + query[end:]


def _with_skips(query: str) -> str:
    """The view of dead letters and rejects with the batches that operators gave up at a sink, all rows of each."""
    return f"""{query.rstrip()}
union all
select t.name, 'skip', null, null, e.sink, e.txid, e.at, 'skipped', 'skipped', null, null,
  cast(e.detail ->> 'rows' as bigint), 'dropped', e.detail ->> 'by', e.detail ->> 'why', e.at
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
where e.kind = 'operator' and e.action = 'skip' and not exists (
  select from stormproof.txn_sink k
  where k.incarnation = e.incarnation and k.txid = e.txid and k.sink = e.sink and k.outcome is distinct from 'skipped'
)
"""


def _view(name: str, query: str, about: str | None = None, **said_anew: str) -> View:
    """A view as it is from here on; its columns are those of before."""
    _, before, columns, _ = _BEFORE[name]
    return name, about or before, tuple((column, said_anew.get(column, text)) for column, text in columns), query


VIEWS: tuple[View, ...] = (
    _view(
        "audit_message",
        _of_rejects(_BEFORE["audit_message"][3]),
        reason="why it failed; of a reject, its SQLSTATE, or refused",
        error_class="class of the exception, or the reason where none was raised",
    ),
    _view(
        "audit_dead_letters",
        _with_skips(_BEFORE["audit_dead_letters"][3]),
        "messages that failed too often, messages that a sink's table refuses, and batches of which an operator gave up all"
        " rows at a sink; without payloads",
        what="dead_letter, reject or skip",
        message="the message's id, as every command shows it; of a skip none: all messages of its batch",
        sink="the sink that rejected it, or was skipped",
        txid="the batch that the sink rejected it in, or was skipped for",
        reason="why it failed last; of a reject, its SQLSTATE, or refused; of a skip, skipped",
        rows="rows of a reject or a skip, which the sink does not hold",
        state="of a dead letter: undecided, requeue, drop, edit; of a reject: open, retrying, retried, dropped; of a skip:"
        " dropped",
    ),
)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _create(view: View) -> None:
    name, about, columns, query = view
    listed = ", ".join(f'"{column}"' for column, _ in columns)
    op.execute(f"create or replace view stormproof.{name} ({listed}) as {query.strip()}")
    op.execute(f"comment on view stormproof.{name} is {_quoted(about)}")
    for column, text in columns:
        op.execute(f'comment on column stormproof.{name}."{column}" is {_quoted(text)}')


def upgrade() -> None:
    op.create_table(
        "confirmation",
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of the form's secret"),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False, comment="the decision, by its name on the page"),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("click", sa.Text(), nullable=False, comment="tells one sending of the form from another"),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_confirmation")),
        schema="stormproof",
        comment="forms of the page that were confirmed: each is good for one decision, whichever process gets it",
    )
    op.create_index(op.f("ix_confirmation_incarnation_at"), "confirmation", ["incarnation", "at"], schema="stormproof")
    # Few rejects are open, and each row may hold a payload: to count them, the table itself is not read.
    op.create_index(
        "ix_reject_open",
        "reject",
        ["incarnation"],
        schema="stormproof",
        postgresql_where=sa.text("state = 'open'"),
    )
    for view in VIEWS:
        _create(view)


def downgrade() -> None:
    for view in VIEWS:
        _create(_BEFORE[view[0]])
    op.drop_index("ix_reject_open", "reject", schema="stormproof")
    op.drop_table("confirmation", schema="stormproof")
