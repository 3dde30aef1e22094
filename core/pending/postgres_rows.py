"""The rows of one subscription in Postgres's tables, within one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import psycopg
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.dead_letter import (
    CLASS_SQL,
    COMPONENT_SQL,
    DISPOSAL_ENTRY_SQL,
    DeadLetter,
    Disposal,
    LetterHead,
)
from stormproof.core.contract.source import Lease
from stormproof.core.pending.rows import At, Counts, Failed, LeaseFate, Retry, SliceRow, Subscriber, WaitingRetry
from stormproof.core.pending.tables import SCHEMA
from stormproof.core.postgres.store import query

LAPSE_KEPT_DAYS: Final = 7

_ROW: Final = "id, at, messages, bytes, owner, epoch, opened, deaths, path, mates"
_ORDER: Final = "coalesce(nullif(path, ''), lpad(id::text, 20, '0')) collate \"C\", id"
_FREE: Final = "(state = 'returned' or (state = 'open' and expires_at <= clock_timestamp()))"
_NAMED: Final = "kind = %s and source = %s and subscription = %s"
MINE: Final = f"subscription = (select id from {SCHEMA}.pending_subscription where {_NAMED})"
_READER_IDLE: Final = "10min"
"""How long a reader may look at some rows before it asks for more: it locks nothing that others wait for."""
_LETTERS: Final = (
    f"select id, origin, {{}}, reason, error, times_opened, times_failed, history, dead_at, disposal, disposed_by,"
    f" disposed_why, disposed_at, new_payload from {SCHEMA}.dead_letter where {_NAMED}"
)
_LATER: Final = "clock_timestamp() + make_interval(secs => %s)"
_ENTRY: Final = "jsonb_build_array(jsonb_build_object('at', clock_timestamp()) || f.entry)"


class PostgresRows:
    """`PendingRows` in one transaction of Postgres; see there."""

    def __init__(self, cursor: psycopg.Cursor[Any], who: Subscriber, where: str) -> None:
        self._cursor = cursor
        self._who = who
        self._where = where
        self._is_any_due = True

    @property
    def cursor(self) -> psycopg.Cursor[Any]:
        """The transaction's cursor."""
        return self._cursor

    def _run(self, text: str, *parameters: object) -> psycopg.Cursor[Any]:
        return query(self._cursor, text, *parameters)

    # ---- the subscription

    def subscribe(self, epoch: int, start: Callable[[], At]) -> None:
        """Make the subscription where it is missing."""
        if self.position() is None:
            self._run(
                f"insert into {SCHEMA}.pending_subscription (kind, source, subscription, epoch, position)"
                " values (%s, %s, %s, %s, %s) on conflict do nothing",
                *self._who,
                epoch,
                Jsonb(start()),
            )

    def lock(self) -> tuple[int, At] | None:
        """Lock the subscription; gives its newest epoch and its position."""
        return self._run(
            f"select epoch, position from {SCHEMA}.pending_subscription where {_NAMED} for update", *self._who
        ).fetchone()

    def position(self) -> At | None:
        """The position, without a lock."""
        found = self._run(f"select position from {SCHEMA}.pending_subscription where {_NAMED}", *self._who).fetchone()
        return found and found[0]

    def raise_epoch(self, epoch: int) -> None:
        """Raise the newest epoch to this one, unless it is higher."""
        self._run(
            f"update {SCHEMA}.pending_subscription set epoch = %s where {_NAMED} and epoch < %s",
            epoch,
            *self._who,
            epoch,
        )

    def move(self, position: At) -> None:
        """Move the subscription to `position`."""
        self._run(f"update {SCHEMA}.pending_subscription set position = %s where {_NAMED}", Jsonb(position), *self._who)

    def advance(self, row: SliceRow, lease: Lease, position: At) -> SliceRow:
        """Insert a slice that is open under the lease, and move the subscription to `position`."""
        with self._one_slice_each(lease):
            found = self._run(
                f"with moved as (update {SCHEMA}.pending_subscription set position = %s where {_NAMED} returning id)"
                f" insert into {SCHEMA}.pending_slice"
                " (subscription, at, messages, bytes, mates, state, owner, epoch, opened, deaths, expires_at)"
                f" select id, %s, %s, %s, %s, 'open', %s, %s, %s, %s, {_LATER} from moved returning id",
                Jsonb(position),
                *self._who,
                None if row.at is None else Jsonb(row.at),
                row.messages,
                row.bytes,
                row.mates,
                lease.owner,
                lease.epoch,
                row.opened,
                row.deaths,
                lease.seconds,
            ).fetchone()
        return replace(row, id=_only(found))

    # ---- slices

    def free(self, mates: Collection[str] | None = None) -> SliceRow | None:
        """The first slice that was returned or whose lease ran out, locked; one with mates may have its lease still."""
        which, others = _FREE, "skip locked"
        if mates is not None:
            which, others = f"mates = any(%s) and ({_FREE} or (state = 'open' and mates <> ''))", ""
        # The same statement sees whether retries are due, so that an opening that finds neither asks once.
        found = self._run(
            f"with me as (select id from {SCHEMA}.pending_subscription where {_NAMED}),"
            f" free as (select {_ROW} from {SCHEMA}.pending_slice where subscription = (select id from me) and {which}"
            f" order by {_ORDER} limit 1 for update {others})"
            f" select exists (select from {SCHEMA}.pending_retry where subscription = (select id from me)"
            "  and slice is null and not_before <= clock_timestamp()), free.* from me left join free on true",
            *self._who,
            *(() if mates is None else (list(mates),)),
        ).fetchone()
        if found is None:
            return None
        self._is_any_due = found[0]
        return None if found[1] is None else SliceRow(*found[1:])

    def insert(self, row: SliceRow, retries: Sequence[int] = ()) -> SliceRow:
        """Insert a returned slice; these retries are its messages from now on."""
        new = (
            f"insert into {SCHEMA}.pending_slice"
            " (subscription, at, messages, bytes, state, epoch, opened, deaths, path, mates)"
            f" select id, %s, %s, %s, 'returned', 0, %s, %s, %s, %s from {SCHEMA}.pending_subscription where {_NAMED}"
            " returning id"
        )
        parameters: tuple[object, ...] = (
            None if row.at is None else Jsonb(row.at),
            row.messages,
            row.bytes,
            row.opened,
            row.deaths,
            row.path,
            row.mates,
            *self._who,
        )
        if retries:
            new = (
                f"with new as ({new}), moved as (update {SCHEMA}.pending_retry r set slice = new.id from new"
                f" where r.{MINE} and r.id = any(%s)) select id from new"
            )
            parameters = (*parameters, *self._who, list(retries))
        found = self._run(new, *parameters).fetchone()
        return replace(row, id=_only(found), owner=None, epoch=0)

    def shrink(self, row: SliceRow) -> None:
        """The slice with this id is returned, and has `at`, `messages`, `bytes`, `deaths`, `path` from now on."""
        self._run(
            f"update {SCHEMA}.pending_slice set state = 'returned', owner = null, expires_at = null, at = %s,"
            " messages = %s, bytes = %s, deaths = %s, path = %s where id = %s",
            None if row.at is None else Jsonb(row.at),
            row.messages,
            row.bytes,
            row.deaths,
            row.path,
            row.id,
        )

    def open(self, row: SliceRow, lease: Lease) -> SliceRow:
        """Open a free slice under the lease; where an owner's lease on it had run out, that is recorded, as a lapse."""
        if row.owner is not None:
            self._run(
                f"insert into {SCHEMA}.pending_lapse (subscription, owner, epoch)"
                f" select id, %s, %s from {SCHEMA}.pending_subscription where {_NAMED}",
                row.owner,
                row.epoch,
                *self._who,
            )
        with self._one_slice_each(lease):
            self._run(
                f"update {SCHEMA}.pending_slice set state = 'open', owner = %s, epoch = %s, opened = opened + 1,"
                f" deaths = %s, death_counted = false, expires_at = {_LATER} where id = %s",
                lease.owner,
                lease.epoch,
                row.deaths,
                lease.seconds,
                row.id,
            )
        return replace(row, owner=lease.owner, epoch=lease.epoch, opened=row.opened + 1)

    def take(self, lease: Lease, *, delete: bool) -> SliceRow | None:
        """The slice of a lease, locked or deleted."""
        where = f"{SCHEMA}.pending_slice where {MINE} and owner = %s and epoch = %s"
        statement = f"delete from {where} returning {_ROW}" if delete else f"select {_ROW} from {where} for update"
        found = self._run(statement, *self._who, lease.owner, lease.epoch).fetchone()
        return found and SliceRow(*found)

    def touch(self, lease: Lease, *, pin: bool) -> bool:
        """Open to pinned, or move the expiry of an open one."""
        change = (
            "state = 'pinned', expires_at = null"
            if pin
            else "expires_at = case when state = 'open' then clock_timestamp()"
            f" + make_interval(secs => {float(lease.seconds)}) end"
        )
        done = self._run(
            f"update {SCHEMA}.pending_slice set {change} where {MINE} and owner = %s and epoch = %s"
            " and (state = 'pinned' or (state = 'open' and expires_at > clock_timestamp()))",
            *self._who,
            lease.owner,
            lease.epoch,
        )
        return done.rowcount == 1

    def give_back(self, lease: Lease) -> bool:
        """Return a lease's messages."""
        done = self._run(
            f"update {SCHEMA}.pending_slice set state = 'returned', owner = null, expires_at = null"
            f" where {MINE} and owner = %s and epoch = %s",
            *self._who,
            lease.owner,
            lease.epoch,
        )
        return done.rowcount == 1

    def fate(self, lease: Lease) -> LeaseFate:
        """What became of a lease."""
        found = self._run(
            f"select coalesce(greatest((select epoch from {SCHEMA}.pending_subscription where {_NAMED}),"
            f" (select epoch from {SCHEMA}.pending_slice where {MINE} and owner = %s)), %s),"
            f" exists (select from {SCHEMA}.pending_lapse where {MINE} and owner = %s and epoch = %s)",
            *self._who,
            *self._who,
            lease.owner,
            lease.epoch,
            *self._who,
            lease.owner,
            lease.epoch,
        ).fetchone()
        assert found is not None
        return LeaseFate(*found)

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Every lease belongs to `epoch` from now on; gives the leases' owners."""
        found = self._run(
            f"with taken as (update {SCHEMA}.pending_slice"
            " set deaths = deaths + (state = 'open' and epoch < %s and not death_counted)::int,"
            " death_counted = death_counted or (state = 'open' and epoch < %s), epoch = %s"
            f" where {MINE} and owner is not null returning id, owner) select owner from taken order by id",
            epoch,
            epoch,
            epoch,
            *self._who,
        )
        return tuple(owner for (owner,) in found)

    def unresolved(self) -> Sequence[SliceRow]:
        """Every slice."""
        found = self._run(f"select {_ROW} from {SCHEMA}.pending_slice where {MINE} order by id", *self._who)
        return [SliceRow(*row) for row in found]

    # ---- retries

    def due(self, messages: int, mates: Collection[str] | None = None) -> Sequence[Retry]:
        """Waiting retries whose time has come, ascending by number; the longest due are taken first."""
        if not self._is_any_due and not mates:
            return ()
        waiting = f"from {SCHEMA}.pending_retry where {MINE} and slice is null"
        # Of those that share a name, the first one stands for all.
        found = self._run(
            f"with due as (select *, row_number() over (partition by mates order by not_before, id) as place {waiting}"
            "  and not_before <= clock_timestamp() and (%s::text[] is null or mates = any(%s))"
            "  order by not_before, id limit %s),"
            " heads as (select *, sum(mates_messages) over (order by not_before, id) as total from due"
            "  where mates = '' or place = 1),"
            " taken as (select id, mates from heads where total <= %s or total = mates_messages)"
            f" select id, origin, octet_length(payload), mates {waiting} and (mates = '' and id in (select id from taken)"
            "  or mates <> '' and (mates in (select mates from taken) or mates = any(%s))) order by id",
            *self._who,
            *(None if mates is None else [name for name in mates if not name],) * 2,
            *(messages, messages),
            *self._who,
            list(mates or ()),
        )
        return [Retry(*row) for row in found]

    def retries(self, slice_id: int) -> Sequence[Retry]:
        """The retries of a slice, ascending by number."""
        found = self._run(
            f"select id, origin, octet_length(payload), mates from {SCHEMA}.pending_retry where slice = %s and {MINE}"
            " order by id",
            slice_id,
            *self._who,
        )
        return [Retry(*row) for row in found]

    def failures(self, slice_id: int, ids: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        """How often each of these retries of a slice failed and was opened before, locked."""
        found = self._run(
            f"select id, times_failed, times_opened from {SCHEMA}.pending_retry where slice = %s and {MINE} and id = any(%s)"
            " for update",
            slice_id,
            *self._who,
            list(ids),
        )
        return {id_: (failed, opened) for id_, failed, opened in found}

    def fail(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        """Make retries or dead letters of messages of a taken slice."""
        living = [one for one in failed if one.delay_s is not None]
        dying = [one for one in failed if one.delay_s is None]
        if living:
            (self._retry_again if row.is_retry else self._retry)(row, living)
        if dying:
            (self._bury_retries if row.is_retry else self._bury)(row, dying)

    def _retry(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        self._run(
            f"insert into {SCHEMA}.pending_retry"
            " (subscription, id, origin, payload, times_opened, times_failed, not_before, reason, history, mates,"
            " mates_messages, digest) select s.id, f.id, f.origin, f.payload, %s, f.counted,"
            f" clock_timestamp() + make_interval(secs => f.delay_s), f.reason, {_ENTRY}, f.mates, f.mates_messages,"
            " sha256(f.payload)"
            f" from {_LIVING_WITH_PAYLOADS}, {SCHEMA}.pending_subscription s where {_NAMED}",
            row.opened,
            *_living(failed),
            [one.origin for one in failed],
            [one.payload for one in failed],
            *self._who,
        )

    def _retry_again(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        self._run(
            f"update {SCHEMA}.pending_retry r set times_opened = r.times_opened + %s,"
            " times_failed = r.times_failed + f.counted,"
            " not_before = clock_timestamp() + make_interval(secs => f.delay_s), reason = f.reason,"
            f" history = r.history || {_ENTRY}, slice = null, mates = f.mates, mates_messages = f.mates_messages"
            f" from {_LIVING} where r.slice = %s and r.id = f.id",
            row.opened,
            *_living(failed),
            row.id,
        )

    def _bury(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        self._run(
            f"insert into {SCHEMA}.dead_letter"
            " (kind, source, subscription, id, origin, payload, reason, error, times_opened, times_failed, history, digest)"
            f" select %s, %s, %s, f.id, f.origin, f.payload, f.reason, f.error, %s, 1, {_ENTRY}, sha256(f.payload)"
            f" from {_DYING_WITH_PAYLOADS}",
            *self._who,
            row.opened,
            *_dying(failed),
            [one.origin for one in failed],
            [one.payload for one in failed],
        )

    def _bury_retries(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        self._run(
            f"with gone as (delete from {SCHEMA}.pending_retry where slice = %s and id = any(%s) returning *)"
            f" insert into {SCHEMA}.dead_letter"
            " (kind, source, subscription, id, origin, payload, reason, error, times_opened, times_failed, history, digest)"
            " select %s, %s, %s, g.id, g.origin, g.payload, f.reason, f.error, g.times_opened + %s, g.times_failed + 1,"
            f" g.history || {_ENTRY}, g.digest from gone g join {_DYING} on f.id = g.id",
            row.id,
            [one.id for one in failed],
            *self._who,
            row.opened,
            *_dying(failed),
        )

    def finish(self, row: SliceRow) -> None:
        """Remove the retries that still belong to a taken slice."""
        self._run(f"delete from {SCHEMA}.pending_retry where slice = %s", row.id)

    # ---- what is there

    def counts(self) -> Counts:
        """How many messages are in which state."""
        found = self._run(
            "select coalesce(sum(messages) filter (where at is not null and is_free), 0)::bigint,"
            " coalesce(sum(messages) filter (where at is null and is_free), 0)::bigint,"
            " coalesce(sum(messages) filter (where not is_free), 0)::bigint"
            f" from (select at, messages, {_FREE} as is_free from {SCHEMA}.pending_slice where {MINE}) s",
            *self._who,
        ).fetchone()
        waiting = self._run(
            "select count(*), greatest(0.0, extract(epoch from min(not_before) - clock_timestamp()))::float8"
            f" from {SCHEMA}.pending_retry where {MINE} and slice is null having count(*) > 0",
            *self._who,
        ).fetchone()
        dead = self._run(
            f"select count(*) from {SCHEMA}.dead_letter where {_NAMED} and disposal is null", *self._who
        ).fetchone()
        assert found is not None
        returned, returned_retries, pending = found
        left, next_in_s = waiting or (0, None)
        return Counts(returned, returned_retries, pending, left, _only(dead), next_in_s)

    def waiting(self) -> Sequence[WaitingRetry]:
        """Every retry, ascending by number."""
        found = self._run(
            "select r.id, r.origin, r.times_failed, r.not_before, s.owner"
            f" from {SCHEMA}.pending_retry r left join {SCHEMA}.pending_slice s on s.id = r.slice"
            f" where r.{MINE} order by r.id",
            *self._who,
        )
        return [WaitingRetry(*row) for row in found]

    def retries_by_slice(self) -> Mapping[int, int]:
        """How many retries belong to each slice, including retries of slices that do not exist (any more)."""
        found = self._run(
            f"select slice, count(*) from {SCHEMA}.pending_retry where {MINE} and slice is not null group by 1",
            *self._who,
        )
        return dict(found.fetchall())

    # ---- dead letters

    def dead_letters(
        self, shown: Callable[[int, int], str], *, payloads: bool = True, of: tuple[int, int] | None = None
    ) -> tuple[DeadLetter, ...]:
        """Every dead letter, or those of one message, oldest first."""
        payload = "payload" if payloads else "case when new_payload is null then ''::bytea else payload end"
        one = "" if of is None else " and id = %s and origin = %s"
        found = self._run(f"{_LETTERS.format(payload)}{one} order by number", *self._who, *(of or ()))
        return tuple(self._letter(row, shown) for row in found)

    def each_dead_letter(self, shown: Callable[[int, int], str]) -> Iterator[DeadLetter]:
        """The same, a few at a time."""
        for row in self._streamed(f"{_LETTERS.format('payload')} order by number", 100):
            yield self._letter(row, shown)

    def letter_heads(self, shown: Callable[[int, int], str], *, undecided: bool) -> Iterator[LetterHead]:
        """What filters need of each dead letter, oldest first, a few at a time."""
        wanted = " and disposal is null" if undecided else ""
        rows = self._streamed(
            f"select id, origin, reason, {CLASS_SQL}, {COMPONENT_SQL}, dead_at, disposal from {SCHEMA}.dead_letter"
            f" where {_NAMED}{wanted} order by number",
            1_000,
        )
        for id_, origin, reason, kind, component, dead_at, disposal in rows:
            decided = None if disposal is None else Disposal(disposal)
            yield LetterHead(shown(id_, origin), reason, kind, component, dead_at, decided)

    def letter_classes(self) -> Mapping[tuple[str, str], int]:
        """How many undecided dead letters there are of each class of error and reason."""
        found = self._run(
            f"select {CLASS_SQL}, reason, count(*) from {SCHEMA}.dead_letter where {_NAMED} and disposal is null"
            " group by 1, 2",
            *self._who,
        )
        return {(kind, reason): number for kind, reason, number in found}

    def altered(self, numbers: Sequence[tuple[int, int]] | None = None) -> Sequence[tuple[int, int]]:
        """The messages, or those of these, whose payload is not the one that was set aside."""
        chosen = "true" if numbers is None else "(id, origin) in (select * from unnest(%s::bigint[], %s::bigint[]))"
        given = () if numbers is None else ([number for number, _ in numbers], [origin for _, origin in numbers])
        found = self._run(
            f"select id, origin from {SCHEMA}.dead_letter where {_NAMED} and digest <> sha256(payload) and {chosen} union"
            f" select id, origin from {SCHEMA}.pending_retry where {MINE} and digest <> sha256(payload) and {chosen}"
            " order by 1, 2",
            *(*self._who, *given, *self._who, *given),
        )
        return found.fetchall()

    def _streamed(self, statement: str, rows: int) -> Iterator[tuple[Any, ...]]:
        """The rows of a statement, so many at a time: a result of a million rows is never in memory at once."""
        with self._cursor.connection.cursor("stormproof_rows", row_factory=tuple_row) as cursor:
            cursor.itersize = rows
            self._run(f"set local idle_in_transaction_session_timeout = '{_READER_IDLE}'")
            query(cursor, statement, *self._who)
            yield from cursor

    def _letter(self, row: tuple[Any, ...], shown: Callable[[int, int], str]) -> DeadLetter:
        return DeadLetter(
            id=row[0],
            origin=row[1],
            shown_id=shown(row[0], row[1]),
            subscription=self._who.subscription,
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

    def dispose(
        self, numbers: Sequence[tuple[int, int]], disposal: Disposal, *, by: str, why: str, payload: bytes | None = None
    ) -> Sequence[tuple[int, int]]:
        """Record a decision about dead letters, given as (number, origin); gives those that waited for one."""
        disposed = (
            f"update {SCHEMA}.dead_letter d set disposal = %s, disposed_by = %s, disposed_why = %s, new_payload = %s,"
            " disposed_at = clock_timestamp() from unnest(%s::bigint[], %s::bigint[]) as n (id, origin)"
            f" where {_NAMED} and disposal is null and d.id = n.id and d.origin = n.origin returning d.*"
        )
        again = (
            f", again as (insert into {SCHEMA}.pending_retry"
            " (subscription, id, origin, payload, times_opened, times_failed, not_before, reason, history, digest)"
            " select s.id, d.id, d.origin, coalesce(new_payload, payload), times_opened, 0, clock_timestamp(),"
            f" 'operator', history || jsonb_build_array({DISPOSAL_ENTRY_SQL}), sha256(coalesce(new_payload, payload)) from d"
            f" join {SCHEMA}.pending_subscription s using (kind, source, subscription))"
        )
        found = self._run(
            f"with d as ({disposed}){'' if disposal is Disposal.DROP else again}"
            " select id, origin from d order by number",
            *(disposal.value, by, why, payload),
            [number for number, _ in numbers],
            [origin for _, origin in numbers],
            *self._who,
        )
        return found.fetchall()

    def open_again(
        self, messages: Sequence[tuple[int, int, bytes]], entry: Mapping[str, Json]
    ) -> Sequence[tuple[int, int]]:
        """Make retries, due at once, of confirmed messages; gives those that were made."""
        found = self._run(
            f"insert into {SCHEMA}.pending_retry"
            " (subscription, id, origin, payload, times_opened, times_failed, not_before, reason, history, digest)"
            " select s.id, m.id, m.origin, m.payload, 1, 0, clock_timestamp(), 'operator',"
            " jsonb_build_array(jsonb_build_object('at', clock_timestamp()) || %s::jsonb), sha256(m.payload)"
            " from unnest(%b::bigint[], %b::bigint[], %b::bytea[]) as m (id, origin, payload)"
            f" join {SCHEMA}.pending_subscription s on {_NAMED}"
            " on conflict do nothing returning id, origin",
            json.dumps(dict(entry)),
            [number for number, _, _ in messages],
            [origin for _, origin, _ in messages],
            [payload for _, _, payload in messages],
            *self._who,
        )
        return found.fetchall()

    def wait_at_most(self, seconds: float, entry: Mapping[str, Json] | None = None) -> int:
        """Have no retry wait longer than so many seconds from now; gives how many would have."""
        latest = "statement_timestamp() + make_interval(secs => %s)"  # one time for all: partners stay together
        return self._run(
            f"update {SCHEMA}.pending_retry set not_before = {latest}, history = history || case when %s::jsonb is null"
            " then '[]' else jsonb_build_array(jsonb_build_object('at', clock_timestamp()) || %s::jsonb) end"
            f" where {MINE} and slice is null and not_before > {latest}",
            seconds,
            *(None if entry is None else Jsonb(dict(entry)) for _ in range(2)),
            *self._who,
            seconds,
        ).rowcount

    def undecided(self, number: int, origin: int) -> bytes | None:
        """The payload of a dead letter that waits for a decision, locked."""
        found = self._run(
            f"select payload from {SCHEMA}.dead_letter where {_NAMED} and id = %s and origin = %s and disposal is null"
            " for update",
            *self._who,
            number,
            origin,
        ).fetchone()
        return found and bytes(found[0])

    def unconfirmed(self, numbers: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], bool]:
        """Retries and undecided dead letters among these."""
        found = self._run(
            "select n.id, n.origin, coalesce(r.times_failed > 0, true)"
            " from unnest(%s::bigint[], %s::bigint[]) n (id, origin)"
            f" left join {SCHEMA}.pending_retry r on r.id = n.id and r.origin = n.origin and r.{MINE}"
            f" where r.id is not null or exists (select from {SCHEMA}.dead_letter d"
            f" where {_NAMED} and d.disposal is null and d.id = n.id and d.origin = n.origin)",
            [number for number, _ in numbers],
            [origin for _, origin in numbers],
            *self._who,
            *self._who,
        )
        return {(id_, origin): has_failed for id_, origin, has_failed in found}

    def forget_lapses(self) -> None:
        """Remove what is known of leases that ran out more than a week ago."""
        self._run(
            f"delete from {SCHEMA}.pending_lapse where {MINE}"
            f" and lapsed_at < clock_timestamp() - make_interval(days => {LAPSE_KEPT_DAYS})",
            *self._who,
        )

    @contextmanager
    def _one_slice_each(self, lease: Lease) -> Generator[None]:
        try:
            yield
        except psycopg.errors.UniqueViolation as error:
            raise UsageError(
                f"{self._where}: {lease.owner} holds a slice already; each lease needs a key of its own",
                owner=lease.owner,
            ) from error


# Arrays go in binary: as text, psycopg escapes each element by a regular expression, and 10,000 errors of 2.5 KB take 17 s
# in place of 0.8 s.
_LIVING: Final = (
    "unnest(%b::bigint[], %b::text[], %b::text[]::jsonb[], %b::float8[], %b::int[], %b::text[], %b::int[])"
    " as f (id, reason, entry, delay_s, counted, mates, mates_messages)"
)
_LIVING_WITH_PAYLOADS: Final = (
    "unnest(%b::bigint[], %b::text[], %b::text[]::jsonb[], %b::float8[], %b::int[], %b::text[], %b::int[],"
    " %b::bigint[], %b::bytea[]) as f (id, reason, entry, delay_s, counted, mates, mates_messages, origin, payload)"
)
_DYING: Final = "unnest(%b::bigint[], %b::text[], %b::text[]::jsonb[], %b::text[]) as f (id, reason, entry, error)"
_DYING_WITH_PAYLOADS: Final = (
    "unnest(%b::bigint[], %b::text[], %b::text[]::jsonb[], %b::text[], %b::bigint[], %b::bytea[])"
    " as f (id, reason, entry, error, origin, payload)"
)


def _named(failed: Sequence[Failed]) -> tuple[list[int], list[str], list[str]]:
    return [one.id for one in failed], [one.reason for one in failed], [json.dumps(one.entry) for one in failed]


def _living(failed: Sequence[Failed]) -> tuple[object, ...]:
    """The parameters of `_LIVING`."""
    return (
        *_named(failed),
        *([one.delay_s for one in failed], [int(one.counted) for one in failed]),
        *([one.mates for one in failed], [one.mates_messages for one in failed]),
    )


def _dying(failed: Sequence[Failed]) -> tuple[object, ...]:
    """The parameters of `_DYING`."""
    return *_named(failed), [one.error for one in failed]


def _only(row: tuple[Any, ...] | None) -> int:
    assert row is not None
    return int(row[0])
