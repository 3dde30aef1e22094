"""Keeps a slice's lease alive while its job runs, and cancels a job that runs for too long."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from stormproof.core.engine.protocol import Engine
from stormproof.core.errors import Fenced, TransientError
from stormproof.core.source.protocol import Lease, Source

log = logging.getLogger("stormproof.lease")


class LeaseKeeper:
    """A context in which a lease is extended every third of its length.

    After `timeout_s` it stops extending and cancels the engine's job, which then fails as a whole (`timed_out`); the same
    when the lease turns out not to be ours any more (`lapsed`), for which no message is to blame. A store that does not
    answer is tried again at the next turn, until the lease lapses: the prepare step will then say so.
    """

    def __init__(self, source: Source, lease: Lease, engine: Engine, timeout_s: float) -> None:
        self._source = source
        self._lease = lease
        self._engine = engine
        self._timeout_s = timeout_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="stormproof-lease", daemon=True)
        self.timed_out = False
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
        every_s = self._lease.seconds / 3
        waited_s = 0.0
        while not self._done.wait(min(every_s, max(self._timeout_s - waited_s, 0.0))):
            waited_s += every_s
            if waited_s >= self._timeout_s:
                self.timed_out = True
                self._engine.cancel()
                return
            try:
                self._source.extend(self._lease)
            except Fenced:
                self.lapsed = True
                self._engine.cancel()
                return
            except TransientError as error:
                log.warning("lease of %s could not be extended: %s", self._lease.owner, error)
