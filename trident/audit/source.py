"""Finds a topology's source, and reads what queues, sources in memory and groups say of their messages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.core.source.group import SpoutPart, combined, member_subscription, parts_of, shown, sources_in, unshown
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.postgres_queue.messages import MessageTable
from stormproof.core.source.postgres_queue.position import Place, Snapshot, Span
from stormproof.core.source.postgres_queue.slices import Position
from stormproof.core.source.protocol import Backlog
from stormproof.trident.audit.evidence import (
    EDIT_HASHES_SQL,
    DeadMessage,
    Finding,
    PrunableEvidence,
    SourceEvidence,
    StoredSource,
    WaitingMessage,
    is_taken,
)
from stormproof.trident.audit.files import find_files
from stormproof.trident.audit.ledger import LedgerSnapshot, TopologyRow
from stormproof.trident.audit.streams import find_stream
from stormproof.trident.audit.unreachable import count, unreachable
from stormproof.trident.ledger.rows import Txn

_SHOWN: Final = re.compile(r"(\d+)-(\d+)")
_NOWHERE: Final = Place(0, 0)


SourceReader: TypeAlias = Callable[[LedgerSnapshot, TopologyRow], SourceEvidence | None]
"""Finds a topology's source; None where it cannot be reached from here."""


# -- the Postgres queue ----------------------------------------------------------------------------------------------


def queue_reader(ledger: LedgerSnapshot, topology: TopologyRow) -> SourceEvidence | None:
    """What this topology subscribes to in the ledger's database: a queue, files, its spouts' sources as one, or the
    micro-batches of a streaming query that go straight into sinks.

    None where there is none, or where one of several spouts reads something else.
    """
    if not ledger.is_postgres:
        return None
    found = _stored_source(ledger.connection, [topology.incarnation, topology.name], topology.source)
    if found is not None:
        return found
    stream = find_stream(ledger.connection, topology.incarnation, topology.source)
    if stream is not None:
        return stream
    spouts = sources_in(topology.source)
    members = group_sources(ledger, topology)
    return GroupEvidence(topology.source, members) if spouts and members.keys() == spouts.keys() else None


def group_sources(ledger: LedgerSnapshot, topology: TopologyRow) -> dict[str, StoredSource]:
    """The queues and files in the ledger's database that a topology with several spouts subscribes to, by spout."""
    if not ledger.is_postgres:
        return {}
    found: dict[str, StoredSource] = {}
    for spout, source in sources_in(topology.source).items():
        one = _stored_source(ledger.connection, [member_subscription(topology.incarnation, spout)], source)
        if one is not None:
            found[spout] = one
    return found


