"""What is pending, waiting and dead of numbered messages, in the file sources' tables.

Messages are numbered without gaps, so a slice is a range of numbers. Every function works in the transaction of the
cursor that it is given, and leaves out nothing: who may act is decided by the subscription's row, which is locked first,
in a statement of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from psycopg import Cursor

from stormproof.core.errors import Fenced, Json, UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.message import MessageFailure, storable_text
from stormproof.core.postgres.store import query
from stormproof.core.source.backoff import Backoff
from stormproof.core.source.dead_letter import DISPOSAL_ENTRY_SQL, DeadLetter, Disposal
from stormproof.core.source.files.tables import SCHEMA
from stormproof.core.source.parts import inner_ends
from stormproof.core.source.protocol import Backlog, Lease, Limit, Resolution

DEATHS_BEFORE_HALVING = 2
_TEXT_MAX = 5_000
_MINE = "source = %s and subscription = %s"
_FREE = "(state = 'returned' or (state = 'open' and expires_at <= clock_timestamp()))"
_ROW = "id, first_id, stop_id, messages, bytes, owner, epoch, opened, deaths"


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One subscription of one source."""

    source: str
    subscription: str

    @property
    def key(self) -> tuple[str, str]:
        """The key of its rows."""
        return self.source, self.subscription


@dataclass(frozen=True, slots=True)
class SliceRow:
    """One row of `file_slice`: the messages from `first` up to but not including `stop`, or retries (both None)."""

    id: int
    first: int | None
    stop: int | None
    messages: int
    bytes: int
    owner: str | None
    epoch: int
    opened: int
    deaths: int

    @property
    def is_retry(self) -> bool:
        """Whether its messages failed before."""
        return self.first is None


Cut = Callable[[int, int, Limit], tuple[int, int]]
"""Gives, for a range of messages and a limit, where the limit ends it (one message at least) and its bytes up to there."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a message may fail, and how long it waits in between."""

    max_attempts: int
    backoff: Backoff


def shown_id(id_: int, file: int) -> str:
    """A message's id as people see it: its file's number, and its own."""
    return f"{file}-{id_}"


def subscribe(cursor: Cursor[Any], who: Subscriber, epoch: int, format_: str) -> str:
    """Make the subscription where it is missing, and raise its epoch; gives the format that it was made with.

    Raises:
        Fenced: a newer epoch has it.
    """
    query(
        cursor,
        f"insert into {SCHEMA}.file_subscription (source, subscription, epoch, format) values (%s, %s, %s, %s)"
        " on conflict do nothing",
        *who.key,
        epoch,
        format_,
    )
    lock(cursor, who, epoch)
    raise_epoch(cursor, who, epoch)
    row = query(cursor, f"select format from {SCHEMA}.file_subscription where {_MINE}", *who.key).fetchone()
    assert row is not None
    return str(row[0])


def raise_epoch(cursor: Cursor[Any], who: Subscriber, epoch: int) -> None:
    """The subscription's newest epoch is at least this one."""
    query(
        cursor,
        f"update {SCHEMA}.file_subscription set epoch = %s where {_MINE} and epoch < %s",
        epoch,
        *who.key,
        epoch,
    )


def lock(cursor: Cursor[Any], who: Subscriber, epoch: int) -> int:
    """Lock the subscription; gives the number of the first message that was never opened.

    Raises:
        Fenced: a newer epoch has taken it over.
        UsageError: there is no such subscription.
    """
    row = query(
        cursor, f"select epoch, next_id from {SCHEMA}.file_subscription where {_MINE} for update", *who.key
    ).fetchone()
    if row is None:
        raise UsageError(
            f"source {who.source} has no subscription {who.subscription!r}: subscribe() comes first",
            source=who.source,
            subscription=who.subscription,
        )
    if epoch < row[0]:
        raise fenced(who, epoch, row[0])
    return int(row[1])


def fenced(who: Subscriber, epoch: int, newer: int) -> Fenced:
    """The error of an epoch that was replaced."""
    return Fenced(
        f"source {who.source}: epoch {epoch} of subscription {who.subscription} was replaced by epoch {newer}",
        source=who.source,
        subscription=who.subscription,
        epoch=epoch,
        newer_epoch=newer,
    )


