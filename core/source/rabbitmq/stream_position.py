"""How far a subscription is in a stream, and which offsets a slice has: gaps are where the broker keeps its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.pending.audit import Finding, NumberedAudit, OpenedSlice
from stormproof.core.pending.continuity import Look, looks_in, with_looks
from stormproof.core.pending.rows import At
from stormproof.core.source.kafka.offsets import OffsetRange


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
    looks: tuple[Look, ...] = ()

    def noted(self, looks: Sequence[Look]) -> StreamPosition:
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
