"""What the audit needs to know of a Postgres queue: spans between two snapshots, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg import Cursor

from stormproof.core.base.errors import Json
from stormproof.core.pending.connector import Finding, Kept, OpenedSlice, SliceAudit
from stormproof.core.pending.rows import At, Subscriber
from stormproof.core.postgres.store import query
from stormproof.core.source.postgres_queue.message_table import MessageTable, index_ranges_only, standing, unopened
from stormproof.core.source.postgres_queue.position import QueuePlace, QueuePosition, Snapshot, Span
from stormproof.core.source.postgres_queue.reader import content, ids_of

_NOWHERE: Final = QueuePlace(0, 0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One interval of a span, and who has it."""

    span: Span
    held: OpenedSlice

    @property
    def low(self) -> QueuePlace:
        return self.span.after or _NOWHERE

    def begins_before(self, place: QueuePlace | None) -> bool:
        return place is None or self.low < place


class QueueAudit(SliceAudit):
    """One subscription of a Postgres queue, by its positions and its message table."""

    def __init__(self, who: Subscriber, cursor: Cursor[Any]) -> None:
        super().__init__(who, cursor)
        self._queue = who.source

    @property
    def _table(self) -> MessageTable:
        # Not at once: `unsubscribed` is asked of any source's name, and some are no queue's.
        return MessageTable(self._queue)

    def can_read(self, at: At) -> bool:
        """Whether it has a span."""
        return span_of(at) is not None

    def reach(self, at: At) -> tuple[int, bool, QueuePlace]:
        """How far its span goes."""
        span = span_of(at)
        return (0, False, _NOWHERE) if span is None else _reach(span)

    def contains(self, at: At, id_: int, origin: int) -> bool:
        """Whether the slice's two snapshots and places enclose the message."""
        span = span_of(at)
        return span is not None and span.holds(origin, id_)

    def is_unopened(self, position: At, id_: int, origin: int) -> bool:
        """Whether the message lies behind the subscription's position."""
        at, place = QueuePosition.of(position), QueuePlace(origin, id_)
        if at.end is None:
            return not at.start.sees(origin)
        return not at.end.sees(origin) or (not at.start.sees(origin) and (at.after is None or place > at.after))

    def has(self, id_: int, origin: int) -> bool:
        """Whether the queue's table has the message."""
        statement = f"select 1 from {self._table.sql} where xid = %s::text::xid8 and id = %s"
        return query(self._cursor, statement, str(origin), id_).fetchone() is not None

    def count(self, at: At) -> int | None:
        """Counted in the message table, by its index."""
        span = span_of(at)
        if span is None:
            return None
        with index_ranges_only(self._cursor):
            return self._count(span)

    def unopened(self, position: At) -> tuple[int, float | None]:
        """Counted in the message table: the cost grows with them."""
        return unopened(self._cursor, self._table, QueuePosition.of(position).unopened_conditions())

    def findings(self, position: At, held: Sequence[OpenedSlice], trusted: Sequence[At]) -> list[Finding]:
        """Spans must cover all that was handed out, each message once; and the queue must be numbered by this server."""
        furthest = max((span for at in trusted if (span := span_of(at)) is not None), key=_reach, default=None)
        pieces: dict[tuple[str, str], list[_Piece]] = defaultdict(list)
        order: dict[tuple[str, str], int] = {}
        for one in held:
            span = span_of(one.at)
            if span is None:
                continue
            key = (str(span.start), str(span.end))
            if one.txid is not None:
                order.setdefault(key, one.txid)
            if one.taken:
                pieces[key].append(_Piece(span, one))
        if furthest is not None:
            order.setdefault((str(furthest.start), str(furthest.end)), 0)
        with index_ranges_only(self._cursor):
            found = self._tiled(pieces, order, furthest, QueuePosition.of(position))
        return found + unreachable(self._cursor, self._table, QueuePosition.of(position).unopened_conditions())

    def unsubscribed(self) -> list[Finding]:
        """Messages that no reader reaches, since the queue is of another server; none where there is no such queue."""
        known = query(self._cursor, "select 1 from stormproof.queue where queue = %s", self._queue).fetchone()
        return unreachable(self._cursor, self._table, ["true"]) if known else []

    def kept(self, slices: Sequence[OpenedSlice]) -> Kept:
        """By the hashes that were taken when they were opened. A partition is dropped whole once all is resolved: of ids in
        partitions that are there, none may lack.
        """
        wrong, undigested, whole = list[Finding](), 0, 0
        hashed = content(self._cursor)
        with index_ranges_only(self._cursor):
            for one in slices:
                span, recorded = span_of(one.at), one.at.get("content")
                if span is None or not isinstance(recorded, int):
                    undigested += 1
                    continue
                low, high, messages = ids_of(one.at)
                counted = f"select count(*), {hashed} from ({self._table.select('id, payload', span.conditions())}) m"
                found = query(self._cursor, counted).fetchone() or (0, 0)
                if found == (messages, recorded):
                    whole += messages
                elif found[0] < messages and not self._keeps(low, high):
                    continue
                else:
                    what = (
                        f"{found[0]} of {messages} messages are there"
                        if found[0] != messages
                        else "a message is another"
                    )
                    text = f"{one.holder}: {what} in queue {self._queue}, which keeps those that it opened"
                    wrong.append(Finding(text, one.txid))
        left_out = f"the messages of {undigested} batches: no digest of them is on record"
        compared = f"{whole} messages that queue {self._queue} still keeps"
        return Kept(whole, compared, tuple(wrong), (left_out,) if undigested else ())

    def _keeps(self, low: int, high: int) -> bool:
        """Whether all of these ids are of partitions that are there, and were when the table was first looked at: its lock
        keeps them. The partition for all others may have been emptied.
        """
        there = (part for part in self._table.partitions(self._cursor) if part.start is not None)
        for part in sorted(there, key=lambda part: part.start or 0):
            named = query(self._cursor, "select to_regclass(%s)", part.table).fetchone()
            if part.start is not None and part.stop is not None and named != (None,) and part.start <= low < part.stop:
                low = part.stop
        return low > high

    def _tiled(
        self,
        pieces: Mapping[tuple[str, str], list[_Piece]],
        order: Mapping[tuple[str, str], int],
        trusted: Span | None,
        position: QueuePosition,
    ) -> list[Finding]:
        findings: list[Finding] = []
        previous: Snapshot | None = None
        for key in sorted(order, key=lambda key: order[key]):
            start, end = Snapshot.parse(key[0]), Snapshot.parse(key[1])
            above: QueuePlace | None = _NOWHERE
            older = False
            if trusted is not None and end == trusted.end:
                above = trusted.last
            elif trusted is not None and end.xmax <= trusted.end.xmax:
                # A part that was opened again, of a span that was handed out whole before the trusted one.
                above, older = None, True
            if not older and previous is not None and previous != start:
                findings.extend(self._missed(Span(previous, start), "between two spans", order[key]))
                findings.extend(self._again(Span(start, previous), order[key]))
            of_span, covered = self._overlaps_and_gaps(Span(start, end), pieces.get(key, []), above)
            findings += of_span
            if older:
                continue
            known = _further(covered, above)
            stop = position.after if position.end == end else None
            if known is not None and (stop is None or known < stop):
                findings.extend(self._missed(Span(start, end, known, stop), f"at the end of span {end}", order[key]))
            previous = end
        return findings

    def _overlaps_and_gaps(
        self, span: Span, pieces: Sequence[_Piece], above: QueuePlace | None
    ) -> tuple[list[Finding], QueuePlace | None]:
        """What is wrong within one span up to its last piece, and how far the pieces cover it (None: to its end)."""
        findings: list[Finding] = []
        covered: QueuePlace | None = _NOWHERE
        for piece in sorted(pieces, key=lambda piece: piece.low):
            known = _further(covered, above)
            if piece.begins_before(covered):
                text = f"{piece.held.holder} holds messages that another batch of the same span holds, too"
                findings.append(Finding(text, piece.held.txid))
            elif known is not None and piece.low > known:
                gap = Span(span.start, span.end, known, piece.low)
                findings.extend(self._missed(gap, f"before {piece.held.holder}", piece.held.txid))
            last = piece.span.last
            covered = None if covered is None or last is None else max(covered, last)
        return findings, covered

    def _missed(self, span: Span, where: str, txid: int | None) -> Iterable[Finding]:
        missed = self._count(span)
        if missed:
            yield Finding(f"{missed} messages of queue {self._queue} {where} were handed out to no batch", txid)

    def _again(self, span: Span, txid: int) -> Iterable[Finding]:
        again = self._count(span)
        if again:
            yield Finding(
                f"txid {txid} begins before the span that was handed out last: {again} messages of queue {self._queue} "
                "were handed out again",
                txid,
            )

    def _count(self, span: Span) -> int:
        return count(self._cursor, self._table, span.conditions())


