"""Shares: 64-bit values whose XOR tells whether every tuple made of a message was acked.

A message starts with its token. A tuple with share ``s`` that is split into ``n`` deliveries hands each child a
random-looking share, and the children's shares XOR to ``s``. A tuple that ends is acked with its share. So the acked
shares of a message XOR to its token when its whole tree was acked, and otherwise only by an accident of 2^-64.

A share depends on nothing but its parent's share and the child's ordinal, since Spark may run a task twice and expects the
same rows. An XOR does not see a row that comes three times, nor rows that swap their shares: rows are counted, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from stormproof.core.base.arrays import Rows, Words

GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MASK: Final = (1 << 64) - 1


def mix64(x: Words) -> Words:
    """The splitmix64 finaliser: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix64_in_place(x: Words) -> None:
    """`mix64` without a new array for each step: most of this file's time is spent here."""
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted


def as_words(numbers: npt.NDArray[np.int64]) -> Words:
    """The same bits as unsigned words."""
    return np.ascontiguousarray(numbers).view(np.uint64)


def as_signed(words: Words) -> npt.NDArray[np.int64]:
    """The same bits as signed numbers, the form that Arrow columns and databases hold."""
    return np.ascontiguousarray(words).view(np.int64)


def signed(word: int) -> int:
    """One word's bits as a signed number."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def unsigned(number: int) -> int:
    """One signed number's bits as a word."""
    return number & _MASK


def tokens(ids: npt.NDArray[np.int64], seed: int) -> Words:
    """The tokens of messages with these ids in an attempt with this seed."""
    return mix64(np.uint64(unsigned(seed)) ^ mix64(as_words(ids)))


def xor_reduce(words: Words) -> int:
    """The XOR of all words, as a signed number; 0 for none."""
    return signed(int(np.bitwise_xor.reduce(words))) if len(words) else 0


def xor_signed(numbers: Iterable[int]) -> int:
    """The XOR of signed numbers, signed."""
    total = 0
    for number in numbers:
        total ^= unsigned(number)
    return signed(total)


def split_runs(shares: Words, counts: Rows) -> Words:
    """The shares of children, in order of parent and ordinal. `counts[i]` is the number of children of the tuple in row i.

    Child j of n has mix64(s + GAMMA * j) ^ mix64(s + GAMMA * (j + 1)), where s is its parent's share. The first child has s
    in place of the first term, and the last one 0 in place of the second.

    Guarantee:
        The shares of all children of a parent XOR to the parent's share; one child alone carries it unchanged.
        A parent without children has none here: its caller acks its share.
    """
    total = int(counts.sum())
    if total == 0:
        return np.empty(0, np.uint64)
    ends = np.cumsum(counts)
    starts = ends - counts
    has_children = np.flatnonzero(counts)
    first, last = starts[has_children], ends[has_children] - 1
    if len(first) == total:  # one child each, which carries its parent's share
        return shares[has_children]
    # share + GAMMA * ordinal, where ordinal = place - start; the start is subtracted once a parent, not once a child.
    boundary = np.repeat(shares - GAMMA * starts.astype(np.uint64), counts)
    boundary += GAMMA * np.arange(total, dtype=np.uint64)
    _mix64_in_place(boundary)
    upper = np.empty_like(boundary)
    upper[:-1] = boundary[1:]
    upper[last] = 0
    boundary[first] = shares[has_children]
    upper ^= boundary
    return upper


def split_one(share: int, n: int) -> Words:
    """The shares of `n` children of one tuple, whose share is given as a signed number."""
    return split_runs(np.array([unsigned(share)], np.uint64), np.array([n], np.int64))
