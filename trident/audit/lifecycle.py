"""What became of each message that ever failed: its failures, its replays, and the one state that it ended in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from stormproof.core.guarantee import Guarantee
from stormproof.trident.audit.evidence import DeadMessage, SourceEvidence, WaitingMessage
from stormproof.trident.ledger.rows import Event, Txn
from stormproof.trident.transaction import EventKind, TxnCause, TxnState

MESSAGE_EVENTS = (EventKind.FAILURE, EventKind.RETURNED, EventKind.REPLAY, EventKind.DEAD_LETTER)


class EndKind(StrEnum):
    """Where a message stands; every message that was opened is in exactly one of these."""

    COMMITTED = "committed"
    PENDING = "pending"
    """In a batch that has not ended."""
    WAITING = "waiting"
    """Failed or given back, and will come again."""
    DEAD_LETTER = "dead_letter"
    DROPPED = "dropped"
    """A dead letter that an operator gave up."""
    LOST = "lost"
    """Under at-most-once: confirmed, then failed, or in flight when its driver ended."""
    NOT_OPENED = "not_opened"
    UNKNOWN = "unknown"
    """The records do not say; `audit verify` names it."""


@dataclass(frozen=True, slots=True)
class EndState:
    """Where a message stands: in which txid, since when, by whom."""

    kind: EndKind
    txid: int | None = None
    since: datetime | None = None
    by: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of one message, or one return with a message that failed (then the reason is that one's)."""

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
    """One message: its failures in order, the txids that replayed it, and where it stands.

    `returned` are the times when it went back, uncounted, with a message that failed and with which it shares a tuple.
    """

    message: str
    failures: tuple[Failure, ...]
    replayed_in: tuple[int, ...]
    end: EndState
    returned: tuple[Failure, ...] = ()

    @property
    def times_failed(self) -> int:
        """How often it failed."""
        return len(self.failures)


@dataclass(slots=True)
class Trace:
    """The events of one message, as the ledger has them."""

    message: str
    failures: list[Event] = field(default_factory=list[Event])
    returns: list[Event] = field(default_factory=list[Event])
    replays: list[int] = field(default_factory=list[int])
    died_in: list[int] = field(default_factory=list[int])

    def failed_in(self, txn: Txn) -> bool:
        """Whether it failed in the batch."""
        return any(event.txid == txn.txid for event in self.failures)

    def left_out_of(self, txn: Txn) -> bool:
        """Whether it failed in the batch, or was returned with one that did: nothing of it is in what was written."""
        return self.failed_in(txn) or any(event.txid == txn.txid for event in self.returns)

    @property
    def txids(self) -> list[int]:
        """Every batch that is known to have opened it, in order. Its first one only if it failed there."""
        failed = {event.txid for event in (*self.failures, *self.returns) if event.txid is not None}
        return sorted(failed | set(self.replays))


@dataclass(frozen=True, slots=True)
class Records:
    """What decides a message's end: the batches, and the source's own record where it can be reached."""

    txns: Mapping[int, Txn]
    waiting: Mapping[str, WaitingMessage] | None
    dead: Mapping[str, DeadMessage]
    """The newest dead letter of each message."""
    source: SourceEvidence | None = None

    @staticmethod
    def of(txns: Iterable[Txn], source: SourceEvidence | None) -> Records:
        """Read what the source says."""
        waiting = None if source is None else source.waiting()
        dead = () if source is None else source.dead()
        return Records({txn.txid: txn for txn in txns}, waiting, {letter.message: letter for letter in dead}, source)

    def opened_after(self, txn: Txn, message: str) -> Txn | None:
        """The last batch that opened a message of a first slice which was given back whole.

        No row names a message whose slice comes again, so the slices are searched; messages that failed in a batch that
        was then given back are few.
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
    return found


def history(trace: Trace, records: Records) -> MessageHistory:
    """A message's history, for people."""
    failures = tuple(Failure.of(event) for event in trace.failures)
    returned = tuple(Failure.of(event) for event in trace.returns)
    return MessageHistory(trace.message, failures, tuple(trace.replays), end_of(trace, records), returned)


def end_of(trace: Trace, records: Records) -> EndState:
    """Where a message that failed stands."""
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
    """Where a message stands that did not fail in the last batch that opened it."""
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
    waiting = None if records.waiting is None else records.waiting.get(trace.message)
    if waiting is not None:
        return EndState(EndKind.WAITING, txn.txid, txn.ended_at)
    if letter is not None and letter.disposal is None:
        return EndState(EndKind.DEAD_LETTER, txn.txid, letter.dead_at)
    if letter is not None and letter.disposal == "drop":
        return EndState(EndKind.DROPPED, txn.txid, letter.disposed_at, letter.by, letter.why)
    if letter is not None or records.waiting is None:
        # Requeued, or the source cannot name what waits: what the ledger says is all there is.
        died = letter is None and txn.txid in trace.died_in
        return EndState(EndKind.DEAD_LETTER if died else EndKind.WAITING, txn.txid, txn.ended_at)
    return EndState(EndKind.UNKNOWN, txn.txid, txn.ended_at)
