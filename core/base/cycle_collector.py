"""Fewer passes of Python's cycle collector while rows go through a user's code, and while messages come from a server.

Tuples and messages are many short-lived objects without cycles. The collector runs after every 700 of them, and every
few thousand it makes a full pass over all objects of the process, most of them modules. Measured, that is half of the
time of a bolt that emits and acks (1.9 against 0.9 us a tuple), and a quarter of a driver's processor time for messages
from Redis.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

ALLOCATIONS: Final = 50_000
"""The collector runs after this many new containers. A user's code that leaves cycles behind keeps at most these alive; a
record batch of tuples itself takes some 30,000."""


@contextmanager
def fewer_collections() -> Generator[None]:
    """Have the collector run only after every `ALLOCATIONS`, unless it is set to run less often or never. The setting is
    the whole process's: other threads have it, too.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < ALLOCATIONS:
        yield
        return
    gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
