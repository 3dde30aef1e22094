"""What lies behind a subscription's position: which offsets have a message, and how large each is.

An offset may have none: compaction removed it, or it is a transaction's marker, or a transaction was aborted. So messages
are counted by a consumer of the driver, apart from the readers whose work is checked against it.

A partition that had no gap in a sample is not counted further: each of its offsets is taken to have a message. What is
expected of a range is then known by arithmetic; a reader that finds a gap refuses the range, it is counted (`count`), and
so is its partition from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from stormproof.core.base.arrow import Rows
from stormproof.core.contract.source import Limit
from stormproof.core.source.kafka.client import Cluster, Feed, OffsetGone, Partition
from stormproof.core.source.kafka.position import OffsetRange, PartitionPlace
from stormproof.core.source.kafka.reader import gone, offsets_of, runs_of

_MOST: Final = 10_000
_WAIT_S: Final = 0.25
_MORE_S: Final = 0.02
"""How long more messages are waited for where some are there: about as long as a fetch takes."""

_COUNTED_MAX: Final = 1_000
"""Up to this lag, messages are counted instead of offsets."""
SAMPLE: Final = 2_000
"""A partition in which so many messages come one after the other, without a gap, is taken to have none."""
ASSUMED_MAX: Final = 500_000
"""After so many offsets a sample is taken again: the messages may be larger by now."""


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

    @property
    def is_sample(self) -> bool:
        """Whether it is enough to tell whether the partition has gaps."""
        return self.messages >= SAMPLE

    @property
    def has_gaps(self) -> bool:
        """Whether an offset had no message."""
        return self.messages < self.stop - self.start

    @property
    def mean_bytes(self) -> float:
        """A message's size."""
        return float(np.mean(self.all()[1]))


@dataclass(frozen=True, slots=True)
class _Behind:
    """What may be opened of a partition: messages that were counted, or so many offsets that are taken for messages."""

    messages: int
    stop: int
    offsets: Rows | None = None
    sizes: Rows | None = None
    mean_bytes: float = 0.0

    def cut(
        self, place: PartitionPlace, number: int, most: int, most_bytes: int, *, one_at_least: bool
    ) -> OffsetRange | None:
        """At most so many messages and bytes of them."""
        where = OffsetRange(place.topic, place.partition, number, place.begin, place.next, 0, 0)
        if self.offsets is None or self.sizes is None:
            kept = min(most, max(int(most_bytes / max(self.mean_bytes, 1.0)), one_at_least))
            if kept <= 0:
                return None
            size = round(kept * self.mean_bytes)
            return replace(where, stop=place.next + kept, messages=kept, bytes=size, assumed=True)
        total = np.cumsum(self.sizes[:most])
        kept = max(int(np.searchsorted(total, most_bytes, side="right")), one_at_least)
        if not kept:
            return None
        end = self.stop if kept == len(self.offsets) else int(self.offsets[kept - 1]) + 1
        return OffsetRange.of(replace(where, stop=end), self.offsets[:kept], int(total[kept - 1]))


def count(cluster: Cluster, ranges: Sequence[OffsetRange]) -> dict[int, tuple[Rows, Rows]]:
    """Offsets and sizes of the messages that ranges have now, by place.

    Raises:
        PositionMismatch: retention removed what was to be read.
        StoreUnavailable: the cluster is away.
    """
    wanted = {(one.topic, one.partition): one for one in ranges if one.messages}
    lookahead = Lookahead(cluster)
    try:
        places = [PartitionPlace(one.topic, one.partition, one.first, one.first) for one in wanted.values()]
        every = Limit(messages=sum(one.stop - one.start for one in wanted.values()) + len(places) * _MOST, certain=True)
        lookahead.look(places, {partition: one.stop for partition, one in wanted.items()}, every, patient=True)
        return {one.place: lookahead.counted(partition, one.stop) for partition, one in wanted.items()}
    except OffsetGone as error:
        raise gone(wanted[error.partition]) from error
    finally:
        lookahead.close()