def unreachable(cursor: Cursor[Any], table: MessageTable, unopened: Iterable[str]) -> list[Finding]:
    """Whether readers of the queue are refused, and how many of its unopened messages that leaves behind.

    `unopened` are disjoint SQL conditions for the messages that were never opened.
    """
    with index_ranges_only(cursor):
        refusal = standing(cursor, table.queue, table.sql).refusal
        left = 0 if refusal is None else count(cursor, table, unopened)
    if not left:
        return []
    return [Finding(f"no reader reaches {left} messages of queue {table.queue}: {refusal}", unreachable=True)]


def count(cursor: Cursor[Any], table: MessageTable, conditions: Iterable[str]) -> int:
    """How many messages meet one of the (disjoint) conditions."""
    found = query(cursor, f"select count(*) from ({table.select('1', conditions)}) m").fetchone()
    return int(found[0]) if found else 0


def span_of(position: Mapping[str, Json]) -> Span | None:
    """The span of a slice; None where there is none."""
    inner = position.get("span")
    value = inner if isinstance(inner, dict) else position
    if "start" not in value or "end" not in value:
        return None
    try:
        return Span.from_json(dict(value))
    except (ValueError, KeyError):
        return None


def _reach(span: Span) -> tuple[int, bool, QueuePlace]:
    """How far a span goes: by its end, and within it; one without a last place goes to the end."""
    return span.end.xmax, span.last is None, span.last or _NOWHERE


def _further(one: QueuePlace | None, other: QueuePlace | None) -> QueuePlace | None:
    """The later of two places; None is the end."""
    return None if one is None or other is None else max(one, other)
