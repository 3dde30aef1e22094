"""Reads a part of a slice inside an executor: the messages of a range of offsets of a stream, and no others.

A connection reads a stream from an offset on, by AMQP 0.9.1.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from stormproof.core.base.errors import PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.pending.batches import reader_batch
from stormproof.core.source.kafka.position import OffsetRange
from stormproof.core.source.metadata import Metadata
from stormproof.core.source.rabbitmq.client import PREFETCH_MAX, BrokerQueue

PREFETCH: Final = 10_000
ANSWER_S: Final = 10.0
_STEP_S: Final = 0.01
_OFFSET: Final = "x-stream-offset"


class StreamMessage(NamedTuple):
    """A message of a stream. `method` and `properties` are the client's."""

    offset: int
    payload: bytes
    method: Any
    properties: Any


class StreamFeed:
    """Reads a stream. After an error it is of no use any more. For one thread."""

    def __init__(self, broker: BrokerQueue) -> None:
        self.broker = broker
        self._connection: Any = None
        self._channel: Any = None
        self._arrived: list[StreamMessage] = []
        self._tag = 0
        self._cancelled = False

    def begin(self, offset: int | str | datetime, prefetch: int = PREFETCH) -> None:
        """Read from here on: an offset, ``first``, ``last`` (the last chunk of messages), or a time.

        Raises:
            StoreUnavailable: the broker is away.
            UsageError: there is no such stream.
        """
        self.drop()
        self._arrived, self._tag, self._cancelled = [], 0, False
        self._connection = self.broker.connect()
        with self.broker.asked():
            channel = self._channel = self._connection.channel()
            channel.queue_declare(self.broker.name, passive=True)
            channel.basic_qos(prefetch_count=min(prefetch, PREFETCH_MAX))
            channel.add_on_cancel_callback(self._on_cancel)
            channel.basic_consume(self.broker.name, self._on_message, arguments={_OFFSET: offset})

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._tag = method.delivery_tag
        self._arrived.append(StreamMessage(int(properties.headers[_OFFSET]), body, method, properties))

    def _on_cancel(self, method: Any) -> None:
        self._cancelled = True

    def arrived(self) -> list[StreamMessage]:
        """What the broker had for us, as far as the prefetch allows; and allow it as many again.

        It answers on one channel in order: what it sent before it answered has arrived with the answer.

        Raises:
            StoreUnavailable: the broker is away.
            UsageError: the stream was deleted.
        """
        with self.broker.asked():
            if self._tag:
                self._channel.basic_ack(self._tag, multiple=True)
                self._tag = 0
            self._channel.queue_declare(self.broker.name, passive=True)
            self._connection.process_data_events(time_limit=0)
        if self._cancelled:
            raise UsageError(f"{self.broker.where}: the stream was deleted", queue=self.broker.name)
        found, self._arrived = self._arrived, []
        return found

    def keep(self, messages: Sequence[StreamMessage]) -> None:
        """Give these again, before what comes."""
        self._arrived = [*messages, *self._arrived]

    def waited(self, seconds: float = ANSWER_S) -> list[StreamMessage]:
        """What arrives, at least one message; none where none comes in time."""
        end_s = time.monotonic() + seconds
        while not (found := self.arrived()) and time.monotonic() < end_s:
            with self.broker.asked():
                self._connection.process_data_events(time_limit=_STEP_S)
        return found

    def pump(self) -> None:
        """Answer heartbeats."""
        if self._connection is not None:
            with self.broker.asked():
                self._connection.process_data_events(time_limit=0)

    def drop(self) -> None:
        """Close the connection; the next `begin` makes another."""
        connection, channel = self._connection, self._channel
        self._connection = self._channel = None
        if channel is not None:
            _refuse_nothing(channel)
        if connection is not None:
            self.broker.disconnect(connection)


def _refuse_nothing(channel: Any) -> None:
    """Have the client refuse no message when it closes a channel: it does so with what no callback has had, and a stream
    answers that with an error of the connection. There is no public way to say so.
    """
    for tag, consumer in channel._consumer_infos.items():
        consumer.auto_ack = True
        channel._impl._consumers_with_noack.add(tag)


def feeds(broker: BrokerQueue) -> dict[int, StreamFeed]:
    """Idle feeds of this process, by the offset from which each goes on: a fork never sees its parent's."""
    return _idle.setdefault((os.getpid(), broker), {})


_idle: dict[tuple[int, BrokerQueue], dict[int, StreamFeed]] = {}


def let_go(broker: BrokerQueue) -> None:
    """Close this process's idle feeds."""
    idle = feeds(broker)
    while idle:
        idle.popitem()[1].drop()


log = logging.getLogger("stormproof.source")


# ---- what a task reads

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
    return metadata.given([message.payload for message in messages], messages)
