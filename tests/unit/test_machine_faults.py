"""Whose fault an error outside user code is, and that no message answers for a machine: through the whole path."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.memory_run import World

from stormproof.core.base import machine_faults
from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import (
    JobFailed,
    MachineUnavailable,
    MachineUnfit,
    StoreUnavailable,
    StormproofError,
    TasksBroken,
)
from stormproof.core.base.machine_faults import OUTSIDE, classified, unpickled
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import SliceReader
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.spark_error import fault_told_by_spark
from stormproof.core.postgres.database import Database
from stormproof.core.start.preflight import (
    DatabaseProbe,
    PackageProbe,
    Probe,
    first_fault,
    marked_places,
    package_fingerprint,
)
from stormproof.core.task.job import Job
from stormproof.core.tracking.verdict import LIMIT, Breaker, Breaks, JobReport
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.transaction_states import EventKind

COMES_BACK = [
    *("ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "ENFILE", "ENOMEM", "EIO", "ENOENT"),
    *("ESTALE", "ETIMEDOUT", "ECONNREFUSED", "ENETUNREACH"),
]
TRACKED = [Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE]


# -- by class ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMES_BACK)
def test_what_may_come_back_is_transient(name: str) -> None:
    number: int = getattr(errno, name)
    error = classified(OSError(number, os.strerror(number), "/lake/part"), "task 1")
    assert isinstance(error, MachineUnavailable)
    assert not isinstance(error, JobFailed), "which would divide the batch"
    assert error.details["errno"] == name
    assert error.details["file"] == "/lake/part"
    assert os.uname().nodename in str(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system"),
        PermissionError(errno.EACCES, "Permission denied"),
        ModuleNotFoundError("No module named 'stormproof'", name="stormproof"),
        ImportError("cannot import name 'x' from 'orders'", name="orders"),
        pickle.UnpicklingError("invalid load key"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_somebody_must_mend_is_fatal_by_name(error: Exception) -> None:
    found = classified(error, "task 1")
    assert isinstance(found, MachineUnfit)
    assert "What to do" in str(found)


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError("slow"), ConnectionResetError("reset")])
def test_a_network_that_fails_is_transient_without_a_number_too(error: Exception) -> None:
    assert isinstance(classified(error, "task 1"), MachineUnavailable)


@pytest.mark.parametrize(
    "error", [MemoryError("large"), ValueError("rows"), pa.ArrowInvalid("x"), OSError("not Parquet")]
)
def test_what_does_not_tell_is_a_failed_job_with_its_place(error: Exception) -> None:
    """A worker's bound raises MemoryError for one large message, too: such a batch is divided as ever."""
    try:
        raise error
    except (MemoryError, ValueError, OSError) as raised:
        found = classified(raised, "task 1")
    assert isinstance(found, JobFailed)
    assert str(found.details[OUTSIDE]).startswith(f"{type(error).__name__} (test_machine_faults.py:")


TOLD_BY_SPARK: list[tuple[str, type[StormproofError]]] = [
    ("ModuleNotFoundError: No module named 'stormproof'", MachineUnfit),
    ("[PYTHON_VERSION_MISMATCH] Python in worker has different version 3.9 than that in driver 3.11", MachineUnfit),
    ('java.io.IOException: Cannot run program "python9": error=2, No such file or directory', MachineUnfit),
    ("java.io.IOException: No space left on device", MachineUnavailable),
    ("java.io.IOException: error=12, Cannot allocate memory", MachineUnavailable),
    ("java.lang.OutOfMemoryError: unable to create native thread", MachineUnavailable),
    ("java.nio.file.FileSystemException: /local/blockmgr/1: Read-only file system", MachineUnfit),
]


@pytest.mark.parametrize(("text", "cls"), TOLD_BY_SPARK)
def test_what_spark_alone_tells_of_is_told_apart(text: str, cls: type[StormproofError]) -> None:
    found = fault_told_by_spark(text, text)
    assert type(found) is cls
    assert text in str(found)


