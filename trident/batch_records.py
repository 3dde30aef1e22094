"""What the ledger, the log and the observers are told of a batch: its failures, its rejects, what each sink made of it.

`Accounts` is what a driver reports of its run: statistics, a log line for each batch, and the caller's `on_batch`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from stormproof.core.errors import SinkRefused
from stormproof.core.forks import kept_from_forks
from stormproof.core.message import MessageFailure, storable_text
from stormproof.core.source.protocol import Resolution, Slice, Source
from stormproof.core.tracking.outcome import FailedIn
from stormproof.sinks.limits import discarded_in
from stormproof.sinks.misfits import Misfits
from stormproof.sinks.protocol import PROBLEM, CommitResult, PreparedTransaction, RefusedRow, SinkProblem
from stormproof.trident.ledger import rejects
from stormproof.trident.ledger.rows import Event, Reject, SinkWork
from stormproof.trident.observers import SinkEnd
from stormproof.trident.statistics import BatchResult, RecoveryReport, RunStatistics
from stormproof.trident.transaction_states import EventKind, TxnCause
from stormproof.trident.tuning import Step

log = logging.getLogger("stormproof.txn")
tuning_log = logging.getLogger("stormproof.tuning")


def reasons_of(failed: Iterable[MessageFailure]) -> Counter[str]:
    """How many messages failed for each reason; those that were only returned are not among them."""
    return Counter(one.reason.value for one in failed if one.counted)


def failure_events(source: Source, failed: Sequence[FailedIn], txid: int) -> list[Event]:
    """An event for each message that failed, with the id that people see."""
    return [
        Event.of_failure(f.failure, source.shown_id(f.failure.id, f.failure.origin), txid, f.attempt) for f in failed
    ]


def rejects_of(
    source: Source,
    txid: int,
    slice_: Slice,
    work: Mapping[str, SinkWork],
    results: Mapping[str, CommitResult],
    given_up: Mapping[str, RefusedRow],
) -> list[Reject]:
    """The batch's rejects, with the payloads of their messages where the source gives them again.

    `given_up` has a row that stands for all of the batch's messages, for each sink where an operator gave up all but them.
    """
    found = {sink: (*_left_out(work[sink]), *result.refused) for sink, result in results.items()}
    found |= {sink: (row,) for sink, row in given_up.items()}
    refused = {sink: rows for sink, rows in found.items() if rows}
    if not refused:
        return []
    numbers = {number for rows in refused.values() for row in rows for number, _ in row.messages}
    payloads = source.payloads_of(slice_, numbers)
    return [
        one for sink, rows in refused.items() for one in rejects.of_rows(txid, sink, rows, source.shown_id, payloads)
    ]


def _left_out(work: SinkWork) -> tuple[RefusedRow, ...]:
    """The refused rows that are in no file of a sink's work."""
    misfits = Misfits.of(work.files).all
    if work.left_out is None:
        return misfits
    # Of rows of groups that an operator gave up alone the messages have parts in others, which the sink holds.
    return work.left_out + tuple(replace(row, messages=()) for row in misfits)


def log_rejects(topology: str, txid: int, rejected: Sequence[Reject]) -> None:
    """A warning for each sink that rejected messages, with the first of its reasons."""
    for sink in dict.fromkeys(one.sink for one in rejected):
        mine = [one for one in rejected if one.sink == sink]
        state = "" if mine[0].sqlstate is None else f"SQLSTATE {mine[0].sqlstate}: "
        log.warning(
            "txid %d of topology %r: sink %r rejected %d messages, the first: %s%s; look at them with: stormproof "
            "dead-letters list %s",
            *(txid, topology, sink, len(mine), state, mine[0].error, topology),
        )


def resolution_events(txid: int, resolution: Resolution, results: Mapping[str, CommitResult]) -> list[Event]:
    """Its dead letters, and the sinks that held it already or took fewer rows."""
    dead = [Event(EventKind.DEAD_LETTER, txid=txid, message=shown) for shown in resolution.dead]
    suppressed = [
        Event(EventKind.SUPPRESSED, txid=txid, sink=sink) for sink, result in results.items() if result.is_suppressed
    ]
    dropped = [
        Event(EventKind.DROPPED, txid=txid, sink=sink, detail={"rows": result.dropped})
        for sink, result in results.items()
        if result.dropped
    ]
    return dead + suppressed + dropped


