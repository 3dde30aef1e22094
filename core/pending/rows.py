"""The rows of one subscription: what a store of pending messages must be able to write and find; and a slice's position."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.dead_letter import DeadLetter, Disposal, LetterHead
from stormproof.core.contract.source import Expectation, Lease, Limit, Slice, SliceReader
from stormproof.core.postgres.database import Database
from stormproof.core.tracking.share import tokens, xor_reduce

At: TypeAlias = dict[str, Json]
"""A connector's own description of a place or of a set of messages, as a JSON object; nobody else reads it."""


class Subscriber(NamedTuple):
    """One subscription of one source. `kind` is the connector's, so two kinds of sources may have one name."""

    kind: str
    source: str
    subscription: str


@dataclass(frozen=True, slots=True)
class SliceRow:
    """Messages that were opened and are not resolved: leased (`owner`), or returned and to be opened again.

    `at` says which, in the connector's words; None: retries, which point at the row themselves. `opened` counts how
    often the slice was opened, `deaths` how many drivers ended while they held it open. `path` is its place among the
    slices that are opened again, as text: a part of a slice comes where the slice came. Slices of one name in `mates` were
    in one batch, and are opened whole, in one batch.
    """

    id: int
    at: At | None
    messages: int
    bytes: int
    owner: str | None = None
    epoch: int = 0
    opened: int = 0
    deaths: int = 0
    path: str = ""
    mates: str = ""

    @property
    def place(self) -> str:
        """What slices that are opened again are ordered by, before their ids."""
        return self.path or f"{self.id:020}"

    def path_of(self, part: int) -> str:
        """The place of this slice's n-th part: behind the parts before it, and before whatever came behind the slice."""
        return f"{self.place}.{part:06}"

    @property
    def is_retry(self) -> bool:
        """Whether its messages failed before."""
        return self.at is None


class Retry(NamedTuple):
    """A message that failed before: its number, what the source shows before that, the size of its payload, and the name
    that it shares with those which come again with it.
    """

    id: int
    origin: int
    bytes: int
    mates: str = ""


