"""Lets a Spark worker that has been idle end in silence.

Spark keeps a worker for the next task, and closes its connection after a minute without one. PySpark's worker takes the
end of that connection for a failed task, tries to send the failure into the closed connection, and its daemon prints a
traceback of `BrokenPipeError`, for each worker and each idle minute. There is no setting for it.

A daemon module of our own (`spark.python.daemon.module`) would have to import this package before it forks, on machines
that may not have it, and would not reach a session that somebody else has started. So a worker that runs one of our tasks
looks, before it begins with the next one, whether there is a next one: a connection that ends before the first byte of a
task is the idle worker's end. One that ends later is an error, and stays one.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, Final, cast

_MARK: Final = "_stormproof_ends_in_silence"
_IDLE_END: Final = 1
"""The daemon ends a worker whose status is not 0; nobody else reads it."""


def end_in_silence_when_idle() -> None:
    """Inside a worker: have this process end without a word where Spark closes its connection between two tasks.

    Without effect from the second call on, and outside a worker.
    """
    worker: Any = sys.modules.get("pyspark.worker")
    main: Any = getattr(worker, "main", None)
    if main is None or hasattr(main, _MARK):
        return
    run_task = cast("Callable[[io.BufferedReader, io.BufferedWriter], None]", main)

    def wait_for_a_task(infile: io.BufferedReader, outfile: io.BufferedWriter) -> None:
        if not _has_task(infile):
            sys.exit(_IDLE_END)
        run_task(infile, outfile)

    setattr(wait_for_a_task, _MARK, True)
    worker.main = wait_for_a_task


def _has_task(infile: io.BufferedReader) -> bool:
    """Whether a first byte comes; waits for it, as the task itself would. Takes nothing from the stream."""
    try:
        return bool(infile.peek(1))
    except ConnectionResetError:  # closed with something unread: it is the end, too
        return False
