"""`KafkaSource`: the messages of Kafka topics, read by ranges of offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Final, Self, Unpack

import numpy as np

from stormproof.core.base import arguments
from stormproof.core.base.clock import Clock
from stormproof.core.base.dataset import DatasetName, at_server
from stormproof.core.base.errors import StoreUnavailable, StormproofError, UsageError
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.schema import SchemaLike
from stormproof.core.contract.source import Expectation, Lease, Limit, Slice, SliceReader, SourcePreview
from stormproof.core.pending.connector import NextMessages, Piece, two_numbers
from stormproof.core.pending.continuity import OnGap, Rules
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.rows import At, Subscriber, even_bounds
from stormproof.core.pending.source import PendingArguments, PendingSource
from stormproof.core.postgres.database import Database
from stormproof.core.source.kafka.advice import GroupAdvice
from stormproof.core.source.kafka.client import (
    ANSWER_S,
    Asking,
    Cluster,
    Isolation,
    Start,
    Topics,
    checked_settings,
    checked_start,
)
from stormproof.core.source.kafka.lookahead import count
from stormproof.core.source.kafka.partitions import Partitions
from stormproof.core.source.kafka.position import (
    NOTHING,
    OFFSET_BITS,
    PLACES_MAX,
    KafkaAudit,
    KafkaPosition,
    OffsetRange,
    PartitionPlace,
    PlaceIds,
    at_of_ranges,
    expectation_of_ranges,
    ids_of,
    number_of,
    place_and_offset,
    ranges_of,
)
from stormproof.core.source.kafka.reader import KafkaMetadata, KafkaSliceReader, messages_in
from stormproof.core.source.metadata import KeepsMetadata
from stormproof.core.start.preflight import Probe

_NONE: Final = np.zeros(0, np.int64)
LOOK_INTERVAL_S: Final = 5.0
"""Seconds between two searches for new topics and partitions."""


class KafkaSource(KeepsMetadata, PendingSource):
    """The messages of Kafka topics, read by ranges of offsets that the driver plans and executors read.

    `topics` is a topic, a list of them, or a pattern that begins with ``^``. `start` holds for a new subscription alone:
    "earliest", "latest", a time, or offsets by partition; partitions and topics that appear later are read from their
    first message on. How far a subscription is stands in the run's Postgres, and moves in the ledger's transaction: no
    consumer group decides anything. `client` has settings of the client (librdkafka), such as those of security,
    which are passed on. `PendingArguments` has the arguments of every pending source.

    Guarantee:
        Every committed message of every partition is opened once by each subscription, and again only when it was
        returned, failed, or its lease ran out. A batch that is replayed has the same messages. Messages of aborted
        transactions are never seen, and those of an open one hold up their own partition alone. What is expected of a
        slice is known apart from the readers: counted by a consumer of its own, or all offsets of a range. Messages that
        retention removed before they were opened, a topic that is gone or was made again, and another cluster under the
        same name are refused by name; with ``on_gap="record"`` what retention took is put on record, and the run goes on.

    Not guaranteed:
        An order between slices, or between partitions. Within a slice the messages of a partition come by their offsets.
        A message that compaction removed before it was opened is not seen: a later one has its key.

    `metadata` names fields to add behind the schema's: topic, partition, offset, timestamp, key, headers, tombstone. After
    a commit the offsets are also committed to the consumer group `group`, so that Kafka's own tools show the lag;
    nothing is read by them. ``group=None`` leaves that out. The object connects at its first use.

    Threads: topologies on several threads may share one object; each run has a subscription of its own.
    Forks: a fork makes connections of its own, and never touches its parent's.
    """

    KIND: ClassVar[str] = "kafka"
    AUDIT = KafkaAudit
    SHOWN_FORM: ClassVar[str] = "PLACE-OFFSET"

    def datasets(self) -> tuple[DatasetName, ...]:
        """The topics, or the patterns, at the first of the servers."""
        return tuple(at_server("kafka", self._cluster.servers, topic, port=9092) for topic in self._topics.given)

    def __init__(
        self,
        topics: str | Sequence[str],
        *,
        servers: str,
        schema: SchemaLike = "line string",
        start: Start = "earliest",
        unit: Unit | None = None,
        metadata: Sequence[str] | Mapping[str, str] = (),
        isolation: Isolation = "read_committed",
        on_gap: OnGap = "fail",
        group: str | None = "stormproof.{name}",
        client: Mapping[str, Any] | None = None,
        name: str | None = None,
        database: Database | str | None = None,
        look_interval_s: float = LOOK_INTERVAL_S,
        answer_s: float = ANSWER_S,
        clock: Clock | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        self._topics = Topics.of(topics)
        arguments.require_text_if_given("Kafka source", "name", name, "orders")
        name = name or self._topics.name
        where = f"source {name}"
        arguments.require_text(where, "servers", servers, "localhost:9092")
        arguments.require_seconds(where, "look_interval_s", look_interval_s)
        arguments.require_seconds(where, "answer_s", answer_s)
        arguments.require_choice(where, "isolation", isolation, ("read_committed", "read_uncommitted"))
        arguments.require_text_if_given(where, "group", group, "orders-lag")
        with arguments.error_prefix(where):
            decoder = decoder_for(schema, unit)
            self._metadata = KafkaMetadata.chosen(where, metadata, decoder.schema)
        super().__init__(
            name,
            decoder=self._metadata.decoder(decoder),
            store=PostgresPendingStore("source", name, database=Database.given(where, database)),
            **pending,
        )
        self._start: Start = checked_start(where, start, self._topics)
        anew = "To read the topic as it is now, give the topology another name"
        self._rules = Rules(where, name, "raise retention.ms of the topic", anew, on_gap)
        self._cluster = Cluster(servers, isolation, checked_settings(where, client), answer_s)
        self._group = group.replace("{name}", name) if group is not None else None
        self._clock: Clock | None = clock
        self._look_interval_s = look_interval_s
        self._begin()

    def _begin(self) -> None:
        """Forget what was seen, and hold no connection."""
        self._partitions = Partitions(
            self.name,
            self._cluster,
            self._topics,
            self._start,
            self._rules,
            self._look_interval_s,
            self._clock,
            self._group,
        )
        self._advice = GroupAdvice(self._cluster, self._group)
        self._limit = Limit()

    def __getstate__(self) -> dict[str, Any]:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._clock = None
        view._begin()
        return view.__dict__

    def for_run(self, database: Database) -> Self:
        """The same topics for one run: with a subscription and connections of its own, in `database` if none is named."""
        view = super().for_run(database)
        view._begin()
        return view

    def drop_connections(self) -> None:
        """Let connections go, to the store and to the cluster; the next call makes others."""
        self._partitions.close()
        self._advice.close()
        super().drop_connections()

    def close(self) -> None:
        """End the run: tell the consumer group the last offsets, and let connections go."""
        if self._subscription is not None:
            with suppress(StoreUnavailable):
                self._tell()
            self._advice.finish()
        self.drop_connections()

    def probes(self) -> tuple[Probe, ...]:
        """Executors read the cluster."""
        return (KafkaProbe(self._cluster),)

    def place_of(self, message: int) -> tuple[str, int, int]:
        """Topic, partition and offset of a message."""
        number, offset = place_and_offset(message)
        with self.rows() as rows:
            places = KafkaPosition.of(rows.position() or {}).places
        if number >= len(places):
            raise UsageError(f"{self.where}: no partition has message {message}", message=message)
        return places[number].topic, places[number].partition, offset

    # ---- what there is

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Act for this subscription from now on; made, at `start`, where it is missing.

        Raises:
            Fenced: a newer epoch has the subscription.
            PositionMismatch: its topics are not those that it was made for.
            UsageError: a topic is not there.
        """
        self._partitions.search()
        super().subscribe(subscription, epoch)

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Hand out returned messages first, then due retries, then new ones; None where there are none."""
        self._limit = limit
        return super().open(lease, limit, seed, tx)

    def look(self, epoch: int) -> None:
        """See how far the partitions go, and count what lies behind the position.

        Raises:
            PositionMismatch: messages were removed before they were opened (on_gap), or a topic is another one now.
            StoreUnavailable: the cluster is away.
        """
        with self.rows() as rows:
            position = rows.position()
        if position is None:
            return
        known = KafkaPosition.of(position)
        self._partitions.look(known, self._limit)
        seen = self._partitions.marks(replace(self._partitions.as_found(known), waits=self._partitions.waits(known)))
        if (seen.waits, seen.looks, seen.places) != (known.waits, known.looks, known.places):
            who = self.subscriber
            with self.rows() as rows:
                if KafkaPosition.of(self._locked(rows, who, epoch)) == known:
                    rows.move(seen.to_json())

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """From the position on; messages are counted as `open` counts them."""
        return self._preview_next(subscription, limit, database)

    def _unopened(self, who: Subscriber, limit: Limit) -> SourcePreview:
        self._begin()
        self._limit = limit
        self._partitions.search()
        with self._store.rows(who) as rows:
            position = rows.position() or self.start(rows.cursor)
        self._partitions.look(KafkaPosition.of(position), self._limit)
        return super()._unopened(who, limit)

    # ---- the connector

    def start(self, cursor: Any) -> At:
        """Where `start` says."""
        return self._partitions.start().to_json()

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Refuse a position of other topics; gives it with partitions that are new, and the ends as they were seen."""
        found = self._partitions.as_found(KafkaPosition.of(position))
        ends = tuple(self._partitions.ends.get((place.topic, place.partition), place.next) for place in found.places)
        return replace(found, ends=ends).to_json()

    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """What was counted behind the position, from each partition a fair share."""
        at = KafkaPosition.of(position)
        ranges = self._partitions.lookahead.slice(at.places, limit, at.slices) if at.places else []
        if not ranges:
            return None
        if any(one.stop >> OFFSET_BITS for one in ranges):
            raise UsageError(f"{self.where}: offsets above 2^{OFFSET_BITS} cannot be numbered", source=self.name)
        moved = replace(
            at.with_places({one.place: self._behind(at.places[one.place], one) for one in ranges}), slices=at.slices + 1
        )
        return NextMessages(_piece(ranges, moved.reach, seed), moved.to_json())

    def _behind(self, place: PartitionPlace, opened: OffsetRange) -> PartitionPlace:
        """A place behind messages that are opened."""
        partition = place.topic, place.partition
        epoch = self._partitions.asking.epochs.get(partition, NOTHING)
        newest = self._partitions.newest.get(partition, NOTHING)
        return replace(place, next=opened.stop, last=opened.last, checksum=NOTHING, epoch=epoch, empty=0, newest=newest)

    def head(self, at: At, limit: Limit, seed: int, cursor: Any) -> Piece:
        """The first messages by place and offset. They are counted again: compaction may have removed some."""
        ranges = ranges_of(at)
        there = count(self._cluster, ranges)
        kept, rest = list[OffsetRange](), list[OffsetRange]()
        gone, messages_left, bytes_left = 0, max(1, limit.messages), limit.bytes
        for one in ranges:
            offsets, sizes = there.get(one.place, (_NONE, _NONE))
            known = np.isin(offsets, one.offsets)
            offsets, total = offsets[known], np.cumsum(sizes[known])
            gone += one.messages - len(offsets)
            if one.assumed and len(offsets) < one.messages:
                self._partitions.lookahead.found_gaps((one.topic, one.partition))
            now = OffsetRange.of(one, offsets, int(total[-1]) if len(total) else 0)
            fits = min(messages_left, int(np.searchsorted(total, bytes_left, side="right")))
            if not fits and len(offsets) and not any(before.messages for before in kept):
                fits = 1
            if rest or (fits < now.messages and not fits):
                rest.append(now)
                continue
            if fits < now.messages:
                size = int(total[fits - 1])
                kept.append(now.head(fits, size))
                rest.append(now.rest(fits, now.bytes - size))
            else:
                kept.append(now)
            messages_left -= kept[-1].messages
            bytes_left -= kept[-1].bytes
        piece = _piece(kept, at.get("reach"), seed)
        return replace(piece, rest=at_of_ranges(rest, at.get("reach")) if rest else None, gone=gone)

    def places(self, at: At, ids: Sequence[int], cursor: Any) -> Sequence[int]:
        """Where these numbers are among all of the slice."""
        found: list[int] = np.flatnonzero(np.isin(ids_of(ranges_of(at)), np.array(ids, np.int64))).tolist()
        return found

    def expected(self, at: At, seed: int, excluded: frozenset[int], cursor: Any) -> Expectation:
        """From the offsets that were counted when the slice was opened."""
        return expectation_of_ranges(ranges_of(at), seed, excluded)

    def parts(self, at: At, parallelism: int) -> tuple[SliceReader, ...]:
        """Readers of about equally many messages each."""
        ranges = ranges_of(at)
        bounds = even_bounds(0, sum(one.messages for one in ranges), parallelism)
        return tuple(
            KafkaSliceReader(self._cluster, _between(ranges, first, stop), self._metadata)
            for first, stop in pairwise(bounds)
        )

    def payloads(self, at: At, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """Read again; with all of their metadata."""
        wanted, narrowed = set(ids), list[OffsetRange]()
        for one in ranges_of(at):
            failed = one.offsets[np.isin(one.ids, np.array(ids, np.int64))]
            if len(failed):
                narrowed.append(OffsetRange.of(replace(one, start=int(failed[0]), stop=int(failed[-1]) + 1), failed, 0))
        found: dict[int, bytes] = {}
        for place, messages in messages_in(self._cluster, narrowed).items():
            numbers = [number_of(place, message.offset()) for message in messages]
            mine = {number: message for number, message in zip(numbers, messages, strict=True) if number in wanted}
            stored = self._metadata.stored([one.value() for one in mine.values()], list(mine.values()))
            found |= zip(mine, stored, strict=True)
        return found

    def unopened(self, position: At, cursor: Any) -> tuple[int, float | None]:
        """The lag: offsets up to the partitions' ends. Where it is small, those that have no message are left out."""
        return self._partitions.left(KafkaPosition.of(position)), None

    def maintain(self) -> None:
        """Forget leases that ran out long ago, and tell the consumer group how far everything is applied."""
        super().maintain()
        self._tell()

    def _tell(self) -> None:
        if self._group is None:
            return
        with self.rows() as rows:
            position, slices = rows.position(), rows.unresolved()
        if position is None:
            return
        places = KafkaPosition.of(position).places
        applied = {number: place.next for number, place in enumerate(places)}
        for row in slices:
            for one in ranges_of(row.at) if row.at is not None else ():
                applied[one.place] = min(applied[one.place], one.start)
        self._advice.tell({(places[number].topic, places[number].partition): at for number, at in applied.items()})

    @classmethod
    def notes(cls, position: At) -> tuple[str, ...]:
        """Partitions that wait behind an open transaction."""
        if not position:
            return ()
        known = KafkaPosition.of(position)
        return tuple(
            f"topic {known.places[one.place].topic}, partition {known.places[one.place].partition} waits at offset "
            f"{one.offset} since {one.since}: a producer's transaction is open there"
            for one in known.waits
        )

    @classmethod
    def shown_id(  # pyright: ignore[reportIncompatibleMethodOverride] - it is called as a method is
        cls, message: int, origin: int
    ) -> str:
        """``PLACE-OFFSET``: the place is the partition, where a source reads one topic."""
        return "{}-{}".format(*place_and_offset(message))

    def shown_ids(self) -> PlaceIds:
        """``PLACE-OFFSET``."""
        return PlaceIds()

    @classmethod
    def number_of(cls, shown: str) -> tuple[int, int] | None:
        """Number and origin (the place) of a shown id; None: it is none of this source."""
        place, _, offset = shown.partition("-")
        found = two_numbers(place, offset)
        if found is None or found[0] >= PLACES_MAX or found[1] >= 1 << OFFSET_BITS:
            return None
        return number_of(*found), found[0]

    @classmethod
    def server_ids(cls, position: At, numbers: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], str]:
        """``TOPIC-PARTITION@OFFSET``, as Kafka's own producers write it."""
        places = KafkaPosition.of(position).places
        found = {number: place_and_offset(number[0]) for number in numbers}
        return {
            number: f"{places[at].topic}-{places[at].partition}@{offset}"
            for number, (at, offset) in found.items()
            if at < len(places)
        }

    @classmethod
    def by_server_id(cls, position: At, given: str) -> tuple[int, int] | None:
        """By topic, partition and offset."""
        partition, _, offset = given.rpartition("@")
        for at, place in enumerate(KafkaPosition.of(position).places):
            if partition == f"{place.topic}-{place.partition}":
                return cls.number_of(f"{at}-{offset}")
        return None


@dataclass(frozen=True, slots=True)
class KafkaProbe:
    """A machine has the client library, and reaches the cluster."""

    cluster: Cluster

    def probe(self) -> None:
        """List the topics."""
        asking = Asking(self.cluster)
        try:
            asking.names()
        except StormproofError:
            asking.close()
            raise


def _piece(ranges: Sequence[OffsetRange], reach: Any, seed: int) -> Piece:
    messages, size = sum(one.messages for one in ranges), sum(one.bytes for one in ranges)
    return Piece(at_of_ranges(ranges, reach), messages, size, expectation_of_ranges(ranges, seed), None)


def _between(ranges: Sequence[OffsetRange], first: int, stop: int) -> tuple[OffsetRange, ...]:
    """The messages of a slice from one ordinal up to another, as ranges."""
    found: list[OffsetRange] = []
    done = 0
    for one in ranges:
        low, high = max(first - done, 0), min(stop - done, one.messages)
        done += one.messages
        if low < high:
            found.append(one.between(low, high))
    return tuple(found)
