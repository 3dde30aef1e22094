"""What a cluster has of a source's topics: which they are, how far their partitions go, and what is lost of them."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.contract.source import Limit
from stormproof.core.pending.continuity import Continuity, ContinuityLook, Rules, at_least
from stormproof.core.source.kafka.client import (
    Asking,
    Cluster,
    Feed,
    OffsetGone,
    Partition,
    Start,
    Topic,
    Topics,
    start_offset,
)
from stormproof.core.source.kafka.lookahead import Lookahead
from stormproof.core.source.kafka.position import (
    GONE,
    NOTHING,
    PLACES_MAX,
    KafkaPosition,
    OffsetRange,
    PartitionPlace,
    Waits,
)
from stormproof.core.source.kafka.reader import messages_in, runs_of

log = logging.getLogger("stormproof.kafka")

_MOST: Final = 1_000
_WAIT_S: Final = 0.25

OPEN_TOLD_S: Final = 10.0
"""A partition that waits behind an open transaction for so long is logged."""


@dataclass(slots=True)
class _Open:
    """An open transaction: the offset at which its partition waits, and since when."""

    end: int
    since_s: float
    since: str
    is_told: bool = False


class Partitions:
    """Looks at a source's topics for its driver. It connects at its first use, and a fork makes connections of its own.

    `name` is the source's, `clock` None the system's, and `group` the consumer group that is told how far it is.
    """

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        topics: Topics,
        start: Start,
        rules: Rules,
        interval_s: float,
        clock: Clock | None = None,
        group: str | None = None,
    ) -> None:
        self._name = name
        self._group = group
        self._where = f"source {name}"
        self._rules = rules
        self._cluster = cluster
        self._topics = topics
        self._start = start
        self._interval_s = interval_s
        self._clock: Clock | None = clock
        self.asking = Asking(cluster)
        self.lookahead = Lookahead(cluster)
        self.ends: dict[Partition, int] = {}
        """The partitions' ends as they were last seen."""
        self.newest: dict[Partition, int] = {}
        """The highest timestamps in partitions when it was last seen what lies behind the position."""
        self._searched_s = -math.inf
        self._cluster_id = ""
        self._found: dict[str, Topic | None] = {}
        self._noted: list[ContinuityLook] = []
        self._removed_in: dict[int, int] = {}
        """The leader epochs when messages were seen to be removed, by place."""
        self._compared: dict[Partition, int] = {}
        """The leader epochs under which partitions were compared with what was opened of them."""
        self._open: dict[Partition, _Open] = {}

    def close(self) -> None:
        """Let connections go; the next call makes others."""
        self.lookahead.close()
        self.asking.close()

    def left(self, position: KafkaPosition) -> int:
        """How many messages lie behind a position; where the cluster is away, by the ends that were last seen."""
        active = self.active(position)
        try:
            ends = self.asking.ends((place.topic, place.partition) for place in active)
            return self.lookahead.left(active, ends)
        except (StoreUnavailable, OffsetGone):
            left = (self.ends.get((place.topic, place.partition), place.next) - place.next for place in active)
            return sum(max(0, one) for one in left)

    def search(self) -> None:
        """Ask which topics and partitions there are."""
        clock = self._clock = self._clock or SystemClock()
        names = self._topics.literal
        if self._topics.has_pattern or not self._cluster_id:
            self._cluster_id, there = self.asking.names()
            names |= {topic for topic in there if self._topics.matches(topic)}
        self._found = {**self.asking.topics(names)}
        self._searched_s = clock.monotonic_s()

    def start(self) -> KafkaPosition:
        """The position of a new subscription, where the argument `start` says.

        Raises:
            UsageError: a topic is not there, or has not as many messages.
        """
        for topic in sorted(self._topics.literal):
            if self._found.get(topic) is None:
                raise UsageError(
                    f"{self._where}: no topic {topic} at {self._cluster.servers}; make it first: kafka-topics.sh --create "
                    f"--topic {topic} --bootstrap-server {self._cluster.servers}",
                    topic=topic,
                )
        found = {topic: about for topic, about in self._found.items() if about is not None}
        partitions = [(topic, number) for topic, about in sorted(found.items()) for number in about.partitions]
        first = self._first(partitions)
        newest = self.asking.newest(self.asking.ends(partitions))  # and their leader epochs
        epochs = self.asking.epochs
        places = tuple(
            PartitionPlace(
                *one, first[one], first[one], epoch=epochs.get(one, NOTHING), newest=newest.get(one, NOTHING)
            )
            for one in partitions
        )
        topics = {topic: about.id for topic, about in found.items()}
        return KafkaPosition(self._cluster_id, topics, places)

    def _first(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        if self._start == "latest":
            return self.asking.ends(partitions)
        if isinstance(self._start, datetime):
            return self.asking.at_time(partitions, self._start)
        first = self.asking.earliest(partitions)
        if isinstance(self._start, Mapping):
            ends = self.asking.ends(partitions)
            for one in partitions:
                given = start_offset(self._start, *one)
                if given is None:
                    continue
                if given > ends[one]:
                    raise UsageError(
                        f"{self._where}: start names offset {given} of partition {one[1]} of topic {one[0]}, which ends at "
                        f"{ends[one]}",
                        argument="start",
                    )
                first[one] = given
        return first

    def look(self, known: KafkaPosition, limit: Limit) -> None:
        """See how far the partitions go, and what lies behind a position: enough for a slice of this limit.

        Raises:
            PositionMismatch: messages were removed before they were opened (on_gap), or a topic is another one now.
            StoreUnavailable: the cluster is away.
        """
        clock = self._clock = self._clock or SystemClock()
        is_due = clock.monotonic_s() - self._searched_s >= self._interval_s
        if is_due:
            self.search()
        for _ in range(len(known.places) + len(self._found) + 2):  # each time another partition has lost messages
            position = self.as_found(known)
            active = self.active(position)
            self.ends = self.asking.ends((place.topic, place.partition) for place in active)
            self._compare(position)
            if is_due and self._cluster.isolation == "read_committed":
                self._note_open(clock.monotonic_s())
                is_due = False
            behind = [place for place in active if self.ends[place.topic, place.partition] != place.next]
            if not behind:
                return
            self.search()  # a topic that was made again has other messages at the same offsets
            self.as_found(known)
            try:
                self._require_there(self.lookahead.assumed(active))
                self.lookahead.look(active, self.ends, limit)
            except OffsetGone as error:
                self.lookahead.close()
                self._missing(next(p for p in position.places if (p.topic, p.partition) == error.partition), position)
            else:
                self._require_within({position.places.index(place): place for place in active})
                self.newest = self.asking.newest(
                    self.ends
                )  # behind what was counted, which may be more than up to the ends
                return

    def _note_open(self, now_s: float) -> None:
        """Log which partitions have waited behind an open transaction for long; each once, and when it goes on."""
        last = self.asking.ends(self.ends, committed=False)
        for partition, end in self.ends.items():
            topic, number = partition
            stays = self._open.get(partition)
            if stays is not None and (last[partition] <= end or stays.end != end):
                if stays.is_told:
                    log.warning(
                        "topic %s, partition %s goes on: the transaction at offset %s has ended",
                        topic,
                        number,
                        stays.end,
                    )
                del self._open[partition]
                stays = None
            if last[partition] <= end:
                continue
            stays = self._open.setdefault(
                partition, stays or _Open(end, now_s, datetime.now(UTC).isoformat(timespec="seconds"))
            )
            if not stays.is_told and now_s - stays.since_s >= OPEN_TOLD_S:
                stays.is_told = True
                log.warning(
                    "%s: topic %s, partition %s has waited at offset %s for %.0f seconds, with %s offsets behind it: a "
                    "producer's transaction is open there. Its producer ends it, or the broker after the producer's "
                    "transaction.timeout.ms; kafka-transactions.sh find-hanging names one that nobody ends",
                    self._where,
                    topic,
                    number,
                    end,
                    now_s - stays.since_s,
                    last[partition] - end,
                )

    def waits(self, position: KafkaPosition) -> tuple[Waits, ...]:
        """The places that have waited behind an open transaction for `OPEN_TOLD_S`."""
        found = [
            (number, self._open.get((place.topic, place.partition))) for number, place in enumerate(position.places)
        ]
        return tuple(Waits(number, one.end, one.since) for number, one in found if one is not None and one.is_told)

    def _require_there(self, places: Sequence[PartitionPlace]) -> None:
        """Raise OffsetGone where retention has removed what is next; it is for places whose messages nobody counts."""
        first = self.asking.earliest((place.topic, place.partition) for place in places)
        for place in places:
            if place.next < first[place.topic, place.partition]:
                raise OffsetGone((place.topic, place.partition))

    def _compare(self, position: KafkaPosition) -> None:
        """See that partitions still have what lies before their places: once a run, and where their leader changed or a
        connection ended.
        """
        if self.asking.was_cut():
            self._compared.clear()
        epochs = self.asking.epochs
        due = {
            number: place
            for number, place in enumerate(position.places)
            if (partition := (place.topic, place.partition)) in self.ends
            and self._compared.get(partition) != epochs.get(partition, NOTHING)
        }
        marked = {number: place for number, place in due.items() if place.is_marked}
        if marked:
            self._require_within(marked)
            self._noted += self._rules.decided(self._told(marked))
        for place in due.values():
            partition = place.topic, place.partition
            self._compared[partition] = epochs.get(partition, NOTHING)

    def _told(self, marked: Mapping[int, PartitionPlace]) -> list[ContinuityLook]:
        """What the last message tells of a partition; where it is gone, or not right before the place, leader epochs and
        timestamps do. A broker that was set back as a whole may come to the same epochs, and a producer may give old times:
        where compaction took the last message, a consumer group that has the place shows that the broker was not set back.
        """
        first = self.asking.earliest((place.topic, place.partition) for place in marked.values())
        kept = {n: place for n, place in marked.items() if first[place.topic, place.partition] <= place.last}
        found = self._last_of({n: place for n, place in kept.items() if place.checksum >= 0})
        rewound = {n for n, checksum in found.items() if checksum != marked[n].checksum}
        # A leader's log never begins earlier than it did.
        rewound |= {n for n, place in kept.items() if place.checksum == GONE and self._is_leader_of(place)}
        left = {
            n: place for n, place in marked.items() if n not in rewound and not (n in found and place.is_behind_last)
        }
        known = {n: place for n, place in left.items() if place.epoch != NOTHING}
        rewound.update(self._truncated({n: p for n, p in known.items() if first[p.topic, p.partition] <= p.next}))
        rewound |= self._has_later(left)
        compacted = {n: p for n, p in left.items() if n in kept and n not in found and p.checksum >= 0}
        doubted = {n for n, p in left.items() if p.epoch == NOTHING} | (self._untold(compacted) - rewound)
        looks = [
            ContinuityLook(
                Continuity.REWOUND,
                f"{_named(marked[number])} has other messages than were there up to offset {marked[number].next - 1}: the "
                "cluster lost messages that it had given out, and gives their offsets again",
                place=number,
            )
            for number in sorted(rewound)
        ]
        return looks + [
            ContinuityLook(
                Continuity.UNKNOWN,
                f"{_named(place)}: whether the cluster lost messages and gave their offsets again cannot be told: the one "
                f"at offset {place.next - 1} is not there, and "
                + ("the broker tells no leader epochs" if place.epoch == NOTHING else "the consumer group has less"),
                behind=str(place.last),
                place=number,
            )
            for number in sorted(doubted)
            for place in [left[number]]
        ]

    def _has_later(self, places: Mapping[int, PartitionPlace]) -> set[int]:
        """The places before which there is a message with a later timestamp than any had."""
        numbers = {(p.topic, p.partition): n for n, p in places.items() if p.newest != NOTHING}
        later = self.asking.first_at({one: places[n].newest + 1 for one, n in numbers.items()})
        return {n for one, n in numbers.items() if 0 <= later[one] < places[n].next}

    def _untold(self, places: Mapping[int, PartitionPlace]) -> set[int]:
        """The places that the consumer group does not have: that of a broker that was set back has less."""
        numbers = {(p.topic, p.partition): n for n, p in places.items()}
        told = self.asking.told(self._group, [*numbers]) if self._group and numbers else {}
        return {n for one, n in numbers.items() if told.get(one, NOTHING) < places[n].next}

    def _is_leader_of(self, place: PartitionPlace) -> bool:
        return self.asking.epochs.get((place.topic, place.partition), NOTHING) == place.epoch != NOTHING

    def _truncated(self, places: Mapping[int, PartitionPlace]) -> list[int]:
        """The places before which the broker's log was cut, by its history of leader epochs."""
        left = {(place.topic, place.partition): number for number, place in places.items()}
        cut: list[int] = []
        if not left:
            return cut
        feed = Feed(self._cluster)
        try:
            while left:
                try:
                    feed.assign(
                        {one: places[number].next for one, number in left.items()},
                        {one: places[number].epoch for one, number in left.items()},
                    )
                    answered = set[Partition]()
                    while not left.keys() <= answered:
                        delivered = feed.next(_MOST, _WAIT_S)
                        answered |= {partition for partition, _ in runs_of(delivered.messages)} | delivered.ends.keys()
                    return cut
                except OffsetGone as error:
                    cut.append(left.pop(error.partition))
        finally:
            feed.close()
        return cut

    def _last_of(self, places: Mapping[int, PartitionPlace]) -> dict[int, int]:
        """Checksums of the last messages that were opened, by place; of those that are there."""
        ranges = [
            OffsetRange(place.topic, place.partition, number, place.last, place.last + 1, 1, 0)
            for number, place in places.items()
        ]
        read = messages_in(self._cluster, ranges)
        return {number: _checksum(messages[0]) for number, messages in read.items() if messages}

    def marks(self, position: KafkaPosition) -> KafkaPosition:
        """The position, behind offsets without a message where nothing else lies behind it; there with checksums of the last
        messages that were opened.
        """
        epochs = self.asking.epochs
        position = position.with_places(
            {
                n: replace(
                    place,
                    next=end,
                    empty=end - place.begin,
                    epoch=epochs.get(partition, NOTHING),
                    newest=self.newest.get(partition, NOTHING),
                )
                for n, place in enumerate(position.places)
                if (end := self.ends.get(partition := (place.topic, place.partition), 0)) > place.next
                and self.lookahead.is_empty(place, end)
            }
        )
        missing = {
            number: place
            for number, place in enumerate(position.places)
            if place.last != NOTHING == place.checksum and self.ends.get((place.topic, place.partition)) == place.next
        }
        if not missing:
            return position
        first = self.asking.earliest((place.topic, place.partition) for place in missing.values())
        missing = {n: place for n, place in missing.items() if first[place.topic, place.partition] <= place.last}
        found = self._last_of(missing)
        return position.with_places({n: replace(missing[n], checksum=checksum) for n, checksum in found.items()})

    def _require_within(self, active: Mapping[int, PartitionPlace]) -> None:
        """Refuse a partition that ends before the position: what was applied is not there."""
        short = {n: p for n, p in active.items() if self.ends[p.topic, p.partition] < p.next}
        if not short:
            return
        ends = self.asking.ends(((p.topic, p.partition) for p in short.values()), committed=False)
        looks = [
            ContinuityLook(
                Continuity.REWOUND,
                f"{_named(place)} ends at offset {end}, and messages up to {place.next - 1} were opened: the cluster lost "
                "messages that it had given out",
                behind=str(end),
                before=str(place.next),
                place=number,
            )
            for number, place in short.items()
            if (end := ends[place.topic, place.partition]) < place.next
        ]
        self._noted += self._rules.decided(looks)

    def active(self, position: KafkaPosition) -> list[PartitionPlace]:
        """The places that are read: not those of topics that the source does not name any more."""
        return [place for place in position.places if self._topics.matches(place.topic)]

    def as_found(self, position: KafkaPosition) -> KafkaPosition:
        """The position with partitions that are new, and behind what was lost.

        Raises:
            PositionMismatch: a topic or the cluster is not the one that the position is of.
        """
        if position.cluster != self._cluster_id:
            raise PositionMismatch(
                f"{self._where}: its position is of cluster {position.cluster}, and {self._cluster.servers} is cluster "
                f"{self._cluster_id}. Name the right servers, or give the topology another name to begin anew",
                source=self._name,
            )
        there = {(place.topic, place.partition) for place in position.places}
        for topic, id_ in position.topics.items():
            now = self._found.get(topic)
            if not self._topics.matches(topic) or (now is not None and now.id == id_):
                continue
            what = f"was deleted and made again (id {now.id}, not {id_})" if now is not None else "is gone"
            raise PositionMismatch(
                f"{self._where}: topic {topic} {what}; what was not read of it is lost. To read the topic as it is now, "
                "give the topology another name",
                topic=topic,
            )
        new = [
            PartitionPlace(topic, partition, 0, 0)
            for topic, about in sorted(self._found.items())
            if about is not None
            for partition in about.partitions
            if (topic, partition) not in there
        ]
        if len(position.places) + len(new) > PLACES_MAX:
            raise UsageError(
                f"{self._where}: {len(position.places) + len(new)} partitions, more than {PLACES_MAX}; read the topics by "
                "several sources",
                source=self._name,
            )
        topics = {**position.topics, **{place.topic: _id_of(self._found, place.topic) for place in new}}
        grown = replace(position, places=(*position.places, *new), topics=topics)
        return grown.noted([one for one in self._noted if _is_next(one, grown)], self._removed_in)

    def _missing(self, place: PartitionPlace, position: KafkaPosition) -> None:
        """An offset to read is not there: retention took it, which is refused or put on record."""
        partition = (place.topic, place.partition)
        epoch = self.asking.epochs.get(partition, NOTHING)
        first = self.asking.earliest([partition])[partition]
        self.asking.ends([partition])
        if self.asking.epochs.get(partition, NOTHING) != epoch:
            return  # the leader changed meanwhile: which of them has removed what is not known; the next look asks again
        if first <= place.next:  # the topic is another one by now, or ends before the position
            self.search()
            self.as_found(position)
            self.ends = self.asking.ends([partition])
            self._compared.clear()
            self._require_within({position.places.index(place): place})
            self._compare(position)
            raise StoreUnavailable(
                f"{self._where}: partition {place.partition} of topic {place.topic} could not be read from offset "
                f"{place.next}",
                topic=place.topic,
            )
        text = (
            f"{_named(place)}: {at_least(place)}offsets {place.next} to {first - 1} were removed by the topic's retention "
            "before they were read"
        )
        behind, number = str(place.begin - 1), position.places.index(place)
        look = ContinuityLook(Continuity.REMOVED, text, first - place.next, behind, str(first), number)
        self._noted += self._rules.decided([look])
        self._removed_in[number] = epoch


def _named(place: PartitionPlace) -> str:
    return f"topic {place.topic}, partition {place.partition}"


def _is_next(look: ContinuityLook, position: KafkaPosition) -> bool:
    """Whether a look is still to go on record: what was removed does where the position stands before it."""
    return look.verdict is not Continuity.REMOVED or position.places[look.place].begin == int(look.behind) + 1


def _checksum(message: Any) -> int:
    known = repr((message.timestamp(), message.key(), message.headers())).encode()
    return zlib.crc32(message.value() or b"", zlib.crc32(known))


def _id_of(found: Mapping[str, Topic | None], topic: str) -> str:
    about = found[topic]
    assert about is not None
    return about.id
