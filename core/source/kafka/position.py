"""How far a subscription is in each partition, and which topics they are of: a Kafka source's position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stormproof.core.errors import Json, UsageError
from stormproof.core.pending.rows import At

LOST_MAX: Final = 1_000
"""Lost ranges on record; above that the oldest of a partition are taken together."""


@dataclass(frozen=True, slots=True)
class Place:
    """One partition: the offset that the subscription began with, and the first one that was never opened."""

    topic: str
    partition: int
    first: int
    next: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets that retention removed before they were opened; `at` is when that was seen (ISO 8601)."""

    place: int
    start: int
    stop: int
    at: str


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
    lost: tuple[Lost, ...] = ()
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

    def moved(self, to: Mapping[int, int]) -> KafkaPosition:
        """With other offsets to open next, by place."""
        return replace(
            self,
            places=tuple(replace(place, next=to.get(number, place.next)) for number, place in enumerate(self.places)),
        )

    def without(self, lost: Sequence[Lost]) -> KafkaPosition:
        """With lost ranges on record, and places behind them."""
        kept = [*self.lost, *lost]
        if len(kept) > LOST_MAX:
            merged: dict[int, Lost] = {}
            for one in kept[: len(lost) + 1]:
                before = merged.get(one.place, one)
                merged[one.place] = replace(one, start=min(before.start, one.start), stop=max(before.stop, one.stop))
            kept = [*merged.values(), *kept[len(lost) + 1 :]]
        return replace(self.moved({one.place: one.stop for one in lost}), lost=tuple(kept))

    def to_json(self) -> At:
        """For the store."""
        return {
            "cluster": self.cluster,
            "topics": dict(self.topics),
            "places": [[one.topic, one.partition, one.first, one.next] for one in self.places],
            "lost": [[one.place, one.start, one.stop, one.at] for one in self.lost],
            "ends": list(self.ends),
            "slices": self.slices,
            "waits": [[one.place, one.offset, one.since] for one in self.waits],
        }

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
                    tuple(_lost(one) for one in _list(at.get("lost"))),
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
        case [str(topic), int(partition), int(first), int(next_)]:
            return Place(topic, partition, first, next_)
        case _:
            raise UsageError(f"not a partition's place: {value}")


def _lost(value: Json) -> Lost:
    match value:
        case [int(place), int(start), int(stop), str(at)]:
            return Lost(place, start, stop, at)
        case _:
            raise UsageError(f"not a lost range: {value}")


def _waits(value: Json) -> Waits:
    match value:
        case [int(place), int(offset), str(since)]:
            return Waits(place, offset, since)
        case _:
            raise UsageError(f"not a place that waits: {value}")
