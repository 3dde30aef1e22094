"""How far a subscription is in each partition, and which offsets a slice has: compaction and transactions leave gaps.

A message's number has the partition's place in the subscription above, and the offset below. What the audit asks of a Kafka
source follows from ranges of offsets by partition, and from what retention took.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from types import NoneType
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows, pc
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.source import Expectation, ShownIds
from stormproof.core.pending.connector import Finding, OpenedSlice, SliceAudit, overlaps_and_gaps
from stormproof.core.pending.continuity import Continuity, ContinuityLook, looks_in, with_looks
from stormproof.core.pending.rows import At, expectation_of, expectation_of_range

NOTHING: Final = -1
GONE: Final = -2
"""In place of a checksum: the message was removed before it was opened."""


@dataclass(frozen=True, slots=True)
class PartitionPlace:
    """One partition: the offset that the subscription began with, and the first one that was never opened.

    `last` is the offset of the last message that was opened, or was seen to be removed, `checksum` that message's, and
    `epoch` the partition's leader epoch when the place came to `next`; `NOTHING` where it is not known. They tell a
    partition that lost its end and was filled again. Nothing before the place has a later timestamp than `newest`
    (milliseconds, `NOTHING` where it is not known). The `empty` offsets right before `next` have no message, as those of
    transactions that were aborted, and are in no slice; the next one begins with them.
    """

    topic: str
    partition: int
    first: int
    next: int
    last: int = NOTHING
    checksum: int = NOTHING
    epoch: int = NOTHING
    empty: int = 0
    newest: int = NOTHING

    @property
    def begin(self) -> int:
        """The first offset that is in no slice."""
        return self.next - self.empty

    @property
    def is_marked(self) -> bool:
        """Whether something that was seen of the partition lies before the place, which it has to have still."""
        return self.next > 0 and (self.last, self.epoch) != (NOTHING, NOTHING)

    @property
    def is_behind_last(self) -> bool:
        """Whether `last` is right before the place. A transaction's marker may be between, of which `last` says nothing."""
        return self.last != NOTHING and self.next == self.last + 1


@dataclass(frozen=True, slots=True)
class Waits:
    """A place that has waited behind a producer's open transaction, at this offset, since then (ISO 8601)."""

    place: int
    offset: int
    since: str


@dataclass(frozen=True, slots=True)
class KafkaPosition:
    """A subscription's places, in the order in which their partitions were found, and its topics by their ids.

    `ends` are the partitions' ends as they were last seen: what lies between is the lag.
    """

    cluster: str
    topics: Mapping[str, str]
    places: tuple[PartitionPlace, ...]
    looks: tuple[ContinuityLook, ...] = ()
    ends: tuple[int, ...] = ()
    slices: int = 0
    waits: tuple[Waits, ...] = ()

    @property
    def reach(self) -> list[Json]:
        """The offset behind what was opened, by place."""
        return [place.next for place in self.places]

    @property
    def lag(self) -> int:
        """Offsets between what was opened and the ends; those without a message are among them."""
        return sum(max(0, end - place.next) for place, end in zip(self.places, self.ends, strict=False))

    def with_places(self, changed: Mapping[int, PartitionPlace]) -> KafkaPosition:
        """With these places in place of those of their numbers."""
        return replace(self, places=tuple(changed.get(number, place) for number, place in enumerate(self.places)))

    def noted(self, looks: Sequence[ContinuityLook], epochs: Mapping[int, int]) -> KafkaPosition:
        """With these on record, and places behind what was removed; `epochs` are the leader epochs then, by place."""
        on_record = looks_in(with_looks(self.to_json(), looks))
        moved = {
            one.place: replace(
                self.places[one.place],
                next=next_,
                last=next_ - 1,
                checksum=GONE,
                epoch=epochs[one.place],
                empty=0,
                newest=NOTHING,
            )
            for one in looks
            if one.verdict is Continuity.REMOVED
            for next_ in [int(one.before)]
        }
        return replace(self.with_places(moved), looks=tuple(on_record))

    def to_json(self) -> At:
        """For the store."""
        at: At = {
            "cluster": self.cluster,
            "topics": dict(self.topics),
            "places": [[*astuple(one)] for one in self.places],
            "ends": list(self.ends),
            "slices": self.slices,
            "waits": [[one.place, one.offset, one.since] for one in self.waits],
        }
        return with_looks(at, self.looks)

    @classmethod
    def of(cls, at: Mapping[str, Json]) -> KafkaPosition:
        """What `to_json` wrote.

        Raises:
            UsageError: it is no position of a Kafka source.
        """
        match at:
            case {"cluster": str(cluster), "topics": dict(topics), "places": list(places)}:
                ends = at.get("ends")
                slices = at.get("slices")
                return cls(
                    cluster,
                    {topic: str(id_) for topic, id_ in topics.items()},
                    tuple(_place(one) for one in places),
                    tuple(looks_in(dict(at))),
                    tuple(end for end in _list(ends) if isinstance(end, int)),
                    slices if isinstance(slices, int) else 0,
                    tuple(_waits(one) for one in _list(at.get("waits"))),
                )
            case _:
                raise UsageError(f"not a position of a Kafka source: {sorted(at)}")


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _place(value: Json) -> PartitionPlace:
    match value:
        case [str(topic), int(partition), *numbers] if len(numbers) == len(fields(PartitionPlace)) - 2:
            return PartitionPlace(topic, partition, *(number for number in numbers if isinstance(number, int)))
        case _:
            raise UsageError(f"not a partition's place: {value}")


