"""Finds a topology's source in the ledger's database, and reads what the pending store records of its messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import TypeAlias, cast

import psycopg
import sqlalchemy as sa
from psycopg.rows import tuple_row

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.dead_letter import DeadLetter
from stormproof.core.contract.source import Backlog
from stormproof.core.pending.connector import Finding, Kept, OpenedSlice
from stormproof.core.pending.continuity import Continuity, looks_in
from stormproof.core.pending.journal import Journal, JournalCounts
from stormproof.core.pending.numbered import lowest_unresolved, next_of, range_of
from stormproof.core.pending.postgres import PostgresPendingStore
from stormproof.core.pending.redelivering import RedeliveringSource
from stormproof.core.pending.registry import connector_of
from stormproof.core.pending.rows import PendingRows, Subscriber, at_of
from stormproof.core.pending.source import PendingSource
from stormproof.core.source.spouts import member_subscription, sources_in
from stormproof.trident.audit.evidence import GroupEvidence, SourceEvidence, find_handed_in
from stormproof.trident.audit.ledger import LedgerSnapshot, TopologyRow
from stormproof.trident.ledger.tables import Txn
from stormproof.trident.terms.transaction_states import TxnCause, TxnState

SourceReader: TypeAlias = Callable[[LedgerSnapshot, TopologyRow], SourceEvidence | None]
"""Finds the record of a topology's source; None if the ledger's database does not have it."""


def stored_source(ledger: LedgerSnapshot, topology: TopologyRow) -> SourceEvidence | None:
    """The record of a topology's source in the ledger's database.

    That is one source, the sources of its spouts as one, or the micro-batches of a streaming query, or the jobs, that go
    straight to sinks. None if there is no record, or if one of several spouts reads a source elsewhere.
    """
    if not ledger.is_postgres:
        return None
    found = _pending(ledger.connection, [topology.incarnation, topology.name], topology.source)
    if found is not None:
        return found
    handed_in = find_handed_in(ledger.connection, topology.incarnation, topology.name, topology.source)
    if handed_in is not None:
        return handed_in
    spouts = sources_in(topology.source)
    members = spout_sources(ledger, topology)
    return GroupEvidence(topology.source, members) if spouts and members.keys() == spouts.keys() else None


def spout_sources(ledger: LedgerSnapshot, topology: TopologyRow) -> dict[str, PendingEvidence]:
    """The sources of a topology with several spouts that the ledger's database has, by spout."""
    if not ledger.is_postgres:
        return {}
    found: dict[str, PendingEvidence] = {}
    for spout, source in sources_in(topology.source).items():
        one = _pending(ledger.connection, [member_subscription(topology.incarnation, spout)], source)
        if one is not None:
            found[spout] = one
    return found


def recorded_source(ledger: LedgerSnapshot, topology: TopologyRow) -> SourceEvidence | None:
    """As `stored_source`; where one of several spouts reads a source elsewhere, the record of the others."""
    found = stored_source(ledger, topology)
    members = {} if found is not None else spout_sources(ledger, topology)
    return GroupEvidence(topology.source, members) if members else found


def open_losses(ledger: LedgerSnapshot, topology: TopologyRow, source: SourceEvidence | None) -> list[str]:
    """What the source's server removed, or may have, and nobody accepted, oldest first."""
    accepted = ledger.accepted(topology.incarnation)
    return [] if source is None else [one.text for one in source.losses() if one.text not in accepted]


def recorded_ids(ledger: LedgerSnapshot, topology: TopologyRow, given: Sequence[str]) -> list[str]:
    """Messages by the ids of the record, where their servers' ids are given; what is neither stays as it is. Each once."""
    evidence, found = recorded_source(ledger, topology), dict[str, None]()
    for one in given:
        try:
            found[one if evidence is None else evidence.named(one)] = None
        except UsageError:
            found[one] = None
    return [*found]


def server_ids(ledger: LedgerSnapshot, topology: TopologyRow, messages: Collection[str]) -> Mapping[str, str]:
    """What their servers call messages, by their shown ids; see `SourceEvidence.server_ids`."""
    evidence = recorded_source(ledger, topology) if messages else None
    try:
        return {} if evidence is None else evidence.server_ids(messages)
    except UsageError:  # a position that cannot be read: that is for `audit verify` to say
        return {}


