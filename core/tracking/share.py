"""Shares: 64-bit values whose XOR tells whether every tuple made of a message was acked, and how tuples carry them.

A message starts with its token. A tuple with share ``s`` that is split into ``n`` deliveries hands each child a
random-looking share, and the children's shares XOR to ``s``. A tuple that ends is acked with its share. So the acked
shares of a message XOR to its token when its whole tree was acked, and otherwise only by an accident of 2^-64.

A share depends on nothing but its parent's share and the child's ordinal, since Spark may run a task twice and expects the
same rows. An XOR does not see a row that comes three times, nor rows that swap their shares: rows are counted, too.

The anchors of tuples are (message, share) pairs beside the rows, as arrays. A tuple has one pair for each message that
anchors it. Nearly always there is one, and then pair i belongs to tuple i. Only the tuples of a bolt that names several
anchors, or none, need an index. A message is given by its number in its task's `MetMessages`; `MANY` stands for several
messages that cannot be told apart after a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from stormproof.core.base.arrow import Rows, Words

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


# ---- the anchors of tuples: (message, share) pairs beside the rows

_W = TypeVar("_W", np.int64, np.uint64)

MANY: Final = -1
"""The message of a pair that stands for many: a group's result is anchored to all messages that went into the group."""

MANY_ORIGIN: Final = -1
"""The origin that stands for `MANY` on the wire: no source has a message of this origin."""