def _stored_source(connection: sa.Connection, subscriptions: Sequence[str], source: str) -> StoredSource | None:
    """The queue, or the files, with one of these subscriptions; rather the one of this name."""
    found: list[StoredSource] = []
    if connection.execute(sa.text("select to_regclass('stormproof.queue_subscription')")).scalar_one() is not None:
        row = connection.execute(
            sa.text(
                "select queue, subscription from stormproof.queue_subscription"
                " where subscription = any(:subscriptions)"
                " order by queue = :source desc, array_position(:subscriptions, subscription) limit 1"
            ),
            {"subscriptions": list(subscriptions), "source": source},
        ).one_or_none()
        if row is not None:
            found.append(QueueEvidence(connection, row.queue, row.subscription))
    of_files = find_files(connection, subscriptions, source)
    if of_files is not None:
        found.append(of_files)
    return min(found, key=lambda one: one.name != source, default=None)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One interval of a span, and who has it: a batch, or a slice that the queue still holds."""

    span: Span
    holder: str
    txid: int | None

    @property
    def low(self) -> Place:
        return self.span.after or _NOWHERE

    def begins_before(self, place: Place | None) -> bool:
        return place is None or self.low < place


class QueueEvidence:
    """One subscription of a Postgres queue, read in the ledger's own transaction."""

    def __init__(self, connection: sa.Connection, queue: str, subscription: str) -> None:
        self._connection = connection
        self._queue = queue
        self._table = MessageTable(queue)
        self._key = {"queue": queue, "subscription": subscription}

    @property
    def name(self) -> str:
        """The queue."""
        return self._queue

    @property
    def subscription(self) -> str:
        """The topology's subscription to it."""
        return self._key["subscription"]

    def backlog(self) -> Backlog:
        """What is left; `ready` counts what is committed now and was not opened, and what was returned."""
        leased = {
            (row.kind, row.returned): int(row.messages)
            for row in self._rows(
                "select kind, state = 'returned' as returned, sum(messages) as messages from stormproof.queue_slice"
                " where queue = :queue and subscription = :subscription group by 1, 2"
            )
        }
        waiting = self._rows(
            "select count(*) as n from stormproof.queue_retry"
            " where queue = :queue and subscription = :subscription and slice is null"
        )[0].n
        dead = self._rows(
            "select count(*) as n from stormproof.dead_letter"
            " where queue = :queue and subscription = :subscription and disposal is null"
        )[0].n
        return Backlog(
            ready=count(self._connection, self._table, self._unopened()) + leased.get(("main", True), 0),
            pending=leased.get(("main", False), 0) + leased.get(("retry", False), 0),
            waiting=waiting + leased.get(("retry", True), 0),
            dead=dead,
            oldest_ready_age_s=self._unopened_age_s(),
        )

    def _unopened_age_s(self) -> float | None:
        """How long the first message that was never opened has waited; None where there is none."""
        conditions = self._unopened()
        first = " union all ".join(
            f"(select put_at from {self._table.sql} where {condition} order by xid, id limit 1)"
            for condition in conditions
        )
        if not first:
            return None
        age: float | None = self._connection.exec_driver_sql(
            f"select extract(epoch from clock_timestamp() - min(put_at))::float8 from ({first}) f"
        ).scalar_one()
        return age

    def waiting(self) -> Mapping[str, WaitingMessage]:
        """The queue's retry rows."""
        rows = self._rows(
            "select r.xid::text as xid, r.id, r.times_failed, r.not_before, s.owner from stormproof.queue_retry r"
            " left join stormproof.queue_slice s on s.id = r.slice"
            " where r.queue = :queue and r.subscription = :subscription order by r.id"
        )
        return {
            f"{row.xid}-{row.id}": WaitingMessage(f"{row.xid}-{row.id}", row.times_failed, row.not_before, row.owner)
            for row in rows
        }

    def dead(self) -> Sequence[DeadMessage]:
        """The queue's dead letters."""
        rows = self._rows(
            "select xid::text as xid, id, reason, error, times_failed, dead_at, disposal, disposed_by, disposed_why,"
            f" disposed_at, {EDIT_HASHES_SQL} from stormproof.dead_letter"
            " where queue = :queue and subscription = :subscription order by number"
        )
        return [
            DeadMessage(
                message=f"{row.xid}-{row.id}",
                reason=row.reason,
                error=row.error,
                times_failed=row.times_failed,
                dead_at=row.dead_at,
                disposal=row.disposal,
                by=row.disposed_by,
                why=row.disposed_why,
                disposed_at=row.disposed_at,
                payload_sha256=row.payload_sha256,
                new_payload_sha256=row.new_payload_sha256,
            )
            for row in rows
        ]

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the slice's two snapshots and places enclose the message."""
        span = span_of(position)
        return span is not None and span.holds(*_place_of(message))

    def is_waiting_to_be_opened(self, message: str) -> bool:
        """Whether the queue's table has it, and it is in a returned slice or beyond the subscription's position."""
        place = _place_of(message)
        there = self._rows(
            f"select 1 from {self._table.sql} where xid = cast(:xid as xid8) and id = :id",
            xid=str(place.xid),
            id=place.id,
        )
        if not there:
            return False
        for row in self._rows(
            "select from_snapshot::text as start, to_snapshot::text as end, after_xid::text as after_xid, after_id,"
            " last_xid::text as last_xid, last_id from stormproof.queue_slice"
            " where queue = :queue and subscription = :subscription and kind = 'main' and state = 'returned'"
        ):
            if _span_of_row(row).holds(*place):
                return True
        start, end, after = self._position()
        if end is None:
            return not start.sees(place.xid)
        return not end.sees(place.xid) or (not start.sees(place.xid) and (after is None or place > after))

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """The batch of new messages whose span ends last."""
        spans = [(span, txn.txid) for txn in txns if not txn.retry and (span := span_of(txn.position)) is not None]
        best = max(spans, key=lambda one: _reach(one[0]), default=None)
        return () if best is None else (best[1],)

    def slice_findings(self, txns: Sequence[Txn]) -> list[Finding]:
        """Spans of taken batches and of the queue's own leases must cover, once, all that was handed out."""
        return self.slice_findings_behind(txns, ())

    def slice_findings_behind(self, txns: Sequence[Txn], forgotten: Sequence[Txn]) -> list[Finding]:
        """The same, from the furthest span of the forgotten batches on; before it nothing may be there twice."""
        spans = [span for txn in forgotten if not txn.retry and (span := span_of(txn.position)) is not None]
        trusted = max(spans, key=_reach, default=None)
        pieces: dict[tuple[str, str], list[_Piece]] = defaultdict(list)
        order: dict[tuple[str, str], int] = {}
        for txn in txns:
            if txn.retry:
                continue
            span = span_of(txn.position)
            if span is None:
                return [Finding(f"txid {txn.txid}: its position in queue {self._queue} cannot be read", txn.txid)]
            key = (str(span.start), str(span.end))
            order.setdefault(key, txn.txid)
            if is_taken(txn):
                pieces[key].append(_Piece(span, f"txid {txn.txid} ({txn.state})", txn.txid))
        for row in self._rows(
            "select owner, state, from_snapshot::text as start, to_snapshot::text as end, after_xid::text as after_xid,"
            " after_id, last_xid::text as last_xid, last_id from stormproof.queue_slice"
            " where queue = :queue and subscription = :subscription and kind = 'main'"
        ):
            span = _span_of_row(row)
            pieces[(str(span.start), str(span.end))].append(
                _Piece(span, f"the queue's {row.state} slice{f' of {row.owner}' if row.owner else ''}", None)
            )
        if trusted is not None:
            order.setdefault((str(trusted.start), str(trusted.end)), 0)
        return self._tiled(pieces, order, trusted) + self._retry_findings() + self._unreachable()

    def _retry_findings(self) -> list[Finding]:
        """A retry that belongs to a slice which is not there would never be opened again."""
        rows = self._rows(
            "select coalesce(s.id, r.slice) as id, s.messages as expected, count(r.id) as found"
            " from (select * from stormproof.queue_slice"
            " where queue = :queue and subscription = :subscription and kind = 'retry') s"
            " full join (select * from stormproof.queue_retry"
            " where queue = :queue and subscription = :subscription and slice is not null) r on r.slice = s.id"
            " group by s.id, r.slice, s.messages having s.messages is distinct from count(r.id) order by 1"
        )
        return [
            Finding(
                f"{row.found} retries of queue {self._queue} belong to slice {row.id}, which "
                + ("is not there" if row.expected is None else f"was made of {row.expected}")
            )
            for row in rows
        ]

    def _tiled(
        self,
        pieces: Mapping[tuple[str, str], list[_Piece]],
        order: Mapping[tuple[str, str], int],
        trusted: Span | None,
    ) -> list[Finding]:
        findings: list[Finding] = []
        _, current_end, current_after = self._position()
        previous: Snapshot | None = None
        for key in sorted(order, key=lambda key: order[key]):
            start, end = Snapshot.parse(key[0]), Snapshot.parse(key[1])
            above: Place | None = _NOWHERE
            older = False
            if trusted is not None and end == trusted.end:
                above = trusted.last
            elif trusted is not None and end.xmax <= trusted.end.xmax:
                above, older = None, True  # opened again, of a span that was handed out whole before
            if not older and previous is not None and previous != start:
                findings.extend(self._missed(Span(previous, start), "between two spans", order[key]))
                again = self._count(Span(start, previous))
                if again:
                    findings.append(
                        Finding(
                            f"txid {order[key]} begins before the span that was handed out last: {again} messages of "
                            f"queue {self._queue} were handed out again",
                            order[key],
                        )
                    )
            covered: Place | None = _NOWHERE
            for piece in sorted(pieces.get(key, []), key=lambda piece: piece.low):
                known = _further(covered, above)
                if piece.begins_before(covered):
                    findings.append(
                        Finding(
                            f"{piece.holder} holds messages that another batch of the same span holds, too", piece.txid
                        )
                    )
                elif known is not None and piece.low > known:
                    gap = Span(start, end, known, piece.low)
                    findings.extend(self._missed(gap, f"before {piece.holder}", piece.txid))
                last = piece.span.last
                covered = None if covered is None or last is None else max(covered, last)
            if older:
                continue
            known = _further(covered, above)
            stop = current_after if current_end == end else None
            if known is not None and (stop is None or known < stop):
                findings.extend(self._missed(Span(start, end, known, stop), f"at the end of span {end}", order[key]))
            previous = end
        return findings

    def _missed(self, span: Span, where: str, txid: int | None) -> Iterable[Finding]:
        missed = self._count(span)
        if missed:
            yield Finding(f"{missed} messages of queue {self._queue} {where} were handed out to no batch", txid)

    def _count(self, span: Span) -> int:
        statement = self._table.select("1", span.conditions())
        count: int = self._connection.exec_driver_sql(f"select count(*) from ({statement}) m").scalar_one()
        return count

    def _unreachable(self) -> list[Finding]:
        return unreachable(self._connection, self._table, self._unopened())

    def _unopened(self) -> list[str]:
        start, end, after = self._position()
        return Position(0, start, end, after, "", 0).unopened_conditions()

    def _position(self) -> tuple[Snapshot, Snapshot | None, Place | None]:
        row = self._rows(
            "select from_snapshot::text as start, to_snapshot::text as end, after_xid::text as after_xid, after_id"
            " from stormproof.queue_subscription where queue = :queue and subscription = :subscription"
        )[0]
        after = None if row.after_xid is None else Place(int(row.after_xid), row.after_id)
        return Snapshot.parse(row.start), None if row.end is None else Snapshot.parse(row.end), after

    def _rows(self, statement: str, **parameters: object) -> Sequence[Any]:
        return self._connection.execute(sa.text(statement), {**self._key, **parameters}).all()


