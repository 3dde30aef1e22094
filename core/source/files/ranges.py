"""Ranges of messages in registered files: their bytes, where they are cut, and which rows of which files they are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.contract.source import Limit
from stormproof.core.pending.rows import even_bounds
from stormproof.core.source.files.formats import File
from stormproof.core.source.files.reader import Segment, columns_in, rows_of
from stormproof.core.source.files.rows import pack

_PAYLOAD_ROWS: Final = 10_000
"""Rows of a record batch where payloads are read again."""


class RegisteredFiles(list[File]):
    """The registered files that may still be read, in their order; messages are numbered on from file to file.

    A range of messages is `first` up to but not including `stop`, and lies within these files.
    """

    @property
    def stop(self) -> int:
        """The number behind the last message."""
        return self[-1].stop_id if self else 0

    @property
    def newest(self) -> int:
        """The newest file's number."""
        return self[-1].number if self else 0

    def overlapping(self, first: int, stop: int) -> list[tuple[File, int, int]]:
        """The files that hold these messages, each with the first of its rows among them, and the row behind the last."""
        low = bisect_right(self, first, key=lambda file: file.stop_id)
        high = bisect_left(self, stop, key=lambda file: file.first_id)
        return [
            (file, max(first, file.first_id) - file.first_id, min(stop, file.stop_id) - file.first_id)
            for file in self[low:high]
        ]

    def cut(self, first: int, stop: int, limit: Limit) -> tuple[int, int]:
        """Where the limit ends a range, at least one message on, and its bytes up to there."""
        stop = min(stop, first + max(1, limit.messages))
        left, at = limit.bytes, first
        for file, low, high in self.overlapping(first, stop):
            size = file.bytes_of(low, high)
            if size > left:
                at = file.first_id + file.cut(low, high, left)
                break
            left, at = left - size, file.first_id + high
        at = max(at, first + 1)
        return at, sum(file.bytes_of(low, high) for file, low, high in self.overlapping(first, at))

    def whole_groups(self, first: int, stop: int) -> int:
        """The end of the last row group that is whole in the range; `stop` where none is. For Parquet only."""
        ((file, _, high),) = self.overlapping(stop - 1, stop)
        starts = file.group_rows
        whole = int(starts[np.searchsorted(starts, high, side="right") - 1]) + file.first_id
        return whole if whole > first else stop

    def bounds(self, first: int, stop: int, parts: int) -> list[int]:
        """Where a range is cut into this many parts; of Parquet where row groups end, if that moves a cut by less than half
        a part.
        """
        ideal = even_bounds(first, stop, parts)
        starts = np.concatenate(
            [
                np.empty(0, np.int64),
                *(
                    file.group_rows + file.first_id
                    for file, _, _ in self.overlapping(first, stop)
                    if file.format == "parquet"
                ),
            ]
        )
        starts = starts[(starts > first) & (starts < stop)]
        if not len(starts):
            return ideal
        near = [int(starts[np.abs(starts - cut).argmin()]) for cut in ideal[1:-1]]
        half = (stop - first) / parts / 2
        inner = [snap if abs(snap - cut) <= half else cut for snap, cut in zip(near, ideal[1:-1], strict=True)]
        return [first, *sorted(inner), stop]

    def segments(self, first: int, stop: int) -> tuple[Segment, ...]:
        """The range as rows of files."""
        return tuple(Segment.of(file, low, high) for file, low, high in self.overlapping(first, stop) if low < high)

    def payloads(self, ids: Sequence[int], columns: tuple[str, ...] | None) -> dict[int, bytes]:
        """The payloads of these messages (ascending), as they are stored; `columns` are those that are read of Parquet.

        A Parquet row is stored with all of its file's columns: the source may read others by the time it is tried again.

        Raises:
            PositionMismatch: a file has changed or is gone.
        """
        found: dict[int, bytes] = {}
        wanted = np.array(ids, np.int64)
        for file, low, high in self.overlapping(ids[0], ids[-1] + 1):
            mine = wanted[(wanted >= file.first_id + low) & (wanted < file.first_id + high)] - file.first_id
            if not len(mine):
                continue
            start, stop, stored = int(mine[0]), int(mine[-1]) + 1, columns
            if columns is not None:
                stored = tuple(dict.fromkeys((*columns, *columns_in(file))))
                groups = file.group_rows  # whole ones are streamed: wide rows are never in memory at once
                start = int(groups[np.searchsorted(groups, start, side="right") - 1])
                stop = int(groups[np.searchsorted(groups, stop)])
            segment = Segment.of(file, start, stop)
            for rows, payload in rows_of(segment, stored, _PAYLOAD_ROWS):
                here = mine[(mine >= rows[0]) & (mine <= rows[-1])] if len(rows) else mine[:0]
                if len(here):
                    picked = payload.take(pa.array(here - rows[0]))
                    packed = picked.to_pylist() if columns is None else pack(picked)
                    found.update(zip((here + file.first_id).tolist(), packed, strict=True))
        return found
