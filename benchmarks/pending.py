"""P8: what a pending message takes in the acker with a million pending, and how many notices it takes a second."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import numpy as np

from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.workbench import Workbench
from stormproof.core.tracking.acker import Acker
from stormproof.core.tracking.share import as_signed, as_words, mix64, tokens

PENDING: Final = 1_000_000
SMALL_CALLS: Final = 4_000
LARGE_CALLS: Final = 10_000
"""Notices a call: the size of a record batch."""
COMING_AND_GOING: Final = 160_000
"""So many messages begin and as many are completed in a run, with a million pending all the while."""

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


class Chunk:
    """The `number`-th `size` messages, of two tuples each: as arrays, and as the lists that a loop takes."""

    def __init__(self, number: int, size: int, *, rising: bool) -> None:
        rows = np.arange(number * size, (number + 1) * size)
        # mix64 is a bijection: random-looking ids, none of them twice.
        self.ids = rows if rising else as_signed(mix64(as_words(rows)))
        self.token = tokens(rows, 8)
        self.first = tokens(rows, 9)
        self.second = self.token ^ self.first

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        return self.ids.tolist(), self.token.tolist(), self.first.tolist(), self.second.tolist()


def _filled(size: int, *, rising: bool) -> Acker:
    acker = Acker()
    for number in range(PENDING // size):
        chunk = Chunk(number, size, rising=rising)
        acker.init(chunk.ids, chunk.token)
    return acker


def _filled_dict(size: int, *, rising: bool) -> DictAcker:
    acker = DictAcker()
    for number in range(PENDING // size):
        ids, token, _, _ = Chunk(number, size, rising=rising).lists()
        acker.init(ids, token)
    return acker


def _require(found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} messages are {what} instead of {wanted}")


def our_bytes() -> float:
    """The most that is allocated with a million pending while messages come and go, a call's own work among it."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        acker = _filled(SMALL_CALLS, rising=False)
        tracemalloc.reset_peak()
        full = PENDING // SMALL_CALLS
        for number in range(COMING_AND_GOING // SMALL_CALLS):
            new, old = (Chunk(place, SMALL_CALLS, rising=False) for place in (full + number, number))
            acker.init(new.ids, new.token)
            acker.ack(old.ids, old.first)
            acker.ack(old.ids, old.second)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    _require(acker.pending, PENDING, "pending")
    return (peak - before) / PENDING


def dict_bytes() -> float:
    """What a million entries take, with nothing coming or going."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        acker = _filled_dict(SMALL_CALLS, rising=False)
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
    """Notices/s with a million pending: an init and two acks a message, each in a call of its own."""
    size, full, rounds = LARGE_CALLS, PENDING // LARGE_CALLS, COMING_AND_GOING // LARGE_CALLS
    ours, theirs = _filled(size, rising=rising), _filled_dict(size, rising=rising)
    begun_ours, begun_theirs = itertools.count(full, rounds), itertools.count(full, rounds)

    def chunks(first: int) -> tuple[list[Chunk], list[Chunk]]:
        begins = [Chunk(number, size, rising=rising) for number in range(first, first + rounds)]
        return begins, [Chunk(number, size, rising=rising) for number in range(first - full, first - full + rounds)]

    def run_ours() -> float:
        done, pairs = 0, list(zip(*chunks(next(begun_ours)), strict=True))
        started_s = time.perf_counter()
        for new, old in pairs:
            ours.init(new.ids, new.token)
            ours.ack(old.ids, old.first)
            done += len(ours.ack(old.ids, old.second).completed)
        elapsed_s = time.perf_counter() - started_s
        _require(done, COMING_AND_GOING, "complete")
        return 3 * done / elapsed_s

    def run_theirs() -> float:
        begins, ends = chunks(next(begun_theirs))
        done, pairs = 0, [(new.lists(), old.lists()) for new, old in zip(begins, ends, strict=True)]
        started_s = time.perf_counter()
        for (new_ids, token, _, _), (ids, _, first, second) in pairs:
            theirs.init(new_ids, token)
            theirs.ack(ids, first)
            done += len(theirs.ack(ids, second))
        elapsed_s = time.perf_counter() - started_s
        _require(done, COMING_AND_GOING, "complete")
        return 3 * done / elapsed_s

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
    del bench
    yield bytes_case("P8", "a dict of objects", dict_bytes)
    yield bytes_case("P8-storm", "Storm 2 (quoted)", STORM_BYTES)
    yield notices_case("P8-notices", Goal(own=2_000_000), rising=False)
    yield notices_case("P8-notices-rising", Goal(own=2_000_000), rising=True)
