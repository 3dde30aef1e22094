"""How often an ack val is 0 by accident: 2^-w with ids of w bits, never seen with 64; and memory with a million pending."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from support.tuple_trees import classic_notices, share_notices

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.tracking.acker import Acker
from stormproof.core.tracking.share import tokens

CHILDREN = 3
MESSAGES = 2**18
ROUNDS = 43
WIDTHS = range(4, 21)


def lossy_notices(form: str, trials: int, seed: int) -> tuple[Words, Words]:
    """For each of many messages its token, and the XOR of all acks but one: two levels of tuples, the last leaf lost."""
    messages = np.arange(trials)
    if form == "shares":
        token = tokens(messages, seed)
        leaves, notices = share_notices(token, np.full(trials, CHILDREN))
    else:
        rng = np.random.default_rng(seed)
        token = rng.integers(0, 2**64, trials, np.uint64)
        leaves = rng.integers(0, 2**64, trials * CHILDREN, np.uint64)
        notices = classic_notices(token, leaves, np.repeat(messages, CHILDREN))
    of_message = leaves.reshape(trials, CHILDREN)
    acks = notices ^ np.bitwise_xor.reduce(of_message[:, :-1], axis=1)
    assert np.array_equal(token ^ acks, of_message[:, -1]), "what is measured is not what was meant"
    return token, acks


@pytest.mark.parametrize("form", ["classic", "shares"])
def test_false_completions_are_as_rare_as_the_bits_say(form: str) -> None:
    """An id of w bits is any w bits of a word: each field of w bits is a trial of its own.

    The seeds are fixed: 3 sigma of a binomial would else be left in one of every 370 runs.
    """
    ids = np.arange(MESSAGES)
    accidents: Counter[int] = Counter()
    for seed in range(ROUNDS):
        token, acks = lossy_notices(form, MESSAGES, seed)
        whole = acker_told(ids, acks, token)
        for bits in WIDTHS:
            seen = sum(int(np.sum((whole.ack_vals >> low & mask_of(bits)) == 0)) for low in fields(bits))
            accidents[bits] += seen
            if seed == 0:  # ackers that are told words of so many bits
                narrow = [
                    acker_told(ids, acks >> low & mask_of(bits), token >> low & mask_of(bits)) for low in fields(bits)
                ]
                assert sum(len(ids) - len(acker.incomplete()) for acker in narrow) == seen
    for bits in WIDTHS:
        trials, rate = ROUNDS * MESSAGES * len(fields(bits)), 2.0**-bits
        expected, sigma = trials * rate, math.sqrt(trials * rate * (1 - rate))
        print(f"{form}, {bits} bits: {accidents[bits]} of {trials}, expected {expected:.0f}")
        # So that none at all, half as many and twice as many are told from the right rate.
        assert expected >= 32
        assert abs(accidents[bits] - expected) <= 3 * sigma, f"{bits} bits: {accidents[bits]}"


def acker_told(ids: Rows, *notices: Words) -> Acker:
    acker = Acker(ids)
    for values in notices:
        acker.tell(ids, values)
    return acker


def mask_of(bits: int) -> np.uint64:
    return np.uint64(2**bits - 1)


def fields(bits: int) -> list[np.uint64]:
    """Where each of a word's fields of so many bits begins."""
    return [np.uint64(bits * number) for number in range(64 // bits)]


def test_a_hundred_million_tracked_tuples_show_no_false_completion() -> None:
    """Every message misses one of its eight tuples, first; then that comes, too, and every message is complete."""
    messages, children, rounds = 250_000, 8, 50
    assert messages * children * rounds == 100_000_000
    first = np.arange(messages * children) % children == 0
    counts = np.full(messages, children)
    for number in range(rounds):
        ids = np.arange(number * messages, (number + 1) * messages)
        token = tokens(ids, 20_261_121)
        shares, _ = share_notices(token, counts)
        acker = Acker(ids)
        acker.tell(ids, token)
        acker.tell(np.repeat(ids, children)[~first], shares[~first])
        assert len(acker.incomplete()) == messages
        acker.tell(ids, shares[first])
        assert len(acker.incomplete()) == 0


@pytest.mark.parametrize("order", ["rising", "random"])
def test_a_million_pending_messages_take_20_bytes_each_at_most(order: str) -> None:
    pending, at_once = 1_000_000, 4_096
    ids = np.arange(pending) if order == "rising" else np.random.default_rng(5).permutation(pending)
    token = tokens(ids, 1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        acker = Acker(ids)
        for _ in ("init", "ack"):
            for begin in range(0, pending, at_once):
                part = slice(begin, begin + at_once)
                acker.tell(ids[part], token[part])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(acker.incomplete()) == 0
    taken = (peak - before) / pending
    print(f"{order}: {taken:.2f} bytes a message at the peak, {at_once} notices a call")
    assert taken <= 20