@dataclass(frozen=True, slots=True)
class WaitingRetry:
    """A message that failed and waits, or is in a slice that `owner` has leased. `not_before` is None where not known."""

    id: int
    origin: int
    times_failed: int
    not_before: datetime | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A message to be written down as failed.

    `payload` is None where the message is a retry already, whose row has it. `delay_s` is how long it waits; None: it
    failed too often and becomes a dead letter. `counted` is off for one that is merely returned. The store adds its own
    time to `entry`, the history's. `mates`, if not empty, is a name that `mates_messages` messages share, of several sources
    even: they come again in one batch.
    """

    id: int
    origin: int
    payload: bytes | None
    reason: str
    error: str
    entry: dict[str, Json]
    counted: bool
    delay_s: float | None
    mates: str = ""
    mates_messages: int = 1


@dataclass(frozen=True, slots=True)
class LeaseFate:
    """Why a lease's slice is not there: the newest epoch of subscription or owner, and whether the lease ran out."""

    newest_epoch: int
    lapsed: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Messages of a subscription, but for those that were never opened. A lease that ran out counts as returned."""

    returned: int
    returned_retries: int
    pending: int
    waiting: int
    dead: int
    next_retry_in_s: float | None


class PendingRows(Protocol):
    """The rows of one subscription, inside one transaction.

    Every call acts at once and is seen by the next. `cursor` is a psycopg cursor in the transaction, for a connector that
    lives in the same database; None in memory. Times are the store's own.
    """

    @property
    def cursor(self) -> Any:
        """The transaction's cursor; None in memory."""
        ...

    def subscribe(self, epoch: int, start: Callable[[], At]) -> None:
        """Make the subscription where it is missing, at `start()`."""
        ...

    def lock(self) -> tuple[int, At] | None:
        """Lock the subscription, in a statement of its own; gives its newest epoch and its position. None: none is there.

        A statement that waits for a lock continues with a snapshot from before the wait: so this one comes first.
        """
        ...

    def position(self) -> At | None:
        """The position, without a lock."""
        ...

    def raise_epoch(self, epoch: int) -> None:
        """Raise the newest epoch to this one, unless it is higher."""
        ...

    def move(self, position: At) -> None:
        """Move the subscription to `position` without a slice, for what a connector has to remember; it is locked."""
        ...

    def advance(self, row: SliceRow, lease: Lease, position: At) -> SliceRow:
        """Insert a slice that is open under the lease for the first time, and move the subscription to `position`.

        Raises:
            UsageError: the owner holds a slice already.
        """
        ...

    def free(self, mates: Collection[str] | None = None) -> SliceRow | None:
        """The first slice, by its path, that was returned or whose lease ran out, locked; of the latter `owner` is set.

        With `mates`, only slices of one of these names; and those whose lease has not run out, too, unless they are pinned:
        that of a mate, in another source, has. The empty name stands for slices that share none.
        """
        ...

    def due(self, messages: int, mates: Collection[str] | None = None) -> Sequence[Retry]:
        """At most `messages` waiting retries whose time has come, the longest due ones; ascending by number.

        Those of one name in `mates` come all, due or not, where one of them is due and all of them, of every source, are
        within `messages`; or where they alone are more than that. With `mates`, all retries of these names, due or not;
        the empty name stands for due ones that share none.
        """
        ...

    def retries(self, slice_id: int) -> Sequence[Retry]:
        """The retries of a slice, ascending by number."""
        ...

    def insert(self, row: SliceRow, retries: Sequence[int] = ()) -> SliceRow:
        """Insert a returned slice; these retries are its messages from now on."""
        ...

    def shrink(self, row: SliceRow) -> None:
        """The slice with this id is returned, and has `at`, `messages`, `bytes`, `deaths`, `path` from now on."""
        ...

    def open(self, row: SliceRow, lease: Lease) -> SliceRow:
        """Open a free slice under the lease, with `deaths` as in `row`; of an owner whose lease ran out a lapse is kept.

        Raises:
            UsageError: the owner holds a slice already.
        """
        ...

    def take(self, lease: Lease, *, delete: bool) -> SliceRow | None:
        """The slice of a lease, locked or deleted; None where this owner has none in this epoch."""
        ...

    def touch(self, lease: Lease, *, pin: bool) -> bool:
        """Open to pinned, or (not `pin`) move the expiry of an open one; False where the lease lapsed or is not there."""
        ...

    def give_back(self, lease: Lease) -> bool:
        """Return a lease's messages; False where it is not there."""
        ...

    def fate(self, lease: Lease) -> LeaseFate:
        """What became of a lease."""
        ...

    def recover(self, epoch: int) -> tuple[str, ...]:
        """Every lease belongs to `epoch` from now on; gives the leases' owners.

        An open lease of an older epoch counts a death of its slice, once for each opening.
        """
        ...

    def failures(self, slice_id: int, ids: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        """How often each of these retries of a slice failed and was opened before, locked; without those that are not of the
        slice.
        """
        ...

    def fail(self, row: SliceRow, failed: Sequence[Failed]) -> None:
        """Make retries or dead letters of messages of a taken slice; openings and failures are added to the earlier ones."""
        ...

    def finish(self, row: SliceRow) -> None:
        """Remove the retries that still belong to a taken slice: they are confirmed."""
        ...

    def unresolved(self) -> Sequence[SliceRow]:
        """Every slice."""
        ...

    def counts(self) -> Counts:
        """How many messages are in which state."""
        ...

    def waiting(self) -> Sequence[WaitingRetry]:
        """Every retry, ascending by number."""
        ...

    def retries_by_slice(self) -> Mapping[int, int]:
        """How many retries belong to each slice, including retries of slices that do not exist (any more)."""
        ...

    def dead_letters(
        self, shown: Callable[[int, int], str], *, payloads: bool = True, of: tuple[int, int] | None = None
    ) -> tuple[DeadLetter, ...]:
        """Every dead letter, or those of one message, those that were disposed of included, oldest first.

        Without `payloads` only edited ones have theirs; the others' are empty.
        """
        ...

    def each_dead_letter(self, shown: Callable[[int, int], str]) -> Iterator[DeadLetter]:
        """The same, whole, a few at a time; in this transaction only."""
        ...

    def letter_heads(self, shown: Callable[[int, int], str], *, undecided: bool) -> Iterator[LetterHead]:
        """What filters need of each dead letter (or of the undecided ones), oldest first, a few at a time; in this
        transaction only. No payload is read.
        """
        ...

    def altered(self, numbers: Sequence[tuple[int, int]] | None = None) -> Sequence[tuple[int, int]]:
        """The retries and dead letters, or those of these messages as (number, origin), whose payload is not the one that
        was set aside: somebody changed it in the store.
        """
        ...

    def letter_classes(self) -> Mapping[tuple[str, str], int]:
        """How many undecided dead letters there are of each class of error and reason."""
        ...

    def dispose(
        self, numbers: Sequence[tuple[int, int]], disposal: Disposal, *, by: str, why: str, payload: bytes | None = None
    ) -> Sequence[tuple[int, int]]:
        """Record a decision about dead letters, given as (number, origin); gives those that waited for one.

        Those that are not dropped become retries that are due at once, with failures counted from 0, and with `payload`
        (an edit) in place of their own.
        """
        ...

    def open_again(
        self, messages: Sequence[tuple[int, int, bytes]], entry: Mapping[str, Json]
    ) -> Sequence[tuple[int, int]]:
        """Make retries, due at once, of confirmed messages, given as (number, origin, payload); gives those that were made.

        A message that is a retry already stays as it is. The store adds its own time to `entry`, the history's.
        """
        ...

    def undecided(self, number: int, origin: int) -> bytes | None:
        """The payload of a dead letter that waits for a decision, locked; None where there is none."""
        ...

    def wait_at_most(self, seconds: float, entry: Mapping[str, Json] | None = None) -> int:
        """Have no retry wait longer than so many seconds from now; gives how many would have.

        Times are the store's: where its clock has jumped back since, a retry would wait for as long as that. `entry` goes
        into the history of those whose wait is shorter now.
        """
        ...

    def unconfirmed(self, numbers: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], bool]:
        """Those of these messages, by (number, origin), that are retries or undecided dead letters; and whether each has
        failed since it was handed out anew.
        """
        ...

    def forget_lapses(self) -> None:
        """Remove what is known of leases that ran out more than a week ago."""
        ...


