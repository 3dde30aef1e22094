-- The audit's views, one for each of its questions. The lines above a view are the question, of which its command and its
-- page are made (trident/declarations/questions.py says what each line means); no schema depends on them. A view shows no
-- payload and no free text of an error, which may quote one: errors are told by their class.
--
-- A subscription is a topology's: its own, or that of one of several spouts.
--
-- The listings of replays and of recovered messages look the cause of a row up after they were cut by a LIMIT: their
-- subqueries are in the list of columns, which Postgres then works out behind the sort. Counts by cause need all causes, and
-- join them in one look each: `replay_causes`.

-- question: replays
-- asks: What was tried again: why, where, when?
-- page: replays
-- says: Show which messages were replayed, why, how often, and which txid committed them.
-- example: stormproof audit replays orders --since 1d --group reason --group component --group hour
-- order: at desc nulls last, txid desc, message
-- counts: what, reason, component; day
-- counted: stormproof.replay_causes
create view stormproof.audit_replays (
  topology, what, at, txid, message, messages, attempt, reason, component, error_class, failed_in
) as
select t.name, r.what, r.at, r.txid, r.message, r.messages, r.attempt,
  case r.what when 'message' then (select b.reason
    from stormproof.event b
    where b.incarnation = r.incarnation and b.message = r.message and b.id < r.id and b.kind in ('failure', 'returned')
    order by b.id desc limit 1
  ) else r.reason end,
  case r.what when 'message' then (select b.component
    from stormproof.event b
    where b.incarnation = r.incarnation and b.message = r.message and b.id < r.id and b.kind in ('failure', 'returned')
    order by b.id desc limit 1
  ) end,
  case r.what when 'message' then (select case when b.reason in ('error', 'sink_error')
      then coalesce(substring(b.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), b.reason) else b.reason end
    from stormproof.event b
    where b.incarnation = r.incarnation and b.message = r.message and b.id < r.id and b.kind in ('failure', 'returned')
    order by b.id desc limit 1
  ) else r.error_class end,
  case r.what when 'message' then (select b.txid
    from stormproof.event b
    where b.incarnation = r.incarnation and b.message = r.message and b.id < r.id and b.kind in ('failure', 'returned')
    order by b.id desc limit 1
  ) else r.failed_in end
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
  select e.incarnation, e.id, 'attempt', e.at, e.txid, null, x.messages, e.attempt, e.reason, case when e.reason in ('error', 'sink_error')
      then coalesce(substring(e.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), e.reason) else e.reason end,
  e.txid
  from stormproof.event e
  left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
  where e.kind = 'attempt_failed'
) r
join stormproof.topology t on t.incarnation = r.incarnation;
comment on view stormproof.audit_replays is 'one row per message that was opened again, batch that was given back, and failed attempt';
comment on column stormproof.audit_replays.topology is 'the topology''s name';
comment on column stormproof.audit_replays.what is 'message, batch or attempt';
comment on column stormproof.audit_replays.at is 'when it was opened again, given back, or failed';
comment on column stormproof.audit_replays.txid is 'the batch that opened the message again, was given back, or was attempted';
comment on column stormproof.audit_replays.message is 'the message''s id, as every command shows it';
comment on column stormproof.audit_replays.messages is 'how many messages';
comment on column stormproof.audit_replays.attempt is 'number of the failed attempt';
comment on column stormproof.audit_replays.reason is 'the message''s last failure, the batch''s cause, or the attempt''s outcome';
comment on column stormproof.audit_replays.component is 'where the message failed';
comment on column stormproof.audit_replays.error_class is 'class of the exception, or the reason if there was none';
comment on column stormproof.audit_replays.failed_in is 'the batch in which the message failed last';

