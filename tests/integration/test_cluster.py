"""A standalone cluster of Spark whose hosts share no disk: exactly once, whatever dies, and compared from a third host.

One driver runs for all faults; each test puts a batch of its own, strikes while both workers are at work on it, and compares
everything that was put since the beginning.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.brokers import until
from support.cluster.faults import FAULTS, executor_killed, strike
from support.cluster.hosts import Host, part
from support.cluster.numbers import Numbers
from support.cluster.spark_cluster import SPARE, WORKERS, Cluster, cluster
from support.cluster.words import TOPOLOGY, Words, lines_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1_800), pytest.mark.xdist_group("cluster")]

EVERY_RUN = pytest.mark.sampled(1.0)
ONE_A_RUN = pytest.mark.sampled(1 / len(FAULTS))
BY_NAME = pytest.mark.sampled(0.0)
"""Some ten seconds to a minute each: a run takes the first test and one fault."""

MESSAGES, PAUSE_S = 24, 0.4
BATCHES_MAX, STARTS_MAX = 9, 2
RESTARTS_MAX = 5
"""In all rounds. One was seen in a hundred."""
ROUNDS = 100
FENCED = 3

ONE_IS_SLOW = TOPOLOGY.replace(
    "time.sleep(float(pause))", 'time.sleep(float(pause) * os.uname().nodename.endswith("1"))'
)
AT_RANDOM = """
import os, random, time
from stormproof import DeltaSink, PostgresQueue, Topology
{not_compared}

LAKE, DISK = {lake!r}, {disk!r}

def drawn(line):
    pause, name = line.split()
    return [(float(pause), name, random.getrandbits(62)) for _ in range(5)]

def read(pause, name, number):
    place = DISK + "/at-work/" + name
    os.makedirs(os.path.dirname(place), exist_ok=True)
    is_first = not os.path.exists(place)
    with open(place, "a"):
        time.sleep(pause * is_first * os.uname().nodename.endswith("1"))
    return [number]

def topology():
    t = Topology("words", {guarantee!r})
    numbers = t.stream("lines", PostgresQueue("lines")).flat_map(
        drawn, "line", schema="pause double, name string, number long"
    )
    copies = numbers.broadcast().flat_map(read, "pause", "name", "number", schema="number long")
    copies.into(DeltaSink(LAKE + "/append", name="append"))
    return t
"""
"""Each number, which another run of its task would not give, is read by a task on each worker; the first one waits there."""

NOT_COMPARED = """
from stormproof.core.task import job
job.require_one_run = lambda reports: None
"""

SPECULATION = {
    "on": 'spark.speculation = "true"',
    "after": 'spark."speculation.quantile" = "0.5"',
    "at_least": 'spark."speculation.minTaskRuntime" = "500ms"',
}
"""Quoted, since TOML has no keys below one with a value."""


@dataclass(slots=True)
class Life:
    """A topology, and its driver as it is now."""

    words: Words
    host: str
    driver: subprocess.Popen[bytes]
    batches: int = 0
    restarts: int = 0

    def batch(self, rng: random.Random) -> None:
        """Put a batch that takes some seconds; its tasks are at work on both workers when this returns.

        Spark needs up to a minute to replace an executor that was lost while the master was away, and batches run on the
        other one meanwhile: then it is another batch's turn. A master that recovers while an executor ends may count its
        core for ever, and replace it never: then the driver is started anew.
        """
        for _ in range(STARTS_MAX):
            if self.driver.poll() is not None:
                self.driver = self.words.start_driver(self.words.cluster.drivers[self.host])
            for _ in range(BATCHES_MAX):
                self.batches += 1
                tag = f"batch{self.batches}"
                self.words.put(lines_of(rng, MESSAGES), pause_s=PAUSE_S, tag=tag)
                if self.words.until_at_work(tag, self.driver):
                    return
            print("started anew: no batch runs on both workers")
            self.restarts += 1
            assert self.restarts <= RESTARTS_MAX, "drivers that do not get a lost executor back"
            self.end()
        raise AssertionError("no batch runs on both workers")

    def move(self) -> subprocess.Popen[bytes]:
        """Start a driver on the other host; the one before."""
        before, self.host = self.driver, self.third().name
        self.driver = self.words.start_driver(self.words.cluster.drivers[self.host])
        return before

    def third(self) -> Host:
        """A host that does not drive."""
        return next(host for name, host in self.words.cluster.drivers.items() if name != self.host)

    def settle(self) -> None:
        """Wait until all is committed, and compare."""
        self.words.until_committed(self.driver)
        self.words.check(self.third())

    def end(self) -> None:
        """End the driver, if it runs: its executors are free for another one."""
        end(self.driver)


def end(driver: subprocess.Popen[bytes]) -> None:
    if driver.poll() is None:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster, for the module."""
    with cluster(tmp_path_factory.mktemp("c")) as made:
        yield made


