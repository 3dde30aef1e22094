"""Spark's Python workers: a bound on their memory, and an end in silence where one has been idle.

A function that allocates without end gets a MemoryError, and the machine lives on. The limit is the kernel's RLIMIT_DATA
(private writable memory). Not RLIMIT_AS, which `spark.executor.pyspark.memory` would set: address space that is only
reserved, a gigabyte by Arrow's allocator alone, counts there, and PySpark prints a line for each task.

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
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

LEAST_MB: Final = 1024
SHARE: Final = 0.5
"""The share of a machine's memory that its workers may take together by default; the JVM and the stores have the rest."""

_MB: Final = 1 << 20
_STATUS: Final = Path("/proc/self/status")
_CGROUP_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


_GRANTED: Final = "PYSPARK_EXECUTOR_MEMORY_MB"
"""The variable in which Spark tells a worker its part of `spark.executor.pyspark.memory`."""

_SIZE: Final = re.compile(r"(\d+)(?:([kmgtp])b?)?")
_KB: Final = {"k": 1, "m": 1 << 10, "g": 1 << 20, "t": 1 << 30, "p": 1 << 40}


def granted_worker_mb(conf: Mapping[str, str]) -> int | None:
    """What Spark's settings grant each worker of an executor; None where they do not say, or say it to the worker itself.

    YARN and Kubernetes end an executor whose processes take more than they were granted. The memory beside the JVM's heap is
    `spark.executor.memoryOverhead`; its workers share it, one for each core. A standalone cluster grants nothing but a heap.
    """
    master, overhead = conf.get("spark.master", ""), conf.get("spark.executor.memoryOverhead")
    if overhead is None or "spark.executor.pyspark.memory" in conf or not master.startswith(("yarn", "k8s://")):
        return None
    size = _SIZE.fullmatch(overhead.strip().lower())
    cores = conf.get("spark.executor.cores", "1")
    if size is None or not cores.isdecimal():  # Spark refuses these
        return None
    megabytes = int(size[1]) * _KB[size[2] or "m"] >> 10
    return max(1, megabytes // max(1, int(cores)))


def default_worker_mb() -> int:
    """Inside a worker: what Spark granted it.

    Else half of this machine's memory (or of this container's), over its cores; at least `LEAST_MB`.
    """
    granted = os.environ.get(_GRANTED, "")
    if granted.isdecimal():
        return int(granted)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdecimal():
            total = min(total, int(text))
    return max(LEAST_MB, int(total * SHARE / _MB / len(os.sched_getaffinity(0))))


class _Limit:
    """The memory that this process had at its first limit, and the present limit."""

    def __init__(self) -> None:
        self.base: int | None = None
        self.megabytes: int | None = None

    def apply(self, megabytes: int) -> None:
        if megabytes == self.megabytes:
            return
        if self.base is None:
            self.base = _data_bytes()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = self.base + megabytes * _MB
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        self.megabytes = megabytes


_limit: Final = _Limit()


def limit_memory(megabytes: int | None = None) -> None:
    """Limit this process to `megabytes` (None: `default_worker_mb`) above what it has at the first call.

    *Not guaranteed*: only Linux enforces the limit. A library that does not check its allocations may crash instead of
    raising MemoryError; then the worker is lost, and its batch is bisected.
    """
    _limit.apply(default_worker_mb() if megabytes is None else megabytes)


def _data_bytes() -> int:
    """The private writable memory of this process, as the kernel counts it for RLIMIT_DATA; 0 where it is not known."""
    if not _STATUS.is_file():
        return 0
    sizes = [line.split() for line in _STATUS.read_text().splitlines() if line.startswith("VmData:")]
    return int(sizes[0][1]) * 1024 if sizes else 0


# ---- the end of an idle worker

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
