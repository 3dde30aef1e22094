"""A user's function that forks: the fork never goes on as a second driver, and the parent's batch is exact."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.queues import prepared_database

from stormproof import IteratorSource, MemorySink, MemorySource, Settings, Topology
from stormproof.core.base.process import FORK_STATUS, end_if_fork, kept_from_forks, process_life
from stormproof.core.postgres.database import Database

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]
NUMBERS = [b"%d" % n for n in range(9)]


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    prepared_database(database)
    return Settings(database_url=database.without_password, home=tmp_path, batch_messages=4, poll_interval_s=0.01)


class Forks:
    """Forks once, in the process that made it; `statuses` are the children's exit statuses."""

    def __init__(self, child: Callable[[], object]) -> None:
        self.child = child
        self.maker = os.getpid()
        self.statuses = list[int]()

    def __call__(self) -> None:
        if self.statuses or os.getpid() != self.maker:
            return
        pid = os.fork()
        if pid == 0:
            self.child()
            return
        self.statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def raises() -> None:
    raise KeyError("in the fork")


CHILDREN = [
    pytest.param(lambda: None, FORK_STATUS, id="returns"),
    pytest.param(raises, FORK_STATUS, id="raises"),
    pytest.param(lambda: sys.exit(3), 3, id="exits"),
    pytest.param(sys.exit, 0, id="exits-well"),
    pytest.param(lambda: os._exit(5), 5, id="ends-itself"),
]


def run(topology: Topology, settings: Settings) -> None:
    here = process_life()
    try:
        topology.run(engine="inline", settings=settings, until_idle=True)
    finally:
        if process_life() != here:  # a fork that ran on would go through the tests of this file a second time
            os._exit(99)


def rows_in(sink: MemorySink) -> Counter[str]:
    assert sink.store.content is not None
    return Counter(sink.store.content.column("line").to_pylist())


def numbers() -> MemorySource:
    return MemorySource("numbers", NUMBERS)


@pytest.mark.parametrize(("child", "status"), CHILDREN)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_fork_in_a_function_ends_there(
    settings: Settings, child: Callable[[], object], status: int, in_flight: int, capfd: pytest.CaptureFixture[str]
) -> None:
    forks, sink = Forks(child), MemorySink("rows")

    def forking(line: str) -> str:
        forks()
        return line

    topology = Topology("forks")
    topology.stream("numbers", numbers()).map(forking, "line", schema="line string").into(sink)
    run(topology, settings.model_copy(update={"max_batches_in_flight": in_flight}))
    assert rows_in(sink) == Counter(n.decode() for n in NUMBERS)
    assert set(forks.statuses) == {status}  # with two batches in flight two threads may fork
    assert ("made by a user's function" in capfd.readouterr().err) == (status == FORK_STATUS)


@pytest.mark.parametrize(("child", "status"), CHILDREN[:3])
def test_a_fork_in_a_sources_iterator_ends_there(settings: Settings, child: Callable[[], object], status: int) -> None:
    forks, sink = Forks(child), MemorySink("rows")

    def items() -> Iterator[bytes]:
        for number in NUMBERS:
            forks()
            yield number

    topology = Topology("forks", guarantee="at-least-once")
    topology.stream("numbers", IteratorSource("numbers", items(), confirm=lambda _: None)).into(sink)
    run(topology, settings)
    assert rows_in(sink) == Counter(n.decode() for n in NUMBERS)
    assert forks.statuses == [status]


def test_a_fork_in_the_listener_ends_there(settings: Settings) -> None:
    forks, sink = Forks(lambda: None), MemorySink("rows")
    topology = Topology("forks")
    topology.stream("numbers", numbers()).into(sink)
    here = process_life()
    topology.run(engine="inline", settings=settings, until_idle=True, on_batch=lambda _: forks())
    assert process_life() == here
    assert rows_in(sink) == Counter(n.decode() for n in NUMBERS)
    assert forks.statuses == [FORK_STATUS]


def test_multiprocessing_and_subprocess_work_in_a_function(settings: Settings) -> None:
    context = multiprocessing.get_context("fork")
    asked = list[int]()

    def forking(line: str) -> str:
        if not asked:
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=send.send, args=(int(line) + 1,))
            process.start()
            asked.append(receive.recv())
            process.join()
            asked.append(process.exitcode or 0)
            asked.append(subprocess.run(["true"], preexec_fn=os.getpid, check=False).returncode)
        return line

    sink = MemorySink("rows")
    topology = Topology("forks")
    topology.stream("numbers", numbers()).map(forking, "line", schema="line string").into(sink)
    run(topology, settings)
    assert rows_in(sink) == Counter(n.decode() for n in NUMBERS)
    assert asked[1:] == [0, 0]


def test_the_innermost_block_counts_and_a_fork_is_at_home_in_its_own() -> None:
    def work() -> None:
        with kept_from_forks():
            end_if_fork()  # its own block: not left
        os._exit(7)

    with kept_from_forks():
        pid = os.fork()
        if pid == 0:
            work()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_control_a_fork_that_is_not_kept_runs_on() -> None:
    pid = os.fork()
    if pid == 0:
        end_if_fork(KeyError("outside of any block"))
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
