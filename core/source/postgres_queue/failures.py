"""What becomes of failed messages: they wait for a retry or become dead letters, with their payloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from psycopg import Cursor

from stormproof.core.errors import UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.message import MessageFailure, storable_text
from stormproof.core.postgres.store import query
from stormproof.core.source.backoff import Backoff
from stormproof.core.source.dead_letter import DISPOSAL_ENTRY_SQL, DeadLetter, Disposal
from stormproof.core.source.postgres_queue.slices import SliceRow, Subscriber, index_ranges_only
from stormproof.core.source.postgres_queue.tables import SCHEMA
from stormproof.core.source.protocol import Resolution

_TEXT_MAX = 5_000
"""Above what `storable_text` cuts to by default, so that a text which passed it once is not cut again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a message may fail, and how long it waits in between."""

    max_attempts: int
    backoff: Backoff


def shown_id(id_: int, xid: int) -> str:
    """A message's id as people see it: its transaction finds its slice, also when its partition is gone."""
    return f"{xid}-{id_}"


def resolve_failed(
    cursor: Cursor[Any],
    who: Subscriber,
    row: SliceRow,
    failed: Sequence[MessageFailure],
    *,
    policy: RetryPolicy,
    rng: Random,
) -> Resolution:
    """Move the slice's failed messages to the retries or the dead letters.

    Those that are merely returned become retries with their failures as they were, due with the last of the others.
    """
    failures: dict[int, MessageFailure] = {failure.id: failure for failure in failed}
    times_failed = _times_failed(cursor, who, row, failures)
    dying = [f for f in failures.values() if f.counted and times_failed[f.id] + 1 >= policy.max_attempts]
    living = [f for f in failures.values() if f.counted and times_failed[f.id] + 1 < policy.max_attempts]
    returned = [f for f in failures.values() if not f.counted]
    delays = [policy.backoff.delay_s(times_failed[f.id] + 1, rng) for f in living]
    delays += [max(delays, default=0.0)] * len(returned)
    living += returned
    with index_ranges_only(cursor):
        if living:
            _to_retry(cursor, who, row, living, delays)
        if dying:
            _to_dead_letters(cursor, who, row, dying)
    return Resolution(
        tuple(shown_id(f.id, f.origin) for f in living),
        tuple(shown_id(f.id, f.origin) for f in dying),
    )


def _times_failed(
    cursor: Cursor[Any], who: Subscriber, row: SliceRow, failures: dict[int, MessageFailure]
) -> dict[int, int]:
    """How often each message failed before; refuses messages that are not in the slice."""
    if row.span is not None:
        span = row.span
        known = {id_: 0 for id_, failure in failures.items() if span.holds(failure.origin, id_)}
    else:
        found = query(
            cursor,
            f"select id, times_failed from {SCHEMA}.queue_retry where slice = %s and id = any(%s) for update",
            row.id,
            list(failures),
        )
        known = dict(found.fetchall())
    _require(who, row, len(known), len(failures), sorted(set(failures) - set(known)))
    return known


def _require(who: Subscriber, row: SliceRow, have: int, want: int, missing: Sequence[int] = ()) -> None:
    if have != want:
        raise UsageError(
            f"queue {who.table.queue}: slice {row.id} of {who.subscription} has {have} of the {want} messages that are "
            f"named as failed{f'; not {list(missing[:5])}' if missing else ''}",
            queue=who.table.queue,
            slice=row.id,
        )


_NAMED = "unnest(%s::bigint[], %s::text[], %s::text[], %s::text[]) as f (id, xid, reason, entry)"
_ENTRY = "jsonb_build_array(jsonb_build_object('at', clock_timestamp()) || f.entry::jsonb)"


def _named(row: SliceRow, failures: Sequence[MessageFailure]) -> tuple[object, ...]:
    """The parameters of `_NAMED`."""
    entries = [
        json.dumps(
            {
                "owner": row.owner,
                "reason": failure.reason.value,
                "component": storable_text(failure.component, _TEXT_MAX),
                "error": storable_text(failure.error, _TEXT_MAX),
                "input": storable_text(failure.input, _TEXT_MAX),
                **({} if failure.counted else {"returned": True}),
            }
        )
        for failure in failures
    ]
    return (
        [failure.id for failure in failures],
        [str(failure.origin) for failure in failures],
        [failure.reason.value for failure in failures],
        entries,
    )


