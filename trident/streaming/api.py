"""Spark's own frames into Stormproof: what a streaming query's `foreachBatch` calls, and what a batch job calls.

`exactly_once(sinks..., name=...)` writes each micro-batch, or each job's rows, to its sinks; `feed(topology)` makes messages
of a micro-batch's rows and takes them through a topology. docs/foreach_batch.md says which is for what, and what each costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import Json, TopologyError, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee, as_guarantee
from stormproof.core.contract.sink import SinkSpec, TaskContext, require_tables_apart
from stormproof.core.contract.source import Source
from stormproof.core.graph.checks import checked_name, require_sink
from stormproof.core.graph.plan import Plan, compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.source.files.micro_batches import MicroBatches
from stormproof.core.start.settings import Settings
from stormproof.core.storage.files import files_at
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.outages import outlasting_outages
from stormproof.trident.ledger.handed_in import HandedIn, handed, newest, stands
from stormproof.trident.ledger.tables import Event
from stormproof.trident.streaming.foreach_batch import (
    ForeachBatch,
    Frame,
    OpenQuery,
    Plans,
    StepTimes,
    StreamOutcome,
    StreamResult,
)
from stormproof.trident.streaming.sinks import ExactlyOnce
from stormproof.trident.terms.observers import RunStatistics
from stormproof.trident.terms.transaction_states import EventKind

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames


class TopologyStream(ForeachBatch):
    """The rows of micro-batches as a topology's messages."""

    _times_transactions = False

    def __init__(
        self,
        topology: TopologyGraph,
        source: MicroBatches,
        guarantee: Guarantee,
        *,
        adopt: str | None,
        settings: Settings | None,
        options: RunOptions | None,
        on_batch: Callable[[StreamResult], None] | None,
        frames: Frames | None = None,
    ) -> None:
        super().__init__(
            topology.name, guarantee, adopt=adopt, settings=settings, options=options, on_batch=on_batch, frames=frames
        )
        self._topology = topology
        self._source = source

    def _plan(self, frame: Frame, query: str | None) -> tuple[Plan, Source]:
        there = self._frames.schema(frame).names
        missing = [column for column in self._source.columns if column not in there]
        if missing:
            raise UsageError(
                f"topology {self.name!r}: the micro-batch has no column {', '.join(map(repr, missing))}; it has "
                f"{', '.join(there)}"
            )
        return compile_topology(self._topology, self._guarantee), self._source

    def _recovered(self, current: OpenQuery) -> None:
        self._source.sweep(self._folder(current))

    def _folder(self, current: OpenQuery) -> str:
        return os.path.join(current.settings.staging_address, "micro-batches", current.run.incarnation)

    def _take(self, current: OpenQuery, frame: Frame, query: str, batch: int, plans: Plans) -> StreamResult:
        times, rows = StepTimes(self._clock), 0

        def look() -> tuple[HandedIn, int]:
            with current.ledger.transaction(current.run) as tx:
                standing = stands(tx, query, batch)
            number = 0 if standing.last is None else standing.last.number or 0
            return handed(self.name, standing, query, batch, plans, self._adopt), number

        known, number = outlasting_outages(look, current.options, self._clock)
        if known.number is not None:
            self._frames.read_in_vain(frame)
            times.mark("read_in_vain")
        else:
            rows = self._stage(current, frame, replace(known, number=number + 1), times)
        before = self.statistics
        txids: list[int] = []
        statistics = self._run(current, frame, txids)
        times.mark("run")
        self._source.sweep(self._folder(current))
        rolled = [txid for report in statistics.recoveries for txid in report.rolled_forward]
        txids = [txid for txid in txids if txid not in rolled]
        outcome = StreamOutcome.COMMITTED
        if known.number is not None and not txids:
            outcome = StreamOutcome.ROLLED_FORWARD if rolled else StreamOutcome.SUPPRESSED
            self._record_suppressed(current, query, batch)
        self.statistics = before.plus(statistics)
        return StreamResult(query, batch, outcome, (*rolled, *txids), rows, times.ms)

    def _stage(self, current: OpenQuery, frame: Frame, taken: HandedIn, times: StepTimes) -> int:
        """Write the rows to files and register them as messages, which fixes the content; returns the number of rows."""
        folder, number = self._folder(current), taken.number or 0
        files_at(folder).make_folder(folder, private=True)
        kept = self._frames.select(frame, self._source.columns)
        writer = FileWriter("micro-batch", folder)
        context = TaskContext(current.run.incarnation, number, current.run.epoch, 0)
        written = self._frames.write(kept, {writer.sink: writer}, context, self._frames.schema(kept))
        times.mark("stage")
        failpoint("stream.before_register")

        def register() -> None:
            with current.ledger.transaction(current.run) as tx:
                there = newest(tx.connection, current.run.incarnation)
                if there is not None and there.number == number:
                    return  # the earlier try took place, and its answer was lost
                names = [file.path for file in written.files]
                first, stop = self._source.register(folder, names, current.run.epoch, tx.raw)
                self._record_place(tx, replace(taken, first=first, stop=stop))
                failpoint("stream.in_transaction")

        outlasting_outages(register, current.options, self._clock)
        failpoint("stream.after_register")
        outlasting_outages(self._source.reload, current.options, self._clock)
        times.mark("register")
        return written.rows

    def _run(self, current: OpenQuery, frame: Frame, txids: list[int]) -> RunStatistics:
        """Run batches until nothing is left to open now."""
        engine = self._engine(frame, current.settings)
        coordinator = Coordinator(
            current.plan,
            current.source,
            current.sessions,
            current.ledger,
            current.run,
            engine,
            options=current.options,
            clock=self._clock,
            rng=self._rng,
            on_batch=lambda result: txids.append(result.txid),
            preflight=current.preflight,
            metrics=current.metrics,
            observers=current.lineage,
        )
        self._source.feeding = True
        try:
            return coordinator.run()
        finally:
            self._source.feeding = False

    def _record_suppressed(self, current: OpenQuery, query: str, batch: int) -> None:
        detail: dict[str, Json] = {"query": query, "batch": batch}

        def record() -> None:
            with current.ledger.transaction(current.run) as tx:
                tx.record([Event(EventKind.SUPPRESSED, detail=detail)])

        outlasting_outages(record, current.options, self._clock)