class Lookahead:
    """Counts ahead of the position. It reads each message once, as long as the position only moves on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._feed: Feed | None = None
        self._counted: dict[Partition, _Counted] = {}
        self._ends: Mapping[Partition, int] = {}
        self._even: dict[Partition, tuple[float, int]] = {}
        """Partitions that had no gap in a sample: a message's size there, and up to which offset that is believed."""
        self._gappy: set[Partition] = set()

    def found_gaps(self, partition: Partition) -> None:
        """A reader found offsets without a message: the partition is counted from now on."""
        self._gappy.add(partition)
        self._even.pop(partition, None)

    def assumed(self, places: Sequence[PartitionPlace]) -> list[PartitionPlace]:
        """The places that are not counted: each offset behind them is taken to have a message."""
        return [
            place
            for place in places
            if not place.empty and place.next < self._even.get((place.topic, place.partition), (0.0, 0))[1]
        ]

    def is_empty(self, place: PartitionPlace, end: int) -> bool:
        """Whether all up to an offset was counted, and none of it is a message."""
        behind = self._behind(place, assumes=False)
        return not behind.messages and behind.stop >= end

    def counted(self, partition: Partition, stop: int) -> tuple[Rows, Rows]:
        """Offsets and sizes that were counted below an offset."""
        offsets, sizes = self._counted[partition].all()
        end = int(np.searchsorted(offsets, stop))
        return offsets[:end], sizes[:end]

    def close(self) -> None:
        """Let the consumer go, and forget what was counted."""
        feed, self._feed, self._counted = self._feed, None, {}
        if feed is not None:
            feed.close()

    def look(
        self, places: Sequence[PartitionPlace], ends: Mapping[Partition, int], limit: Limit, *, patient: bool = False
    ) -> None:
        """Count what a slice of this limit needs, or all up to the ends; `patient`: however long that takes.

        Where the limit is not `certain`, a sample of a partition without gaps is enough.

        Raises:
            OffsetGone: retention removed what is next.
            StoreUnavailable: the cluster is away.
        """
        self._ends = ends
        self._follow(places if limit.certain else [p for p in places if p not in set(self.assumed(places))])
        feed, wanted, counted = self._feed, max(1, limit.messages), self._counted
        known = sum(one.messages for one in counted.values())
        while known < wanted and any(self._is_due(partition, limit) for partition in counted):
            assert feed is not None
            delivered = feed.next(_MOST, _MORE_S if known else _WAIT_S)
            for partition, messages in runs_of(delivered.messages):
                counted[partition].add(offsets_of(messages), np.fromiter(map(len, messages), np.int64, len(messages)))
                known += len(messages)
            for partition, end in delivered.ends.items():
                counted[partition].stop = max(counted[partition].stop, end)
            if known and not patient and not delivered.messages and not delivered.ends:
                break  # what is there is enough for a slice
        for partition, one in counted.items():
            if one.has_gaps:
                self.found_gaps(partition)
            elif one.is_sample and partition not in self._gappy:
                self._even[partition] = (one.mean_bytes, one.stop + ASSUMED_MAX)

    def _is_due(self, partition: Partition, limit: Limit) -> bool:
        """Whether more of a partition is to be counted."""
        one = self._counted[partition]
        is_known = not limit.certain and one.is_sample and not one.has_gaps and partition not in self._gappy
        return not is_known and one.stop < self._ends.get(partition, 0)

    def _follow(self, places: Sequence[PartitionPlace]) -> None:
        """Stand behind the position, wherever it is now."""
        at = {(place.topic, place.partition): place.next for place in places}
        if not at and not self._counted:
            return
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

    def left(self, places: Sequence[PartitionPlace], ends: Mapping[Partition, int]) -> int:
        """How many messages lie behind the position; with offsets that have none, where there are too many to look."""
        offsets = sum(max(0, ends[place.topic, place.partition] - place.next) for place in places)
        if not offsets:
            return 0
        if offsets <= _COUNTED_MAX:
            self.look(places, ends, Limit(messages=_COUNTED_MAX), patient=True)
        left = 0
        for place in places:
            behind = self._behind(place, assumes=False)
            left += behind.messages + max(0, ends[place.topic, place.partition] - behind.stop)
        return left

    def slice(self, places: Sequence[PartitionPlace], limit: Limit, turn: int) -> list[OffsetRange]:
        """The next messages, within the limit (but one at least), from each partition a fair share; by place.

        Empty where nothing is known behind the places' offsets.
        """
        behind = [self._behind(place, assumes=not limit.certain) for place in places]
        counts = np.array([one.messages for one in behind], np.int64)
        total = int(counts.sum())
        if not total:
            return []
        most = max(1, limit.messages)
        quotas = counts if total <= most else np.maximum(counts * most // total, np.minimum(counts, 1))
        order = [(turn + step) % len(places) for step in range(len(places))]
        taken: dict[int, OffsetRange] = {}
        messages_left, bytes_left = most, limit.bytes
        for number in order:
            quota = min(int(quotas[number]), messages_left)
            if not quota:
                continue
            cut = behind[number].cut(places[number], number, quota, bytes_left, one_at_least=not taken)
            if cut is None:
                continue
            taken[number] = cut
            messages_left -= cut.messages
            bytes_left -= cut.bytes
            if cut.messages < quota and bytes_left <= 0:
                break
        return [taken[number] for number in sorted(taken)]

    def _behind(self, place: PartitionPlace, *, assumes: bool) -> _Behind:
        partition = (place.topic, place.partition)
        if assumes and partition in self._even and self.assumed([place]):
            mean_bytes, until = self._even[partition]
            end = min(self._ends.get(partition, 0), until)
            return _Behind(max(0, end - place.next), end, mean_bytes=mean_bytes)
        one = self._counted.get(partition)
        if one is None or not one.start <= place.next <= one.stop:
            return _Behind(0, place.next, np.zeros(0, np.int64), np.zeros(0, np.int64))
        offsets, sizes = one.all()
        first = int(np.searchsorted(offsets, place.next))
        return _Behind(len(offsets) - first, one.stop, offsets[first:], sizes[first:])
