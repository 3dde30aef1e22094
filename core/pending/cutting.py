"""Cuts slices of one subscription: to a limit or in halves when they are opened again, in parts when they are returned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from stormproof.core.errors import PositionMismatch
from stormproof.core.pending.connector import Connector, Piece
from stormproof.core.pending.rows import PendingRows, Retry, SliceRow
from stormproof.core.pending.slice_position import expectation_of, position_of, slice_of
from stormproof.core.source.protocol import Lease, Limit, Slice

DEATHS_BEFORE_HALVING: Final = 2


class SliceCutter:
    """Cuts slices inside one transaction of the store."""

    def __init__(self, connector: Connector, rows: PendingRows, subscription: str) -> None:
        self._connector = connector
        self._rows = rows
        self._subscription = subscription

    def reopen(self, row: SliceRow, lease: Lease, limit: Limit, seed: int) -> Slice:
        """Open a free slice, cut to the limit; one on which drivers died in halves, which are halved again at once. One with
        mates stays whole.
        """
        rest_path = row.place
        if row.mates:
            limit = Limit(row.messages, max(1, row.bytes + 1))
        elif row.deaths >= DEATHS_BEFORE_HALVING and row.messages > 1:
            rest_path = row.path_of(1)
            row = replace(row, deaths=1, path=row.path_of(0))
            limit = replace(limit, messages=min(limit.messages, math.ceil(row.messages / 2)))
        retries: Sequence[Retry] = self._rows.retries(row.id) if row.is_retry else ()
        piece, kept = self._head(row, retries, limit, seed)
        row = replace(row, messages=row.messages - piece.gone)
        if (left := row.messages - piece.messages) > 0 and (row.is_retry or piece.rest is not None):
            rest = replace(
                row, at=piece.rest, messages=left, bytes=max(0, row.bytes - piece.bytes), owner=None, path=rest_path
            )
            self._rows.insert(rest, [retry.id for retry in retries[kept:]])
            row = self._shrunk(row, piece)
        elif left:
            raise PositionMismatch(
                f"{self._connector.where}: a slice of subscription {self._subscription} held {row.messages} messages when "
                f"it was opened, and {piece.messages} now: messages were deleted or changed by hand",
                slice=position_of(row),
                found=piece.messages,
            )
        elif row.at not in (None, piece.at):
            # What came back holds less than what was opened, and the messages are all there.
            row = self._shrunk(row, piece)
        return slice_of(self._rows.open(row, lease), piece.expected, retries[:kept])

    def divide(self, row: SliceRow, alone: Sequence[int], parts: int = 2) -> None:
        """Cut a slice behind each place where a suspect begins or ends, or in parts of one size where there are no suspects.

        All parts are returned, and come in their order.
        """
        if row.at is None:
            retries, suspects = self._rows.retries(row.id), set(alone)
            places: Sequence[int] = [place for place, retry in enumerate(retries) if retry.id in suspects]
        else:
            retries, places = (), self._connector.places(row.at, alone, self._rows.cursor) if alone else ()
        done, rest, gone = 0, row, 0
        for number, end in enumerate((*inner_ends(row.messages, places, parts), row.messages)):
            of_part = retries[done:end]
            limit = Limit(end - done, max(1, row.bytes + 1))
            piece, _ = self._head(rest, of_part, limit, 0)
            gone += piece.gone
            messages = piece.messages if gone else end - done
            part = replace(row, messages=messages, bytes=piece.bytes, owner=None, path=row.path_of(number))
            part = replace(part, at=None if row.is_retry else piece.at)
            if done:
                self._rows.insert(part, [retry.id for retry in of_part])
            else:
                self._rows.shrink(part)
            done = end
            if not row.is_retry:
                if piece.rest is None:
                    break  # fewer messages than when it was opened: the next opening says so
                rest = replace(rest, at=piece.rest)

    def _head(self, row: SliceRow, retries: Sequence[Retry], limit: Limit, seed: int) -> tuple[Piece, int]:
        """The part of a slice that the limit admits, and how many of its retries that are."""
        if row.at is not None:
            return self._connector.head(row.at, limit, seed, self._rows.cursor), 0
        sizes = np.cumsum([retry.bytes for retry in retries[: max(1, limit.messages)]])
        kept = max(1, int(np.searchsorted(sizes, limit.bytes, side="right"))) if len(retries) else 0
        expected = expectation_of([retry.id for retry in retries[:kept]], seed)
        return Piece({}, kept, int(sizes[kept - 1]) if kept else 0, expected, None), kept

    def _shrunk(self, row: SliceRow, piece: Piece) -> SliceRow:
        at = None if row.is_retry else piece.at
        small = replace(row, at=at, messages=piece.messages, bytes=piece.bytes)
        self._rows.shrink(small)
        return small


def inner_ends(messages: int, suspects: Iterable[int], parts: int = 2) -> list[int]:
    """The ordinals at which a slice of this many messages is cut, ascending.

    Each suspect (its ordinal in the slice, from 0) becomes a part of its own; so does what lies between two suspects.
    Without suspects the slice is cut in `parts`, of which the first ones may be larger by one; a single message is not cut.
    """
    cuts = {end for suspect in suspects for end in (suspect, suspect + 1)} - {0, messages}
    if not cuts and messages > 1:
        return sorted({math.ceil(messages * part / parts) for part in range(1, parts)} - {messages})
    return sorted(cuts)
