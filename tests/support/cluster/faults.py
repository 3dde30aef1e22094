"""What may happen to a cluster while a batch runs, each with its repair."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from support.cluster.hosts import part
from support.cluster.spark_cluster import Cluster
from support.cluster.words import Words

Fault: TypeAlias = Callable[[Cluster, str], None]
"""Done to a cluster, whose driver is on the host of this name. `Cluster.heal` repairs it, but for the driver's host."""

MACHINE_OFF: Final = "a worker's machine off"

CUT_S: Final = 25.0
"""How long what is cut stays so: longer than Spark's time-out with our settings (20 s)."""


def executor_killed(cluster: Cluster, _: str) -> None:
    """The JVM of an executor, as by the kernel when memory is short; its Python daemon ends soon after it."""
    assert cluster.workers["worker1"].kill("CoarseGrainedExecutorBackend")


def python_killed(cluster: Cluster, _: str) -> None:
    """PySpark's daemon, and the workers that it forked."""
    assert cluster.workers["worker1"].kill("pyspark.daemon")


def worker_killed(cluster: Cluster, _: str) -> None:
    """Spark's worker process; its executor ends with it."""
    assert cluster.workers["worker2"].kill("worker.Worker")


def worker_unplugged(cluster: Cluster, _: str) -> None:
    """A worker's machine: nothing of it is heard, and it hears nothing."""
    cluster.network.pull_cable(cluster.workers["worker1"])


def worker_switched_off(cluster: Cluster, _: str) -> None:
    """A power failure of a worker's machine."""
    cluster.workers["worker2"].switch_off()


def master_killed(cluster: Cluster, _: str) -> None:
    """The master; a new one finds the application on its disk."""
    assert cluster.master.kill("master.Master")


def driver_and_worker_parted(cluster: Cluster, driver: str) -> None:
    """Neither hears the other; all others hear both."""
    part(cluster.drivers[driver], cluster.workers["worker1"])


def driver_not_heard(cluster: Cluster, driver: str) -> None:
    """What the driver sends to a worker is lost."""
    cluster.drivers[driver].lose(cluster.workers["worker1"])


def worker_not_heard(cluster: Cluster, driver: str) -> None:
    """What a worker sends to the driver is lost."""
    cluster.workers["worker1"].lose(cluster.drivers[driver])


def worker_and_store_parted(cluster: Cluster, _: str) -> None:
    """A worker does not reach the object store."""
    part(cluster.workers["worker1"], cluster.store.host)


def driver_and_store_parted(cluster: Cluster, driver: str) -> None:
    """The driver does not reach the object store."""
    part(cluster.drivers[driver], cluster.store.host)


def store_killed(cluster: Cluster, _: str) -> None:
    """The object store's server."""
    cluster.store.kill()


def driver_and_master_parted(cluster: Cluster, driver: str) -> None:
    """The driver does not reach Spark's master; its executors it does."""
    part(cluster.drivers[driver], cluster.master)


def worker_and_master_parted(cluster: Cluster, _: str) -> None:
    """The master gives the worker up, and tells the driver that its executor is lost, which is alive."""
    part(cluster.workers["worker2"], cluster.master)


def database_killed(cluster: Cluster, _: str) -> None:
    """The database's server: ledger, queue, and tables."""
    cluster.postgres.kill()


def driver_and_database_parted(cluster: Cluster, driver: str) -> None:
    """The driver does not reach its ledger; the tasks read on."""
    part(cluster.drivers[driver], cluster.postgres.host)


def worker_and_database_parted(cluster: Cluster, _: str) -> None:
    """A worker's tasks do not reach the queue."""
    part(cluster.workers["worker2"], cluster.postgres.host)


FAULTS: Final[dict[str, tuple[Fault, float]]] = {
    "PySpark's daemon killed": (python_killed, 0.0),
    "an executor killed": (executor_killed, 0.0),
    "a worker killed": (worker_killed, 5.0),
    "a worker's cable out": (worker_unplugged, CUT_S),
    MACHINE_OFF: (worker_switched_off, CUT_S),
    "the master killed": (master_killed, 5.0),
    "driver and worker parted": (driver_and_worker_parted, CUT_S),
    "the driver not heard by a worker": (driver_not_heard, CUT_S),
    "a worker not heard by the driver": (worker_not_heard, CUT_S),
    "a worker parted from the store": (worker_and_store_parted, CUT_S),
    "the driver parted from the store": (driver_and_store_parted, CUT_S),
    "the store killed": (store_killed, 15.0),
    "the driver parted from the master": (driver_and_master_parted, CUT_S),
    "a worker parted from the master": (worker_and_master_parted, CUT_S),
    "the database killed": (database_killed, 10.0),
    "the driver parted from the database": (driver_and_database_parted, CUT_S),
    "a worker parted from the database": (worker_and_database_parted, CUT_S),
}
"""Each fault, and how many seconds it lasts. Two at once are done in this order: an executor takes its daemon along."""


def strike(words: Words, driver: str, names: list[str]) -> None:
    """Do these faults at once, and repair them when the longest one is over.

    What is cut or killed on a machine comes before the machine's own end.
    """
    try:
        for name in sorted(names, key=lambda name: (name == MACHINE_OFF, [*FAULTS].index(name))):
            FAULTS[name][0](words.cluster, driver)
        # The length of a fault, not a wait for something.
        threading.Event().wait(max(FAULTS[name][1] for name in names))
    finally:
        words.cluster.heal()
