"""What the functions for `foreachBatch` and for jobs share: a name is opened with its first frame, closed after an error."""

from __future__ import annotations

import json
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from stormproof.core.base.arguments import operator
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Json, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.base.process import kept_from_forks
from stormproof.core.contract.source import Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.graph.plan import Plan
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.opening import Preflight, SinkSessions, attached, placed
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.outages import outlasting_outages
from stormproof.trident.driver.run import new_incarnation, options_of
from stormproof.trident.ledger import handed_in
from stormproof.trident.ledger.control import Doing
from stormproof.trident.ledger.database import Tx, known_error, ledger_engine, require_schema
from stormproof.trident.ledger.handed_in import HandedIn, handed, missing, stands_by_name
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.tables import Event, Run
from stormproof.trident.telemetry.recorder import RunMetrics, exported_lineage, exported_metrics, lineage_transport
from stormproof.trident.terms.observers import Observer, Observers, RunStatistics
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction

if TYPE_CHECKING:
    from stormproof.core.engine.frame import Frames


class StreamOutcome(StrEnum):
    """What became of a micro-batch, or of a job, in one call."""

    COMMITTED = "committed"
    ROLLED_FORWARD = "rolled_forward"
    """Its content was fixed before: it was committed from its files, and what was handed in again was discarded."""
    SUPPRESSED = "suppressed"
    """Every sink held it already."""


@dataclass(frozen=True, slots=True)
class StreamResult:
    """What one call did. `rows` is how many the micro-batch had, or 0 where it was not read."""

    query: str
    batch: int
    outcome: StreamOutcome
    txids: tuple[int, ...]
    rows: int
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OnceResult:
    """What one `once(frame, key=...)` did. `rows` is how many it wrote: 0 where they were written before."""

    key: str
    outcome: StreamOutcome
    txid: int
    rows: int
    steps_ms: dict[str, float] = field(default_factory=dict[str, float])


Frame: TypeAlias = Any
"""Rows: Spark's DataFrame. It is not named here, so that Spark need not be imported."""
Plans: TypeAlias = Mapping[int, str | None]
"""What the query's checkpoint says of batches of the query, by their number."""
Look: TypeAlias = Callable[[sa.Connection], object]
"""Reads the ledger before anything is opened, and raises where the caller does not belong here."""

log = logging.getLogger("stormproof.txn")