def _waits(value: Json) -> Waits:
    match value:
        case [int(place), int(offset), str(since)]:
            return Waits(place, offset, since)
        case _:
            raise UsageError(f"not a place that waits: {value}")


# ---- ranges of a partition's offsets, and which of them have a message

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
    found = [_range(one) for one in ranges] if isinstance(ranges, list) else [None]
    whole = [one for one in found if one is not None]
    return tuple(whole) if len(whole) == len(found) else None


_RANGE: Final[tuple[type | tuple[type, ...], ...]] = (str, int, int, int, int, int, int, (str, NoneType), bool)
"""What `OffsetRange.to_json` writes; the last one only where it is true."""


def _range(value: Json) -> OffsetRange | None:
    parts: list[Any] = value if isinstance(value, list) and len(value) in (8, 9) else []
    is_range = parts and all(isinstance(part, kind) for part, kind in zip(parts, _RANGE, strict=False))
    return OffsetRange(*parts) if is_range else None


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


# ---- what the audit asks


class KafkaAudit(SliceAudit):
    """One subscription of a Kafka source, by what the store knows of it; the cluster is not asked."""

    def can_read(self, at: At) -> bool:
        """Whether it is ranges of offsets."""
        return ranges_or_none(at) is not None

    def reach(self, at: At) -> int:
        """How many offsets of all partitions were opened up to this slice: it only grows."""
        return sum(_reach(at))

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether one of the ranges has a message with this offset."""
        place, offset = place_and_offset(id_)
        return any(
            one.place == place and bool(np.isin(offset, one.offsets))
            for one in ranges_or_none(at) or ()
            if one.start <= offset < one.stop
        )

    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the offset lies behind the position in its partition."""
        place, offset = place_and_offset(id_)
        places = KafkaPosition.of(position).places
        return place >= len(places) or offset >= places[place].next

    def unopened(self, position: At) -> tuple[int, float | None]:
        """The lag when a slice was last opened; offsets without a message are counted, too."""
        return (KafkaPosition.of(position).lag if position else 0), None

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """In each partition, the ranges that were taken and those that were lost must cover all that was handed out."""
        try:
            now = KafkaPosition.of(position) if position else None
        except UsageError as error:
            return [Finding(f"the position of source {self._who.source} cannot be read: {error.message}")]
        known: dict[int, int] = defaultdict(int)
        for at in trusted:
            for number, reached in enumerate(_reach(at)):
                known[number] = max(known[number], reached)
        pieces: dict[int, list[tuple[OffsetRange, OpenedSlice]]] = defaultdict(list)
        for one in held:
            for part in ranges_or_none(one.at) or () if one.taken else ():
                pieces[part.place].append((part, one))
        findings: list[Finding] = []
        places = now.places if now is not None else ()
        for number in sorted({*pieces, *range(len(places))}):
            place = places[number] if number < len(places) else None
            lost = [
                (int(one.behind) + 1, int(one.before))
                for one in (now.looks if now is not None else ())
                if one.place == number and one.verdict is Continuity.REMOVED
            ]
            findings += self._of_place(place, pieces[number], known[number], lost)
        return findings

    def _of_place(
        self,
        place: PartitionPlace | None,
        pieces: Sequence[tuple[OffsetRange, OpenedSlice]],
        known: int,
        lost: Sequence[tuple[int, int]],
    ) -> list[Finding]:
        ranges = [(part.start, part.stop, one) for part, one in pieces]
        ranges += [(start, stop, OpenedSlice({}, "a lost range", None, taken=True)) for start, stop in lost]
        what, missed = f"offsets of {_where(place)}", partial(self._missed, place)
        findings, covered = overlaps_and_gaps(ranges, 0 if place is None else place.first, known, what, missed)
        end = max(covered, known)
        if place is not None and end < place.begin:
            findings.append(missed(end, place.begin, "behind the last batch", None))
        return findings

    def _missed(self, place: PartitionPlace | None, start: int, stop: int, where: str, txid: int | None) -> Finding:
        return Finding(
            f"source {self._who.source}: offsets {start} to {stop - 1} of {_where(place)} {where} were handed out to no "
            "batch",
            txid,
        )


def _where(place: PartitionPlace | None) -> str:
    return "an unknown partition" if place is None else f"topic {place.topic}, partition {place.partition}"


def _reach(at: At) -> list[int]:
    """The offset behind what was opened up to a slice, by place."""
    reach = at.get("reach")
    return [one for one in reach if isinstance(one, int)] if isinstance(reach, list) else []
