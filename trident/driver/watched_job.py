"""Keeps a slice's lease while its job makes progress, and cancels a job that hangs."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Fenced, JobFailed, MachineUnavailable, TransientError
from stormproof.core.contract.source import Lease, Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.heartbeat.heard import Heartbeats, JobHeartbeat
from stormproof.core.heartbeat.wire import Progress
from stormproof.core.task.job import Job
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.verdict import JobReport
from stormproof.core.user_code.functions import CAUGHT
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.ledger.control import JobProgress, JobWatch

lease_log = logging.getLogger("stormproof.lease")

LOOK_EVERY_S = 1.0
CANCEL_AGAIN_S = 0.5
"""A job that was just starting may have missed the first cancel."""

PAUSED_S = 5.0
"""After so long between two looks the driver itself was suspended; jobs may have moved unseen."""


class LastMove:
    """When any job of one driver last made progress: jobs that wait for a free slot behind it are not stalled."""

    def __init__(self) -> None:
        self.at_s = -math.inf


class LeaseKeeper:
    """A context in which a lease is extended every third of its length, as long as the job makes progress.

    `cancel` ends the job, from the keeper's own thread.

    Through `heartbeat` the job's tasks report their progress. A job in which some task runs and none makes progress for
    `message_timeout_s` hangs: it is cancelled, and `timed_out` is set. A job that makes progress may take as long as it
    needs. Where some task is silent by then (the network does not carry its reports), `silent` is set instead, and no
    message is to blame; from the end of a silence on, a hang is timed anew. While no task runs (Spark starts, or is between
    two stages), and while the source's store does not answer, `start_timeout_s` is the bound instead, and `stalled` is set:
    no message is to blame. A job without a running
    task may wait for a free slot behind another job; its time counts from the last progress in `moves`.

    Without `heartbeat` progress cannot be seen: the job may take `message_timeout_s` in all.

    When the lease is lost, the job is cancelled, too, and `lapsed` is set. A store that does not answer is tried again at
    the next turn, until the lease lapses; the prepare step will then raise. `lease` is None where there is none to keep:
    under at-most-once the messages were confirmed when they were opened.

    `on_look` is given the progress at each look, by the keeper's thread.

    *Not guaranteed*: a task that hangs while others make progress is noticed only when those are done.
    """

    def __init__(
        self,
        source: Source,
        lease: Lease | None,
        cancel: Callable[[], None],
        message_timeout_s: float,
        *,
        start_timeout_s: float = 300.0,
        heartbeat: JobHeartbeat | None = None,
        clock: Clock | None = None,
        moves: LastMove | None = None,
        on_look: Callable[[Progress], None] | None = None,
    ) -> None:
        self._on_look = on_look
        self._source = source
        self._lease = lease
        self._cancel = cancel
        # A shorter bound would blame a message before silence can be told from a hang.
        self._message_timeout_s = max(message_timeout_s, 0.0 if heartbeat is None else heartbeat.notices_silence_s)
        self._start_timeout_s = max(start_timeout_s, self._message_timeout_s)
        self._heartbeat = heartbeat
        self._clock: Clock = clock or SystemClock()
        self._moves = moves or LastMove()
        self._seen = Progress()
        self._moved_at_s = self._looked_at_s = self._extended_at_s = self._clock.monotonic_s()
        self._silent_at_s = self._moved_at_s
        self._store_away = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="stormproof-lease", daemon=True)
        self.timed_out = False
        self.stalled = False
        self.silent = False
        self.lapsed = False

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        every_s = min(LOOK_EVERY_S, self._message_timeout_s / 4)
        if self._lease is not None:
            every_s = min(every_s, self._lease.seconds / 3)
        while not self._done.wait(every_s):
            if not self.look():
                break
        else:
            return
        self._cancel()
        while not self._done.wait(CANCEL_AGAIN_S):
            self._cancel()

    def look(self) -> bool:
        """Look at the job and extend the lease if that is due; the keeper's thread calls this at least once a second.

        False if the job is to be cancelled; then one of `timed_out`, `stalled`, `silent` and `lapsed` is set.
        """
        now_s = self._clock.monotonic_s()
        if self._heartbeat is not None and (self._has_moved() or now_s - self._looked_at_s >= PAUSED_S):
            self._moved_at_s = self._moves.at_s = now_s
        self._looked_at_s = now_s
        if self._on_look is not None:
            self._on_look(self._seen)
        waits = self._heartbeat is not None and self._seen.running == 0
        quiet_s = now_s - (max(self._moved_at_s, self._moves.at_s) if waits else self._moved_at_s)
        if self._store_away or waits:
            self.stalled = quiet_s >= self._start_timeout_s
        elif self._seen.silent:
            self._silent_at_s = now_s
            self.silent = quiet_s >= self._message_timeout_s
        else:
            self.timed_out = min(quiet_s, now_s - self._silent_at_s) >= self._message_timeout_s
        if self.stalled or self.silent or self.timed_out:
            return False
        if self._lease is None or now_s - self._extended_at_s < self._lease.seconds / 3:
            return True
        return self._extend(self._lease, now_s)

    def misses_tasks(self) -> bool:
        """Whether some task is silent now. Once the keeper's thread has ended, whoever runs the job may ask."""
        self._has_moved()
        return self._seen.silent > 0

    def _has_moved(self) -> bool:
        if self._heartbeat is None:
            return False
        try:
            before, self._seen = self._seen, self._heartbeat.progress()
        except OSError as error:
            lease_log.warning("the progress of a job could not be read: %s", error)
            before, self._seen = self._seen, Progress()  # as if no task ran: no message is blamed unseen
        return replace(self._seen, silent=0) != replace(before, silent=0)

    def _extend(self, lease: Lease, now_s: float) -> bool:
        try:
            self._source.extend(lease)
        except Fenced:
            self.lapsed = True
            return False
        except TransientError as error:
            lease_log.warning("lease of %s could not be extended: %s", lease.owner, error)
            self._store_away = True
            return True
        if self._store_away:  # tasks that waited for it go on now
            self._moved_at_s, self._store_away = now_s, False
        self._extended_at_s = now_s
        return True