def _reach(span: Span) -> tuple[int, bool, Place]:
    """How far a span goes: by its end, and within it; one without a last place goes to the end."""
    return span.end.xmax, span.last is None, span.last or _NOWHERE


def _further(one: Place | None, other: Place | None) -> Place | None:
    """The later of two places; None is the end."""
    return None if one is None or other is None else max(one, other)


def span_of(position: Mapping[str, Json]) -> Span | None:
    """The span in a position of a Postgres queue; None where there is none."""
    inner = position.get("span")
    value = inner if isinstance(inner, dict) else position
    if "start" not in value or "end" not in value:
        return None
    try:
        return Span.from_json(dict(value))
    except (ValueError, KeyError):
        return None


def _span_of_row(row: Any) -> Span:
    return Span(
        Snapshot.parse(row.start),
        Snapshot.parse(row.end),
        None if row.after_xid is None else Place(int(row.after_xid), row.after_id),
        None if row.last_xid is None else Place(int(row.last_xid), row.last_id),
    )


def _place_of(message: str) -> Place:
    match = _SHOWN.fullmatch(message)
    if match is None:
        raise UsageError(f"{message!r} is not a message of a Postgres queue; ids look like XID-NUMBER", message=message)
    return Place(int(match[1]), int(match[2]))


# -- several spouts --------------------------------------------------------------------------------------------------