def explain(cursor: Cursor[Any], who: Subscriber, lease: Lease, *, lapsed: bool = True) -> None:
    """Say why a lease's slice is not there: Fenced where another has it; nothing where it is resolved already."""
    row = query(
        cursor,
        f"select (select epoch from {SCHEMA}.file_subscription where {_MINE}),"
        f" (select epoch from {SCHEMA}.file_slice where {_MINE} and owner = %s),"
        f" exists (select from {SCHEMA}.file_lapse where {_MINE} and owner = %s and epoch = %s)",
        *who.key,
        *who.key,
        lease.owner,
        *who.key,
        lease.owner,
        lease.epoch,
    ).fetchone()
    assert row is not None
    newer = max((epoch for epoch in row[:2] if epoch is not None), default=lease.epoch)
    if newer > lease.epoch:
        raise fenced(who, lease.epoch, newer)
    if lapsed and row[2]:
        raise Fenced(
            f"source {who.source}: the lease of {lease.owner} ran out and its messages were handed to another",
            source=who.source,
            owner=lease.owner,
        )


def reopen(cursor: Cursor[Any], who: Subscriber, lease: Lease, limit: Limit, cut: Cut) -> SliceRow | None:
    """Open the first slice that was returned, or whose lease ran out; one on which drivers died in halves."""
    found = query(
        cursor,
        f"select {_ROW} from {SCHEMA}.file_slice where {_MINE} and {_FREE} order by id limit 1 for update skip locked",
        *who.key,
    ).fetchone()
    if found is None:
        return None
    row = SliceRow(*found)
    if row.owner is not None:
        query(
            cursor,
            f"insert into {SCHEMA}.file_lapse (source, subscription, owner, epoch) values (%s, %s, %s, %s)",
            *who.key,
            row.owner,
            row.epoch,
        )
    if row.deaths >= DEATHS_BEFORE_HALVING and row.messages > 1:
        row = replace(row, deaths=1)
        limit = replace(limit, messages=min(limit.messages, math.ceil(row.messages / 2)))
    messages, size = _fitting(cursor, row, limit, cut)
    if messages < row.messages:
        (row, *_) = divide(cursor, who, row, [messages], [size, row.bytes - size])
    query(
        cursor,
        f"update {SCHEMA}.file_slice set state = 'open', owner = %s, epoch = %s, opened = opened + 1, deaths = %s,"
        " death_counted = false, expires_at = clock_timestamp() + make_interval(secs => %s) where id = %s",
        lease.owner,
        lease.epoch,
        row.deaths,
        lease.seconds,
        row.id,
    )
    return replace(row, owner=lease.owner, epoch=lease.epoch, opened=row.opened + 1)


def _fitting(cursor: Cursor[Any], row: SliceRow, limit: Limit, cut: Cut) -> tuple[int, int]:
    """How many of a slice's messages the limit admits (at least one), and their bytes."""
    if row.first is not None and row.stop is not None:
        stop, size = cut(row.first, row.stop, limit)
        return stop - row.first, size
    found = query(
        cursor,
        "select n, total from (select row_number() over w as n, sum(octet_length(payload)) over w as total"
        f" from {SCHEMA}.file_retry where slice = %s window w as (order by id)) r"
        " where n = 1 or (n <= %s and total <= %s) order by n desc limit 1",
        row.id,
        limit.messages,
        limit.bytes,
    ).fetchone()
    assert found is not None
    return int(found[0]), int(found[1])


def open_due(cursor: Cursor[Any], who: Subscriber, lease: Lease, limit: Limit, cut: Cut) -> SliceRow | None:
    """Open retries that are due, as a slice of their own."""
    due = query(
        cursor,
        f"select id, octet_length(payload) from {SCHEMA}.file_retry where {_MINE} and slice is null"
        " and not_before <= clock_timestamp() order by not_before, id limit %s",
        *who.key,
        max(1, limit.messages),
    ).fetchall()
    if not due:
        return None
    row = _insert(cursor, who, SliceRow(0, None, None, len(due), sum(size for _, size in due), None, 0, 0, 0), None)
    query(
        cursor,
        f"update {SCHEMA}.file_retry set slice = %s where {_MINE} and id = any(%s)",
        row.id,
        *who.key,
        [id_ for id_, _ in due],
    )
    return reopen(cursor, who, lease, limit, cut)