@pytest.mark.parametrize(
    "text",
    ["Python worker exited unexpectedly (crashed)", "Job aborted", "java.lang.OutOfMemoryError: Java heap space"],
)
def test_a_lost_worker_is_still_met_by_bisection(text: str) -> None:
    assert fault_told_by_spark(text, text) is None


def test_the_parts_of_a_job_that_cannot_be_unpickled_are_no_messages_fault() -> None:
    with pytest.raises(MachineUnfit, match="cannot be unpickled there"):
        unpickled(b"\x80\x05cnot_a_module\nthing\n.".replace(b"not_a_module", b"os"))
    with pytest.raises(MachineUnfit, match="install 'not_there'"):
        unpickled(b"cnot_there\nthing\n.")


# -- through the whole path ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failing:
    """A reader that meets an error of its machine, or of a library, before it has read anything."""

    reader: SliceReader
    error: Exception

    def read(self, seed: int, excluded: frozenset[int], batch_rows: int) -> Iterator[pa.RecordBatch]:
        raise self.error


class Faulty(InlineEngine):
    """Its first jobs (`jobs`; None: all) meet an error outside user code."""

    def __init__(self, error: Exception, jobs: int | None = None) -> None:
        super().__init__(2)
        self._error, self._left = error, jobs
        self.ran = 0

    def run(self, job: Job) -> JobReport:
        self.ran += 1
        if self._left is not None:
            if self._left == 0:
                return super().run(job)
            self._left -= 1
        return super().run(replace(job, readers=tuple(Failing(r, self._error) for r in job.readers)))


PAYLOADS = [b"m%d common" % i for i in range(12)]
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def world_of(folder: Path, messages: int = 12) -> World:
    return World(PAYLOADS[:messages], folder, batch_messages=6, max_attempts=1)


def blamed(world: World) -> int:
    kinds = [EventKind.FAILURE.value, EventKind.DEAD_LETTER.value]
    with world.ledger.transaction(Run("words", "life0", world.epoch())) as tx:
        events = tx.connection.execute(sa.select(t.event.c.kind).where(t.event.c.kind.in_(kinds))).all()
    return len(events) + len(world.source.dead_letters())


def require_all(world: World, messages: int = 12) -> None:
    assert world.counts()["common"] == messages
    assert all(world.counts()[f"m{i}"] == 1 for i in range(messages))


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_full_disk_is_waited_for_and_nobody_is_blamed(guarantee: Guarantee, tmp_path: Path) -> None:
    world = world_of(tmp_path)
    statistics = world.run(guarantee, engine=Faulty(NO_SPACE, jobs=4))
    assert (statistics.failed, statistics.dead_letters, blamed(world)) == (0, 0, 0)
    require_all(world)


@pytest.mark.parametrize("guarantee", TRACKED)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_disk_that_stays_full_ends_the_run_within_its_bound(
    guarantee: Guarantee, in_flight: int, tmp_path: Path
) -> None:
    world = world_of(tmp_path)
    world.in_flight = in_flight
    with pytest.raises(MachineUnavailable, match="make room"):
        world.run(guarantee, engine=Faulty(NO_SPACE), outage_s=60.0)
    assert blamed(world) == 0
    world.run(guarantee)
    require_all(world)


@pytest.mark.parametrize("guarantee", TRACKED)
def test_what_no_wait_mends_ends_the_run_at_the_first_job(guarantee: Guarantee, tmp_path: Path) -> None:
    world = world_of(tmp_path)
    engine = Faulty(ModuleNotFoundError("No module named 'numpy'", name="numpy"))
    with pytest.raises(MachineUnfit, match="install 'numpy'"):
        world.run(guarantee, engine=engine)
    assert (engine.ran, blamed(world)) == (1, 0)
    world.run(guarantee)
    require_all(world)


