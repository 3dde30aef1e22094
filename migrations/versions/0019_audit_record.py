"""What the audit records: tables' versions of each batch, and compactions and vacuums among operators' actions.

The listings of replays and of recovered messages look the cause of a row up after they were cut by a LIMIT: their subqueries
are in the list of columns, which Postgres then works out behind the sort. Counts by cause need all causes, and join them in
one look each: `replay_causes`.
"""

from __future__ import annotations

import importlib

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_ACTIONS = (
    "action in ('retry', 'skip', 'skip_rows', 'adopt', 'adopt_table', 'accept_loss', 'release_table',"
    " 'accept_change', 'adopt_stream', 'adopt_queue', 'retry_reject', 'drop_reject', 'pause', 'resume', 'drain',"
    " 'stop', {}'other')"
)

_CLASS = (
    "case when {0}.reason in ('error', 'sink_error')"
    " then coalesce(substring({0}.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), {0}.reason) else {0}.reason end"
)
_OF_TOPOLOGY = "(s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))"
_SHOWN = (
    "case when starts_with(s.subscription, t.incarnation || ':')"
    " then substr(s.subscription, length(t.incarnation) + 2) || ':' else '' end"
    " || {0}.origin || '-' || case s.kind when 'kafka' then {0}.id & 281474976710655 else {0}.id end"
)
_CAUSE = (
    "(select {} from stormproof.event b where b.incarnation = r.incarnation and b.message = r.message and b.id < r.id"
    " and b.kind in ('failure', 'returned') order by b.id desc limit 1)"
)
"""Of the last time before a replay that its message failed or was returned."""
_REASONS = (
    "(select array_agg(distinct b.{0}) from stormproof.event b"
    " where b.incarnation = f.incarnation and b.message = f.message and b.kind = 'failure')"
)

Columns = tuple[tuple[str, str], ...]
View = tuple[str, str, Columns, str]

_BEFORE: dict[str, View] = {
    view[0]: view for view in importlib.import_module("stormproof.migrations.versions.0018_audit_views").VIEWS
}


def _view(name: str, added: Columns, query: str, said_anew: Columns = ()) -> View:
    """A view as it is from here on: its columns so far, and those that are added behind them."""
    _, about, columns, _ = _BEFORE[name]
    anew = dict(said_anew)
    return name, about, (*((column, anew.get(column, text)) for column, text in columns), *added), query


