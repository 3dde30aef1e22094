"""Which messages come again with a failed one, so that no partner of a join is taken for a row that has none.

A failure behind a join is one of both partners: they share a tuple. Where one side fails before the join, its key is not
known: any message of the batch may be its partner, and the whole batch comes again, as in Trident. Once it reached the join,
in this run of the driver, its key is known: then only messages of that key come again with it. At a join behind another one
a message's keys depend on its partners: they are known once all of these were there in one attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from stormproof.core.base.arrow import Rows
from stormproof.core.base.message import FailureReason, MessageFailure, MessageId
from stormproof.core.tracking.verdict import ANY_KEY, JobReport

KEYS_KEPT_MAX: Final = 1_000_000
"""Of messages that come again, so many keys are kept in memory. Without its key, a message takes its whole batch along."""

Pairs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Meetings:
    """Where messages of a batch meet: joins, and bolts that hold tuples of several streams which reach them by fields().

    `before` are the components that stand before one of them. `spouts` are the numbers of those among them that are spouts,
    of which `id_of` finds a message's; None: there is one spout. `chained`: one of them stands before another.
    """

    before: frozenset[str]
    spouts: frozenset[int] | None = None
    id_of: Callable[[int], tuple[int, int]] | None = None
    chained: bool = False

    def concern(self, failure: MessageFailure) -> bool:
        """Whether this message might have met others. One that does not decode never has."""
        of_spout = self.spouts is None or self.id_of is None or self.id_of(failure.id)[0] in self.spouts
        return of_spout and failure.reason is not FailureReason.BAD_MESSAGE


@dataclass(frozen=True, slots=True)
class Spread:
    """The failures, and whom they take along: `touched` has a failed message for each message to be returned.

    `everyone`, if not None, is the failed message for which the whole batch is returned.
    """

    failures: Sequence[MessageFailure]
    touched: Mapping[int, int]
    everyone: MessageId | None = None


class Partners:
    """What is known of the keys of messages that come again. One for each driver's run; `meetings` None: none meet."""

    def __init__(self, meetings: Meetings | None) -> None:
        self._meetings = meetings
        self._chained = meetings is not None and meetings.chained
        self._keys: Pairs = np.empty((0, 2), np.int64)
        self._sure: Rows = np.empty(0, np.int64)
        """Messages of which every key is known: they were there and, in a chain of joins, so were all their partners."""

    def spread(self, failures: Sequence[MessageFailure], report: JobReport, *, adds_up: bool = True) -> Spread:
        """Whom these failures of an attempt take along.

        While a message that failed before a join counts a failure, what failed at the join or behind it for want of that
        partner does not. Where the attempt does not add up, rows may have been lost on their way to a join: then nothing
        that it says of partners holds, and everyone comes again.
        """
        failed = {failure.id for failure in failures}
        touched, everyone = touched_by(failed, report.together), None
        if self._meetings is None or not (failures or len(self._keys)):
            return Spread(failures, touched)
        absent = self._absent(self._meetings, report.named, report.met)
        met = report.met[~np.isin(report.met[:, 0], list(absent))]
        known = self._keys if self._chained else self._keys[np.isin(self._keys[:, 0], list(absent))]
        linked = touched_by(absent, np.concatenate([report.together, by_key(np.concatenate([met, known]))]))
        certain = adds_up and not (met[:, 1] == ANY_KEY).any()
        spared: set[int] = linked.keys() & failed
        if (absent or not adds_up) and not (certain and self._knows(absent, linked, met)):
            touched, everyone = {}, min(absent or failed, default=None)
            spared = {*failed - absent} if absent else set()
        else:
            touched |= {id_: by for id_, by in linked.items() if id_ not in failed}
        if certain:
            self._learn(met, absent, linked, None if everyone is not None else failed | touched.keys())
        spared &= set(met[:, 0].tolist())
        return Spread([replace(f, counted=False) if f.id in spared else f for f in failures], touched, everyone)

    @staticmethod
    def _absent(meetings: Meetings, failures: Sequence[MessageFailure], met: Pairs) -> set[MessageId]:
        """Those that failed before a join."""
        there = np.isin([failure.id for failure in failures], met[:, 0]).tolist()
        return {
            failure.id
            for failure, reached in zip(failures, there, strict=True)
            if meetings.concern(failure) and (not reached or failure.component in meetings.before)
        }

    def _knows(self, absent: Collection[int], linked: Collection[int], met: Pairs) -> bool:
        """Whether `linked` are all partners of the absent ones. In a chain of joins each of them must be sure, and here."""
        if not self._chained:
            return bool(np.isin([*absent], self._sure).all())
        return bool(np.isin([*absent, *linked], self._sure).all() and np.isin([*linked], met[:, 0]).all())

    def _learn(
        self, met: Pairs, absent: Collection[int], linked: Collection[int], again: Collection[int] | None
    ) -> None:
        """Keep the keys of the messages that were there and come `again` (None: all), and no others' of the batch."""
        here = np.unique(met[:, 0])
        is_here, comes = np.isin(self._keys[:, 0], here), here if again is None else np.intersect1d(here, [*again])
        sure = comes
        if self._chained:
            # Where an absent one's key is not known, anybody may have lacked it.
            sure = comes[~np.isin(comes, [*linked])] if np.isin([*absent], self._keys[:, 0]).all() else comes[:0]
        kept = np.concatenate([self._keys[is_here], met])
        kept = np.unique(kept[np.isin(kept[:, 0], comes)], axis=0)
        self._keys = np.concatenate([self._keys[~is_here], kept])
        gone = np.setdiff1d(here, comes)
        self._sure = np.union1d(np.setdiff1d(self._sure, gone), sure)
        if len(self._keys) > KEYS_KEPT_MAX:
            self._keys, self._sure = self._keys[:0], self._sure[:0]


# ---- which messages a failure spreads to: those that share a tuple with the failed one, directly or through others


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
