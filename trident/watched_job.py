"""Runs one attempt's job under its lease: watched, and cancelled where it hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from stormproof.core.clock import Clock
from stormproof.core.engine.protocol import Engine
from stormproof.core.errors import JobFailed, MachineUnavailable, TransientError
from stormproof.core.graph.plan import Plan
from stormproof.core.job import Job
from stormproof.core.pulse.protocol import Pulses
from stormproof.core.pulse.record import Progress
from stormproof.core.source.protocol import Lease, Source
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.verdict import JobReport
from stormproof.core.user_errors import CAUGHT
from stormproof.trident.job_progress import JobProgress, JobWatch
from stormproof.trident.lease_keeper import LastMove, LeaseKeeper
from stormproof.trident.options import RunOptions

log = logging.getLogger("stormproof.job")


def on_its_thread(keeper: LeaseKeeper) -> AbstractContextManager[object]:
    """The keeper itself: it looks at its job on a thread of its own."""
    return keeper


@dataclass(frozen=True, slots=True)
class Watch:
    """How the jobs of one driver are watched: see `LeaseKeeper`. `on_progress` is called about once a second while a job
    runs, by a thread of its own.

    `pulses` is where jobs report to. `keeping` gives the context in which a keeper looks while its job runs, and `in_hand`
    the messages that a dead job had in hand, by default those that its tasks noted; a simulation replaces both, for virtual
    time.
    """

    message_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    pulses: Pulses | None = None
    moves: LastMove = field(default_factory=LastMove)
    keeping: Callable[[LeaseKeeper], AbstractContextManager[object]] = on_its_thread
    in_hand: Callable[[Job], tuple[int, ...]] | None = None
    on_progress: Callable[[JobProgress], None] | None = None
    now: dict[int, JobProgress] = field(default_factory=dict[int, JobProgress])
    """How far each job that runs is, by txid."""

    @property
    def lowest(self) -> JobProgress | None:
        """How far the job is that runs for the lowest txid."""
        return min(self.now.copy().values(), key=lambda job: job.txid, default=None)

    @staticmethod
    def of(
        plan: Plan,
        options: RunOptions,
        pulses: Pulses | None = None,
        on_progress: Callable[[JobProgress], None] | None = None,
    ) -> Watch:
        """By the run's options; the topology's own message timeout beats theirs. Without `pulses`, jobs do not report."""
        timeout_s = options.message_timeout_s if plan.message_timeout_s is None else plan.message_timeout_s
        return Watch(timeout_s, options.start_timeout_s, pulses, on_progress=on_progress)


def _telling(job: Job, watch: Watch, clock: Clock) -> Callable[[Progress], None]:
    """Tells the user's function of a job that begins now. What that raises must not end the thread that keeps the lease."""
    its = JobWatch(job, clock.monotonic_s())

    def tell(seen: Progress) -> None:
        now = watch.now[job.txid] = its.seen(seen, clock.monotonic_s())
        try:
            if watch.on_progress is not None:
                watch.on_progress(now)
        except CAUGHT:
            log.exception("on_progress raised at txid %s", job.txid)

    return tell


def run_watched(
    engine: Engine, job: Job, source: Source, lease: Lease | None, watch: Watch, clock: Clock
) -> JobReport | JobDied:
    """Run a job while its lease is kept. Its report; or how it died, and the messages that it had in hand.

    `lease` is None under at-most-once: the messages are confirmed already.

    Raises:
        TransientError: the lease ran out, or no task of the job ever ran; no message is to blame.
        MachineUnavailable: tasks were not heard of, so nobody knows whether they hung, died or lived; likewise.
    """
    with nullcontext() if watch.pulses is None else watch.pulses.of_job(job.key) as pulse:
        place = None if pulse is None else pulse.place
        job = replace(job, pulse=place, message_timeout_s=watch.message_timeout_s)
        keeper = LeaseKeeper(
            source,
            lease,
            lambda: engine.cancel(job.key),
            watch.message_timeout_s,
            start_timeout_s=watch.start_timeout_s,
            pulse=pulse,
            clock=clock,
            moves=watch.moves,
            on_look=_telling(job, watch, clock),
        )
        where = f"txid {job.txid} of topology {job.plan.topology!r}"
        try:
            with watch.keeping(keeper):
                return engine.run(job)
        except JobFailed as error:
            if keeper.lapsed:
                raise TransientError(
                    f"{where}: its lease ran out while its job ran; its messages are opened again", txid=job.txid
                ) from error
            if keeper.stalled:
                raise TransientError(
                    f"{where}: no task of its job ran for {watch.start_timeout_s} s, or the source's store did not "
                    "answer for so long; its messages are opened again. Look whether Spark has executors for it; "
                    "STORMPROOF_START_TIMEOUT_S allows more time",
                    txid=job.txid,
                ) from error
            if keeper.silent or (not keeper.timed_out and keeper.misses_tasks()):
                raise MachineUnavailable(
                    f"{where}: tasks of its job were not heard of: their machines, or the network between them and the "
                    "driver, do not answer. No message is to blame; its messages are opened again. Look at the executors' "
                    "machines, and at the network",
                    txid=job.txid,
                    error="ContactLost",
                ) from error
            noted = () if pulse is None else pulse.suspects()
            in_hand = noted if watch.in_hand is None else watch.in_hand(job)
            if keeper.timed_out:
                text = f"cancelled: no progress for {watch.message_timeout_s} s"
                return JobDied(text, timed_out=True, suspects=in_hand)
            return JobDied.of(error, suspects=in_hand)
        finally:
            watch.now.pop(job.txid, None)
