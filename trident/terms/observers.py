"""What is told of a run: to observers, step by step; and to its caller, in frozen figures that may be kept."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Final

from pydantic import TypeAdapter, ValidationError

from stormproof.core.base.errors import Json
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Slice
from stormproof.trident.terms.transaction_states import AttemptOutcome, TxnCause, TxnState


@dataclass(frozen=True, slots=True)
class Figures:
    """The size and number of batches at one moment; the ledger keeps it with every batch that is opened.

    At most `messages` and `bytes` a batch, and `in_flight` batches at once, of `in_flight_max` that there may ever be. With
    a `latency_target_s` they are tuned: `step` is the last decision, and `why` its reason. `floor_s`: the target is below
    reach, since even small batches, one at a time, take this many seconds.
    """

    messages: int
    bytes: int
    in_flight: int
    in_flight_max: int
    latency_target_s: float | None = None
    floor_s: float | None = None
    step: str = ""
    why: str = ""

    @staticmethod
    def of_json(found: Mapping[str, Json]) -> Figures | None:
        """As the ledger gave it back; None where another version wrote it, or it was tampered with."""
        try:
            return _FIGURES.validate_python(found)
        except ValidationError:
            return None


_FIGURES: Final = TypeAdapter(Figures)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The end of one batch. `steps_ms` are wall-clock milliseconds a step.

    `messages` were opened. `failed` of them failed (`reasons`: the number for each reason), and `returned` went back with a
    failed one with which they share a tuple; both are zero where the batch went back whole or in parts. Of the failed ones
    `dead_letters` are given up, and the others are tried again. `rejected` is the number of messages that a sink does not
    hold, since its table refuses their rows; others may. `unanchored` is the number of failed tuples that no message
    anchors: nothing is replayed for them. `cause` (a `TxnCause`) is why a batch was not committed, and `reason` the same in
    words where it was split or abandoned.
    """

    txid: int
    state: str
    messages: int
    failed: int
    retry: bool
    attempts: int
    tuples: int
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])
    returned: int = 0
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    unanchored: int = 0
    dead_letters: int = 0
    reason: str = ""
    cause: str | None = None
    superseded: int = 0
    """Rows of upserts that changed nothing, over all sinks: a later row of their key was there, or in the same batch."""
    rejected: int = 0

    @property
    def outcome(self) -> str:
        """The state, with two words for `aborted`: `failed` where every message failed and waits for its retry or is a dead
        letter, `split` where the batch is opened again in parts.
        """
        if self.state != TxnState.ABORTED.value:
            return self.state
        return "failed" if self.failed else "split"

    @property
    def committed_messages(self) -> int:
        """The number of messages that it put into all sinks, or under at-most-once may have put there."""
        return (
            self.messages - self.failed - self.returned - self.rejected if self.state == TxnState.COMMITTED.value else 0
        )


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What recovery found and did, by txid; every list in txid order."""

    epoch: int
    took_over_from: str | None = None
    rolled_forward: tuple[int, ...] = ()
    aborted: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    confirms_repeated: tuple[int, ...] = ()
    suppressed: tuple[tuple[int, str], ...] = ()
    files_swept: int = 0
    in_hand: tuple[int, ...] = ()
    """The numbers of the messages that were in hand when a driver died, and were set apart."""
    late_commits: tuple[tuple[int, str], ...] = ()
    """(txid, sink) of batches that had been given up, and that a suspended driver wrote after all."""
    rejected: int = 0
    """Messages that sinks rejected in the batches that were rolled forward."""

    @property
    def did_something(self) -> bool:
        """Whether there was anything to recover."""
        return bool(
            self.rolled_forward
            or self.aborted
            or self.abandoned
            or self.confirms_repeated
            or self.suppressed
            or self.late_commits
            or self.files_swept
        )


_SUMMED: Final = ["tuples", "failed", "returned", "unanchored", "dead_letters", "superseded", "rejected", "attempts"]
"""Figures of a batch that those of a run are sums of."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """The figures of one `run`, with the batches of an earlier driver that its recovery committed.

    `messages` counts messages that every sink holds, without failed, returned and rejected ones. `rejected` counts
    messages that a sink does not hold, since its table refuses their rows; `stormproof dead-letters` shows them.
    `failed` counts failures, so a message that failed twice counts twice; `failed_by_reason` is the same by
    `FailureReason`. `returned` counts returns of messages that went back with a failed one. `replayed` counts openings
    of messages that had failed or been returned before. `unanchored` counts failed tuples that no message anchors, for
    which nothing is replayed. `attempts` counts jobs: more than `batches` where a batch ran more than once.
    `dead_letters` counts messages that were given up. `superseded` counts rows of upserts that changed nothing, over all
    sinks: a later row of their key was there already, or in the same batch.
    """

    topology: str
    guarantee: str
    epoch: int
    batches: int = 0
    messages: int = 0
    tuples: int = 0
    failed: int = 0
    failed_by_reason: Mapping[str, int] = field(default_factory=dict[str, int])
    returned: int = 0
    unanchored: int = 0
    replayed: int = 0
    attempts: int = 0
    dead_letters: int = 0
    rejected: int = 0
    aborted_batches: int = 0
    abandoned_batches: int = 0
    suppressed: int = 0
    superseded: int = 0
    recoveries: tuple[RecoveryReport, ...] = ()
    elapsed_s: float = 0.0
    stopped: str = "idle"
    """Why the run ended: `idle`, `limit`, `signal`; `event`, if that of `run(stop=...)` was set; `stop` or `drain`, if an
    operator asked for it; `error`."""

    tuning: Figures | None = None
    """The tuned size and number of batches at the end; None without a latency target."""

    def after(self, result: BatchResult) -> RunStatistics:
        """The figures with one batch more, which this run or its recovery ended."""
        return replace(
            self,
            batches=self.batches + 1,
            messages=self.messages + result.committed_messages,
            failed_by_reason=dict(Counter(self.failed_by_reason) + Counter(result.reasons)),
            replayed=self.replayed + (result.messages if result.retry else 0),
            aborted_batches=self.aborted_batches + (result.state == TxnState.ABORTED.value),
            abandoned_batches=self.abandoned_batches + (result.state == TxnState.ABANDONED.value),
            **{name: getattr(self, name) + getattr(result, name) for name in _SUMMED},
        )

    def plus(self, later: RunStatistics) -> RunStatistics:
        """The sums of both runs, with the later one's epoch."""
        numbers = [f.name for f in fields(self) if f.type in ("int", "float") and f.name != "epoch"]
        return replace(
            later,
            failed_by_reason=dict(Counter(self.failed_by_reason) + Counter(later.failed_by_reason)),
            recoveries=(*self.recoveries, *later.recoveries),
            **{name: getattr(self, name) + getattr(later, name) for name in numbers},
        )


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
        for method in vars(Observer):
            if not method.startswith("_"):
                setattr(self, method, partial(self._tell, method))

    def _tell(self, method: str, *told: object) -> None:
        for one in self._observers:
            try:
                getattr(one, method)(*told)
            except Exception:
                log.exception("%s could not take in what a batch did: its figures are wrong", type(one).__name__)