def open_new(cursor: Cursor[Any], who: Subscriber, lease: Lease, first: int, stop: int, size: int) -> SliceRow:
    """Open messages that were never opened, and move the subscription on."""
    row = _insert(cursor, who, SliceRow(0, first, stop, stop - first, size, lease.owner, lease.epoch, 1, 0), lease)
    query(cursor, f"update {SCHEMA}.file_subscription set next_id = %s where {_MINE}", stop, *who.key)
    return row


def divide(
    cursor: Cursor[Any], who: Subscriber, row: SliceRow, ends: Sequence[int], sizes: Sequence[int]
) -> list[SliceRow]:
    """Cut a slice behind its n-th messages, for each n of `ends`; all parts are returned, and come in their order."""
    bounds = (0, *ends, row.messages)
    ids = retry_ids(cursor, row.id) if row.is_retry else ()
    parts: list[SliceRow] = []
    for (low, high), size in zip(pairwise(bounds), sizes, strict=True):
        part = replace(row, messages=high - low, bytes=size, owner=None)
        if row.first is not None:
            part = replace(part, first=row.first + low, stop=row.first + high)
        if parts:
            part = _insert(cursor, who, part, None)
            if ids:
                query(
                    cursor,
                    f"update {SCHEMA}.file_retry set slice = %s where slice = %s and id = any(%s)",
                    part.id,
                    row.id,
                    list(ids[low:high]),
                )
        else:
            query(
                cursor,
                f"update {SCHEMA}.file_slice set state = 'returned', owner = null, expires_at = null, stop_id = %s,"
                " messages = %s, bytes = %s, deaths = %s where id = %s",
                part.stop,
                part.messages,
                part.bytes,
                part.deaths,
                part.id,
            )
        parts.append(part)
    return parts


def retry_ids(cursor: Cursor[Any], slice_id: int) -> tuple[int, ...]:
    """The numbers of a retry slice's messages, ascending."""
    return tuple(id_ for id_, _ in retries_of(cursor, slice_id))


def retries_of(cursor: Cursor[Any], slice_id: int) -> list[tuple[int, int]]:
    """A retry slice's messages as (number, file)."""
    return query(cursor, f"select id, file from {SCHEMA}.file_retry where slice = %s order by id", slice_id).fetchall()


def _insert(cursor: Cursor[Any], who: Subscriber, row: SliceRow, lease: Lease | None) -> SliceRow:
    found = query(
        cursor,
        f"insert into {SCHEMA}.file_slice (source, subscription, first_id, stop_id, messages, bytes, state, owner, epoch,"
        " expires_at, opened, deaths) values (%s, %s, %s, %s, %s, %s, %s, %s, %s,"
        " clock_timestamp() + make_interval(secs => %s), %s, %s) returning id",
        *who.key,
        row.first,
        row.stop,
        row.messages,
        row.bytes,
        "returned" if lease is None else "open",
        None if lease is None else lease.owner,
        row.epoch,
        None if lease is None else lease.seconds,
        row.opened,
        row.deaths,
    ).fetchone()
    assert found is not None
    return replace(row, id=int(found[0]))


def take(cursor: Cursor[Any], who: Subscriber, lease: Lease, *, delete: bool) -> SliceRow | None:
    """The slice of a lease, locked or deleted; None where this owner has none in this epoch."""
    where = f"{_MINE} and owner = %s and epoch = %s"
    statement = (
        f"delete from {SCHEMA}.file_slice where {where} returning {_ROW}"
        if delete
        else f"select {_ROW} from {SCHEMA}.file_slice where {where} for update"
    )
    found = query(cursor, statement, *who.key, lease.owner, lease.epoch).fetchone()
    return None if found is None else SliceRow(*found)