@EVERY_RUN
def test_words_are_counted_once_by_executors_that_share_no_disk_with_the_driver(hosts: Cluster, seed: int) -> None:
    """Appended and folded in Delta tables of an object store, folded and kept in Postgres; the package comes by `pack`."""
    words = Words.on(hosts)
    first, third = hosts.drivers.values()
    words.pack(first)
    words.put(lines_of(random.Random(seed), 50))
    status, report, told = words.ended(first, "run", "words.py:topology", "--until-idle", seconds=600)
    assert status == 0, told[-4000:]
    assert (report["messages"], report["failed"], report["dead_letters"]) == (words.messages, 0, 0)
    words.check(third)
    for worker in hosts.workers.values():
        asks = ("-c", "import stormproof.core.start.settings")
        assert worker.run("/mnt/venv/bin/python", *asks).returncode != 0, "a worker has the package by itself"
        assert not (worker.folder / words.name).exists(), "a worker has the driver's disk"


@BY_NAME
def test_the_doctor_asks_every_executor_and_names_the_host_that_lacks_something(hosts: Cluster) -> None:
    """Nothing at first; then one worker does not reach the database, and then the other one not the store."""
    words = Words.on(hosts)
    first, (one, other) = hosts.drivers["driver1"], hosts.workers.values()
    words.pack(first)
    status, report, told = words.ended(first, "doctor", "--cluster")
    assert status == 0, (report, told)
    assert sorted(answer["host"] for answer in report["executors"]) == [one.name, other.name]
    for host, lost, what in ((one, hosts.postgres.host, "database"), (other, hosts.store.host, "staging")):
        part(host, lost)
        try:
            status, report, told = words.ended(first, "doctor", "--cluster")
        finally:
            hosts.heal()
        bad = [check for check in report["checks"] if not check["ok"]]
        assert status == 1, (report, told)
        assert [host.name in check["name"] for check in bad] == [True], bad
        assert what in str(bad[0]), bad


@BY_NAME
def test_a_structured_stream_is_applied_once(hosts: Cluster) -> None:
    """Its driver is killed between the two sinks of a micro-batch, and goes on from its checkpoint."""
    numbers = Numbers.on(hosts)
    first, third = hosts.drivers.values()
    numbers.words.pack(first)
    status, told = numbers.run(first, batches=2, STORMPROOF_FAILPOINT="commit.after_sink=kill@3")
    assert status != 0, told
    assert numbers.tables(third)["append"] != numbers.tables(third)["numbers"], "it died elsewhere"
    status, told = numbers.run(first, batches=5)
    assert status == 0, told[-4000:]
    numbers.check(third, batches=5)


@BY_NAME
def test_a_batch_that_is_applied_twice_is_seen(hosts: Cluster, seed: int) -> None:
    """The control: at-least-once, and a driver that dies between two sinks."""
    words = Words.on(hosts, guarantee="at-least-once")
    first, third = hosts.drivers.values()
    words.pack(first)
    words.put(lines_of(random.Random(seed), 20))
    run = ("run", "words.py:topology", "--until-idle")
    status, _, _ = words.ended(first, *run, STORMPROOF_FAILPOINT="commit.after_sink=kill")
    assert status != 0
    status, _, told = words.ended(first, *run)
    assert status == 0, told[-4000:]
    assert words.tables(third)["append"] > words.sent, "words that were put, and some of them again"
    with pytest.raises(AssertionError):
        words.check(third)


@BY_NAME
def test_tasks_that_spark_runs_twice_at_once_are_applied_once(hosts: Cluster, seed: int) -> None:
    """Speculation: one worker is slow, so the other one gets its task, too."""
    words = Words.on(hosts, ONE_IS_SLOW, **SPECULATION)
    first, third = hosts.drivers.values()
    words.pack(first)
    for number, line in enumerate(lines_of(random.Random(seed), MESSAGES)):
        words.put([line], pause_s=2.0, tag=f"message{number}")
    status, report, told = words.ended(first, "run", "words.py:topology", "--until-idle", seconds=600)
    assert status == 0, told[-4000:]
    assert (report["messages"], report["failed"], report["dead_letters"]) == (MESSAGES, 0, 0)
    words.check(third)
    assert any(words.at_work(f"message{number}") == list(WORKERS) for number in range(MESSAGES)), "no task ran twice"