def test_drivers_that_end_for_a_machine_are_no_deaths(tmp_path: Path) -> None:
    """A supervisor starts them again and again: a message that stands alone counts drivers' deaths, and five fail it."""
    world = world_of(tmp_path, messages=1)
    for _ in range(8):
        with pytest.raises(MachineUnavailable):
            world.run(engine=Faulty(NO_SPACE), outage_s=0.0)
    world.run()
    assert blamed(world) == 0
    require_all(world, 1)


def test_such_drivers_were_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without giving back what is open, the innocent message is set aside."""
    monkeypatch.setattr("stormproof.trident.driver.coordinator.NOBODYS_DEATH", ())
    world = world_of(tmp_path, messages=1)
    for _ in range(8):
        try:
            world.run(engine=Faulty(NO_SPACE), outage_s=0.0)
        except MachineUnavailable:
            continue
    assert blamed(world) > 0


def test_under_at_most_once_no_further_batch_is_opened_on_a_broken_machine(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    engine = Faulty(MachineUnfit("no right"))
    with pytest.raises(MachineUnfit):
        world.run(Guarantee.AT_MOST_ONCE, engine=engine)
    assert engine.ran == 1
    world.run(Guarantee.AT_MOST_ONCE)
    assert world.counts()["common"] == 6, "the batch that was in hand is lost, as at-most-once says; no other"


@pytest.mark.parametrize("guarantee", TRACKED)
def test_as_a_failed_job_the_machines_fault_was_the_messages(
    guarantee: Guarantee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: every message became a dead letter, and the run said that all was well."""
    monkeypatch.setattr(machine_faults, "fault_of", lambda _: None)
    monkeypatch.setattr(Breaker, "failed_alone", lambda *_: Breaks.COUNT)
    world = world_of(tmp_path)
    statistics = world.run(guarantee, engine=Faulty(NO_SPACE))
    assert statistics.dead_letters == len(PAYLOADS)


# -- the breaker ---------------------------------------------------------------------------------------------------------

UNKNOWN = ValueError("a library met what it cannot say")


@pytest.mark.parametrize("guarantee", TRACKED)
def test_unrelated_messages_that_fail_alike_stop_the_run(guarantee: Guarantee, tmp_path: Path) -> None:
    world = world_of(tmp_path)
    with pytest.raises(
        TasksBroken, match=r"3 unrelated messages in a row.*ValueError \(test_machine_faults.py"
    ) as raised:
        world.run(guarantee, engine=Faulty(UNKNOWN))
    assert raised.value.details["messages"] == LIMIT
    assert blamed(world) == 0
    world.run(guarantee)
    assert blamed(world) == 0
    require_all(world)


def test_under_at_most_once_three_batches_stop_the_run(tmp_path: Path) -> None:
    world = World([b"m%d" % i for i in range(20)], tmp_path, batch_messages=2)
    engine = Faulty(UNKNOWN)
    with pytest.raises(TasksBroken, match="3 unrelated"):
        world.run(Guarantee.AT_MOST_ONCE, engine=engine)
    assert engine.ran == LIMIT


class Poisoned(InlineEngine):
    """Some messages trip a library, wherever they are."""

    def __init__(self, poison: Sequence[int]) -> None:
        super().__init__(2)
        self._poison = set(poison)

    def run(self, job: Job) -> JobReport:
        read = {i for r in job.readers for b in r.read(job.seed, job.excluded, 99) for i in b.column("id").to_pylist()}
        if read & self._poison:
            job = replace(job, readers=tuple(Failing(r, UNKNOWN) for r in job.readers))
        return super().run(job)


@pytest.mark.parametrize("poison", [[3], [0, 11], [0, 4, 7, 11]])
def test_poison_that_trips_a_library_is_still_set_aside(poison: list[int], tmp_path: Path) -> None:
    world = world_of(tmp_path)
    world.run(engine=Poisoned(poison))
    assert sorted(letter.id for letter in world.source.dead_letters()) == poison
    assert world.counts()["common"] == len(PAYLOADS) - len(poison)


