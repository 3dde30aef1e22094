"""Sends events from a thread of its own: a lineage server that is slow or dead neither slows nor ends the driver."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

log = logging.getLogger("stormproof.lineage")

WAITING_MAX: Final = 1_000
"""Events that may wait to be sent; a further one is dropped, and counted."""
CLOSE_S: Final = 5.0
"""How long the end of a run waits for the last events."""


class Transport(Protocol):
    """What takes an event somewhere; as OpenLineage's own client has them."""

    def emit(self, event: Any) -> Any:
        """Send it, or raise."""
        ...


class Emitter:
    """A bounded queue and the thread that empties it. `count` is told ``sent``, ``failed`` or ``dropped``, from any thread.

    Forks: the thread is not in a fork, whose events are nobody's.
    """

    def __init__(self, transport: Transport, count: Callable[[str], None], *, waiting_max: int = WAITING_MAX) -> None:
        self._transport = transport
        self._count = count
        self._waiting: queue.Queue[Any] = queue.Queue(waiting_max)
        self._is_failing = False
        self._drops = False
        self._done = threading.Event()
        self._counting = threading.Lock()
        self._is_given_up = False
        """Whether what was not sent is counted as dropped: what becomes of it later is not counted again."""
        self._thread = threading.Thread(target=self._keep, name="stormproof-lineage", daemon=True)
        self._thread.start()

    def emit(self, event: Any) -> None:
        """Have an event sent; returns at once."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._count("dropped")
            if not self._drops:
                log.warning("lineage events are dropped: %d wait to be sent already", self._waiting.maxsize)
            self._drops = True

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send what waits, but for no longer than this; what is left then counts as dropped, and is logged."""
        self._done.set()
        self._thread.join(within_s)
        with self._counting:
            self._is_given_up = True
            left = self._waiting.unfinished_tasks  # those that wait, and the one under way
        for _ in range(left):
            self._count("dropped")
        if left:
            log.warning("%d lineage events were not sent within %g s of the end, and are dropped", left, within_s)

    def _keep(self) -> None:
        while True:
            try:
                event = self._waiting.get(timeout=0.1)
            except queue.Empty:
                if self._done.is_set():
                    return
                continue
            error = self._sent(event)
            with self._counting:
                if self._is_given_up:
                    return
                self._count("sent" if error is None else "failed")
                self._waiting.task_done()
            if error is not None and not self._is_failing:
                log.warning("a lineage event was not taken (%s); the run goes on", type(error).__name__)
            self._is_failing = error is not None
            if error is None:
                self._drops = False

    def _sent(self, event: Any) -> Exception | None:
        """Send an event; the error if it was not taken."""
        try:
            self._transport.emit(event)
        except Exception as error:  # noqa: BLE001 - whatever a transport raises, the driver goes on
            return error
        return None
