"""The shares of children by their equation, term by term: what `split_runs` computes with half the work."""

from __future__ import annotations

import numpy as np

from stormproof.core.base.arrow import Rows, Words
from stormproof.core.tracking.share import GAMMA, mix64


def plain_shares(shares: Words, parent: Rows, ordinal: Rows, n: Rows) -> Words:
    """The shares of children in any order: child `ordinal[i]` of the `n[i]` children of the tuple in row `parent[i]`."""
    own = shares[parent]
    j = ordinal.astype(np.uint64)
    lower, upper = mix64(own + GAMMA * j), mix64(own + GAMMA * (j + np.uint64(1)))
    first, last = ordinal == 0, ordinal == n - 1
    lower[first] = own[first]
    upper[last] = 0
    return lower ^ upper