-- question: message
-- asks: What became of a message?
-- page: find
create view stormproof.audit_message (
  topology, message, entry, at, what, txid, txn_state, txn_ended_at, attempt, sink, component, reason, error_class,
  action, by, why, held
) as
select t.name, e.message, e.id, e.at, e.kind, e.txid, x.state, x.ended_at, e.attempt, e.sink, e.component,
  case when e.kind = 'reject' then coalesce(e.detail ->> 'sqlstate', e.reason) when e.kind <> 'operator' then e.reason end,
  case when e.kind = 'reject' then coalesce(e.detail ->> 'sqlstate', e.reason) when e.kind <> 'operator' then case when e.reason in ('error', 'sink_error')
      then coalesce(substring(e.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), e.reason) else e.reason end end,
  e.action,
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
select t.name,
  case when starts_with(s.subscription, t.incarnation || ':')
    then substr(s.subscription, length(t.incarnation) + 2) || ':' else '' end
    || s.origin || '-' || case s.kind when 'kafka' then s.id & 281474976710655 else s.id end, null, s.disposed_at, 'operator', null, null, null, null, null, null, null, null,
  s.disposal, s.disposed_by, s.disposed_why, null
from stormproof.dead_letter s
join stormproof.topology t on (s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))
where s.disposal is not null
union all
select t.name, r.message, null, r.decided_at, 'operator', r.txid, null, null, null, r.sink, null, null, null,
  case r.state when 'dropped' then 'drop_reject' else 'retry_reject' end, r.decided_by, r.decided_why, null
from stormproof.reject r
join stormproof.topology t on t.incarnation = r.incarnation
where r.decided_at is not null and r.message is not null;
comment on view stormproof.audit_message is 'one row per entry about a message. A message that succeeded at once has none: its batch has';
comment on column stormproof.audit_message.topology is 'the topology''s name';
comment on column stormproof.audit_message.message is 'the message''s id, as every command shows it';
comment on column stormproof.audit_message.entry is 'number of the entry: later ones are higher';
comment on column stormproof.audit_message.at is 'when';
comment on column stormproof.audit_message.what is 'replay (it was opened again), failure, returned, dead_letter, reject, operator';
comment on column stormproof.audit_message.txid is 'the batch''s number';
comment on column stormproof.audit_message.txn_state is 'where that batch stands now';
comment on column stormproof.audit_message.txn_ended_at is 'when that batch ended';
comment on column stormproof.audit_message.attempt is 'the attempt at the batch in which it failed';
comment on column stormproof.audit_message.sink is 'the sink that rejected it';
comment on column stormproof.audit_message.component is 'where it failed';
comment on column stormproof.audit_message.reason is 'why it failed; of a reject, its SQLSTATE, or refused';
comment on column stormproof.audit_message.error_class is 'class of the exception, or the reason if there was none';
comment on column stormproof.audit_message.action is 'what an operator decided';
comment on column stormproof.audit_message.by is 'who decided';
comment on column stormproof.audit_message.why is 'why, in that person''s words';
comment on column stormproof.audit_message.held is 'per sink that holds what the batch wrote of the message: table, time, and the table''s version';

-- question: txn
-- asks: What did a batch read, write and replay, and how long did it take?
-- page: batches
create view stormproof.audit_txn (
  topology, txid, state, cause, guarantee, epoch, attempts, source, messages, retry, failed, returned, rejected,
  tuples, bytes, opened_at, prepared_at, ended_at, open_ms, job_ms, wait_ms, commit_ms, steps_ms, sinks, prepare_ms,
  finish_ms, attempt_errors
) as
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
     'error_class', case when e.reason in ('error', 'sink_error')
         then coalesce(substring(e.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), e.reason) else e.reason end) order by e.id)
   from stormproof.event e
   where e.incarnation = x.incarnation and e.txid = x.txid and e.kind = 'attempt_failed')
