"""Keeps the leases of batches in flight: extends them while their jobs make progress, and cancels a job that hangs."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import Fenced, TransientError
from stormproof.core.contract.source import Lease, Source
from stormproof.core.heartbeat.listener import JobSigns
from stormproof.core.heartbeat.task import ProgressMark

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
        heartbeat: JobSigns | None = None,
        clock: Clock | None = None,
        moves: LastMove | None = None,
        on_look: Callable[[ProgressMark], None] | None = None,
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
        self._seen = ProgressMark()
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
            before, self._seen = self._seen, ProgressMark()  # as if no task ran: no message is blamed unseen
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


class WaitingLeases:
    """Extends the leases of batches whose job is done and whose turn to commit has not come.

    It has a thread of its own, since the driver's thread may be in a slow step; for the same reason the job's thread hands
    its lease over. A lost lease is let go: the prepare step will raise, and name the other owner.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, lease: Lease) -> None:
        """Extend a lease from now on, every third of its length. Any thread may call this."""
        with self._lock:
            self._leases[lease.owner] = lease
            if self._thread is None and not self._done.is_set():
                self._thread = threading.Thread(
                    target=self._extend_all, args=(lease.seconds / 3,), name="stormproof-waiting-leases", daemon=True
                )
                self._thread.start()

    def let_go(self, lease: Lease) -> None:
        """Extend a lease no more; on return no extension of it is under way."""
        with self._lock:
            self._leases.pop(lease.owner, None)

    def _extend_all(self, every_s: float) -> None:
        while not self._done.wait(every_s):
            for owner in list(self._leases):
                with self._lock:  # for one call, not for all of them: `let_go` waits for it
                    lease = self._leases.get(owner)
                    if lease is None:
                        continue
                    try:
                        self._source.extend(lease)
                    except Fenced:
                        del self._leases[owner]
                    except TransientError:
                        continue  # the next turn tries again; where the lease lapses meanwhile, prepare raises

    def close(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._done.set()
            thread, self._thread = self._thread, None
            self._leases.clear()
        if thread is not None:
            thread.join()
