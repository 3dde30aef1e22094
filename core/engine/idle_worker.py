"""Lets a Spark worker that has been idle end in silence.

Spark keeps a worker for the next task, and closes its connection after a minute without one. PySpark's worker takes the
closed connection for a failed task and tries to send the failure into it. Its daemon then prints a traceback of
`BrokenPipeError`, for each worker and each idle minute. No setting turns this off.

A daemon module of our own (`spark.python.daemon.module`) would have to import this package before it forks, on machines
that may not have it, and would not reach a session that somebody else has started. Instead, a worker that has run one of
our tasks waits for the first byte of the next one. A connection that is closed before that byte ends an idle worker. One
that is closed later is an error, and stays one.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, Final

_IDLE_END: Final = 1
"""The daemon ends a worker whose status is not 0; nothing else reads the status."""


def end_in_silence_when_idle() -> None:
    """Inside a worker: have this process end without output when Spark closes its connection between two tasks.

    Later calls have no effect, and neither has a call outside a worker.
    """
    worker: Any = sys.modules.get("pyspark.worker")
    if worker is None or worker.main.__module__ == __name__:
        return
    run_task: Callable[[io.BufferedReader, io.BufferedWriter], None] = worker.main

    def wait_for_a_task(infile: io.BufferedReader, outfile: io.BufferedWriter) -> None:
        if not _has_task(infile):
            sys.exit(_IDLE_END)
        run_task(infile, outfile)

    worker.main = wait_for_a_task


def _has_task(infile: io.BufferedReader) -> bool:
    """Wait for the first byte of a task, without taking it; False where the connection is closed instead."""
    try:
        return bool(infile.peek(1))
    except ConnectionResetError:  # closed while something was unread
        return False
