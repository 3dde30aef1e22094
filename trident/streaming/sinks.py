"""Frames straight into sinks: each job and each micro-batch has a key, and is one message and one transaction, written once.

What `once` would do is found without a change: the ledger is read, and the rows are computed and dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import sqlalchemy as sa

from stormproof.core.base.errors import Fenced, JobFailed, Json, SinkRefused, TopologyError, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.bolt import DEFAULT_STREAM
from stormproof.core.contract.payload import BytesDecoder
from stormproof.core.contract.sink import SinkMode, SinkSpec, TaskContext, files_of
from stormproof.core.contract.source import (
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    NumberIds,
    Resolution,
    ShownIds,
    Slice,
    SliceReader,
    Source,
    SourceKind,
)
from stormproof.core.graph.components import Subscription
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.start.settings import Settings
from stormproof.core.tracking.share import tokens, xor_reduce
from stormproof.sinks.contract.preview import RowsPreview
from stormproof.sinks.prepare.writer import Rehearsal, one_message_writer
from stormproof.trident.driver.coordinator import SEED_BITS
from stormproof.trident.driver.dry_run import DryRun, DryRunOutcome, look, notes_of, outcome_of, sinks_told, table_of
from stormproof.trident.driver.opening import placed, require_own_tables, sinks_of
from stormproof.trident.driver.outages import outlasting_outages
from stormproof.trident.driver.recovery import recover
from stormproof.trident.driver.steps import Opened, Steps
from stormproof.trident.ledger import handed_in, txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.handed_in import HandedIn, handed, source_of, stands
from stormproof.trident.ledger.tables import NO_LIFE, Event
from stormproof.trident.streaming.foreach_batch import (
    ForeachBatch,
    Frame,
    OnceResult,
    OpenQuery,
    Plans,
    StepTimes,
    StreamOutcome,
    StreamResult,
)
from stormproof.trident.terms.observers import BatchResult, RecoveryReport
from stormproof.trident.terms.transaction_states import EventKind, TxnCause, TxnState

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames, WrittenRows


class OneMessageSource(Source):
    """The source that ledger, recovery and audit see: a micro-batch, or a job, is one message.

    Nothing is leased or returned: Spark hands a micro-batch out again until it is done, and a program runs its job again;
    a ledger table says where the query stands, and which jobs are done.
    """

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self._decoder = BytesDecoder(schema)

    @property
    def decoder(self) -> Decoder:
        """It only names the rows' fields, and decodes nothing."""
        return self._decoder

    @property
    def kind(self) -> SourceKind:
        """Opaque: until it is prepared, Spark may compute other rows for it."""
        return SourceKind.OPAQUE

    def serves(self, guarantee: Guarantee) -> str | None:
        """Exactly-once only."""
        return None if guarantee is Guarantee.EXACTLY_ONCE else "exactly_once() has no other guarantee"

    def shown_id(self, message: int, origin: int) -> str:
        """The txid."""
        return str(message)

    def shown_ids(self) -> ShownIds:
        """The numbers. Rows that are written have the key instead."""
        return NumberIds()

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Nothing to make ready."""

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """Nothing: micro-batches are handed in."""
        return None

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice again."""
        return Slice(position, expected, 0)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """One message."""
        number = slice_.position["number"]
        assert isinstance(number, int)
        return one_message(number, seed)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """None: Spark computes the rows."""
        return ()

    def pin(self, lease: Lease, tx: object | None = None) -> None:
        """There is no lease that could lapse."""

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """Nothing to do: the committed txid is the confirmation."""
        return Resolution()

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Nothing to do: Spark hands it out again."""

    def extend(self, lease: Lease) -> None:
        """There is no lease that could lapse."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """No leases."""
        return ()

    def split(
        self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
    ) -> None:
        """Refused: it is one message."""
        raise UsageError(f"stream {self.name!r}: a micro-batch is one message and cannot be split")

    def backlog(self) -> Backlog:
        """Only Spark knows."""
        return Backlog(0, 0, 0, 0)

    def joins(self, tx: object) -> bool:
        """Always: its whole state is in the ledger."""
        return True


def one_message(number: int, seed: int) -> Expectation:
    """What the acker must find for a micro-batch."""
    return Expectation(1, xor_reduce(tokens(np.array([number], np.int64), seed)))


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

    def _pin(self, opened: Opened, tx: Tx) -> None:
        super()._pin(opened, tx)
        if self.take is not None:
            self.take(tx)

    def rejects_max(self, messages: int, sinks: frozenset[str] | None) -> int:
        """None; but a sink is to find the row."""
        return 0


class ExactlyOnce(ForeachBatch):
    """Writes micro-batches (as the function of `foreachBatch`) or jobs (`once`) to sinks, exactly once; by `exactly_once`.

    Each has a key; a micro-batch's is its place in its query. As a context manager it closes in order.
    """

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
    ) -> WrittenRows | JobFailed:
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

    def _commit(self, steps: Steps, opened: Opened, written: WrittenRows, times: StepTimes) -> None:
        """Prepare, commit and finish what was written."""
        batch = steps.fix_content(opened, 1, Guarantee.EXACTLY_ONCE, written.files, (), written.rows, times.ms)
        times.mark("prepare")
        results = steps.settle(batch, steps.commit_sinks(batch))
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
            slice_ = Slice({"key": known.key, "number": txid}, one_message(txid, seed), 0)
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
        tx.record([Event(EventKind.SUPPRESSED, txid=txid, sink=sink, detail={**detail}) for sink in current.sessions])

    def once(self, frame: Frame, key: str) -> OnceResult:
        """Append a DataFrame's rows to every sink, exactly once for this key, and return when every sink holds them.

        A key is any text of up to 2,000 bytes: a date, a partition, the id of a run. Keys come in any order.

        Guarantee:
            However often it is called with a key, by whatever process, and wherever that was killed: each sink holds the
            rows of one call, whole. A later call with the key computes nothing. A call that was killed before its rows
            were prepared leaves nothing, and the next one writes its own. One that was killed later is completed from its
            files by the next call of this name, whatever its key.

        Not guaranteed:
            Anything about two calls with two keys: rows that both compute are written by both. One process at a time uses
            a name: a call in another one takes over, and the first ends with `Fenced`.

        Raises:
            UsageError: no such key, a streaming DataFrame, Spark Connect, or a name that a streaming query uses.
            SinkRefused: a sink cannot hold a row, which is named; nothing was written, and the key may come again.
            JobFailed: the job failed; nothing was written, and the key may come again.
            Fenced: another process took over.
            StoreUnavailable: a store stayed away. Call again with the key, which finds out what was written.
        """
        handed_in.checked_key(self.name, key)
        with self._lock:
            started_s = self._clock.monotonic_s()
            self._frames.require_batch(frame)
            with self._opened(frame, None, partial(_require_jobs, self.name)) as current:
                result = self._written_once(current, frame, partial(_job, key), "call once() with this key again")
                result.steps_ms["total"] = (self._clock.monotonic_s() - started_s) * 1000
                committed = result.outcome is StreamOutcome.COMMITTED
                self._note_steps(current, result.steps_ms, committed=committed)
                line: dict[str, object] = {
                    "topology": self.name,
                    "key": key,
                    "outcome": result.outcome.value,
                    "txid": result.txid,
                    "epoch": current.run.epoch,
                    "rows": result.rows,
                    "steps_ms": {name: round(value, 1) for name, value in result.steps_ms.items()},
                }
            log.info("job %s", json.dumps(line))
            return result

    def dry_run(self, frame: Frame, key: str) -> DryRun:
        """What `once(frame, key)` would do now. Nothing is done: `str` of the result is for people, `to_json` for programs.

        The job runs, and its rows are checked as the writers check them, counted, and dropped. The ledger, the tables'
        catalogs and logs are read.

        Guarantee:
            No row, file, folder, table, column, claim or entry of the ledger is made or changed, and no running driver is
            fenced, whatever the answer, and wherever the call is killed. It needs no right to write anywhere; what it
            says is by the rights that it has.

        Not guaranteed:
            That a call will end so: the tables' own rules (`TablePreview.can_refuse`) are named and not tried, other
            writers may come between, and a job whose rows are not repeatable has others the next time. An embedded
            Postgres that stands is started, as by every command. The user's own code runs, with what it does by itself.

        Raises:
            UsageError: no such key, a streaming DataFrame, or a name that a streaming query uses.
            JobFailed: the job failed.
            StoreUnavailable: a store does not answer.
        """
        handed_in.checked_key(self.name, key)
        self._frames.require_batch(frame)
        self._frames.require(frame)
        schema = self._frames.schema(frame)
        plan, _ = self._planned(schema, source_of(self.name))
        return rehearsed(
            self.name, key, self._gathered(plan, frame), plan, schema, self._frames, self._settings or Settings()
        )


def rehearsed(
    name: str, key: str, frame: Frame, plan: Plan, schema: pa.Schema, frames: Frames, settings: Settings
) -> DryRun:
    """What `once(frame, key)` would do, with the frame as it would be written.

    Raises:
        JobFailed: the job failed.
        Otherwise as `look`.
    """
    view, database = look(settings, name, key, graph_of(plan, handed_in.source_of(name)))
    if database is not None:
        require_own_tables(placed(plan, database, settings))
    previews = {sink.name: table_of(sink, plan, view, name, database) for sink in sinks_of(plan)}
    told = partial(DryRun, name=name, key=key, txid=view.taken or view.last_txid + 1)
    if view.refusal:
        notes = (*notes_of(view), view.refusal)
        sinks = sinks_told(plan, previews, {})
        return told(outcome=DryRunOutcome.REFUSE, rows=None, sinks=sinks, notes=notes)
    if view.taken is not None:
        waits = any(txn.txid == view.taken and txn.state is not TxnState.COMMITTED for txn in view.unresolved)
        outcome = DryRunOutcome.ROLL_FORWARD if waits else DryRunOutcome.SUPPRESS
        return told(outcome=outcome, rows=None, sinks=sinks_told(plan, previews, {}), notes=notes_of(view))
    writers = {
        sink: Rehearsal(sink, one_message_writer(preview.writer, plan.sinks[sink], key))
        for sink, preview in previews.items()
        if preview.writer is not None
    }
    rows, found, problems = None, dict[str, RowsPreview](), tuple[str, ...]()
    if writers:
        written = frames.write(frame, writers, TaskContext(NO_LIFE, view.last_txid + 1, 1, 0), schema)
        rows, problems = written.rows, written.problems
        found = {sink: RowsPreview.of(files_of(written.files, sink)) for sink in writers}
    sinks = sinks_told(plan, previews, found)
    outcome = DryRunOutcome.REFUSE if problems else outcome_of(sinks)
    notes = (*notes_of(view), *(f"no sink can hold a row: {text}" for text in problems))
    return told(outcome=outcome, rows=rows, sinks=sinks, notes=notes)


def _job(key: str, tx: Tx) -> HandedIn:
    return handed_in.job_of(tx.connection, tx.run.incarnation, key) or HandedIn(key)


def _require_jobs(name: str, connection: sa.Connection) -> None:
    handed_in.require_use(connection, name, by_key=True)
