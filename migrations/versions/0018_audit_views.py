"""The audit's views, one for each of its questions, and the verdicts of `audit verify`.

A view shows no payload and no free text of an error, which may quote one: errors are told by their class.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_CLASS = (
    "case when {0}.reason in ('error', 'sink_error')"
    " then coalesce(substring({0}.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), {0}.reason) else {0}.reason end"
)
_OF_TOPOLOGY = "(s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))"
"""A subscription is a topology's: its own, one of an older version, or that of one of several spouts."""
_SHOWN = (
    "case when starts_with(s.subscription, t.incarnation || ':')"
    " then substr(s.subscription, length(t.incarnation) + 2) || ':' else '' end"
    " || {0}.origin || '-' || case s.kind when 'kafka' then {0}.id & 281474976710655 else {0}.id end"
)

Columns = tuple[tuple[str, str], ...]
_TOPOLOGY = ("topology", "the topology's name")
_MESSAGE = ("message", "the message's id, as every command shows it")
_TXID = ("txid", "the batch's number")

VIEWS: tuple[tuple[str, str, Columns, str], ...] = (
    (
        "audit_replays",
        "what was tried again: messages one by one, batches whose messages went back, failed attempts at batches",
        (
            _TOPOLOGY,
            ("what", "message, batch or attempt"),
            ("at", "when it was opened again; of a batch, when its messages went back; of an attempt, when it failed"),
            ("txid", "the batch that opened the message again; else the batch or the attempt's batch"),
            _MESSAGE,
            ("messages", "how many messages were concerned"),
            ("attempt", "number of the failed attempt"),
            ("reason", "why: the message's last failure, the cause of the batch's end, the attempt's outcome"),
            ("component", "where the message failed"),
            ("error_class", "class of the exception, or the reason where none was raised"),
            ("failed_in", "the batch in which the message failed last"),
        ),
        f"""
select t.name, 'message', e.at, e.txid, e.message, cast(1 as bigint), cast(null as integer), f.reason, f.component,
  f.error_class, f.txid
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join lateral (
  select b.reason, b.component, b.txid, {_CLASS.format("b")} as error_class
  from stormproof.event b
  where b.incarnation = e.incarnation and b.message = e.message and b.id < e.id and b.kind in ('failure', 'returned')
  order by b.id desc limit 1
) f on true
where e.kind = 'replay'
union all
select t.name, 'batch', x.ended_at, x.txid, null, x.messages, x.attempt, x.cause, null, null, null
from stormproof.txn x
join stormproof.topology t on t.incarnation = x.incarnation
where x.state = 'aborted' and x.cause is distinct from 'every_message_failed'
union all
select t.name, 'attempt', e.at, e.txid, null, x.messages, e.attempt, e.reason, null, {_CLASS.format("e")}, e.txid
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
where e.kind = 'attempt_failed'
""",
    ),
    (
        "audit_message",
        "what is on record of each message, one row an entry. A message that succeeded at once has none: its batch's has it",
        (
            _TOPOLOGY,
            _MESSAGE,
            ("entry", "number of the entry: later ones are higher"),
            ("at", "when"),
            ("what", "replay (it was opened again), failure, returned, dead_letter, reject, operator"),
            _TXID,
            ("txn_state", "where that batch stands now"),
            ("txn_ended_at", "when that batch ended"),
            ("attempt", "the attempt at the batch in which it failed"),
            ("sink", "the sink that rejected it"),
            ("component", "where it failed"),
            ("reason", "why it failed"),
            ("error_class", "class of the exception, or the reason where none was raised"),
            ("action", "what an operator decided"),
            ("by", "who decided"),
            ("why", "why, in that person's words"),
        ),
        f"""
select t.name, e.message, e.id, e.at, e.kind, e.txid, x.state, x.ended_at, e.attempt, e.sink, e.component,
  case when e.kind <> 'operator' then e.reason end, case when e.kind <> 'operator' then {_CLASS.format("e")} end, e.action,
  e.detail ->> 'by', e.detail ->> 'why'
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
where e.message is not null and e.kind in ('replay', 'failure', 'returned', 'dead_letter', 'reject', 'operator')
""",
    ),
    (
        "audit_txn",
        "one row a batch: what it read, wrote and replayed, and how long each step took",
        (
            _TOPOLOGY,
            _TXID,
            ("state", "open, prepared, blocked, committed, aborted or abandoned"),
            ("cause", "why it is blocked, aborted or abandoned"),
            ("guarantee", "under which it ran"),
            ("epoch", "the run of the driver that opened it"),
            ("attempts", "how often its job was begun"),
            ("source", "where its messages are from"),
            ("messages", "how many were opened"),
            ("retry", "whether its messages failed before"),
            ("failed", "messages that failed in it"),
            ("returned", "messages that went back with failed ones"),
            ("rejected", "messages that a sink rejected"),
            ("tuples", "tuples that its components passed on"),
            ("bytes", "bytes of its messages"),
            ("opened_at", "when its messages were leased"),
            ("prepared_at", "when its content was fixed"),
            ("ended_at", "when it ended"),
            ("open_ms", "how long the open took"),
            ("job_ms", "how long the job took"),
            ("wait_ms", "how long it waited for earlier batches"),
            ("commit_ms", "how long the commit took"),
            ("steps_ms", "all steps, in milliseconds; null where it did not get as far as a commit"),
            (
                "sinks",
                "for each sink: rows, bytes, digest, the txid before, when it held the batch, and how that ended",
            ),
        ),
        """
select t.name, x.txid, x.state, x.cause, x.guarantee, x.epoch, x.attempt, x.source, x.messages, x.retry, x.failed,
  x.returned, x.rejected, x.tuples, x.bytes, x.opened_at, x.prepared_at, x.ended_at,
  cast(x.steps_ms ->> 'open' as double precision), cast(x.steps_ms ->> 'job' as double precision),
  cast(x.steps_ms ->> 'wait' as double precision), cast(x.steps_ms ->> 'commit' as double precision), x.steps_ms,
  (select jsonb_object_agg(k.sink, jsonb_build_object('rows', k.rows, 'bytes', k.bytes, 'digest', k.digest,
     'previous', k.previous, 'held_at', k.committed_at, 'outcome', k.outcome))
   from stormproof.txn_sink k where k.incarnation = x.incarnation and k.txid = x.txid)
from stormproof.txn x
join stormproof.topology t on t.incarnation = x.incarnation
""",
    ),
    (
        "audit_duplicates",
        "duplicates that were not applied, each with the evidence that stopped it",
        (
            _TOPOLOGY,
            ("what", "batch (a sink held it already), micro_batch, key (of a job), delivery (by a message server)"),
            ("at", "when; of a delivery, when the message was confirmed the first time"),
            _TXID,
            ("sink", "the sink that held it"),
            ("micro_batch", "QUERY:BATCH, of a streaming query"),
            ("key", "the key of a job"),
            ("stable_id", "the message's id at its server"),
            ("times", "how often it was suppressed"),
            ("rows", "rows that were not written again"),
            ("digest", "of the content: as prepared for the sink; of a delivery, the SHA-256 of its payload"),
            ("evidence", "in words: which record said that it was there"),
        ),
        f"""
select t.name,
  case when e.detail ->> 'key' is not null then 'key' when e.detail ->> 'batch' is not null then 'micro_batch'
    else 'batch' end,
  e.at, e.txid, e.sink, (e.detail ->> 'query') || ':' || (e.detail ->> 'batch'), e.detail ->> 'key',
  cast(null as text), cast(1 as bigint), k.rows, k.digest,
  case when e.detail ->> 'key' is not null then 'the ledger has the key as txid ' || coalesce(cast(e.txid as text), '?')
    when e.detail ->> 'batch' is not null then 'the ledger has the micro-batch as taken'
    else 'the own record of sink ' || coalesce(e.sink, '?') || ' has txid ' || coalesce(cast(e.txid as text), '?') end
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join stormproof.txn_sink k on k.incarnation = e.incarnation and k.txid = e.txid and k.sink = e.sink
where e.kind = 'suppressed'
union all
select t.name, 'delivery', m.resolved_at, null, null, null, null, m.stable_id, m.suppressed, null,
  encode(m.digest, 'hex'), 'the journal of ' || s.source || ' has it as message ' || m.number || ', confirmed before'
from stormproof.pending_message m
join stormproof.pending_subscription s on s.id = m.subscription
join stormproof.topology t on {_OF_TOPOLOGY}
where m.suppressed > 0
""",
    ),
    (
        "audit_pending",
        "one row a source that a topology reads: what was opened and is not resolved. What was never opened, and the lag "
        "behind it, only the source can count: stormproof audit pending",
        (
            _TOPOLOGY,
            ("source", "the source's name"),
            ("kind", "which connector: queue, files, kafka, ..."),
            ("leased", "messages in batches that have not ended"),
            ("given_back", "messages that are opened again before any new one"),
            ("waiting", "failed messages that wait for their retry"),
            ("due", "those of them whose time has come"),
            ("undecided_dead_letters", "dead letters about which nobody has decided"),
            ("oldest_txid", "the oldest batch of the topology that has not ended"),
            ("oldest_opened_at", "when it was opened"),
            ("next_retry_at", "when the first of the waiting messages may be opened again"),
        ),
        f"""
select t.name, s.source, s.kind, coalesce(l.leased, 0), coalesce(l.given_back, 0), coalesce(r.waiting, 0),
  coalesce(r.due, 0), coalesce(d.undecided, 0), o.txid, o.opened_at, r.next_at
from stormproof.topology t
join stormproof.pending_subscription s on {_OF_TOPOLOGY}
left join lateral (
  select sum(messages) filter (where state <> 'returned') as leased,
    sum(messages) filter (where state = 'returned') as given_back
  from stormproof.pending_slice where subscription = s.id
) l on true
left join lateral (
  select count(*) as waiting, count(*) filter (where not_before <= now()) as due, min(not_before) as next_at
  from stormproof.pending_retry where subscription = s.id and slice is null
) r on true
left join lateral (
  select count(*) as undecided from stormproof.dead_letter
  where kind = s.kind and source = s.source and subscription = s.subscription and disposal is null
) d on true
left join lateral (
  select txid, opened_at from stormproof.txn
  where incarnation = t.incarnation and ended_at is null order by txid limit 1
) o on true
""",
    ),
    (
        "audit_dead_letters",
        "messages that failed too often, and messages that a sink's table refuses; without payloads",
        (
            _TOPOLOGY,
            ("what", "dead_letter or reject"),
            _MESSAGE,
            ("source", "the source of a dead letter"),
            ("sink", "the sink that rejected it"),
            ("txid", "the batch that the sink rejected it in"),
            ("at", "when"),
            ("reason", "why it failed last; of a reject, its SQLSTATE, or refused"),
            ("error_class", "class of the exception, or the reason where none was raised"),
            ("times_opened", "how often a dead letter was opened"),
            ("times_failed", "how often it failed"),
            ("rows", "rows of a reject, which the sink does not hold"),
            (
                "state",
                "of a dead letter: undecided, requeue, drop, edit; of a reject: open, retrying, retried, dropped",
            ),
            ("decided_by", "who decided"),
            ("decided_why", "why, in that person's words"),
            ("decided_at", "when"),
        ),
        f"""
select t.name, 'dead_letter', {_SHOWN.format("s")}, s.source, cast(null as text), cast(null as bigint), s.dead_at,
  s.reason, {_CLASS.format("s")}, s.times_opened, s.times_failed, cast(null as bigint), coalesce(s.disposal, 'undecided'),
  s.disposed_by, s.disposed_why, s.disposed_at
from stormproof.dead_letter s
join stormproof.topology t on {_OF_TOPOLOGY}
union all
select t.name, 'reject', r.message, null, r.sink, r.txid, r.at, coalesce(r.sqlstate, 'refused'),
  coalesce(r.sqlstate, 'refused'), null, null, r.rows, r.state, r.decided_by, r.decided_why, r.decided_at
from stormproof.reject r
join stormproof.topology t on t.incarnation = r.incarnation
""",
    ),
    (
        "audit_attempts",
        "how often messages failed, and how often the jobs of batches were begun: a histogram",
        (
            _TOPOLOGY,
            ("what", "message or batch"),
            ("times", "of messages: how often they failed; of batches: how often their job was begun"),
            ("number", "how many messages, or batches, as far as the ledger was not pruned"),
        ),
        """
with failing as (
  select incarnation, message, count(*) as times from stormproof.event where kind = 'failure' group by 1, 2
)
select t.name, 'message', f.times, f.number
from (
  select incarnation, times, count(*) as number from failing group by 1, 2
  union all
  select x.incarnation, 0, greatest(cast(sum(x.messages) as bigint) - coalesce(max(g.number), 0), 0)
  from stormproof.txn x
  left join (select incarnation, count(*) as number from failing group by 1) g on g.incarnation = x.incarnation
  where not x.retry and (x.state <> 'aborted' or x.cause = 'every_message_failed')
  group by 1
) f
join stormproof.topology t on t.incarnation = f.incarnation
union all
select t.name, 'batch', x.times, x.number
from (select incarnation, attempt as times, count(*) as number from stormproof.txn group by 1, 2) x
join stormproof.topology t on t.incarnation = x.incarnation
""",
    ),
    (
        "audit_recovered",
        "messages that failed, or were returned, and were committed later",
        (
            _TOPOLOGY,
            _MESSAGE,
            ("failures", "how often it failed"),
            ("returns", "how often it went back with a failed message, without failing itself"),
            ("first_at", "when that happened first"),
            ("last_at", "when that happened last"),
            ("last_in", "the batch in which it happened last"),
            ("reasons", "why it failed"),
            ("components", "where it failed"),
            ("committed_in", "the batch that committed it"),
            ("committed_at", "when"),
        ),
        """
select t.name, f.message, f.failures, f.returns, f.first_at, f.last_at, f.last_in, f.reasons, f.components, x.txid,
  x.ended_at
from (
  select incarnation, message, count(*) filter (where kind = 'failure') as failures,
    count(*) filter (where kind = 'returned') as returns, min(at) filter (where kind <> 'replay') as first_at,
    max(at) filter (where kind <> 'replay') as last_at, max(txid) filter (where kind <> 'replay') as last_in,
    max(txid) filter (where kind = 'replay') as replayed_in,
    array_agg(distinct reason) filter (where kind = 'failure') as reasons,
    array_agg(distinct component) filter (where kind = 'failure') as components
  from stormproof.event where kind in ('failure', 'returned', 'replay') and message is not null
  group by 1, 2
) f
join stormproof.txn x on x.incarnation = f.incarnation and x.txid = f.replayed_in and x.state = 'committed'
join stormproof.topology t on t.incarnation = f.incarnation
where f.replayed_in > f.last_in
""",
    ),
    (
        "audit_behind",
        "one row a sink: the last batch that it is known to hold, and what is fixed for it and not yet known to be held",
        (
            _TOPOLOGY,
            ("sink", "the sink's name"),
            ("target", "its table"),
            ("held_txid", "the last batch that it is known to hold"),
            ("newest_txid", "the newest batch of the topology"),
            ("behind_txids", "batches whose content is fixed, and which it is not known to hold"),
            ("behind_rows", "their rows"),
            ("behind_since", "when the first of them was fixed"),
            ("blocked_txid", "the first of them that is blocked"),
        ),
        """
select t.name, b.sink, b.target,
  (select max(k.txid) from stormproof.txn_sink k
   where k.incarnation = b.incarnation and k.sink = b.sink and k.committed_at is not null),
  (select max(x.txid) from stormproof.txn x where x.incarnation = b.incarnation),
  coalesce(o.txids, 0), coalesce(o.rows, 0), o.since, o.blocked
from stormproof.topology_sink b
join stormproof.topology t on t.incarnation = b.incarnation
left join lateral (
  select count(*) as txids, cast(sum(k.rows) as bigint) as rows, min(x.prepared_at) as since,
    min(x.txid) filter (where x.state = 'blocked') as blocked
  from stormproof.txn x
  join stormproof.txn_sink k on k.incarnation = x.incarnation and k.txid = x.txid
  where x.incarnation = b.incarnation and x.ended_at is null and k.sink = b.sink and k.committed_at is null
    and k.outcome is null
) o on true
""",
    ),
    (
        "audit_aborted",
        "batches that were aborted or abandoned, and each time that one was blocked",
        (
            _TOPOLOGY,
            ("what", "aborted, abandoned, blocked (now), or was_blocked"),
            _TXID,
            ("at", "when; of a batch that is blocked, or was, when that was noticed"),
            ("cause", "why; null where a block was resolved since"),
            ("sink", "the sink that refused it"),
            ("messages", "messages of the batch"),
            ("attempts", "how often its job was begun"),
            ("opened_at", "when it was opened"),
        ),
        """
select t.name, x.state, x.txid, x.ended_at, x.cause, cast(null as text), x.messages, x.attempt, x.opened_at
from stormproof.txn x
join stormproof.topology t on t.incarnation = x.incarnation
where x.state in ('aborted', 'abandoned')
union all
select t.name,
  case when x.state = 'blocked' and not exists (
    select from stormproof.event later
    where later.incarnation = e.incarnation and later.txid = e.txid and later.kind = 'blocked' and later.id > e.id
  ) then 'blocked' else 'was_blocked' end,
  e.txid, e.at, x.cause, e.sink, x.messages, x.attempt, x.opened_at
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
where e.kind = 'blocked'
""",
    ),
    (
        "audit_actions",
        "what operators decided, by whom and why",
        (
            _TOPOLOGY,
            ("at", "when"),
            ("action", "what: retry, skip, adopt_table, pause, requeue, prune, ..."),
            ("by", "who"),
            ("why", "why, in that person's words"),
            ("txid", "the batch that it was about; of a prune, the last one of which the record was removed"),
            ("sink", "the sink that it was about"),
            ("message", "the message that it was about"),
        ),
        f"""
select t.name, e.at, coalesce(e.action, 'other'), e.detail ->> 'by', e.detail ->> 'why', e.txid, e.sink,
  case when e.action in ('adopt', 'accept_change') then null else e.message end
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
where e.kind = 'operator'
union all
select t.name, s.disposed_at, s.disposal, s.disposed_by, s.disposed_why, null, null, {_SHOWN.format("s")}
from stormproof.dead_letter s
join stormproof.topology t on {_OF_TOPOLOGY}
where s.disposal is not null
union all
select t.name, p.at, 'prune', p.by, null, p.upto, null, null
from stormproof.prune p
join stormproof.topology t on t.incarnation = p.incarnation
""",
    ),
    (
        "audit_verdicts",
        "the verdicts of stormproof audit verify, each with what it looked at",
        (
            _TOPOLOGY,
            ("id", "number of the verdict: later ones are higher"),
            ("at", "when the check ended"),
            ("by", "who ran it"),
            ("verdict", "clean, violation or cannot_tell: of the scope alone"),
            ("first_txid", "the first batch that was checked"),
            ("last_txid", "the last one; null: there was none"),
            ("pruned_upto", "batches up to here were no longer on record, and were not checked"),
            ("violations", "how many things were wrong"),
            ("unknowns", "how many questions the evidence left open"),
            ("notices", "how many things there were to know"),
            ("kinds", "violations and notices, counted by kind"),
            ("txids", "batches that were checked"),
            ("sinks", "sinks that were checked"),
            ("evidence", "entries of the sinks' own records that were compared"),
            ("messages", "openings of messages that were checked"),
            ("took_ms", "how long the check took"),
        ),
        """
select t.name, v.id, v.at, v.by, v.verdict, v.first_txid, v.last_txid, v.pruned_upto, v.violations, v.unknowns,
  v.notices, v.kinds, v.txids, v.sinks, v.evidence, v.messages, v.took_ms
from stormproof.verdict v
join stormproof.topology t on t.incarnation = v.incarnation
""",
    ),
)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def upgrade() -> None:
    op.create_table(
        "verdict",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("first_txid", sa.BigInteger(), nullable=False),
        sa.Column("last_txid", sa.BigInteger(), nullable=True, comment="null: there was none"),
        sa.Column("pruned_upto", sa.BigInteger(), nullable=False),
        sa.Column("violations", sa.BigInteger(), nullable=False),
        sa.Column("unknowns", sa.BigInteger(), nullable=False),
        sa.Column("notices", sa.BigInteger(), nullable=False),
        sa.Column(
            "kinds",
            sa.JSON().with_variant(postgresql.JSONB(), "postgresql"),
            nullable=False,
            comment="violations and notices, counted by kind",
        ),
        sa.Column("txids", sa.BigInteger(), nullable=False),
        sa.Column("sinks", sa.BigInteger(), nullable=False),
        sa.Column("evidence", sa.BigInteger(), nullable=False),
        sa.Column("messages", sa.BigInteger(), nullable=False),
        sa.Column("took_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("verdict in ('clean', 'violation', 'cannot_tell')", name=op.f("ck_verdict_verdict_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verdict")),
        schema="stormproof",
        comment="one row a run of audit verify: what it looked at and what it found",
    )
    op.create_index(op.f("ix_verdict_incarnation_id"), "verdict", ["incarnation", "id"], schema="stormproof")
    # Entries come only with a duplicate: a delivery that is new to the journal is not in it.
    op.create_index(
        "pending_message_suppressed",
        "pending_message",
        ["subscription"],
        schema="stormproof",
        postgresql_where=sa.text("suppressed > 0"),
    )
    for name, comment, columns, query in VIEWS:
        listed = ", ".join(f'"{column}"' for column, _ in columns)
        op.execute(f"create view stormproof.{name} ({listed}) as {query.strip()}")
        op.execute(f"comment on view stormproof.{name} is {_quoted(comment)}")
        for column, text in columns:
            op.execute(f'comment on column stormproof.{name}."{column}" is {_quoted(text)}')


def downgrade() -> None:
    for name, _, _, _ in reversed(VIEWS):
        op.execute(f"drop view stormproof.{name}")
    op.drop_index("pending_message_suppressed", "pending_message", schema="stormproof")
    op.drop_table("verdict", schema="stormproof")
