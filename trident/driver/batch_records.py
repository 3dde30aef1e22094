"""What the ledger, the log and the observers are told of a batch: its counts, its failures, its rejects, its refusal.

`ReadAlready` holds messages that are read before they are confirmed: a retry's payload is gone with its confirm.
`Accounts` is what a driver reports of its run: statistics, a log line for each batch, and the caller's `on_batch`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import pyarrow as pa

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import FatalError, Json, SinkRefused
from stormproof.core.base.message import Guarantee, MessageFailure, storable_text
from stormproof.core.base.process import kept_from_forks
from stormproof.core.contract.source import Resolution, Slice, SliceReader, Source
from stormproof.core.graph.plan import (
    BoltNode,
    CombineNode,
    GatherNode,
    JoinNode,
    Node,
    OperationNode,
    Plan,
    WriteNode,
    taker_of,
)
from stormproof.core.source.spouts import unshown
from stormproof.core.tracking.acker import ACKER
from stormproof.core.tracking.verdict import Complete, ComponentCounts, Edge, FailedIn, TaskCounts
from stormproof.sinks.contract.protocol import (
    PROBLEM,
    CommitResult,
    PreparedTransaction,
    RefusedRow,
    SinkProblem,
    SupportsSkipRows,
)
from stormproof.sinks.prepare.rejected_messages import REFUSED_MAX
from stormproof.sinks.prepare.staging import Misfits
from stormproof.sinks.rows.limits import discarded_in
from stormproof.trident.driver.tuning import Step
from stormproof.trident.ledger import sink_records
from stormproof.trident.ledger.tables import BatchCounts, ComponentRow, EdgeRow, Event, Reject, SinkWork
from stormproof.trident.terms.observers import BatchResult, RecoveryReport, RunStatistics, SinkEnd
from stormproof.trident.terms.transaction_states import ComponentKind, EventKind, TxnCause, TxnState


@dataclass(frozen=True, slots=True)
class CountedGraph:
    """The components and edges of a topology of which rows are recorded; without an acker under at-most-once."""

    kinds: Mapping[str, ComponentKind]
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, plan: Plan) -> CountedGraph:
        """Those of a compiled topology."""
        kinds: dict[str, ComponentKind] = {}
        edges: dict[Edge, None] = {}
        for stage in plan.stages:
            ways = [(e.component, e.stream, e.children) for e in stage.entries if e.edge is None or e.edge.group]
            kinds |= {entry.component: ComponentKind.SPOUT for entry in stage.entries if entry.edge is None}
            for node in stage.nodes.values():
                kind = _kind_of(node)
                if kind is not None:
                    kinds[taker_of(node)] = kind
                ways += _ways_of(node)
            for component, stream, children in ways:
                edges |= dict.fromkeys((component, stream, taker_of(stage.nodes[child])) for child in children)
        if plan.guarantee.tracked:
            kinds[ACKER] = ComponentKind.ACKER
        return cls(kinds, tuple(edges))

    def of_complete(
        self, complete: Complete, shown: Callable[[MessageFailure], str], sinks: Collection[str] | None = None
    ) -> BatchCounts:
        """The rows of a batch whose content is fixed. `sinks` are those that get its rows; None: all.

        `shown` gives a message's id as people see it: where there are several spouts, it names the message's.
        """
        counts, report = complete.report.counts, complete.report
        late = {f.id: f for f in (*report.late, *report.lost)}
        for failure in report.failures:
            late.pop(failure.id, None)
        counted = [one.failure for one in complete.failed if one.failure.counted]
        return self._rows(counts, counted, list(late.values()), shown, sinks)

    def of_failed(self, failed: Sequence[FailedIn], shown: Callable[[MessageFailure], str]) -> BatchCounts:
        """The rows of a batch of which every message failed: where they did. Nothing of what ran is kept, or counted."""
        counted = [one.failure for one in failed if one.failure.counted]
        rows = self._rows(TaskCounts(), counted, [], shown, None)
        return BatchCounts(tuple(row for row in rows.components if row.failed))

    def _rows(
        self,
        counts: TaskCounts,
        failed: Sequence[MessageFailure],
        late: Sequence[MessageFailure],
        shown: Callable[[MessageFailure], str],
        sinks: Collection[str] | None,
    ) -> BatchCounts:
        spouts = [name for name, kind in self.kinds.items() if kind is ComponentKind.SPOUT]
        idle = set[str]()
        if sinks is not None:  # the others hold its rows already: their writers wrote nothing
            idle = {name for name, kind in self.kinds.items() if kind is ComponentKind.SINK and name not in sinks}

        def spout_of(failure: MessageFailure) -> str:
            if len(spouts) == 1:
                return spouts[0]
            named = unshown(shown(failure))
            return "" if named is None else named[0]

        fell, late_in = Counter(map(spout_of, failed)), Counter(map(spout_of, late))
        # A bad message failed in its spout, which counts all of its messages' failures anyway.
        fell_in = Counter(failure.component for failure in failed if failure.component not in spouts)
        rows: list[ComponentRow] = []
        for name, kind in self.kinds.items():
            found = ComponentCounts() if name in idle else counts.components.get(name, ComponentCounts())
            acked, failures, emitted = found.acked - late_in[name], fell_in[name] + fell[name], found.emitted
            if kind is ComponentKind.ACKER:
                read = sum(counts.of(spout).executed for spout in spouts)
                acked = sum(counts.of(spout).acked for spout in spouts) - late_in.total()
                failures, emitted = fell.total(), read
            rows.append(ComponentRow(name, kind, found.executed, emitted, acked, failures, found.busy_ns / 1e6))
        edges = ((edge, 0 if edge[2] in idle else counts.edges.get(edge, 0)) for edge in self.edges)
        return BatchCounts(tuple(rows), tuple(EdgeRow(*edge, tuples) for edge, tuples in edges))


def _kind_of(node: Node) -> ComponentKind | None:
    match node:
        case OperationNode():
            return ComponentKind.OPERATION
        case BoltNode():
            return ComponentKind.BOLT
        case CombineNode() | GatherNode():
            return ComponentKind.AGGREGATE
        case JoinNode():
            return ComponentKind.JOIN
        case WriteNode():
            return ComponentKind.SINK
        case _:
            return None


def _ways_of(node: Node) -> list[tuple[str, str, tuple[str, ...]]]:
    """What a node hands on: its component, the stream, and the keys of the nodes that take it."""
    match node:
        case BoltNode():
            return [(node.component, stream, children) for stream, children in node.children.items()]
        case OperationNode() | GatherNode() | JoinNode():
            return [(node.component, "default", node.children)]
        case _:
            return []


def blocked(
    topology: str,
    txid: int,
    reason: str | None,
    sink: str | None,
    session: object,
    details: Mapping[str, Json] | None = None,
) -> SinkRefused:
    """The error for a batch that `sink` refused, whose session is `session`. Without a known sink nothing can be skipped."""
    text = (
        f"txid {txid} of topology {topology!r} is blocked: {reason}. Repair the cause, then: stormproof retry "
        f"{topology} {txid}"
    )
    if sink is not None:
        text += f"; or give up its rows at that sink, on record: stormproof ledger skip {topology} {txid} {sink}"
    if isinstance(session, SupportsSkipRows):
        text += " (with --rows: only those that its table refuses)"
    return SinkRefused(text, **{**(details or {}), "txid": txid, "sink": sink})


ALWAYS: Final = 10
"""Messages that may be rejected among the newest, however few these are."""

WINDOW: Final = 1_000
"""Messages that count as the newest, at least."""


class RejectLimit:
    """The share of rejected messages among the newest ones of a run. With a share of 0 no message is rejected."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._batches: deque[tuple[int, int]] = deque()
        self._messages = 0
        self._rejected = 0

    def of_batch(self, messages: int) -> int | None:
        """How many messages of the next batch each sink may reject; None: it is to reject none, whatever it refuses."""
        if not self._max_share:
            return None
        most = max(ALWAYS, int(self._max_share * (self._messages + messages)))
        return max(0, min(most - self._rejected, REFUSED_MAX))

    def note(self, messages: int, rejected: int) -> None:
        """Count a committed batch."""
        self._batches.append((messages, rejected))
        self._messages += messages
        self._rejected += rejected
        while self._messages - self._batches[0][0] >= WINDOW:
            gone, were_rejected = self._batches.popleft()
            self._messages -= gone
            self._rejected -= were_rejected


