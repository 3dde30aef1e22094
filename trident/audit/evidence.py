"""What a source itself says of its messages: what waits, what is dead, and whether its slices leave holes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Protocol

from stormproof.core.errors import Json
from stormproof.core.guarantee import Guarantee
from stormproof.core.pending.audit import Finding
from stormproof.core.pending.journal import JournalCounts
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.protocol import Backlog
from stormproof.trident.ledger.rows import Txn
from stormproof.trident.transaction import TxnCause, TxnState


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """A message that failed and waits for its retry, or is leased for it."""

    message: str
    times_failed: int
    not_before: datetime | None
    owner: str | None


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A dead letter, and what an operator decided about it."""

    message: str
    reason: str
    error: str
    times_failed: int
    dead_at: datetime
    disposal: str | None
    by: str | None
    why: str | None
    disposed_at: datetime | None
    payload_sha256: str | None = None
    """Of an edited one: what failed, and what was put in its place."""
    new_payload_sha256: str | None = None

    @staticmethod
    def of(letter: DeadLetter) -> DeadMessage:
        """What a source says of one."""
        return DeadMessage(
            message=letter.shown_id,
            reason=letter.reason,
            error=letter.error,
            times_failed=letter.times_failed,
            dead_at=letter.dead_at,
            disposal=None if letter.disposal is None else letter.disposal.value,
            by=letter.by,
            why=letter.why,
            disposed_at=letter.disposed_at,
            payload_sha256=None if letter.new_payload is None else sha256(letter.payload).hexdigest(),
            new_payload_sha256=None if letter.new_payload is None else sha256(letter.new_payload).hexdigest(),
        )


class SourceEvidence(Protocol):
    """A source's own record, for one topology's subscription."""

    @property
    def name(self) -> str:
        """The source, as people see it."""
        ...

    def backlog(self) -> Backlog:
        """What is left."""
        ...

    def journal(self) -> JournalCounts | None:
        """What its journal holds; None where there is none, since its server gives a message to nobody twice."""
        ...

    def waiting(self) -> Mapping[str, WaitingMessage] | None:
        """Messages that failed and will come again, by shown id; None where the source only knows their number."""
        ...

    def dead(self) -> Sequence[DeadMessage]:
        """Dead letters, oldest first, those that were disposed of included."""
        ...

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        """Whether a slice that is no retry holds a message."""
        ...

    def is_waiting_to_be_opened(self, message: str) -> bool:
        """Whether the source has the message and it is in no lease: not opened yet, or returned."""
        ...

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """Those of these batches (their txids) whose slices reach furthest into the source."""
        ...

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        """What is wrong with the slices of these batches: overlaps and holes.

        The batches are all that the ledger has. Where it has forgotten the oldest, everything up to the furthest of the
        `forgotten` ones that it kept counts as handed out once.
        """
        ...


def is_taken(txn: Txn) -> bool:
    """Whether a batch's messages left the source for good with it: all but what failed by name."""
    if txn.state is TxnState.ABORTED:
        return txn.cause is TxnCause.EVERY_MESSAGE_FAILED
    if txn.state is TxnState.OPEN:
        return txn.guarantee is Guarantee.AT_MOST_ONCE
    return txn.state in (TxnState.COMMITTED, TxnState.ABANDONED)