def test_a_topology_whose_every_message_raises_dead_letters_them(tmp_path: Path) -> None:
    def split(line: str) -> list[str]:
        raise ValueError(line)

    world = World(PAYLOADS, tmp_path, split=split, batch_messages=6, max_attempts=1)
    assert world.run().dead_letters == len(PAYLOADS)


# -- what users' functions meet -------------------------------------------------------------------------------------------


class FillsUp:
    """A user's function that unpacks to the machine's disk: full for all lines, or by what one of them unpacks to."""

    def __init__(self, bombs: set[str] | None = None) -> None:
        self.bombs, self.full = bombs, True

    def __call__(self, line: str) -> list[str]:
        if self.full if self.bombs is None else line in self.bombs:
            raise OSError(errno.ENOSPC, "No space left on device", "/var/tmp/unpacked")
        return line.split()


@pytest.mark.parametrize("guarantee", TRACKED)
@pytest.mark.parametrize("batch_messages", [1, 6])
def test_a_full_disk_in_a_users_function_is_no_messages_fault(
    guarantee: Guarantee, batch_messages: int, tmp_path: Path
) -> None:
    function = FillsUp()
    clock = SystemClock()  # retries get a part of the time, and others their turn
    world = World(PAYLOADS, tmp_path, split=function, batch_messages=batch_messages, max_attempts=1, clock=clock)
    with pytest.raises(
        MachineUnavailable, match=r"unrelated messages met what a machine lacks: OSError.*No space left"
    ):
        world.run(guarantee, outage_s=0.2)
    assert blamed(world) == 0
    function.full = False
    world.run(guarantee)
    assert blamed(world) == 0
    require_all(world)


def test_a_message_that_unpacks_to_more_than_the_disk_is_set_aside(tmp_path: Path) -> None:
    world = World(PAYLOADS, tmp_path, split=FillsUp({"m3 common"}), batch_messages=6, max_attempts=1)
    world.run()
    (letter,) = world.source.dead_letters()
    assert (letter.id, letter.reason) == (3, "error")
    assert world.counts()["common"] == len(PAYLOADS) - 1


# -- the preflight -------------------------------------------------------------------------------------------------------


def test_a_folder_is_written_synced_and_left_as_it_was(tmp_path: Path) -> None:
    with marked_places([("the staging folder", tmp_path / "not" / "yet"), ("the table", tmp_path)]) as probes:
        assert len(probes) == 1, "one folder is asked for once"
        assert first_fault(probes) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_the_drivers_is_seen(tmp_path: Path) -> None:
    """As where each machine has a disk of its own under one path."""
    with marked_places([("the staging folder", tmp_path)]) as (probe,):
        next(tmp_path.iterdir()).unlink()
        fault = first_fault([probe])
    assert isinstance(fault, MachineUnfit)
    assert "is not the driver's folder" in str(fault)


def test_another_version_of_the_package_is_seen() -> None:
    assert first_fault([PackageProbe(package_fingerprint())]) is None
    fault = first_fault([PackageProbe("0" * 64)])
    assert isinstance(fault, MachineUnfit)
    assert "another version" in str(fault)


def test_a_database_that_executors_do_not_reach_is_named_with_the_machine() -> None:
    database = Database.from_url("postgresql://nobody@127.0.0.1:1/none")
    fault = first_fault([DatabaseProbe("the database of queue 'lines'", database)])
    assert isinstance(fault, StoreUnavailable)
    assert f"the database of queue 'lines' is not reached from {os.uname().nodename}" in str(fault)


@dataclass(frozen=True, slots=True)
class Lacks:
    error: Exception

    def probe(self) -> None:
        raise self.error


def test_what_no_wait_mends_is_told_first() -> None:
    probes: list[Probe] = [Lacks(NO_SPACE), Lacks(ImportError("no orders", name="orders"))]
    assert isinstance(first_fault(probes), MachineUnfit)
    assert isinstance(first_fault(probes[:1]), MachineUnavailable)
