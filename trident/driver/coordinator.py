"""The coordinator: takes each batch through open, run, prepare, commit and finish, under one of three guarantees.

It holds nothing that a crash could lose: everything is recorded in the ledger, the source or the sinks first. It does not
know which engine runs the jobs, nor the kinds of source and sinks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Thread
from typing import Final, TypeVar, cast

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import (
    BatchUnverified,
    BoltUnavailable,
    MachineUnavailable,
    MachineUnfit,
    StormproofError,
    TasksBroken,
)
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.machine_faults import own_faults
from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.contract.source import Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.task.job import Job
from stormproof.core.tracking.attempts import FAILED_MAX, Attempt, BatchRunner, JobDied
from stormproof.core.tracking.verdict import (
    Abandoned,
    AllFailed,
    Broken,
    Complete,
    Divided,
    GivenUp,
    JobReport,
    Outcome,
)
from stormproof.sinks.prepare.writer import WritesNothing
from stormproof.trident.driver.batch_records import Accounts, CountedGraph, PreparedBatch, SinkAnswers
from stormproof.trident.driver.control_line import BY_SIGNAL, StopRequests
from stormproof.trident.driver.jobs import Flight, Jobs, JobsInTurn, JobsOnThreads, Watch, run_watched
from stormproof.trident.driver.leases import WaitingLeases
from stormproof.trident.driver.opening import SinkSessions
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.outages import outlasting_outages
from stormproof.trident.driver.recovery import Recount, recover
from stormproof.trident.driver.steps import Opened, Steps
from stormproof.trident.driver.tuning import AsSet, LatencyTuner, Setting, Tuner, in_flight_max
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.tables import Run
from stormproof.trident.telemetry.recorder import RunMetrics
from stormproof.trident.terms.observers import BatchResult, Observer, Observers, RecoveryReport, RunStatistics
from stormproof.trident.terms.transaction_states import TxnCause, TxnState

SEED_BITS: Final = 62
DEATHS_ALONE_MAX: Final = 5
"""Drivers that may end while a message runs alone, before it counts as failed: most ends are no message's fault."""

DEATHS_NOTED_MAX: Final = 2
"""The same, where the message is known to have been in hand when the last of them ended."""

CANCEL_AGAIN_S: Final = 0.5

RETRY_SHARE: Final = 0.1
"""The largest part of the time for retries while other messages wait: each batch of retries costs a whole job."""

RETRY_WAIT_MAX_S: Final = 30.0

NOBODYS_DEATH: Final = (MachineUnavailable, MachineUnfit, TasksBroken, BoltUnavailable)
"""Errors that end a run and are no message's fault."""

R = TypeVar("R")


