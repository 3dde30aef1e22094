"""One commit at a time to a Delta table that Spark writes to: the lock, without Spark."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Child

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import StoreUnavailable
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.opening import IN_PROCESS, LOCK_NAME, alone

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""


@pytest.fixture
def log(tmp_path: Path) -> DeltaLog:
    found = DeltaLog(str(tmp_path))
    os.mkdir(found.folder)
    return found


@pytest.fixture
def held(log: DeltaLog) -> Iterator[Child]:
    """Another process, as Spark's JVM would, holds the table's lock."""
    path = Path(log.folder, LOCK_NAME)
    path.touch()
    with Child([sys.executable, "-c", HOLDER, str(path)]) as child:
        assert child.line() == "held"
        yield child


def test_who_comes_second_is_told_by_name_and_writes_nothing(log: DeltaLog, held: Child) -> None:
    with pytest.raises(StoreUnavailable, match=f"fuser -v .*{LOCK_NAME}"), alone(log, "sink 'x'", ManualClock()):
        pytest.fail("the lock is another's")


def test_it_is_free_once_its_holder_is_dead(log: DeltaLog, held: Child) -> None:
    held.say("")
    assert held.wait() == 0
    with alone(log, "sink 'x'", ManualClock()):
        pass


def test_a_table_that_spark_never_wrote_has_no_lock(log: DeltaLog) -> None:
    with alone(log, "sink 'x'", ManualClock()):
        assert not Path(log.folder, LOCK_NAME).exists()


def test_two_threads_take_turns(log: DeltaLog) -> None:
    Path(log.folder, LOCK_NAME).touch()
    inside, most, barrier = 0, 0, threading.Barrier(4)

    def commit() -> None:
        nonlocal inside, most
        barrier.wait()
        for _ in range(20):
            with alone(log, "sink 'x'", ManualClock()):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_threads_that_reach_a_table_by_different_paths_take_turns(log: DeltaLog, tmp_path: Path) -> None:
    Path(log.folder, LOCK_NAME).touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with alone(DeltaLog(str(link)), "sink 'x'", ManualClock()):
        (held,) = (lock for (_, path), lock in IN_PROCESS.items() if path == os.path.join(log.folder, LOCK_NAME))
        assert held.locked()
