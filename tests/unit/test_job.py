"""A watched job: what its end means for the batch, and that nothing of its folder is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from support.heartbeats import listening, note

from stormproof import MemorySink, MemorySource, Topology
from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import Fenced, JobFailed, MachineUnavailable, TransientError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.graph.plan import compile_topology
from stormproof.core.heartbeat.listener import HeartbeatListener
from stormproof.core.heartbeat.task import Heartbeat, ProgressMark, ReportAddress
from stormproof.core.task.job import Job, JobKey
from stormproof.core.tracking.attempts import JobDied
from stormproof.core.tracking.verdict import JobReport
from stormproof.trident.driver.jobs import Watch, run_watched

LEASE = Lease("life/1", 1, 30.0)
EMPTY = JobReport(0, 0, 0)
SOON_S = 0.02
FAR_S = 60.0


class Engine(InlineEngine):
    """Does as its job what the test says."""

    def __init__(self, work: Callable[[Engine, Job], JobReport]) -> None:
        super().__init__()
        self._work = work
        self._hangs = threading.Event()

    def run(self, job: Job) -> JobReport:
        return self._work(self, job)

    def cancel(self, key: JobKey) -> None:
        assert key == ("life", 1, 2)
        self._hangs.set()

    def hang(self) -> JobReport:
        """Wait to be cancelled."""
        assert self._hangs.wait(10)
        raise JobFailed("the job was cancelled")


class Lapsed(MemorySource):
    """A source whose lease is another's as soon as it is extended."""

    def extend(self, lease: Lease) -> None:
        raise Fenced(f"{lease.owner} is another's")


def run(work: Callable[[Engine, Job], JobReport], watch: Watch, source: MemorySource | None = None) -> object:
    lines = source or MemorySource("lines", [b"a"])
    lease = LEASE if source is None else replace(LEASE, seconds=SOON_S * 10)
    lines.subscribe("life", 1)
    assert lines.open(lease, Limit(), 7) is not None
    t = Topology("words")
    t.stream("lines", lines).into(MemorySink("rows"))
    job = Job(compile_topology(t, Guarantee.EXACTLY_ONCE), (), {}, "life", 1, 2, 7, tracked=True, careful=True)
    return run_watched(Engine(work), job, lines, lease, watch, SystemClock())


@pytest.fixture
def heartbeats(tmp_path: Path) -> Iterator[HeartbeatListener]:
    with listening(tmp_path) as made:
        yield made


def noting(job: Job, message: int) -> None:
    """A task of the job that fails with this message in hand."""
    assert job.heartbeat is not None
    with Heartbeat(job.heartbeat, 0, 0, careful=job.careful) as heartbeat:
        note(heartbeat, message)
        raise JobFailed("the worker is gone")


def test_a_job_that_reports_leaves_no_folder(heartbeats: HeartbeatListener, tmp_path: Path) -> None:
    def work(engine: Engine, job: Job) -> JobReport:
        assert job.heartbeat is not None
        assert (tmp_path / "life.1.2").is_dir()
        return EMPTY

    assert run(work, Watch(FAR_S, FAR_S, heartbeats)) is EMPTY
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_dies_names_what_was_in_hand(heartbeats: HeartbeatListener, tmp_path: Path) -> None:
    def work(engine: Engine, job: Job) -> JobReport:
        noting(job, 7)
        return EMPTY

    assert run(work, Watch(FAR_S, FAR_S, heartbeats)) == JobDied("the worker is gone", timed_out=False, suspects=(7,))
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_hangs_has_timed_out(heartbeats: HeartbeatListener) -> None:
    def work(engine: Engine, job: Job) -> JobReport:
        assert job.heartbeat is not None
        with Heartbeat(job.heartbeat, 0, 0, careful=job.careful) as heartbeat:
            note(heartbeat, 8)
            return engine.hang()

    found = run(work, Watch(SOON_S, FAR_S, heartbeats))
    assert found == JobDied(f"cancelled: no progress for {SOON_S} s", timed_out=True, suspects=(8,))


def test_a_job_whose_tasks_never_start_blames_no_message(heartbeats: HeartbeatListener) -> None:
    with pytest.raises(TransientError, match="txid 1 of topology 'words': no task of its job ran") as raised:
        run(lambda engine, job: engine.hang(), Watch(SOON_S, SOON_S, heartbeats))
    assert not isinstance(raised.value, JobFailed), "which would count against the message"


class Silent:
    """Heartbeats whose tasks are not heard of."""

    notices_silence_s: float = 0.0
    place: ReportAddress = ReportAddress("", 0, b"", b"")

    def __init__(self, silent: int) -> None:
        self._silent = silent

    @contextmanager
    def of_job(self, key: JobKey) -> Generator[Silent]:
        assert key == ("life", 1, 2)
        yield self

    def progress(self) -> ProgressMark:
        return ProgressMark(0, 1, 1, silent=self._silent)

    def suspects(self) -> tuple[int, ...]:
        return (7,)


def silent(tasks: int) -> HeartbeatListener:
    return cast(HeartbeatListener, Silent(tasks))


def dies(engine: Engine, job: Job) -> JobReport:
    raise JobFailed("an executor was lost")


def test_a_job_that_died_or_stood_still_while_its_tasks_were_silent_blames_no_message() -> None:
    for work, timeout_s in ((dies, FAR_S), (lambda engine, job: engine.hang(), SOON_S)):
        with pytest.raises(MachineUnavailable, match="not heard of") as raised:
            run(work, Watch(timeout_s, FAR_S, silent(1)))
        assert not isinstance(raised.value, JobFailed)


def test_where_silence_is_taken_for_death_the_message_in_hand_is_a_suspect() -> None:
    """The negative control."""
    assert run(dies, Watch(FAR_S, FAR_S, silent(0))) == JobDied("an executor was lost", timed_out=False, suspects=(7,))


def test_a_lease_that_ran_out_blames_no_message(heartbeats: HeartbeatListener) -> None:
    with pytest.raises(TransientError, match="its lease ran out") as raised:
        run(lambda engine, job: engine.hang(), Watch(FAR_S, FAR_S, heartbeats), Lapsed("lines", [b"a"]))
    assert not isinstance(raised.value, JobFailed)


def test_without_a_folder_the_whole_job_is_timed() -> None:
    def work(engine: Engine, job: Job) -> JobReport:
        assert job.heartbeat is None
        return engine.hang()

    assert run(work, Watch(SOON_S, FAR_S)) == JobDied(f"cancelled: no progress for {SOON_S} s", timed_out=True)