class Coordinator:
    """Runs one topology: one driver, one epoch.

    Guarantee:
        Under exactly-once, whatever is killed in between, each sink commits each committed txid once and in order, and
        every message that was opened ends in one transaction, as a dead letter, or back in its source.

    Not guaranteed:
        Visibility at one instant across sinks: each sink commits on its own.

    `stormproof.trident.driver.run` puts the parts together; clock and random source are injected. `preflight` asks the
    machines for what tasks need; after one of them lacked something it is called again before the next batch.

    Threads: one thread calls `run`; any may call `request_stop` and `statistics`. Forks: a fork may not use it.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        sessions: SinkSessions,
        ledger: Ledger,
        run: Run,
        engine: Engine,
        *,
        options: RunOptions,
        clock: Clock,
        rng: random.Random,
        on_batch: Callable[[BatchResult], None] | None = None,
        jobs: Jobs | None = None,
        watch: Watch | None = None,
        preflight: Callable[[], None] | None = None,
        metrics: RunMetrics | None = None,
        observers: Sequence[Observer] = (),
        stop: Event | None = None,
    ) -> None:
        self._plan = plan
        self._source = source
        self._writers = {name: session.writer() for name, session in sessions.items()}
        self._run = run
        self._engine = engine
        self._options = options
        self._clock = clock
        self._rng = rng
        self._preflight = preflight
        self._machines_lacked = False
        self._stop_requests = StopRequests(clock.wake, stop)
        self._runner = BatchRunner(
            source=source,
            guarantee=options.guarantee,
            component=plan.topology,
            new_seed=lambda: rng.getrandbits(SEED_BITS),
            meetings=plan.meetings,
        )
        self._counted = CountedGraph.of(plan)
        self._maintained_at_s = clock.monotonic_s()
        self._steps = Steps(
            ledger=ledger,
            run=run,
            source=source,
            sessions=sessions,
            lease_s=options.lease_s,
            heartbeat_root=options.heartbeat_root,
            rejects_max_share=options.rejects_max_share,
            whole=plan.meetings is not None,
            observer=Observers((*(() if metrics is None else metrics.observers), *observers)),
        )
        self._metrics = metrics
        self._recount = Recount(self._steps, self._run_again, lambda: rng.getrandbits(SEED_BITS))
        chosen = in_flight_max(options.max_batches_in_flight, options.latency_target_s)
        self._in_flight_max = 1 if plan.serial else chosen
        self._tuner: Tuner = (
            AsSet(options.limit, self._in_flight_max)
            if options.latency_target_s is None
            else LatencyTuner(options.latency_target_s, options.limit, self._in_flight_max)
        )
        self._watch = watch or Watch.of(plan, options)
        self._jobs = jobs or (JobsOnThreads(self._in_flight_max) if self._in_flight_max > 1 else JobsInTurn())
        self._leases = WaitingLeases(source)
        self._in_flight: dict[int, Flight] = {}
        self._looked_at_s: float | None = None
        self._retries_from_s = 0.0
        self._noted: frozenset[int] = frozenset()
        self._accounts = Accounts(RunStatistics(run.topology, options.guarantee.value, run.epoch), on_batch)
        if metrics is not None:
            metrics.recorder.note_tuning(self._tuner.figures)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """End the run after the batches in flight; a signal handler or another thread may call this."""
        self._stop_requests.stop(BY_SIGNAL)

    def interrupt(self, error: BaseException) -> None:
        """Cancel the jobs, from another thread, and start none: for a signal handler that then raises this."""
        self._stop_requests.interrupt(error)
        Thread(target=self._cancel_jobs, name="stormproof-interrupt", daemon=True).start()

    @property
    def stop_requests(self) -> StopRequests:
        """What the run is asked to do; any thread may ask."""
        return self._stop_requests

    @property
    def in_flight(self) -> int:
        """The number of batches in flight; any thread may ask."""
        return len(self._in_flight)

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus can scrape the run's metrics; None without a port."""
        return None if self._metrics is None else self._metrics.url

    @property
    def statistics(self) -> RunStatistics:
        """The run's statistics so far."""
        tuned = self._options.latency_target_s is not None
        found = self._accounts.statistics
        return replace(found, tuning=self._tuner.figures) if tuned else found

    def run(self) -> RunStatistics:
        """Recover, then take batches until stopped, drained, idle (`until_idle`) or at `max_batches`; while paused, none.

        After a lost connection or answer the run connects again and recovers under the same epoch, with exponential backoff,
        until stores have been away for `outage_s` seconds since the last batch that was committed.

        Raises:
            Fenced: another driver took over.
            FatalError: going on could lose or double a message; what to inspect is named.
            TransientError: a store stayed away for `outage_s`.
        """
        started_s = self._clock.monotonic_s()
        stopped = "error"
        try:
            self._outlasting_outages(lambda: self.recover(sweep=True))
            while True:
                if self._outlasting_outages(self.step) is not None:
                    continue
                if self._stop_requests.stops:
                    stopped = self._stop_requests.stopped_by
                    break
                if self._is_at_limit():
                    stopped = "limit"
                    break
                if not self._outlasting_outages(self._wait):
                    stopped = "drain" if self._stop_requests.drains else "idle"
                    break
        except Exception as error:
            self._drop_in_flight()
            if isinstance(error, NOBODYS_DEATH):
                self._give_back()
            raise
        except BaseException:
            self._cancel_jobs()  # an interrupt does not wait for their end
            raise
        finally:
            self._jobs.close()
            self._leases.close()
            elapsed_s = self._clock.monotonic_s() - started_s
            self._accounts.run_ended(elapsed_s, stopped)
        return self.statistics

    def _give_back(self) -> None:
        """Return open messages at the end of a run for a machine's fault, so that it does not count as a driver's death
        against them. Best effort: for messages that stay open it counts as one death, and five fail a message.
        """
        with suppress(StormproofError), own_faults():
            self.recover()

    def recover(self, *, sweep: bool = False) -> RecoveryReport:
        """Bring ledger, source and sinks to one state: see `stormproof.trident.driver.recovery`.

        Batches in flight are dropped and their jobs cancelled: their messages are opened again.
        """
        self._drop_in_flight()
        report = recover(self._steps, sweep=sweep, ended=self._accounts.ended, recount=self._recount)
        self._noted |= frozenset(report.in_hand)
        self._accounts.recovered(report)
        return report

    def _outlasting_outages(self, step: Callable[[], R]) -> R:
        """Call `step`; after a transient error drop every connection, recover, and call it again."""

        def guarded_step() -> R:
            try:
                with own_faults():
                    if self._machines_lacked and self._preflight is not None:
                        self._preflight()  # before messages are opened: under at-most-once they would be lost
                    self._machines_lacked = False
                    return step()
            except MachineUnavailable:
                self._machines_lacked = True
                raise

        def recover() -> bool:
            with own_faults():
                return bool(self.recover().rolled_forward)

        return outlasting_outages(
            guarded_step,
            self._options,
            self._clock,
            lambda: self._stop_requests.stops,
            let_go=self._let_go_of_stores,
            recover=recover,
        )

    def _let_go_of_stores(self) -> None:
        """Drop what runs, and every connection: an outage makes all of them stale, and each would cost a try of its own."""
        self._drop_in_flight()
        self._steps.drop_connections()

    def _wait(self) -> bool:
        """Wait for messages, or paused for the end of the pause; False if the run is to end since none are left."""
        if self._stop_requests.pauses:
            self._maintain()
            self._clock.sleep(self._options.poll_interval_s)
            return True
        backlog = self._source.backlog()
        if self._metrics is not None:
            self._metrics.answered(backlog)
        ready = 0 if self._stop_requests.drains else backlog.ready
        if (
            self._options.until_idle or self._stop_requests.drains
        ) and ready == backlog.waiting == backlog.pending == 0:
            return False
        due_s = backlog.next_retry_in_s if backlog.next_retry_in_s is not None else self._options.poll_interval_s
        self._maintain()
        self._clock.sleep(min(max(due_s, 0.001), self._options.poll_interval_s))
        return True

    def _maintain(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._maintained_at_s >= self._options.maintain_interval_s:
            self._maintained_at_s = now_s
            self._source.maintain()
        if self._metrics is not None:
            self._metrics.ask(self._source.backlog)

    # -- batches in flight -------------------------------------------------------------------------------------------

    def step(self) -> BatchResult | None:
        """Open as many batches as there is room for, and take one batch to its end; None if there is nothing to do.

        Batches commit in txid order, one after the other; meanwhile others are opened, and their jobs run. A batch without a
        commit (all its messages failed, or it goes back in parts) ends as soon as that is known: no other depends on it.

        Raises:
            TransientError: a step's outcome is unknown; `recover` finds out.
        """
        while True:
            batch = self._decided()
            if batch is not None:
                if not isinstance(batch.outcome, Complete):
                    return self._end_uncommitted(batch)
                self._begin_commit(batch, batch.outcome)
            elif not self._fill():
                if not self._in_flight:
                    return None
                committed = self._await_work()
                if committed is not None:
                    return committed

    def _is_at_limit(self) -> bool:
        most = self._options.max_batches
        return most is not None and self._accounts.taken + len(self._in_flight) >= most

    def _has_room(self) -> bool:
        """Whether one more batch may be opened. A batch over which drivers died runs by itself."""
        if self._stop_requests.stops or self._stop_requests.pauses or self._is_at_limit():
            return False
        if any(batch.opened.slice.deaths for batch in self._in_flight.values()):
            return False
        return len(self._in_flight) < self._tuner.in_flight

    def _fill(self) -> bool:
        """Open a batch if there is room and a message. An empty source is asked once in `poll_interval_s`."""
        if not self._has_room():
            return False
        now_s = self._clock.monotonic_s()
        empty_s = None if self._looked_at_s is None else now_s - self._looked_at_s
        if self._in_flight and empty_s is not None and empty_s < self._options.poll_interval_s:
            return False
        opened = self._open()
        self._looked_at_s = None if opened else now_s
        return opened

    def _open(self) -> bool:
        started_s = self._clock.monotonic_s()
        seed = self._rng.getrandbits(SEED_BITS)
        limit, figures = replace(self._tuner.limit, fresh=not self._stop_requests.drains), self._tuner.figures
        limit = replace(limit, whole=self._plan.meetings is not None)
        retries_late = started_s < self._retries_from_s and limit.fresh
        opened = self._steps.open(self._options.guarantee, replace(limit, retries=not retries_late), seed, figures)
        if opened is None and retries_late:  # no other message waits
            self._retries_from_s = started_s
            opened = self._steps.open(self._options.guarantee, limit, seed, figures)
        if opened is None:
            return False
        batch = Flight(opened, started_s, limit, Setting(limit.messages, self._tuner.in_flight))
        batch.steps_ms["open"] = (self._clock.monotonic_s() - started_s) * 1000
        self._in_flight[opened.txid] = batch
        self._begin(batch)
        return True

    def _begin(self, batch: Flight) -> None:
        """Start the batch's first job; see `stormproof.core.tracking.attempts`."""
        opened = batch.opened
        name, deaths = f"txid {opened.txid} of topology {self._run.topology!r}", opened.slice.deaths
        attempt_log = self._steps.attempt_log(opened)
        noted = self._noted_in(opened) if deaths >= DEATHS_NOTED_MAX else set[int]()
        alone = opened.slice.expected.messages == 1
        if (alone and deaths >= DEATHS_ALONE_MAX) or (noted and (alone or self._plan.meetings is not None)):
            # Slices over which drivers die are opened in parts, so a message that kills its driver ends up alone. It has
            # failed, and does not run again. Where messages meet nothing is divided: the notes of the last driver tell.
            error = f"{deaths} drivers ended while they had it in hand"
            batch.outcome = self._runner.failed_in_hand(
                name, opened.slice, opened.seed, attempt_log, error, noted or None
            )
            batch.ready_s = self._clock.monotonic_s()
            return
        batch.attempts = self._runner.attempts(name, opened.slice, opened.seed, attempt_log)
        self._start_job(batch, next(batch.attempts))

    def _decided(self) -> Flight | None:
        """A batch that may be committed or ended now: the lowest, or one that commits nothing."""
        for txid in sorted(self._in_flight):
            batch = self._in_flight[txid]
            if batch.outcome is None or batch.committing is not None:
                continue
            if txid == min(self._in_flight) or isinstance(batch.outcome, AllFailed | Divided | Abandoned | Broken):
                return batch
        return None

    def _await_work(self) -> BatchResult | None:
        """Wait for the end of a job or a commit, but no longer than until the source may be asked again.

        Returns the batch's result after a commit.
        """
        with self._held_up():
            ended = self._jobs.wait(self._options.poll_interval_s if self._has_room() else None)
        if ended is None:
            return None
        if ended.error is not None:
            raise ended.error
        assert ended.result is not None
        batch = self._in_flight[ended.txid]
        if isinstance(ended.result, SinkAnswers):
            return self._end(batch, self._finish(batch, ended.result))
        self._job_ended(batch, ended.result)
        return None

    @contextmanager
    def _held_up(self) -> Generator[None]:
        """Count the time of a wait as the committing batch's `held_up`, if no other batch may be opened until then."""
        committing = next((batch for batch in self._in_flight.values() if batch.committing is not None), None)
        if committing is None or len(self._in_flight) < self._tuner.in_flight:
            yield
            return
        with committing.timed(self._clock, "held_up"):
            yield

    def _job_ended(self, batch: Flight, result: JobReport | JobDied) -> None:
        """Start the next attempt's job, or keep the outcome."""
        if (
            self._stop_requests.interrupted is not None
        ):  # Spark's answer to the cancelled job took the interrupt's place
            raise self._stop_requests.interrupted
        assert batch.attempts is not None
        batch.job = None
        if isinstance(result, JobReport):
            failpoint("run.after")
            for name, duration_ms in result.steps_ms.items():
                batch.steps_ms[f"job.{name}"] = batch.steps_ms.get(f"job.{name}", 0.0) + duration_ms
        try:
            attempt = batch.attempts.send(result)
        except StopIteration as end:
            batch.outcome = cast("Outcome", end.value)
        else:
            self._start_job(batch, attempt)

    def _let_go(self, batch: Flight) -> None:
        """Stop waiting with a batch whose turn has come: its lease is no longer extended in the background."""
        if self._in_flight_max > 1:
            batch.steps_ms["wait"] = (self._clock.monotonic_s() - batch.ready_s) * 1000
        self._leases.let_go(batch.opened.lease)

    def _begin_commit(self, batch: Flight, complete: Complete) -> None:
        """Prepare a complete batch and start its commit in the sinks."""
        self._let_go(batch)
        opened, report = batch.opened, complete.report
        with batch.timed(self._clock, "prepare"):
            counts = self._counted.of_complete(complete, self._shown, opened.sinks)
            prepared = self._steps.fix_content(
                *(opened, batch.attempt, self._options.guarantee, report.files, complete.failed, report.tuples),
                *(batch.steps_ms, counts),
            )
        batch.committing = prepared

        def commit_sinks() -> SinkAnswers:
            with batch.timed(self._clock, "commit"):
                return self._steps.commit_sinks(prepared)

        self._jobs.start(opened.txid, commit_sinks)

    def _shown(self, failure: MessageFailure) -> str:
        return self._source.shown_id(failure.id, failure.origin)

    def _end(self, batch: Flight, result: BatchResult) -> BatchResult:
        """Remove a batch from those in flight, and count it."""
        del self._in_flight[batch.opened.txid]
        ended_s = self._clock.monotonic_s()
        result.steps_ms["total"] = (ended_s - batch.started_s) * 1000
        if batch.opened.slice.retry:
            took_s = ended_s - batch.started_s
            self._retries_from_s = ended_s + min(took_s * (1 / RETRY_SHARE - 1), RETRY_WAIT_MAX_S)
        if isinstance(batch.outcome, Complete):
            self._accounts.note_step(self._tuner.learn(batch.sample(ended_s)))
            if self._metrics is not None:
                self._metrics.recorder.note_tuning(self._tuner.figures)
        else:
            self._looked_at_s = None  # the source may have its messages again
        self._steps.observer.timed(result)
        self._accounts.taken += 1
        self._accounts.ended(result)
        self._maintain()
        return result

    def _drop_in_flight(self) -> None:
        """Cancel all jobs and forget the batches in flight; ledger and source have their record."""
        self._jobs.drop_queued()
        while self._jobs.running:
            self._cancel_jobs()
            self._jobs.wait(CANCEL_AGAIN_S)  # a job that was just starting is cancelled at the next turn
        for batch in self._in_flight.values():
            self._leases.let_go(batch.opened.lease)
        self._in_flight.clear()
        self._looked_at_s = None

    def _cancel_jobs(self) -> None:
        for batch in list(self._in_flight.values()):
            if batch.job is not None:
                self._engine.cancel(batch.job)

    # -- one batch ---------------------------------------------------------------------------------------------------

    def _noted_in(self, opened: Opened) -> set[int]:
        """The messages of the slice that were in hand when an earlier driver ended."""
        if not self._noted:
            return set()
        return {
            id_
            for reader in self._source.readers(opened.slice, 1)
            for rows in reader.read(opened.seed, frozenset(), opened.slice.expected.messages)
            for id_ in self._noted.intersection(rows.column("id").to_pylist())
        }

    def _start_job(self, batch: Flight, attempt: Attempt) -> None:
        opened = batch.opened
        batch.attempt = attempt.number
        job = Job(
            plan=self._plan,
            readers=opened.readers or self._source.readers(opened.slice, self._engine.parallelism),
            writers={
                name: writer if opened.sinks is None or name in opened.sinks else WritesNothing(name, writer)
                for name, writer in self._writers.items()
            },
            incarnation=self._run.incarnation,
            txid=opened.txid,
            attempt=attempt.number,
            seed=attempt.seed,
            tracked=self._options.guarantee.tracked,
            excluded=attempt.excluded,
            per_message=attempt.per_message,
            careful=attempt.careful,
            messages=opened.slice.expected.messages,
            named_max=FAILED_MAX if self._options.guarantee.tracked else None,
        )
        batch.job = job.key
        lease = None if self._options.guarantee is Guarantee.AT_MOST_ONCE else opened.lease

        def work() -> JobReport | JobDied:
            try:
                with batch.timed(self._clock, "job"):
                    return run_watched(self._engine, job, self._source, lease, self._watch, self._clock)
            finally:
                # In this thread: the driver's own may be in another batch's commit for longer than the lease lasts.
                if self._jobs.on_threads and lease is not None:
                    self._leases.keep(lease)
                batch.ready_s = self._clock.monotonic_s()

        self._jobs.start(opened.txid, work)

    def _run_again(self, batch: PreparedBatch, sink: str, seed: int, excluded: frozenset[int]) -> JobReport | JobDied:
        """See `recovery.JobAgain`. The sink's writer is made anew: its table may have got a constraint since the start."""
        writers = {name: WritesNothing(name, writer) for name, writer in self._writers.items()}
        job = Job(
            plan=self._plan,
            readers=self._source.readers(batch.slice, self._engine.parallelism),
            writers={**writers, sink: self._steps.sessions[sink].writer()},
            incarnation=self._run.incarnation,
            txid=batch.txid,
            attempt=batch.attempt,
            seed=seed,
            tracked=True,
            excluded=excluded,
            per_message=True,
        )
        return run_watched(self._engine, job, self._source, None, self._watch, self._clock)

    def _end_uncommitted(self, batch: Flight) -> BatchResult:
        """End a batch whose outcome commits nothing."""
        self._let_go(batch)
        return self._end(batch, self._conclude(batch))

    def _conclude(self, batch: Flight) -> BatchResult:
        opened = batch.opened
        match batch.outcome:
            case AllFailed() as outcome:
                counts = self._counted.of_failed(outcome.failed, self._shown)
                resolution = self._steps.abort_failed(opened, batch.attempt, outcome.failed, batch.steps_ms, counts)
                result = batch.result(outcome.failed)
                return replace(result, dead_letters=len(resolution.dead), cause=TxnCause.EVERY_MESSAGE_FAILED)
            case Divided() as outcome:
                cause = TxnCause(outcome.end.value)
                self._steps.abort(
                    opened.txid,
                    cause,
                    outcome.reason,
                    divide=opened.slice,
                    alone=outcome.alone,
                    parts=outcome.parts,
                    steps_ms=batch.steps_ms,
                )
                return replace(batch.result(), cause=cause, reason=outcome.reason)
            case Abandoned() as outcome:
                cause = TxnCause(outcome.end.value)
                self._steps.abandon(opened.txid, cause, outcome.reason, batch.steps_ms)
                return replace(batch.result(state=TxnState.ABANDONED), cause=cause, reason=outcome.reason)
            case Broken() as outcome:
                raise outcome.raised(f"txid {opened.txid} of topology {self._run.topology!r}")
            case GivenUp() as outcome:
                raise BatchUnverified(
                    f"txid {opened.txid} of topology {self._run.topology!r}: attempt {batch.attempt} does not add up "
                    f"({outcome.error}); nothing was written. {outcome.hint}. Inspect with: stormproof audit txn "
                    f"{self._run.topology} {opened.txid}",
                    txid=opened.txid,
                    error=outcome.error,
                )
            case Complete() | None:
                raise AssertionError(f"txid {opened.txid} is not over")

    def _finish(self, batch: Flight, answers: SinkAnswers) -> BatchResult:
        """Settle the sinks' answers, and confirm the batch."""
        complete, prepared = batch.outcome, batch.committing
        assert isinstance(complete, Complete)
        assert prepared is not None
        if answers.error is not None:
            with batch.timed(self._clock, "recount"):
                prepared, answers = self._recount.settle(prepared, answers)
        results = self._steps.settle(prepared, answers)
        with batch.timed(self._clock, "finish"):
            finished = self._steps.finish(prepared, results)
        self._accounts.suppressed(sum(result.is_suppressed for result in results.values()))
        return replace(finished.result, unanchored=complete.report.unanchored)
