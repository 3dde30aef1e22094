"""`PendingSource`: open, confirm and abort. Decides whether, and when, a failed message is tried again or becomes a dead
letter.

It works over the rows of a store, in which `SliceCutter` cuts slices. A connector fills in what it alone knows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Final, Self, TypedDict

from stormproof.core.base.arguments import require_seconds, require_text, require_whole
from stormproof.core.base.errors import Fenced, Json, PositionMismatch, UsageError
from stormproof.core.base.message import MessageFailure, storable_text
from stormproof.core.contract.dead_letter import DeadLetter
from stormproof.core.contract.source import (
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
    SourcePreview,
)
from stormproof.core.pending.connector import Connector, Piece
from stormproof.core.pending.letters import DeadLetters
from stormproof.core.pending.rows import (
    At,
    Failed,
    LeaseFate,
    PendingRows,
    PendingStore,
    Retry,
    SliceRow,
    Subscriber,
    even_bounds,
    expectation_of,
    fitting,
    position_of,
    row_of,
    slice_of,
)
from stormproof.core.postgres.database import Database
from stormproof.core.tracking.share import signed


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, bounded on both sides.

    After its n-th failure a message waits between half of `base_s * 2**(n-1)` and all of it, never more than `max_s`.
    The jitter keeps messages that failed together from coming back, and failing, together for ever.
    """

    base_s: float
    max_s: float

    def delay_s(self, times_failed: int, rng: Random) -> float:
        """Seconds to wait after the `times_failed`-th failure (counted from 1)."""
        exponent = min(max(times_failed, 1) - 1, 62)  # beyond that every base has long reached its maximum
        return min(self.max_s, self.base_s * float(2**exponent)) * (0.5 + 0.5 * rng.random())


_TEXT_MAX: Final = 5_000
"""Above what `storable_text` cuts to by default, so that a text which passed it once is not cut again."""


class PendingArguments(TypedDict, total=False):
    """The keyword arguments that every pending source takes; each may be left out."""

    max_attempts: int
    """Failures until a message is a dead letter. Default: 5."""
    backoff_base_s: float
    """After its n-th failure a message waits at most this times 2 to the power of n - 1, and at least half of that.
    Default: 1."""
    backoff_max_s: float
    """It never waits longer. Default: 300."""
    rng: Random | None
    """Draws how long a message waits."""