from stormproof.txn x
join stormproof.topology t on t.incarnation = x.incarnation;
comment on view stormproof.audit_txn is 'one row per batch';
comment on column stormproof.audit_txn.topology is 'the topology''s name';
comment on column stormproof.audit_txn.txid is 'the batch''s number';
comment on column stormproof.audit_txn.state is 'open, prepared, blocked, committed, aborted or abandoned';
comment on column stormproof.audit_txn.cause is 'why it is blocked, aborted or abandoned';
comment on column stormproof.audit_txn.guarantee is 'under which it ran';
comment on column stormproof.audit_txn.epoch is 'the run of the driver that opened it';
comment on column stormproof.audit_txn.attempts is 'how often its job was begun';
comment on column stormproof.audit_txn.source is 'where its messages are from';
comment on column stormproof.audit_txn.messages is 'how many were opened';
comment on column stormproof.audit_txn.retry is 'whether its messages failed before';
comment on column stormproof.audit_txn.failed is 'messages that failed in it';
comment on column stormproof.audit_txn.returned is 'messages that went back with failed ones';
comment on column stormproof.audit_txn.rejected is 'messages that a sink rejected';
comment on column stormproof.audit_txn.tuples is 'tuples that its components passed on';
comment on column stormproof.audit_txn.bytes is 'bytes of its messages';
comment on column stormproof.audit_txn.opened_at is 'when its messages were leased';
comment on column stormproof.audit_txn.prepared_at is 'when its content was fixed';
comment on column stormproof.audit_txn.ended_at is 'when it ended';
comment on column stormproof.audit_txn.open_ms is 'milliseconds of the open';
comment on column stormproof.audit_txn.job_ms is 'of the job';
comment on column stormproof.audit_txn.wait_ms is 'of the wait for earlier batches';
comment on column stormproof.audit_txn.commit_ms is 'of the commit';
comment on column stormproof.audit_txn.steps_ms is 'milliseconds of all steps, as far as it got; null if its driver ended before prepare';
comment on column stormproof.audit_txn.sinks is 'per sink: rows, bytes, digest, previous txid, when it held the batch, outcome, table, and the table''s version with the batch';
comment on column stormproof.audit_txn.prepare_ms is 'of the prepare in the ledger';
comment on column stormproof.audit_txn.finish_ms is 'of the confirmation of its messages';
comment on column stormproof.audit_txn.attempt_errors is 'outcome and error class of each attempt but the last';

-- question: duplicates
-- asks: Which duplicates were suppressed, by which evidence?
-- says: Show the duplicates that were suppressed, each with the evidence: which record had it already.
-- example: stormproof audit duplicates orders --since 7d
-- order: at desc nulls last, txid desc, stable_id
-- counts: what, sink
create view stormproof.audit_duplicates (
  topology, what, at, txid, sink, micro_batch, key, stable_id, times, rows, digest, evidence
) as
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
join stormproof.topology t on (s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))
where m.suppressed > 0;
comment on view stormproof.audit_duplicates is 'one row per duplicate that was not applied';
comment on column stormproof.audit_duplicates.topology is 'the topology''s name';
comment on column stormproof.audit_duplicates.what is 'batch (a sink held it already), micro_batch, key (of a job), delivery (by a message server)';
comment on column stormproof.audit_duplicates.at is 'when; of a delivery, when the message was confirmed the first time';
comment on column stormproof.audit_duplicates.txid is 'the batch''s number';
comment on column stormproof.audit_duplicates.sink is 'the sink that held it';
comment on column stormproof.audit_duplicates.micro_batch is 'QUERY:BATCH, of a streaming query';
comment on column stormproof.audit_duplicates.key is 'the key of a job';
comment on column stormproof.audit_duplicates.stable_id is 'the message''s id at its server';
comment on column stormproof.audit_duplicates.times is 'how often it was suppressed';
comment on column stormproof.audit_duplicates.rows is 'rows that were not written again';
comment on column stormproof.audit_duplicates.digest is 'of the prepared content; of a delivery, the SHA-256 of its payload';
comment on column stormproof.audit_duplicates.evidence is 'which record said that it was there, in words';

-- question: pending
-- asks: What is pending in each source, and how old is it?
-- says: Show what is pending of each source, since when, and what waits there that was never opened.
-- example: stormproof audit pending --json
-- order: topology, source
create view stormproof.audit_pending (
  topology, source, kind, leased, given_back, waiting, due, undecided_dead_letters, oldest_txid, oldest_opened_at,
  next_retry_at
) as
select t.name, s.source, s.kind, coalesce(l.leased, 0), coalesce(l.given_back, 0), coalesce(r.waiting, 0),
  coalesce(r.due, 0), coalesce(d.undecided, 0), o.txid, o.opened_at, r.next_at
