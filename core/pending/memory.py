"""What is pending, in this process's memory: for tests, for a topology's first steps, and for clients without a store."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Final, TypeVar

import pyarrow as pa

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.process import OneProcess
from stormproof.core.contract.dead_letter import DeadLetter, Disposal, LetterHead, disposal_entry
from stormproof.core.contract.source import Lease, SliceReader
from stormproof.core.pending.batches import batches_of
from stormproof.core.pending.rows import (
    At,
    Counts,
    Failed,
    LeaseFate,
    Retry,
    SliceRow,
    Subscriber,
    WaitingRetry,
)
from stormproof.core.postgres.database import Database

K = TypeVar("K")
V = TypeVar("V")

LAPSES_KEPT_S: Final = 7 * 24 * 3600.0
_FINISHED_KEPT: Final = 64
"""Slices of retries whose payloads stay readable once they are confirmed: at-most-once confirms before it reads."""


@dataclass(frozen=True, slots=True)
class MemorySliceReader:
    """Messages with their payloads. `origins` are 0 where they are left out; `unpack` as in `PendingStore.readers`."""

    ids: tuple[int, ...]
    payloads: tuple[bytes, ...]
    origins: tuple[int, ...] = field(default=(), kw_only=True)
    unpack: Callable[[Sequence[bytes]], Any] | None = field(default=None, kw_only=True)

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the messages, in id order."""
        kept = [row for row, id_ in enumerate(self.ids) if id_ not in excluded]
        ids, payloads = [self.ids[row] for row in kept], [self.payloads[row] for row in kept]
        origins = [self.origins[row] for row in kept] if self.origins else [0] * len(kept)
        yield from batches_of(ids, origins, payloads, seed, batch_rows, self.unpack)


@dataclass(frozen=True, slots=True)
class _Leased:
    """A slice and its lease, if it has one (`row.owner`)."""

    row: SliceRow
    pinned: bool = False
    expires_s: float = 0.0
    death_counted: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message that failed before: waiting, or (`slice`) part of a slice."""

    origin: int
    payload: bytes
    times_opened: int
    times_failed: int
    not_before_s: float
    history: tuple[dict[str, Json], ...]
    slice: int | None = None
    mates: str = ""
    mates_messages: int = 1


@dataclass(slots=True, eq=False)
class _Subscription:
    """What one subscription has."""

    epoch: int
    position: At
    slices: dict[int, _Leased] = field(default_factory=dict[int, _Leased])
    retries: dict[int, _Waiting] = field(default_factory=dict[int, _Waiting])
    dead: dict[int, DeadLetter] = field(default_factory=dict[int, DeadLetter])
    lapsed: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])
    finished: deque[tuple[int, dict[int, _Waiting]]] = field(default_factory=lambda: deque(maxlen=_FINISHED_KEPT))


class MemoryPendingStore:
    """Rows of any number of subscriptions; `what` is what errors call their owner.

    Guarantee: a block of `rows` takes effect as a whole, or not at all where it raises.

    Threads: any number, one block at a time. Forks: one that uses its parent's object is refused, for it would write to
    a copy.
    """

    def __init__(self, what: str, clock: Clock) -> None:
        self.what = what
        self.clock = clock
        self.guard = OneProcess(what)
        self._subscriptions: dict[Subscriber, _Subscription] = {}
        self._numbers = count(1)

    @contextmanager
    def rows(self, who: Subscriber, tx: object | None = None) -> Generator[MemoryRows]:
        """The subscription's rows; `tx` is left alone, for memory takes part in no transaction."""
        with self.guard:
            undo: list[Callable[[], object]] = []
            try:
                yield MemoryRows(self, who, self._subscriptions, self._numbers, undo)
            except BaseException:
                for step in reversed(undo):
                    step()
                raise

    def readers(
        self,
        who: Subscriber,
        slice_id: int,
        parts: Sequence[Sequence[int]],
        unpack: Callable[[Sequence[bytes]], Any] | None,
    ) -> tuple[SliceReader, ...]:
        """Readers that have the payloads in them."""
        with self.guard:
            sub = self._subscriptions[who]
            retries: Mapping[int, _Waiting] = sub.retries
            if slice_id not in sub.slices:
                retries = dict(sub.finished).get(slice_id, retries)
            return tuple(
                MemorySliceReader(
                    tuple(ids),
                    tuple(retries[id_].payload for id_ in ids),
                    origins=tuple(retries[id_].origin for id_ in ids),
                    unpack=unpack,
                )
                for ids in parts
            )

    def subscriptions(self, kind: str, source: str) -> Sequence[str]:
        """The names of a source's subscriptions, in the order in which they were made."""
        with self.guard:
            return [who.subscription for who in self._subscriptions if (who.kind, who.source) == (kind, source)]

    def for_run(self, database: Database) -> MemoryPendingStore:
        """Itself: runs that read one source share what is pending there."""
        return self

    def is_known(self, database: Database | None) -> bool:
        """Always."""
        return True

    def bind(self, database: Database) -> None:
        """It needs none."""

    def joins(self, tx: object) -> bool:
        """Never: there is no database here."""
        return False

    def close(self) -> None:
        """Nothing to let go."""


