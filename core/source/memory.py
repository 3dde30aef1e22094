"""A pending source that is held in memory: for tests, and for a topology's first steps.

The object is the store. A test that kills a driver keeps the object and hands it to the next driver; `view` gives
another subscription its own place in the same messages.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from stormproof.core.arguments import require_object, require_text, require_whole, said_of, shown
from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import Fenced, Json, UsageError
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.postgres.database import Database
from stormproof.core.process import OneProcess
from stormproof.core.source.backoff import Backoff
from stormproof.core.source.dead_letter import DeadLetter, Disposal, disposal_entry
from stormproof.core.source.decode import Unit, decoder_for
from stormproof.core.source.kind import SourceKind
from stormproof.core.source.parts import inner_ends
from stormproof.core.source.protocol import (
    READER_SCHEMA,
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
)
from stormproof.core.tracking.share import tokens

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="MemorySource")


def expectation_of(ids: Sequence[int], seed: int) -> Expectation:
    """Number and XOR of the tokens of these messages."""
    if not ids:
        return Expectation(0, 0)
    xor = np.bitwise_xor.reduce(tokens(np.array(ids, dtype=np.int64), seed))
    return Expectation(len(ids), int(xor.view(np.int64)))


@dataclass(frozen=True, slots=True)
class MemorySliceReader:
    """A part of a slice, with its payloads."""

    ids: tuple[int, ...]
    payloads: tuple[bytes, ...]

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, in id order."""
        kept = [row for row, id_ in enumerate(self.ids) if id_ not in excluded]
        for start in range(0, len(kept), batch_rows):
            rows = kept[start : start + batch_rows]
            ids = np.array([self.ids[row] for row in rows], dtype=np.int64)
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(ids),
                    pa.array(np.zeros(len(rows), dtype=np.int64)),
                    pa.array(tokens(ids, seed).view(np.int64)),
                    pa.array([self.payloads[row] for row in rows], pa.binary()),
                ],
                schema=READER_SCHEMA,
            )


@dataclass(slots=True, eq=False)
class _Leased:
    """A slice that was opened, or was given back and will be opened again (owner is None)."""

    ids: tuple[int, ...]
    retry: bool
    owner: str | None = None
    epoch: int = 0
    held: bool = False
    expires_s: float = 0.0
    opened: int = 0
    deaths: int = 0
    death_counted: bool = False


@dataclass(slots=True, eq=False)
class _Retry:
    """A message that failed before: waiting, or part of a retry slice."""

    times_opened: int
    times_failed: int
    not_before_s: float
    history: tuple[dict[str, Json], ...]
    leased: bool = False


@dataclass(slots=True, eq=False)
class _Subscription:
    """One reader's place: everything below `next` was opened once; what is not resolved stands in the other two."""

    next: int = 0
    epoch: int = 0
    slices: list[_Leased] = field(default_factory=list[_Leased])
    retries: dict[int, _Retry] = field(default_factory=dict[int, _Retry])
    dead: list[DeadLetter] = field(default_factory=list[DeadLetter])
    lapsed: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    edited: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """What an operator put in the place of payloads, by number. Kept also once a message is confirmed: under
    at-most-once a slice is read after that."""


class Payloads(Protocol):
    """Payloads by message number; the length is the next message's number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> bytes: ...

    def extend(self, payloads: Iterable[bytes], /) -> None:
        """Append."""
        ...


@dataclass(slots=True, eq=False)
class _Store:
    """The messages and every subscription's place; shared by all views."""

    payloads: Payloads
    guard: OneProcess
    subscriptions: dict[str, _Subscription] = field(default_factory=dict[str, _Subscription])