log = logging.getLogger("stormproof.txn")
tuning_log = logging.getLogger("stormproof.tuning")


@dataclass(frozen=True, slots=True)
class SinkAnswers:
    """The sinks' answers to a batch: the result of each that committed it, and the one that `refused` it with its error."""

    results: dict[str, CommitResult]
    refused: str = ""
    error: FatalError | None = None


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch whose content is fixed, by the driver that ran its job or as it is on record: `work` is what it writes.

    `failed` are the messages that are not in it, since they failed or were returned. Each sink may reject `rejects_max` of
    its messages. `steps_ms` goes on counting until the batch has ended.
    """

    txid: int
    attempt: int
    guarantee: Guarantee
    slice: Slice
    work: Mapping[str, SinkWork]
    failed: Sequence[MessageFailure]
    tuples: int
    steps_ms: dict[str, float]
    sinks: frozenset[str] | None
    """As in `Opened`."""
    rejects_max: int | None

    @property
    def state(self) -> TxnState:
        """Its state in the ledger."""
        return TxnState.PREPARED if self.guarantee is Guarantee.EXACTLY_ONCE else TxnState.OPEN


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that is committed: what its confirm did with failed messages, and its result."""

    resolution: Resolution
    result: BatchResult


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
        one
        for sink, rows in refused.items()
        for one in sink_records.rejects_of_rows(txid, sink, rows, source.shown_id, payloads)
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
    """The ledger's record of one batch at one sink, in the form that a sink commits."""
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


_BATCH_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ReadAlready:
    """A reader's messages as they were read, with the tokens of one seed. They are in memory, and travel with the job."""

    batches: tuple[pa.RecordBatch, ...]

    @staticmethod
    def of(reader: SliceReader, seed: int) -> ReadAlready:
        """Read all of a reader's messages now."""
        return ReadAlready(tuple(reader.read(seed, frozenset(), _BATCH_ROWS)))

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield them again; `seed` is the one with which they were read."""
        for batch in self.batches:
            kept = batch
            if excluded:
                kept = batch.filter(pc.invert(pc.is_in(batch.column("id"), value_set=pa.array(sorted(excluded)))))
            for first in range(0, kept.num_rows, batch_rows):
                yield kept.slice(first, batch_rows)
