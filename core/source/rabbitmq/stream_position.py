"""How far a subscription is in a stream, and which offsets a slice has: gaps are where the broker keeps its own.

A look ahead tells which offsets have a message behind a position, and whether it is still the same stream.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, NamedTuple

import numpy as np

from stormproof.core.base.errors import Json, StoreUnavailable, StormproofError, UsageError
from stormproof.core.contract.source import Limit
from stormproof.core.pending.connector import Finding, NumberedAudit, OpenedSlice
from stormproof.core.pending.continuity import CONTINUOUS, Continuity, ContinuityLook, at_least, looks_in, with_looks
from stormproof.core.pending.rows import At
from stormproof.core.source.kafka.position import OffsetRange
from stormproof.core.source.rabbitmq.client import PREFETCH_MAX, BrokerQueue
from stormproof.core.source.rabbitmq.stream_reader import StreamFeed, StreamMessage, let_go


@dataclass(frozen=True, slots=True)
class Mark:
    """The last message that was opened: its offset, and a checksum. It tells a stream that was made again, or set back."""

    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The offset that a subscription began with, and the first one that was never opened."""

    first: int
    next: int
    mark: Mark | None = None
    looks: tuple[ContinuityLook, ...] = ()

    def noted(self, looks: Sequence[ContinuityLook]) -> StreamPosition:
        """With these on record, and behind what was removed."""
        moved = self
        for one in looks:
            if int(one.behind) + 1 == moved.next:  # else it is on record: a mark that came since stays
                next_ = int(one.before) if one.before else moved.next
                on_record = looks_in(with_looks(moved.to_json(), [one]))
                moved = replace(moved, next=next_, mark=None, looks=tuple(on_record))
        return moved

    def to_json(self) -> At:
        """For the store."""
        mark: list[Json] | None = None if self.mark is None else [self.mark.offset, self.mark.checksum]
        return with_looks({"first": self.first, "next": self.next, "mark": mark}, self.looks)

    @classmethod
    def of(cls, at: Mapping[str, Json]) -> StreamPosition:
        """What `to_json` wrote.

        Raises:
            UsageError: it is no position of a stream.
        """
        match at:
            case {"first": int(first), "next": int(next_), "mark": mark}:
                return cls(first, next_, _mark(mark), tuple(looks_in(dict(at))))
            case _:
                raise UsageError(f"not a position of a stream: {sorted(at)}")


def _mark(value: Json) -> Mark | None:
    match value:
        case [int(offset), int(checksum)]:
            return Mark(offset, checksum)
        case _:
            return None


# ---- slices: the messages of one range of offsets, which is a partition's to Kafka


def whole(stream: str, start: int, stop: int) -> OffsetRange:
    """A range that has no messages yet."""
    return OffsetRange(stream, 0, 0, start, stop, 0, 0)


def at_of(one: OffsetRange) -> At:
    """A slice, for the ledger."""
    return {"range": [one.start, one.stop], "count": one.messages, "gaps": one.gaps}


def range_at(stream: str, at: Mapping[str, Json]) -> OffsetRange:
    """What `at_of` wrote.

    Raises:
        UsageError: it is no slice of a stream.
    """
    match at:
        case {"range": [int(start), int(stop)], "count": int(count), "gaps": None | str() as gaps}:
            return OffsetRange(stream, 0, 0, start, stop, count, 0, gaps if isinstance(gaps, str) else None)
        case _:
            raise UsageError(f"not a slice of a stream: {sorted(at)}")


class StreamAudit(NumberedAudit):
    """Slices are ranges of offsets; what retention took counts as handed out."""

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the slice has a message at the offset: the broker keeps some offsets for itself."""
        return super().contains(at, id_, origin) and bool(np.isin(id_, range_at(self._who.source, at).offsets))

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """As for all numbered messages."""
        ranges: list[At] = [
            {"range": [int(one.behind) + 1, int(one.before)]} for one in looks_in(position) if one.before
        ]
        taken = [OpenedSlice(at, "a lost range", None, taken=True) for at in ranges]
        return super().findings(position, [*held, *taken], trusted)


# ---- the look ahead

_AHEAD: Final = 2
"""Slices that are looked ahead."""
_SAME_S: Final = 2.0
"""How long the last message that was opened may take to come again, before it counts as gone."""


_WHY: Final = "the stream was deleted and made again, or its broker lost messages and gives their offsets again"


class Seen(NamedTuple):
    """A message that is there: its offset, the bytes of its payload, and a checksum with the publisher's id and time."""

    offset: int
    bytes: int
    checksum: int

    @classmethod
    def of(cls, message: StreamMessage) -> Seen:
        """What is kept of a message."""
        known = f"{message.properties.message_id} {message.properties.timestamp}".encode()
        return cls(message.offset, len(message.payload), zlib.crc32(message.payload, zlib.crc32(known)))