from stormproof.topology t
join stormproof.pending_subscription s on (s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))
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
) o on true;
comment on view stormproof.audit_pending is 'one row per source: what was opened and is not resolved. What was never opened, and the lag, only the source can count: stormproof audit pending';
comment on column stormproof.audit_pending.topology is 'the topology''s name';
comment on column stormproof.audit_pending.source is 'the source''s name';
comment on column stormproof.audit_pending.kind is 'which connector: queue, files, kafka, ...';
comment on column stormproof.audit_pending.leased is 'messages in batches that have not ended';
comment on column stormproof.audit_pending.given_back is 'messages that are opened again before any new one';
comment on column stormproof.audit_pending.waiting is 'failed messages that wait for their retry';
comment on column stormproof.audit_pending.due is 'those of them whose time has come';
comment on column stormproof.audit_pending.undecided_dead_letters is 'dead letters about which nobody has decided';
comment on column stormproof.audit_pending.oldest_txid is 'the oldest batch of the topology that has not ended';
comment on column stormproof.audit_pending.oldest_opened_at is 'when it was opened';
comment on column stormproof.audit_pending.next_retry_at is 'when the first of the waiting messages may be opened again';

-- question: dead-letters
-- asks: What failed for good: dead letters and rejects?
-- page: failures
-- says: Show dead letters, rejects, and batches given up at a sink, with the class of the error and what was decided.
-- example: stormproof audit dead-letters --group topology --group error_class
-- order: at desc, message, sink
-- counts: what, error_class, sink, state
create view stormproof.audit_dead_letters (
  topology, what, message, source, sink, txid, at, reason, error_class, times_opened, times_failed, rows, state,
  decided_by, decided_why, decided_at
) as
select t.name, 'dead_letter',
  case when starts_with(s.subscription, t.incarnation || ':')
    then substr(s.subscription, length(t.incarnation) + 2) || ':' else '' end
    || s.origin || '-' || case s.kind when 'kafka' then s.id & 281474976710655 else s.id end,
  s.source, cast(null as text), cast(null as bigint), s.dead_at,
  s.reason, case when s.reason in ('error', 'sink_error')
      then coalesce(substring(s.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), s.reason) else s.reason end,
  s.times_opened, s.times_failed, cast(null as bigint), coalesce(s.disposal, 'undecided'),
  s.disposed_by, s.disposed_why, s.disposed_at
from stormproof.dead_letter s
join stormproof.topology t on (s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))
union all
select t.name, 'reject', r.message, null, r.sink, r.txid, r.at, coalesce(r.sqlstate, 'refused'),
  coalesce(r.sqlstate, 'refused'), null, null, r.rows,
  case r.state when 'open' then 'undecided' else r.state end, r.decided_by, r.decided_why, r.decided_at
