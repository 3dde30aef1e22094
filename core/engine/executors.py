"""Asks each executor of a cluster for what its tasks need, as one small job, within a bound.

Everything that Spark itself reports while a worker starts (no such Python, another version of it) ends the job, and is told
with the host; whatever a task can still say, it says for itself.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import FatalError, MachineUnavailable, MachineUnfit, StormproofError
from stormproof.core.base.machine_faults import SHIP
from stormproof.core.engine import executor_look
from stormproof.core.engine.shipping import packed
from stormproof.core.engine.spark_error import fault_in, raised_by_job, what_happened
from stormproof.core.start.preflight import Probe

log = logging.getLogger("stormproof.spark")

HOLDS_S: Final = (0.0, 0.5, 2.0)
"""How long each round's tasks keep their slots: an executor that is slow to start is asked in a later round."""

POLL_S: Final = 0.25
TELL_AFTER_S: Final = 5.0
SKEW_MAX_S: Final = 1.0
"""A clock that is further away than this is worth a warning: logs of two machines cannot be laid side by side."""

_cloudpickle: Final[Any] = cloudpickle  # it has no types


@dataclass(frozen=True, slots=True)
class ExecutorAnswer:
    """What one executor said of itself. `skew_s` is how far its clock is ahead of the driver's, at the least; `faults` are
    what a task would not survive there.
    """

    host: str
    executor: int
    """The process id of the executor's own Python daemon."""
    python: str
    executable: str
    packages: dict[str, str]
    skew_s: float
    faults: tuple[StormproofError, ...]


@dataclass(frozen=True, slots=True)
class ExecutorAnswers:
    """The answers, one an executor, by host; and how many executors Spark has."""

    answers: tuple[ExecutorAnswer, ...]
    known: int


@dataclass(frozen=True, slots=True)
class DriverProbe:
    """The driver's address, which executors connect to."""

    host: str
    port: int

    def probe(self) -> None:
        """Connect, and close."""
        try:
            socket.create_connection((self.host, self.port), timeout=10).close()
        except OSError as error:
            host = socket.gethostname()
            raise MachineUnfit(
                f"the driver ({self.host}:{self.port}) is not reached from {host}: {error}. No message was opened. Set "
                "spark.driver.host to a name or address by which the executors reach the driver, and let a firewall pass "
                "spark.driver.port and spark.blockManager.port",
                host=host,
                error=type(error).__name__,
            ) from error


def own_answer() -> ExecutorAnswer:
    """The driver's own facts, to compare with."""
    return answer_of(json.loads(executor_look.looked(pickle.dumps(()), 0.0)), 0.0, float("inf"))


def ask_executors(
    session: SparkSession, probes: Sequence[Probe], clock: Clock, *, start_s: float, answer_s: float
) -> ExecutorAnswers:
    """Have a task on each executor look at its machine and try every probe.

    It waits for the first executor for `start_s`, and for all answers for `answer_s`.

    Raises:
        MachineUnfit: a worker does not start (no such Python, another version); names the host.
        MachineUnavailable: no executor came, or not every answer did, within the time.
        FatalError: Spark has ended.
    """
    hosts = wait_for_executors(session, clock, start_s)
    _cloudpickle.register_pickle_by_value(executor_look)
    context = session.sparkContext
    conf = context.getConf()
    driver = DriverProbe(conf.get("spark.driver.host", ""), int(conf.get("spark.driver.port", "0")))
    data = packed((driver, *probes))
    found: dict[tuple[str, int], ExecutorAnswer] = {}
    ends_s = clock.monotonic_s() + answer_s + (0.0 if hosts else start_s)
    for hold_s in HOLDS_S:
        before = clock.now().timestamp()
        left_s = max(1.0, ends_s - clock.monotonic_s())
        texts = _collected(session, partial(executor_look.looked, data, hold_s), left_s, hosts)
        after = clock.now().timestamp()
        for text in texts:
            answer = answer_of(json.loads(text), before, after)
            found[answer.host, answer.executor] = answer
        hosts = _hosts(session)
        if len(found) >= len(hosts) or clock.monotonic_s() >= ends_s:
            break
    return ExecutorAnswers(tuple(found[key] for key in sorted(found)), max(len(found), len(hosts)))


def first_fault_of(answers: ExecutorAnswers) -> StormproofError | None:
    """The fault to mend first: one that no wait mends comes before one that may pass."""
    faults = [fault for answer in answers.answers for fault in answer.faults]
    return min(faults, key=lambda fault: not isinstance(fault, FatalError), default=None)