def _to_retry(
    cursor: Cursor[Any], who: Subscriber, row: SliceRow, failures: Sequence[MessageFailure], delays_s: Sequence[float]
) -> None:
    named = (
        "unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::float8[], %s::int[])"
        " as f (id, xid, reason, entry, delay_s, counted)"
    )
    due = "clock_timestamp() + make_interval(secs => f.delay_s)"
    parameters = (*_named(row, failures), list(delays_s), [int(failure.counted) for failure in failures])
    if row.span is not None:
        done = query(
            cursor,
            f"insert into {SCHEMA}.queue_retry"
            " (queue, subscription, id, xid, payload, times_opened, times_failed, not_before, reason, history)"
            f" select %s, %s, m.id, m.xid, m.payload, %s, f.counted, {due}, f.reason, {_ENTRY}"
            f" from {named} join {who.table.sql} m on m.xid = f.xid::xid8 and m.id = f.id",
            *who.key,
            row.opened,
            *parameters,
        )
    else:
        done = query(
            cursor,
            f"update {SCHEMA}.queue_retry r set times_opened = r.times_opened + %s,"
            " times_failed = r.times_failed + f.counted,"
            f" not_before = {due}, reason = f.reason, history = r.history || {_ENTRY}, slice = null"
            f" from {named} where r.slice = %s and r.id = f.id",
            row.opened,
            *parameters,
            row.id,
        )
    _require(who, row, done.rowcount, len(failures))


def _to_dead_letters(cursor: Cursor[Any], who: Subscriber, row: SliceRow, failures: Sequence[MessageFailure]) -> None:
    columns = "queue, subscription, id, xid, payload, reason, error, times_opened, times_failed, history"
    if row.span is not None:
        done = query(
            cursor,
            f"insert into {SCHEMA}.dead_letter ({columns})"
            f" select %s, %s, m.id, m.xid, m.payload, f.reason, f.entry::jsonb ->> 'error', %s, 1, {_ENTRY}"
            f" from {_NAMED} join {who.table.sql} m on m.xid = f.xid::xid8 and m.id = f.id",
            *who.key,
            row.opened,
            *_named(row, failures),
        )
    else:
        done = query(
            cursor,
            f"with gone as (delete from {SCHEMA}.queue_retry where slice = %s and id = any(%s) returning *)"
            f" insert into {SCHEMA}.dead_letter ({columns})"
            " select g.queue, g.subscription, g.id, g.xid, g.payload, f.reason, f.entry::jsonb ->> 'error',"
            f" g.times_opened + %s, g.times_failed + 1, g.history || {_ENTRY} from gone g join {_NAMED} on f.id = g.id",
            row.id,
            [failure.id for failure in failures],
            row.opened,
            *_named(row, failures),
        )
    _require(who, row, done.rowcount, len(failures))


def dead_letters(cursor: Cursor[Any], who: Subscriber) -> tuple[DeadLetter, ...]:
    """Every dead letter of the subscription, oldest first."""
    rows = query(
        cursor,
        "select id, xid::text, payload, reason, error, times_opened, times_failed, history, dead_at, disposal,"
        " disposed_by, disposed_why, disposed_at, new_payload"
        f" from {SCHEMA}.dead_letter where queue = %s and subscription = %s"
        " order by number",
        *who.key,
    ).fetchall()
    return tuple(
        DeadLetter(
            id=row[0],
            origin=int(row[1]),
            shown_id=shown_id(row[0], int(row[1])),
            subscription=who.subscription,
            payload=bytes(row[2]),
            reason=row[3],
            error=row[4],
            times_opened=row[5],
            times_failed=row[6],
            history=tuple(row[7]),
            dead_at=row[8],
            disposal=None if row[9] is None else Disposal(row[9]),
            by=row[10],
            why=row[11],
            disposed_at=row[12],
            new_payload=None if row[13] is None else bytes(row[13]),
        )
        for row in rows
    )


def dispose(
    cursor: Cursor[Any],
    who: Subscriber,
    shown: Sequence[str],
    disposal: Disposal,
    *,
    by: str,
    why: str,
    payload: bytes | None = None,
) -> tuple[str, ...]:
    """Record what an operator decided about dead letters; requeued ones are due at once, failures counted anew.

    `payload` is what an edit puts in the place of the old one, which stays in the dead letter.
    """
    disposed = (
        f"update {SCHEMA}.dead_letter set disposal = %s, disposed_by = %s, disposed_why = %s, new_payload = %s,"
        " disposed_at = clock_timestamp() where queue = %s and subscription = %s and disposal is null"
        " and xid::text || '-' || id = any(%s) returning *"
    )
    parameters = (disposal.value, storable_text(by), storable_text(why), payload, *who.key, list(shown))
    if disposal is Disposal.DROP:
        rows = query(cursor, f"{disposed.removesuffix('*')} id, xid::text", *parameters).fetchall()
    else:
        rows = query(
            cursor,
            f"with d as ({disposed}) insert into {SCHEMA}.queue_retry"
            " (queue, subscription, id, xid, payload, times_opened, times_failed, not_before, reason, history)"
            " select queue, subscription, id, xid, coalesce(new_payload, payload), times_opened, 0, clock_timestamp(),"
            f" 'operator', history || jsonb_build_array({DISPOSAL_ENTRY_SQL}) from d returning id, xid::text",
            *parameters,
        ).fetchall()
    failpoint("dead_letter.in_transaction")
    return tuple(shown_id(id_, int(xid)) for id_, xid in rows)