class GroupEvidence:
    """The sources of several spouts, each with its own record; messages are named ``SPOUT:`` and the source's own id."""

    def __init__(self, name: str, members: Mapping[str, SourceEvidence]) -> None:
        self._name = name
        self._members = members

    @property
    def name(self) -> str:
        """The group."""
        return self._name

    def backlog(self) -> Backlog:
        """What is left, of all spouts together."""
        return combined([member.backlog() for member in self._members.values()])

    def waiting(self) -> Mapping[str, WaitingMessage] | None:
        """Every spout's; None where one of them only knows the number."""
        found: dict[str, WaitingMessage] = {}
        for spout, member in self._members.items():
            waiting = member.waiting()
            if waiting is None:
                return None
            for inner, message in waiting.items():
                found[shown(spout, inner)] = replace(message, message=shown(spout, message.message))
        return found

    def dead(self) -> Sequence[DeadMessage]:
        """Every spout's, oldest first."""
        found = [
            replace(letter, message=shown(spout, letter.message))
            for spout, member in self._members.items()
            for letter in member.dead()
        ]
        return sorted(found, key=lambda letter: letter.dead_at)

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the slice has a part of the message's spout that holds it."""
        spout, member, inner = self._member_of(message)
        part = _parts_of(position).get(spout)
        return part is not None and member.contains(part.position, inner)

    def is_waiting_to_be_opened(self, message: str) -> bool:
        """Whether the message's spout has it, in no lease."""
        _, member, inner = self._member_of(message)
        return member.is_waiting_to_be_opened(inner)

    def slice_findings(self, txns: Sequence[Txn]) -> list[Finding]:
        """What is wrong with the parts of each spout."""
        findings = [
            Finding(f"txid {txn.txid}: its position in {self._name} cannot be read, or names another spout", txn.txid)
            for txn in txns
            if not _parts_of(txn.position) or not _parts_of(txn.position).keys() <= self._members.keys()
        ]
        for spout, member in self._members.items():
            mine = [
                replace(txn, position=parts[spout].position)
                for txn in txns
                if spout in (parts := _parts_of(txn.position))
            ]
            findings += [replace(f, text=f"spout {spout}: {f.text}") for f in member.slice_findings(mine)]
        return findings

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """For each spout the batch that reaches furthest into its source."""
        found: set[int] = set()
        for spout, member in self._members.items():
            if isinstance(member, PrunableEvidence):
                found.update(member.furthest(self._parts(spout, txns)))
        return tuple(sorted(found))

    def slice_findings_behind(self, txns: Sequence[Txn], forgotten: Sequence[Txn]) -> list[Finding]:
        """The same, behind what the ledger has forgotten."""
        findings: list[Finding] = []
        for spout, member in self._members.items():
            if isinstance(member, PrunableEvidence):
                of_spout = member.slice_findings_behind(self._parts(spout, txns), self._parts(spout, forgotten))
                findings += [replace(f, text=f"spout {spout}: {f.text}") for f in of_spout]
        return findings

    def _parts(self, spout: str, txns: Sequence[Txn]) -> list[Txn]:
        """These batches, as one spout has them."""
        return [
            replace(txn, position=parts[spout].position) for txn in txns if spout in (parts := _parts_of(txn.position))
        ]

    def _member_of(self, message: str) -> tuple[str, SourceEvidence, str]:
        spout, inner = unshown(message) or ("", message)
        if spout not in self._members:
            raise UsageError(
                f"{message!r} is not a message of {self._name}; ids look like SPOUT:ID, with one of the spouts "
                f"{', '.join(self._members)}",
                message=message,
            )
        return spout, self._members[spout], inner


