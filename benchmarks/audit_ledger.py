"""A ledger of ten million messages in 100,000 batches, made inside Postgres.

One topology with two sinks reads messages that a server delivers. In each batch of new messages one message fails; after 99
of those a batch of retries opens them again, where two fail for good. Some batches were given back,
  blocked or tried twice.
"""

from __future__ import annotations

from typing import Final

from stormproof.core.postgres.database import Database, connect

TOPOLOGY: Final = "orders"
TXIDS: Final = 100_000
MESSAGES: Final = 10_000_000
A_MESSAGE: Final = f"7-{50_001 * 101}"
"""A message that failed once."""
A_TXID: Final = 50_001

_FILL: Final = """
insert into stormproof.topology
values ('orders', 'orders/1', 1, 'f', 'exactly-once', 'shop', now() - interval '30 days', now(), 'host', 1, 1, null);
insert into stormproof.topology_sink
select 'orders/1', s, 'table ' || s, s, null, now() from unnest(array['delta', 'pg']) s;
insert into stormproof.pending_subscription (kind, source, subscription, epoch, position)
values ('redis', 'shop', 'orders/1', 1, '{}');
insert into stormproof.txn (incarnation, txid, state, guarantee, epoch, attempt, source, position, messages,
  failed, tuples,
  bytes, retry, opened_at, prepared_at, ended_at, cause, reason, steps_ms)
select 'orders/1', g, case when g > 99996 then 'prepared' when g % 500 = 7 then 'aborted' else 'committed' end,
  'exactly-once', 1, case when g % 100 = 3 then 2 else 1 end, 'shop', jsonb_build_object('range',
  jsonb_build_array(g * 101, g * 101 + 101)),
  case when g % 100 = 0 then 99 else 101 end, case when g % 100 = 0 then 2 else 1 end, 1000, 100000, g % 100 = 0,
  now() - (100000 - g) * interval '25 seconds', now() - (100000 - g) * interval '25 seconds' + interval '1 second',
  case when g <= 99996 then now() - (100000 - g) * interval '25 seconds' + interval '2 seconds' end,
  case when g % 500 = 7 then 'driver_ended' end, case when g % 500 = 7 then 'in flight when its driver ended' end,
  '{"open": 3.1, "job": 800.5, "wait": 0.1, "commit": 120.4, "total": 925.0}'
from generate_series(1, 100000) g;
insert into stormproof.attempt
select 'orders/1', g, a, 1, g, '[]', 101, g, now() - (100000 - g) * interval '25 seconds', 'complete', null
from generate_series(1, 100000) g, generate_series(1, case when g % 100 = 3 then 2 else 1 end) a;
insert into stormproof.txn_sink (incarnation, txid, sink, previous, rows, bytes, digest, files, committed_at, outcome)
select 'orders/1', g, s, nullif(g - 1, 0), 1000, 100000, md5(cast(g as text)), '[]',
  case when g <= 99996 then now() - (100000 - g) * interval '25 seconds' end, case when g <= 99996 then 'applied' end
from generate_series(1, 100000) g, unnest(array['delta', 'pg']) s;
insert into stormproof.event (incarnation, at, kind, txid, attempt, message, number, origin, token, reason,
  component, error,
  input)
select 'orders/1', now() - (100000 - g) * interval '25 seconds', k.kind,
  case k.place when 1 then g else (g / 100 + 1) * 100 end,
  1, '7-' || g * 101, g * 101, 7, g, case when k.kind = 'failure' then 'error' end,
  case when k.kind = 'failure' then 'parse' || g % 5 end,
  case when k.kind = 'failure' then 'ValueError: invalid literal for int() with base 10' end, 'a line of some length'
from generate_series(1, 100000) g, (values (1, 'failure'), (2, 'replay')) k (place, kind) where g % 100 <> 0;
insert into stormproof.event (incarnation, at, kind, txid, attempt, message, number, origin, token, reason,
  component, error)
select 'orders/1', now() - (100000 - g) * interval '25 seconds', k.kind, (g / 100 + 1) * 100, 1, '7-' || g * 101,
  g * 101, 7, g,
  'error', 'parse', 'ValueError: still not a number'
from generate_series(1, 100000) g, (values ('failure'), ('dead_letter')) k (kind) where g % 100 in (11, 12);
insert into stormproof.dead_letter (kind, source, subscription, id, origin, payload, reason, error, times_opened,
  times_failed,
  history, disposal, disposed_by, disposed_at)
select 'redis', 'shop', 'orders/1', g * 101, 7, 'payload', 'error', 'ValueError: still not a number', 2, 2, '[]',
  case when g % 100 = 11 then 'drop' end, case when g % 100 = 11 then 'ann' end, case when g % 100 = 11 then now() end
from generate_series(1, 100000) g where g % 100 in (11, 12);
insert into stormproof.event (incarnation, at, kind, action, txid, attempt, sink, reason, error, detail)
select 'orders/1', now() - (100000 - g) * interval '25 seconds', k.kind, k.action, g, 1, 'pg', 'job_failed',
  'OSError: gone',
  case when k.action is not null then cast('{"by": "ann", "why": "the disk has room again"}' as jsonb) end
from generate_series(1, 100000, 100) g,
  (values ('suppressed', null), ('attempt_failed', null), ('operator', 'retry'), ('blocked', null)) k (kind, action);
insert into stormproof.reject (incarnation, txid, sink, message, number, origin, rows, sqlstate, error, row, at,
  state)
select 'orders/1', g, 'pg', '7-' || g * 101 + 1, g * 101 + 1, 7, 1, '23514', 'refused', '{}', now(), 'open'
from generate_series(1, 100000, 100) g;
insert into stormproof.pending_message (subscription, number, stable_id, digest, resolved_at, suppressed)
select (select id from stormproof.pending_subscription), g, 'id-' || g, sha256(cast(cast(g as text) as bytea)), now(),
  case when g % 200 = 0 then 1 else 0 end
from generate_series(1, 200000) g;
insert into stormproof.pending_retry
select (select id from stormproof.pending_subscription), g, 7, 'payload', 1, 1, now() - interval '1 minute',
  'error', '[]', null
from generate_series(1, 1000) g;
insert into stormproof.verdict (incarnation, at, by, verdict, first_txid, last_txid, pruned_upto, violations,
  unknowns, notices,
  kinds, txids, sinks, evidence, messages, took_ms)
select 'orders/1', now() - (10000 - g) * interval '1 minute', 'cron', 'clean', 1, g * 10, 0, 0, 0, 0, '{}', g * 10,
  2, g * 20,
  g * 1000, 500
from generate_series(1, 10000) g;
"""


def fill(database: Database) -> None:
    """Make the ledger; some 150 MB."""
    with connect(database, application_name="benchmarks", autocommit=True) as connection:
        connection.execute(_FILL.encode())
        connection.execute("vacuum analyze")
