"""Ranges of a partition's offsets, and which of them have a message: compaction and transactions leave gaps.

A message's number has the partition's place in the subscription above, and the offset below.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.source import Expectation, ShownIds
from stormproof.core.pending.rows import At, expectation_of, expectation_of_range

OFFSET_BITS: Final = 48
"""A partition that takes a million messages a second is full after nine years."""
PLACES_MAX: Final = 1 << (62 - OFFSET_BITS)
"""Partitions of one subscription."""
_OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1


def number_of(place: int, offset: int) -> int:
    """A message's number."""
    return place << OFFSET_BITS | offset


def place_and_offset(number: int) -> tuple[int, int]:
    """What a message's number is made of."""
    return number >> OFFSET_BITS, number & _OFFSET_MASK


@dataclass(frozen=True, slots=True)
class PlaceIds(ShownIds):
    """``PLACE-OFFSET``."""

    def shown(self, numbers: pa.Array, origins: pa.Array) -> pa.Array:
        """The origin is the place."""
        offsets = pc.bit_wise_and(numbers, pa.scalar(_OFFSET_MASK, pa.int64()))
        return pc.binary_join_element_wise(pc.cast(origins, pa.string()), pc.cast(offsets, pa.string()), "-")


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets from `start` up to but not including `stop` of one partition, of which `messages` have a message.

    `gaps` None: these are the first ones. Else it is the distance of each from the one before, less one: 64-bit
    little-endian numbers, compressed, in base64. `bytes` are those of the payloads. `assumed`: nobody counted; every offset
    is taken to have a message, the bytes are an estimate, and a reader refuses the range where that is wrong.
    """

    topic: str
    partition: int
    place: int
    start: int
    stop: int
    messages: int
    bytes: int
    gaps: str | None = None
    assumed: bool = False

    @classmethod
    def of(cls, where: OffsetRange, offsets: Rows, size: int, *, assumed: bool = False) -> OffsetRange:
        """The range `where` with these offsets (ascending) as its messages."""
        gaps = None
        if len(offsets) and int(offsets[-1]) - where.start + 1 != len(offsets):
            steps = np.diff(offsets, prepend=where.start - 1) - 1
            gaps = base64.b64encode(zlib.compress(steps.astype("<i8").tobytes(), 1)).decode()
        return replace(where, messages=len(offsets), bytes=size, gaps=gaps, assumed=assumed)

    @property
    def offsets(self) -> Rows:
        """The messages' offsets, ascending."""
        if self.gaps is None:
            return np.arange(self.start, self.start + self.messages, dtype=np.int64)
        steps = np.frombuffer(zlib.decompress(base64.b64decode(self.gaps)), "<i8").astype(np.int64)
        return np.cumsum(steps + 1) + (self.start - 1)

    @property
    def ids(self) -> Rows:
        """The messages' numbers, ascending."""
        return self.offsets + number_of(self.place, 0)

    @property
    def first(self) -> int:
        """The first message's offset: what lies before it may be gone."""
        return self.start if self.gaps is None else int(self.offsets[0])

    @property
    def last(self) -> int:
        """The last message's offset; one before `start` where there is none."""
        return self.start + self.messages - 1 if self.gaps is None else int(self.offsets[-1])

    def head(self, messages: int, size: int) -> OffsetRange:
        """Its first messages; it ends behind the last of them."""
        if self.gaps is None:
            kept_messages = min(messages, self.messages)
            return replace(self, stop=self.start + kept_messages, messages=kept_messages, bytes=size)
        kept = self.offsets[:messages]
        return OffsetRange.of(replace(self, stop=int(kept[-1]) + 1), kept, size, assumed=self.assumed)

    def rest(self, messages: int, size: int) -> OffsetRange:
        """What `head` of as many messages leaves."""
        if self.gaps is None:
            return replace(self, start=self.start + messages, messages=self.messages - messages, bytes=size)
        offsets = self.offsets
        later = replace(self, start=int(offsets[messages - 1]) + 1)
        return OffsetRange.of(later, offsets[messages:], size, assumed=self.assumed)

    def between(self, first: int, stop: int) -> OffsetRange:
        """The messages from one ordinal up to another, which is greater."""
        part = self if stop == self.messages else self.head(stop, 0)
        return part if not first else part.rest(first, 0)

    def to_json(self) -> list[Json]:
        """For the ledger."""
        found: list[Json] = [self.topic, self.partition, self.place, self.start, self.stop, self.messages, self.bytes]
        return [*found, self.gaps, True] if self.assumed else [*found, self.gaps]


def ranges_of(at: Mapping[str, Json]) -> tuple[OffsetRange, ...]:
    """The ranges of a slice, by place.

    Raises:
        UsageError: it is no slice of a Kafka source.
    """
    found = ranges_or_none(at)
    if found is None:
        raise UsageError(f"not ranges of a Kafka source: {sorted(at)}")
    return found


def ranges_or_none(at: Mapping[str, Json]) -> tuple[OffsetRange, ...] | None:
    """The ranges of a slice; None where it is of another source."""
    ranges = at.get("ranges")
    if not isinstance(ranges, list):
        return None
    found: list[OffsetRange] = []
    for one in ranges:
        match one:
            case [
                str(topic), int(partition), int(place), int(start), int(stop), int(messages), int(size), None | str(), *more
            ] if more in ([], [True]):  # fmt: skip
                gaps = one[7]
                found.append(
                    OffsetRange(
                        topic=topic,
                        partition=partition,
                        place=place,
                        start=start,
                        stop=stop,
                        messages=messages,
                        bytes=size,
                        gaps=gaps if isinstance(gaps, str) else None,
                        assumed=bool(more),
                    )
                )
            case _:
                return None
    return tuple(found)


def at_of_ranges(ranges: Sequence[OffsetRange], reach: Json) -> At:
    """A slice: its ranges, and how far the subscription was in each partition behind it."""
    return {"ranges": [one.to_json() for one in ranges], "reach": reach}


def ids_of(ranges: Sequence[OffsetRange]) -> Rows:
    """The numbers of all messages of a slice, ascending."""
    return np.concatenate([one.ids for one in ranges]) if ranges else np.zeros(0, np.int64)


def expectation_of_ranges(
    ranges: Sequence[OffsetRange], seed: int, excluded: frozenset[int] = frozenset()
) -> Expectation:
    """Number and XOR of the tokens of a slice's messages without those left out; ranges without gaps need no memory."""
    messages, xor = 0, 0
    for one in ranges:
        if one.gaps is None:
            first = number_of(one.place, one.start)
            part = expectation_of_range(first, first + one.messages, seed, excluded)
        else:
            part = expectation_of(one.ids, seed, excluded)
        messages, xor = messages + part.messages, xor ^ part.xor
    return Expectation(messages, xor)