log = logging.getLogger("stormproof.job")


def on_its_thread(keeper: LeaseKeeper) -> AbstractContextManager[object]:
    """The keeper itself: it looks at its job on a thread of its own."""
    return keeper


@dataclass(frozen=True, slots=True)
class Watch:
    """How the jobs of one driver are watched: see `LeaseKeeper`. `on_progress` is called about once a second while a job
    runs, by a thread of its own.

    `heartbeats` is where jobs report to. `keeping` gives the context in which a keeper looks while its job runs, and
    `in_hand` the messages that a dead job had in hand, by default those that its tasks noted; a simulation replaces
    both, for virtual time.
    """

    message_timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    heartbeats: Heartbeats | None = None
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
        heartbeats: Heartbeats | None = None,
        on_progress: Callable[[JobProgress], None] | None = None,
    ) -> Watch:
        """By the run's options; the topology's own message timeout beats theirs.

        Without `heartbeats`, jobs do not report.
        """
        timeout_s = options.message_timeout_s if plan.message_timeout_s is None else plan.message_timeout_s
        return Watch(timeout_s, options.start_timeout_s, heartbeats, on_progress=on_progress)


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
    with nullcontext() if watch.heartbeats is None else watch.heartbeats.of_job(job.key) as heartbeat:
        place = None if heartbeat is None else heartbeat.place
        job = replace(job, heartbeat=place, message_timeout_s=watch.message_timeout_s)
        keeper = LeaseKeeper(
            source,
            lease,
            lambda: engine.cancel(job.key),
            watch.message_timeout_s,
            start_timeout_s=watch.start_timeout_s,
            heartbeat=heartbeat,
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
            noted = () if heartbeat is None else heartbeat.suspects()
            in_hand = noted if watch.in_hand is None else watch.in_hand(job)
            if keeper.timed_out:
                text = f"cancelled: no progress for {watch.message_timeout_s} s"
                return JobDied(text, timed_out=True, suspects=in_hand)
            return JobDied.of(error, suspects=in_hand)
        finally:
            watch.now.pop(job.txid, None)