def exactly_once(
    *sinks: SinkSpec,
    name: str,
    adopt: str | None = None,
    settings: Settings | None = None,
    on_batch: Callable[[StreamResult], None] | None = None,
    frames: Frames | None = None,
) -> ExactlyOnce:
    """For `df.writeStream.foreachBatch(...)`: each micro-batch's rows are appended to every sink, exactly once.

    For a batch job, `once` of what is returned appends a DataFrame's rows exactly once for a key of the caller's. A name is
    for streaming queries, or for jobs.

    A micro-batch is one message and one transaction: the first one that `name` gets is txid 1, the next txid 2. Its rows
    are computed and written once, by one job; from *prepare* on they are never computed again. A row that a sink cannot
    hold stops the query with an error that names the row: where rows may fail one by one, use `feed` with a topology.

    `adopt` names the place, as the error prints it, from which this query is to go on although the ledger expects another
    place or another name there. Several functions of different names may take each micro-batch of one query. `frames` is for
    tests: it hands out micro-batches in place of Spark.

    Raises (when a micro-batch is handed in):
        PositionMismatch: checkpoint and ledger do not belong together; or a sink holds another txid than the ledger.
        Fenced: another query, or another run of this one, took over.
        SinkRefused: a sink cannot hold a row, or refuses a commit for good.
        JobFailed: the query's own job failed.
    """
    if not sinks:
        raise TopologyError(f"exactly_once(name={name!r}) needs at least one sink")
    for sink in sinks:
        require_sink(sink, f"exactly_once(name={name!r})")
    require_tables_apart(name, sinks)
    return ExactlyOnce(
        checked_name(name, "stream"), sinks, adopt=adopt, settings=settings, on_batch=on_batch, frames=frames
    )


def feed(
    topology: TopologyGraph,
    guarantee: Guarantee | str | None = None,
    *,
    adopt: str | None = None,
    settings: Settings | None = None,
    options: RunOptions | None = None,
    on_batch: Callable[[StreamResult], None] | None = None,
    frames: Frames | None = None,
) -> ForeachBatch:
    """For `df.writeStream.foreachBatch(...)`: each row of a micro-batch is a message of the topology's `MicroBatches`.

    A call returns once every message of the micro-batch is committed, waits for its retry, or is a dead letter. The rows
    are written to staged files first (one job), then run through the topology (one job for each of its batches).

    Raises:
        TopologyError: the topology cannot run under this guarantee, or its one source is no `MicroBatches`.
        When a micro-batch is handed in: as `exactly_once`, and as a topology's run.
    """
    if not isinstance(topology, TopologyGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(f"feed: {shown(topology)} is no topology; give an object of Topology with its streams")
    spouts = topology.spouts
    source = spouts[0].source
    if len(spouts) != 1 or not isinstance(source, MicroBatches):
        raise TopologyError(
            f"topology {topology.name!r} is fed by a streaming query only where its one source is a MicroBatches; it has "
            f"{', '.join(f'{s.name!r} ({type(s.source).__name__})' for s in spouts)}"
        )
    chosen = as_guarantee(guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    compile_topology(topology, chosen)  # so that a fault of the topology is reported before the query starts
    return TopologyStream(
        topology, source, chosen, adopt=adopt, settings=settings, options=options, on_batch=on_batch, frames=frames
    )
