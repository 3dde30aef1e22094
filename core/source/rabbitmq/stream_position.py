"""How far a subscription is in a stream, and which offsets a slice has: gaps are where the broker keeps its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stormproof.core.errors import Json, UsageError
from stormproof.core.pending.audit import Finding, NumberedAudit, OpenedSlice
from stormproof.core.pending.rows import At
from stormproof.core.source.kafka.offsets import OffsetRange


@dataclass(frozen=True, slots=True)
class Mark:
    """The last message that was opened: its offset, and a checksum of its payload. It tells a stream that was made again."""

    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets that retention removed before they were opened; `at` is when that was seen (ISO 8601)."""

    start: int
    stop: int
    at: str


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The offset that a subscription began with, and the first one that was never opened."""

    first: int
    next: int
    mark: Mark | None = None
    lost: tuple[Lost, ...] = ()

    def without(self, lost: Sequence[Lost]) -> StreamPosition:
        """With lost offsets on record, and behind them."""
        moved = self
        for one in lost:
            if one.start == moved.next:
                moved = replace(moved, next=one.stop, mark=None, lost=(*moved.lost, one))
        return moved

    def to_json(self) -> At:
        """For the store."""
        return {
            "first": self.first,
            "next": self.next,
            "mark": None if self.mark is None else [self.mark.offset, self.mark.checksum],
            "lost": [[one.start, one.stop, one.at] for one in self.lost],
        }

    @classmethod
    def of(cls, at: Mapping[str, Json]) -> StreamPosition:
        """What `to_json` wrote.

        Raises:
            UsageError: it is no position of a stream.
        """
        match at:
            case {"first": int(first), "next": int(next_), "mark": mark, "lost": list(lost)}:
                return cls(first, next_, _mark(mark), tuple(_lost(one) for one in lost))
            case _:
                raise UsageError(f"not a position of a stream: {sorted(at)}")


def _mark(value: Json) -> Mark | None:
    match value:
        case [int(offset), int(checksum)]:
            return Mark(offset, checksum)
        case _:
            return None


def _lost(value: Json) -> Lost:
    match value:
        case [int(start), int(stop), str(at)]:
            return Lost(start, stop, at)
        case _:
            raise UsageError(f"not a lost range: {value}")


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
    """Slices are ranges of offsets; what retention took counts as handed out, and is shown."""

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """As for all numbered messages, with what was lost."""
        try:
            lost = StreamPosition.of(position).lost if position else ()
        except UsageError as error:
            return [Finding(f"the position of source {self._who.source} cannot be read: {error.message}")]
        ranges: list[tuple[At, Any]] = [({"range": [one.start, one.stop]}, one) for one in lost]
        taken = [OpenedSlice(at, "a lost range", None, taken=True) for at, _ in ranges]
        return [
            *super().findings(position, [*held, *taken], trusted),
            *(
                Finding(
                    f"source {self._who.source}: offsets {one.start} to {one.stop - 1} were lost: retention had removed "
                    f"them before they were opened (seen {one.at}, on_gap='record')"
                )
                for one in lost
            ),
        ]
