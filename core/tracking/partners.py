"""Which messages come again with a failed one, so that no partner of a join is taken for a row that has none.

A failure behind a join is one of both partners: they share a tuple. Where one side fails before the join, its key is not
known: any message of the batch may be its partner, and the whole batch comes again, as in Trident. Once it reached the join,
in this run of the driver, its key is known: then only messages of that key come again with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from stormproof.core.message import FailureReason, MessageFailure, MessageId
from stormproof.core.tracking.report import ANY_KEY, JobReport
from stormproof.core.tracking.together import by_key, touched_by

KEYS_KEPT_MAX: Final = 1_000_000
"""Of messages that come again, so many keys are kept in memory. Without its key, a message takes its whole batch along."""

Pairs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Meetings:
    """Where messages of a batch meet: joins, and bolts that hold tuples of several streams which reach them by fields().

    `before` are the components that stand before one of them. `spouts` are the numbers of those among them that are spouts,
    of which `id_of` finds a message's; None: there is one spout.
    """

    before: frozenset[str]
    spouts: frozenset[int] | None = None
    id_of: Callable[[int], tuple[int, int]] | None = None

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
        self._keys: Pairs = np.empty((0, 2), np.int64)

    def spread(self, failures: Sequence[MessageFailure], report: JobReport) -> Spread:
        """Whom these failures of an attempt take along.

        While a message that failed before a join counts a failure, what failed at the join or behind it for want of that
        partner does not.
        """
        failed = {failure.id for failure in failures}
        touched = touched_by(failed, report.together)
        absent = self._absent(failures, report.met)
        if not absent:
            self._keep(report.met, failed | touched.keys())
            return Spread(failures, touched)
        known = self._keys[np.isin(self._keys[:, 0], list(absent))]
        unknown = absent - set(known[:, 0].tolist())
        if unknown or (report.met[:, 1] == ANY_KEY).any():
            self._keep(report.met, None)
            spared: set[int] = {*failed - absent}
            touched, everyone = {}, min(unknown or absent)
        else:
            met = report.met[~np.isin(report.met[:, 0], list(absent))]
            linked = touched_by(absent, np.concatenate([report.together, by_key(np.concatenate([met, known]))]))
            spared, everyone = linked.keys() & failed, None
            touched |= {id_: by for id_, by in linked.items() if id_ not in failed}
            self._keep(report.met, (failed | touched.keys()) - absent)
        spared &= set(report.met[:, 0].tolist())
        return Spread([replace(f, counted=False) if f.id in spared else f for f in failures], touched, everyone)

    def _absent(self, failures: Sequence[MessageFailure], met: Pairs) -> set[MessageId]:
        """Those that failed before a join."""
        if self._meetings is None or not failures:
            return set()
        there = np.isin([failure.id for failure in failures], met[:, 0]).tolist()
        return {
            failure.id
            for failure, reached in zip(failures, there, strict=True)
            if self._meetings.concern(failure) and (not reached or failure.component in self._meetings.before)
        }

    def _keep(self, met: Pairs, messages: set[int] | None) -> None:
        """Keep the keys of these messages, or of all."""
        new = met if messages is None else met[np.isin(met[:, 0], list(messages))]
        old = self._keys[~np.isin(self._keys[:, 0], new[:, 0])]
        self._keys = np.concatenate([old, new])[-KEYS_KEPT_MAX:]