class PendingSource(Connector):
    """A pending source: Kestrel's open, confirm and abort, for slices of messages.

    Derive from it to write a connector. What it needs from you are the abstract methods; each says what it must keep.
    `cursor` is a psycopg cursor in the store's own transaction, for a connector whose messages lie in the same
    database; others leave it alone. Methods that are given a slice's `at` may be called at any time while the slice
    is not resolved, by another process, too: `at` alone must say which messages they are.

    Guarantee:
        Every message that `next` gave is opened again only when it was returned, failed, or its lease ran out. A lease is
        confirmed by its owner in its epoch alone. Failed messages wait for a retry or are dead letters, with their payload.

    Threads: topologies on several threads may share one object; each run has a view of its own (`for_run`).
    Forks: a fork makes connections of its own, and never touches its parent's.
    """

    def __init__(
        self,
        name: str,
        *,
        decoder: Decoder,
        store: PendingStore,
        max_attempts: int = 5,
        backoff_base_s: float = 1.0,
        backoff_max_s: float = 300.0,
        rng: Random | None = None,
    ) -> None:
        require_text(self.NOUN, "name", name, "lines")
        where = f"{self.NOUN} {name}"
        require_whole(where, "max_attempts", max_attempts, 1)
        require_seconds(where, "backoff_base_s", backoff_base_s)
        require_seconds(where, "backoff_max_s", backoff_max_s)
        self.name = name
        self._decoder = decoder
        self._store = store
        self._max_attempts = max_attempts
        self._backoff = Backoff(backoff_base_s, backoff_max_s)
        self._rng = rng or Random()  # noqa: S311 - jitter, not a secret
        self._subscription: str | None = None

    @property
    def decoder(self) -> Decoder:
        """Turns payloads into tuples, inside executors."""
        return self._decoder

    @property
    def keeps_mates(self) -> bool:
        """True."""
        return True

    def bind(self, database: Database) -> None:
        """Use this database, where none was named."""
        self._store.bind(database)

    def for_run(self, database: Database) -> Self:
        """The same source for one run: with a subscription and connections of its own. This one knows the database, too."""
        self.bind(database)
        view = copy.copy(self)
        view._store = self._store.for_run(database)
        view._subscription = None
        return view

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in the store of what is pending here."""
        return self._store.joins(tx)

    def drop_connections(self) -> None:
        """Let connections go; the next call makes others."""
        self._store.close()

    def close(self) -> None:
        """Let connections go; the next use makes others."""
        self.drop_connections()

    def _preview_next(self, subscription: str | None, limit: Limit, database: Database | None) -> SourcePreview:
        """`preview` for a connector whose `start`, `check`, `next` and `parts` only look."""
        if not self._store.is_known(database):
            return SourcePreview(why=f"{self.where} keeps what is pending in a database, and there is none yet")
        view = copy.copy(self) if database is None else self.for_run(database)
        try:
            return view._unopened(Subscriber(self.KIND, self.key, subscription or ""), limit)
        except PositionMismatch as mismatch:
            return SourcePreview(why=mismatch.message, refused=True)
        except UsageError as error:
            return SourcePreview(why=error.message)
        finally:
            view.close()

    def _unopened(self, who: Subscriber, limit: Limit) -> SourcePreview:
        with self._store.rows(who) as rows:
            position = rows.position() or self.start(rows.cursor)
            found = self.next(self.check(who, position, rows.cursor), limit, 0, rows.cursor)
        if found is None:
            return SourcePreview()
        return SourcePreview(self.parts(found.piece.at, 1), found.piece.messages)

    def look_at(self, subscription: str) -> None:
        """Act for a subscription that is there already, without its epoch: for its dead letters."""
        self._subscription = subscription

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; makes it where it is missing.

        Raises:
            Fenced: a newer epoch has the subscription.
            PositionMismatch: the store of the messages is not the one that its position was taken from.
        """
        who = Subscriber(self.KIND, self.key, subscription)
        with self._store.rows(who) as rows:
            rows.subscribe(epoch, lambda: self.start(rows.cursor))
            self.check(who, self._locked(rows, who, epoch), rows.cursor)
            rows.raise_epoch(epoch)
        self._subscription = subscription

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then new ones; None where there are none."""
        who, seed = self.subscriber, signed(seed)
        if limit.fresh:
            self.look(lease.epoch)
        with self._store.rows(who, tx) as rows:
            position = self.check(who, self._locked(rows, who, lease.epoch), rows.cursor)
            if limit.mates is None or limit.mates:
                free = rows.free(limit.mates) or self._due(rows, lease, limit)
                if free is not None:
                    return SliceCutter(self, rows, who.subscription).reopen(free, lease, limit, seed)
            found = self.next(position, limit, seed, rows.cursor) if limit.fresh and not limit.mates else None
            if found is None:
                return None
            piece = found.piece
            row = SliceRow(0, piece.at, piece.messages, piece.bytes, lease.owner, lease.epoch, opened=1)
            row = replace(row, mates=lease.owner if limit.whole else "")
            return slice_of(rows.advance(row, lease, found.position), piece.expected)

    def _due(self, rows: PendingRows, lease: Lease, limit: Limit) -> SliceRow | None:
        """Due retries as a slice of their own."""
        due = rows.due(max(1, limit.messages), limit.mates) if limit.retries or limit.mates else ()
        if not due:
            return None
        mates = lease.owner if limit.whole or any(retry.mates for retry in due) else ""
        row = SliceRow(0, None, len(due), sum(retry.bytes for retry in due), mates=mates)
        return rows.insert(row, [retry.id for retry in due])

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position."""
        row, retries = row_of(position)
        return replace(slice_of(row, expected, retries), position=position)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed or with messages left out."""
        row, retries = row_of(slice_.position)
        seed = signed(seed)
        if row.at is None:
            return expectation_of([retry.id for retry in retries], seed, excluded)
        with self.rows(tx) as rows:
            return self.expected(row.at, seed, excluded, rows.cursor)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as `parallelism` disjoint parts (some may be empty)."""
        row, retries = row_of(slice_.position)
        if row.at is not None:
            return self.parts(row.at, parallelism)
        bounds = even_bounds(0, len(retries), parallelism)
        parts = [[retry.id for retry in retries[low:high]] for low, high in pairwise(bounds)]
        return self._store.readers(self.subscriber, row.id, parts, self.unpack())

    def payloads_of(self, slice_: Slice, ids: Collection[int]) -> Mapping[int, bytes]:
        """The payloads of some of the slice's messages, as they are stored for a retry."""
        row, _ = row_of(slice_.position)
        if row.at is not None:
            with self.rows() as rows:
                return self.payloads(row.at, sorted(ids), rows.cursor)
        found: dict[int, bytes] = {}
        for reader in self._store.readers(self.subscriber, row.id, [sorted(ids)], None):
            for batch in reader.read(0, frozenset(), max(1, len(ids))):
                found |= zip(batch.column("id").to_pylist(), batch.column("payload").to_pylist(), strict=True)
        return found

    def pin(self, lease: Lease, tx: object | None = None) -> None:
        """Open to pinned; Fenced where the lease lapsed, was returned, or belongs to another epoch."""
        self._touch(lease, tx, pin=True)

    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry; Fenced where it is not ours any more."""
        self._touch(lease, None, pin=False)

    def _touch(self, lease: Lease, tx: object | None, *, pin: bool) -> None:
        with self.rows(tx) as rows:
            if rows.touch(lease, pin=pin):
                return
            self._explain(rows.fate(lease), lease)
            raise Fenced(
                f"{self.where}: the lease of {lease.owner} (epoch {lease.epoch}) has lapsed or was returned",
                **self._details(owner=lease.owner),
            )

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named.

        Raises:
            Fenced: the lease lapsed and its messages were handed to another, or it belongs to another epoch.
            UsageError: a message that is named as failed is not in the slice, or the subscription was removed meanwhile;
                nothing was changed.
        """
        with self.rows(tx) as rows:
            row = rows.take(lease, delete=True)
            if row is None:
                self._locked(rows, self.subscriber, lease.epoch)
                self._explain(rows.fate(lease), lease)
                return Resolution()
            resolution = self._failed(rows, row, failed) if failed else Resolution()
            if row.at is None:
                rows.finish(row)
            else:
                self.settle(row.at, rows.cursor)
            return resolution

    def _failed(self, rows: PendingRows, row: SliceRow, failed: Sequence[MessageFailure]) -> Resolution:
        """Those that failed too often become dead letters. Those merely returned are due with the last of the others.

        Mates wait for one time, in every source: the same random numbers draw it, and a return counts like a failure.
        """
        failures: dict[int, MessageFailure] = {failure.id: failure for failure in failed}
        before, payloads = self._known(rows, row, sorted(failures))
        records, retried, dead, longest_s = list[Failed](), list[str](), list[str](), 0.0
        for failure in sorted(failures.values(), key=lambda failure: not failure.counted):
            times_failed, times_opened = before[failure.id]
            times_failed += failure.counted
            rng = Random(row.owner) if failure.mates else self._rng  # noqa: S311 - jitter, not a secret
            delay_s: float | None = longest_s
            if failure.counted:
                delay_s = None
                if times_failed < self._max_attempts:
                    delay_s = self._backoff.delay_s(times_failed, rng)
                    longest_s = max(longest_s, delay_s)
            elif failure.mates and not longest_s:
                delay_s = self._backoff.delay_s(times_opened + row.opened, rng)
            (dead if delay_s is None else retried).append(self.shown_id(failure.id, failure.origin))
            error = storable_text(failure.error, _TEXT_MAX)
            entry: dict[str, Json] = {
                "owner": row.owner,
                "reason": failure.reason.value,
                "component": storable_text(failure.component, _TEXT_MAX),
                "error": error,
                "input": storable_text(failure.input, _TEXT_MAX),
                **({} if failure.counted else {"returned": True}),
            }
            payload = payloads.get(failure.id)
            records.append(
                Failed(
                    id=failure.id,
                    origin=failure.origin,
                    payload=payload,
                    reason=failure.reason.value,
                    error=error,
                    entry=entry,
                    counted=failure.counted,
                    delay_s=delay_s,
                    mates=(row.owner or "") if failure.mates else "",
                    mates_messages=max(1, failure.mates),
                )
            )
        rows.fail(row, records)
        return Resolution(tuple(retried), tuple(dead))

    def _known(
        self, rows: PendingRows, row: SliceRow, ids: Sequence[int]
    ) -> tuple[Mapping[int, tuple[int, int]], Mapping[int, bytes]]:
        """How often each message failed and was opened before, and the payloads of those that no row has yet."""
        payloads: Mapping[int, bytes] = {}
        before: Mapping[int, tuple[int, int]]
        if row.at is None:
            before = rows.failures(row.id, ids)
        else:
            payloads = self.payloads(row.at, ids, rows.cursor)
            before = dict.fromkeys(payloads, (0, 0))
        missing = sorted(set(ids) - set(before))
        if missing:
            raise UsageError(
                f"{self.where}: slice {row.id} of {self._subscription} has not the messages {missing[:5]}, which are named "
                "as failed",
                **self._details(slice=row.id),
            )
        return before, payloads

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return all of the lease's messages; no failure is counted."""
        with self.rows(tx) as rows:
            if not rows.give_back(lease):
                self._explain(rows.fate(lease), lease, lapsed=False)

    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        """Return the lease's messages in parts: suspects alone, else `parts` of one size. A single message returns whole."""
        with self.rows(tx) as rows:
            row = rows.take(lease, delete=False)
            if row is None:
                self._explain(rows.fate(lease), lease, lapsed=False)
            elif row.messages <= 1:
                rows.give_back(lease)
            else:
                cutter = SliceCutter(self, rows, self.subscriber.subscription)
                cutter.divide(replace(row, deaths=min(row.deaths, 1)), alone, parts)

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Every lease, mine from here on; an open one of an older epoch counts a death."""
        with self.rows(tx) as rows:
            self._locked(rows, self.subscriber, epoch)
            rows.raise_epoch(epoch)
            return rows.recover(epoch)

    def backlog(self) -> Backlog:
        """What is left for this subscription."""
        with self.rows() as rows:
            return self._backlog(rows)

    def _backlog(self, rows: PendingRows) -> Backlog:
        counts, position = rows.counts(), rows.position()
        fresh, age_s = (0, None) if position is None else self.unopened(position, rows.cursor)
        return Backlog(
            ready=fresh + counts.returned,
            pending=counts.pending,
            waiting=counts.waiting + counts.returned_retries,
            dead=counts.dead,
            next_retry_in_s=0.0 if counts.returned_retries else counts.next_retry_in_s,
            oldest_ready_age_s=age_s,
        )

    def maintain(self) -> None:
        """Forget leases that ran out long ago. No retry waits longer than the longest backoff, wherever the clock jumped."""
        with self.rows() as rows:
            rows.forget_lapses()
            rows.wait_at_most(self._backoff.max_s)

    # ---- dead letters

    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, those that were disposed of included, oldest first."""
        return self._letters().dead_letters()

    def undecided_among(self, ids: Collection[str]) -> frozenset[str]:
        """Those of these messages that are dead letters which wait for a decision. No payload is read."""
        wanted = frozenset(ids)
        with closing(self._letters().heads(undecided=True)) as heads:
            return frozenset(head.shown_id for head in heads if head.shown_id in wanted)

    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with their failures counted from 0; returns those that were dead."""
        return self._letters().requeue(ids, by=by, why=why)

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that were dead."""
        return self._letters().drop(ids, by=by, why=why)

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Hand a dead letter out again with another payload; see `DeadLetters.edit`."""
        return self._letters().edit(message, payload, by=by, why=why)

    def _letters(self) -> DeadLetters:
        return DeadLetters(self._store, self.subscriber, type(self))

    # ---- shared steps

    def rows(self, tx: object | None = None) -> AbstractContextManager[PendingRows]:
        """The rows of this subscription, in `tx` or in a transaction of their own: for the audit, and for connectors."""
        return self._store.rows(self.subscriber, tx)

    @property
    def subscriber(self) -> Subscriber:
        """Whose rows they are; UsageError before `subscribe`."""
        if self._subscription is None:
            raise UsageError(f"{self.where}: subscribe() comes before any other call of a reader")
        return Subscriber(self.KIND, self.key, self._subscription)

    def _details(self, **more: Json) -> dict[str, Json]:
        return {self.NOUN: self.key, **more}

    def _locked(self, rows: PendingRows, who: Subscriber, epoch: int) -> At:
        """The subscription's position, once it is locked.

        Raises:
            Fenced: a newer epoch has taken it over.
        """
        found = rows.lock()
        if found is None:
            raise UsageError(
                f"{self.where} has no subscription {who.subscription!r}: subscribe() comes first",
                **self._details(subscription=who.subscription),
            )
        newest, position = found
        if epoch < newest:
            raise self._fenced(who, epoch, newest)
        return position

    def _fenced(self, who: Subscriber, epoch: int, newer: int) -> Fenced:
        return Fenced(
            f"{self.where}: epoch {epoch} of subscription {who.subscription} was replaced by epoch {newer}",
            **self._details(subscription=who.subscription, epoch=epoch, newer_epoch=newer),
        )

    def _explain(self, fate: LeaseFate, lease: Lease, *, lapsed: bool = True) -> None:
        """Say why a lease's slice is not there: Fenced where another has it; nothing where it is resolved already."""
        if fate.newest_epoch > lease.epoch:
            raise self._fenced(self.subscriber, lease.epoch, fate.newest_epoch)
        if lapsed and fate.lapsed:
            raise Fenced(
                f"{self.where}: the lease of {lease.owner} ran out and its messages were handed to another",
                **self._details(owner=lease.owner),
            )