class PendingStore(Protocol):
    """Where the rows of subscriptions stand."""

    def rows(self, who: Subscriber, tx: object | None = None) -> AbstractContextManager[PendingRows]:
        """The subscription's rows, in `tx` or in a transaction of its own, which is committed at the end.

        Raises:
            StoreUnavailable: the store cannot be reached; its answer may be lost.
            UsageError: `tx` is no transaction of this kind of store.
        """
        ...

    def readers(
        self,
        who: Subscriber,
        slice_id: int,
        parts: Sequence[Sequence[int]],
        unpack: Callable[[Sequence[bytes]], Any] | None,
    ) -> tuple[SliceReader, ...]:
        """Readers of a slice of retries, one for each part; a part is numbers of messages.

        `unpack` makes Arrow arrays, as the decoder takes them, of the payloads that are stored.
        """
        ...

    def subscriptions(self, kind: str, source: str) -> Sequence[str]:
        """The names of a source's subscriptions."""
        ...

    def for_run(self, database: Database) -> PendingStore:
        """The same for one run: with connections of its own, in `database` where none is named."""
        ...

    def is_known(self, database: Database | None) -> bool:
        """Whether there is a store to ask, where a run has this database (None: none yet)."""
        ...

    def bind(self, database: Database) -> None:
        """Use this database, where none is named."""
        ...

    def joins(self, tx: object) -> bool:
        """Whether `tx` is a transaction in this very store."""
        ...

    def close(self) -> None:
        """Let idle connections go; the next use makes others."""
        ...


# ---- a slice's position in the ledger as JSON, what a read of its messages must find, and even cuts of a range


