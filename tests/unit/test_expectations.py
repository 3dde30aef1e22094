"""What a read of a slice must find: number and XOR of its messages' tokens, made in blocks."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from stormproof.core.contract.source import Expectation
from stormproof.core.pending.rows import BLOCK, expectation_of, expectation_of_range
from stormproof.core.tracking.share import tokens, xor_reduce

LARGE = 5_000_000


@pytest.mark.parametrize("messages", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_blocks_make_no_difference(messages: int, seed: int) -> None:
    rng = random.Random(seed)
    first, token_seed = rng.randrange(2**60), rng.randrange(-(2**63), 2**63)
    ids = np.arange(first, first + messages, dtype=np.int64)
    whole = Expectation(messages, xor_reduce(tokens(ids, token_seed)))
    assert expectation_of(ids, token_seed) == whole
    assert expectation_of_range(first, first + messages, token_seed) == whole


def test_messages_that_are_left_out_do_not_count(seed: int) -> None:
    rng = random.Random(seed)
    first, stop = 100, 100 + 2 * BLOCK
    excluded = frozenset(rng.sample(range(0, stop + 100), 500))
    kept = [number for number in range(first, stop) if number not in excluded]
    assert expectation_of_range(first, stop, seed, excluded) == expectation_of(kept, seed)
    assert expectation_of_range(first, stop, seed) != expectation_of(kept, seed)


def test_memory_does_not_grow_with_the_range() -> None:
    tracemalloc.start()
    try:
        assert expectation_of_range(0, LARGE, 1).messages == LARGE
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE  # bytes: less than one a message
