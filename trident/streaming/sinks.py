"""Frames straight into sinks: each job and each micro-batch has a key, and is one transaction that is written once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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
from stormproof.core.source.protocol import Source
from stormproof.sinks.writer import one_message_writer
from stormproof.trident.coordinator import SEED_BITS
from stormproof.trident.ledger import events, txns
from stormproof.trident.ledger.handed_in import HandedIn, source_of
from stormproof.trident.ledger.rows import Event
from stormproof.trident.ledger.streams import handed, stands
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.observers import BatchResult, RecoveryReport
from stormproof.trident.options import outlasting_outages
from stormproof.trident.recovery import recover
from stormproof.trident.steps import Opened, Steps
from stormproof.trident.streaming.base import ForeachBatch, Frame, OpenQuery, Plans, StepTimes
from stormproof.trident.streaming.one_message import OneMessageSource, slice_of
from stormproof.trident.streaming.result import OnceResult, StreamOutcome, StreamResult
from stormproof.trident.transaction_states import EventKind, TxnCause, TxnState

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames, Written

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
    """Batches that are one message each: one of which a table refuses a row is blocked, and the refusal names the row.

    A batch takes its key in the transaction that fixes its content; one that is not prepared is aborted.
    """

    take: Callable[[Tx], None] | None = None
    """Records what is open as taken."""

    def _hold(self, opened: Opened, tx: Tx) -> None:
        super()._hold(opened, tx)
        if self.take is not None:
            self.take(tx)

    def rejects_max(self, messages: int, sinks: frozenset[str] | None) -> int:
        """None; but a sink is to find the row."""
        del messages, sinks
        return 0


class SinkStream(ForeachBatch):
    """Frames straight into sinks, once for each key; a micro-batch's is its place in its query."""

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
        self._steps: OneMessageSteps | None = None
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

    def _recovered(self, current: OpenQuery) -> None:
        self._steps = OneMessageSteps(*current.parts, lease_s=current.options.lease_s, observer=current.observer)
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
        def find(tx: Tx) -> HandedIn:
            return handed(self.name, stands(tx, query, batch), query, batch, plans, self._adopt)

        way = "start the query again, which hands out the same batch; or feed() a topology, where they become dead letters"
        done = self._written_once(current, frame, find, way)
        return StreamResult(query, batch, done.outcome, (done.txid,), done.rows, done.steps_ms)

    def _written_once(self, current: OpenQuery, frame: Frame, find: Callable[[Tx], HandedIn], way: str) -> OnceResult:
        """Write a frame's rows for the key that is found, or find them written.

        Where a store's answer is lost, recovery finds out what is owed, and the call goes on; a job that failed is not tried
        again here.

        `way` says what to do where a sink cannot hold a row.
        """
        steps = self._steps
        assert steps is not None
        result = outlasting_outages(
            lambda: self._write_once(current, steps, frame, find, way),
            current.options,
            self._clock,
            let_go=steps.drop_connections,
            recover=lambda: bool(self._recover(sweep=False).rolled_forward),
        )
        if isinstance(result, JobFailed):
            raise result
        return result

    def _write_once(
        self, current: OpenQuery, steps: OneMessageSteps, frame: Frame, find: Callable[[Tx], HandedIn], way: str
    ) -> OnceResult | JobFailed:
        times = StepTimes(self._clock)
        known, opened = self._open(current, steps, find)
        times.mark("open")
        if opened is None:
            return self._written_before(current, steps, frame, known, times)
        written = self._write(current, frame, known.key, opened, times)
        if isinstance(written, JobFailed):
            steps.abort(opened.txid, TxnCause.JOB_FAILED, str(written), steps_ms=times.ms)
            return written
        if written.problems:
            problems = "; ".join(written.problems)
            reason = f"rows that a sink cannot hold: {problems}"
            steps.abort(opened.txid, TxnCause.JOB_FAILED, reason, steps_ms=times.ms)
            raise SinkRefused(
                f"{self.name!r}, {known}: {reason}. Nothing was written. Mend or filter them, and {way}",
                key=known.key,
                problems=[*written.problems],
            )
        self._commit(steps, opened, written, times)
        return OnceResult(known.key, StreamOutcome.COMMITTED, opened.txid, written.rows, times.ms)

    def _written_before(
        self, current: OpenQuery, steps: Steps, frame: Frame, known: HandedIn, times: StepTimes
    ) -> OnceResult:
        """A query's rows are computed for nothing, since Spark writes a stateful query's state while it computes."""
        assert known.txid is not None
        steps.observer.suppressed(tuple(current.sessions))
        if known.query is not None:
            self._frames.read_in_vain(frame)
            times.mark("read_in_vain")
        outcome = StreamOutcome.ROLLED_FORWARD if known.txid in self._rolled else StreamOutcome.SUPPRESSED
        self._rolled.discard(known.txid)
        self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + len(current.sessions))
        return OnceResult(known.key, outcome, known.txid, 0, times.ms)

    def _takes(self, frame: Frame) -> bool:
        return bool(self._frames.schema(frame).equals(self._schema))

    def _write(
        self, current: OpenQuery, frame: Frame, key: str, opened: Opened, times: StepTimes
    ) -> Written | JobFailed:
        """Compute the rows and write them to files, by one job."""
        schema = self._schema
        assert schema is not None
        writers = {
            name: one_message_writer(session.writer(), current.plan.sinks[name], key)
            for name, session in current.sessions.items()
        }
        try:
            context = TaskContext(current.run.incarnation, opened.txid, 1, 0)
            written = self._frames.write(self._gathered(current.plan, frame), writers, context, schema)
        except JobFailed as error:
            times.mark("job")
            return error
        times.mark("job")
        failpoint("run.after")
        return written

    def _commit(self, steps: Steps, opened: Opened, written: Written, times: StepTimes) -> None:
        """Prepare, commit and finish what was written."""
        batch = steps.fix_content(opened, 1, Guarantee.EXACTLY_ONCE, written.files, (), written.rows, times.ms)
        times.mark("prepare")
        results = steps.settle(batch, steps.adopt(batch))
        times.mark("commit")
        finished = steps.finish(batch, results)
        times.mark("finish")
        suppressed = sum(result.is_suppressed for result in results.values())
        self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + suppressed)
        self._count(finished.result)

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
        self, current: OpenQuery, steps: OneMessageSteps, find: Callable[[Tx], HandedIn]
    ) -> tuple[HandedIn, Opened | None]:
        """What is handed in, and a new transaction for it; None where one holds its rows already."""
        failpoint("open.before")
        seed = self._rng.getrandbits(SEED_BITS)
        with current.ledger.transaction(current.run) as tx:
            known = find(tx)
            if known.txid is not None:
                self._record_again(current, tx, known, known.txid)
                return known, None
            txid = txns.next_txid(tx)
            slice_ = slice_of(known.key, txid, seed)
            txns.open_batch(tx, txid, Guarantee.EXACTLY_ONCE, current.source.name, slice_, seed)
            failpoint("open.in_transaction")
        steps.take = partial(self._record_place, taken=replace(known, number=txid, txid=txid))
        steps.observer.opened(txid, Guarantee.EXACTLY_ONCE, slice_)
        failpoint("open.after")
        return known, Opened(txid, steps.lease(txid), slice_, seed)

    def _record_again(self, current: OpenQuery, tx: Tx, known: HandedIn, txid: int) -> None:
        """Recovery has rolled it forward; a batch that was pruned was committed."""
        txn = txns.find(tx, txid)
        if txn is not None and txn.state is not TxnState.COMMITTED:
            raise Fenced(f"txid {txid} of {self.name!r} ({known}) is {txn.state}: another driver moved it")
        place: dict[str, Json] = {"query": known.query, "batch": known.batch}
        detail = {"key": known.key} if known.query is None else place
        events.record(
            tx, [Event(EventKind.SUPPRESSED, txid=txid, sink=sink, detail={**detail}) for sink in current.sessions]
        )
