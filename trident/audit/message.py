"""What became of a message: the history of each that failed, the state in which it stands now, and `audit message`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.dead_letter import DeadLetter, Disposal
from stormproof.sinks.contract.registry import lineage_of
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.inspect import Has, Holding, SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, Skipped
from stormproof.trident.audit.source import SourceReader, stored_source
from stormproof.trident.audit.status import holdings_of
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.ledger.tables import Event, Reject, Txn, record_of
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction, RejectState, TxnCause, TxnState

MESSAGE_EVENTS = (
    EventKind.FAILURE,
    EventKind.RETURNED,
    EventKind.REPLAY,
    EventKind.DEAD_LETTER,
    EventKind.REJECT,
)


class EndKind(StrEnum):
    """The state of a message; every message that was opened is in exactly one of these."""

    COMMITTED = "committed"
    PENDING = "pending"
    """In a batch that has not ended."""
    WAITING = "waiting"
    """Failed or returned; it will be opened again."""
    DEAD_LETTER = "dead_letter"
    REJECTED = "rejected"
    """A sink does not hold it, since its table refuses a row of it; other sinks may. Nobody has decided."""
    DROPPED = "dropped"
    """A dead letter, or a rejected message, that an operator gave up."""
    SKIPPED = "skipped"
    """Its batch is committed, but for a sink at which an operator gave up the batch's rows (`ledger skip`)."""
    LOST = "lost"
    """Under at-most-once: confirmed, then failed, or in flight when its driver ended."""
    NOT_OPENED = "not_opened"
    UNPROVEN = "unproven"
    """Its id lies inside the slice that a batch read, and the source does not have it: it was removed after it was read, or
    there was never such a message."""
    UNKNOWN = "unknown"
    """The records do not say; `audit verify` names it."""


@dataclass(frozen=True, slots=True)
class EndState:
    """The state of a message: in which txid, since when, and by whose decision."""

    kind: EndKind
    txid: int | None = None
    since: datetime | None = None
    by: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of one message; or one return together with a message that failed, with that message's reason."""

    message: str
    txid: int
    attempt: int
    reason: str
    component: str
    error: str
    input: str
    at: datetime | None

    @staticmethod
    def of(event: Event) -> Failure:
        """From the ledger's event."""
        return Failure(
            message=event.message or "",
            txid=event.txid or 0,
            attempt=event.attempt or 0,
            reason=event.reason or "",
            component=event.component or "",
            error=event.error or "",
            input=event.input or "",
            at=event.at,
        )


@dataclass(slots=True)
class Trace:
    """The events of one message, as the ledger has them."""

    message: str
    failures: list[Event] = field(default_factory=list[Event])
    returns: list[Event] = field(default_factory=list[Event])
    replays: list[int] = field(default_factory=list[int])
    died_in: list[int] = field(default_factory=list[int])
    rejected_in: list[int] = field(default_factory=list[int])

    def failed_in(self, txn: Txn) -> bool:
        """Whether it failed in the batch."""
        return any(event.txid == txn.txid for event in self.failures)

    def left_out_of(self, txn: Txn) -> bool:
        """Whether it failed in the batch or was returned from it, so that the batch wrote nothing of it."""
        return self.failed_in(txn) or any(event.txid == txn.txid for event in self.returns)

    @property
    def txids(self) -> list[int]:
        """The batches known to have opened it, in order. The first is among them only if the message failed there, or was
        rejected.
        """
        failed = {event.txid for event in (*self.failures, *self.returns) if event.txid is not None}
        return sorted(failed | set(self.replays) | set(self.rejected_in))


