"""`IteratorSource`: a client of the user's own, which is any iterator of messages, as a pending source.

The client is the iterator that gives messages, and the callbacks that are told of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, Unpack, cast

import numpy as np
import pyarrow as pa

from stormproof.core.base.arguments import require_function, shown
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import FatalError, StoreUnavailable, UsageError
from stormproof.core.base.message import Guarantee, MessageFailure, storable_text
from stormproof.core.base.process import kept_from_forks
from stormproof.core.contract.payload import Unit
from stormproof.core.contract.source import (
    READER_SCHEMA,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
    SourceKind,
    SourcePreview,
)
from stormproof.core.pending.connector import NextMessages, Piece
from stormproof.core.pending.memory import MemorySliceReader
from stormproof.core.pending.numbered import next_of, range_of
from stormproof.core.pending.rows import At, even_bounds, expectation_of
from stormproof.core.pending.source import PendingArguments
from stormproof.core.postgres.database import Database
from stormproof.core.source.memory import InMemory
from stormproof.core.user_code.functions import refuse_unfit_call

Payload: TypeAlias = bytes | str
Item: TypeAlias = Payload | tuple[Hashable, Payload] | None
"""What an iterator gives: a payload, a pair of the client's own id and a payload, or None where nothing has arrived."""


class ReceivedMessage(NamedTuple):
    """A message from the iterator. `key` is the client's own id; None: it gave none, or switched tracking off."""

    key: Hashable
    payload: bytes
    is_tracked: bool


class IteratorClient:
    """A user's client. It knows an unresolved message by the client's own id, and by the number that the source gave it.

    `confirm` is called with each id that is owed until a call returns.

    Raises:
        UsageError: an argument is not what it must be.
    """

    def __init__(
        self,
        source: str,
        items: Iterable[Item] | Callable[[], Iterable[Item]],
        confirm: Callable[[Sequence[Hashable]], object] | None,
        abort: Callable[[Sequence[Hashable]], object] | None,
    ) -> None:
        where = f"source {source}"
        if callable(items):
            refuse_unfit_call(
                source, f"{where}: items", items, (), "write one without parameters, which makes an iterable"
            )
        elif isinstance(items, (str, bytes)) or not isinstance(items, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{where}: items is {shown(items)}; it must be an iterable of payloads, or a function that makes one"
            )
        for argument, function in (("confirm", confirm), ("abort", abort)):
            if function is not None:
                require_function(where, argument, function, f"{argument}(ids)")
                refuse_unfit_call(source, f"{where}: {argument}", function, ("ids",), "write one of a list of ids")
        self._source = source
        self._factory: Callable[[], Iterable[Item]] | None = items if callable(items) else None
        self._items: Iterator[Item] | None = None if callable(items) else iter(items)
        self._on_confirm = confirm
        self._on_abort = abort
        self._keys: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._owed: list[Hashable] = []
        self._broken: str | None = None

    @property
    def hears_confirms(self) -> bool:
        """Whether it has a `confirm`."""
        return self._on_confirm is not None

    # ---- what it gives

    def receive(self) -> ReceivedMessage | None:
        """The next message; None where nothing has arrived, or the iterator is at its end.

        Raises:
            StoreUnavailable: the iterator raised, and the next call asks its function for a new one.
            FatalError: the iterator raised, and there is no function that makes a new one.
            UsageError: it gave an item of another form.
        """
        with kept_from_forks():
            item = self._next_item()
        return None if item is None else self._checked(item)

    def _next_item(self) -> Item:
        if self._broken is not None:
            raise FatalError(self._broken, source=self._source)
        try:
            if self._items is None:
                if self._factory is None:
                    return None
                self._items = self._new(self._factory)
            return next(self._items)
        except StopIteration:
            self._items, self._factory = None, None
            return None
        except Exception as error:  # whatever the user's client raises, as the cause
            text = f"source {self._source}: its iterator raised {type(error).__name__}: {storable_text(error)}"
            # A generator that raised is at its end: asked again, it would seem to have no more messages.
            self._items = None
            if self._factory is not None:
                raise StoreUnavailable(f"{text}; a new one is made", source=self._source) from error
            self._broken = f"{text}; give the source a function that makes an iterator, and a new one is made instead"
            raise FatalError(self._broken, source=self._source) from error

    @staticmethod
    def _new(factory: Callable[[], Iterable[Item]]) -> Iterator[Item]:
        try:
            return iter(factory())
        except StopIteration as error:  # of a next() that found nothing: no iterator is at its end
            raise RuntimeError("the function that makes it raised StopIteration") from error

    def _checked(self, item: object) -> ReceivedMessage:
        key: object = None
        payload, is_pair = item, isinstance(item, tuple)
        if is_pair:
            parts = cast("tuple[object, ...]", item)
            if len(parts) != 2:
                raise UsageError(
                    f"source {self._source}: its iterator gave a tuple of {len(parts)}; (id, payload) is wanted"
                )
            key, payload = parts
        if isinstance(payload, str):
            payload = payload.encode()
        if not isinstance(payload, bytes):
            raise UsageError(
                f"source {self._source}: its iterator gave a payload of type {type(payload).__name__}; bytes or str is "
                "wanted"
            )
        if not isinstance(key, Hashable):
            raise UsageError(
                f"source {self._source}: its iterator gave an id of type {type(key).__name__}; ids must be hashable"
            )
        return ReceivedMessage(key, payload, not is_pair or key is not None)

    # ---- what it is told

    def keep(self, number: int, key: Hashable) -> None:
        """Know an unresolved message by this number and by the client's id, if it has one."""
        if key is not None:
            self._keys[number], self._numbers[key] = key, number

    def has(self, key: Hashable) -> bool:
        """Whether the message with this id is unresolved."""
        return key is not None and key in self._numbers

    def owe(self, number: int) -> None:
        """The message with this number is resolved: the client is owed its confirmation."""
        if number in self._keys:
            key = self._keys.pop(number)
            del self._numbers[key]
            self._owed.append(key)

    def pay(self) -> None:
        """Confirm what is owed; where the client raises, it is still owed.

        Raises:
            StoreUnavailable: the client's `confirm` raised.
        """
        if self._owed and self._on_confirm is not None:
            try:
                self._on_confirm(tuple(self._owed))
            except Exception as error:  # whatever the user's client raises, as the cause
                raise StoreUnavailable(
                    f"source {self._source}: confirm={getattr(self._on_confirm, '__name__', 'callback')} raised "
                    f"{type(error).__name__}: {storable_text(error)}; {len(self._owed)} messages are owed a confirmation",
                    source=self._source,
                ) from error
        self._owed.clear()

    def give_back(self) -> None:
        """Call the client's `abort` with the ids of everything that is unresolved."""
        if self._on_abort is not None and self._keys:
            self._on_abort(list(self._keys.values()))
        self._keys.clear()
        self._numbers.clear()


