"""What dies in a cluster while a batch runs: nothing is lost or doubled, and no innocent message is blamed.

One driver runs for all faults of the table; each test puts a batch of its own, strikes while both workers are at work on it,
and compares everything that was put since the beginning.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.cluster.faults import FAULTS, strike
from support.cluster.spark_cluster import Cluster, cluster
from support.cluster.words import Words, lines_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1_800),
    pytest.mark.sampled(0.0, pool="cluster"),
]

MESSAGES, PAUSE_S = 24, 0.4
ROUNDS = 100


@dataclass(slots=True)
class Life:
    """A topology, and its driver as it is now."""

    words: Words
    host: str
    driver: subprocess.Popen[bytes]
    batches: int = 0

    def batch(self, rng: random.Random) -> str:
        """Put a batch that takes some seconds; its tasks are at work on both workers when this returns."""
        if self.driver.poll() is not None:
            self.driver = self.words.start_driver(self.words.cluster.drivers[self.host])
        self.batches += 1
        tag = f"batch{self.batches}"
        self.words.put(lines_of(rng, MESSAGES), pause_s=PAUSE_S, tag=tag)
        self.words.until_at_work(tag, self.driver)
        return tag

    def third(self) -> str:
        """A host that does not drive."""
        return next(name for name in self.words.cluster.drivers if name != self.host)

    def settle(self) -> None:
        """Wait until all is committed, and compare."""
        self.words.until_committed(self.driver)
        self.words.check(self.words.cluster.drivers[self.third()])

    def end(self) -> None:
        """End the driver, if it runs."""
        if self.driver.poll() is None:
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait(60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster, for the module."""
    with cluster(tmp_path_factory.mktemp("c")) as made:
        yield made


@pytest.fixture(scope="module")
def life(hosts: Cluster) -> Iterator[Life]:
    """A driver that runs for all tests."""
    words = Words.on(hosts)
    first = hosts.drivers["driver1"]
    words.pack(first)
    made = Life(words, first.name, words.start_driver(first))
    yield made
    made.end()


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_in_a_batch(life: Life, seed: int, fault: str) -> None:
    life.batch(random.Random(f"{seed} {fault}"))
    strike(life.words, life.host, [fault])
    life.settle()


def test_a_driver_on_another_host_takes_over(life: Life, seed: int) -> None:
    """The driver's machine is switched off in a batch, and comes back later without a driver."""
    life.batch(random.Random(seed))
    words, before = life.words, life.host
    words.cluster.drivers[before].switch_off()
    life.driver.wait(60)
    words.cluster.heal()
    life.host = life.third()
    life.driver = words.start_driver(words.cluster.drivers[life.host])
    life.settle()


def test_a_driver_that_was_cut_off_is_fenced(life: Life, seed: int) -> None:
    """The driver's machine loses its network in a batch; another driver takes over; the first one writes nothing more."""
    life.batch(random.Random(seed))
    words, old, before = life.words, life.driver, life.host
    words.cluster.network.pull_cable(words.cluster.drivers[before])
    life.host = life.third()
    life.driver = words.start_driver(words.cluster.drivers[life.host])
    words.until_committed(life.driver)
    words.cluster.heal()
    assert old.wait(300) == 3, "status of a driver that was fenced"
    life.settle()


@pytest.mark.parametrize("number", range(ROUNDS))
def test_two_faults_at_once(life: Life, seed: int, number: int) -> None:
    rng = random.Random(f"{seed} {number}")
    names = rng.sample(list(FAULTS), 2)
    print(f"seed {seed}, round {number}: {names}")
    life.batch(rng)
    strike(life.words, life.host, names)
    life.settle()


def test_a_message_that_hangs_is_blamed_on_a_cluster_as_elsewhere(hosts: Cluster) -> None:
    """The control: where a message is at fault, these checks see that it was blamed."""
    words = Words.on(hosts, timeout="message_timeout_s = 8")
    words.pack(hosts.drivers["driver1"])
    words.put([["a"]], pause_s=1000, tag="hangs")
    driver = words.start_driver(hosts.drivers["driver1"])
    try:
        words.until_blamed(driver)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(60)