from stormproof.reject r
join stormproof.topology t on t.incarnation = r.incarnation
union all
select t.name, 'skip', null, null, e.sink, e.txid, e.at, 'skipped', 'skipped', null, null,
  cast(e.detail ->> 'rows' as bigint), 'dropped', e.detail ->> 'by', e.detail ->> 'why', e.at
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
where e.kind = 'operator' and e.action = 'skip' and not exists (
  select from stormproof.txn_sink k
  where k.incarnation = e.incarnation and k.txid = e.txid and k.sink = e.sink and k.outcome is distinct from 'skipped'
);
comment on view stormproof.audit_dead_letters is 'one row per dead letter, per reject, and per batch that was skipped at a sink; without payloads';
comment on column stormproof.audit_dead_letters.topology is 'the topology''s name';
comment on column stormproof.audit_dead_letters.what is 'dead_letter, reject or skip';
comment on column stormproof.audit_dead_letters.message is 'the message''s id, as every command shows it; of a skip none: all messages of its batch';
comment on column stormproof.audit_dead_letters.source is 'the source of a dead letter';
comment on column stormproof.audit_dead_letters.sink is 'the sink that rejected it, or was skipped';
comment on column stormproof.audit_dead_letters.txid is 'the batch in which the sink rejected it, or that was skipped';
comment on column stormproof.audit_dead_letters.at is 'when';
comment on column stormproof.audit_dead_letters.reason is 'why it failed last; of a reject, its SQLSTATE, or refused; of a skip, skipped';
comment on column stormproof.audit_dead_letters.error_class is 'class of the exception, or the reason if there was none';
comment on column stormproof.audit_dead_letters.times_opened is 'how often a dead letter was opened';
comment on column stormproof.audit_dead_letters.times_failed is 'how often it failed';
comment on column stormproof.audit_dead_letters.rows is 'rows of a reject or a skip';
comment on column stormproof.audit_dead_letters.state is 'of a dead letter: undecided, requeue, drop, edit; of a reject: undecided, retrying, retried, dropped; of a skip: dropped';
comment on column stormproof.audit_dead_letters.decided_by is 'who decided';
comment on column stormproof.audit_dead_letters.decided_why is 'why, in that person''s words';
comment on column stormproof.audit_dead_letters.decided_at is 'when';

-- question: attempts
-- asks: How often were messages and batches tried?
-- says: Show how often messages failed, and how often the jobs of batches were begun, as a histogram.
-- example: stormproof audit attempts orders --what message
-- order: topology, what, times
create view stormproof.audit_attempts (topology, what, times, number) as
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
join stormproof.topology t on t.incarnation = x.incarnation;
comment on view stormproof.audit_attempts is 'a histogram of failures of messages and attempts at batches';
comment on column stormproof.audit_attempts.topology is 'the topology''s name';
comment on column stormproof.audit_attempts.what is 'message or batch';
comment on column stormproof.audit_attempts.times is 'of messages: how often they failed; of batches: how often their job was begun';
comment on column stormproof.audit_attempts.number is 'how many messages or batches, as far as the ledger was not pruned';

-- question: recovered
-- asks: Which messages failed and were committed later?
-- says: Show the messages that failed, or were returned, before a txid committed them.
-- example: stormproof audit recovered orders --since 1d
-- order: last_at desc, message
-- time: last_at
-- txid: committed_in
create view stormproof.audit_recovered (
  topology, message, failures, returns, first_at, last_at, last_in, reasons, components, committed_in, committed_at
) as
select t.name, f.message, f.failures, f.returns, f.first_at, f.last_at, f.last_in,
  (select array_agg(distinct b.reason) from stormproof.event b
   where b.incarnation = f.incarnation and b.message = f.message and b.kind = 'failure'),

  (select array_agg(distinct b.component) from stormproof.event b
   where b.incarnation = f.incarnation and b.message = f.message and b.kind = 'failure'), x.txid, x.ended_at
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
where f.replayed_in > f.last_in;
comment on view stormproof.audit_recovered is 'one row per message that failed or was returned, and was committed later';
comment on column stormproof.audit_recovered.topology is 'the topology''s name';
comment on column stormproof.audit_recovered.message is 'the message''s id, as every command shows it';
comment on column stormproof.audit_recovered.failures is 'how often it failed';
comment on column stormproof.audit_recovered.returns is 'how often it was returned';
comment on column stormproof.audit_recovered.first_at is 'when that happened first';
comment on column stormproof.audit_recovered.last_at is 'when that happened last';
comment on column stormproof.audit_recovered.last_in is 'the batch in which it happened last';
comment on column stormproof.audit_recovered.reasons is 'why it failed';
comment on column stormproof.audit_recovered.components is 'where it failed';
comment on column stormproof.audit_recovered.committed_in is 'the batch that committed it';
comment on column stormproof.audit_recovered.committed_at is 'when';

