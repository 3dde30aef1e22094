"""The loop of at-most-once and at-least-once without a ledger: open, run, write, confirm.

What it knows stands in the source or in the sinks first, so a driver that dies loses nothing but its work. With a ledger,
and for exactly-once, see `stormproof.trident.coordinator`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random
from typing import Final, Protocol, TypeAlias

from stormproof.core.clock import Clock
from stormproof.core.engine.protocol import Engine
from stormproof.core.errors import BatchUnverified, Fenced, JobFailed, TransientError, UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.graph.plan import Plan
from stormproof.core.guarantee import Guarantee
from stormproof.core.job import Job
from stormproof.core.message import FailureReason
from stormproof.core.sink import PreparedFile, SinkWriter, files_of
from stormproof.core.source.protocol import Lease, Limit, Resolution, Slice, Source
from stormproof.core.tracking.attempts import (
    Abandoned,
    AllFailed,
    Attempt,
    BatchRunner,
    Broken,
    Complete,
    Divided,
    FailedIn,
    GivenUp,
    JobDied,
    NullJournal,
    Outcome,
)
from stormproof.core.tracking.report import JobReport

log = logging.getLogger("stormproof.loop")

SEED_BITS: Final = 62
DEATHS_ALONE_MAX: Final = 5
"""So many drivers may end while a message stands alone before it counts as failed: most deaths are nobody's fault."""

TRANSIENT_MAX: Final = 10
"""So many transient errors on end, then the run gives up."""

_BATCH_BITS: Final = 32


class LoopSink(Protocol):
    """What the loop asks of a sink."""

    def writer(self) -> SinkWriter:
        """The executors' side."""
        ...

    def apply(self, batch: int, attempt: int, files: Sequence[PreparedFile]) -> None:
        """Add what an attempt at a batch prepared. Nothing is compared with what the sink held before.

        Raises:
            Fenced: a newer epoch holds this sink.
            TransientError: no answer; the rows may be there.
        """
        ...


class BatchEnd(StrEnum):
    """What became of a batch."""

    COMMITTED = "committed"
    FAILED = "failed"
    """Every message of it failed; nothing was written."""
    DIVIDED = "divided"
    """It will be opened again, in parts."""
    ABANDONED = "abandoned"
    """Under at-most-once: its job came to nothing, and nothing comes back."""


@dataclass(frozen=True, slots=True)
class LoopBatch:
    """One batch that came to its end. `failed` are those that failed or were returned with one that failed."""

    number: int
    end: BatchEnd
    messages: int
    attempts: int
    retry: bool
    tuples: int = 0
    failed: tuple[FailedIn, ...] = ()
    dead: tuple[str, ...] = ()
    """The shown ids of messages that became dead letters."""


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """What one run of the loop did. `messages` are those of committed batches that did not fail.

    `failed` counts failures, so a message that failed twice counts twice; `returned` counts messages that went back with
    a failed one; `replayed` counts openings of messages that had failed or been returned before.
    """

    batches: int = 0
    messages: int = 0
    tuples: int = 0
    failed: int = 0
    failed_by_reason: Mapping[str, int] = field(default_factory=dict[str, int])
    returned: int = 0
    replayed: int = 0
    attempts: int = 0
    dead_letters: int = 0
    divided_batches: int = 0
    abandoned_batches: int = 0
    recovered_batches: int = 0

    def plus(self, batch: LoopBatch) -> LoopStatistics:
        """With one batch more."""
        reasons = Counter(f.failure.reason.value for f in batch.failed if f.failure.counted)
        committed = batch.messages - len(batch.failed) if batch.end is BatchEnd.COMMITTED else 0
        return replace(
            self,
            batches=self.batches + 1,
            messages=self.messages + committed,
            tuples=self.tuples + batch.tuples,
            failed=self.failed + reasons.total(),
            failed_by_reason=dict(Counter(self.failed_by_reason) + reasons),
            returned=self.returned + len(batch.failed) - reasons.total(),
            replayed=self.replayed + (batch.messages if batch.retry else 0),
            attempts=self.attempts + batch.attempts,
            dead_letters=self.dead_letters + len(batch.dead),
            divided_batches=self.divided_batches + (batch.end is BatchEnd.DIVIDED),
            abandoned_batches=self.abandoned_batches + (batch.end is BatchEnd.ABANDONED),
        )


RunLeasedJob: TypeAlias = Callable[[Job, Lease], "JobReport | JobDied"]
"""Runs a job while its lease is kept, and says how it died where it ends without a report."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How a topology is run. `lease_s` is how long a slice stays ours without a sign of life."""

    guarantee: Guarantee = Guarantee.AT_LEAST_ONCE
    limit: Limit = field(default_factory=Limit)
    lease_s: float = 30.0
    poll_interval_s: float = 0.5
    until_idle: bool = False
    max_batches: int | None = None


