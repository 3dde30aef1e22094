"""`NumberedSource`: messages that have numbers without gaps, so that a slice is a range of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from stormproof.core.base.errors import UsageError
from stormproof.core.contract.source import Expectation, Limit, SliceReader, SourcePreview
from stormproof.core.pending.connector import NextMessages, Piece
from stormproof.core.pending.rows import At, PendingRows, even_bounds, expectation_of_range, fitting
from stormproof.core.pending.source import PendingSource
from stormproof.core.postgres.database import Database

_PAYLOAD_ROWS: Final = 10_000
"""Rows of a record batch where payloads are read again."""


class NumberedSource(PendingSource):
    """A source whose messages are numbered from `first` on without gaps, in the order in which they are opened.

    A connector says how many there are (`stop`) and what reads a range of them (`reader`). One that also says how many
    bytes they have (`sizes`, or `cut` where that needs no look at every message) has slices that keep to the limit in
    bytes; else the number of messages alone limits them. A message's number must never change, nor come to stand for
    another message.
    """

    @abstractmethod
    def stop(self, cursor: Any) -> int:
        """The number behind the last message that is there now."""

    @abstractmethod
    def reader(self, first: int, stop: int) -> SliceReader:
        """What reads the messages from `first` up to but not including `stop`; see `PendingSource.parts`."""

    def bounds(self, first: int, stop: int, parts: int) -> Sequence[int]:
        """Where a range is cut into parts for `parts` readers, with both ends; by default into parts of equal length."""
        return even_bounds(first, stop, parts)

    def range_payloads(self, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """The payloads of these messages (ascending), to be stored; those that are not there are left out.

        By default `reader` reads them. A connector whose readers give columns instead of bytes overrides it.
        """
        numbers = np.array(ids)
        return {
            id_: payload
            for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)  # what lies between is not read
            for rows in self.reader(int(run[0]), int(run[-1]) + 1).read(0, frozenset(), _PAYLOAD_ROWS)
            for id_, payload in zip(rows.column("id").to_pylist(), rows.column("payload").to_pylist(), strict=True)
        }

    def first(self, cursor: Any) -> int:
        """The number of the first message that a new subscription opens: 0, unless a connector says otherwise."""
        return 0

    def sizes(self, first: int, stop: int, limit: Limit, cursor: Any) -> Sequence[int] | None:
        """The bytes of the messages from `first` on, ascending; it may end before `stop` once they are above the limit.

        None, as by default: they are not known, and count as 0.
        """
        return None

    def cut(self, first: int, stop: int, limit: Limit, cursor: Any) -> tuple[int, int]:
        """Where the limit ends a range of messages, at least one message on, and its bytes up to there."""
        stop = min(stop, first + max(1, limit.messages))
        sizes = self.sizes(first, stop, limit, cursor)
        if sizes is None:
            return stop, 0
        kept, size = fitting(sizes[: stop - first], limit)
        return first + kept, size

    def start(self, cursor: Any) -> At:
        """In front of the first message."""
        first = self.first(cursor)
        return {"first": first, "next": first}

    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """The messages from the position on."""
        first, stop = next_of(position), self.stop(cursor)
        if first >= stop:
            return None
        piece = self.head({"range": [first, stop]}, limit, seed, cursor)
        _, end = range_of(piece.at)
        return NextMessages(piece, {**position, "next": end})

    def head(self, at: At, limit: Limit, seed: int, cursor: Any) -> Piece:
        """The lowest numbers of the range."""
        first, stop = range_of(at)
        end, size = self.cut(first, stop, limit, cursor)
        expected = expectation_of_range(first, end, seed)
        return Piece(
            {"range": [first, end]}, end - first, size, expected, {"range": [end, stop]} if end < stop else None
        )

    def places(self, at: At, ids: Sequence[int], cursor: Any) -> Sequence[int]:
        """How far each number is from the first."""
        first, stop = range_of(at)
        return sorted(id_ - first for id_ in ids if first <= id_ < stop)

    def expected(self, at: At, seed: int, excluded: frozenset[int], cursor: Any) -> Expectation:
        """From the numbers alone."""
        return expectation_of_range(*range_of(at), seed, excluded)

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """From the position on, by `stop` and `reader`: these must only look."""
        return self._preview_next(subscription, limit, database)

    def parts(self, at: At, parallelism: int) -> tuple[SliceReader, ...]:
        """Readers of the range."""
        bounds = self.bounds(*range_of(at), parallelism)
        return tuple(self.reader(first, stop) for first, stop in pairwise(bounds))

    def payloads(self, at: At, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """Those of the range."""
        first, stop = range_of(at)
        mine = sorted(id_ for id_ in ids if first <= id_ < stop)
        return self.range_payloads(mine, cursor) if mine else {}

    def unopened(self, position: At, cursor: Any) -> tuple[int, float | None]:
        """As many as lie behind the position."""
        return max(0, self.stop(cursor) - next_of(position)), None


def lowest_unresolved(rows: PendingRows) -> int:
    """The number below which every message is resolved, waits with its payload, or is dead."""
    position = rows.position()
    opened = [range_of(row.at)[0] for row in rows.unresolved() if row.at is not None]
    return 0 if position is None else min([next_of(position), *opened])


def next_of(position: At) -> int:
    """The number of the first message that was never opened."""
    number = position.get("next")
    if not isinstance(number, int):
        raise UsageError(f"not a position of numbered messages: {sorted(position)}")
    return number


def range_of(at: At) -> tuple[int, int]:
    """The first number of a slice, and the one behind its last."""
    match at.get("range"):
        case [int(first), int(stop)]:
            return first, stop
        case _:
            raise UsageError(f"not a range of numbered messages: {sorted(at)}")
