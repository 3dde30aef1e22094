"""Fewer passes of Python's cycle collector while rows go through a user's code.

Tuples are many short-lived objects without cycles. Each 700 of them make the collector run, and every few thousand a
full pass goes over all objects of the process, most of them modules: measured, that is half of the time of a bolt that
emits and acks (1.9 against 0.9 us a tuple).
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

ALLOCATIONS: Final = 50_000
"""So many containers more than before, and the collector runs. A user's code that leaves cycles behind keeps no more than
these alive; some 30,000 are what a record batch of tuples itself takes."""


@contextmanager
def fewer_collections() -> Generator[None]:
    """Have the collector run each `ALLOCATIONS` only, while the block runs; where it runs less often or not at all, leave
    it as it is. The setting is the process's, other threads have it, too.
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
