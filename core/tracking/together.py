"""Which messages a failure spreads to: those that share a tuple with the failed one, directly or through others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stormproof.core.base.arrays import Rows
from stormproof.core.base.message import MessageId


def touched_by(failed: set[MessageId], together: npt.NDArray[np.int64]) -> dict[int, int]:
    """The messages that share a tuple with a failed one, directly or through others, without the failed ones themselves.

    Each is mapped to the lowest failed message of its component. `together` has the pairs of messages that anchor one tuple.
    The components are found as in Shiloach and Vishkin (1982): roots are attached to lower roots, then all paths are
    shortened to the root, until both messages of every pair have one root. That takes a few rounds over whole arrays,
    however long a chain is.
    """
    if not failed or not len(together):
        return {}
    ids, places = np.unique(together, return_inverse=True)
    root = _roots(places.reshape(together.shape), len(ids))
    is_failed = np.isin(ids, np.fromiter(failed, np.int64, len(failed)))
    culprit = np.full(len(ids), -1, np.int64)
    place = np.flatnonzero(is_failed)[::-1]
    culprit[root[place]] = place  # the lowest is written last
    by = culprit[root]
    hit = np.flatnonzero((by >= 0) & ~is_failed)
    return dict(zip(ids[hit].tolist(), ids[by[hit]].tolist(), strict=True))


def by_key(met: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Pairs of messages that met at one key, as a chain a key. `met` has (message, key) pairs."""
    met = met[np.argsort(met[:, 1], kind="stable")]
    same = met[1:, 1] == met[:-1, 1]
    return np.stack([met[:-1, 0][same], met[1:, 0][same]], axis=1)


def _roots(pairs: npt.NDArray[np.int64], size: int) -> Rows:
    """The lowest member of each one's component."""
    root = np.arange(size, dtype=np.int64)
    while True:
        ends = root[pairs]
        low, high = ends.min(axis=1), ends.max(axis=1)
        open_ = low != high
        if not open_.any():
            return root
        pairs = pairs[open_]
        np.minimum.at(root, high[open_], low[open_])
        while True:
            up = root[root]
            if np.array_equal(up, root):
                break
            root = up