def answer_of(told: dict[str, Any], before: float, after: float) -> ExecutorAnswer:
    """What an executor said, read; the job began before `before` and ended at `after`."""
    host, python = str(told["host"]), str(told["executable"])
    missing = {str(name): str(text) for name, text in told["missing"].items()}
    faults: list[StormproofError] = []
    if missing:
        text = missing.get("stormproof") or next(iter(missing.values()))
        faults.append(
            MachineUnfit(
                f"{host} cannot import {', '.join(missing)} with {python} (Python {told['python']}): {text}. No message was "
                f"opened, and none is to blame. What to do: {SHIP}",
                host=host,
                modules=[*missing],
                error="import",
            )
        )
    found = [fault_in(text) for text in told["faults"]]
    time_s = float(told["time_s"])
    skew_s = time_s - after if time_s > after else min(0.0, time_s - before)
    return ExecutorAnswer(
        host,
        int(told["executor"]),
        str(told["python"]),
        python,
        dict(told["packages"]),
        skew_s,
        (*faults, *(fault for fault in found if fault is not None)),
    )


def _hosts(session: SparkSession) -> list[str]:
    """The host of each executor that Spark has now; the driver counts there as one, too."""
    try:
        # The one public list of executors, in Scala's and Java's interface alone.
        java: Any = session.sparkContext._jsc  # pyright: ignore[reportPrivateUsage]
        hosts = [str(info.host()) for info in java.sc().statusTracker().getExecutorInfos()]
    except (Py4JError, OSError) as error:
        raise FatalError(
            f"Spark has ended while executors were waited for: {what_happened(str(error))}. Look at the master's page, or "
            "its log: it gives up an application whose executors end as soon as they start"
        ) from error
    driver = session.sparkContext.getConf().get("spark.driver.host", "")
    if driver in hosts:
        hosts.remove(driver)
    return hosts


def wait_for_executors(session: SparkSession, clock: Clock, within_s: float) -> list[str]:
    """The hosts of the executors, once there is one; where Spark starts them for a job alone, those that there are.

    Raises:
        MachineUnavailable: none has come within the time.
        FatalError: Spark has ended.
    """
    began_s, told = clock.monotonic_s(), False
    conf = session.sparkContext.getConf()
    while not (hosts := _hosts(session)) and conf.get("spark.dynamicAllocation.enabled", "false") != "true":
        waited_s = clock.monotonic_s() - began_s
        master, host = conf.get("spark.master", "?"), conf.get("spark.driver.host", "?")
        if waited_s >= within_s:
            raise MachineUnavailable(
                f"no executor of {master} has come to the driver ({host}) within {within_s:.0f} s. No message was opened. "
                "See there whether the cluster has free cores and memory for one executor (spark.executor.cores, "
                f"spark.executor.memory), and whether the executors' machines reach the driver by the name {host} "
                "(spark.driver.host); an executor's own log says why it ended. A standalone master that was started anew "
                "without spark.deploy.recoveryMode, or that lost its connection to the driver, gives this driver no "
                "executor any more: start the run again",
                host=str(host),
                error="no executor",
            )
        if waited_s >= TELL_AFTER_S and not told:
            told = True
            log.warning("waiting for the first executor of %s, for %d s at the most", master, within_s)
        clock.sleep(POLL_S)
    return hosts


def _collected(session: SparkSession, look: partial[str], within_s: float, hosts: Sequence[str]) -> list[str]:
    context = session.sparkContext
    tag, late = f"stormproof-{uuid.uuid4().hex}", threading.Event()

    def cancel() -> None:
        late.set()
        context.cancelJobsWithTag(tag)

    slots = max(2, context.defaultParallelism)
    timer = threading.Timer(within_s, cancel)
    timer.daemon = True
    context.addJobTag(tag)
    timer.start()
    try:
        return context.parallelize(range(slots), slots).map(lambda _: look()).collect()
    except (PySparkException, Py4JError, OSError) as error:
        if late.is_set():
            raise MachineUnavailable(
                f"not every executor has answered within {within_s:.0f} s. No message was opened. An executor's own log "
                "says what its Python is waiting for",
                error="no answer",
            ) from error
        raise with_hosts(hosts, raised_by_job(error)) from error
    finally:
        timer.cancel()
        context.removeJobTag(tag)


def with_hosts(hosts: Sequence[str], fault: StormproofError) -> StormproofError:
    """The fault with the executors' hosts where Spark's own text names none, as when a worker's Python is another one."""
    if not isinstance(fault, MachineUnfit) or "host" in fault.details:
        return fault
    names = ", ".join(sorted(set(hosts)))
    return MachineUnfit(f"An executor ({names}) is unfit. {fault.message}", **fault.details, host=names)