VIEWS: tuple[View, ...] = (
    _view(
        "audit_replays",
        (),
        f"""
select t.name, r.what, r.at, r.txid, r.message, r.messages, r.attempt,
  case r.what when 'message' then {_CAUSE.format("b.reason")} else r.reason end,
  case r.what when 'message' then {_CAUSE.format("b.component")} end,
  case r.what when 'message' then {_CAUSE.format(_CLASS.format("b"))} else r.error_class end,
  case r.what when 'message' then {_CAUSE.format("b.txid")} else r.failed_in end
from (
  select e.incarnation, e.id, 'message' as what, e.at, e.txid, e.message, cast(1 as bigint) as messages,
    cast(null as integer) as attempt, cast(null as text) as reason, cast(null as text) as error_class,
    cast(null as bigint) as failed_in
  from stormproof.event e
  where e.kind = 'replay'
  union all
  select x.incarnation, null, 'batch', x.ended_at, x.txid, null, x.messages, x.attempt, x.cause, null, null
  from stormproof.txn x
  where x.state = 'aborted' and x.cause is distinct from 'every_message_failed'
  union all
  select e.incarnation, e.id, 'attempt', e.at, e.txid, null, x.messages, e.attempt, e.reason, {_CLASS.format("e")}, e.txid
  from stormproof.event e
  left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
  where e.kind = 'attempt_failed'
) r
join stormproof.topology t on t.incarnation = r.incarnation
""",
    ),
    _view(
        "audit_message",
        (
            (
                "held",
                "for each sink that holds what that batch wrote of the message: the table, when it held it, and the table's version",
            ),
        ),
        f"""
select t.name, e.message, e.id, e.at, e.kind, e.txid, x.state, x.ended_at, e.attempt, e.sink, e.component,
  case when e.kind <> 'operator' then e.reason end, case when e.kind <> 'operator' then {_CLASS.format("e")} end, e.action,
  e.detail ->> 'by', e.detail ->> 'why',
  case when x.state = 'committed' and not exists (
    select from stormproof.event f
    where f.incarnation = e.incarnation and f.message = e.message and f.txid = e.txid and f.kind in ('failure', 'returned')
  ) then (
    select jsonb_object_agg(k.sink, jsonb_build_object('table', b.target, 'at', k.committed_at, 'version', k.version))
    from stormproof.txn_sink k
    left join stormproof.topology_sink b on b.incarnation = k.incarnation and b.sink = k.sink
    where k.incarnation = x.incarnation and k.txid = x.txid and k.committed_at is not null and not exists (
      select from stormproof.reject j
      where j.incarnation = k.incarnation and j.txid = k.txid and j.sink = k.sink and j.message = e.message
    )
  ) end
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
where e.message is not null and e.kind in ('replay', 'failure', 'returned', 'dead_letter', 'reject')
union all
select t.name, {_SHOWN.format("s")}, null, s.disposed_at, 'operator', null, null, null, null, null, null, null, null,
  s.disposal, s.disposed_by, s.disposed_why, null
from stormproof.dead_letter s
join stormproof.topology t on {_OF_TOPOLOGY}
where s.disposal is not null
union all
select t.name, r.message, null, r.decided_at, 'operator', r.txid, null, null, null, r.sink, null, null, null,
  case r.state when 'dropped' then 'drop_reject' else 'retry_reject' end, r.decided_by, r.decided_why, null
from stormproof.reject r
join stormproof.topology t on t.incarnation = r.incarnation
where r.decided_at is not null and r.message is not null
""",
    ),
    _view(
        "audit_txn",
        (
            ("prepare_ms", "how long it took to fix its content in the ledger"),
            ("finish_ms", "how long it took to confirm its messages"),
            ("attempt_errors", "how each attempt at it ended that was not the last, with the class of its error"),
        ),
        f"""
select t.name, x.txid, x.state, x.cause, x.guarantee, x.epoch, x.attempt, x.source, x.messages, x.retry, x.failed,
  x.returned, x.rejected, x.tuples, x.bytes, x.opened_at, x.prepared_at, x.ended_at,
  cast(x.steps_ms ->> 'open' as double precision), cast(x.steps_ms ->> 'job' as double precision),
  cast(x.steps_ms ->> 'wait' as double precision), cast(x.steps_ms ->> 'commit' as double precision), x.steps_ms,
  (select jsonb_object_agg(k.sink, jsonb_build_object('rows', k.rows, 'bytes', k.bytes, 'digest', k.digest,
     'previous', k.previous, 'held_at', k.committed_at, 'outcome', k.outcome, 'table', b.target, 'version', k.version))
   from stormproof.txn_sink k
   left join stormproof.topology_sink b on b.incarnation = k.incarnation and b.sink = k.sink
   where k.incarnation = x.incarnation and k.txid = x.txid),
  cast(x.steps_ms ->> 'prepare' as double precision), cast(x.steps_ms ->> 'finish' as double precision),
  (select jsonb_agg(jsonb_build_object('attempt', e.attempt, 'at', e.at, 'ended', e.reason,
     'error_class', {_CLASS.format("e")}) order by e.id)
   from stormproof.event e
   where e.incarnation = x.incarnation and e.txid = x.txid and e.kind = 'attempt_failed')
from stormproof.txn x
join stormproof.topology t on t.incarnation = x.incarnation
""",
        (
            (
                "steps_ms",
                "all steps, in milliseconds, as far as it got; null where its driver ended before its content was fixed",
            ),
            (
                "sinks",
                "for each sink: rows, bytes, digest, the txid before, when it held the batch, how that ended, its table,"
                " and the table's version that has the batch",
            ),
        ),
    ),
    _view(
        "audit_recovered",
        (),
        f"""
select t.name, f.message, f.failures, f.returns, f.first_at, f.last_at, f.last_in, {_REASONS.format("reason")},
  {_REASONS.format("component")}, x.txid, x.ended_at
from (
  select incarnation, message, count(*) filter (where kind = 'failure') as failures,
    count(*) filter (where kind = 'returned') as returns, min(at) filter (where kind <> 'replay') as first_at,
    max(at) filter (where kind <> 'replay') as last_at, max(txid) filter (where kind <> 'replay') as last_in,
    max(txid) filter (where kind = 'replay') as replayed_in
  from stormproof.event where kind in ('failure', 'returned', 'replay') and message is not null
  group by 1, 2
) f
join stormproof.txn x on x.incarnation = f.incarnation and x.txid = f.replayed_in and x.state = 'committed'
join stormproof.topology t on t.incarnation = f.incarnation
where f.replayed_in > f.last_in
""",
    ),
    _view(
        "audit_actions",
        (("number", "about how many dead letters or rejects it was, where it was about several"),),
        f"""
select t.name, e.at, coalesce(e.action, 'other'), e.detail ->> 'by', e.detail ->> 'why', e.txid, e.sink,
  case when e.action in ('adopt', 'accept_change') then null else e.message end,
  case when e.action in ('retry_reject', 'drop_reject') then cast(e.detail ->> 'rejects' as bigint) end
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
where e.kind = 'operator'
union all
select t.name, s.disposed_at, s.disposal, s.disposed_by, s.disposed_why, null, null, {_SHOWN.format("s")}, 1
from stormproof.dead_letter s
join stormproof.topology t on {_OF_TOPOLOGY}
where s.disposal is not null
union all
select t.name, p.at, 'prune', p.by, p.why, p.upto, null, null, null
from stormproof.prune p
join stormproof.topology t on t.incarnation = p.incarnation
""",
    ),
)


