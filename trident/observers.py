"""What is told of a run's batches while it runs: metrics and lineage are made of it.

The steps of a batch tell their observer, in the driver's thread, right after the ledger has it on record and before
anything else is done. So whoever counts what is told agrees with the ledger, wherever the driver is killed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from stormproof.core.guarantee import Guarantee
from stormproof.core.source.protocol import Slice
from stormproof.trident.statistics import BatchResult, RecoveryReport
from stormproof.trident.transaction_states import AttemptOutcome, TxnCause, TxnState

log = logging.getLogger("stormproof.observers")


@dataclass(frozen=True, slots=True)
class SinkEnd:
    """What one sink got of a committed batch: `rows` and `bytes` as prepared, `superseded` rows that changed nothing, and
    the number of `rejects` that were recorded, of `rejected_rows` among the prepared ones. `suppressed`: the sink held the
    batch already.
    """

    rows: int
    bytes: int
    superseded: int = 0
    rejects: int = 0
    suppressed: bool = False
    version: str | None = None
    """The table's version that the batch made, where the store tells."""
    rejected_rows: int = 0


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """A batch that is committed: of its `messages`, `failed` by reason, `returned`, `dead` and `rejected` are those that
    failed, went back with failed ones, were given up, and are lacking in a sink. The others are in every sink.
    """

    txid: int
    guarantee: Guarantee
    messages: int
    sinks: Mapping[str, SinkEnd]
    failed: Mapping[str, int] = field(default_factory=dict[str, int])
    returned: int = 0
    dead: int = 0
    rejected: int = 0

    @property
    def committed_messages(self) -> int:
        """The messages that every sink holds."""
        return self.messages - sum(self.failed.values()) - self.returned - self.rejected


class Observer:
    """Is told of a run's batches. Here every method does nothing; each returns at once and asks no store."""

    def opened(self, txid: int, guarantee: Guarantee, slice_: Slice) -> None:
        """A batch was opened."""

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """An attempt failed, and another one begins."""

    def committed(self, batch: CommittedBatch) -> None:
        """A batch was committed, by the loop or by recovery."""

    def given_up(self, txid: int, state: TxnState, cause: TxnCause, reason: str) -> None:
        """A batch was aborted or abandoned."""

    def failed(self, txid: int, failed: Mapping[str, int], returned: int) -> None:
        """The failures, by reason, of a batch whose messages all failed or went back."""

    def dead_letters(self, txid: int, number: int) -> None:
        """Messages of a batch that is not committed, or was committed earlier, were given up."""

    def suppressed(self, sinks: Sequence[str]) -> None:
        """These sinks hold already what was handed in again."""

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """A sink refuses a prepared batch for good."""

    def recovered(self, report: RecoveryReport) -> None:
        """A recovery ended; what it did with each batch was told before."""

    def timed(self, result: BatchResult) -> None:
        """A batch of this driver ended, with its times. It was told before what became of it."""


NOBODY: Final = Observer()


class Observers(Observer):
    """Tells several observers. An observer's own fault is logged, and ends neither the run nor what others are told."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def opened(self, txid: int, guarantee: Guarantee, slice_: Slice) -> None:
        """See `Observer.opened`."""
        self._tell(lambda one: one.opened(txid, guarantee, slice_))

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """See `Observer.attempt_ended`."""
        self._tell(lambda one: one.attempt_ended(txid, attempt, outcome))

    def committed(self, batch: CommittedBatch) -> None:
        """See `Observer.committed`."""
        self._tell(lambda one: one.committed(batch))

    def given_up(self, txid: int, state: TxnState, cause: TxnCause, reason: str) -> None:
        """See `Observer.given_up`."""
        self._tell(lambda one: one.given_up(txid, state, cause, reason))

    def failed(self, txid: int, failed: Mapping[str, int], returned: int) -> None:
        """See `Observer.failed`."""
        self._tell(lambda one: one.failed(txid, failed, returned))

    def dead_letters(self, txid: int, number: int) -> None:
        """See `Observer.dead_letters`."""
        self._tell(lambda one: one.dead_letters(txid, number))

    def suppressed(self, sinks: Sequence[str]) -> None:
        """See `Observer.suppressed`."""
        self._tell(lambda one: one.suppressed(sinks))

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """See `Observer.blocked`."""
        self._tell(lambda one: one.blocked(txid, sink, cause, reason))

    def recovered(self, report: RecoveryReport) -> None:
        """See `Observer.recovered`."""
        self._tell(lambda one: one.recovered(report))

    def timed(self, result: BatchResult) -> None:
        """See `Observer.timed`."""
        self._tell(lambda one: one.timed(result))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for one in self._observers:
            try:
                tell(one)
            except Exception:
                log.exception("%s could not take in what a batch did: its figures are wrong", type(one).__name__)