class StepTimes:
    """How long each step of a call took; steps follow one another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = clock.monotonic_s()
        self.ms: dict[str, float] = {}

    def mark(self, step: str) -> None:
        """Record that the step has just ended."""
        now_s = self._clock.monotonic_s()
        self.ms[step], self._last_s = (now_s - self._last_s) * 1000, now_s


@dataclass(frozen=True, slots=True)
class OpenQuery:
    """What one driver has open for one name."""

    query: str | None
    """The streaming query that calls; None: a program, with keys."""
    plan: Plan
    source: Source
    ledger: Ledger
    run: Run
    sessions: SinkSessions
    options: RunOptions
    settings: Settings
    preflight: Preflight
    stack: ExitStack
    metrics: RunMetrics | None = None
    lineage: Sequence[Observer] = ()

    @property
    def parts(self) -> tuple[Ledger, Run, Source, SinkSessions]:
        """What the steps of its batches work on."""
        return self.ledger, self.run, self.source, self.sessions

    @property
    def observer(self) -> Observer:
        """What is told of the batches."""
        return Observers((*(() if self.metrics is None else self.metrics.observers), *self.lineage))


class ForeachBatch(ABC):
    """What Spark calls with each micro-batch; one object serves one query. Made by `exactly_once` and `feed`.

    The first micro-batch raises the epoch, which fences an older driver of the same name, and recovers. An error closes
    everything; the next call begins anew. `close` ends it in order, once the query has ended.
    """

    def __init__(
        self,
        name: str,
        guarantee: Guarantee,
        *,
        adopt: str | None,
        settings: Settings | None,
        options: RunOptions | None,
        on_batch: Callable[[StreamResult], None] | None,
        frames: Frames | None,
    ) -> None:
        self.name = name
        self._given_frames = frames
        self._guarantee = guarantee
        self._adopt = adopt
        self._settings = settings
        self._options = options
        self._on_batch = on_batch
        self._clock: Clock = SystemClock()
        self._rng = random.Random()  # noqa: S311 - seeds need spread, not secrecy
        self._lock = threading.Lock()
        self._current: OpenQuery | None = None
        self.statistics = RunStatistics(name, guarantee.value, 0)
        """What was done so far, over all epochs of this object."""

    def __call__(self, frame: Frame, batch_id: int) -> None:
        """Take one micro-batch to its end."""
        with self._lock:
            started_s = self._clock.monotonic_s()
            query = self._frames.query_id(frame)
            plans = self._plans(frame, query, batch_id)

            def look(connection: sa.Connection) -> None:
                handed_in.require_use(connection, self.name, by_key=False)
                standing = stands_by_name(connection, self.name, query, batch_id)
                handed(self.name, standing, query, batch_id, plans, self._adopt)

            with self._opened(frame, query, look) as current:
                result = self._take(current, frame, query, batch_id, plans)
                result.steps_ms["total"] = (self._clock.monotonic_s() - started_s) * 1000
                epoch = current.run.epoch
                committed = self._times_transactions and result.outcome is StreamOutcome.COMMITTED
                self._note_steps(current, result.steps_ms, committed=committed)
            self._account(epoch, result)

    def _plans(self, frame: Frame, query: str, batch: int) -> Plans:
        """Of this batch; and of the one before, where a function goes on that does not know what it was given last."""
        numbers = (batch,) if self._current is not None else (batch - 1, batch)
        return {number: self._frames.plan(frame, query, number) for number in numbers if number >= 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _opened(self, frame: Frame, query: str | None, look: Look) -> Generator[OpenQuery]:
        """What is open for this caller; it is opened if it is not, and closed by an error."""
        kept = False
        try:
            if self._current is not None and self._current.query != query:
                raise UsageError(
                    f"stream {self.name!r} is fed by {_caller(self._current.query)}, and {_caller(query)} calls it, too: "
                    "give each query a function of its own, with a name and tables of its own"
                )
            if self._current is not None and not self._takes(frame):
                self._current.ledger.stop(self._current.run)
                self._let_go()  # the start judges other columns
            if self._current is None:
                self._current = self._begin(frame, query, look)
            yield self._current
            kept = True
        finally:
            if not kept:
                self._let_go()

    @property
    def _frames(self) -> Frames:
        if self._given_frames is None:
            from stormproof.core.engine.frame import SparkFrames  # imports Spark, which is there once it has called

            self._given_frames = SparkFrames()
        return self._given_frames

    def close(self) -> None:
        """Record that the driver ended in order, and close connections; a later call would begin anew."""
        with self._lock:
            current = self._current
            if current is not None:
                try:
                    current.ledger.stop(current.run)
                finally:
                    self._let_go()

    def _takes(self, frame: Frame) -> bool:
        """Whether the frame has the columns for which everything is open."""
        return True

    _times_transactions = True
    """Whether a call is one transaction, so that its time is that transaction's."""

    def _note_steps(self, current: OpenQuery, steps_ms: Mapping[str, float], *, committed: bool) -> None:
        """Take a call's times into the metrics; the call is a sign of life."""
        if current.metrics is not None:
            current.metrics.recorder.note_steps(steps_ms, committed=committed)
            current.metrics.recorder.heard(Doing.RUNNING)

    @abstractmethod
    def _plan(self, frame: Frame, query: str | None) -> tuple[Plan, Source]:
        """The plan for such rows, and its source."""

    @abstractmethod
    def _take(self, current: OpenQuery, frame: Frame, query: str, batch: int, plans: Plans) -> StreamResult:
        """Take one micro-batch to its end."""

    @abstractmethod
    def _recovered(self, current: OpenQuery) -> None:
        """Recover, right after the query was opened."""

    def _begin(self, frame: Frame, query: str | None, look: Look) -> OpenQuery:
        """Open everything. The epoch is raised last, so that a caller that cannot run fences nobody."""
        self._frames.require(frame)
        plan, source = self._plan(frame, query)
        functions = require_shippable(plan)
        settings = self._settings or Settings()
        with ExitStack() as stack:
            database = settings.resolve_database()
            engine = ledger_engine(database)
            stack.callback(engine.dispose)
            require_schema(engine, database, own=settings.uses_embedded)
            metrics = stack.enter_context(exported_metrics(self.name, settings, self._clock))
            transport = lineage_transport(settings)
            source = source.for_run(database)
            plan = placed(plan, database, settings)
            options = replace(self._options or options_of(settings, self._guarantee), until_idle=True)
            ledger = Ledger(engine, self._clock, new_incarnation if query is None else lambda: query)
            outlasting_outages(partial(_looked, engine, look), options, self._clock)
            preflight = Preflight(self._engine(frame, settings), plan, functions, source, settings.staging_address)
            outlasting_outages(preflight, options, self._clock)
            attach = partial(attached, plan, source, ledger, database)
            run, sessions = outlasting_outages(lambda: stack.enter_context(attach()), options, self._clock)
            if metrics is not None:
                metrics.began(run, self._guarantee, source, sessions)
            lineage = stack.enter_context(
                exported_lineage(
                    *(transport, settings, plan, source, run, self._guarantee, self._clock),
                    streaming=query is not None,
                    count=None if metrics is None else metrics.lineage_event,
                )
            )
            current = OpenQuery(
                *(query, plan, source, ledger, run, sessions, options, settings, preflight),
                stack=stack.pop_all(),
                metrics=metrics,
                lineage=lineage,
            )
        self._current = current  # from here on an error closes it
        self.statistics = replace(self.statistics, epoch=run.epoch)
        self._recovered(current)
        return current

    def _engine(self, frame: Frame, settings: Settings) -> Engine:
        return self._frames.engine(frame, settings.parallelism, settings.worker_memory_mb)

    def _let_go(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.stack.close()

    def _record_place(self, tx: Tx, taken: HandedIn) -> None:
        """Take a micro-batch, or a job; where it is not simply the next one, that is logged and recorded."""
        begins = taken.batch > 0 and handed_in.newest(tx.connection, tx.run.incarnation) is None
        handed_in.take(tx, taken)
        place, before = taken.key, taken.adopted_from
        if before is not None:
            detail: dict[str, Json] = {
                "action": OperatorAction.ADOPT_STREAM.value,
                "from": before,
                "query": taken.query,
                "batch": taken.batch,
                "by": operator(),
            }
            reason = f"goes on from {place}, which follows {before}"
            tx.record([Event(EventKind.OPERATOR, OperatorAction.ADOPT_STREAM, reason=reason, detail=detail)])
            log.warning("stream %s: goes on from %s instead of %s", self.name, place, before)
        if begins:
            # The row itself is the record: status and audit show it, and a prune keeps it.
            text = "stream %s: begins at batch %d of streaming query %s; %s not in its sinks"
            log.warning(text, self.name, taken.batch, taken.query, missing(taken.batch))

    def _account(self, epoch: int, result: StreamResult) -> None:
        line: dict[str, object] = {
            "topology": self.name,
            "query": result.query,
            "batch": result.batch,
            "outcome": result.outcome.value,
            "txids": list(result.txids),
            "guarantee": self._guarantee.value,
            "epoch": epoch,
            "rows": result.rows,
            "steps_ms": {name: round(value, 1) for name, value in result.steps_ms.items()},
        }
        log.info("micro-batch %s", json.dumps(line))
        if self._on_batch is not None:
            with kept_from_forks():
                self._on_batch(result)


def _looked(engine: sa.Engine, look: Look) -> None:
    try:
        with engine.connect() as connection:
            look(connection)
    except DBAPIError as error:
        known = known_error(error)
        if known is None:
            raise
        raise known from error


def _caller(query: str | None) -> str:
    return "a program that calls once()" if query is None else f"query {query}"
