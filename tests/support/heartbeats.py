"""Tasks that report to a driver in this process, and what the driver has heard of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from stormproof.core.base.clock import Clock
from stormproof.core.heartbeat.listener import LOOPBACK, HeartbeatListener, JobSigns
from stormproof.core.heartbeat.task import Heartbeat

WAIT_S = 10.0


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, with a bound."""
    end_s = time.monotonic() + WAIT_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < end_s, "it never held"
        pause.wait(0.005)


def listening(root: Path | None = None, clock: Clock | None = None) -> HeartbeatListener:
    """The listener of a driver whose tasks run in this process or below it."""
    return HeartbeatListener(LOOPBACK, root=root, direct=True, clock=clock)


@contextmanager
def hearing(clock: Clock | None = None) -> Generator[JobSigns]:
    """What a driver hears of one job."""
    with listening(clock=clock) as listener, listener.job() as heard:
        yield heard


def published(heartbeat: Heartbeat) -> None:
    """Report the row count now, and wait until the driver has it."""
    connection = heartbeat._connection  # pyright: ignore[reportPrivateUsage]
    heartbeat.publish()
    with connection._lock:  # pyright: ignore[reportPrivateUsage]
        connection._tell_within(WAIT_S)  # pyright: ignore[reportPrivateUsage]


def note(heartbeat: Heartbeat, message: int) -> None:
    """Leave this message noted as the one in hand, where the heartbeat is careful."""
    heartbeat.at(np.array([message], np.int64))
    next(heartbeat.each([message]))