class StreamLookahead:
    """Looks ahead of the position. It reads each message once, as long as the position only moves on."""

    def __init__(self, broker: BrokerQueue) -> None:
        self._broker = broker
        self._feed = StreamFeed(broker)
        self._probe = StreamFeed(broker)
        self._start: int | None = None
        self._seen: list[Seen] = []

    def close(self) -> None:
        """Let the connection go, and forget what was seen."""
        self._feed.drop()
        self._probe.drop()
        let_go(self._broker)  # of readers in this process
        self._start, self._seen = None, []

    def pump(self) -> None:
        """Answer the broker's heartbeats."""
        self._feed.pump()
        self._probe.pump()

    def look(self, position: StreamPosition, limit: Limit) -> ContinuityLook:
        """See what a slice of this limit needs, and whether that follows on what was opened.

        Raises:
            StoreUnavailable: the broker is away.
        """
        try:
            return self._look(position, max(1, limit.messages))
        except StormproofError:
            self.close()
            raise

    def _look(self, position: StreamPosition, wanted: int) -> ContinuityLook:
        stop = self._seen[-1].offset + 1 if self._seen else self._start
        if self._start is None or stop is None or not self._start <= position.next <= stop:
            look = self._begin(position)
            if look is not CONTINUOUS or self._start is None:
                self.close()
                return look
        del self._seen[: bisect_left(self._seen, position.next, key=lambda one: one.offset)]
        self._start = position.next
        while len(self._seen) < wanted * _AHEAD:
            arrived = self._feed.arrived()
            if not arrived:
                break
            self._seen += map(Seen.of, arrived)
        return CONTINUOUS

    def _begin(self, position: StreamPosition) -> ContinuityLook:
        """Read from the last message that was opened on: it must be the one that it was. Where the stream has no message, as
        where retention left none or it was made again, the next one will tell.
        """
        self._start, self._seen = None, []
        self._feed.begin(max(0, position.next - 1))
        arrived = self._feed.arrived() or (self._feed.waited(_SAME_S) if position.mark is not None else [])
        seen = [Seen.of(message) for message in arrived]
        if not seen and position.next and (end := self.end()[0]) < position.next:
            if not end:
                return CONTINUOUS
            text = f"it ends at offset {end}, and offsets up to {position.next - 1} were opened: {_WHY}"
            return ContinuityLook(Continuity.REWOUND, text, behind=str(end), before=str(position.next))
        mark = position.mark
        if mark is not None and seen and seen[0].offset == mark.offset and seen[0].checksum != mark.checksum:
            text = f"the message at offset {mark.offset} is not the one that was opened: {_WHY}"
            return ContinuityLook(Continuity.REWOUND, text, behind=str(mark.offset))
        self._start = position.next
        self._seen = [one for one in seen if one.offset >= position.next]
        if self._seen and self._seen[0].offset > position.next:
            first = self.first()  # else the broker keeps something of its own there
            behind = str(position.next - 1)
            if first == position.next + 1:
                text = (
                    f"whether offset {position.next} had a message, which was removed before it was read, cannot be told: "
                    "it may be one that the broker keeps for itself where a segment begins"
                )
                return ContinuityLook(Continuity.UNKNOWN, text, 1, behind, str(first))
            if first > position.next:
                text = (
                    f"{at_least(position)}offsets {position.next} to {first - 1} were removed by the stream's retention "
                    "before they were read"
                )
                return ContinuityLook(Continuity.REMOVED, text, first - position.next, behind, str(first))
        if mark is not None and not seen:
            raise StoreUnavailable(
                f"{self._broker.where}: its broker gives no message from offset {mark.offset} on",
                stream=self._broker.name,
            )
        if mark is not None and seen[0].offset > mark.offset:
            text = (
                "whether it was set back, or made again, cannot be told: the message at offset "
                f"{mark.offset}, the last that was opened, was removed since"
            )
            return ContinuityLook(Continuity.UNKNOWN, text, behind=str(mark.offset))
        return CONTINUOUS

    def behind(self, position: StreamPosition) -> list[Seen]:
        """What was seen from the position on."""
        return self._seen[bisect_left(self._seen, position.next, key=lambda one: one.offset) :]

    # ---- where the stream begins and ends, over a connection of its own

    def first(self) -> int:
        """The offset of the first message that is left; 0 where there is none."""
        arrived = self._probed("first", 1)
        return arrived[0].offset if arrived else 0

    def end(self) -> tuple[int, Mark | None]:
        """The offset behind the last message, and that message."""
        arrived = self._probed("last", PREFETCH_MAX)
        if not arrived:
            return 0, None
        last = Seen.of(arrived[-1])
        return last.offset + 1, Mark(last.offset, last.checksum)

    def at_time(self, when: datetime) -> int:
        """The offset of the first chunk of messages that has one from this time on; the end where there is none."""
        arrived = self._probed(when, 1)
        return arrived[0].offset if arrived else self.end()[0]

    def _probed(self, offset: str | datetime, prefetch: int) -> list[StreamMessage]:
        try:
            self._probe.begin(offset, prefetch)
            return self._probe.arrived()
        except StormproofError:
            self._probe.drop()
            raise