@dataclass(frozen=True, slots=True)
class Records:
    """What a message's state follows from: the batches, and the source's own record if it can be reached."""

    txns: Mapping[int, Txn]
    source: SourceEvidence | None
    waiting: Set[str]
    dead: Mapping[str, DeadLetter]
    """The newest dead letter of each message."""
    rejects: Mapping[str, Sequence[Reject]] = field(default_factory=dict[str, Sequence[Reject]])
    """What sinks rejected, by message."""
    skipped: Mapping[int, Sequence[Skipped]] = field(default_factory=dict[int, Sequence[Skipped]])
    """What operators gave up of whole batches, by txid."""

    @staticmethod
    def of(
        txns: Iterable[Txn],
        source: SourceEvidence | None,
        rejects: Iterable[Reject] = (),
        skipped: Mapping[int, Sequence[Skipped]] = MappingProxyType({}),
        *,
        message: str | None = None,
    ) -> Records:
        """Read the source's record; of its dead letters only those of one message, where one is named."""
        waiting, dead = (frozenset[str](), ()) if source is None else (source.waiting(), source.dead(message))
        by_message: dict[str, list[Reject]] = {}
        for one in rejects:
            if one.message is not None:
                by_message.setdefault(one.message, []).append(one)
        letters = {one.shown_id: one for one in dead}
        return Records({txn.txid: txn for txn in txns}, source, waiting, letters, by_message, skipped)

    def rejected(self, message: str, *states: RejectState) -> list[Reject]:
        """The message's rejects that are in one of these states, oldest first."""
        return [one for one in self.rejects.get(message, ()) if one.state in states]

    def opened_after(self, txn: Txn, message: str) -> Txn | None:
        """The last batch that opened a message after its slice of new messages was given back whole.

        No row names the messages of a slice that is opened again, so the slices are searched. Few messages need it: those
        that failed in a batch which was then given back.
        """
        if self.source is None or txn.retry:
            return None
        later = (self.txns[txid] for txid in sorted(self.txns, reverse=True) if txid > txn.txid)
        return next((t for t in later if not t.retry and self.source.contains(t.position, message)), None)


def traces(events: Sequence[Event]) -> dict[str, Trace]:
    """The events by message, in the order in which the messages first failed."""
    found: dict[str, Trace] = {}
    for event in events:
        if event.message is None or event.txid is None:
            continue
        trace = found.setdefault(event.message, Trace(event.message))
        if event.kind is EventKind.FAILURE:
            trace.failures.append(event)
        elif event.kind is EventKind.RETURNED:
            trace.returns.append(event)
        elif event.kind is EventKind.REPLAY:
            trace.replays.append(event.txid)
        elif event.kind is EventKind.DEAD_LETTER:
            trace.died_in.append(event.txid)
        elif event.kind is EventKind.REJECT:
            trace.rejected_in.append(event.txid)
    return found


def end_of(trace: Trace, records: Records) -> EndState:
    """The state of a message that failed, or that a sink rejected."""
    end = _last_end(trace, records)
    if end.kind is not EndKind.COMMITTED:
        return end
    # The batch is committed; a sink may have rejected the message in it, or in an earlier one.
    rejected = records.rejected(trace.message, RejectState.OPEN)
    if rejected:
        return EndState(EndKind.REJECTED, rejected[-1].txid, rejected[-1].at)
    again = records.rejected(trace.message, RejectState.RETRYING)
    if again:
        return EndState(EndKind.WAITING, again[-1].txid, again[-1].decided_at)
    given_up = records.rejected(trace.message, RejectState.DROPPED)
    if given_up:
        one = given_up[-1]
        return EndState(EndKind.DROPPED, one.txid, one.decided_at, one.by, one.why)
    return with_skips(end, records)


def with_skips(end: EndState, records: Records) -> EndState:
    """The state of a message of a committed batch, by what an operator gave up of that batch."""
    skipped = () if end.kind is not EndKind.COMMITTED or end.txid is None else records.skipped.get(end.txid, ())
    if not skipped:
        return end
    return EndState(EndKind.SKIPPED, end.txid, skipped[-1].at, skipped[-1].by, skipped[-1].why)


def _last_end(trace: Trace, records: Records) -> EndState:
    txids = trace.txids
    txn = records.txns.get(txids[-1]) if txids else None
    if txn is None:
        return EndState(EndKind.UNKNOWN)
    if txn.state is TxnState.ABORTED and txn.cause is not TxnCause.EVERY_MESSAGE_FAILED:
        later = records.opened_after(txn, trace.message)
        return end_in(txn if later is None else later)
    if not trace.left_out_of(txn):
        return end_in(txn)
    if not txn.state.ended:
        return EndState(EndKind.PENDING, txn.txid, txn.opened_at)
    if txn.guarantee is Guarantee.AT_MOST_ONCE:
        return EndState(EndKind.LOST, txn.txid, txn.ended_at)
    return _after_failure(trace, txn, records)


