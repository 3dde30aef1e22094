"""Micro-batches straight into sinks: each micro-batch is one transaction, whose rows are computed and written once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from stormproof.core.bolt import DEFAULT_STREAM
from stormproof.core.errors import Fenced, JobFailed, Json, SinkRefused, TopologyError
from stormproof.core.failpoint import failpoint
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.components import Subscription
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.settings import Settings
from stormproof.core.sink import SinkMode, SinkSpec, TaskContext
from stormproof.core.source.protocol import Slice, Source
from stormproof.core.tracking.outcome import FailedIn
from stormproof.sinks.lineage import one_message_writer
from stormproof.trident.coordinator import SEED_BITS
from stormproof.trident.ledger import events, txns
from stormproof.trident.ledger.job_keys import source_of
from stormproof.trident.ledger.rows import Event
from stormproof.trident.ledger.streams import Handed, StreamBatch, handed, planned, stands
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.outages import outlasting_outages
from stormproof.trident.recovery import recover
from stormproof.trident.statistics import BatchResult, RecoveryReport
from stormproof.trident.steps import NO_TIMES, Opened, Steps
from stormproof.trident.streaming.base import ForeachBatch, Frame, OpenQuery, Plans, StepTimes
from stormproof.trident.streaming.one_message import OneMessageSource, one_message, shown_message, slice_of
from stormproof.trident.streaming.result import StreamOutcome, StreamResult
from stormproof.trident.transaction_states import AttemptOutcome, EventKind, TxnCause, TxnState

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames, Written

R = TypeVar("R")

log = logging.getLogger("stormproof.txn")


def _require_no_rejects(name: str, sinks: Sequence[SinkSpec]) -> None:
    for sink in sinks:
        if sink.rejects_misfits:
            raise TopologyError(
                f"{name!r}: sink {sink.name!r} has schema_contract='discard_row', which rejects the message of a row that "
                "does not fit; here the whole micro-batch or job is one message. Use 'freeze' or 'discard_value', or feed() "
                "a topology, where each row is a message",
                sink=sink.name,
            )


class OneMessageSteps(Steps):
    """Batches that are one message each: one of which a table refuses a row is blocked, and the refusal names the row."""

    def rejects_max(self, messages: int, sinks: frozenset[str] | None) -> int:
        """None; but a sink is to find the row."""
        del messages, sinks
        return 0


class KeepTxidSteps(OneMessageSteps):
    """A batch that is not prepared keeps its txid over restarts, since Spark hands out the same micro-batch next."""

    def abort(
        self,
        txid: int,
        cause: TxnCause,
        reason: str,
        *,
        divide: Slice | None = None,
        alone: Sequence[int] = (),
        parts: int = 2,
        steps_ms: Mapping[str, float] = NO_TIMES,
    ) -> None:
        """Leave the txid open; its next attempt comes with the call that hands the micro-batch out again."""
        del cause, divide, alone, parts, steps_ms
        failpoint("abort.in_transaction")
        log.info("txid %d of stream %s stays open: %s", txid, self.run.topology, reason)
        failpoint("abort.after")


class SinkStream(ForeachBatch):
    """Micro-batches straight into sinks."""

    def __init__(
        self,
        name: str,
        sinks: Sequence[SinkSpec],
        *,
        adopt: str | None,
        settings: Settings | None,
        on_batch: Callable[[StreamResult], None] | None,
        frames: Frames | None = None,
    ) -> None:
        super().__init__(
            name, Guarantee.EXACTLY_ONCE, adopt=adopt, settings=settings, options=None, on_batch=on_batch, frames=frames
        )
        self._sinks = tuple(sinks)
        _require_no_rejects(name, self._sinks)
        self._steps: Steps | None = None
        self._schema: pa.Schema | None = None
        self._rolled: set[int] = set()

    def _plan(self, frame: Frame, query: str | None) -> tuple[Plan, Source]:
        self._schema = self._frames.schema(frame)
        return self._planned(self._schema, self.name if query is not None else source_of(self.name))

    def _planned(self, schema: pa.Schema, name: str) -> tuple[Plan, OneMessageSource]:
        source = OneMessageSource(name, schema)
        topology = TopologyGraph(self.name)
        spout = topology.add_spout("micro-batches", source)
        for sink in self._sinks:
            topology.add_sink(Subscription(spout, DEFAULT_STREAM), sink)
        return compile_topology(topology, Guarantee.EXACTLY_ONCE), source

    def _steps_of(self, current: OpenQuery) -> Steps:
        """The steps of the caller's transactions."""
        return KeepTxidSteps(*current.parts, lease_s=current.options.lease_s, observer=current.observer)

    def _recovered(self, current: OpenQuery) -> None:
        self._steps = self._steps_of(current)
        self._rolled.clear()
        first = True

        def recover_once() -> None:
            nonlocal first
            self._recover(sweep=first)
            first = False

        outlasting_outages(recover_once, current.options, self._clock, let_go=self._steps.drop_connections)

    def _recover(self, *, sweep: bool) -> RecoveryReport:
        assert self._steps is not None
        report = recover(self._steps, sweep=sweep, ended=self._count)
        self._rolled.update(report.rolled_forward)
        if report.did_something or report.took_over_from:
            self.statistics = replace(
                self.statistics,
                recoveries=(*self.statistics.recoveries, report),
                suppressed=self.statistics.suppressed + len(report.suppressed),
            )
            summary = {"topology": self.name, "epoch": report.epoch, "rolled_forward": list(report.rolled_forward)}
            log.info("recovered %s", json.dumps(summary))
        return report

    def _take(self, current: OpenQuery, frame: Frame, query: str, batch: int, plans: Plans) -> StreamResult:
        return self._outlasting(current, lambda steps: self._take_once(current, steps, frame, query, batch, plans))

    def _outlasting(self, current: OpenQuery, take: Callable[[Steps], R | JobFailed]) -> R:
        """Take it; where a store's answer is lost, recovery finds out what is owed, and the call goes on.

        A job that failed is not tried again here: `take` returns its error, which is raised.
        """
        steps = self._steps
        assert steps is not None
        result = outlasting_outages(
            lambda: take(steps),
            current.options,
            self._clock,
            let_go=steps.drop_connections,
            recover=lambda: bool(self._recover(sweep=False).rolled_forward),
        )
        if isinstance(result, JobFailed):
            raise result
        return result

    def _take_once(
        self, current: OpenQuery, steps: Steps, frame: Frame, query: str, batch: int, plans: Plans
    ) -> StreamResult | JobFailed:
        times = StepTimes(self._clock)
        opened, attempt = self._open(current, steps, query, batch, plans)
        times.mark("open")
        if attempt is None:
            outcome = StreamOutcome.ROLLED_FORWARD if opened.txid in self._rolled else StreamOutcome.SUPPRESSED
            self._frames.read_in_vain(frame)
            times.mark("read_in_vain")
            self._count_suppressed(current)
            return StreamResult(query, batch, outcome, (opened.txid,), 0, times.ms)
        written = self._write(current, frame, opened, attempt, times)
        if isinstance(written, JobFailed):
            return written
        if written.problems:
            raise SinkRefused(
                f"stream {self.name!r}: batch {batch} of query {query} has rows that a sink cannot hold: "
                f"{'; '.join(written.problems)}. Nothing was written. Mend or filter them in the query and start it "
                "again, which hands out the same batch; or feed() a topology, where such rows become dead letters",
                batch=batch,
                problems=[*written.problems],
            )
        self._commit(steps, opened, attempt, written, times)
        return StreamResult(query, batch, StreamOutcome.COMMITTED, (opened.txid,), written.rows, times.ms)

    def _takes(self, frame: Frame) -> bool:
        return bool(self._frames.schema(frame).equals(self._schema))

    def _count_suppressed(self, current: OpenQuery) -> None:
        self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + len(current.sessions))

    def _write(
        self, current: OpenQuery, frame: Frame, opened: Opened, attempt: int, times: StepTimes
    ) -> Written | JobFailed:
        """Compute the rows and write them to files, by one job."""
        schema = self._schema
        assert schema is not None
        message = shown_message(opened.slice)
        writers = {
            name: one_message_writer(session.writer(), current.plan.sinks[name], message)
            for name, session in current.sessions.items()
        }
        try:
            context = TaskContext(current.run.incarnation, opened.txid, attempt, 0)
            written = self._frames.write(self._gathered(current.plan, frame), writers, context, schema)
        except JobFailed as error:
            times.mark("job")
            return error
        times.mark("job")
        failpoint("run.after")
        return written

    def _commit(self, steps: Steps, opened: Opened, attempt: int, written: Written, times: StepTimes) -> None:
        """Prepare, commit and finish what was written."""
        nobody: Sequence[FailedIn] = ()
        work = steps.fix_content(opened, attempt, Guarantee.EXACTLY_ONCE, written.files, nobody, written.rows, times.ms)
        times.mark("prepare")
        most = steps.rejects_max(1, None)
        results = steps.commit(opened.txid, Guarantee.EXACTLY_ONCE, work, most)
        times.mark("commit")
        finished = steps.finish(
            *(opened.txid, Guarantee.EXACTLY_ONCE, TxnState.PREPARED, work, (), results, times.ms, opened.slice)
        )
        times.mark("finish")
        suppressed = sum(result.is_suppressed for result in results.values())
        self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + suppressed)
        superseded = sum(result.superseded for result in results.values())
        state, rejected = TxnState.COMMITTED.value, finished.rejected
        self._count(
            BatchResult(
                *(opened.txid, state, 1, 0, False, attempt, written.rows), superseded=superseded, rejected=rejected
            )
        )

    def _count(self, batch: BatchResult) -> None:
        self.statistics = self.statistics.after(batch)

    def _gathered(self, plan: Plan, frame: Frame) -> Frame:
        """The micro-batch with the rows of each key in one task, where a sink takes the last row of each."""
        keys = [input_.keys for input_ in plan.sinks.values() if input_.mode is SinkMode.UPSERT]
        if not keys:
            return frame
        common = [name for name in keys[0] if all(name in others for others in keys[1:])]
        return self._frames.gathered(frame, common)

    def _open(
        self, current: OpenQuery, steps: Steps, query: str, batch: int, plans: Plans
    ) -> tuple[Opened, int | None]:
        """The micro-batch's transaction, and the number of its attempt (None: it is committed already)."""
        failpoint("open.before")
        seed = self._rng.getrandbits(SEED_BITS)
        with current.ledger.transaction(current.run) as tx:
            standing = stands(tx, query, batch)
            known = handed(self.name, standing, query, batch, plans, self._adopt)
            if known is Handed.AGAIN:
                assert standing.last is not None
                taken, attempt = standing.last, self._again(current, tx, standing.last, plans[batch], seed)
            else:
                txid = txns.next_txid(tx)
                adopted = self._adopt if known is Handed.ADOPTED else None
                taken = StreamBatch(txid, query, batch, txid, adopted_from=adopted, plan=plans[batch])
                self._record_place(current, tx, standing, taken)
                txns.open_batch(tx, txid, Guarantee.EXACTLY_ONCE, self.name, slice_of(taken, seed), seed)
                attempt = 1
            failpoint("open.in_transaction")
        assert taken.txid is not None
        opened = Opened(taken.txid, steps.lease(taken.txid), slice_of(taken, seed), seed)
        if attempt is None:
            steps.observer.suppressed(tuple(current.sessions))
        elif attempt == 1:
            steps.observer.opened(opened.txid, Guarantee.EXACTLY_ONCE, opened.slice)
        else:
            steps.observer.attempt_ended(opened.txid, attempt - 1, AttemptOutcome.JOB_FAILED)
        failpoint("open.after")
        return opened, attempt

    def _again(self, current: OpenQuery, tx: Tx, last: StreamBatch, plan: str | None, seed: int) -> int | None:
        assert last.txid is not None
        txn = txns.find(tx, last.txid)
        assert txn is not None
        if txn.state is TxnState.OPEN:
            # Nothing was fixed: it runs again, and its rows may differ.
            txns.end_attempt(
                tx, last.txid, txn.attempt, AttemptOutcome.JOB_FAILED, "its driver ended, or its job failed"
            )
            planned(tx, last, plan)
            expected = one_message(last.number, seed)
            txns.add_attempt(tx, last.txid, txn.attempt + 1, seed, frozenset(), expected)
            return txn.attempt + 1
        if txn.state is not TxnState.COMMITTED:
            raise Fenced(f"txid {last.txid} of stream {self.name!r} is {txn.state}: another driver moved it")
        detail: dict[str, Json] = {"query": last.query, "batch": last.batch}
        events.record(
            tx, [Event(EventKind.SUPPRESSED, txid=last.txid, sink=sink, detail=detail) for sink in current.sessions]
        )
        return None