class Loop:
    """Runs one topology under at-most-once or at-least-once: one driver, one epoch.

    `epoch` is this driver's: above that of every driver before. `owner` names the topology's run in leases. `run_job` is
    for who keeps leases and watches jobs; without it a job runs unwatched, and must end within its lease.

    Guarantee:
        At-least-once: a message is confirmed only after its batch added up, its lease still held, and every sink had its
        rows; whatever is killed in between, it comes again. At-most-once: it is confirmed before its job runs; whatever
        is killed, no row of it is written twice.

    Not guaranteed:
        Under at-least-once rows of a batch may be written again after a crash.

    Raises:
        UsageError: exactly-once needs a ledger.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        sinks: Mapping[str, LoopSink],
        engine: Engine,
        *,
        owner: str,
        epoch: int,
        options: LoopOptions,
        clock: Clock,
        rng: Random,
        run_job: RunLeasedJob | None = None,
        on_batch: Callable[[LoopBatch], None] | None = None,
    ) -> None:
        if options.guarantee is Guarantee.EXACTLY_ONCE:
            raise UsageError(
                f"topology {plan.topology!r}: the loop without a ledger serves at-most-once and at-least-once; run "
                "exactly-once with stormproof.run(...)"
            )
        self._plan = plan
        self._source = source
        self._sinks = dict(sinks)
        self._writers = {name: sink.writer() for name, sink in sinks.items()}
        self._engine = engine
        self._owner = owner
        self._epoch = epoch
        self._options = options
        self._clock = clock
        self._rng = rng
        self._run_leased = run_job or self._run_unwatched
        self._on_batch = on_batch
        self._opened = 0
        self._stopping = False
        self._runner = BatchRunner(
            source, options.guarantee, component=plan.topology, new_seed=lambda: rng.getrandbits(SEED_BITS)
        )
        self.statistics = LoopStatistics()

    def request_stop(self) -> None:
        """End after the batch in hand; may be called from a signal handler or another thread."""
        self._stopping = True
        self._clock.wake()

    def run(self) -> LoopStatistics:
        """Recover, then take batches until stopped, idle (`until_idle`) or at `max_batches`.

        A transient error is met by recovering under the same epoch, at most `TRANSIENT_MAX` times on end.

        Raises:
            Fenced: another driver took over.
            BatchUnverified: every attempt at a batch ended with a verdict that does not add up.
            TasksBroken: unrelated messages in a row failed alone with one error outside user code.
            MachineUnfit: a task met what somebody must mend on its machine.
            TransientError: a store stayed away.
        """
        in_a_row, recovered = 0, False
        while not self._stopping:
            if self._options.max_batches is not None and self.statistics.batches >= self._options.max_batches:
                break
            try:
                if not recovered:
                    self.recover()
                    recovered = True
                if self.step() is None and not self._wait():
                    break
            except TransientError as error:
                in_a_row, recovered = in_a_row + 1, False
                if in_a_row > TRANSIENT_MAX:
                    raise
                log.warning("topology %r: recovering: %s", self._plan.topology, error)
                self._clock.sleep(min(0.1 * 2**in_a_row, self._options.lease_s))
            else:
                in_a_row = 0
        return self.statistics

    def recover(self) -> None:
        """Give back what earlier drivers, or this one before a lost answer, left open.

        Under at-most-once, too: a lease that is still there was not confirmed, so nothing of it was run.

        Raises:
            Fenced: another driver took over.
        """
        failpoint("recover.before")
        owners = self._source.recover(self._epoch)
        for owner in owners:
            self._source.abort(Lease(owner, self._epoch, self._options.lease_s))
            failpoint("recover.after_each")
        self.statistics = replace(self.statistics, recovered_batches=self.statistics.recovered_batches + len(owners))
        failpoint("recover.after")

    def step(self) -> LoopBatch | None:
        """Take one batch from open to its end; None where there was nothing to open.

        Raises:
            TransientError: a step's outcome is unknown, or the lease ran out; `recover` gives back what is ours.
            BatchUnverified: every attempt ended with a verdict that does not add up; nothing was written.
        """
        options = self._options
        failpoint("open.before")
        # The number names files and leases: no two drivers may use one twice.
        number = self._epoch << _BATCH_BITS | self._opened
        self._opened += 1
        lease = Lease(f"{self._owner}/{number}", self._epoch, options.lease_s)
        seed = self._rng.getrandbits(SEED_BITS)
        slice_ = self._source.open(lease, options.limit, seed)
        if slice_ is None:
            return None
        if options.guarantee is Guarantee.AT_MOST_ONCE:
            failpoint("open.in_transaction")
            self._source.confirm(lease)
        failpoint("open.after")
        outcome = self._outcome(number, lease, slice_, seed)
        batch = self._conclude(number, lease, slice_, outcome)
        self.statistics = self.statistics.plus(batch)
        if self._on_batch is not None:
            self._on_batch(batch)
        self._source.maintain()
        return batch

    def _wait(self) -> bool:
        """Wait for messages; False where the run is to end because there is nothing left."""
        backlog = self._source.backlog()
        if self._options.until_idle and backlog.ready == backlog.waiting == backlog.pending == 0:
            return False
        due_s = backlog.next_retry_in_s if backlog.next_retry_in_s is not None else self._options.poll_interval_s
        self._clock.sleep(min(max(due_s, 0.001), self._options.poll_interval_s))
        return True

    def _outcome(self, number: int, lease: Lease, slice_: Slice, seed: int) -> Outcome:
        name = self._name(number)
        if slice_.expected.messages == 1 and slice_.deaths >= DEATHS_ALONE_MAX:
            error = f"{slice_.deaths} drivers ended while they had it in hand"
            return self._runner.failed_alone(name, slice_, seed, FailureReason.WORKER_LOST, error)

        def run_job(attempt: Attempt) -> JobReport | JobDied:
            result = self._run_leased(self._job(number, slice_, attempt), lease)
            if isinstance(result, JobReport):
                failpoint("run.after")
            return result

        return self._runner.run(name, slice_, seed, NullJournal(self._source, slice_), run_job)

    def _job(self, number: int, slice_: Slice, attempt: Attempt) -> Job:
        return Job(
            plan=self._plan,
            readers=self._source.readers(slice_, self._engine.parallelism),
            writers=self._writers,
            incarnation=self._owner,
            txid=number,
            attempt=attempt.number,
            seed=attempt.seed,
            tracked=self._options.guarantee.tracked,
            excluded=attempt.excluded,
            per_message=attempt.per_message,
            careful=attempt.careful,
        )

    def _run_unwatched(self, job: Job, lease: Lease) -> JobReport | JobDied:
        del lease
        try:
            return self._engine.run(job)
        except JobFailed as error:
            return JobDied.of(error)

    def _conclude(self, number: int, lease: Lease, slice_: Slice, outcome: Outcome) -> LoopBatch:
        """Act on the outcome: to the batch's end."""
        batch = LoopBatch(number, BatchEnd.COMMITTED, slice_.expected.messages, outcome.attempts, slice_.retry)
        match outcome:
            case Complete():
                batch = replace(batch, tuples=outcome.report.tuples, failed=outcome.failed)
                return replace(batch, dead=self._commit(number, lease, outcome).dead)
            case AllFailed():
                resolution = self._source.confirm(lease, [f.failure for f in outcome.failed])
                failpoint("abort.after")
                return replace(batch, end=BatchEnd.FAILED, failed=outcome.failed, dead=resolution.dead)
            case Divided():
                self._source.split(slice_, lease, outcome.alone)
                failpoint("abort.after")
                return replace(batch, end=BatchEnd.DIVIDED)
            case Abandoned():
                return replace(batch, end=BatchEnd.ABANDONED)
            case Broken():
                raise outcome.raised(self._name(number))
            case GivenUp():
                raise BatchUnverified(
                    f"{self._name(number)}: attempt {outcome.attempts} does not add up ({outcome.error}); nothing was "
                    "written. Two runs before it failed alike: the reader or a store between the stages loses or doubles "
                    "rows",
                    batch=number,
                    error=outcome.error,
                )

    def _commit(self, number: int, lease: Lease, complete: Complete) -> Resolution:
        """Write, then confirm; what failed is counted, or under at-most-once is gone."""
        tracked = self._options.guarantee.tracked
        if tracked:
            self._hold(number, lease)
        for name, sink in self._sinks.items():
            failpoint("commit.before_sink")
            sink.apply(number, complete.attempts, files_of(complete.report.files, name))
            failpoint("commit.after_sink")
        if not tracked:
            return Resolution()
        failpoint("finish.before")
        resolution = self._source.confirm(lease, [f.failure for f in complete.failed])
        failpoint("finish.after")
        return resolution

    def _hold(self, number: int, lease: Lease) -> None:
        try:
            self._source.hold(lease)
        except Fenced as error:
            # A lapsed lease, or another driver: recovery, which comes next, is refused where it is the latter.
            raise TransientError(
                f"{self._name(number)}: {error}; its messages are opened again", batch=number
            ) from error

    def _name(self, number: int) -> str:
        return f"batch {number} of topology {self._plan.topology!r}"
