"""Ranges of a partition's offsets: those without gaps are cut and expected as if each offset were looked at."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from stormproof.core.pending.rows import expectation_of
from stormproof.core.source.kafka.position import OffsetRange, expectation_of_ranges

LARGE = 3_000_000


def range_of(rng: random.Random, place: int, *, gaps: bool, behind: int = 0) -> OffsetRange:
    start, messages = rng.randrange(10**9), rng.randrange(20, 60)
    offsets = np.arange(start, start + messages, dtype=np.int64)
    if gaps:
        offsets = offsets[sorted(rng.sample(range(messages), messages - 5))]
    where = OffsetRange("lines", place, place, start, start + messages + behind, 0, 0)
    return OffsetRange.of(where, offsets, 7 * len(offsets))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("kept", [1, 7, 15])
def test_head_and_rest_have_each_offset_once(gaps: bool, kept: int, seed: int) -> None:
    whole = range_of(random.Random(seed), 1, gaps=gaps, behind=3)
    head, rest = whole.head(kept, 5), whole.rest(kept, 9)
    assert head.offsets.tolist() + rest.offsets.tolist() == whole.offsets.tolist()
    assert (head.stop, head.messages, head.bytes) == (int(whole.offsets[kept - 1]) + 1, kept, 5)
    assert (rest.start, rest.stop, rest.messages, rest.bytes) == (head.stop, whole.stop, whole.messages - kept, 9)
    everything = whole.head(whole.messages, whole.bytes)
    assert (everything.offsets.tolist(), everything.stop) == (whole.offsets.tolist(), int(whole.offsets[-1]) + 1)


def test_the_expectation_is_that_of_each_number(seed: int) -> None:
    rng = random.Random(seed)
    ranges = [range_of(rng, place, gaps=place % 2 == 1) for place in range(4)]
    ids = np.concatenate([one.ids for one in ranges])
    excluded = frozenset(rng.sample(ids.tolist(), 9)) | {5}
    kept = [number for number in ids.tolist() if number not in excluded]
    assert expectation_of_ranges(ranges, seed) == expectation_of(ids, seed)
    assert expectation_of_ranges(ranges, seed, excluded) == expectation_of(kept, seed)
    assert expectation_of_ranges(ranges, seed) != expectation_of(kept, seed)
    assert expectation_of_ranges([], seed).messages == 0


def test_a_range_without_gaps_takes_no_memory_for_its_messages() -> None:
    whole = OffsetRange("lines", 0, 0, 10, 10 + LARGE, LARGE, LARGE)
    tracemalloc.start()
    try:
        rest = whole.rest(LARGE // 2, 1)
        assert expectation_of_ranges([whole.head(LARGE // 2, 1), rest], 1).messages == LARGE
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE  # bytes