class MemoryRows:
    """The rows of one subscription, inside a block of `MemoryPendingStore.rows`; see `PendingRows`."""

    def __init__(
        self,
        store: MemoryPendingStore,
        who: Subscriber,
        subscriptions: dict[Subscriber, _Subscription],
        numbers: Iterator[int],
        undo: list[Callable[[], object]],
    ) -> None:
        self._what = store.what
        self._clock = store.clock
        self._who = who
        self._all = subscriptions
        self._numbers = numbers
        self._undo = undo

    @property
    def cursor(self) -> None:
        """There is no database here."""
        return None

    # ---- the subscription

    @property
    def _sub(self) -> _Subscription:
        sub = self._all.get(self._who)
        if sub is None:
            raise UsageError(
                f"{self._what}: there is no subscription {self._who.subscription!r}: subscribe() comes first"
            )
        return sub

    def subscribe(self, epoch: int, start: Callable[[], At]) -> None:
        """Make the subscription where it is missing."""
        if self._who not in self._all:
            self._put(self._all, self._who, _Subscription(epoch, start()))

    def lock(self) -> tuple[int, At] | None:
        """Epoch and position; the block has the lock already."""
        sub = self._all.get(self._who)
        return None if sub is None else (sub.epoch, sub.position)

    def position(self) -> At | None:
        """The position."""
        sub = self._all.get(self._who)
        return None if sub is None else sub.position

    def raise_epoch(self, epoch: int) -> None:
        """Raise the newest epoch to this one, unless it is higher."""
        sub = self._sub
        self._set(sub, "epoch", max(sub.epoch, epoch))

    # ---- slices

    def move(self, position: At) -> None:
        """Move the subscription to `position`."""
        self._set(self._sub, "position", position)

    def advance(self, row: SliceRow, lease: Lease, position: At) -> SliceRow:
        """Insert a slice that is open, and move the position on."""
        row = self._store(replace(row, id=next(self._numbers)), lease)
        self._set(self._sub, "position", position)
        return row

    def free(self, mates: Collection[str] | None = None) -> SliceRow | None:
        """The first slice that was returned or whose lease ran out; one with mates may have its lease still."""
        slices, named = self._sub.slices.values(), set(mates or ()) - {""}
        own = (one for one in slices if self._is_free(one) or (one.row.mates in named and not one.pinned))
        free = (one.row for one in own if mates is None or one.row.mates in mates)
        return min(free, key=lambda row: (row.place, row.id), default=None)

    def due(self, messages: int, mates: Collection[str] | None = None) -> Sequence[Retry]:
        """The longest due, in the order of their numbers."""
        now_s = self._clock.monotonic_s()
        waiting = {id_: retry for id_, retry in self._sub.retries.items() if retry.slice is None}
        due = sorted((retry.not_before_s, id_) for id_, retry in waiting.items() if retry.not_before_s <= now_s)
        alone, named, total = set[int](), set(mates or ()) - {""}, 0
        for _, id_ in due[:messages]:
            retry = waiting[id_]
            if (mates is not None and (retry.mates or "" not in mates)) or retry.mates in named:
                continue
            total += retry.mates_messages
            if total <= messages or total == retry.mates_messages:
                (named.add(retry.mates) if retry.mates else alone.add(id_))
        return self._listed(id_ for id_, retry in waiting.items() if id_ in alone or retry.mates in named)

    def retries(self, slice_id: int) -> Sequence[Retry]:
        """The retries of a slice."""
        return self._listed(self._of_slice(slice_id))

    def insert(self, row: SliceRow, retries: Sequence[int] = ()) -> SliceRow:
        """Insert a returned slice with these retries."""
        sub = self._sub
        row = replace(row, id=next(self._numbers), owner=None)
        self._put(sub.slices, row.id, _Leased(row))
        for id_ in retries:
            self._put(sub.retries, id_, replace(sub.retries[id_], slice=row.id))
        return row

    def shrink(self, row: SliceRow) -> None:
        """The slice is returned, and is as in `row` from now on."""
        slices = self._sub.slices
        old = slices[row.id].row
        small = replace(
            old, at=row.at, messages=row.messages, bytes=row.bytes, deaths=row.deaths, path=row.path, owner=None
        )
        self._put(slices, row.id, _Leased(small))

    def open(self, row: SliceRow, lease: Lease) -> SliceRow:
        """Open a free slice under the lease."""
        stored = self._sub.slices[row.id].row
        if row.owner is not None:
            self._put(self._sub.lapsed, (row.owner, row.epoch), self._clock.monotonic_s())
        opened = replace(stored, owner=lease.owner, epoch=lease.epoch, opened=stored.opened + 1, deaths=row.deaths)
        return self._store(opened, lease)

    def _store(self, row: SliceRow, lease: Lease) -> SliceRow:
        sub = self._sub
        if any(leased.row.owner == lease.owner and id_ != row.id for id_, leased in sub.slices.items()):
            raise UsageError(f"{self._what}: {lease.owner} holds a slice already; each lease needs a key of its own")
        self._put(sub.slices, row.id, _Leased(row, expires_s=self._clock.monotonic_s() + lease.seconds))
        return row

    def take(self, lease: Lease, *, delete: bool) -> SliceRow | None:
        """The slice of a lease."""
        leased = self._mine(lease)
        if leased is None:
            return None
        if delete:
            self._drop(self._sub.slices, leased.row.id)
        return leased.row

    def touch(self, lease: Lease, *, pin: bool) -> bool:
        """Hold, or move the expiry."""
        leased = self._mine(lease)
        if leased is None or self._is_free(leased):
            return False
        expires_s = self._clock.monotonic_s() + lease.seconds
        self._put(self._sub.slices, leased.row.id, replace(leased, pinned=leased.pinned or pin, expires_s=expires_s))
        return True

    def give_back(self, lease: Lease) -> bool:
        """Return a lease's messages."""
        leased = self._mine(lease)
        if leased is None:
            return False
        row = replace(leased.row, owner=None)
        self._put(self._sub.slices, row.id, _Leased(row))
        return True

    def fate(self, lease: Lease) -> LeaseFate:
        """What became of a lease."""
        sub = self._sub
        epochs = [leased.row.epoch for leased in sub.slices.values() if leased.row.owner == lease.owner]
        return LeaseFate(max([sub.epoch, *epochs]), (lease.owner, lease.epoch) in sub.lapsed)

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Every lease belongs to `epoch`; one opening counts one death."""
        slices = self._sub.slices
        owners: list[str] = []
        for id_, leased in sorted(slices.items()):
            row = leased.row
            if row.owner is None:
                continue
            died = row.epoch < epoch and not leased.pinned
            row = replace(row, epoch=epoch, deaths=row.deaths + (died and not leased.death_counted))
            self._put(slices, id_, replace(leased, row=row, death_counted=leased.death_counted or died))
            owners.append(row.owner or "")
        return tuple(owners)

    def unresolved(self) -> Sequence[SliceRow]:
        """Every slice."""
        return [leased.row for _, leased in sorted(self._sub.slices.items())]

    # ---- failed messages

    def failures(self, slice_id: int, ids: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        """How often retries of a slice failed and were opened before."""
        mine, wanted = self._of_slice(slice_id), set(ids)
        return {id_: (retry.times_failed, retry.times_opened) for id_, retry in mine.items() if id_ in wanted}

    def fail(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        """Make retries or dead letters."""
        for failure in failed:
            before = self._sub.retries.get(failure.id) if row.is_retry else None
            payload = failure.payload if before is None else before.payload
            if payload is None:
                raise UsageError(f"{self._what}: message {failure.id} has no payload and is no retry")
            times_opened = row.opened + (0 if before is None else before.times_opened)
            times_failed = failure.counted + (0 if before is None else before.times_failed)
            entry: dict[str, Json] = {"at": self._clock.now().isoformat(), **failure.entry}
            history = (*(() if before is None else before.history), entry)
            if failure.delay_s is not None:
                due_s = self._clock.monotonic_s() + failure.delay_s
                retry = _Waiting(
                    origin=failure.origin,
                    payload=payload,
                    times_opened=times_opened,
                    times_failed=times_failed,
                    not_before_s=due_s,
                    history=history,
                    mates=failure.mates,
                    mates_messages=failure.mates_messages,
                )
                self._put(self._sub.retries, failure.id, retry)
                continue
            if before is not None:
                self._drop(self._sub.retries, failure.id)
            letter = DeadLetter(
                id=failure.id,
                origin=failure.origin,
                shown_id="",
                subscription=self._who.subscription,
                payload=payload,
                reason=failure.reason,
                error=failure.error,
                times_opened=times_opened,
                times_failed=times_failed,
                history=history,
                dead_at=self._clock.now(),
            )
            self._put(self._sub.dead, next(self._numbers), letter)

    def finish(self, row: SliceRow) -> None:
        """Remove the retries that still belong to a taken slice."""
        sub, mine = self._sub, self._of_slice(row.id)
        for id_ in mine:
            self._drop(sub.retries, id_)
        sub.finished.append((row.id, mine))  # not undone: nobody asks for it but for a slice that is gone

    def counts(self) -> Counts:
        """How many messages are in which state."""
        sub = self._sub
        returned = returned_retries = pending = 0
        for leased in sub.slices.values():
            if not self._is_free(leased):
                pending += leased.row.messages
            elif leased.row.is_retry:
                returned_retries += leased.row.messages
            else:
                returned += leased.row.messages
        waiting = [retry.not_before_s for retry in sub.retries.values() if retry.slice is None]
        dead = sum(1 for letter in sub.dead.values() if letter.disposal is None)
        next_in_s = max(0.0, min(waiting) - self._clock.monotonic_s()) if waiting else None
        return Counts(returned, returned_retries, pending, len(waiting), dead, next_in_s)

    def waiting(self) -> Sequence[WaitingRetry]:
        """Every retry."""
        sub, now, now_s = self._sub, self._clock.now(), self._clock.monotonic_s()
        return [
            WaitingRetry(
                id_,
                retry.origin,
                retry.times_failed,
                now + timedelta(seconds=retry.not_before_s - now_s),
                sub.slices[retry.slice].row.owner if retry.slice in sub.slices else None,
            )
            for id_, retry in sorted(sub.retries.items())
        ]

    def retries_by_slice(self) -> Mapping[int, int]:
        """How many retries belong to each slice."""
        return Counter(retry.slice for retry in self._sub.retries.values() if retry.slice is not None)

    # ---- dead letters

    def dead_letters(
        self, shown: Callable[[int, int], str], *, payloads: bool = True, of: tuple[int, int] | None = None
    ) -> tuple[DeadLetter, ...]:
        """Every dead letter, or those of one message, oldest first."""
        dead = self._all[self._who].dead if self._who in self._all else {}
        return tuple(
            replace(letter, shown_id=shown(letter.id, letter.origin))
            for _, letter in sorted(dead.items())
            if of in (None, (letter.id, letter.origin))
        )

    def each_dead_letter(self, shown: Callable[[int, int], str]) -> Iterator[DeadLetter]:
        """The same."""
        return iter(self.dead_letters(shown))

    def letter_heads(self, shown: Callable[[int, int], str], *, undecided: bool) -> Iterator[LetterHead]:
        """What filters need of each dead letter, oldest first."""
        found = self.dead_letters(shown)
        return (LetterHead.of(letter) for letter in found if not (undecided and letter.disposal is not None))

    def altered(self, numbers: Sequence[tuple[int, int]] | None = None) -> Sequence[tuple[int, int]]:
        """None: only this process reaches them."""
        return ()

    def letter_classes(self) -> Mapping[tuple[str, str], int]:
        """How many undecided dead letters there are of each class of error and reason."""
        heads = self.letter_heads(lambda id_, _: str(id_), undecided=True)
        return Counter((head.error_class, head.reason) for head in heads)

    def dispose(
        self, numbers: Sequence[tuple[int, int]], disposal: Disposal, *, by: str, why: str, payload: bytes | None = None
    ) -> Sequence[tuple[int, int]]:
        """Record a decision; those that are not dropped become retries that are due at once."""
        sub, wanted, now = self._sub, set(numbers), self._clock.now()
        done: list[tuple[int, int]] = []
        for number, letter in sorted(sub.dead.items()):
            if (letter.id, letter.origin) not in wanted or letter.disposal is not None:
                continue
            decided = replace(letter, disposal=disposal, by=by, why=why, disposed_at=now, new_payload=payload)
            self._put(sub.dead, number, decided)
            done.append((letter.id, letter.origin))
            if disposal is not Disposal.DROP:
                entry = disposal_entry(disposal, now, by, why, letter.payload, payload)
                retry = _Waiting(
                    letter.origin,
                    letter.payload if payload is None else payload,
                    letter.times_opened,
                    0,
                    self._clock.monotonic_s(),
                    (*letter.history, entry),
                )
                self._put(sub.retries, letter.id, retry)
        return done

    def open_again(
        self, messages: Sequence[tuple[int, int, bytes]], entry: Mapping[str, Json]
    ) -> Sequence[tuple[int, int]]:
        """Make retries, due at once, of confirmed messages; gives those that were made."""
        sub, at = self._sub, self._clock.now().isoformat()
        made: list[tuple[int, int]] = []
        for number, origin, payload in messages:
            if number not in sub.retries:
                retry = _Waiting(origin, payload, 1, 0, self._clock.monotonic_s(), ({"at": at, **entry},))
                self._put(sub.retries, number, retry)
                made.append((number, origin))
        return made

    def wait_at_most(self, seconds: float, entry: Mapping[str, Json] | None = None) -> int:
        """Have no retry wait longer than so many seconds from now; gives how many would have."""
        sub, latest_s = self._sub, self._clock.monotonic_s() + seconds
        more = () if entry is None else ({"at": self._clock.now().isoformat(), **entry},)
        late = [(id_, one) for id_, one in sub.retries.items() if one.slice is None and one.not_before_s > latest_s]
        for id_, one in late:
            self._put(sub.retries, id_, replace(one, not_before_s=latest_s, history=(*one.history, *more)))
        return len(late)

    def undecided(self, number: int, origin: int) -> bytes | None:
        """The payload of a dead letter that waits for a decision."""
        waiting = (
            letter.payload
            for letter in self._sub.dead.values()
            if (letter.id, letter.origin, letter.disposal) == (number, origin, None)
        )
        return next(waiting, None)

    def unconfirmed(self, numbers: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], bool]:
        """Retries and undecided dead letters among these."""
        dead = {(one.id, one.origin): True for one in self._sub.dead.values() if one.disposal is None}
        waiting = {(id_, retry.origin): retry.times_failed > 0 for id_, retry in self._sub.retries.items()}
        found = dead | waiting
        return {number: found[number] for number in numbers if number in found}

    def forget_lapses(self) -> None:
        """Remove what is known of leases that ran out more than a week ago."""
        sub, before_s = self._sub, self._clock.monotonic_s() - LAPSES_KEPT_S
        for key in [key for key, at_s in sub.lapsed.items() if at_s < before_s]:
            self._drop(sub.lapsed, key)

    # ---- shared steps

    def _mine(self, lease: Lease) -> _Leased | None:
        sub, wanted = self._sub, (lease.owner, lease.epoch)
        if lease.epoch < sub.epoch:
            return None  # taken over already, if not recovered yet
        return next((one for one in sub.slices.values() if (one.row.owner, one.row.epoch) == wanted), None)

    def _is_free(self, leased: _Leased) -> bool:
        return leased.row.owner is None or (not leased.pinned and self._clock.monotonic_s() >= leased.expires_s)

    def _of_slice(self, slice_id: int) -> dict[int, _Waiting]:
        return {id_: retry for id_, retry in sorted(self._sub.retries.items()) if retry.slice == slice_id}

    def _listed(self, ids: Iterable[int]) -> list[Retry]:
        retries = self._sub.retries
        return [Retry(id_, retries[id_].origin, len(retries[id_].payload), retries[id_].mates) for id_ in sorted(ids)]

    # Each change notes how it is undone.

    def _put(self, mapping: MutableMapping[K, V], key: K, value: V) -> None:
        if key in mapping:
            self._undo.append(partial(mapping.__setitem__, key, mapping[key]))
        else:
            self._undo.append(partial(mapping.__delitem__, key))
        mapping[key] = value

    def _drop(self, mapping: MutableMapping[K, V], key: K) -> None:
        self._undo.append(partial(mapping.__setitem__, key, mapping.pop(key)))

    def _set(self, sub: _Subscription, name: str, value: object) -> None:
        self._undo.append(partial(setattr, sub, name, getattr(sub, name)))
        setattr(sub, name, value)