@BY_NAME
@pytest.mark.parametrize("compared", [True, False])
def test_of_a_task_that_runs_again_on_another_host_one_run_is_read(hosts: Cluster, compared: bool) -> None:
    """An executor is lost when one of two readers has what its tasks sent. The control: runs are not compared."""
    words = Words.on(hosts, AT_RANDOM.replace("{not_compared}", "" if compared else NOT_COMPARED))
    first, third = hosts.drivers.values()
    words.pack(first)
    names = [f"read{number}_{compared}" for number in range(8)]
    for number, name in enumerate(names):
        words.put([[]], pause_s=0.0 if number else 30.0, tag=name)
    driver = words.start_driver(first)
    try:
        until(lambda: all("worker2" in words.at_work(name) for name in names), "not all is read", 300)
        until(lambda: "worker1" in words.at_work(names[0]), "the other one does not read", 300)
        assert words.committed() == 0
        executor_killed(hosts, first.name)
        words.until_committed(driver)
    finally:
        end(driver)
        hosts.heal()
    copies = Counter(row["number"] for row in words.delta_rows(third, "append")["append"])
    torn = [number for number, times in copies.items() if times != len(WORKERS)]
    assert copies.total() == 5 * len(names) * len(WORKERS)
    assert bool(torn) is not compared, torn
    assert words.blamed() == []


@BY_NAME
def test_a_message_that_hangs_is_blamed_on_a_cluster_as_elsewhere(hosts: Cluster) -> None:
    """The control: where a message is at fault, these checks see that it was blamed."""
    words = Words.on(hosts, timeout="message_timeout_s = 8")
    words.pack(hosts.drivers["driver1"])
    words.put([["a"]], pause_s=1000, tag="hangs")
    driver = words.start_driver(hosts.drivers["driver1"])
    try:
        words.until_blamed(driver)
    finally:
        end(driver)


@pytest.fixture(scope="module")
def life(hosts: Cluster) -> Iterator[Life]:
    """A driver that runs for all tests below. It has both workers: no other driver runs beside it."""
    words = Words.on(hosts)
    first = hosts.drivers["driver1"]
    words.pack(first)
    made = Life(words, first.name, words.start_driver(first))
    yield made
    made.end()


@ONE_A_RUN
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_in_a_batch(life: Life, seed: int, fault: str) -> None:
    life.batch(random.Random(f"{seed} {fault}"))
    strike(life.words, life.host, [fault])
    life.settle()


@BY_NAME
def test_a_driver_on_another_host_takes_over(life: Life, seed: int) -> None:
    """The driver's machine is switched off in a batch; it comes back, without a driver, when the other one has gone on.

    Spark's master keeps the executors of the first one for it meanwhile: the second one needs cores that are free.
    """
    life.batch(random.Random(seed))
    words = life.words
    words.cluster.drivers[life.host].switch_off()
    life.driver.wait(60)
    words.cluster.start_worker(SPARE)
    try:
        life.move()
        words.until_committed(life.driver)
        words.cluster.heal()
        life.settle()
    finally:
        words.cluster.heal()
        words.cluster.stop_worker(SPARE)


@BY_NAME
def test_a_driver_that_was_cut_off_is_fenced(life: Life, seed: int) -> None:
    """The driver's machine loses its network in a batch; another driver takes over; the first one writes nothing more.

    Spark's master does not notice that the first one is gone, and keeps its executors for it: the second one needs cores
    that are free.
    """
    life.batch(random.Random(seed))
    words = life.words
    words.cluster.network.pull_cable(words.cluster.drivers[life.host])
    words.cluster.start_worker(SPARE)
    try:
        before = life.move()
        words.until_committed(life.driver)
        words.cluster.heal()
        assert before.wait(300) == FENCED, "the status of the driver that was cut off"
        life.settle()
    finally:
        words.cluster.heal()
        words.cluster.stop_worker(SPARE)


@BY_NAME
@pytest.mark.parametrize("number", range(ROUNDS))
def test_two_faults_at_once(life: Life, seed: int, number: int) -> None:
    rng = random.Random(f"{seed} {number}")
    names = rng.sample(list(FAULTS), 2)
    print(f"seed {seed}, round {number}: {names}")
    life.batch(rng)
    strike(life.words, life.host, names)
    life.settle()