@dataclass(frozen=True, slots=True)
class UntrackedSliceReader:
    """A part of a slice in which some messages are not tracked: those have no token."""

    inner: SliceReader
    untracked: frozenset[int]

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages, by ascending id."""
        untracked = np.fromiter(self.untracked, np.int64)
        for batch in self.inner.read(seed, excluded, batch_rows):
            mask = np.isin(batch.column("id").to_numpy(), untracked)
            token = pa.array(batch.column("token").to_numpy(), mask=mask)
            yield pa.RecordBatch.from_arrays(
                [batch.column(0), batch.column(1), token, batch.column(3)], schema=READER_SCHEMA
            )


class IteratorSource(InMemory):
    """The items of an iterator as pending messages, which are held in this process's memory.

    Items are payloads (bytes or text), or pairs of the client's own id and the payload. An id of None switches tracking
    off for that message: it is handed out once, confirmed at once, and never replayed. The item None says that nothing
    has arrived for now; an iterator that blocks instead delays retries that are due. The iterator is advanced by the
    driver, never in an executor, and only as far as the next slice needs.

    `confirm` is called with the ids of messages that are applied (or that an operator dropped), so that the client can
    acknowledge them; `abort` with those that are unresolved when the source is closed, so that it can give them back.
    Both may be called again with the same ids after they raised. A failed message waits in memory for its retry. A dead
    letter stays in memory, unconfirmed, until an operator decides. An id that comes again while it is unresolved is
    ignored.

    Guarantee:
        While the process lives, all that a pending source promises. `confirm` is called only for messages that were
        applied, dropped by an operator, or untracked.

    Not guaranteed:
        Nothing pending survives the end of the process. After a crash it depends on the client: with one that delivers
        again what was not confirmed it is at-least-once; with any other, messages in flight are lost. A message that was
        applied and not yet confirmed when the process ended comes again, so exactly-once is refused. There is only one
        subscription.

    Threads: any number may use one object, one call at a time, but only one topology: another is refused. Forks: one
    that uses its parent's object is refused.
    """

    KIND: ClassVar[str] = "iterator"

    def __init__(
        self,
        name: str,
        items: Iterable[Item] | Callable[[], Iterable[Item]],
        *,
        schema: str = "line string",
        unit: Unit | None = None,
        confirm: Callable[[Sequence[Hashable]], object] | None = None,
        abort: Callable[[Sequence[Hashable]], object] | None = None,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        """`items` is an iterable, or a function that makes one: called at first use, and again after one that raised.

        `PendingArguments` has the arguments of every pending source.
        """
        self._client = IteratorClient(name, items, confirm, abort)
        clock = clock or SystemClock()
        super().__init__(name, schema=schema, unit=unit, clock=clock, **pending)
        # The ledger knows messages by their numbers: they begin above those of every earlier process.
        self._first = self._stop = int(clock.now().timestamp() * 1_000_000)
        self._payloads: dict[int, bytes] = {}
        self._resolved_payloads: dict[int, bytes] = {}
        """Kept until the next `open`: at-most-once confirms a slice before it is read."""
        self._untracked: set[int] = set()

    @property
    def kind(self) -> SourceKind:
        """Non-transactional: pending messages are lost with the process."""
        return SourceKind.NON_TRANSACTIONAL

    def serves(self, guarantee: Guarantee) -> str | None:
        """At-most-once always; at-least-once with `confirm`; exactly-once never."""
        if guarantee is Guarantee.EXACTLY_ONCE:
            return (
                "it holds what is pending in this process's memory: what was applied and not yet confirmed when the "
                "process ended is delivered again by the client, and would be applied twice; run at-least-once, or put "
                "the messages into a PostgresQueue first"
            )
        if guarantee is Guarantee.AT_LEAST_ONCE and not self._client.hears_confirms:
            return (
                "it has no confirm=..., so nobody would deliver again what was in flight when the process ended; pass "
                "the client's own acknowledgement as confirm=, or run at-most-once"
            )
        return None

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """None: what an iterator has given is taken."""
        return SourcePreview(why=f"{self.where}: an iterator gives each item once, so reading it would take them")

    def for_run(self, database: Database) -> Self:
        """The object itself: an iterator gives each message once, so it serves one topology."""
        return self

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on, the only one."""
        if self._subscription not in (None, subscription):
            raise UsageError(
                f"source {self.name} has the subscription {self._subscription!r} already: an iterator gives each message "
                f"once, so {subscription!r} needs a source of its own"
            )
        super().subscribe(subscription, epoch)

    # ---- messages: a slice is a range of numbers; `untracked` names those without a token, `without` those not in it

    def first(self, cursor: Any) -> int:
        """The number of the first message."""
        return self._first

    def stop(self, cursor: Any) -> int:
        """The number behind the last message that was taken from the iterator; how many will follow is not known."""
        return self._stop

    def sizes(self, first: int, stop: int, limit: Limit, cursor: Any) -> Sequence[int]:
        """The lengths of payloads."""
        return [len(self._payloads[number]) for number in range(first, stop)]

    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """Messages from the iterator."""
        first = next_of(position)
        self._pull(limit, first)
        if first >= self._stop:
            return None
        end, size = self.cut(first, self._stop, limit, cursor)
        untracked = [number for number in range(first, end) if number in self._untracked]
        at: At = {"range": [first, end], **({"untracked": list(untracked)} if untracked else {})}
        piece = Piece(at, end - first - len(untracked), size, self.expected(at, seed, frozenset(), cursor), None)
        return NextMessages(piece, {**position, "next": end})

    def head(self, at: At, limit: Limit, seed: int, cursor: Any) -> Piece:
        """The lowest numbers of a returned slice, without untracked messages, which were confirmed when opened."""
        _, stop = range_of(at)
        gone = _named(at, "untracked") | _named(at, "without")
        self._resolved(gone)
        ids = _tracked(at)
        total = np.cumsum([len(self._payloads[number]) for number in ids[: max(1, limit.messages)]])
        kept = max(1, int(np.searchsorted(total, limit.bytes, side="right"))) if ids else 0
        end = ids[kept] if kept < len(ids) else stop
        first = _part(range_of(at)[0], end, gone)
        rest = _part(end, stop, gone) if kept < len(ids) else None
        return Piece(first, kept, int(total[kept - 1]) if ids else 0, expectation_of(ids[:kept], seed), rest)

    def places(self, at: At, ids: Sequence[int], cursor: Any) -> Sequence[int]:
        """The ordinals among the tracked messages."""
        wanted = set(ids)
        return [place for place, id_ in enumerate(_tracked(at)) if id_ in wanted]

    def expected(self, at: At, seed: int, excluded: frozenset[int], cursor: Any) -> Expectation:
        """All messages are counted; the XOR is of the tracked ones' tokens."""
        tracked = expectation_of([id_ for id_ in _tracked(at) if id_ not in excluded], seed)
        return Expectation(tracked.messages + len(_named(at, "untracked") - excluded), tracked.xor)

    def parts(self, at: At, parallelism: int) -> tuple[SliceReader, ...]:
        """Contiguous parts of about equal length; untracked messages have no token."""
        without, untracked = _named(at, "without"), _named(at, "untracked")
        ids = [id_ for id_ in range(*range_of(at)) if id_ not in without]
        parts = [self._reader(ids[low:high]) for low, high in pairwise(even_bounds(0, len(ids), parallelism))]
        return tuple(UntrackedSliceReader(part, untracked) for part in parts) if untracked else tuple(parts)

    def reader(self, first: int, stop: int) -> SliceReader:
        """A range in which every message is tracked."""
        return self._reader(range(first, stop))

    def _reader(self, ids: Sequence[int]) -> SliceReader:
        with self._memory.guard:
            return MemorySliceReader(tuple(ids), tuple(map(self._payload, ids)))

    def range_payloads(self, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """The payloads of those that are not resolved."""
        return {id_: self._payloads[id_] for id_ in ids if id_ in self._payloads}

    def _payload(self, number: int) -> bytes:
        payload = self._payloads.get(number)
        return self._resolved_payloads[number] if payload is None else payload

    # ---- the iterator

    def _pull(self, limit: Limit, opened: int) -> None:
        """Advance the iterator until a slice can be filled, or nothing more has arrived."""
        size = sum(len(self._payloads[number]) for number in range(opened, self._stop))
        while self._stop - opened < max(1, limit.messages) and size < limit.bytes:
            received = self._client.receive()
            if received is None:
                return
            if self._client.has(received.key):
                continue  # delivered again while it is unresolved here
            number = self._stop
            self._payloads[number], self._stop = received.payload, number + 1
            size += len(received.payload)
            if received.is_tracked:
                self._client.keep(number, received.key)
            else:
                self._untracked.add(number)

    # ---- leases

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then what the iterator gives.

        Raises:
            StoreUnavailable: the iterator raised, and the next call asks its function for a new one.
            FatalError: the iterator raised, and there is no function that makes a new one.
        """
        self._client.pay()
        with self._memory.guard:
            self._resolved_payloads.clear()
            slice_ = super().open(lease, limit, seed, tx)
            while slice_ is not None and not slice_.expected.messages:  # a returned slice without tracked messages
                super().confirm(lease, (), tx)
                slice_ = super().open(lease, limit, seed, tx)
            return slice_

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Confirm all of the lease's messages but those named, also to the client; untracked messages cannot fail.

        Raises:
            StoreUnavailable: the client's `confirm` raised; the next call of the source calls it again with the same ids.
        """
        named = [failure for failure in failed if failure.id not in self._untracked]
        with self.rows(tx) as rows:
            row = rows.take(lease, delete=False)
            held: Iterable[int] = ()
            if row is not None:
                held = [retry.id for retry in rows.retries(row.id)] if row.at is None else range(*range_of(row.at))
            resolution = super().confirm(lease, named, tx)
        self._resolved(set(held).difference(failure.id for failure in named))
        self._client.pay()
        return resolution

    @property
    def unresolved_messages(self) -> int:
        """The number of messages that are held in memory."""
        return len(self._payloads)

    def drop(self, ids: Sequence[str], *, by: str, why: str) -> tuple[str, ...]:
        """Give these dead letters up for good, and confirm them to the client."""
        done = super().drop(ids, by=by, why=why)
        self._resolved(map(int, done))
        self._client.pay()
        return done

    def maintain(self) -> None:
        """Call the client's `confirm` for messages whose confirmation it is owed."""
        self._client.pay()
        super().maintain()

    def close(self) -> None:
        """Call the client's `abort` with the ids of everything that is unresolved."""
        self._client.pay()
        self._client.give_back()

    def _resolved(self, numbers: Iterable[int]) -> None:
        """Drop messages from memory, and owe the client their confirmation."""
        for number in numbers:
            self._untracked.discard(number)
            self._client.owe(number)
            payload = self._payloads.pop(number, None)
            if payload is not None:
                self._resolved_payloads[number] = payload


def _named(at: At, what: str) -> frozenset[int]:
    ids = at.get(what)
    return frozenset(id_ for id_ in ids if isinstance(id_, int)) if isinstance(ids, list) else frozenset()


def _tracked(at: At) -> list[int]:
    """The tracked messages of a slice, ascending."""
    ids = range(*range_of(at))
    other = _named(at, "untracked") | _named(at, "without")
    return [id_ for id_ in ids if id_ not in other] if other else list(ids)


def _part(first: int, stop: int, gone: frozenset[int]) -> At:
    without = sorted(id_ for id_ in gone if first <= id_ < stop)
    return {"range": [first, stop], **({"without": list(without)} if without else {})}