def touch(cursor: Cursor[Any], who: Subscriber, lease: Lease, *, hold: bool) -> None:
    """Hold a lease, or extend it where it is not held.

    Raises:
        Fenced: it has lapsed, was returned, or belongs to another epoch.
    """
    change = "state = 'held', expires_at = null"
    if not hold:
        expiry = f"clock_timestamp() + make_interval(secs => {float(lease.seconds)})"
        change = f"expires_at = case when state = 'open' then {expiry} end"
    done = query(
        cursor,
        f"update {SCHEMA}.file_slice set {change} where {_MINE} and owner = %s and epoch = %s"
        " and (state = 'held' or (state = 'open' and expires_at > clock_timestamp()))",
        *who.key,
        lease.owner,
        lease.epoch,
    )
    if done.rowcount != 1:
        explain(cursor, who, lease)
        raise Fenced(
            f"source {who.source}: the lease of {lease.owner} (epoch {lease.epoch}) has lapsed or was returned",
            source=who.source,
            owner=lease.owner,
        )


def give_back(cursor: Cursor[Any], who: Subscriber, lease: Lease) -> None:
    """Return a lease's messages."""
    done = query(
        cursor,
        f"update {SCHEMA}.file_slice set state = 'returned', owner = null, expires_at = null"
        f" where {_MINE} and owner = %s and epoch = %s",
        *who.key,
        lease.owner,
        lease.epoch,
    )
    if done.rowcount != 1:
        explain(cursor, who, lease, lapsed=False)


def part(
    cursor: Cursor[Any], who: Subscriber, row: SliceRow, alone: Iterable[int], size_of: Callable[[int, int], int]
) -> None:
    """Return a slice of several messages in parts: each suspect alone, else two halves."""
    if row.first is not None:
        places = [id_ - row.first for id_ in alone if row.first <= id_ < row.first + row.messages]
    else:
        ids = retry_ids(cursor, row.id)
        suspects = set(alone)
        places = [place for place, id_ in enumerate(ids) if id_ in suspects]
    ends = inner_ends(row.messages, places)
    bounds = (0, *ends, row.messages)
    if row.first is not None:
        first = row.first
        sizes = [size_of(first + low, first + high) for low, high in pairwise(bounds)]
    else:
        found = query(
            cursor, f"select octet_length(payload) from {SCHEMA}.file_retry where slice = %s order by id", row.id
        ).fetchall()
        sizes = [sum(n for (n,) in found[low:high]) for low, high in pairwise(bounds)]
    divide(cursor, who, replace(row, deaths=min(row.deaths, 1)), ends, sizes)


def recover(cursor: Cursor[Any], who: Subscriber, epoch: int) -> tuple[str, ...]:
    """Every lease, mine from here on; an open one of an older epoch counts a death."""
    lock(cursor, who, epoch)
    raise_epoch(cursor, who, epoch)
    rows = query(
        cursor,
        f"with taken as (update {SCHEMA}.file_slice"
        " set deaths = deaths + (state = 'open' and epoch < %s and not death_counted)::int,"
        " death_counted = death_counted or (state = 'open' and epoch < %s), epoch = %s"
        f" where {_MINE} and owner is not null returning id, owner) select owner from taken order by id",
        epoch,
        epoch,
        epoch,
        *who.key,
    ).fetchall()
    return tuple(row[0] for row in rows)


def lowest_unresolved(cursor: Cursor[Any], who: Subscriber) -> int:
    """The number below which every message is resolved, waits with its payload, or is dead."""
    row = query(
        cursor,
        f"select least((select next_id from {SCHEMA}.file_subscription where {_MINE}),"
        f" (select min(first_id) from {SCHEMA}.file_slice where {_MINE}))",
        *who.key,
        *who.key,
    ).fetchone()
    return int(row[0]) if row is not None and row[0] is not None else 0


def forget_files(cursor: Cursor[Any], who: Subscriber, ranges: Sequence[tuple[int, int]]) -> int:
    """Remove the rows of files all of whose messages are within one of these ranges; gives how many.

    The newest file stays: the next one's messages are numbered behind it.
    """
    return query(
        cursor,
        f"delete from {SCHEMA}.file_entry e using unnest(%s::bigint[], %s::bigint[]) as gone (first_id, stop_id)"
        " where e.source = %s and e.subscription = %s"
        " and e.first_id >= gone.first_id and e.first_id + e.rows <= gone.stop_id"
        f" and e.number < (select max(number) from {SCHEMA}.file_entry where {_MINE})",
        [first for first, _ in ranges],
        [stop for _, stop in ranges],
        *who.key,
        *who.key,
    ).rowcount


