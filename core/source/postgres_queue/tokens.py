"""Postgres's `hashint8extended` for whole arrays: the tokens of a queue's messages, which its database counts in SQL.

Computed here they need not be sent. Postgres keeps the function as it is, since the rows of hash-partitioned tables are
where it says; all the same a reader compares some values before it relies on this one (`agrees`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stormproof.core.base.arrow import Words
from stormproof.core.tracking.share import as_words

_Halves = npt.NDArray[np.uint32]

_BITS: Final = 0xFFFFFFFF
_START: Final = (0x9E3779B9 + 4 + 3_923_095) & _BITS
_FINAL: Final = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))
"""Jenkins's final rounds on (a, b, c): which word is changed, by which, and how far that one is rotated."""

_TRIED: Final = (0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**31), 10**12 + 7, 2**63 - 1, -(2**63))
_TRIED_SEEDS: Final = (0, 1, -1, 2**62 - 12_345)

AGREES_SQL: Final = (
    "select hashint8extended(i, s) as token"
    f" from unnest(array{[str(seed) for seed in _TRIED_SEEDS]}::bigint[]) with ordinality as s (s, m)"
    f" cross join unnest(array{[str(id_) for id_ in _TRIED]}::bigint[]) with ordinality as i (i, n) order by m, n"
)
"""The database's values for `agrees`."""


def tokens(ids: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """What ``hashint8extended(id, seed)`` gives for each id."""
    words = as_words(ids)
    low, high = words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    a, b, c = _seeded(seed)
    state: list[_Halves] = [
        np.uint32(a) + (low ^ np.where(ids >= 0, high, ~high)),
        np.full(len(ids), b, np.uint32),
        np.full(len(ids), c, np.uint32),
    ]
    for changed, by, bits in _FINAL:
        other = state[by]
        state[changed] = (state[changed] ^ other) - (other << np.uint32(bits) | other >> np.uint32(32 - bits))
    hashed: Words = state[1].astype(np.uint64) << np.uint64(32) | state[2]
    return hashed.view(np.int64)


def _seeded(seed: int) -> tuple[int, int, int]:
    """Jenkins's state (a, b, c) with the seed mixed into it."""
    a = b = c = _START
    if seed:
        a, b = (a + (seed >> 32)) & _BITS, (b + seed) & _BITS
        for bits in (4, 6, 8, 16, 19, 4):
            a = (a - c) & _BITS ^ ((c << bits | c >> (32 - bits)) & _BITS)
            c = (c + b) & _BITS
            a, b, c = b, c, a
    return a, b, c


def agrees(found: Sequence[int]) -> bool:
    """Whether the database's hash, as `AGREES_SQL` found it, is the one that `tokens` computes."""
    ids = np.array(_TRIED, np.int64)
    own = [int(token) for seed in _TRIED_SEEDS for token in tokens(ids, seed)]
    return list(found) == own
