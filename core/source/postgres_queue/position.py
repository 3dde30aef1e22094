"""Positions in a queue: which messages two database snapshots enclose, as ranges of (xid, id).

A producer that commits late has small ids, so a position by id would skip its messages for ever. A position by
snapshot does not: message m lies in the span from `start` to `end` exactly when `start` did not see m's transaction and
`end` does. Between two fixed snapshots the set of messages no longer changes, so it can be cut anywhere: spans are
ordered and cut by (xid, id), the order of the table's primary key, so that finding a slice costs as much as the slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stormproof.core.base.errors import Json, UsageError

FIRST_XID = 3
"""Postgres's first ordinary transaction number."""


class QueuePlace(NamedTuple):
    """One message's place in the order of a queue."""

    xid: int
    id: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Postgres's `pg_snapshot`: sees transactions below `xmin`, none from `xmax` on, between them all but `running`."""

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """From Postgres's text form, ``xmin:xmax:xip,xip,...``."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(sorted(int(xid) for xid in running.split(",") if xid)))

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.running))}"

    def sees(self, xid: int) -> bool:
        """Whether the transaction had ended when the snapshot was taken; `pg_visible_in_snapshot` says the same."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def before(self, xid: int) -> Snapshot:
        """The snapshot with `xid` running: one's own transaction does not stand in the snapshot that it takes."""
        if xid >= self.xmax or not self.sees(xid):
            return self
        return Snapshot(min(self.xmin, xid), self.xmax, tuple(sorted({*self.running, xid})))

    def shifted(self, by: int) -> Snapshot:
        """The same, with `by` added to every number."""
        if by == 0:
            return self
        return Snapshot(self.xmin + by, self.xmax + by, tuple(xid + by for xid in self.running))


NOTHING = Snapshot(FIRST_XID, FIRST_XID)
"""The snapshot from before every message."""


@dataclass(frozen=True, slots=True)
class Range:
    """Messages of one transaction (`xid`, ids above `above` up to `upto`), or of all transactions between two."""

    xid: int | None
    above: int
    upto: int | None

    @property
    def sql(self) -> str:
        """As a condition that the primary key's index serves."""
        if self.xid is not None:
            upto = "" if self.upto is None else f" and id <= {self.upto}"
            return f"(xid = '{self.xid}'::xid8 and id > {self.above}{upto})"
        return f"(xid > '{self.above}'::xid8 and xid < '{self.upto}'::xid8)"

    def beyond(self, place: QueuePlace) -> tuple[Range, ...]:
        """The part behind a place within it, as ranges in order."""
        of_one = Range(place.xid, place.id, None if self.xid is None else self.upto)
        return (of_one,) if self.xid is not None else (of_one, Range(None, place.xid, self.upto))