# ---- cuts slices of one subscription: to a limit or in halves when they are opened again, in parts when they are
# returned

DEATHS_BEFORE_HALVING: Final = 2


class SliceCutter:
    """Cuts slices inside one transaction of the store."""

    def __init__(self, connector: Connector, rows: PendingRows, subscription: str) -> None:
        self._connector = connector
        self._rows = rows
        self._subscription = subscription

    def reopen(self, row: SliceRow, lease: Lease, limit: Limit, seed: int) -> Slice:
        """Open a free slice, cut to the limit; one on which drivers died in halves, which are halved again at once. One with
        mates stays whole.
        """
        rest_path = row.place
        if row.mates:
            limit = Limit(row.messages, max(1, row.bytes + 1))
        elif row.deaths >= DEATHS_BEFORE_HALVING and row.messages > 1:
            rest_path = row.path_of(1)
            row = replace(row, deaths=1, path=row.path_of(0))
            limit = replace(limit, messages=min(limit.messages, math.ceil(row.messages / 2)))
        retries: Sequence[Retry] = self._rows.retries(row.id) if row.is_retry else ()
        piece, kept = self._head(row, retries, limit, seed)
        row = replace(row, messages=row.messages - piece.gone)
        if (left := row.messages - piece.messages) > 0 and (row.is_retry or piece.rest is not None):
            rest = replace(
                row, at=piece.rest, messages=left, bytes=max(0, row.bytes - piece.bytes), owner=None, path=rest_path
            )
            self._rows.insert(rest, [retry.id for retry in retries[kept:]])
            row = self._shrunk(row, piece)
        elif left:
            raise PositionMismatch(
                f"{self._connector.where}: a slice of subscription {self._subscription} held {row.messages} messages when "
                f"it was opened, and {piece.messages} now: messages were deleted or changed by hand",
                slice=position_of(row),
                found=piece.messages,
            )
        elif row.at not in (None, piece.at):
            # What came back holds less than what was opened, and the messages are all there.
            row = self._shrunk(row, piece)
        return slice_of(self._rows.open(row, lease), piece.expected, retries[:kept])

    def divide(self, row: SliceRow, alone: Sequence[int], parts: int = 2) -> None:
        """Cut a slice behind each place where a suspect begins or ends, or in parts of one size where there are no suspects.

        All parts are returned, and come in their order.
        """
        if row.at is None:
            retries, suspects = self._rows.retries(row.id), set(alone)
            places: Sequence[int] = [place for place, retry in enumerate(retries) if retry.id in suspects]
        else:
            retries, places = (), self._connector.places(row.at, alone, self._rows.cursor) if alone else ()
        done, rest, gone = 0, row, 0
        for number, end in enumerate((*inner_ends(row.messages, places, parts), row.messages)):
            of_part = retries[done:end]
            limit = Limit(end - done, max(1, row.bytes + 1))
            piece, _ = self._head(rest, of_part, limit, 0)
            gone += piece.gone
            messages = piece.messages if gone else end - done
            part = replace(row, messages=messages, bytes=piece.bytes, owner=None, path=row.path_of(number))
            part = replace(part, at=None if row.is_retry else piece.at)
            if done:
                self._rows.insert(part, [retry.id for retry in of_part])
            else:
                self._rows.shrink(part)
            done = end
            if not row.is_retry:
                if piece.rest is None:
                    break  # fewer messages than when it was opened: the next opening says so
                rest = replace(rest, at=piece.rest)

    def _head(self, row: SliceRow, retries: Sequence[Retry], limit: Limit, seed: int) -> tuple[Piece, int]:
        """The part of a slice that the limit admits, and how many of its retries that are."""
        if row.at is not None:
            return self._connector.head(row.at, limit, seed, self._rows.cursor), 0
        kept, size = fitting([retry.bytes for retry in retries], limit) if len(retries) else (0, 0)
        expected = expectation_of([retry.id for retry in retries[:kept]], seed)
        return Piece({}, kept, size, expected, None), kept

    def _shrunk(self, row: SliceRow, piece: Piece) -> SliceRow:
        at = None if row.is_retry else piece.at
        small = replace(row, at=at, messages=piece.messages, bytes=piece.bytes)
        self._rows.shrink(small)
        return small


def inner_ends(messages: int, suspects: Iterable[int], parts: int = 2) -> list[int]:
    """The ordinals at which a slice of this many messages is cut, ascending.

    Each suspect (its ordinal in the slice, from 0) becomes a part of its own; so does what lies between two suspects.
    Without suspects the slice is cut in `parts`, of which the first ones may be larger by one; a single message is not cut.
    """
    cuts = {end for suspect in suspects for end in (suspect, suspect + 1)} - {0, messages}
    if not cuts and messages > 1:
        return sorted({math.ceil(messages * part / parts) for part in range(1, parts)} - {messages})
    return sorted(cuts)
