"""The open sessions of one run's sinks, used by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from stormproof.core.base.errors import StoreUnavailable, TransientError
from stormproof.sinks.contract.protocol import SinkSession


@contextmanager
def machine_errors(where: str) -> Generator[None]:
    """Treat an operating system's error on a sink's files (a full disk, a missing right, a failing disk) as an outage.

    It is no verdict on the transaction: nothing is blocked, and the step is tried again.

    Raises:
        StoreUnavailable: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{where}: {type(error).__name__}: {error}; tried again", errno=error.errno) from error


class Sessions(dict[str, SinkSession]):
    """Sessions by their sinks' names, in the topology's order.

    They belong to the driver's thread, except while a sink adopts a batch: then only the committing thread uses a session.
    An interrupted run ends while that thread goes on, so `close` waits for it: a session that is closed within a commit
    might commit a part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._adopting = threading.Lock()
        self._closed = False

    @contextmanager
    def adopting(self, sink: str) -> Generator[SinkSession]:
        """A sink's session, for one commit.

        Raises:
            TransientError: the sessions are closed, or about to be; nothing was begun.
            StoreUnavailable: an operating system's error; see `machine_errors`.
        """
        with self._adopting:
            if self._closed:
                raise TransientError(f"sink {sink!r} was closed, since the run has ended", sink=sink)
            with machine_errors(f"sink {sink!r}"):
                yield self[sink]

    @property
    def is_adopting(self) -> bool:
        """Whether a commit is under way."""
        return self._adopting.locked()

    def drop_connections(self) -> None:
        """Wait for the commit that is under way, then close every session's connection; its next use opens another."""
        with self._adopting, ExitStack() as stack:
            for session in self.values():
                stack.callback(session.close)

    def close(self) -> None:
        """The same for good. If the wait is interrupted, nothing is closed, and the commit goes on."""
        self._closed = True  # at once: no further sink begins
        self.drop_connections()
