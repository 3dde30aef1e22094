"""What lies behind a subscription's position: which offsets have a message, and how large each is.

An offset may have none: compaction removed it, or it is a transaction's marker, or a transaction was aborted. So messages
are counted by a consumer of the driver, apart from the readers whose work is checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from stormproof.core.arrays import Rows
from stormproof.core.source.kafka.cluster import Cluster, Feed, Partition
from stormproof.core.source.kafka.offsets import OffsetRange
from stormproof.core.source.kafka.position import Place
from stormproof.core.source.kafka.reader import by_partition
from stormproof.core.source.protocol import Limit

_MOST: Final = 10_000
_WAIT_S: Final = 0.25
_MORE_S: Final = 0.02
"""How long more messages are waited for where some are there: about as long as a fetch takes."""

_COUNTED_MAX: Final = 1_000
"""Up to this lag, messages are counted instead of offsets."""


@dataclass(slots=True)
class _Counted:
    """What is known of a partition from `start` up to but not including `stop`: its messages' offsets and sizes."""

    start: int
    stop: int
    offsets: list[Rows] = field(default_factory=list[Rows])
    sizes: list[Rows] = field(default_factory=list[Rows])

    def add(self, offsets: Rows, sizes: Rows) -> None:
        self.offsets.append(offsets)
        self.sizes.append(sizes)
        self.stop = int(offsets[-1]) + 1

    def all(self) -> tuple[Rows, Rows]:
        """Every offset and size that is known."""
        if len(self.offsets) != 1:
            self.offsets = [np.concatenate([np.zeros(0, np.int64), *self.offsets])]
            self.sizes = [np.concatenate([np.zeros(0, np.int64), *self.sizes])]
        return self.offsets[0], self.sizes[0]

    def forget(self, below: int) -> None:
        """Everything below an offset is opened."""
        if below > self.start:
            offsets, sizes = self.all()
            first = int(np.searchsorted(offsets, below))
            self.offsets, self.sizes, self.start = [offsets[first:]], [sizes[first:]], below

    @property
    def messages(self) -> int:
        """How many are known."""
        return sum(map(len, self.offsets))


class Scout:
    """Counts ahead of the position. It reads each message once, as long as the position only moves on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._feed: Feed | None = None
        self._counted: dict[Partition, _Counted] = {}

    def close(self) -> None:
        """Let the consumer go, and forget what was counted."""
        feed, self._feed, self._counted = self._feed, None, {}
        if feed is not None:
            feed.close()

    def look(
        self, places: Sequence[Place], ends: Mapping[Partition, int], limit: Limit, *, patient: bool = False
    ) -> None:
        """Count what a slice of this limit needs, or all up to the ends; `patient`: however long that takes.

        Raises:
            OffsetGone: retention removed what is next.
            StoreUnavailable: the cluster is away.
        """
        self._follow(places)
        feed, wanted, counted = self._feed, max(1, limit.messages), self._counted
        assert feed is not None
        known = sum(one.messages for one in counted.values())
        while known < wanted and any(one.stop < ends.get(partition, 0) for partition, one in counted.items()):
            delivered = feed.next(_MOST, _MORE_S if known else _WAIT_S)
            for partition, messages in by_partition(delivered.messages).items():
                offsets = np.array([message.offset() for message in messages], np.int64)
                counted[partition].add(offsets, np.array([len(message) for message in messages], np.int64))
                known += len(messages)
            for partition, end in delivered.ends.items():
                counted[partition].stop = max(counted[partition].stop, end)
            if known and not patient and not delivered.messages and not delivered.ends:
                break  # what is there is enough for a slice

    def _follow(self, places: Sequence[Place]) -> None:
        """Stand behind the position, wherever it is now."""
        at = {(place.topic, place.partition): place.next for place in places}
        if self._feed is None:
            self._feed = Feed(self._cluster)
        if set(at) != set(self._counted) or any(
            not self._counted[partition].start <= offset <= self._counted[partition].stop
            for partition, offset in at.items()
        ):
            self._feed.assign(at)
            self._counted = {partition: _Counted(offset, offset) for partition, offset in at.items()}
        for partition, offset in at.items():
            self._counted[partition].forget(offset)

    def left(self, places: Sequence[Place], ends: Mapping[Partition, int]) -> int:
        """How many messages lie behind the position; with offsets that have none, where there are too many to look."""
        offsets = sum(max(0, ends[place.topic, place.partition] - place.next) for place in places)
        if not offsets:
            return 0
        if offsets <= _COUNTED_MAX:
            self.look(places, ends, Limit(messages=_COUNTED_MAX), patient=True)
        left = 0
        for place in places:
            known, _, stop = self._behind(place)
            left += len(known) + max(0, ends[place.topic, place.partition] - stop)
        return left

    def slice(self, places: Sequence[Place], limit: Limit, turn: int) -> list[OffsetRange]:
        """The next messages, within the limit (but one at least), from each partition a fair share; by place.

        Empty where nothing was counted behind the places' offsets.
        """
        behind = [self._behind(place) for place in places]
        counts = np.array([len(offsets) for offsets, _, _ in behind], np.int64)
        total = int(counts.sum())
        if not total:
            return []
        most = max(1, limit.messages)
        quotas = counts if total <= most else np.maximum(counts * most // total, np.minimum(counts, 1))
        order = [(turn + step) % len(places) for step in range(len(places))]
        taken: dict[int, OffsetRange] = {}
        messages_left, bytes_left = most, limit.bytes
        for number in order:
            offsets, sizes, stop = behind[number]
            quota = min(int(quotas[number]), messages_left)
            if not quota:
                continue
            total_bytes = np.cumsum(sizes[:quota])
            kept = int(np.searchsorted(total_bytes, bytes_left, side="right"))
            if not kept and not taken:
                kept = 1
            if not kept:
                continue
            size = int(total_bytes[kept - 1])
            place = places[number]
            end = stop if kept == len(offsets) else int(offsets[kept - 1]) + 1
            where = OffsetRange(place.topic, place.partition, number, place.next, end, 0, 0)
            taken[number] = OffsetRange.of(where, offsets[:kept], size)
            messages_left -= kept
            bytes_left -= size
            if kept < quota and bytes_left <= 0:
                break
        return [taken[number] for number in sorted(taken)]

    def _behind(self, place: Place) -> tuple[Rows, Rows, int]:
        one = self._counted.get((place.topic, place.partition))
        if one is None or not one.start <= place.next <= one.stop:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), place.next
        offsets, sizes = one.all()
        first = int(np.searchsorted(offsets, place.next))
        return offsets[first:], sizes[first:], one.stop
