"""P8: the acker with a million pending messages: the bytes that each takes, and notices a second."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import numpy as np

from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench
from stormproof.core.base.arrow import Rows
from stormproof.core.tracking.acker import Acker
from stormproof.core.tracking.share import as_signed, as_words, mix64, tokens

PENDING: Final = 1_000_000
SMALL_CALLS: Final = 4_000
LARGE_CALLS: Final = 10_000
"""Notices a call: the size of a record batch."""

STORM_BYTES: Final = 40.0
"""A leaked entry of Storm 2's acker, as one of its committers measured it."""


class Entry:
    """What a message takes where it is an object."""

    __slots__ = ("failed", "owner", "val")

    def __init__(self) -> None:
        self.val = 0
        self.owner = -1
        self.failed = False


class DictAcker:
    """Storm's acker, line by line, in Python: a map of objects that rotates, one notice after the other."""

    def __init__(self) -> None:
        self.buckets: list[dict[int, Entry]] = [{}, {}, {}]

    def init(self, ids: Sequence[int], values: Sequence[int], owner: int = 0) -> list[int]:
        done: list[int] = []
        for key, value in zip(ids, values, strict=True):
            entry = self._entry(key)
            entry.val ^= value
            entry.owner = owner
            self._decide(key, entry, done)
        return done

    def ack(self, ids: Sequence[int], values: Sequence[int]) -> list[int]:
        done: list[int] = []
        for key, value in zip(ids, values, strict=True):
            entry = self._entry(key)
            entry.val ^= value
            self._decide(key, entry, done)
        return done

    def _entry(self, key: int) -> Entry:
        for bucket in self.buckets:
            found = bucket.get(key)
            if found is not None:
                return found
        made = self.buckets[0][key] = Entry()
        return made

    def _decide(self, key: int, entry: Entry, done: list[int]) -> None:
        if entry.owner >= 0 and (entry.val == 0 or entry.failed):
            for bucket in self.buckets:
                bucket.pop(key, None)
            done.append(key)


def message_ids(first: int, stop: int, *, rising: bool) -> Rows:
    """The ids of some messages; none stands there twice, since mix64 is a bijection."""
    rows = np.arange(first, stop)
    return rows if rising else as_signed(mix64(as_words(rows)))


class Chunk:
    """The `number`-th `size` messages, of two tuples each: as arrays, and as the lists that a loop takes."""

    def __init__(self, number: int, size: int, *, rising: bool) -> None:
        first, stop = number * size, (number + 1) * size
        rows = np.arange(first, stop)
        self.ids = message_ids(first, stop, rising=rising)
        self.token = tokens(rows, 8)
        self.first = tokens(rows, 9)
        self.second = self.token ^ self.first

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        return self.ids.tolist(), self.token.tolist(), self.first.tolist(), self.second.tolist()


def _chunks(size: int, *, rising: bool) -> Iterator[Chunk]:
    return (Chunk(number, size, rising=rising) for number in range(PENDING // size))


def _require(found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} messages are {what} instead of {wanted}")


def our_bytes() -> float:
    """The most that is allocated while a million messages begin and an ack comes for each, a call's own work among it."""
    ids = message_ids(0, PENDING, rising=False)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        acker = Acker(ids)
        for chunk in _chunks(SMALL_CALLS, rising=False):
            acker.tell(chunk.ids, chunk.token)
            acker.tell(chunk.ids, chunk.first)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    _require(len(acker.incomplete()), PENDING, "pending")
    return (peak - before) / PENDING


def dict_bytes() -> float:
    """What a million entries take, with no notice coming."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        acker = DictAcker()
        for chunk in _chunks(SMALL_CALLS, rising=False):
            ids, token, _, _ = chunk.lists()
            acker.init(ids, token)
            del ids, token, chunk
        gc.collect()
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    _require(sum(map(len, acker.buckets)), PENDING, "pending")
    return (now - before) / PENDING


@contextmanager
def bytes_case(key: str, other: str, theirs: Callable[[], float] | float) -> Generator[Case]:
    """Bytes a pending message."""
    yield Case(
        key=key,
        title=f"bytes a pending message, {PENDING:,} pending, {SMALL_CALLS:,} notices a call; {other}",
        unit=Unit.BYTES,
        goal=Goal(own=20),
        ours=our_bytes,
        theirs=theirs,
    )


@contextmanager
def notices_case(key: str, goal: Goal, *, rising: bool) -> Generator[Case]:
    """Notices/s of a batch of a million messages: an init and two acks each, in calls of their own, up to the verdicts."""

    def run_ours() -> float:
        ids, chunks = message_ids(0, PENDING, rising=rising), list(_chunks(LARGE_CALLS, rising=rising))
        started_s = time.perf_counter()
        acker = Acker(ids)
        for chunk in chunks:
            acker.tell(chunk.ids, chunk.token)
        for chunk in chunks:
            acker.tell(chunk.ids, chunk.first)
        for chunk in chunks:
            acker.tell(chunk.ids, chunk.second)
        incomplete = len(acker.incomplete())
        elapsed_s = time.perf_counter() - started_s
        _require(incomplete, 0, "incomplete")
        return 3 * PENDING / elapsed_s

    def run_theirs() -> float:
        acker, done = DictAcker(), 0
        lists = [chunk.lists() for chunk in _chunks(LARGE_CALLS, rising=rising)]
        started_s = time.perf_counter()
        for ids, token, _, _ in lists:
            acker.init(ids, token)
        for ids, _, first, _ in lists:
            acker.ack(ids, first)
        for ids, _, _, second in lists:
            done += len(acker.ack(ids, second))
        elapsed_s = time.perf_counter() - started_s
        _require(done, PENDING, "complete")
        return 3 * PENDING / elapsed_s

    yield Case(
        key=key,
        title=f"notices/s, {PENDING:,} pending, {'rising' if rising else 'random'} ids; Storm's acker as a dict of objects",
        unit=Unit.NOTICES,
        goal=goal,
        ours=run_ours,
        theirs=run_theirs,
    )


def p8(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P8; they need nothing of the workbench."""
    yield bytes_case("P8", "a dict of objects", dict_bytes)
    yield bytes_case("P8-storm", "Storm 2 (quoted)", STORM_BYTES)
    yield notices_case("P8-notices", Goal(own=2_000_000), rising=False)
    yield notices_case("P8-notices-rising", Goal(own=2_000_000), rising=True)
