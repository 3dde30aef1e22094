"""The rows of micro-batches as a topology's messages: written to staged files, then run in batches by a coordinator."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import TaskContext
from stormproof.core.contract.source import Source
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.source.files.micro_batches import MicroBatches
from stormproof.core.start.settings import Settings
from stormproof.core.storage.files import files_at
from stormproof.sinks.prepare.writer import FileWriter
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.options import RunOptions, outlasting_outages
from stormproof.trident.ledger.handed_in import HandedIn, handed, newest, stands
from stormproof.trident.ledger.tables import Event
from stormproof.trident.streaming.base import (
    ForeachBatch,
    Frame,
    OpenQuery,
    Plans,
    StepTimes,
    StreamOutcome,
    StreamResult,
)
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
        del query
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
