"""What a source itself says of its messages: what waits, what is dead, and whether its slices leave holes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Final, Protocol, runtime_checkable

from stormproof.core.errors import Json
from stormproof.core.guarantee import Guarantee
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


EDIT_HASHES_SQL: Final = (
    "case when new_payload is not null then encode(sha256(payload), 'hex') end as payload_sha256,"
    " encode(sha256(new_payload), 'hex') as new_payload_sha256"
)
"""An edit's two hashes, over the columns of a table of dead letters."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the slices of a source.

    `unreachable`: it is with messages that were never in a slice, and cannot come into one.
    """

    text: str
    txid: int | None = None
    unreachable: bool = False


class SourceEvidence(Protocol):
    """A source's own record, for one topology's subscription."""

    @property
    def name(self) -> str:
        """The source, as people see it."""
        ...

    def backlog(self) -> Backlog:
        """What is left."""
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

    def slice_findings(self, txns: Sequence[Txn]) -> list[Finding]:
        """What is wrong with the slices of these batches (all of the topology's): overlaps and holes."""
        ...


@runtime_checkable
class PrunableEvidence(SourceEvidence, Protocol):
    """A source whose slices can still be compared where the ledger has forgotten the oldest batches."""

    def furthest(self, txns: Sequence[Txn]) -> tuple[int, ...]:
        """Those of these batches (their txids) whose slices reach furthest into the source."""
        ...

    def slice_findings_behind(self, txns: Sequence[Txn], forgotten: Sequence[Txn]) -> list[Finding]:
        """As `slice_findings`, where everything up to the furthest of the `forgotten` batches counts as handed out once."""
        ...


class StoredSource(SourceEvidence, Protocol):
    """A source whose record stands in the ledger's database: a queue, or files."""

    @property
    def subscription(self) -> str:
        """The topology's subscription to it."""
        ...


def is_taken(txn: Txn) -> bool:
    """Whether a batch's messages left the source for good with it: all but what failed by name."""
    if txn.state is TxnState.ABORTED:
        return txn.cause is TxnCause.EVERY_MESSAGE_FAILED
    if txn.state is TxnState.OPEN:
        return txn.guarantee is Guarantee.AT_MOST_ONCE
    return txn.state in (TxnState.COMMITTED, TxnState.ABANDONED)
