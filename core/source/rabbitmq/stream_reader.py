"""Reads a part of a slice inside an executor: the messages of a range of offsets of a stream, and no others."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.pending.batches import reader_batch
from stormproof.core.source.kafka.offsets import OffsetRange
from stormproof.core.source.metadata import Metadata
from stormproof.core.source.rabbitmq.broker import BrokerQueue
from stormproof.core.source.rabbitmq.message_metadata import columns_of
from stormproof.core.source.rabbitmq.stream_feed import ANSWER_S, StreamFeed, StreamMessage, feeds

log = logging.getLogger("stormproof.source")

_IDLE_MAX: Final = 4
"""Idle connections kept by a process for each stream."""


def messages_in(broker: BrokerQueue, one: OffsetRange) -> list[StreamMessage]:
    """The messages from the first to the last offset of a range, in their order.

    A process that reads one range after the other reads on over the same connection.

    Raises:
        PositionMismatch: retention removed what was to be read.
        StoreUnavailable: the broker is away.
    """
    if not one.messages:
        return []
    first = int(one.offsets[0])
    idle = feeds(broker)
    feed = idle.pop(first, None)
    if feed is not None:
        try:
            return _read(feed, first, one)
        except (StoreUnavailable, UsageError):  # its connection may have been closed meanwhile
            log.info("%s: reads on over another connection", broker.where)
    feed = StreamFeed(broker)
    try:
        feed.begin(first)
        return _read(feed, first, one)
    except BaseException:
        feed.drop()
        raise


def _read(feed: StreamFeed, first: int, one: OffsetRange) -> list[StreamMessage]:
    broker, last = feed.broker, one.last
    found: list[StreamMessage] = []
    try:
        while not found or found[-1].offset < last:
            arrived = feed.waited()
            if not arrived:
                raise StoreUnavailable(
                    f"{broker.where}: offsets {first} to {last} did not come within {ANSWER_S:g} seconds",
                    stream=broker.name,
                )
            found += arrived
            if found[0].offset > first:
                raise _gone(broker, one)
    except BaseException:
        feed.drop()
        raise
    stop = bisect_right(found, last, key=lambda message: message.offset)
    feed.keep(found[stop:])
    idle = feeds(broker)
    if (other := idle.pop(last + 1, None)) is not None:
        other.drop()
    idle[last + 1] = feed
    while len(idle) > _IDLE_MAX:
        idle.pop(next(iter(idle))).drop()
    return found[:stop]


def _gone(broker: BrokerQueue, one: OffsetRange) -> PositionMismatch:
    return PositionMismatch(
        f"{broker.where}: offsets {one.start} to {one.stop - 1} were opened and cannot be read any more: the stream's "
        "retention removed them. Raise x-max-age or x-max-length-bytes of the stream above what may wait; to go on without "
        "them, skip the batch: stormproof skip",
        stream=broker.name,
        start=one.start,
        stop=one.stop,
    )


@dataclass(frozen=True, slots=True)
class StreamSliceReader:
    """Reads a part of a slice. Picklable, and as secret as the broker's password."""

    broker: BrokerQueue
    range: OffsetRange
    metadata: Metadata

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the part's messages by ascending offset.

        Which messages a range has is not looked up: what the broker gives is compared with what was counted.

        Raises:
            PositionMismatch: retention removed what was to be read.
            StoreUnavailable: the broker is away.
        """
        messages = [one for one in messages_in(self.broker, self.range) if one.offset not in excluded]
        for start in range(0, len(messages), batch_rows):
            part = messages[start : start + batch_rows]
            ids = np.array([message.offset for message in part], np.int64)
            yield reader_batch(ids, np.zeros(len(part), np.int64), payloads_of(part, self.metadata), seed)


def payloads_of(messages: Sequence[StreamMessage], metadata: Metadata) -> pa.Array:
    """What the decoder gets of messages: bytes, or a struct with their metadata."""
    columns = columns_of(metadata.names, [(one.method, one.properties) for one in messages])
    return metadata.given([message.payload for message in messages], columns)
