"""How far a subscription is in each partition, and which topics they are of: a Kafka source's position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Final

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.pending.continuity import Continuity, Look, looks_in, with_looks
from stormproof.core.pending.rows import At

NOTHING: Final = -1
GONE: Final = -2
"""In place of a checksum: the message was removed before it was opened."""


@dataclass(frozen=True, slots=True)
class Place:
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
    places: tuple[Place, ...]
    looks: tuple[Look, ...] = ()
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

    def with_places(self, changed: Mapping[int, Place]) -> KafkaPosition:
        """With these places in place of those of their numbers."""
        return replace(self, places=tuple(changed.get(number, place) for number, place in enumerate(self.places)))

    def noted(self, looks: Sequence[Look], epochs: Mapping[int, int]) -> KafkaPosition:
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


def _place(value: Json) -> Place:
    match value:
        case [str(topic), int(partition), *numbers] if len(numbers) == len(fields(Place)) - 2:
            return Place(topic, partition, *(number for number in numbers if isinstance(number, int)))
        case _:
            raise UsageError(f"not a partition's place: {value}")


def _waits(value: Json) -> Waits:
    match value:
        case [int(place), int(offset), str(since)]:
            return Waits(place, offset, since)
        case _:
            raise UsageError(f"not a place that waits: {value}")