-- question: behind
-- asks: Which sinks are behind, and by how much?
-- says: Show each sink's last txid, and how many txids and rows are fixed for it that it does not have, by its own record.
-- more: Exit status: 1 if a sink is behind because a txid is blocked, else 0.
-- example: stormproof audit behind --json
-- order: topology, sink
-- fails: blocked_txid
create view stormproof.audit_behind (
  topology, sink, target, held_txid, newest_txid, behind_txids, behind_rows, behind_since, blocked_txid
) as
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
) o on true;
comment on view stormproof.audit_behind is 'one row per sink: what it is known to hold, and what is prepared for it';
comment on column stormproof.audit_behind.topology is 'the topology''s name';
comment on column stormproof.audit_behind.sink is 'the sink''s name';
comment on column stormproof.audit_behind.target is 'its table';
comment on column stormproof.audit_behind.held_txid is 'the last batch that it is known to hold';
comment on column stormproof.audit_behind.newest_txid is 'the newest batch of the topology';
comment on column stormproof.audit_behind.behind_txids is 'prepared batches that it is not known to hold';
comment on column stormproof.audit_behind.behind_rows is 'their rows';
comment on column stormproof.audit_behind.behind_since is 'when the first of them was prepared';
comment on column stormproof.audit_behind.blocked_txid is 'the first of them that is blocked';

-- question: aborted
-- asks: Which batches were aborted or are blocked, and why?
-- says: Show the txids that were aborted, abandoned or blocked, and why.
-- more: Exit status: 1 if a txid that is shown is blocked now, else 0.
-- example: stormproof audit aborted orders --what blocked
-- order: at desc, txid desc
-- counts: what, sink
-- fails: what=blocked
create view stormproof.audit_aborted (topology, what, txid, at, cause, sink, messages, attempts, opened_at) as
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
where e.kind = 'blocked';
comment on view stormproof.audit_aborted is 'one row per batch that was aborted or abandoned, and per time that one was blocked';
comment on column stormproof.audit_aborted.topology is 'the topology''s name';
comment on column stormproof.audit_aborted.what is 'aborted, abandoned, blocked (now), or was_blocked';
comment on column stormproof.audit_aborted.txid is 'the batch''s number';
comment on column stormproof.audit_aborted.at is 'when; of a block, when it was noticed';
comment on column stormproof.audit_aborted.cause is 'why; null where a block was resolved since';
comment on column stormproof.audit_aborted.sink is 'the sink that refused it';
comment on column stormproof.audit_aborted.messages is 'messages of the batch';
comment on column stormproof.audit_aborted.attempts is 'how often its job was begun';
comment on column stormproof.audit_aborted.opened_at is 'when it was opened';

-- question: actions
-- asks: What did operators decide: who, when, why?
-- says: Show what operators decided, by whom and why.
-- example: stormproof audit actions orders --since 30d
-- order: at desc, action, message
create view stormproof.audit_actions (topology, at, action, by, why, txid, sink, message, number) as
select t.name, e.at, coalesce(e.action, 'other'), e.detail ->> 'by', e.detail ->> 'why', e.txid, e.sink,
  case when e.action in ('adopt', 'accept_change') then null else e.message end,
  case when e.action in ('retry_reject', 'drop_reject') then cast(e.detail ->> 'rejects' as bigint) end
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
where e.kind = 'operator'
union all
select t.name, s.disposed_at, s.disposal, s.disposed_by, s.disposed_why, null, null,
  case when starts_with(s.subscription, t.incarnation || ':')
    then substr(s.subscription, length(t.incarnation) + 2) || ':' else '' end
    || s.origin || '-' || case s.kind when 'kafka' then s.id & 281474976710655 else s.id end, 1
