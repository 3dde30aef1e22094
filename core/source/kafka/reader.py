"""Reads a part of a slice inside an executor: the messages of ranges of offsets, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import methodcaller
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import pyarrow as pa

from stormproof.core.base.arrow import Rows
from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, StormproofError
from stormproof.core.pending.batches import reader_batch
from stormproof.core.source.kafka.client import Cluster, Feed, GapsFound, OffsetGone, Partition, feeds
from stormproof.core.source.kafka.position import OffsetRange, number_of
from stormproof.core.source.metadata import Fact, Metadata

_TOPIC: Final = methodcaller("topic")
_PARTITION: Final = methodcaller("partition")
_OFFSET: Final = methodcaller("offset")
_VALUE: Final = methodcaller("value")
_MOST: Final = 10_000
_WAIT_S: Final = 0.25
_IDLE_MAX: Final = 2
"""Idle consumers kept by a process for each cluster."""
KEPT_ANSWER_S: Final = 1.0
"""How long one that was kept may be left without an answer before a new one asks: where a topic was made again, or set back,
to fewer leader epochs than a client knows of, it gets none as long as it lives.
"""


Kept = TypeVar("Kept")


def messages_in(cluster: Cluster, ranges: Sequence[OffsetRange]) -> dict[int, list[Any]]:
    """The messages of some ranges, each of another partition, by place and in order of their offsets.

    Each read goes from the range's start to its last message, or to the end of the partition.

    Raises:
        PositionMismatch: retention removed what was to be read.
        StoreUnavailable: the cluster is away.
    """
    found = _read(cluster, ranges, lambda messages: messages)
    return {place: list(chain.from_iterable(runs)) for place, runs in found.items()}


def _read(
    cluster: Cluster, ranges: Sequence[OffsetRange], keep: Callable[[Sequence[Any]], Kept]
) -> dict[int, list[Kept]]:
    """`messages_in`, of which only what `keep` makes of each run of messages is kept."""
    wanted: dict[Partition, OffsetRange] = {(one.topic, one.partition): one for one in ranges if one.messages}
    empty: dict[int, list[Kept]] = {one.place: [] for one in ranges}
    if not wanted:
        return empty
    idle = feeds(cluster)
    while idle:
        with suppress(StoreUnavailable):
            return empty | _read_by(idle.pop(), min(KEPT_ANSWER_S, cluster.answer_s), wanted, keep)
    return empty | _read_by(Feed(cluster), cluster.answer_s, wanted, keep)


def _read_by(
    feed: Feed, answer_s: float, wanted: Mapping[Partition, OffsetRange], keep: Callable[[Sequence[Any]], Kept]
) -> dict[int, list[Kept]]:
    """What a consumer that is answered in time gives; it is kept for the next read."""
    found: dict[int, list[Kept]] = {one.place: [] for one in wanted.values()}
    feed.answer_s = answer_s
    try:
        feed.assign({partition: one.first for partition, one in wanted.items()})
        _collect(feed, wanted, found, keep)
        feed.assign({})
    except OffsetGone as error:
        _dispose(feed)
        raise gone(wanted[error.partition]) from error
    except BaseException:
        _dispose(feed)
        raise
    idle = feeds(feed.cluster)
    if len(idle) < _IDLE_MAX:
        idle.append(feed)
    else:
        _dispose(feed)
    return found


def _collect(
    feed: Feed,
    wanted: Mapping[Partition, OffsetRange],
    found: dict[int, list[Kept]],
    keep: Callable[[Sequence[Any]], Kept],
) -> None:
    last = {partition: one.last for partition, one in wanted.items()}
    left = set(wanted)
    while left:
        delivered = feed.next(_MOST, _WAIT_S)
        for partition, messages in runs_of(delivered.messages):
            if partition not in left:
                continue
            is_done = messages[-1].offset() >= last[partition]
            mine = [message for message in messages if message.offset() <= last[partition]] if is_done else messages
            if mine:
                found[wanted[partition].place].append(keep(mine))
            if is_done:
                left.discard(partition)
        left -= {partition for partition, end in delivered.ends.items() if partition in left and end > last[partition]}


def runs_of(messages: Sequence[Any]) -> Iterator[tuple[Partition, Sequence[Any]]]:
    """Messages that came one after the other from one partition, with that partition; in their order."""
    if not messages:
        return
    numbers = np.fromiter(map(_PARTITION, messages), np.int64, len(messages))
    is_first = np.diff(numbers, prepend=-1) != 0
    if messages[0].topic() != messages[-1].topic() or len(set(map(_TOPIC, messages))) > 1:
        topics = np.array(list(map(_TOPIC, messages)), dtype=object)
        is_first[1:] |= topics[1:] != topics[:-1]
    for start, stop in pairwise([*np.flatnonzero(is_first).tolist(), len(messages)]):
        yield (messages[start].topic(), messages[start].partition()), messages[start:stop]


def offsets_of(messages: Sequence[Any]) -> Rows:
    """The offsets of messages."""
    return np.fromiter(map(_OFFSET, messages), np.int64, len(messages))


def gaps_in(one: OffsetRange) -> GapsFound:
    """The error for a range that nobody counted, and that has not all of its messages."""
    return GapsFound(
        f"topic {one.topic}, partition {one.partition}: some offsets from {one.start} to {one.stop - 1} have no message, "
        "as transactions and compaction leave them. The messages are counted now, and opened again",
        topic=one.topic,
        partition=one.partition,
        start=one.start,
        stop=one.stop,
    )


def gone(one: OffsetRange) -> PositionMismatch:
    """The error for a range that is not there any more."""
    return PositionMismatch(
        f"topic {one.topic}, partition {one.partition}: offsets {one.start} to {one.stop - 1} were opened and cannot be "
        "read any more: the topic's retention removed them, or the topic was made again. Raise retention.ms of the topic "
        "above the time that a message may wait; to go on without them, skip the batch: stormproof skip",
        topic=one.topic,
        partition=one.partition,
        start=one.start,
        stop=one.stop,
    )


def _dispose(feed: Feed) -> None:
    with suppress(StormproofError, RuntimeError):
        feed.close()


@dataclass(frozen=True, slots=True)
class KafkaSliceReader:
    """Reads a part of a slice: ranges of offsets, by place. Picklable, and as secret as the cluster's password."""

    cluster: Cluster
    ranges: tuple[OffsetRange, ...]
    metadata: Metadata

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages by ascending number.

        Which messages a range has is not looked up: what the cluster gives is compared with what was counted, or with all
        offsets of a range that nobody counted.

        Raises:
            GapsFound: a range that nobody counted has offsets without a message.
            PositionMismatch: retention removed what was to be read.
            StoreUnavailable: the cluster is away.
        """
        out = np.fromiter(excluded, np.int64)

        def keep(messages: Sequence[Any]) -> tuple[Rows, pa.Array]:
            return offsets_of(messages), payloads_of(messages, self.metadata)

        found = _read(self.cluster, self.ranges, keep)
        for one in self.ranges:
            runs = found.pop(one.place)
            if one.assumed and not _is_whole([offsets for offsets, _ in runs], one):
                raise gaps_in(one)
            for offsets, payloads in runs:
                ids, rows = offsets + number_of(one.place, 0), payloads
                if len(out):
                    kept = ~np.isin(ids, out)
                    ids, rows = ids[kept], rows.filter(pa.array(kept))
                for start in range(0, len(ids), batch_rows):
                    part = ids[start : start + batch_rows]
                    origins = np.full(len(part), one.place, np.int64)
                    yield reader_batch(part, origins, rows.slice(start, batch_rows), seed)


def _is_whole(runs: Sequence[Rows], one: OffsetRange) -> bool:
    """Whether every offset of the range has its message; they come in ascending order."""
    return sum(map(len, runs)) == one.messages and (runs[0][0], runs[-1][-1]) == (one.start, one.stop - 1)


def payloads_of(messages: Sequence[Any], metadata: Metadata) -> pa.Array:
    """What the decoder gets of messages: bytes, or a struct with their metadata."""
    return metadata.given(list(map(_VALUE, messages)), messages)


def _headers(message: Any) -> list[dict[str, object]]:
    return [{"name": name, "value": value} for name, value in message.headers() or ()]


def _timestamp_us(message: Any) -> int | None:
    kind, milliseconds = message.timestamp()
    return milliseconds * 1_000 if kind else None


class KafkaMetadata(Metadata):
    """What Kafka knows of a message beside its payload."""

    __slots__ = ()
    KNOWN: ClassVar[Mapping[str, Fact]] = {
        "topic": (pa.string(), _TOPIC),
        "partition": (pa.int32(), _PARTITION),
        "offset": (pa.int64(), _OFFSET),
        "timestamp": (pa.timestamp("us", "UTC"), _timestamp_us),
        "key": (pa.binary(), methodcaller("key")),
        "headers": (
            pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])),
            _headers,
        ),
        "tombstone": (pa.bool_(), lambda message: message.value() is None),
    }