def unsubscribed_findings(connection: sa.Connection, sources: Sequence[str]) -> list[Finding]:
    """What is wrong with queues to which a topology has not subscribed, because its start was refused."""
    from stormproof.core.source.postgres_queue.audit import QueueAudit  # it loads pandas, which few commands need

    with _driver(connection).cursor(row_factory=tuple_row) as cursor:
        audits = [QueueAudit(Subscriber("queue", source, ""), cursor) for source in sources]
        return [finding for audit in audits for finding in audit.unsubscribed()]


def _driver(connection: sa.Connection) -> psycopg.Connection:
    return cast("psycopg.Connection", connection.connection.driver_connection)


def _pending(connection: sa.Connection, subscriptions: Sequence[str], source: str) -> PendingEvidence | None:
    """The source with one of these subscriptions; the one of this name, if several match."""
    row = connection.execute(
        sa.text(
            "select kind, source, subscription from stormproof.pending_subscription"
            " where subscription = any(:subscriptions)"
            " order by source = :source desc, array_position(:subscriptions, subscription), kind limit 1"
        ),
        {"subscriptions": list(subscriptions), "source": source},
    ).one_or_none()
    if row is None:
        return None
    who = Subscriber(row.kind, row.source, row.subscription)
    driver = _driver(connection)
    store = PostgresPendingStore(connector_of(who.kind).NOUN, who.source)
    return PendingEvidence(who, connector_of(who.kind), lambda: store.rows(who, driver))


def evidence_of(source: PendingSource) -> PendingEvidence:
    """The record of a source object under its subscription; also of one that keeps it in this process's memory."""
    return PendingEvidence(source.subscriber, type(source), source.rows)