from stormproof.dead_letter s
join stormproof.topology t on (s.subscription in (t.incarnation, t.name) or starts_with(s.subscription, t.incarnation || ':'))
where s.disposal is not null
union all
select t.name, p.at, 'prune', p.by, p.why, p.upto, null, null, null
from stormproof.prune p
join stormproof.topology t on t.incarnation = p.incarnation;
comment on view stormproof.audit_actions is 'one row per decision of an operator';
comment on column stormproof.audit_actions.topology is 'the topology''s name';
comment on column stormproof.audit_actions.at is 'when';
comment on column stormproof.audit_actions.action is 'what: retry, skip, adopt_table, pause, requeue, prune, ...';
comment on column stormproof.audit_actions.by is 'who';
comment on column stormproof.audit_actions.why is 'why, in that person''s words';
comment on column stormproof.audit_actions.txid is 'the batch that it was about; of a prune, the last one of which the record was removed';
comment on column stormproof.audit_actions.sink is 'the sink that it was about';
comment on column stormproof.audit_actions.message is 'the message that it was about';
comment on column stormproof.audit_actions.number is 'how many dead letters or rejects it was about, if several';

-- question: verdicts
-- asks: What did the last checks find, and of what?
-- says: Show the verdicts of audit verify on record, each with what it looked at.
-- more: Exit status, by the newest verdict of each topology: 1 if one is a violation; 4 if one cannot tell, or a topology has
--   none; else 0.
-- example: stormproof audit verdicts orders --since 1d
-- order: id desc
create view stormproof.audit_verdicts (
  topology, id, at, by, verdict, first_txid, last_txid, pruned_upto, violations, unknowns, notices, kinds, txids,
  sinks, evidence, messages, took_ms, deep, tables, basis, chain_from, settled_upto
) as
select t.name, v.id, v.at, v.by, v.verdict, v.first_txid, v.last_txid, v.pruned_upto, v.violations, v.unknowns,
  v.notices, v.kinds, v.txids, v.sinks, v.evidence, v.messages, v.took_ms, v.deep, v.tables, v.basis, v.chain_from, v.settled_upto
from stormproof.verdict v
join stormproof.topology t on t.incarnation = v.incarnation;
comment on view stormproof.audit_verdicts is 'one row per verdict of stormproof audit verify';
comment on column stormproof.audit_verdicts.topology is 'the topology''s name';
comment on column stormproof.audit_verdicts.id is 'number of the verdict: later ones are higher';
comment on column stormproof.audit_verdicts.at is 'when the check ended';
comment on column stormproof.audit_verdicts.by is 'who ran it';
comment on column stormproof.audit_verdicts.verdict is 'clean, violation or cannot_tell: of the scope alone';
comment on column stormproof.audit_verdicts.first_txid is 'the first batch that was checked';
comment on column stormproof.audit_verdicts.last_txid is 'the last one; null: there was none';
comment on column stormproof.audit_verdicts.pruned_upto is 'batches up to here were pruned, and not checked';
comment on column stormproof.audit_verdicts.violations is 'how many things were wrong';
comment on column stormproof.audit_verdicts.unknowns is 'how many questions the evidence left open';
comment on column stormproof.audit_verdicts.notices is 'how many things there were to know';
comment on column stormproof.audit_verdicts.kinds is 'violations and notices, counted by kind';
comment on column stormproof.audit_verdicts.txids is 'batches that were checked';
comment on column stormproof.audit_verdicts.sinks is 'sinks that were checked';
comment on column stormproof.audit_verdicts.evidence is 'entries of the sinks'' own records that were compared';
comment on column stormproof.audit_verdicts.messages is 'openings of messages that were checked';
comment on column stormproof.audit_verdicts.took_ms is 'how long the check took';
comment on column stormproof.audit_verdicts.deep is 'whether the rows of the sinks'' tables were compared, too';
comment on column stormproof.audit_verdicts.tables is 'of which sinks tables were read, and whether other writers may add rows; null: none';
comment on column stormproof.audit_verdicts.basis is 'number of the verdict that it continues (--since last); null: none';
comment on column stormproof.audit_verdicts.chain_from is 'the first batch that it covers, together with the clean verdicts that it continues';
comment on column stormproof.audit_verdicts.settled_upto is 'the next one may begin after this batch; null: none may continue it';