BLOCK: Final = 8_192
"""Tokens that are made at once. They stay in a core's cache, and the driver's memory does not grow with a batch."""


def expectation_of(ids: Sequence[int] | Rows, seed: int, excluded: Collection[int] = ()) -> Expectation:
    """Number and XOR of the tokens of these messages, without those that are left out."""
    numbers, xor = np.asarray(ids, np.int64), 0
    if excluded:
        numbers = numbers[~np.isin(numbers, np.fromiter(excluded, np.int64))]
    for begin in range(0, len(numbers), BLOCK):
        xor ^= xor_reduce(tokens(numbers[begin : begin + BLOCK], seed))
    return Expectation(len(numbers), xor)


def expectation_of_range(first: int, stop: int, seed: int, excluded: Collection[int] = ()) -> Expectation:
    """The same of the numbers from `first` up to `stop`, without those that are left out; in constant memory."""
    left_out = expectation_of([number for number in excluded if first <= number < stop], seed)
    xor = left_out.xor
    for begin in range(first, stop, BLOCK):
        xor ^= xor_reduce(tokens(np.arange(begin, min(begin + BLOCK, stop), dtype=np.int64), seed))
    return Expectation(stop - first - left_out.messages, xor)


def fitting(sizes: Sequence[int] | Rows, limit: Limit) -> tuple[int, int]:
    """How many of these messages the limit admits, one at least, and their bytes."""
    total = np.cumsum(sizes[: max(1, limit.messages)])
    kept = max(1, int(np.searchsorted(total, limit.bytes, side="right")))
    return kept, int(total[kept - 1])


def even_bounds(first: int, stop: int, parts: int) -> list[int]:
    """Where a range is cut into this many parts of about equal length, with both ends."""
    return [first + (stop - first) * part // parts for part in range(parts + 1)]


def position_of(row: SliceRow, retries: Sequence[Retry] = ()) -> dict[str, Json]:
    """A slice's own description, for the ledger: what the connector says of it, and what the store knows."""
    return {
        **(row.at or {}),
        "retry": row.is_retry,
        "slice": row.id,
        "messages": row.messages,
        "bytes": row.bytes,
        "opened": row.opened,
        "deaths": row.deaths,
        "replayed": [[retry.id, retry.origin] for retry in retries],
    }


_OURS: Final = frozenset(position_of(SliceRow(0, None, 0, 0)))


def slice_of(row: SliceRow, expected: Expectation, retries: Sequence[Retry] = ()) -> Slice:
    """What a topology gets to know of an opened slice."""
    return Slice(
        position_of(row, retries),
        expected,
        row.bytes,
        retry=row.is_retry,
        deaths=row.deaths,
        replayed=tuple((retry.id, retry.origin) for retry in retries),
        mates=frozenset({row.mates, *(retry.mates for retry in retries)} - {""})
        if row.opened > 1 or row.is_retry
        else frozenset(),
    )


def at_of(position: Mapping[str, Json]) -> At | None:
    """What the connector said of a slice, from the ledger's description; None: it is of retries."""
    return None if position.get("retry") else {key: value for key, value in position.items() if key not in _OURS}


def row_of(position: dict[str, Json]) -> tuple[SliceRow, list[Retry]]:
    """What `position_of` wrote.

    Raises:
        UsageError: it is no position of such a source.
    """
    match position:
        case {
            "slice": int(id_),
            "bytes": int(size),
            "opened": int(opened),
            "deaths": int(deaths),
            "replayed": list(replayed),
        }:
            messages = position.get("messages")
            retries = [
                Retry(id_, origin, 0)
                for pair in replayed
                if isinstance(pair, list) and len(pair) == 2
                for id_, origin in [(pair[0], pair[1])]
                if isinstance(id_, int) and isinstance(origin, int)
            ]
            count = messages if isinstance(messages, int) else len(retries)
            return SliceRow(id_, at_of(position), count, size, opened=opened, deaths=deaths), retries
        case _:
            raise UsageError(f"not a position of a pending source: {json.dumps(sorted(position))}")