def contract_events(txid: int, work: Mapping[str, SinkWork], results: Mapping[str, CommitResult]) -> list[Event]:
    """What the sinks' schema contracts did for a batch."""
    changed = [
        Event(EventKind.SCHEMA_CHANGED, txid=txid, sink=sink, reason=storable_text(text))
        for sink, result in results.items()
        for text in result.changed
    ]
    discarded = {sink: discarded_in(one.files) for sink, one in work.items()}
    return changed + [
        Event(EventKind.VALUES_DISCARDED, txid=txid, sink=sink, detail={"columns": {**counts}})
        for sink, counts in discarded.items()
        if counts
    ]


def ends_of(
    work: Mapping[str, SinkWork], results: Mapping[str, CommitResult], rejected: Sequence[Reject]
) -> dict[str, SinkEnd]:
    """What each sink got of a batch, for observers."""
    counts = Counter(one.sink for one in rejected)
    return {
        sink: SinkEnd(
            work[sink].rows,
            work[sink].bytes,
            result.superseded,
            counts[sink],
            result.is_suppressed,
            None if result.version is None else str(result.version),
            sum(one.rows for one in rejected if one.sink == sink),
        )
        for sink, result in results.items()
    }


def cause_of(refusal: SinkRefused) -> TxnCause:
    """The cause of a blocked batch, by its sink's refusal."""
    match refusal.details.get(PROBLEM):
        case SinkProblem.FILE_LOST:
            return TxnCause.FILE_LOST
        case SinkProblem.TABLE_GONE:
            return TxnCause.TABLE_GONE
        case SinkProblem.TOO_MANY_REJECTS:
            return TxnCause.TOO_MANY_REJECTS
        case _:
            return TxnCause.SINK_REFUSED


def to_prepared(txid: int, work: SinkWork) -> PreparedTransaction:
    """The ledger's record of one batch at one sink, in the form that a sink adopts."""
    of_groups = work.left_out is not None
    return PreparedTransaction(txid, work.previous, work.digest, work.rows, work.files, of_groups=of_groups)


class Accounts:
    """Counts and logs what one run does. `statistics` may be read from any thread."""

    def __init__(self, statistics: RunStatistics, on_batch: Callable[[BatchResult], None] | None) -> None:
        self.statistics = statistics
        self.taken = 0
        """Batches that this run has opened and ended; recovery's are not among them."""
        self._on_batch = on_batch

    def suppressed(self, duplicates: int) -> None:
        """Count commits of batches that a sink held already."""
        self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + duplicates)

    def recovered(self, report: RecoveryReport) -> None:
        """Count and log a recovery, if it found anything to do."""
        if not (report.did_something or report.took_over_from):
            return
        self.suppressed(len(report.suppressed))
        self.statistics = replace(self.statistics, recoveries=(*self.statistics.recoveries, report))
        log.info("recovered %s", json.dumps({"topology": self.statistics.topology, **asdict(report)}))

    def run_ended(self, elapsed_s: float, stopped: str) -> None:
        """Note how long the run took, and why it ended."""
        self.statistics = replace(self.statistics, elapsed_s=elapsed_s, stopped=stopped)

    def note_step(self, step: Step | None) -> None:
        """Log what the tuner decided, if anything."""
        if step is None:
            return
        level = logging.WARNING if step.below_reach else logging.INFO
        topology, below_reach = self.statistics.topology, step.below_reach
        line = {"topology": topology, "step": str(step), "why": step.why, "below_reach": below_reach}
        tuning_log.log(level, "tuning %s", json.dumps(line))

    def ended(self, result: BatchResult) -> None:
        """Count a batch, log it, and call the caller's function with its result."""
        self.statistics = s = self.statistics.after(result)
        line = {
            "topology": s.topology,
            "guarantee": s.guarantee,
            "epoch": s.epoch,
            **asdict(result),
            "outcome": result.outcome,
            "reason": storable_text(result.reason),
            "steps_ms": {name: round(value, 1) for name, value in result.steps_ms.items()},
        }
        log.info("txn %s", json.dumps(line))
        if self._on_batch is not None:
            with kept_from_forks():
                self._on_batch(result)
