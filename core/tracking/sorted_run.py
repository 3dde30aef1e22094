"""Entries of 18 bytes in three arrays sorted by id: found by binary search, changed in place, inserted and cleaned in place.

Inserting and cleaning move entries block by block inside the arrays, so that neither needs a second copy of them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stormproof.core.arrays import Rows, Words

States: TypeAlias = npt.NDArray[np.uint16]
"""One word of flags an entry; 0 means that the entry is dead: it stands there only until the next clean-up."""

Found: TypeAlias = npt.NDArray[np.bool_]

_BLOCK: Final = 8_192
"""Entries moved at once: what a move needs besides the arrays is a few blocks."""

_SLACK: Final = 128
"""Room is made for one entry in so many more than are asked for."""


class SortedRun:
    """Entries (id, word, state) in rising order of id; an id stands here once at most.

    Guarantee:
        Between calls the arrays hold at most 1/32 more room than entries (and 1,024 more), after `clean` and `insert`.
        The time of `insert` grows with the entries behind the first new id, that of `clean` with those behind the first
        dead one: ids that only rise are appended.
    Not guaranteed:
        Anything under use by several threads.
    """

    __slots__ = ("_dead", "_ids", "_length", "_states", "_words")

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)
        self._words = np.empty(0, np.uint64)
        self._states = np.empty(0, np.uint16)
        self._length = 0
        self._dead = 0

    def __len__(self) -> int:
        """Entries, the dead ones among them."""
        return self._length

    @property
    def dead(self) -> int:
        """How many of the entries are dead."""
        return self._dead

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, unused room among them."""
        return self._ids.nbytes + self._words.nbytes + self._states.nbytes

    def find(self, ids: Rows) -> tuple[Rows, Found]:
        """For each id (in rising order: that is faster) its place, and whether the entry there is it, dead or alive."""
        if self._length == 0:
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        stored = self._ids[: self._length]
        places = np.searchsorted(stored, ids)
        np.minimum(places, self._length - 1, out=places)
        return places, stored[places] == ids

    def read(self, places: Rows) -> tuple[Words, States]:
        """Copies of the words and states at these places."""
        return self._words[places], self._states[places]

    def write(self, places: Rows, words: Words, states: States) -> None:
        """Change the entries at these places; no place may stand there twice."""
        self._dead -= int(np.count_nonzero(self._states[places] == 0))
        self._words[places] = words
        self._states[places] = states
        self._dead += int(np.count_nonzero(states == 0))

    def insert(self, ids: Rows, words: Words, states: States) -> None:
        """Put entries in whose ids rise and stand nowhere here yet; none of them is dead."""
        new, old = len(ids), self._length
        if new == 0:
            return
        self._make_room(old + new)
        self._length = old + new
        if old == 0 or ids[0] > self._ids[old - 1]:
            for array, inserted in ((self._ids, ids), (self._words, words), (self._states, states)):
                array[old : old + new] = inserted
            return
        places = np.searchsorted(self._ids[:old], ids)
        # From the back: what is moved never lands on what is still to be moved.
        end, later = old, new
        first_place = int(places[0])
        while later:
            begin = max(first_place, end - _BLOCK)
            # New ids that come before the old entry `begin` belong to the next block, those before `end` to this one.
            earlier = int(np.searchsorted(places, begin)) if begin > first_place else 0
            own = slice(earlier, later)
            target = slice(begin + earlier, end + later)
            at = places[own] - begin + np.arange(later - earlier)
            for array, inserted in ((self._ids, ids), (self._words, words), (self._states, states)):
                _interleave(array, slice(begin, end), target, at, inserted[own])
            end, later = begin, earlier

    def clean(self) -> None:
        """Take the dead entries out."""
        if not self._dead:
            return
        length = self._length
        kept = 0
        for begin in range(0, length, _BLOCK):
            block = slice(begin, min(begin + _BLOCK, length))
            alive = np.flatnonzero(self._states[block])
            number = len(alive)
            if kept != begin or number != block.stop - begin:
                for array in (self._ids, self._words, self._states):
                    array[kept : kept + number] = array[block][alive]
            kept += number
        self._length = kept
        self._dead = 0

    def trim(self) -> None:
        """Give unused room back where it is more than 1/32 of the entries (and 1,024)."""
        if len(self._ids) > self._length + self._length // 32 + 1_024:
            self._resize(self._length + self._length // _SLACK)

    def pour_into(self, other: SortedRun) -> None:
        """Clean, and move all entries to another run, which has none of their ids."""
        self.clean()
        length = self._length
        other.insert(self._ids[:length], self._words[:length], self._states[:length])
        self._length = 0

    def take(self, chosen: npt.NDArray[np.bool_]) -> tuple[Rows, States]:
        """Kill every entry whose state, an index into `chosen`, is true there; returns their ids and former states.

        `chosen[0]`, that of the dead, must be false.
        """
        ids: list[Rows] = []
        states: list[States] = []
        for begin in range(0, self._length, _BLOCK):
            block = slice(begin, min(begin + _BLOCK, self._length))
            hits = np.flatnonzero(chosen[self._states[block]])
            if len(hits):
                hits += begin
                ids.append(self._ids[hits])
                states.append(self._states[hits])
                self._words[hits] = 0
                self._states[hits] = 0
                self._dead += len(hits)
        if not ids:
            return np.empty(0, np.int64), np.empty(0, np.uint16)
        return np.concatenate(ids), np.concatenate(states)

    def _make_room(self, entries: int) -> None:
        if entries > len(self._ids):
            self._resize(entries + entries // _SLACK)

    def _resize(self, entries: int) -> None:
        # Large blocks are remapped, not copied. No view of them outlives a call, so nothing refers to what moves.
        for array in (self._ids, self._words, self._states):
            array.resize(entries, refcheck=False)


def _interleave(
    array: npt.NDArray[np.generic], source: slice, target: slice, at: Rows, inserted: npt.NDArray[np.generic]
) -> None:
    """Move `array[source]` to `array[target]`, leaving the places `at` (counted from the target's start) to `inserted`."""
    moved = array[source].copy()
    into = array[target]
    if len(at):
        free = np.ones(len(into), np.bool_)
        free[at] = False
        into[free] = moved
        into[at] = inserted
    else:
        into[:] = moved