def backlog(cursor: Cursor[Any], who: Subscriber, total: int) -> Backlog:
    """What is left for the subscription, of so many messages."""
    row = query(
        cursor,
        f"select (select next_id from {SCHEMA}.file_subscription where {_MINE}),"
        f" coalesce(sum(messages) filter (where first_id is not null and {_FREE}), 0)::bigint,"
        f" coalesce(sum(messages) filter (where not {_FREE}), 0)::bigint,"
        f" coalesce(sum(messages) filter (where first_id is null and {_FREE}), 0)::bigint,"
        f" (select count(*) from {SCHEMA}.file_retry where {_MINE} and slice is null),"
        f" (select extract(epoch from min(not_before) - clock_timestamp())::float8"
        f" from {SCHEMA}.file_retry where {_MINE} and slice is null),"
        f" (select count(*) from {SCHEMA}.file_dead_letter where {_MINE} and disposal is null)"
        f" from {SCHEMA}.file_slice where {_MINE}",
        *(who.key * 5),
    ).fetchone()
    assert row is not None
    next_id, returned, pending, returned_retries, waiting, next_s, dead = row
    return Backlog(
        ready=total - (next_id or 0) + returned,
        pending=pending,
        waiting=waiting + returned_retries,
        dead=dead,
        next_retry_in_s=0.0 if returned_retries else (None if next_s is None else max(0.0, next_s)),
    )


def resolve_failed(
    cursor: Cursor[Any],
    who: Subscriber,
    row: SliceRow,
    failed: Sequence[MessageFailure],
    *,
    policy: RetryPolicy,
    rng: Random,
    payloads: Callable[[Sequence[int]], dict[int, bytes]],
) -> Resolution:
    """Move the slice's failed messages to the retries or the dead letters, with their payloads.

    Those that are merely returned become retries with their failures as they were, due with the last of the others.

    Raises:
        UsageError: one is not in the slice.
    """
    failures = {int(failure.id): failure for failure in failed}
    before = _failed_before(cursor, who, row, failures)
    if row.first is not None:
        stored = {id_: _Stored(payload, 0, 0, []) for id_, payload in payloads(sorted(failures)).items()}
    else:
        stored = before
    # Those that are merely returned come last: they wait as long as the ones that took them along.
    ordered = sorted(failures.values(), key=lambda failure: not failure.counted)
    now = query(cursor, "select clock_timestamp()").fetchone()
    assert now is not None
    to_retry, to_dead, longest_s = list[tuple[object, ...]](), list[tuple[object, ...]](), 0.0
    retried, dead = list[MessageFailure](), list[MessageFailure]()
    for failure in ordered:
        have = stored[failure.id]
        history = [*have.history, {"at": now[0].isoformat(), **_entry(row, failure)}]
        times = (have.times_opened + row.opened, have.times_failed + failure.counted)
        common = (*who.key, failure.id, failure.origin, have.payload, failure.reason.value, *times, json.dumps(history))
        if failure.counted and times[1] >= policy.max_attempts:
            to_dead.append((*common, storable_text(failure.error, _TEXT_MAX)))
            dead.append(failure)
        else:
            delay_s = policy.backoff.delay_s(times[1], rng) if failure.counted else longest_s
            longest_s = max(longest_s, delay_s)
            to_retry.append((*common, delay_s))
            retried.append(failure)
    if to_dead:
        gone = [failure.id for failure in dead]
        query(cursor, f"delete from {SCHEMA}.file_retry where {_MINE} and id = any(%s)", *who.key, gone)
        cursor.executemany(_TO_DEAD.encode(), to_dead)
    if to_retry:
        cursor.executemany(_TO_RETRY.encode(), to_retry)
    return Resolution(
        tuple(shown_id(failure.id, failure.origin) for failure in retried),
        tuple(shown_id(failure.id, failure.origin) for failure in dead),
    )


