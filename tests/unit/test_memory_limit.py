"""The bound on a worker's memory, in children of the tests' process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pyarrow as pa
import pytest

from stormproof.core.engine.worker import LEAST_MB, default_worker_mb, granted_worker_mb, limit_memory

ALLOWED_MB = 64
ASKED_MB = 200
ARROW_ASKED_MB = 8_192  # its allocator may have reserved a few hundred before


def in_child(work: Callable[[], None]) -> int:
    """How a child ends that does so: 0, or 1 for a MemoryError."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except MemoryError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def reserve() -> None:
    assert len(bytes(ASKED_MB << 20)) == ASKED_MB << 20  # of untouched pages: no memory is really taken


def reserve_arrow() -> None:
    assert pa.allocate_buffer(ARROW_ASKED_MB << 20).size == ARROW_ASKED_MB << 20


@pytest.mark.parametrize("work", [reserve, reserve_arrow])
def test_above_the_limit_is_a_memory_error(work: Callable[[], None]) -> None:
    def limited() -> None:
        limit_memory(ALLOWED_MB)
        work()

    assert in_child(limited) == 1
    assert in_child(work) == 0, "the negative control: without the limit there is room"


def test_below_the_limit_nothing_happens_and_another_limit_counts_from_the_same_base() -> None:
    def limited() -> None:
        limit_memory(ALLOWED_MB)
        limit_memory(ASKED_MB * 2)
        limit_memory(ASKED_MB * 2)
        reserve()

    assert in_child(limited) == 0


def test_the_default_is_this_machines() -> None:
    assert default_worker_mb() >= LEAST_MB
    assert in_child(limit_memory) == 0


@pytest.mark.parametrize(
    ("conf", "megabytes"),
    [
        ({"spark.master": "yarn", "spark.executor.memoryOverhead": "2g", "spark.executor.cores": "4"}, 512),
        ({"spark.master": "k8s://h:1", "spark.executor.memoryOverhead": "600"}, 600),
        ({"spark.master": "k8s://h:1", "spark.executor.memoryOverhead": "102400kb"}, 100),
        ({"spark.master": "yarn"}, None),
        ({"spark.master": "spark://h:1", "spark.executor.memoryOverhead": "2g"}, None),
        ({"spark.master": "local[2]", "spark.executor.memoryOverhead": "2g"}, None),
        (
            {
                "spark.master": "yarn",
                "spark.executor.memoryOverhead": "2g",
                "spark.executor.pyspark.memory": "1g",
            },
            None,
        ),
    ],
)
def test_a_worker_gets_its_part_of_what_spark_grants(conf: dict[str, str], megabytes: int | None) -> None:
    assert granted_worker_mb(conf) == megabytes


def test_what_spark_told_a_worker_goes_before_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_EXECUTOR_MEMORY_MB", "300")
    assert default_worker_mb() == 300