class PendingEvidence(SourceEvidence):
    """One subscription in the pending store."""

    def __init__(
        self,
        who: Subscriber,
        connector: type[PendingSource],
        rows: Callable[[], AbstractContextManager[PendingRows]],
    ) -> None:
        self.who = who
        self._connector = connector
        self._rows = rows

    @property
    def name(self) -> str:
        """The source's name."""
        return self.who.source

    def backlog(self) -> Backlog:
        """Counts of the messages. An expired lease counts as pending until another driver opens its messages."""
        with self._rows() as rows:
            position, counts = rows.position() or {}, rows.counts()
            fresh, age_s = self._connector.AUDIT(self.who, rows.cursor).unopened(position)
            journal = self._journal(rows)
            if journal is not None and isinstance(position.get("next"), int) and journal.counts().messages:
                fresh, age_s = journal.unopened(next_of(position))
            slices = rows.unresolved()
        returned = [row for row in slices if row.owner is None]
        return Backlog(
            ready=fresh + sum(row.messages for row in returned if not row.is_retry),
            pending=sum(row.messages for row in slices if row.owner is not None),
            waiting=counts.waiting + sum(row.messages for row in returned if row.is_retry),
            dead=counts.dead,
            oldest_ready_age_s=age_s,
            at_server=self._connector.at_server(position),
        )

    def journal(self) -> JournalCounts | None:
        """What the journal of a source whose server redelivers holds; None where none was ever written."""
        with self._rows() as rows:
            journal = self._journal(rows)
            counts = None if journal is None else journal.counts()
        return counts if counts is not None and counts.messages else None

    def notes(self) -> tuple[str, ...]:
        """What the connector reads out of the position."""
        with self._rows() as rows:
            return self._connector.notes(rows.position() or {})

    def losses(self) -> list[Finding]:
        """What the looks at the server have put on record."""
        with self._rows() as rows:
            looks = looks_in(rows.position() or {})
        return [Finding(f"source {self.name}: {look}", doubt=look.verdict is not Continuity.REMOVED) for look in looks]

    def _journal(self, rows: PendingRows) -> Journal | None:
        return None if rows.cursor is None else Journal(rows.cursor, self.who, f"{self._connector.NOUN} {self.name}")

    def lowest_unresolved(self) -> int:
        """Of a numbered source: the number below which each message is resolved, a retry, or a dead letter."""
        with self._rows() as rows:
            return lowest_unresolved(rows)

    def waiting(self) -> Set[str]:
        """The store's retries."""
        with self._rows() as rows:
            return {self._connector.shown_id(one.id, one.origin) for one in rows.waiting()}

    def dead(self, message: str | None = None) -> Sequence[DeadLetter]:
        """The store's dead letters, or those of one message; only edited ones have their payloads."""
        of = None if message is None else self._connector.number_of(message)
        if message is not None and of is None:
            return ()
        with self._rows() as rows:
            return rows.dead_letters(self._connector.shown_id, payloads=False, of=of)

    def altered(self) -> Sequence[str]:
        """By the store's digests."""
        with self._rows() as rows:
            return [self._connector.shown_id(*number) for number in rows.altered()]

    def kept(self, txns: Sequence[Txn]) -> Kept:
        """By the journal, where the source has one, or by the slices."""
        slices = [OpenedSlice(at, f"txid {t.txid}", t.txid, taken=True) for t in txns if (at := _first_opened(t))]
        with self._rows() as rows:
            journal = self._journal(rows)
            if journal is not None and journal.counts().messages:
                return journal.kept()
            return self._connector.AUDIT(self.who, rows.cursor).kept(slices)

    def dead_classes(self) -> Mapping[tuple[str, str], int]:
        """How many undecided dead letters there are of each class of error and reason."""
        with self._rows() as rows:
            return rows.letter_classes()

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether the slice holds the message."""
        at, number = at_of(position), self._number_of(message)
        if at is None:
            return False
        with self._rows() as rows:
            return self._connector.AUDIT(self.who, rows.cursor).contains(at, *number)

    def opened_in(self, slices: Sequence[tuple[int, Mapping[str, Json]]], message: str) -> list[int]:
        """The slices that hold the message, with one look at the store."""
        number = self._number_of(message)
        found = list[int]()
        with self._rows() as rows:
            audit = self._connector.AUDIT(self.who, rows.cursor)
            for txid, position in slices:
                at = at_of(position)
                if at is not None and audit.contains(at, *number):
                    found.append(txid)
        return found

    def number_of(self, message: str) -> int | None:
        """The message's number. A slice that is no range of numbers is not found by it."""
        return self._number_of(message)[0]

    def named(self, message: str) -> str:
        """By the journal of a source whose server redelivers: its numbers have the origin 0, and end with the last one. Of
        other sources by what the connector makes of the server's id.
        """
        number, of_server = self._connector.number_of(message), message.removeprefix("=")
        with self._rows() as rows:
            journal = self._journal(rows)
            last = None if journal is None else journal.last()
            is_delivered = last is not None or issubclass(self._connector, RedeliveringSource)
            is_received = last is not None and number is not None and number[1] == 0 and number[0] <= last
            if is_received or (number is not None and not is_delivered):
                return message
            found: tuple[int, int] | None = None
            if journal is not None and last is not None:
                at = journal.number_of(of_server, self._connector.BEFORE_ID)
                found = None if at is None else (at, 0)
            elif (position := rows.position()) is not None:
                found = self._connector.by_server_id(position, of_server)
        if found is None and is_delivered:
            raise UsageError(
                f"message {message}: there is none on record of {self._connector.NOUN} {self.name}: it was never received "
                "under this id, or was forgotten since it was resolved",
                message=message,
            )
        return message if found is None else self._connector.shown_id(*found)

    def server_ids(self, messages: Collection[str]) -> Mapping[str, str]:
        """By the journal; of other sources by what the connector knows."""
        numbers = {number: one for one in messages if (number := self._connector.number_of(one)) is not None}
        with self._rows() as rows:
            journal, position = self._journal(rows), rows.position()
            if journal is None or position is None:
                return {}
            ids = journal.server_ids([number for number, _ in numbers], self._connector.BEFORE_ID)
            found = {(number, 0): id_ for number, id_ in ids.items()}
            found = found or dict(self._connector.server_ids(position, [*numbers]))
        return {numbers[number]: id_ for number, id_ in found.items() if number in numbers}

    def has(self, message: str) -> bool:
        """Whether the source's own store has the message."""
        number = self._number_of(message)
        with self._rows() as rows:
            return self._connector.AUDIT(self.who, rows.cursor).has(*number)

    def never_had(self, txn: Txn, message: str) -> bool:
        """By counting the slice's messages in the source's own store, where it has them."""
        at, number = at_of(txn.position), self._number_of(message)
        if at is None or txn.retry:
            return False
        with self._rows() as rows:
            audit = self._connector.AUDIT(self.who, rows.cursor)
            return not audit.has(*number) and audit.count(at) == txn.messages

    def is_waiting_to_be_opened(self, message: str, *, certainly: bool = False) -> bool:
        """Whether the source has it, and it is in a returned slice or not yet before the subscription's position."""
        number = self._number_of(message)
        with self._rows() as rows:
            audit, position = self._connector.AUDIT(self.who, rows.cursor), rows.position() or {}
            if not audit.has(*number):
                return False
            returned = (row.at for row in rows.unresolved() if row.owner is None and row.at is not None)
            if any(audit.contains(at, *number) for at in returned):
                return True
            journal = self._journal(rows)
            last = None if journal is None else journal.last()
            is_certain = self._connector.KEEPS_MESSAGES or (last is not None and number[0] <= last)
            return (is_certain or not certainly) and audit.is_unopened(position, *number)

    def _number_of(self, message: str) -> tuple[int, int]:
        number = self._connector.number_of(message)
        if number is None:
            raise UsageError(
                f"{message!r} is not a message of {self._connector.NOUN} {self.name}; ids look like "
                f"{self._connector.SHOWN_FORM}",
                message=message,
            )
        return number

    def gives_back(self) -> bool:
        """Whether the store has slices that nobody owns."""
        with self._rows() as rows:
            return any(row.owner is None for row in rows.unresolved())

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """The txid of the batch of new messages that reaches furthest into the source."""
        with self._rows() as rows:
            audit = self._connector.AUDIT(self.who, rows.cursor)
            reached = [(audit.reach(at), txn.txid) for txn in txns if (at := _first_opened(txn)) is not None]
        return (max(reached)[1],) if reached else ()

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """The slices of batches and of the store must cover every message that was handed out, and each only once."""
        with self._rows() as rows:
            audit, held = self._connector.AUDIT(self.who, rows.cursor), list[OpenedSlice]()
            for txn in txns:
                at = _first_opened(txn)
                if at is None:
                    continue
                held.append(OpenedSlice(at, f"txid {txn.txid} ({txn.state})", txn.txid, is_taken(txn)))
            for row in rows.unresolved():
                if row.at is not None:
                    of = "the store's returned slice" if row.owner is None else f"the store's slice of {row.owner}"
                    held.append(OpenedSlice(row.at, of, None, taken=True))
            for one in held:
                if not audit.can_read(one.at):
                    where = f"{self._connector.NOUN} {self.name}"
                    return [Finding(f"{one.holder}: its position in {where} cannot be read", one.txid)]
            trusted = [at for txn in forgotten if (at := _first_opened(txn)) is not None and audit.can_read(at)]
            position = rows.position() or {}
            return [
                *audit.findings(position, held, trusted),
                *self._journal_findings(rows),
                *self._retry_findings(rows),
            ]

    def _journal_findings(self, rows: PendingRows) -> list[Finding]:
        """What the journal of a source whose server redelivers says against position and slices."""
        journal, position = self._journal(rows), rows.position() or {}
        if journal is None or not isinstance(position.get("next"), int) or not journal.counts().messages:
            return []
        slices = [range_of(row.at) for row in rows.unresolved() if row.at is not None]
        faults = journal.faults(next_of(position), [range(first, stop) for first, stop in slices])
        return [Finding(text) for text in faults]

    def _retry_findings(self, rows: PendingRows) -> list[Finding]:
        """Retries that belong to a slice which does not exist: they would never be opened again."""
        expected = {row.id: row.messages for row in rows.unresolved() if row.is_retry}
        found = rows.retries_by_slice()
        return [
            Finding(
                f"{found.get(slice_, 0)} retries of {self._connector.NOUN} {self.name} belong to slice {slice_}, which "
                + ("is not there" if slice_ not in expected else f"was made of {expected[slice_]}")
            )
            for slice_ in sorted(expected.keys() | found.keys())
            if expected.get(slice_) != found.get(slice_, 0)
        ]


def is_taken(txn: Txn) -> bool:
    """Whether the messages of a batch left the source with it for good, apart from those that failed."""
    if txn.state is TxnState.ABORTED:
        return txn.cause is TxnCause.EVERY_MESSAGE_FAILED
    if txn.state is TxnState.OPEN:
        return txn.guarantee is Guarantee.AT_MOST_ONCE
    return txn.state in (TxnState.COMMITTED, TxnState.ABANDONED)


def _first_opened(txn: Txn) -> dict[str, Json] | None:
    """The slice of a batch of new messages, as the connector wrote it; None if the batch is of retries."""
    at = at_of(txn.position)
    is_retry = txn.retry or (at is None and bool(txn.position.get("replayed")))
    return None if is_retry else at or {}