_COUNTED: View = (
    "replay_causes",
    "the rows of audit_replays, for counts by reason, component or class: there each of these is looked up by itself",
    *_BEFORE["audit_replays"][2:],
)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _create(view: View, how: str) -> None:
    name, about, columns, query = view
    listed = ", ".join(f'"{column}"' for column, _ in columns)
    op.execute(f"{how} view stormproof.{name} ({listed}) as {query.strip()}")
    op.execute(f"comment on view stormproof.{name} is {_quoted(about)}")
    for column, text in columns:
        op.execute(f'comment on column stormproof.{name}."{column}" is {_quoted(text)}')


def _replace_actions(more: str) -> None:
    op.drop_constraint(op.f("ck_event_action_known"), "event", schema="stormproof")
    op.create_check_constraint(op.f("ck_event_action_known"), "event", _ACTIONS.format(more), schema="stormproof")


def upgrade() -> None:
    op.add_column(
        "txn_sink",
        sa.Column(
            "version",
            sa.BigInteger(),
            comment="the table's version that has it; null: it has none, or that is not known",
        ),
        schema="stormproof",
    )
    op.add_column("prune", sa.Column("why", sa.Text()), schema="stormproof")
    op.create_index(
        "ix_event_why_again",
        "event",
        ["incarnation", "message", "id"],
        schema="stormproof",
        postgresql_where=sa.text("kind in ('failure', 'returned')"),
    )
    _replace_actions("'compact', 'vacuum', ")
    for view in VIEWS:
        _create(view, "create or replace")
    _create(_COUNTED, "create")


def downgrade() -> None:
    op.execute("drop view stormproof.replay_causes")
    for view in VIEWS:
        op.execute(f"drop view stormproof.{view[0]}")
        _create(_BEFORE[view[0]], "create")
    op.execute("update stormproof.event set action = 'other' where action in ('compact', 'vacuum')")
    _replace_actions("")
    op.drop_index("ix_event_why_again", "event", schema="stormproof")
    op.drop_column("prune", "why", schema="stormproof")
    op.drop_column("txn_sink", "version", schema="stormproof")