@dataclass(frozen=True, slots=True)
class Span:
    """The messages that `end` sees and `start` does not, after place `after` and up to place `last`.

    Guarantee: the spans of one subscription, each beginning where the one before ended, hold every committed message
    once, however late its transaction commits and whatever its id.
    """

    start: Snapshot
    end: Snapshot
    after: QueuePlace | None = None
    last: QueuePlace | None = None

    def holds(self, xid: int, id_: int) -> bool:
        """Whether the message lies in the span; the definition that `ranges` must agree with."""
        return (
            self.end.sees(xid)
            and not self.start.sees(xid)
            and (self.after is None or (xid, id_) > self.after)
            and (self.last is None or (xid, id_) <= self.last)
        )

    def upto(self, last: QueuePlace) -> Span:
        """The part up to a place, that place included."""
        return replace(self, last=last)

    def beyond(self, after: QueuePlace) -> Span:
        """The part after a place."""
        return replace(self, after=after)

    def ranges(self) -> tuple[Range, ...]:
        """The span as disjoint ranges in order; each still needs the check against `end` (see `condition`)."""
        low = self.after or QueuePlace(0, 0)
        high = self.last
        found = list[Range]()
        for xid in self.start.running:  # were running at the start; all of them are below start.xmax
            if self.end.sees(xid) and low.xid <= xid and (high is None or xid <= high.xid):
                found.append(self._of_one(xid))
        first, stop = max(self.start.xmax, low.xid), self.end.xmax if high is None else high.xid + 1
        if first >= stop:
            return tuple(found)
        if first == low.xid:  # the transaction that the last cut went through
            found.append(self._of_one(first))
            first += 1
        if high is not None and high.xid >= first:
            if high.xid > first:
                found.append(Range(None, first - 1, high.xid))
            found.append(self._of_one(high.xid))
        elif first < stop:
            found.append(Range(None, first - 1, stop))
        return tuple(found)

    def _of_one(self, xid: int) -> Range:
        above = self.after.id if self.after is not None and self.after.xid == xid else 0
        return Range(xid, above, self.last.id if self.last is not None and self.last.xid == xid else None)

    def conditions(self) -> tuple[str, ...]:
        """The ranges as SQL conditions on `xid` and `id`, in order; a span that can hold nothing has none."""
        return tuple(self.condition(range_) for range_ in self.ranges())

    def condition(self, range_: Range) -> str:
        """One of the span's ranges, checked against `end`."""
        seen = f" and pg_visible_in_snapshot(xid, '{self.end}'::pg_snapshot)" if self.end.running else ""
        return range_.sql + seen

    def to_json(self) -> dict[str, Json]:
        """For the ledger; `from_json` reads it."""
        return {
            "start": str(self.start),
            "end": str(self.end),
            "after": None if self.after is None else list(self.after),
            "last": None if self.last is None else list(self.last),
        }

    @classmethod
    def from_json(cls, value: dict[str, Json]) -> Span:
        """What `to_json` wrote."""
        return cls(
            Snapshot.parse(str(value["start"])),
            Snapshot.parse(str(value["end"])),
            place_of(value.get("after")),
            place_of(value.get("last")),
        )


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """How far a subscription is: what `start` sees was opened once, and of the span to `end` all up to `after`.

    `end` is None between two spans. `server` and `timeline` say whose snapshots they are.
    """

    start: Snapshot
    end: Snapshot | None
    after: QueuePlace | None
    server: str
    timeline: int

    @classmethod
    def of(cls, at: Mapping[str, Json]) -> QueuePosition:
        """What `to_json` wrote.

        Raises:
            UsageError: it is no position in a queue.
        """
        match at:
            case {"from": str(start), "to": None | str() as end, "server": str(server), "timeline": int(timeline)}:
                after = place_of(at.get("after"))
                return cls(Snapshot.parse(start), None if end is None else Snapshot.parse(end), after, server, timeline)
            case _:
                raise UsageError(f"not a position in a Postgres queue: {sorted(at)}")

    def to_json(self) -> dict[str, Json]:
        """For the pending store."""
        return {
            "from": str(self.start),
            "to": None if self.end is None else str(self.end),
            "after": None if self.after is None else list(self.after),
            "server": self.server,
            "timeline": self.timeline,
        }

    @property
    def newest(self) -> Snapshot:
        """The newest snapshot of the position."""
        return self.end or self.start

    def behind(self, span: Span, last: QueuePlace | None) -> QueuePosition:
        """The position once a span was opened up to a place, or (None) whole."""
        if last is None:
            return replace(self, start=span.end, end=None, after=None)
        return replace(self, start=span.start, end=span.end, after=last)

    def unopened(self, now: Snapshot) -> tuple[Span, ...]:
        """What was not opened yet, as seen by `now`."""
        if self.end is None:
            return (Span(self.start, now),)
        return Span(self.start, self.end, self.after), Span(self.end, now)

    def unopened_conditions(self) -> list[str]:
        """SQL conditions for every message that was not opened yet, now or ever."""
        conditions = [f"xid = '{xid}'::xid8" for xid in self.newest.running]
        conditions.append(f"xid >= '{self.newest.xmax}'::xid8")
        if self.end is not None:
            conditions += Span(self.start, self.end, self.after).conditions()
        return conditions


def place_of(value: Json) -> QueuePlace | None:
    """A place from its JSON form, ``[xid, id]``."""
    match value:
        case None:
            return None
        case [int(xid), int(id_)]:
            return QueuePlace(xid, id_)
        case _:
            raise ValueError(f"not a place in a queue: {value!r}")
