"""The history of each message that failed: its failures, its replays, and the state in which it stands now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType

from stormproof.core.guarantee import Guarantee
from stormproof.core.source.dead_letter import DeadLetter, Disposal
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.ledger import Skipped
from stormproof.trident.ledger.rows import Event, Reject, Txn
from stormproof.trident.transaction_states import EventKind, RejectState, TxnCause, TxnState

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
            txid=event.txid or 0,
            attempt=event.attempt or 0,
            reason=event.reason or "",
            component=event.component or "",
            error=event.error or "",
            input=event.input or "",
            at=event.at,
        )


@dataclass(frozen=True, slots=True)
class MessageHistory:
    """One message: its failures in order, the txids that replayed it, and its state.

    `returned` has its returns: it went back, with no failure counted, because it shares a tuple with a message that
    failed.
    """

    message: str
    failures: tuple[Failure, ...]
    replayed_in: tuple[int, ...]
    end: EndState
    returned: tuple[Failure, ...] = ()

    @property
    def times_failed(self) -> int:
        """The number of its failures."""
        return len(self.failures)


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


def history(trace: Trace, records: Records) -> MessageHistory:
    """A message's history."""
    failures = tuple(Failure.of(event) for event in trace.failures)
    returned = tuple(Failure.of(event) for event in trace.returns)
    return MessageHistory(trace.message, failures, tuple(trace.replays), end_of(trace, records), returned)


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
