"""A topology on a standalone cluster of Spark whose hosts share no disk: exactly once, and compared from a third host."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.cluster.spark_cluster import Cluster, cluster
from support.cluster.words import Words, lines_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster, for the module."""
    with cluster(tmp_path_factory.mktemp("c")) as made:
        yield made


@pytest.mark.sampled(0.0, pool="cluster")
def test_words_are_counted_once_by_executors_that_share_no_disk_with_the_driver(hosts: Cluster, seed: int) -> None:
    """Appended and folded in Delta tables of an object store, and folded in Postgres; the package comes by `pack`."""
    words = Words.on(hosts)
    first, third = hosts.drivers.values()
    words.pack(first)
    words.put(lines_of(random.Random(seed), 50))
    status, report, told = words.ended(first, "run", "words.py:topology", "--until-idle", seconds=600)
    assert status == 0, told[-4000:]
    assert (report["messages"], report["failed"], report["dead_letters"]) == (words.messages, 0, 0)
    words.check(third)
    for worker in hosts.workers.values():
        asks = ("-c", "import stormproof.core.settings")
        assert worker.run("/mnt/venv/bin/python", *asks).returncode != 0, "a worker has the package by itself"
        assert not (worker.folder / words.name).exists(), "a worker has the driver's disk"