_COMMON = "source, subscription, id, file, payload, reason, times_opened, times_failed, history"
_TO_DEAD = (
    f"insert into {SCHEMA}.file_dead_letter ({_COMMON}, error) values (%s, %s, %s, %s, %s, %s, %s, %s, %s::jsonb, %s)"
)
_TO_RETRY = (
    f"insert into {SCHEMA}.file_retry ({_COMMON}, not_before, slice) values (%s, %s, %s, %s, %s, %s, %s, %s, %s::jsonb,"
    " clock_timestamp() + make_interval(secs => %s), null)"
    " on conflict (source, subscription, id) do update set reason = excluded.reason,"
    " times_opened = excluded.times_opened, times_failed = excluded.times_failed,"
    " history = excluded.history, not_before = excluded.not_before, slice = null"
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What is known of a message that fails."""

    payload: bytes
    times_opened: int
    times_failed: int
    history: list[dict[str, Json]]


def _failed_before(
    cursor: Cursor[Any], who: Subscriber, row: SliceRow, failures: dict[int, MessageFailure]
) -> dict[int, _Stored]:
    """What is stored of each message of a retry slice; refuses messages that are not in the slice."""
    if row.first is not None and row.stop is not None:
        missing = sorted(id_ for id_ in failures if not row.first <= id_ < row.stop)
        known: dict[int, _Stored] = {}
    else:
        found = query(
            cursor,
            f"select id, payload, times_opened, times_failed, history from {SCHEMA}.file_retry"
            " where slice = %s and id = any(%s) for update",
            row.id,
            list(failures),
        ).fetchall()
        known = {id_: _Stored(bytes(payload), *rest) for id_, payload, *rest in found}
        missing = sorted(set(failures) - set(known))
    if missing:
        raise UsageError(
            f"source {who.source}: slice {row.id} of {who.subscription} has not the messages {missing[:5]}, which are "
            "named as failed",
            source=who.source,
            slice=row.id,
        )
    return known


def _entry(row: SliceRow, failure: MessageFailure) -> dict[str, Json]:
    return {
        "owner": row.owner,
        "reason": failure.reason.value,
        "component": storable_text(failure.component, _TEXT_MAX),
        "error": storable_text(failure.error, _TEXT_MAX),
        "input": storable_text(failure.input, _TEXT_MAX),
        **({} if failure.counted else {"returned": True}),
    }


def dead_letters(cursor: Cursor[Any], who: Subscriber) -> tuple[DeadLetter, ...]:
    """Every dead letter of the subscription, oldest first."""
    rows = query(
        cursor,
        "select id, file, payload, reason, error, times_opened, times_failed, history, dead_at, disposal,"
        " disposed_by, disposed_why, disposed_at, new_payload"
        f" from {SCHEMA}.file_dead_letter where {_MINE} order by number",
        *who.key,
    ).fetchall()
    return tuple(
        DeadLetter(
            id=row[0],
            origin=row[1],
            shown_id=shown_id(row[0], row[1]),
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


def undecided_payload(cursor: Cursor[Any], who: Subscriber, shown: str) -> bytes | None:
    """What failed of a dead letter that waits for a decision, locked; None where there is none of that name."""
    row = query(
        cursor,
        f"select payload from {SCHEMA}.file_dead_letter where {_MINE} and disposal is null and file || '-' || id = %s"
        " for update",
        *who.key,
        shown,
    ).fetchone()
    return None if row is None else bytes(row[0])


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
        f"update {SCHEMA}.file_dead_letter set disposal = %s, disposed_by = %s, disposed_why = %s, new_payload = %s,"
        f" disposed_at = clock_timestamp() where {_MINE} and disposal is null and file || '-' || id = any(%s) returning *"
    )
    parameters = (disposal.value, storable_text(by), storable_text(why), payload, *who.key, list(shown))
    if disposal is Disposal.DROP:
        rows = query(cursor, f"{disposed.removesuffix('*')} id, file", *parameters).fetchall()
    else:
        rows = query(
            cursor,
            f"with d as ({disposed}) insert into {SCHEMA}.file_retry"
            " (source, subscription, id, file, payload, times_opened, times_failed, not_before, reason, history)"
            " select source, subscription, id, file, coalesce(new_payload, payload), times_opened, 0, clock_timestamp(),"
            f" 'operator', history || jsonb_build_array({DISPOSAL_ENTRY_SQL}) from d returning id, file",
            *parameters,
        ).fetchall()
    failpoint("dead_letter.in_transaction")
    return tuple(shown_id(id_, file) for id_, file in rows)
