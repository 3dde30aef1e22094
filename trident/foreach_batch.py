"""Structured Streaming into Stormproof: what a streaming query's `foreachBatch` calls.

`exactly_once(sinks..., name=...)` writes each micro-batch to its sinks; `feed(topology)` makes messages of its rows and
takes them through a topology. docs/foreach_batch.md says which is for what, and what each costs.
"""

from __future__ import annotations

import getpass
import json
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from stormproof.core.arguments import shown
from stormproof.core.clock import Clock, SystemClock
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.errors import Fenced, JobFailed, Json, SinkRefused, StoreUnavailable, TopologyError, UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.graph.checks import as_guarantee, checked_name, require_sink
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.message import MessageFailure
from stormproof.core.postgres.database import Database
from stormproof.core.process import kept_from_forks
from stormproof.core.schema import to_ddl
from stormproof.core.settings import Settings
from stormproof.core.sink import SinkSpec, TaskContext, require_tables_apart
from stormproof.core.source.decode import BytesDecoder
from stormproof.core.source.files.micro_batches import MicroBatches
from stormproof.core.source.kind import SourceKind
from stormproof.core.source.protocol import (
    Backlog,
    Decoder,
    Expectation,
    Lease,
    Limit,
    Resolution,
    Slice,
    SliceReader,
    Source,
    of_run,
)
from stormproof.core.tracking.attempts import FailedIn
from stormproof.core.tracking.share import tokens, xor_reduce
from stormproof.sinks.protocol import CommitOutcome, Sink
from stormproof.sinks.staging import FileWriter, make_folder
from stormproof.trident.coordinator import SEED_BITS, Coordinator
from stormproof.trident.ledger import events, transactions
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.rows import Event, Run, Txn
from stormproof.trident.ledger.streams import (
    Handed,
    Standing,
    StreamBatch,
    handed,
    missing,
    newest,
    stands,
    stands_by_name,
    take,
)
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.options import RunOptions
from stormproof.trident.outages import outlasting_outages
from stormproof.trident.preflight import Preflight
from stormproof.trident.recovery import recover
from stormproof.trident.run import attached, ledger_engine, options_of, require_schema
from stormproof.trident.sessions import Sessions
from stormproof.trident.statistics import RecoveryReport, RunStatistics
from stormproof.trident.steps import Opened, Steps
from stormproof.trident.stream import Topology
from stormproof.trident.transaction import AttemptOutcome, EventKind, OperatorAction, TxnCause, TxnState

if TYPE_CHECKING:
    import numpy as np

    from stormproof.core.engine.frame import Frames

Frame: TypeAlias = Any
"""A micro-batch: Spark's DataFrame; this module does not wait for Spark's import."""

log = logging.getLogger("stormproof.txn")


class StreamOutcome(StrEnum):
    """What became of a micro-batch in one call."""

    COMMITTED = "committed"
    ROLLED_FORWARD = "rolled_forward"
    """Its content was fixed before; it was committed from its files, and what Spark handed out again was not taken."""
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


