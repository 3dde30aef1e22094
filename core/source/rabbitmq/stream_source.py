"""`RabbitMQStreamSource`: the messages of a RabbitMQ stream, read by ranges of offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, Unpack, cast

import numpy as np

from stormproof.core.base.arguments import error_prefix, require_text, require_text_if_given, shown
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import StoreUnavailable, UsageError
from stormproof.core.contract.capabilities import RABBITMQ_STREAM
from stormproof.core.contract.payload import Unit, decoder_for
from stormproof.core.contract.schema import SchemaLike
from stormproof.core.contract.source import Expectation, Limit, SliceReader, SourcePreview
from stormproof.core.pending.connector import NextMessages, Piece, two_numbers
from stormproof.core.pending.continuity import CONTINUOUS, ContinuityLook, OnGap, Rules
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.rows import At, Subscriber, even_bounds, expectation_of, fitting
from stormproof.core.pending.source import PendingArguments, PendingSource
from stormproof.core.postgres.database import Database
from stormproof.core.source.kafka.position import OffsetRange
from stormproof.core.source.metadata import KeepsMetadata
from stormproof.core.source.rabbitmq.client import BrokerQueue, StreamMetadata, dataset_at
from stormproof.core.source.rabbitmq.source import URL, require_queue
from stormproof.core.source.rabbitmq.stream_position import (
    Mark,
    StreamAudit,
    StreamLookahead,
    StreamPosition,
    at_of,
    range_at,
    whole,
)
from stormproof.core.source.rabbitmq.stream_reader import StreamSliceReader, messages_in

Start = Literal["earliest", "latest"] | int | datetime


class RabbitMQStreamSource(KeepsMetadata, PendingSource):
    """The messages of a RabbitMQ stream (``x-queue-type: stream``), read by ranges of offsets.

    A stream delivers nothing for good: it is read, from any offset, by any number of readers. So the driver plans ranges of
    offsets and executors read exactly these, each by ``x-stream-offset``; how far a subscription is stands in the run's
    Postgres, and moves in the ledger's transaction. Nothing is confirmed to the broker. `RabbitMQSource` is for queues,
    whose messages are delivered and confirmed.

    Guarantee: every message is opened once by each subscription, and again only when it was returned, failed, or its lease
    ran out. A batch that is replayed has the same messages. No ids of publishers are needed. What is expected of a slice is
    counted by a reader of its own. Messages that retention removed before they were opened are refused by name; with
    ``on_gap="record"`` they are put on record, and the run goes on. A stream that was deleted and made again is refused by
    name where it can be told: it is shorter than what was opened, or has another message at the last offset that was opened.

    Not guaranteed: that a stream is known for another one that begins with the same messages as far as they were opened.
    Messages that a publisher sent twice are two messages. Compressed batches of the stream protocol are not delivered over
    AMQP 0.9.1 by every version of the broker.

    `start` holds for a new subscription alone: "earliest", "latest", an offset, or a time; of that the broker knows the
    chunk of messages, so some older ones may come, too. `metadata` names fields to add behind the schema's: offset,
    message_id, exchange, routing_key, timestamp, headers.

    Threads: topologies on several threads may share one object; each run has connections of its own.
    """

    KIND: ClassVar[str] = "rabbitmq-stream"
    AUDIT = StreamAudit
    NOUN: ClassVar[str] = "RabbitMQ stream"
    ORIGIN: ClassVar[int | None] = 0
    capabilities = RABBITMQ_STREAM
    """Any range can be read again, and nothing is confirmed."""

    def __init__(
        self,
        stream: str,
        *,
        url: str = URL,
        schema: SchemaLike = "line string",
        start: Start = "earliest",
        unit: Unit | None = None,
        metadata: Sequence[str] | Mapping[str, str] = (),
        on_gap: OnGap = "fail",
        name: str | None = None,
        database: Database | str | None = None,
        **pending: Unpack[PendingArguments],
    ) -> None:
        """`stream` is one that is there: it is never declared here. `name`: under which messages are pending.

        `PendingArguments` has the arguments of every pending source.
        """
        where = require_queue(self.NOUN, "stream", stream)
        require_text(where, "url", url, "amqp://USER:PASSWORD@HOST:PORT/VHOST")
        require_text_if_given(where, "name", name, stream)
        with error_prefix(where):
            decoder = decoder_for(schema, unit)
            self._metadata = StreamMetadata.chosen(where, metadata, decoder.schema)
        super().__init__(
            name or stream,
            decoder=self._metadata.decoder(decoder),
            store=PostgresPendingStore(self.NOUN, name or stream, database=database),
            **pending,
        )
        self._start = _checked_start(where, start)
        keep = "raise x-max-age or x-max-length-bytes of the stream"
        self._rules = Rules(
            where, name or stream, keep, "To read it as it is now, give the topology another name", on_gap
        )
        self._broker = BrokerQueue(url, stream, where)
        self._begin()

    def __repr__(self) -> str:
        return f"RabbitMQStreamSource({self._broker.name!r})"  # the url has a password

    def datasets(self) -> tuple[DatasetName, ...]:
        """The stream at its broker, in its virtual host."""
        return (dataset_at(self._broker.url, self._broker.name),)

    def _begin(self) -> None:
        self._lookahead = StreamLookahead(self._broker)
        self._limit = Limit()
        self._noted: list[ContinuityLook] = []

    def for_run(self, database: Database) -> Self:
        """The same stream for one run, with a subscription and connections of its own."""
        view = super().for_run(database)
        view._begin()
        return view

    def drop_connections(self) -> None:
        """Let connections go, to the store and to the broker; the next call makes others."""
        self._lookahead.close()
        super().drop_connections()

    def maintain(self) -> None:
        """Also answer the broker's heartbeats."""
        super().maintain()
        self._lookahead.pump()

    # ---- what there is

    def look(self, epoch: int) -> None:
        """See what lies behind the position.

        Raises:
            PositionMismatch: messages were removed before they were opened (on_gap), or it is another stream now.
            StoreUnavailable: the broker is away.
        """
        with self.rows() as rows:
            position = rows.position()
        if position is not None:
            self._look(StreamPosition.of(position))

    def _look(self, known: StreamPosition) -> None:
        self._noted = []  # what is not stored yet is looked at again: behind what was removed, nothing is there to compare
        while True:
            look = self._lookahead.look(known.noted(self._noted), self._limit)
            if look is CONTINUOUS:
                return
            self._noted += self._rules.decided([look])

    def preview(self, subscription: str | None, limit: Limit, database: Database | None = None) -> SourcePreview:
        """From the position on."""
        return self._preview_next(subscription, limit, database)

    def _unopened(self, who: Subscriber, limit: Limit) -> SourcePreview:
        self._begin()
        self._limit = limit
        with self._store.rows(who) as rows:
            position = rows.position() or self.start(rows.cursor)
        self._look(StreamPosition.of(position))
        return super()._unopened(who, limit)

    # ---- the connector

    def start(self, cursor: Any) -> At:
        """Where `start` says."""
        mark: Mark | None = None
        if self._start == "latest":
            first, mark = self._lookahead.end()
        elif self._start == "earliest":
            first = self._lookahead.first()
        elif isinstance(self._start, datetime):
            first = self._lookahead.at_time(self._start)
        else:
            assert isinstance(self._start, int)
            end, _ = self._lookahead.end()
            if self._start > end:
                raise UsageError(
                    f"{self.where}: start names offset {self._start}, and the stream ends at {end}", argument="start"
                )
            first = self._start
        return StreamPosition(first, first, mark).to_json()

    def check(self, who: Subscriber, position: At, cursor: Any) -> At:
        """Behind what was lost."""
        return StreamPosition.of(position).noted(self._noted).to_json()

    def next(self, position: At, limit: Limit, seed: int, cursor: Any) -> NextMessages | None:
        """What was seen behind the position."""
        at = StreamPosition.of(position)
        seen = self._lookahead.behind(at)
        if not seen:
            return None
        offsets = np.array([one.offset for one in seen], np.int64)
        kept, size = fitting([one.bytes for one in seen], limit)
        last = seen[kept - 1]
        one = OffsetRange.of(whole(self._broker.name, at.next, last.offset + 1), offsets[:kept], size)
        moved = replace(at, next=one.stop, mark=Mark(last.offset, last.checksum))
        return NextMessages(_piece(one, None, seed), moved.to_json())

    def head(self, at: At, limit: Limit, seed: int, cursor: Any) -> Piece:
        """The lowest offsets; their bytes are counted again."""
        one = self._range(at)
        there = messages_in(self._broker, one)
        kept, size = fitting([len(message.payload) for message in there], limit)
        if kept >= one.messages:
            return _piece(replace(one, bytes=size), None, seed)
        return _piece(one.head(kept, size), one.rest(kept, 0), seed)

    def places(self, at: At, ids: Sequence[int], cursor: Any) -> Sequence[int]:
        """Where these offsets are among all of the slice."""
        found: list[int] = np.flatnonzero(np.isin(self._range(at).offsets, np.array(ids, np.int64))).tolist()
        return found

    def expected(self, at: At, seed: int, excluded: frozenset[int], cursor: Any) -> Expectation:
        """From the offsets that were seen when the slice was opened."""
        return expectation_of(self._range(at).offsets, seed, excluded)

    def parts(self, at: At, parallelism: int) -> tuple[SliceReader, ...]:
        """Readers of about equally many messages each."""
        one = self._range(at)
        bounds = even_bounds(0, one.messages, parallelism)
        nothing = replace(one, messages=0, gaps=None)
        return tuple(
            StreamSliceReader(self._broker, one.between(first, stop) if first < stop else nothing, self._metadata)
            for first, stop in pairwise(bounds)
        )

    def payloads(self, at: At, ids: Sequence[int], cursor: Any) -> Mapping[int, bytes]:
        """Read again; with all of their metadata."""
        one = self._range(at)
        wanted = one.offsets[np.isin(one.offsets, np.array(ids, np.int64))]
        if not len(wanted):
            return {}
        narrow = OffsetRange.of(whole(one.topic, int(wanted[0]), int(wanted[-1]) + 1), wanted, 0)
        mine = set(wanted.tolist())
        messages = [message for message in messages_in(self._broker, narrow) if message.offset in mine]
        stored = self._metadata.stored([message.payload for message in messages], messages)
        return dict(zip((message.offset for message in messages), stored, strict=True))

    def unopened(self, position: At, cursor: Any) -> tuple[int, float | None]:
        """The lag: offsets up to the stream's end; those that the broker keeps for itself are among them."""
        at = StreamPosition.of(position)
        try:
            end, _ = self._lookahead.end()
        except StoreUnavailable:
            return len(self._lookahead.behind(at)), None
        return max(0, end - at.next), None

    @classmethod
    def server_ids(cls, position: At, numbers: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], str]:
        """Their offsets."""
        return {number: str(number[0]) for number in numbers}

    @classmethod
    def by_server_id(cls, position: At, given: str) -> tuple[int, int] | None:
        """By its offset."""
        return two_numbers(given, "0")

    def _range(self, at: At) -> OffsetRange:
        return range_at(self._broker.name, at)


def _checked_start(where: str, start: object) -> Start:
    is_offset = isinstance(start, int) and not isinstance(start, bool) and start >= 0
    is_time = isinstance(start, datetime) and start.tzinfo is not None
    if start in ("earliest", "latest") or is_offset or is_time:
        return cast("Start", start)
    raise UsageError(
        f"{where}: start is {shown(start)}; it is 'earliest', 'latest', an offset, or a time with its time zone",
        argument="start",
    )


def _piece(one: OffsetRange, rest: OffsetRange | None, seed: int) -> Piece:
    expected = expectation_of(one.offsets, seed)
    return Piece(at_of(one), one.messages, one.bytes, expected, None if rest is None else at_of(rest))