def _checked(payloads: object, where: str) -> list[bytes]:
    """The payloads, one each for a message; a single one would be taken for its bytes."""
    if isinstance(payloads, (str, bytes)) or not isinstance(payloads, Iterable):
        raise UsageError(
            f"{where}: payloads is {shown(payloads)}; it must be a list with one for each message, like [b'a line']"
        )
    taken = list(cast("Iterable[bytes]", payloads))
    for number, payload in enumerate(taken):
        if not isinstance(payload, (bytes, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{where}: payload {number} is {shown(payload)}; it must be bytes, like b'a line'")
    return taken


def _one_at_a_time(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """One call at a time of all views of a source, in the process that made it."""

    @functools.wraps(method)
    def called(self: S, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        with self._store.guard:  # pyright: ignore[reportPrivateUsage] - a part of the class
            return method(self, *arguments, **keywords)

    return called


class MemorySource:
    """Messages in a list, with everything that a pending source promises, for as long as the process lives.

    Threads: any number may use one object, one call at a time; topologies that share it read it under subscriptions of
    their own. Forks: one that uses its parent's object is refused, for it would write to a copy.

    *Not guaranteed*: it survives no process.
    """

    def __init__(
        self,
        name: str,
        payloads: Sequence[bytes] = (),
        *,
        schema: str = "line string",
        unit: Unit | None = None,
        max_attempts: int = 5,
        backoff: Backoff | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        where = f"source {name}"
        require_text("source", "name", name, "lines")
        require_whole(where, "max_attempts", max_attempts, 1)
        if backoff is not None:
            require_object(where, "backoff", backoff, Backoff, "Backoff(base_s=1.0)")
        self.name = name
        with said_of(where):
            self._decoder: Decoder = decoder_for(schema, unit)
        self._max_attempts = max_attempts
        self._backoff = backoff or Backoff()
        self._clock: Clock = clock or SystemClock()
        self._rng = rng or Random()  # noqa: S311 - jitter, not a secret
        self._store = _Store(_checked(payloads, where), OneProcess(where))
        self._subscription = ""
        self._view_of: str | None = None

    @property
    def decoder(self) -> Decoder:
        """Turns payloads into tuples."""
        return self._decoder

    def view(self, subscription: str) -> MemorySource:
        """The same messages as another subscription sees them; `subscribe` of the view keeps to that name."""
        view = object.__new__(MemorySource)
        view.__dict__.update(self.__dict__)
        view._subscription = view._view_of = subscription
        return view

    def for_run(self, database: Database) -> MemorySource:
        """The same messages for one run, with a subscription of its own."""
        del database
        view = copy.copy(self)
        view._subscription = ""
        return view

    @_one_at_a_time
    def put(self, payloads: Sequence[bytes]) -> range:
        """Append messages; returns their ids."""
        start = len(self._store.payloads)
        self._store.payloads.extend(_checked(payloads, f"source {self.name}"))
        return range(start, len(self._store.payloads))

    @property
    def kind(self) -> SourceKind:
        """A slice can be read again, for as long as the process lives."""
        return SourceKind.TRANSACTIONAL

    def serves(self, guarantee: Guarantee) -> str | None:
        """All of them, for as long as the process lives."""
        del guarantee
        return None

    def shown_id(self, message: int, origin: int) -> str:
        """A message's place in the list."""
        del origin
        return str(message)

    def bind(self, database: Database) -> None:
        """It needs none."""
        del database

    @_one_at_a_time
    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; Fenced where it has a newer epoch already."""
        self._subscription = self._view_of or subscription
        self._store.subscriptions.setdefault(self._subscription, _Subscription())
        self._fence(epoch).epoch = epoch

    @_one_at_a_time
    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then new ones."""
        del tx
        sub = self._fence(lease.epoch)
        if any(leased.owner == lease.owner and not self._is_expired(leased) for leased in sub.slices):
            raise UsageError(
                f"source {self.name}: {lease.owner} holds a slice already; each lease needs a key of its own"
            )
        leased = (
            self._returned(sub, limit) or (self._due(sub, limit) if limit.retries else None) or self._new(sub, limit)
        )
        if leased is None:
            return None
        leased.owner, leased.epoch, leased.held = lease.owner, lease.epoch, False
        leased.death_counted = False
        leased.expires_s = self._clock.monotonic_s() + lease.seconds
        leased.opened += 1
        return self._describe(leased, seed)

    def _returned(self, sub: _Subscription, limit: Limit) -> _Leased | None:
        for place, leased in enumerate(sub.slices):
            expired = self._is_expired(leased)
            if leased.owner is not None and not expired:
                continue
            if expired and leased.owner is not None:
                sub.lapsed.add((leased.owner, leased.epoch))
                leased.owner = None
            cut = self._cut(leased.ids, limit)
            if leased.deaths >= 2 and len(leased.ids) > 1:
                cut = min(cut, math.ceil(len(leased.ids) / 2))
                leased.deaths = 1  # each half is halved again as soon as it takes a driver down
            if cut < len(leased.ids):
                sub.slices.insert(place + 1, replace(leased, ids=leased.ids[cut:]))
                leased.ids = leased.ids[:cut]
            return leased
        return None

    def _due(self, sub: _Subscription, limit: Limit) -> _Leased | None:
        now = self._clock.monotonic_s()
        due = sorted(id_ for id_, retry in sub.retries.items() if not retry.leased and retry.not_before_s <= now)
        if not due:
            return None
        leased = _Leased(tuple(due[: self._cut(due, limit)]), retry=True)
        for id_ in leased.ids:
            sub.retries[id_].leased = True
        sub.slices.append(leased)
        return leased

    def _new(self, sub: _Subscription, limit: Limit) -> _Leased | None:
        stop = min(len(self._store.payloads), sub.next + max(1, limit.messages))
        if sub.next >= stop:
            return None
        ids = range(sub.next, stop)
        leased = _Leased(tuple(ids[: self._cut(ids, limit)]), retry=False)
        sub.next += len(leased.ids)
        sub.slices.append(leased)
        return leased

    def _cut(self, ids: Sequence[int], limit: Limit) -> int:
        """How many of these messages the limit admits; at least one."""
        ids = ids[: max(1, limit.messages)]
        total = np.cumsum([len(self._payload(id_)) for id_ in ids])
        return max(1, int(np.searchsorted(total, limit.bytes, side="right")))

    def _describe(self, leased: _Leased, seed: int) -> Slice:
        position: dict[str, Json] = {"ids": list(leased.ids), "retry": leased.retry, "deaths": leased.deaths}
        return self.attach(position, expectation_of(leased.ids, seed))

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice that was opened earlier, from its position."""
        ids = _ids_of(position)
        deaths = position.get("deaths", 0)
        return Slice(
            position=position,
            expected=expected,
            bytes=sum(len(self._payload(id_)) for id_ in ids),
            retry=bool(position.get("retry")),
            deaths=deaths if isinstance(deaths, int) else 0,
            replayed=tuple((id_, 0) for id_ in ids) if position.get("retry") else (),
        )

    @_one_at_a_time
    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """The expectation for another seed or with messages left out."""
        del tx
        return expectation_of([id_ for id_ in _ids_of(slice_.position) if id_ not in excluded], seed)

    @_one_at_a_time
    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """The slice as contiguous parts of about equal length."""
        ids = _ids_of(slice_.position)
        bounds = [len(ids) * part // parallelism for part in range(parallelism + 1)]
        return tuple(
            MemorySliceReader(ids[low:high], tuple(self._payload(id_) for id_ in ids[low:high]))
            for low, high in itertools.pairwise(bounds)
        )

    @_one_at_a_time
    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """Open to held, from here on the lease never expires; Fenced where it lapsed, was returned or is another's."""
        del tx
        leased = self._mine(lease)
        if leased is None or self._is_expired(leased):
            raise Fenced(
                f"source {self.name}: the lease of {lease.owner} has lapsed or was returned",
                source=self.name,
                owner=lease.owner,
            )
        leased.held = True

    @_one_at_a_time
    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named."""
        del tx
        sub = self._fence(lease.epoch)
        leased = self._mine(lease)
        if leased is None:
            if (lease.owner, lease.epoch) in sub.lapsed:
                raise Fenced(
                    f"source {self.name}: the lease of {lease.owner} lapsed and its messages were handed to another",
                    source=self.name,
                    owner=lease.owner,
                )
            return Resolution()
        unknown = sorted({failure.id for failure in failed} - set(leased.ids))
        if unknown:
            raise UsageError(f"source {self.name}: {lease.owner} does not hold the failed messages {unknown[:5]}")
        sub.slices.remove(leased)
        resolution = self._fail(sub, leased, failed)
        for id_ in set(leased.ids).difference(failure.id for failure in failed):
            sub.retries.pop(id_, None)
        return resolution

    def _fail(self, sub: _Subscription, leased: _Leased, failed: Sequence[MessageFailure]) -> Resolution:
        retried, dead = list[str](), list[str]()
        latest_s = now_s = self._clock.monotonic_s()
        # Those that are merely returned come last: they wait as long as the ones that took them along.
        for failure in sorted({failure.id: failure for failure in failed}.values(), key=lambda f: not f.counted):
            before = sub.retries.pop(failure.id, None) or _Retry(0, 0, 0.0, ())
            history: tuple[dict[str, Json], ...] = (*before.history, history_entry(failure, leased.owner, self._clock))
            opened, count = before.times_opened + leased.opened, before.times_failed + failure.counted
            if failure.counted and count >= self._max_attempts:
                sub.dead.append(
                    DeadLetter(
                        id=failure.id,
                        origin=0,
                        shown_id=str(failure.id),
                        subscription=self._subscription,
                        payload=self._payload(failure.id),
                        reason=failure.reason.value,
                        error=failure.error,
                        times_opened=opened,
                        times_failed=count,
                        history=history,
                        dead_at=self._clock.now(),
                    )
                )
                dead.append(str(failure.id))
            else:
                due_s = now_s + self._backoff.delay_s(count, self._rng) if failure.counted else latest_s
                latest_s = max(latest_s, due_s)
                sub.retries[failure.id] = _Retry(opened, count, due_s, history)
                retried.append(str(failure.id))
        return Resolution(tuple(retried), tuple(dead))

    @_one_at_a_time
    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Return all of the lease's messages; no failure is counted."""
        del tx
        self._fence(lease.epoch)
        leased = self._mine(lease)
        if leased is not None:
            leased.owner, leased.held = None, False

    @_one_at_a_time
    def extend(self, lease: Lease) -> None:
        """Move the lease's expiry; Fenced where it is not ours any more."""
        leased = self._mine(lease)
        if leased is None or self._is_expired(leased):
            raise Fenced(
                f"source {self.name}: the lease of {lease.owner} has lapsed; its messages will come again",
                source=self.name,
                owner=lease.owner,
            )
        leased.expires_s = self._clock.monotonic_s() + lease.seconds

    @_one_at_a_time
    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """Every lease, mine from here on; an open one of an older epoch counts a death."""
        del tx
        sub = self._fence(epoch)
        sub.epoch = epoch
        owners = list[str]()
        for leased in sub.slices:
            if leased.owner is not None:
                # Once an opening: a driver that dies in recovery has not died of these messages.
                died = leased.epoch < epoch and not leased.held
                leased.deaths += died and not leased.death_counted
                leased.death_counted = leased.death_counted or died
                leased.epoch = epoch
                owners.append(leased.owner)
        return tuple(owners)

    @_one_at_a_time
    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """Return the lease's messages in parts: suspects alone, else two halves; a single message is returned whole."""
        del tx, slice_
        sub = self._fence(lease.epoch)
        leased = self._mine(lease)
        if leased is None:
            return
        leased.owner, leased.held = None, False
        suspects = set(alone)
        ends = inner_ends(len(leased.ids), (place for place, id_ in enumerate(leased.ids) if id_ in suspects))
        if not ends:
            return
        leased.deaths = min(leased.deaths, 1)
        place = sub.slices.index(leased)
        bounds = itertools.pairwise((0, *ends, len(leased.ids)))
        sub.slices[place : place + 1] = [replace(leased, ids=leased.ids[low:high]) for low, high in bounds]

    @_one_at_a_time
    def backlog(self) -> Backlog:
        """What is left for this subscription."""
        sub = self._sub()
        now = self._clock.monotonic_s()
        waiting = [retry.not_before_s for retry in sub.retries.values() if not retry.leased]
        free = [leased for leased in sub.slices if leased.owner is None or self._is_expired(leased)]
        if any(leased.retry for leased in free):
            waiting.append(now)
        return Backlog(
            ready=len(self._store.payloads) - sub.next + sum(len(leased.ids) for leased in free if not leased.retry),
            pending=sum(len(leased.ids) for leased in sub.slices if leased not in free),
            waiting=sum(1 for retry in sub.retries.values() if not retry.leased)
            + sum(len(leased.ids) for leased in free if leased.retry),
            dead=sum(1 for letter in sub.dead if letter.disposal is None),
            next_retry_in_s=max(0.0, min(waiting) - now) if waiting else None,
        )

    @_one_at_a_time
    def dead_letters(self) -> tuple[DeadLetter, ...]:
        """Every dead letter of this subscription, those that were disposed of included, oldest first."""
        return tuple(self._sub().dead)

    @_one_at_a_time
    def requeue(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Hand these dead letters out again, with their failures counted from 0; returns those that were dead."""
        return self._dispose(ids, Disposal.REQUEUE, by, why)

    @_one_at_a_time
    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good; returns those that were dead."""
        return self._dispose(ids, Disposal.DROP, by, why)

    def edit(self, message: str, payload: bytes, *, by: str, why: str) -> bool:
        """Hand a dead letter out again with another payload; the old one stays on record. False where it is none.

        For this subscription alone: the others go on to see the message as it was put.
        """
        return bool(self._dispose([message], Disposal.EDIT, by, why, payload))

    def _dispose(
        self, ids: Sequence[str], disposal: Disposal, by: str, why: str, payload: bytes | None = None
    ) -> tuple[str, ...]:
        sub = self._sub()
        done = list[str]()
        for place, letter in enumerate(sub.dead):
            if letter.shown_id not in ids or letter.disposal is not None:
                continue
            now = self._clock.now()
            sub.dead[place] = replace(letter, disposal=disposal, by=by, why=why, disposed_at=now, new_payload=payload)
            done.append(letter.shown_id)
            if payload is not None:
                sub.edited[letter.id] = payload
            if disposal is not Disposal.DROP:
                entry = disposal_entry(disposal, now, by, why, letter.payload, payload)
                sub.retries[letter.id] = _Retry(
                    letter.times_opened, 0, self._clock.monotonic_s(), (*letter.history, entry)
                )
        return tuple(done)

    def joins(self, tx: object) -> bool:
        """Never: there is no database here."""
        del tx
        return False

    def maintain(self) -> None:
        """Nothing is due in memory."""

    def close(self) -> None:
        """Nothing to let go."""

    def _payload(self, number: int) -> bytes:
        """A message's payload, as this subscription sees it."""
        sub = self._store.subscriptions.get(self._subscription)
        edited = None if sub is None else sub.edited.get(number)
        return self._store.payloads[number] if edited is None else edited

    def _sub(self) -> _Subscription:
        if not self._subscription and len(self._store.subscriptions) == 1:
            return next(iter(self._store.subscriptions.values()))  # of the one run that has read it
        if self._subscription not in self._store.subscriptions:
            raise UsageError(f"source {self.name}: subscribe() comes before any other call")
        return self._store.subscriptions[self._subscription]

    def _fence(self, epoch: int) -> _Subscription:
        """The subscription, unless a newer epoch has taken it over."""
        sub = self._sub()
        if epoch < sub.epoch:
            raise Fenced(
                f"source {self.name}: epoch {epoch} of {self._subscription} was replaced by epoch {sub.epoch}",
                source=self.name,
                epoch=epoch,
                newer_epoch=sub.epoch,
            )
        return sub

    def _mine(self, lease: Lease) -> _Leased | None:
        """The slice of this lease; None where it has none (any more); Fenced where it belongs to another epoch."""
        for leased in self._fence(lease.epoch).slices:
            if leased.owner == lease.owner:
                if leased.epoch != lease.epoch:
                    raise Fenced(
                        f"source {self.name}: the lease of {lease.owner} belongs to epoch {leased.epoch} now",
                        source=self.name,
                        owner=lease.owner,
                    )
                return leased
        return None

    def _is_expired(self, leased: _Leased) -> bool:
        return leased.owner is not None and not leased.held and self._clock.monotonic_s() >= leased.expires_s


def history_entry(failure: MessageFailure, owner: str | None, clock: Clock) -> dict[str, Json]:
    """What a message's history keeps of one failure, or of one return with a message that failed."""
    return {
        "at": clock.now().isoformat(),
        "owner": owner,
        "reason": failure.reason.value,
        "component": failure.component,
        "error": failure.error,
        "input": failure.input,
        **({} if failure.counted else {"returned": True}),
    }


def _ids_of(position: dict[str, Json]) -> tuple[int, ...]:
    ids = position.get("ids")
    if not isinstance(ids, list) or not all(isinstance(id_, int) for id_ in ids):
        raise UsageError(f"not a position of a memory source: {sorted(position)}")
    return tuple(id_ for id_ in ids if isinstance(id_, int))