create view stormproof.replay_causes (
  topology, what, at, txid, message, messages, attempt, reason, component, error_class, failed_in
) as
select t.name, 'message', e.at, e.txid, e.message, cast(1 as bigint), cast(null as integer), f.reason, f.component,
  f.error_class, f.txid
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join lateral (
  select b.reason, b.component, b.txid, case when b.reason in ('error', 'sink_error')
      then coalesce(substring(b.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), b.reason) else b.reason end as error_class
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
select t.name, 'attempt', e.at, e.txid, null, x.messages, e.attempt, e.reason, null, case when e.reason in ('error', 'sink_error')
    then coalesce(substring(e.error from '^([A-Za-z_][A-Za-z0-9_.]*): '), e.reason) else e.reason end,
  e.txid
from stormproof.event e
join stormproof.topology t on t.incarnation = e.incarnation
left join stormproof.txn x on x.incarnation = e.incarnation and x.txid = e.txid
where e.kind = 'attempt_failed';
comment on view stormproof.replay_causes is 'the rows of audit_replays, for counts by reason, component or class: there each of these is looked up by itself';
comment on column stormproof.replay_causes.topology is 'the topology''s name';
comment on column stormproof.replay_causes.what is 'message, batch or attempt';
comment on column stormproof.replay_causes.at is 'when it was opened again, given back, or failed';
comment on column stormproof.replay_causes.txid is 'the batch that opened the message again, was given back, or was attempted';
comment on column stormproof.replay_causes.message is 'the message''s id, as every command shows it';
comment on column stormproof.replay_causes.messages is 'how many messages';
comment on column stormproof.replay_causes.attempt is 'number of the failed attempt';
comment on column stormproof.replay_causes.reason is 'the message''s last failure, the batch''s cause, or the attempt''s outcome';
comment on column stormproof.replay_causes.component is 'where the message failed';
comment on column stormproof.replay_causes.error_class is 'class of the exception, or the reason if there was none';
comment on column stormproof.replay_causes.failed_in is 'the batch in which the message failed last';

create view stormproof.audit_components (
  topology, txid, at, component, kind, executed, emitted, acked, failed, busy_ms
) as
select t.name, c.txid, c.at, c.component, c.kind, c.executed, c.emitted, c.acked, c.failed, c.busy_ms
from stormproof.txn_component c
join stormproof.topology t on t.incarnation = c.incarnation;
comment on view stormproof.audit_components is 'what each component did in each batch, in the attempt that was prepared; add the rows up';
comment on column stormproof.audit_components.topology is 'the topology''s name';
comment on column stormproof.audit_components.txid is 'the batch''s number';
comment on column stormproof.audit_components.at is 'when the batch was prepared; if all its messages failed, when it ended';
comment on column stormproof.audit_components.component is 'the component or sink; `__acker` is the tracking';
comment on column stormproof.audit_components.kind is 'spout, operation, bolt, aggregate, join, sink or acker';
comment on column stormproof.audit_components.executed is 'tuples that it took in; of a spout, messages that were read; of the acker, acks';
comment on column stormproof.audit_components.emitted is 'tuples that it made, whoever subscribes to them; of the acker, messages with a verdict';
comment on column stormproof.audit_components.acked is 'tuples that it took in and did not fail; of spout and acker, messages that were complete';
comment on column stormproof.audit_components.failed is 'messages that failed in it, in whichever attempt; of a spout and the acker, anywhere';
comment on column stormproof.audit_components.busy_ms is 'time that its code took, over all tasks';

create view stormproof.audit_edges (topology, txid, origin, stream, target, tuples) as
select t.name, e.txid, e.origin, e.stream, e.target, e.tuples
from stormproof.txn_edge e
join stormproof.topology t on t.incarnation = e.incarnation;
comment on view stormproof.audit_edges is 'how many tuples of each batch went from one component to another, or to a sink, in that attempt';
comment on column stormproof.audit_edges.topology is 'the topology''s name';
comment on column stormproof.audit_edges.txid is 'the batch''s number';
comment on column stormproof.audit_edges.origin is 'the component that emitted them';
comment on column stormproof.audit_edges.stream is 'the stream that they were emitted to';
comment on column stormproof.audit_edges.target is 'the component or sink that took them; each copy that a grouping makes counts';
comment on column stormproof.audit_edges.tuples is 'how many';