@dataclass(frozen=True, slots=True)
class Anchors:
    """The pairs of `rows` tuples.

    `row` is the tuple of each pair, in rising order; None: pair i belongs to tuple i. `message` None: every pair stands for
    many. `share` None: the run is not tracked.
    """

    rows: int
    row: Rows | None
    message: Rows | None
    share: Words | None

    @classmethod
    def none(cls, rows: int, *, tracked: bool) -> Anchors:
        """The anchors of tuples that no message anchors."""
        return cls(rows, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64) if tracked else None)

    def messages(self) -> Rows:
        """The message of each pair."""
        if self.message is not None:
            return self.message
        return np.full(self.rows if self.row is None else len(self.row), MANY, np.int64)

    def row_of_pairs(self) -> Rows:
        """The tuple of each pair."""
        return np.arange(self.rows, dtype=np.int64) if self.row is None else self.row

    def xor(self) -> int:
        """The XOR of all shares, signed."""
        return 0 if self.share is None else xor_reduce(self.share)

    def pairs_of(self, row: int) -> npt.NDArray[np.int64]:
        """The numbers of one tuple's pairs."""
        if self.row is None:
            return np.array([row], np.int64)
        start, stop = np.searchsorted(self.row, [row, row + 1])
        return np.arange(start, stop)

    def only(self, mask: npt.NDArray[np.bool_]) -> Anchors:
        """The anchors of the tuples where `mask` is set."""
        rows = int(mask.sum())
        if self.row is None:
            return Anchors(rows, None, _at(self.message, mask), _at(self.share, mask))
        kept = mask[self.row]
        row = (np.cumsum(mask) - 1)[self.row[kept]]
        return Anchors(rows, row, _at(self.message, kept), _at(self.share, kept))

    def take(self, order: Rows) -> Anchors:
        """The anchors of the tuples with these numbers, in this order."""
        if self.row is None:
            return Anchors(len(order), None, _at(self.message, order), _at(self.share, order))
        starts = np.searchsorted(self.row, np.arange(self.rows + 1))
        counts = starts[order + 1] - starts[order]
        pairs = np.repeat(starts[order] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return Anchors(
            len(order), np.repeat(np.arange(len(order)), counts), _at(self.message, pairs), _at(self.share, pairs)
        )

    def deliveries(self, counts: Rows | None, subscribers: int) -> list[Anchors]:
        """The anchors of the tuples made of these, for each subscriber: `counts` of each (None: one of each), in order.

        A child is one delivery: each pair's share is split over all children of all subscribers together.
        """
        if counts is None and subscribers == 1:
            return [self]
        if self.row is not None:
            return self._several(counts, subscribers)
        rows = self.rows if counts is None else int(counts.sum())
        message = self.message if self.message is None or counts is None else np.repeat(self.message, counts)
        if self.share is None:
            return [Anchors(rows, None, message, None)] * subscribers
        each = np.full(self.rows, 1, np.int64) if counts is None else counts
        split = split_runs(self.share, each * subscribers).reshape(-1, subscribers)
        return [Anchors(rows, None, message, np.ascontiguousarray(split[:, i])) for i in range(subscribers)]

    def _several(self, counts: Rows | None, subscribers: int) -> list[Anchors]:
        assert self.row is not None
        each = np.full(self.rows, 1, np.int64) if counts is None else counts
        per_pair = each[self.row]
        total = int(per_pair.sum())
        starts = np.cumsum(each) - each
        place = np.arange(total) - np.repeat(np.cumsum(per_pair) - per_pair, per_pair)
        row = np.repeat(starts[self.row], per_pair) + place
        order = np.argsort(row, kind="stable")
        message = None if self.message is None else np.repeat(self.message, per_pair)[order]
        rows = int(each.sum())
        if self.share is None:
            return [Anchors(rows, row[order], message, None)] * subscribers
        split = split_runs(self.share, per_pair * subscribers).reshape(-1, subscribers)[order]
        return [Anchors(rows, row[order], message, np.ascontiguousarray(split[:, i])) for i in range(subscribers)]

    def together(self) -> npt.NDArray[np.int64]:
        """Pairs of messages that anchor one tuple together, as a chain a tuple: (n, 2) message numbers."""
        if self.row is None or self.message is None or len(self.row) < 2:
            return np.empty((0, 2), np.int64)
        known = self.message != MANY  # a pair that stands for many, between two others, must not separate them
        row, message = self.row[known], self.message[known]
        linked = (row[1:] == row[:-1]) & (message[1:] != message[:-1])
        return np.stack([message[:-1][linked], message[1:][linked]], axis=1)


def joined(parts: Sequence[Anchors]) -> Anchors:
    """The anchors of several runs of tuples, one run after the other."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(part.rows for part in parts)
    shares = [part.share for part in parts]
    share = None if any(s is None for s in shares) else np.concatenate([s for s in shares if s is not None])
    unnamed = all(part.message is None for part in parts)
    message = None if unnamed else np.concatenate([part.messages() for part in parts])
    if all(part.row is None for part in parts):
        return Anchors(rows, None, message, share)
    starts = np.cumsum([0, *(part.rows for part in parts)])
    row = np.concatenate([part.row_of_pairs() + start for part, start in zip(parts, starts, strict=False)])
    return Anchors(rows, row, message, share)


def overlaid(rows: int, parts: Sequence[tuple[Anchors, Rows]]) -> Anchors:
    """The anchors of `rows` tuples that are each made of tuples of several runs: tuple i of a run goes into `place[i]`."""
    row = np.concatenate([place[anchors.row_of_pairs()] for anchors, place in parts])
    order = np.argsort(row, kind="stable")
    message = np.concatenate([anchors.messages() for anchors, _ in parts])[order]
    shares = [anchors.share for anchors, _ in parts]
    share = None if any(s is None for s in shares) else np.concatenate([s for s in shares if s is not None])[order]
    return Anchors(rows, row[order], message, share)


def child_shares(shares: Words, ordinal: Rows) -> Words:
    """The shares of children that are made one by one, while their number is not known yet; `ordinal` counts from 0.

    These shares do not XOR to the parent's. So the ack of the parent is its share XOR all of theirs.
    """
    return mix64(shares + GAMMA * (ordinal.astype(np.uint64) + np.uint64(1)))


class BoltInputs:
    """The inputs of one bolt in one task, by handle: their pairs, and for each pair the share that was not passed on yet.

    It only grows, and lives for one batch; a pair takes 24 bytes.
    """

    def __init__(self, *, tracked: bool) -> None:
        self._tracked = tracked
        self._starts = np.zeros(1, np.int64)
        self._rows = 0
        self._message = np.empty(0, np.int64)
        self._share = np.empty(0, np.uint64)
        self._rest = np.empty(0, np.uint64)
        self._pairs = 0

    def append(self, anchors: Anchors) -> None:
        """Add inputs; they get the next handles."""
        message = anchors.messages()
        counts = (
            np.ones(anchors.rows, np.int64) if anchors.row is None else np.bincount(anchors.row, minlength=anchors.rows)
        )
        self._starts = _grown(self._starts, self._rows + 1, anchors.rows)
        self._starts[self._rows + 1 : self._rows + 1 + anchors.rows] = self._pairs + np.cumsum(counts)
        self._message = _grown(self._message, self._pairs, len(message))
        end = self._pairs + len(message)
        self._message[self._pairs : end] = message
        if anchors.share is not None:
            self._share = _grown(self._share, self._pairs, len(message))
            self._rest = _grown(self._rest, self._pairs, len(message))
            self._share[self._pairs : end] = anchors.share
            self._rest[self._pairs : end] = anchors.share
        self._rows += anchors.rows
        self._pairs = end

    def _pairs_of(self, handles: Rows) -> tuple[Rows, Rows]:
        """The pairs of these inputs, and how many each has."""
        starts = self._starts[handles]
        counts = self._starts[handles + 1] - starts
        if len(handles) and (counts == 1).all():
            return starts, counts
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return first + np.arange(int(counts.sum()), dtype=np.int64), counts

    def rest(self, handles: Rows) -> Anchors:
        """The anchors to ack or to fail these inputs with: each share is the input's XOR those of its children."""
        pairs, counts = self._pairs_of(handles)
        row = np.repeat(np.arange(len(handles)), counts)
        return Anchors(len(handles), row, self._message[pairs], self._rest[pairs] if self._tracked else None)

    def emit(self, rows: int, row: Rows, handle: Rows, ordinal: Rows, subscribers: int, most: int) -> list[Anchors]:
        """The anchors of `rows` new tuples, for each subscriber.

        Link i anchors tuple `row[i]` (rising) to the input `handle[i]`, as its child number `ordinal[i]`. `most` is the
        largest number of subscribers of any stream of the bolt; it makes the ordinals of all deliveries differ.
        """
        pairs, counts = self._pairs_of(handle)
        link_row, link_ordinal = np.repeat(row, counts), np.repeat(ordinal, counts)
        message = self._message[pairs]
        index = None if len(link_row) == rows and (link_row == np.arange(rows)).all() else link_row
        if not self._tracked:
            return [Anchors(rows, index, message, None)] * subscribers
        made: list[Anchors] = []
        for number in range(subscribers):
            share = child_shares(self._share[pairs], link_ordinal * most + number)
            np.bitwise_xor.at(self._rest, pairs, share)
            made.append(Anchors(rows, index, message, share))
        return made


class MetMessages:
    """The messages that a task has met: the id, origin and token of each, by its number."""

    def __init__(self) -> None:
        self._ids = np.empty(0, np.int64)
        self._origins = np.empty(0, np.int64)
        self._tokens = np.empty(0, np.int64)
        self.number = 0

    def append(self, ids: Rows, origins: Rows, tokens: npt.NDArray[np.int64] | None = None) -> int:
        """Add messages; returns the number of the first."""
        first, count = self.number, len(ids)
        self._ids = _grown(self._ids, first, count)
        self._origins = _grown(self._origins, first, count)
        self._tokens = _grown(self._tokens, first, count)
        self._ids[first : first + count] = ids
        self._origins[first : first + count] = origins
        self._tokens[first : first + count] = 0 if tokens is None else tokens
        self.number += count
        return first

    def ids(self, numbers: Rows) -> Rows:
        """The ids of messages."""
        return self._ids[numbers]

    def origins(self, numbers: Rows) -> Rows:
        """The origins of messages."""
        return self._origins[numbers]

    def tokens(self, numbers: Rows) -> Rows:
        """The tokens of messages; 0 for those that came over an exchange."""
        return self._tokens[numbers]


def _at(values: npt.NDArray[_W] | None, index: Rows | npt.NDArray[np.bool_]) -> npt.NDArray[_W] | None:
    return None if values is None else values[index]


def _grown(array: npt.NDArray[_W], used: int, more: int) -> npt.NDArray[_W]:
    """The array with room for `more` entries after the `used` ones; doubled, so that growing costs little."""
    if used + more <= len(array):
        return array
    wider = np.zeros(max(used + more, 2 * len(array)), array.dtype)
    wider[:used] = array[:used]
    return wider