def exactly_once(
    *sinks: SinkSpec,
    name: str,
    adopt: str | None = None,
    settings: Settings | None = None,
    on_batch: Callable[[StreamResult], None] | None = None,
    frames: Frames | None = None,
) -> ForeachBatch:
    """For `df.writeStream.foreachBatch(...)`: each micro-batch's rows are appended to every sink, exactly once.

    A micro-batch is one message and one transaction: the first one that `name` gets is txid 1, the next txid 2. Its rows
    are computed and written once, by one job; from *prepare* on they are never computed again. A row that a sink cannot
    hold stops the query with an error that names it: use `feed` with a topology where rows may fail one by one.

    `adopt` names a place (as the error prints it) from which this query goes on though it is not the next one there, or
    though another name stands there. Several functions of different names may take each micro-batch of one query.
    `frames` is for tests: what hands out micro-batches instead of Spark.

    Raises (when a micro-batch is handed in):
        PositionMismatch: checkpoint and ledger do not belong together; or a sink stands elsewhere.
        Fenced: another query, or another run of this one, took over.
        SinkRefused: a sink cannot hold a row, or refuses a commit for good.
        JobFailed: the query's own job failed.
    """
    if not sinks:
        raise TopologyError(f"exactly_once(name={name!r}) needs at least one sink")
    for sink in sinks:
        require_sink(sink, f"exactly_once(name={name!r})")
    require_tables_apart(name, sinks)
    return _SinkStream(
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
        TopologyError: the topology cannot be run so, or its one source is no `MicroBatches`.
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
    compile_topology(topology, chosen)  # what is wrong with it should be seen before the query starts
    return _TopologyStream(
        topology, source, chosen, adopt=adopt, settings=settings, options=options, on_batch=on_batch, frames=frames
    )


@dataclass(slots=True)
class _Life:
    """What one driver has open for one streaming query."""

    query: str
    plan: Plan
    source: Source
    ledger: Ledger
    run: Run
    sessions: Sessions
    options: RunOptions
    settings: Settings
    preflight: Preflight
    stack: ExitStack


class ForeachBatch(ABC):
    """What Spark calls with each micro-batch; one object serves one query. Made by `exactly_once` and `feed`.

    It begins at its first micro-batch: that raises the epoch, which fences an older driver of the same name, and recovers.
    An error lets everything go; the next call begins anew. `close` ends it in order, once the query has ended.
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
        self._life: _Life | None = None
        self.statistics = RunStatistics(name, guarantee.value, 0)
        """What was done so far, over all epochs of this object."""

    def __call__(self, frame: Frame, batch_id: int) -> None:
        """Take one micro-batch to its end."""
        with self._lock:
            started_s = self._clock.monotonic_s()
            query = self._frames.query_id(frame)
            kept = False
            try:
                if self._life is not None and self._life.query != query:
                    raise UsageError(
                        f"stream {self.name!r} is fed by query {self._life.query}, and query {query} calls it, too: give "
                        "each query a function of its own, with a name and tables of its own"
                    )
                if self._life is None:
                    self._life = self._begin(frame, query, batch_id)
                result = self._take(self._life, frame, batch_id)
                kept = True
            finally:
                if not kept:
                    self._let_go()
            result.steps_ms["total"] = (self._clock.monotonic_s() - started_s) * 1000
            self._account(self._life, result)

    @property
    def _frames(self) -> Frames:
        if self._given_frames is None:
            from stormproof.core.engine.frame import SparkFrames  # Spark is imported once it calls

            self._given_frames = SparkFrames()
        return self._given_frames

    def close(self) -> None:
        """Record that the driver ended in order, and let connections go; a later call would begin anew."""
        with self._lock:
            life = self._life
            if life is not None:
                try:
                    life.ledger.stop(life.run)
                finally:
                    self._let_go()

    @abstractmethod
    def _plan(self, frame: Frame) -> tuple[Plan, Source]:
        """What is to be run over such rows."""

    @abstractmethod
    def _take(self, life: _Life, frame: Frame, batch: int) -> StreamResult:
        """Take one micro-batch to its end."""

    @abstractmethod
    def _recovered(self, life: _Life) -> None:
        """Called once a life has begun."""

    def _begin(self, frame: Frame, query: str, batch: int) -> _Life:
        """Open everything; the epoch is raised last, so that what cannot run fences nobody."""
        self._frames.require(frame)
        plan, source = self._plan(frame)
        functions = require_shippable(plan)
        settings = self._settings or Settings()
        with ExitStack() as stack:
            database = settings.resolve_database()
            engine = ledger_engine(database)
            stack.callback(engine.dispose)
            require_schema(engine, database, own=settings.uses_embedded)
            source.bind(database)
            source = of_run(source, database)
            placed = [cast("Sink", spec).placed(database, settings.staging_path) for spec in plan.sink_specs]
            plan = replace(plan, sink_specs=tuple(placed))
            options = replace(self._options or options_of(settings, self._guarantee), until_idle=True)
            ledger = Ledger(engine, self._clock, lambda: query)
            look = partial(_look, engine, self.name, query, batch)
            handed(self.name, outlasting_outages(look, options, self._clock), query, batch, self._adopt)
            preflight = Preflight(self._engine(frame, settings), plan, functions, source, settings.staging_path)
            outlasting_outages(preflight, options, self._clock)
            attach = partial(attached, plan, source, ledger, database)
            run, sessions = outlasting_outages(lambda: stack.enter_context(attach()), options, self._clock)
            life = _Life(query, plan, source, ledger, run, sessions, options, settings, preflight, stack.pop_all())
        self._life = life  # from here on an error closes it
        self.statistics = replace(self.statistics, epoch=run.epoch)
        self._recovered(life)
        return life

    def _engine(self, frame: Frame, settings: Settings) -> Engine:
        return self._frames.engine(frame, settings.parallelism, settings.worker_memory_mb)

    def _let_go(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            life.stack.close()

    def _record_place(self, life: _Life, tx: Tx, standing: Standing, taken: StreamBatch) -> None:
        """Take a micro-batch; what is unusual about its place is said, and stands on record."""
        take(tx, taken)
        place, before = taken.place, taken.adopted_from
        if before is not None:
            detail: dict[str, Json] = {
                "action": OperatorAction.ADOPT_STREAM.value,
                "from": before,
                "query": taken.query,
                "batch": taken.batch,
                "by": _user(),
            }
            reason = f"goes on from {place}, which follows {before}"
            events.record(tx, [Event(EventKind.OPERATOR, OperatorAction.ADOPT_STREAM, reason=reason, detail=detail)])
            log.warning("stream %s: goes on from %s instead of %s", self.name, place, before)
        if standing.last is None and taken.batch > 0:
            # The row itself is the record: status and audit show it, and a prune leaves it.
            text = "stream %s: begins at batch %d of streaming query %s; %s not in its sinks"
            log.warning(text, self.name, taken.batch, taken.query, missing(taken.batch))

    def _account(self, life: _Life, result: StreamResult) -> None:
        line: dict[str, object] = {
            "topology": self.name,
            "query": result.query,
            "batch": result.batch,
            "outcome": result.outcome.value,
            "txids": list(result.txids),
            "guarantee": self._guarantee.value,
            "epoch": life.run.epoch,
            "rows": result.rows,
            "steps_ms": {name: round(value, 1) for name, value in result.steps_ms.items()},
        }
        log.info("micro-batch %s", json.dumps(line))
        if self._on_batch is not None:
            with kept_from_forks():
                self._on_batch(result)


def _look(engine: sa.Engine, name: str, query: str, batch: int) -> Standing:
    try:
        with engine.connect() as connection:
            return stands_by_name(connection, name, query, batch)
    except OperationalError as error:
        raise StoreUnavailable(f"the ledger's database does not answer ({type(error.orig).__name__})") from error


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


# -- sinks alone -----------------------------------------------------------------------------------------------------


class _BatchIsTheMessage:
    """A source for ledger, recovery and audit: a micro-batch is one message, which Spark hands out again until it is done.

    Nothing is ever leased or given back here; where a query stands is in the ledger's own table.
    """

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name = name
        self._decoder = BytesDecoder(schema)

    @property
    def decoder(self) -> Decoder:
        """Names the rows' fields; it decodes nothing."""
        return self._decoder

    @property
    def kind(self) -> SourceKind:
        """Opaque: until it is prepared, Spark may compute other rows for it."""
        return SourceKind.OPAQUE

    def serves(self, guarantee: Guarantee) -> str | None:
        """Exactly-once alone."""
        return None if guarantee is Guarantee.EXACTLY_ONCE else "exactly_once() has no other guarantee"

    def shown_id(self, message: int, origin: int) -> str:
        """The micro-batch's number among those that were taken."""
        del origin
        return str(message)

    def bind(self, database: Database) -> None:
        """Nothing of it is anywhere else than in the ledger."""

    def subscribe(self, subscription: str, epoch: int) -> None:
        """Nothing to make ready."""

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        """None: micro-batches are handed in."""
        del lease, limit, seed, tx
        return None

    def slice(self, taken: StreamBatch, seed: int) -> Slice:
        """A micro-batch as the slice that holds it."""
        position: dict[str, Json] = {"query": taken.query, "batch": taken.batch, "number": taken.number}
        return Slice(position, _one(taken.number, seed), 0)

    def attach(self, position: dict[str, Json], expected: Expectation) -> Slice:
        """The slice again."""
        return Slice(position, expected, 0)

    def expect(self, slice_: Slice, seed: int, excluded: frozenset[int], tx: object | None = None) -> Expectation:
        """One message."""
        del excluded, tx
        number = slice_.position["number"]
        assert isinstance(number, int)
        return _one(number, seed)

    def readers(self, slice_: Slice, parallelism: int) -> tuple[SliceReader, ...]:
        """None: Spark has the rows."""
        del slice_, parallelism
        return ()

    def hold(self, lease: Lease, tx: object | None = None) -> None:
        """There is no lease that could lapse."""

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        """That the txid is committed says so."""
        del lease, failed, tx
        return Resolution()

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        """Spark hands it out again."""

    def extend(self, lease: Lease) -> None:
        """There is no lease that could lapse."""

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        """No leases."""
        del epoch, tx
        return ()

    def split(self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None) -> None:
        """Refused: it is one message."""
        raise UsageError(f"stream {self.name!r}: a micro-batch is one message and cannot be split")

    def backlog(self) -> Backlog:
        """Only Spark knows."""
        return Backlog(0, 0, 0, 0)

    def joins(self, tx: object) -> bool:
        """Always: all that there is stands in the ledger."""
        del tx
        return True

    def maintain(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to let go."""


def _one(number: int, seed: int) -> Expectation:
    ids = cast("np.ndarray", pa.array([number], pa.int64()).to_numpy())
    return Expectation(1, xor_reduce(tokens(ids, seed)))


class _BatchSteps(Steps):
    """A batch that is not prepared keeps its txid over restarts: Spark hands out the very same one next."""

    def abort(
        self, txid: int, cause: TxnCause, reason: str, *, divide: Slice | None = None, alone: Sequence[int] = ()
    ) -> None:
        """Leave it open; its next attempt comes with the call that hands it out again."""
        del cause, divide, alone
        failpoint("abort.in_transaction")
        log.info("txid %d of stream %s stays open: %s", txid, self.run.topology, reason)
        failpoint("abort.after")


class _SinkStream(ForeachBatch):
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
        self._steps: _BatchSteps | None = None
        self._schema: pa.Schema | None = None
        self._rolled: set[int] = set()

    def _plan(self, frame: Frame) -> tuple[Plan, Source]:
        self._schema = self._frames.schema(frame)
        source = _BatchIsTheMessage(self.name, self._schema)
        topology = Topology(self.name)
        topology.stream("micro-batches", source).into(*self._sinks)
        return compile_topology(topology, Guarantee.EXACTLY_ONCE), source

    def _recovered(self, life: _Life) -> None:
        self._steps = _BatchSteps(life.ledger, life.run, life.source, life.sessions, lease_s=life.options.lease_s)
        self._rolled.clear()
        first = True

        def recover_once() -> None:
            nonlocal first
            self._recover(sweep=first)
            first = False

        outlasting_outages(recover_once, life.options, self._clock, let_go=self._steps.drop_connections)

    def _recover(self, *, sweep: bool) -> RecoveryReport:
        assert self._steps is not None
        report = recover(self._steps, sweep=sweep)
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

    def _take(self, life: _Life, frame: Frame, batch: int) -> StreamResult:
        """Where an answer is lost, what is owed is found out by recovering, as ever, and then the call goes on."""
        steps = self._steps
        assert steps is not None
        result = outlasting_outages(
            lambda: self._take_once(life, frame, batch),
            life.options,
            self._clock,
            let_go=steps.drop_connections,
            recover=lambda: bool(self._recover(sweep=False).rolled_forward),
        )
        if isinstance(result, JobFailed):
            raise result
        return result

    def _take_once(self, life: _Life, frame: Frame, batch: int) -> StreamResult | JobFailed:
        steps, schema = self._steps, self._schema
        assert steps is not None
        assert schema is not None
        found = self._frames.schema(frame)
        if not found.equals(schema):
            raise UsageError(
                f"stream {self.name!r}: the micro-batch has the columns {to_ddl(found)}, the ones before had "
                f"{to_ddl(schema)}"
            )
        clock, started_s, steps_ms = self._clock, self._clock.monotonic_s(), dict[str, float]()

        def timed(step: str) -> None:
            nonlocal started_s
            now_s = clock.monotonic_s()
            steps_ms[step], started_s = (now_s - started_s) * 1000, now_s

        opened, attempt = self._open(life, steps, batch)
        timed("open")
        if attempt is None:
            outcome = StreamOutcome.ROLLED_FORWARD if opened.txid in self._rolled else StreamOutcome.SUPPRESSED
            self._frames.read_in_vain(frame)
            timed("read_in_vain")
            self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + len(life.sessions))
            return StreamResult(life.query, batch, outcome, (opened.txid,), 0, steps_ms)
        writers = {name: session.writer() for name, session in life.sessions.items()}
        try:
            written = self._frames.write(
                frame, writers, TaskContext(life.run.incarnation, opened.txid, attempt, 0), schema
            )
        except JobFailed as error:
            return error  # the query's own doing: it is not tried again here
        timed("job")
        failpoint("run.after")
        if written.problems:
            raise SinkRefused(
                f"stream {self.name!r}: batch {batch} of query {life.query} has rows that a sink cannot hold: "
                f"{'; '.join(written.problems)}. Nothing was written. Mend or filter them in the query and start it "
                "again, which hands out the same batch; or feed() a topology, where such rows become dead letters",
                batch=batch,
                problems=[*written.problems],
            )
        nobody: Sequence[FailedIn] = ()
        work = steps.fix_content(opened, attempt, Guarantee.EXACTLY_ONCE, written.files, nobody, written.rows)
        timed("prepare")
        outcomes = steps.commit(opened.txid, Guarantee.EXACTLY_ONCE, work)
        timed("commit")
        steps.finish(opened.txid, Guarantee.EXACTLY_ONCE, TxnState.PREPARED, work, (), outcomes, steps_ms)
        timed("finish")
        s = self.statistics
        self.statistics = replace(
            s,
            batches=s.batches + 1,
            messages=s.messages + 1,
            tuples=s.tuples + written.rows,
            attempts=s.attempts + attempt,
            suppressed=s.suppressed + sum(o is CommitOutcome.ALREADY_HELD for o in outcomes.values()),
        )
        return StreamResult(life.query, batch, StreamOutcome.COMMITTED, (opened.txid,), written.rows, steps_ms)

    def _open(self, life: _Life, steps: _BatchSteps, batch: int) -> tuple[Opened, int | None]:
        """The batch's transaction, and the number of its attempt; None where it is committed already."""
        failpoint("open.before")
        seed = self._rng.getrandbits(SEED_BITS)
        source = cast("_BatchIsTheMessage", life.source)
        ledger = life.ledger
        with ledger.transaction(life.run) as tx:
            standing = stands(tx, life.query, batch)
            known = handed(self.name, standing, life.query, batch, self._adopt)
            if known is Handed.AGAIN:
                assert standing.last is not None
                taken, attempt = standing.last, self._again(life, tx, standing.last, seed)
            else:
                txid = transactions.next_txid(tx)
                adopted = self._adopt if known is Handed.ADOPTED else None
                taken = StreamBatch(txid, life.query, batch, txid, adopted_from=adopted)
                self._record_place(life, tx, standing, taken)
                transactions.open_batch(tx, txid, Guarantee.EXACTLY_ONCE, source.name, source.slice(taken, seed), seed)
                attempt = 1
            failpoint("open.in_transaction")
        failpoint("open.after")
        assert taken.txid is not None
        return Opened(taken.txid, steps.lease(taken.txid), source.slice(taken, seed), seed), attempt

    def _again(self, life: _Life, tx: Tx, last: StreamBatch, seed: int) -> int | None:
        assert last.txid is not None
        txn = cast("Txn", transactions.find(tx, last.txid))
        if txn.state is TxnState.OPEN:
            # Nothing was fixed: it runs again, and its content may be another.
            transactions.end_attempt(
                tx, last.txid, txn.attempt, AttemptOutcome.JOB_FAILED, "its driver ended, or its job failed"
            )
            expected = _one(last.number, seed)
            transactions.add_attempt(tx, last.txid, txn.attempt + 1, seed, frozenset(), expected)
            return txn.attempt + 1
        if txn.state is not TxnState.COMMITTED:
            raise Fenced(f"txid {last.txid} of stream {self.name!r} is {txn.state}: another driver moved it")
        detail: dict[str, Json] = {"query": last.query, "batch": last.batch}
        events.record(
            tx, [Event(EventKind.SUPPRESSED, txid=last.txid, sink=sink, detail=detail) for sink in life.sessions]
        )
        return None


# -- a topology ------------------------------------------------------------------------------------------------------


class _TopologyStream(ForeachBatch):
    """The rows of micro-batches as a topology's messages."""

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

    def _plan(self, frame: Frame) -> tuple[Plan, Source]:
        there = self._frames.schema(frame).names
        missing = [column for column in self._source.columns if column not in there]
        if missing:
            raise UsageError(
                f"topology {self.name!r}: the micro-batch has no column {', '.join(map(repr, missing))}; it has "
                f"{', '.join(there)}"
            )
        return compile_topology(self._topology, self._guarantee), self._source

    def _recovered(self, life: _Life) -> None:
        self._source.sweep(self._folder(life))

    def _folder(self, life: _Life) -> Path:
        return life.settings.staging_path / "micro-batches" / life.run.incarnation

    def _take(self, life: _Life, frame: Frame, batch: int) -> StreamResult:
        clock, started_s, steps_ms, rows = self._clock, self._clock.monotonic_s(), dict[str, float](), 0

        def timed(step: str) -> None:
            nonlocal started_s
            now_s = clock.monotonic_s()
            steps_ms[step], started_s = (now_s - started_s) * 1000, now_s

        def look() -> Standing:
            with life.ledger.transaction(life.run) as tx:
                return stands(tx, life.query, batch)

        standing = outlasting_outages(look, life.options, clock)
        known = handed(self.name, standing, life.query, batch, self._adopt)
        if known is Handed.AGAIN:
            self._frames.read_in_vain(frame)
            timed("read_in_vain")
        else:
            rows = self._stage(life, frame, batch, standing, known, timed)
        before = self.statistics
        txids: list[int] = []
        statistics = self._run(life, frame, txids)
        timed("run")
        self._source.sweep(self._folder(life))
        rolled = [txid for report in statistics.recoveries for txid in report.rolled_forward]
        outcome = StreamOutcome.COMMITTED
        if known is Handed.AGAIN and not txids:
            outcome = StreamOutcome.ROLLED_FORWARD if rolled else StreamOutcome.SUPPRESSED
            self._record_suppressed(life, batch)
        self.statistics = _sum(before, statistics)
        return StreamResult(life.query, batch, outcome, (*rolled, *txids), rows, steps_ms)

    def _stage(
        self,
        life: _Life,
        frame: Frame,
        batch: int,
        standing: Standing,
        known: Handed,
        timed: Callable[[str], None],
    ) -> int:
        """Write the rows to files, and make messages of them; from then on the micro-batch is taken, with this content."""
        folder = self._folder(life)
        make_folder(folder, private=True)
        number = 1 if standing.last is None else standing.last.number + 1
        kept = self._frames.select(frame, self._source.columns)
        writer = FileWriter("micro-batch", str(folder))
        context = TaskContext(life.run.incarnation, number, life.run.epoch, 0)
        written = self._frames.write(kept, {writer.sink: writer}, context, self._frames.schema(kept))
        timed("stage")
        failpoint("stream.before_register")

        def register() -> None:
            with life.ledger.transaction(life.run) as tx:
                there = newest(tx.connection, life.run.incarnation)
                if there is not None and there.number == number:
                    return  # the answer to the try before was lost
                names = [file.path for file in written.files]
                first, stop = self._source.register(str(folder), names, life.run.epoch, tx.raw)
                adopted = self._adopt if known is Handed.ADOPTED else None
                taken = StreamBatch(number, life.query, batch, None, first, stop, adopted)
                self._record_place(life, tx, standing, taken)
                failpoint("stream.in_transaction")

        outlasting_outages(register, life.options, self._clock)
        failpoint("stream.after_register")
        outlasting_outages(self._source.reload, life.options, self._clock)
        timed("register")
        return written.rows

    def _run(self, life: _Life, frame: Frame, txids: list[int]) -> RunStatistics:
        """Take batches until nothing is left to open now."""
        engine = self._engine(frame, life.settings)
        coordinator = Coordinator(
            life.plan,
            life.source,
            life.sessions,
            life.ledger,
            life.run,
            engine,
            options=life.options,
            clock=self._clock,
            rng=self._rng,
            on_batch=lambda result: txids.append(result.txid),
            preflight=life.preflight,
        )
        self._source.feeding = True
        try:
            return coordinator.run()
        finally:
            self._source.feeding = False

    def _record_suppressed(self, life: _Life, batch: int) -> None:
        detail: dict[str, Json] = {"query": life.query, "batch": batch}

        def record() -> None:
            with life.ledger.transaction(life.run) as tx:
                events.record(tx, [Event(EventKind.SUPPRESSED, detail=detail)])

        outlasting_outages(record, life.options, self._clock)


def _sum(a: RunStatistics, b: RunStatistics) -> RunStatistics:
    """Two runs' counts together."""
    reasons = {r: a.failed_by_reason.get(r, 0) + n for r, n in b.failed_by_reason.items()}
    return replace(
        b,
        batches=a.batches + b.batches,
        messages=a.messages + b.messages,
        tuples=a.tuples + b.tuples,
        failed=a.failed + b.failed,
        failed_by_reason={**a.failed_by_reason, **reasons},
        returned=a.returned + b.returned,
        unanchored=a.unanchored + b.unanchored,
        replayed=a.replayed + b.replayed,
        attempts=a.attempts + b.attempts,
        dead_letters=a.dead_letters + b.dead_letters,
        aborted_batches=a.aborted_batches + b.aborted_batches,
        abandoned_batches=a.abandoned_batches + b.abandoned_batches,
        suppressed=a.suppressed + b.suppressed,
        recoveries=(*a.recoveries, *b.recoveries),
        elapsed_s=a.elapsed_s + b.elapsed_s,
    )