def end_in(txn: Txn) -> EndState:
    """The state of a message that did not fail in the last batch that opened it."""
    match txn.state:
        case TxnState.COMMITTED:
            return EndState(EndKind.COMMITTED, txn.txid, txn.ended_at)
        case TxnState.ABANDONED:
            return EndState(EndKind.LOST, txn.txid, txn.ended_at)
        case TxnState.ABORTED:
            return EndState(EndKind.WAITING, txn.txid, txn.ended_at)
        case _:
            return EndState(EndKind.PENDING, txn.txid, txn.opened_at)


def _after_failure(trace: Trace, txn: Txn, records: Records) -> EndState:
    letter = records.dead.get(trace.message)
    if trace.message in records.waiting:
        return EndState(EndKind.WAITING, txn.txid, txn.ended_at)
    if letter is not None and letter.disposal is None:
        return EndState(EndKind.DEAD_LETTER, txn.txid, letter.dead_at)
    if letter is not None and letter.disposal is Disposal.DROP:
        return EndState(EndKind.DROPPED, txn.txid, letter.disposed_at, letter.by, letter.why)
    if letter is not None or records.source is None:
        # It was requeued, or there is no source to ask: then only the ledger tells.
        died = letter is None and txn.txid in trace.died_in
        return EndState(EndKind.DEAD_LETTER if died else EndKind.WAITING, txn.txid, txn.ended_at)
    return EndState(EndKind.UNKNOWN, txn.txid, txn.ended_at)


@dataclass(frozen=True, slots=True)
class Opening:
    """One batch that opened the message, and whether the message failed in it or was returned from it."""

    txid: int
    state: str
    retry: bool
    failed: bool
    returned: bool = False
    held: tuple[Holding, ...] = ()
    """The sinks that hold what the batch wrote of the message: none if it failed there."""
    not_held: tuple[Holding, ...] = ()
    """The sinks that do not have it, or were not asked, with why; but for those that rejected it, or were skipped."""
    skipped: tuple[Skipped, ...] = ()
    """The sinks at which an operator gave up all rows of the batch (`ledger skip`), this message's among them."""


@dataclass(frozen=True, slots=True)
class RejectedBy:
    """A sink whose table refused rows of the message: it does not hold the message's rows of that batch.

    `reason` is the SQLSTATE, or ``refused`` where there is none, as in `audit dead-letters`.
    """

    txid: int
    sink: str
    reason: str
    rows: int
    state: str
    at: datetime | None
    error: str


@dataclass(frozen=True, slots=True)
class MessageDecision:
    """An operator's decision about the message: as a dead letter, as a reject of a sink, or with all rows of its batch that
    a sink refuses. Of an edit, the SHA-256 of both payloads.
    """

    action: str
    by: str | None
    why: str | None
    at: datetime | None = None
    payload_sha256: str | None = None
    new_payload_sha256: str | None = None
    sink: str | None = None
    """The sink that rejected it, or at which its batch's rows were given up."""

    @staticmethod
    def of_skip(event: Event) -> MessageDecision:
        """The decision to give rows of its batch up at a sink."""
        said, action = event.detail or {}, OperatorAction.SKIP if event.action is None else event.action
        by, why = said.get("by"), said.get("why")
        return MessageDecision(
            action.value, None if by is None else str(by), None if why is None else str(why), event.at, sink=event.sink
        )

    @staticmethod
    def of_reject(reject: Reject) -> MessageDecision | None:
        """The decision about a reject; None if there is none."""
        if reject.state is RejectState.OPEN:
            return None
        action = OperatorAction.DROP_REJECT if reject.state is RejectState.DROPPED else OperatorAction.RETRY_REJECT
        return MessageDecision(action.value, reject.by, reject.why, reject.decided_at, sink=reject.sink)

    @staticmethod
    def of(letter: DeadLetter) -> MessageDecision | None:
        """The decision about a dead letter; None if there is none."""
        if letter.disposal is None:
            return None
        hashes: tuple[str | None, str | None] = (None, None)
        if letter.new_payload is not None:
            hashes = sha256(letter.payload).hexdigest(), sha256(letter.new_payload).hexdigest()
        return MessageDecision(letter.disposal.value, letter.by, letter.why, letter.disposed_at, *hashes)