def _parts_of(position: Mapping[str, Json]) -> dict[str, SpoutPart]:
    """A group's parts; none where the row of the ledger was spoiled."""
    try:
        return parts_of(position)
    except UsageError:
        return {}


# -- the source in memory --------------------------------------------------------------------------------------------


class MemoryEvidence:
    """A source in this process's memory: it names its dead letters, and of what waits it knows the number."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The source."""
        return self._source.name

    def backlog(self) -> Backlog:
        """What is left."""
        return self._source.backlog()

    def waiting(self) -> None:
        """Only the number is known."""

    def dead(self) -> Sequence[DeadMessage]:
        """The source's dead letters."""
        return [DeadMessage.of(letter) for letter in self._source.dead_letters()]

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the slice names the message."""
        return message.isdecimal() and int(message) in _ids_of(position)

    def is_waiting_to_be_opened(self, message: str) -> bool:
        """Not known of one message."""
        del message
        return False

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """The batch with the highest message."""
        highest = [(max(ids), txn.txid) for txn in txns if not txn.retry and (ids := _ids_of(txn.position))]
        return (max(highest)[1],) if highest else ()

    def slice_findings(self, txns: Sequence[Txn]) -> list[Finding]:
        """Slices of taken batches must not overlap; below the highest message, each was in some slice."""
        return self.slice_findings_behind(txns, ())

    def slice_findings_behind(self, txns: Sequence[Txn], forgotten: Sequence[Txn]) -> list[Finding]:
        """The same, behind the highest message of what was forgotten."""
        holder: dict[int, int] = {}
        seen = set(range(1 + max((i for txn in forgotten for i in _ids_of(txn.position)), default=-1)))
        findings: list[Finding] = []
        for txn in txns:
            if txn.retry:
                continue
            ids = _ids_of(txn.position)
            seen.update(ids)
            if not is_taken(txn):
                continue
            twice = [i for i in ids if i in holder]
            if twice:
                findings.append(
                    Finding(
                        f"txid {txn.txid} holds message {twice[0]}, which txid {holder[twice[0]]} holds, too", txn.txid
                    )
                )
            holder.update(dict.fromkeys(ids, txn.txid))
        missed = sorted(set(range(max(seen, default=-1) + 1)) - seen)
        if missed:
            findings.append(
                Finding(f"{len(missed)} messages of source {self.name}, first {missed[0]}, were handed out to no batch")
            )
        return findings


def _ids_of(position: Mapping[str, Json]) -> list[int]:
    ids = position.get("ids")
    return [i for i in ids if isinstance(i, int)] if isinstance(ids, list) else []