@dataclass(frozen=True, slots=True)
class StoredIn:
    """A sink that stores messages' ids: rows of the message have its id in this column."""

    sink: str
    target: str
    column: str


@dataclass(frozen=True, slots=True)
class MessageReport:
    """One message: every batch that opened it, its failures, and its state."""

    topology: str
    message: str
    openings: tuple[Opening, ...]
    failures: tuple[Failure, ...]
    operator: tuple[MessageDecision, ...]
    end: EndState
    returned: tuple[Failure, ...] = ()
    in_source: bool = True
    """Whether the source still has it, or that is not known. If not, its id lies inside a slice that a batch read, and that
    is all that is known: `end` is `unproven`, with that batch, whose state its opening has."""
    stored_in: tuple[StoredIn, ...] = ()
    """Where its rows can be looked up; only sinks with lineage columns."""
    rejects: tuple[RejectedBy, ...] = ()
    """The sinks that rejected it, in which batch and why."""
    server_id: str | None = None
    """What its server calls it; None: it has no such id, or that is not on record."""


def message(
    ledger: AuditLedger,
    topology: str,
    shown_id: str,
    *,
    source: SourceReader = stored_source,
    opener: SinkOpener | None = None,
) -> MessageReport:
    """What became of a message, by its shown id (`XID-N` in a Postgres queue), or the one that its server gave it.

    With an `opener` the sinks that the ledger does not know to hold a batch of it are asked.

    Raises:
        UsageError: no such topology, not an id of its source, or neither ledger nor source knows the message; or there was
            never such a message.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        evidence = source(snapshot, row)
        shown_id = shown_id if evidence is None else evidence.named(shown_id)
        events = snapshot.events(row.incarnation, MESSAGE_EVENTS, message=shown_id)
        trace = traces(events).get(shown_id, Trace(shown_id))
        holding = list[int]()
        if evidence is not None:
            slices = snapshot.new_slices(row.incarnation, evidence.number_of(shown_id))
            holding = evidence.opened_in(slices, shown_id)
        opened = snapshot.some_txns(row.incarnation, {*trace.txids, *holding})
        rejects = snapshot.rejects(row.incarnation, message=shown_id)
        skipped = snapshot.skipped(row.incarnation, [txn.txid for txn in opened])
        records = Records.of(opened, evidence, rejects, skipped, message=shown_id)
        end = _end(shown_id, trace, opened, records, evidence)
        in_source = evidence is None or bool(trace.txids) or evidence.has(shown_id)
        if evidence is not None and not in_source:
            _require_possible(topology, shown_id, opened, evidence)
            end = None if end is None else EndState(EndKind.UNPROVEN, end.txid)
        sinks = snapshot.sinks(row.incarnation)
        stored_in = _stored_in(sinks)
        wrote = {txn.txid for txn in opened if in_source and not trace.left_out_of(txn)}
        works = {
            txn.txid: [one.work for one in snapshot.work(row.incarnation, txn.txid, txn.txid) if txn.txid in wrote]
            for txn in opened
        }
        holdings = holdings_of(snapshot, row, opener)
        given_up = _given_up(snapshot, row.incarnation, wrote, skipped, rejects)
        dead = () if evidence is None else evidence.dead(shown_id)
        server_ids = {} if evidence is None else evidence.server_ids([shown_id])
    if end is None:
        raise UsageError(
            f"message {shown_id}: neither the ledger of topology {topology!r} nor its source {row.source!r} knows it. Of a "
            "message that was never opened it may be that its server alone can tell",
            topology=topology,
            message=shown_id,
        )
    refused = {(one.txid, one.sink) for one in rejects} | {
        (one.txid, one.sink) for some in skipped.values() for one in some
    }
    found = {
        txn.txid: [holdings.of_message(txn, work) for work in works[txn.txid] if (txn.txid, work.sink) not in refused]
        for txn in opened
    }
    return MessageReport(
        topology=topology,
        message=shown_id,
        openings=tuple(
            Opening(
                txid=t.txid,
                state=t.state.value,
                retry=t.retry,
                failed=trace.failed_in(t),
                returned=trace.left_out_of(t) and not trace.failed_in(t),
                held=tuple(one for one in found[t.txid] if one.has is Has.HAS),
                not_held=tuple(one for one in found[t.txid] if one.has is not Has.HAS),
                skipped=tuple(skipped.get(t.txid, ())) if t.txid in wrote else (),
            )
            for t in opened
        ),
        failures=tuple(Failure.of(event) for event in events if event.kind is EventKind.FAILURE),
        operator=_decisions(dead, rejects, given_up),
        end=end,
        returned=tuple(Failure.of(event) for event in events if event.kind is EventKind.RETURNED),
        in_source=in_source,
        stored_in=stored_in,
        rejects=tuple(record_of(RejectedBy, one, state=one.state.value) for one in rejects),
        server_id=server_ids.get(shown_id),
    )


def _require_possible(topology: str, shown_id: str, opened: Sequence[Txn], evidence: SourceEvidence) -> None:
    """Raise UsageError if the source still has all messages of a slice that would hold this one, and does not have it."""
    for txn in opened:
        if evidence.never_had(txn, shown_id):
            raise UsageError(
                f"message {shown_id}: there is no such message. Its id lies inside the slice that txid {txn.txid} of "
                f"topology {topology!r} read; source {evidence.name!r} still has all {txn.messages} messages of that "
                "slice, and it is none of them",
                topology=topology,
                message=shown_id,
                txid=txn.txid,
            )


def _given_up(
    snapshot: LedgerSnapshot,
    incarnation: str,
    txids: Collection[int],
    skipped: Mapping[int, Sequence[Skipped]],
    rejects: Sequence[Reject],
) -> list[Event]:
    """The decisions to give rows of these batches up: at a sink, or only those that its table refuses, where these rejects
    are among them.
    """
    whole = {(txid, one.sink) for txid, some in skipped.items() if txid in txids for one in some}
    refused = {(one.txid, one.sink) for one in rejects}
    concerned = {txid for txid, _ in whole | refused}
    if not concerned:
        return []
    return [
        event
        for event in snapshot.events(incarnation, [EventKind.OPERATOR], first=min(concerned), last=max(concerned))
        if (event.action is OperatorAction.SKIP and (event.txid, event.sink) in whole)
        or (event.action is OperatorAction.SKIP_ROWS and (event.txid, event.sink) in refused)
    ]


def _decisions(
    dead: Sequence[DeadLetter], rejects: Sequence[Reject], given_up: Sequence[Event]
) -> tuple[MessageDecision, ...]:
    found = (
        *map(MessageDecision.of, dead),
        *map(MessageDecision.of_reject, rejects),
        *map(MessageDecision.of_skip, given_up),
    )
    return tuple(sorted((one for one in found if one is not None), key=lambda one: str(one.at)))


def _stored_in(sinks: Sequence[SinkBinding]) -> tuple[StoredIn, ...]:
    found = list[StoredIn]()
    for sink in sinks:
        lineage = None if sink.description is None else lineage_of(sink.description)
        if lineage is not None and lineage.message is not None:
            found.append(StoredIn(sink.sink, sink.target, lineage.message))
    return tuple(found)


def _end(
    shown_id: str, trace: Trace, opened: list[Txn], records: Records, evidence: SourceEvidence | None
) -> EndState | None:
    if not opened:
        is_there = evidence is not None and evidence.is_waiting_to_be_opened(shown_id, certainly=True)
        return EndState(EndKind.NOT_OPENED) if is_there else None
    if trace.txids and trace.txids[-1] == opened[-1].txid:
        return end_of(trace, records)
    return with_skips(end_in(opened[-1]), records)
