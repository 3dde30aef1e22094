"""The Spark engine: a job is one Spark job, its stages joined by one exchange each.

A job goes by RDDs of byte strings: Spark hands from task to task what they send, without a look into it. Nothing of Spark
SQL is used: no plan is made and optimised, and no column is converted, which is most of the time of a small
job. PySpark's own `RDD.partitionBy` would pickle the strings and gather a thousand of them in a worker's memory. So what it
does below is done here, with the same classes of the JVM; they are the same in every Spark from 3.5 on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import shlex
import socket
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from py4j.protocol import Py4JError
from pyspark import RDD, Broadcast, SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]
from pyspark.serializers import NoOpSerializer
from pyspark.sql import SparkSession

from stormproof.core.base import failpoint
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import (
    FatalError,
    JobFailed,
    SettingsError,
    StormproofError,
    TransientError,
    UsageError,
)
from stormproof.core.base.machine_faults import classified, unpickled
from stormproof.core.base.process import process_life
from stormproof.core.engine.delta_jars import delta_jars
from stormproof.core.engine.executors import ask_executors, first_fault_of
from stormproof.core.engine.java import find_java
from stormproof.core.engine.shipping import packed, unshippable
from stormproof.core.engine.small_jobs import SMALL_JOB_MS, SmallJobs
from stormproof.core.engine.spark_error import carried, fault_in, raised_by_job, what_happened
from stormproof.core.engine.spark_settings import is_local, session_settings, without_secrets
from stormproof.core.engine.worker import end_in_silence_when_idle, granted_worker_mb, limit_memory
from stormproof.core.graph.plan import Plan
from stormproof.core.heartbeat.listener import DriverAddress
from stormproof.core.start.preflight import Probe, first_fault
from stormproof.core.task.job import Job, JobKey, StageJob, WireRow, job_report, stage_jobs
from stormproof.core.task.task import run_in_turn, run_task
from stormproof.core.tracking.verdict import JobReport

if TYPE_CHECKING:
    from stormproof.core.start.settings import Settings

Task: TypeAlias = Callable[[int, Iterable[bytes]], Iterable[bytes]]
"""What a task runs: it is given its number and what was sent to it."""

_KEY: Final = Struct("!q")


def tasks(context: SparkContext, number: int) -> RDD[Any]:
    """So many tasks, which are given nothing."""
    return context.parallelize([], number)


def run_by(rdd: RDD[Any], task: Task) -> RDD[Any]:
    """What the tasks yield, each given what the RDD has for it."""
    made = rdd.mapPartitionsWithIndex(task)
    made._bypass_serializer = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return made


def keyed(task: int, sent: bytes) -> tuple[bytes, bytes]:
    """What a task yields, one after the other, to send a string to a task of the next stage."""
    return _KEY.pack(task), sent


def exchanged(rdd: RDD[Any], number: int) -> RDD[Any]:
    """What was sent (`keyed`), in the tasks of the next stage."""
    context: Any = rdd.context
    given: Any = rdd._jrdd  # pyright: ignore[reportPrivateUsage]
    jvm: Any = context._jvm
    pairs = jvm.PairwiseRDD(given.rdd()).asJavaPairRDD().partitionBy(jvm.PythonPartitioner(number, 0))
    pairs.rdd().setSerializer(_serializer(context))
    return RDD(jvm.PythonRDD.valueOfPair(pairs), context, NoOpSerializer())


@lru_cache(maxsize=1)
def _serializer(context: Any) -> Any:
    """Serialises each string for itself; made once for Spark's context, not once a batch.

    By default Java's stream keeps the last hundred objects, to send one that comes again by its number. Chunks never come
    again, and a hundred of them fill a heap.
    """
    conf = context._jsc.sc().conf().clone().set("spark.serializer.objectStreamReset", "1")
    return context._jvm.org.apache.spark.serializer.JavaSerializer(conf)


# ---- which jobs are small: their tasks' work is less than what it costs Spark to hand rows from stage to stage


log = logging.getLogger("stormproof.spark")

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""The variable by which `spark-submit` tells its Python process where the JVM listens."""

_JVM_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
"""The variable with options of the driver's JVM; what `spark.driver.extraJavaOptions` says goes before it."""
_QUIET: Final = Path(__file__).with_name("log4j2.properties")

START_TIMEOUT_S: Final = 300.0

Between: TypeAlias = "Callable[[int, RDD[Any]], RDD[Any]]"
"""For tests: changes the wire rows before a stage, as bytes."""


def spark_session(settings: Settings, **more: str) -> SparkSession:
    """The process's Spark session, started if there is none; the first start takes 5 to 10 seconds.

    `more` are further Spark settings, with `__` for dots. The session lives until the process ends, or `stop()`.

    Raises:
        SettingsError: there is no Java or there are no Delta jars, or Spark does not start.
    """
    # Spark's JVM starts the workers, and they inherit this: which Python they run, and which process a failpoint kills.
    os.environ[failpoint.ENV_DRIVER_PID] = str(os.getpid())
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    submitted = _submitted()
    if not submitted:
        java = find_java()
        os.environ["JAVA_HOME"] = str(java.home)
        if java.options:
            known = os.environ.get("JAVA_TOOL_OPTIONS", "")
            os.environ["JAVA_TOOL_OPTIONS"] = " ".join([known, *(o for o in java.options if o not in known)]).strip()
    chosen = session_settings(settings, delta_jars(settings.delta_jars_dir), submitted)
    chosen |= {name.replace("__", "."): value for name, value in more.items()}
    master = chosen["spark.master"]
    if is_local(master):
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    elif "spark.pyspark.python" in chosen:  # executors elsewhere may have theirs in another place
        os.environ["PYSPARK_PYTHON"] = chosen["spark.pyspark.python"]  # PySpark asks the variable alone
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("stormproof")
    for name, value in chosen.items():
        builder = builder.config(name, value)
    public = without_secrets(chosen)
    try:
        with contextlib.nullcontext() if submitted else _quiet_start():
            if len(public) < len(chosen):
                _start_jvm(public)
            session = builder.getOrCreate()
    except (PySparkException, Py4JError, OSError) as error:
        raise SettingsError(
            f"Spark does not start on {master} with the Java at {os.environ.get('JAVA_HOME', '?')}: "
            f"{what_happened(str(error))}; check with: stormproof doctor",
            master=master,
        ) from error
    session.sparkContext.setLogLevel(chosen["spark.log.level"])
    return session


@contextlib.contextmanager
def _quiet_start() -> Generator[None]:
    """A JVM that starts in it logs as Spark's defaults say, without the lines that it writes at each start, unless the user
    has a configuration of log4j. From then on PySpark does not warn of pandas 3, of which a run uses nothing that it lacks.
    """
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    known = os.environ.get(_JVM_OPTIONS)
    folder = Path(os.environ.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf"))
    if "log4j" in (known or "") or [*folder.glob("log4j2*.*")]:
        yield
        return
    option = f"-Dlog4j2.configurationFile=classpath:org/apache/spark/log4j2-defaults.properties,{_QUIET}"
    os.environ[_JVM_OPTIONS] = f"{known or ''} {shlex.quote(option)}".strip()
    try:
        yield
    finally:  # the program's own children get what it had
        if known is None:
            del os.environ[_JVM_OPTIONS]
        else:
            os.environ[_JVM_OPTIONS] = known


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start Spark's JVM with these settings on its command line, unless it runs; the session hands it the others itself."""
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    SparkContext._ensure_initialized(conf=conf)  # pyright: ignore[reportPrivateUsage] - there is no public way


def _submitted() -> dict[str, str]:
    """The settings that `spark-submit` started this process with; empty where it did not."""
    if _SUBMITTED not in os.environ:
        return {}
    # Connects to the JVM that runs already; there is no public way before the context is made.
    SparkContext._ensure_initialized()  # pyright: ignore[reportPrivateUsage]
    return {name: value for name, value in SparkConf().getAll() if name.startswith("spark.")}


def drop_answer() -> None:
    """Close this thread's connection to the JVM, for a signal handler that raises: the call that it cuts may be at work, and
    this thread's next call would take that one's answer for its own. No effect without a connection.
    """
    gateway = SparkContext._gateway  # pyright: ignore[reportPrivateUsage] - there is no public way
    connection = gateway and gateway._gateway_client.get_thread_connection()  # pyright: ignore[reportPrivateUsage]
    if connection is not None:
        connection.close()


_Packed: TypeAlias = "bytes | Broadcast[bytes]"

PACKED_MAX: Final = 1 << 19
"""What is packed for a task's function may be so long, in bytes, to go with each task; what is longer is broadcast.

PySpark does that by itself from 1 MiB on, and keeps the file of its broadcast until the process ends.
"""


@dataclass(slots=True)
class _RunningJob:
    """A running job, its tag on Spark, and what was broadcast for it."""

    tag: str
    cancelled: bool = False
    broadcast: list[Broadcast[bytes]] = field(default_factory=list["Broadcast[bytes]"])

    def release(self) -> None:
        """Remove what was broadcast, here and on the executors."""
        for sent in self.broadcast:
            with contextlib.suppress(Py4JError, OSError):  # the JVM is gone, and its files with this process
                sent.destroy()


class SparkEngine:
    """Runs a job's tasks on Spark. Closing it leaves the session to whoever made it.

    `worker_memory_mb` bounds how much memory a worker may allocate, by default to what Spark grants it: see
    `stormproof.core.engine.worker`. `start_timeout_s` is how long `ask` waits for a cluster's first executor, and then
    for all answers. Jobs whose work is foretold to take `small_job_ms` at most have one task of Spark's, which runs all
    tasks in turn (see `SmallJobs`); 0: none has. `between` is for tests.

    Threads: any number may run jobs and cancel them. Forks: none may use it, since the session belongs to its process.
    """

    name = "spark"

    def __init__(
        self,
        session: SparkSession,
        parallelism: int | None = None,
        *,
        worker_memory_mb: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        small_job_ms: float = SMALL_JOB_MS,
        clock: Clock | None = None,
        between: Between | None = None,
    ) -> None:
        self._session = session
        self._tasks = functools.cache(functools.partial(tasks, session.sparkContext))
        self._parallelism = parallelism or session.sparkContext.defaultParallelism
        granted = granted_worker_mb(dict(session.sparkContext.getConf().getAll()))
        self._worker_memory_mb = granted if worker_memory_mb is None else worker_memory_mb
        self._start_timeout_s = start_timeout_s
        self._small = SmallJobs(small_job_ms)
        self._clock = clock or SystemClock()
        self._between = between
        self._life = process_life()
        self._lock = threading.Lock()
        self._running: dict[JobKey, _RunningJob] = {}

    @property
    def parallelism(self) -> int:
        """The number of source tasks that a job should have."""
        return self._parallelism

    @property
    def driver_address(self) -> DriverAddress | None:
        """Where executors reach the driver; None where they run inside its JVM."""
        conf = self._session.sparkContext.getConf()
        master = conf.get("spark.master") or ""
        if is_local(master):
            return None
        host = conf.get("spark.driver.host") or socket.gethostname()
        return DriverAddress(
            host, conf.get("spark.driver.bindAddress") or host, same_machine=master.startswith("local-cluster[")
        )

    def run(self, job: Job) -> JobReport:
        """Run one attempt to its end.

        Raises:
            JobFailed: a task failed more often than Spark repeats it, a worker or the JVM died, or `cancel` was called.
            FatalError: the JVM had died before.
            TopologyError: a function cannot be sent to a worker.
            MachineUnavailable, MachineUnfit: a task, or Spark itself, met a fault of a machine.
            StormproofError: another one that a task raised.
        """
        if not job.readers:
            raise UsageError("a job needs at least one reader")
        if process_life() != self._life:
            raise UsageError(
                f"this Spark session belongs to process {self._life.pid}, and a fork of it cannot use it: run the topology "
                "there, or in a process that was started anew"
            )
        started_s = self._clock.monotonic_s()
        parts = stage_jobs(job, self._parallelism)
        plan = self._plan
        if self._small.is_small(job, parts):
            plan = self._plan_of_small
            parts = stage_jobs(job, 1) if job.plan.hides_tasks else parts
        running = _RunningJob(f"stormproof-{uuid.uuid4().hex}")
        with self._lock:
            self._running[job.key] = running
        try:
            rows = self._collect(self._planned(lambda: plan(job.plan, parts, running)), running)
        finally:
            with self._lock:
                del self._running[job.key]
            running.release()
        elapsed_ms = (self._clock.monotonic_s() - started_s) * 1_000
        report = job_report(map(WireRow.from_bytes, rows), parts[0].tasks, {"job": elapsed_ms})
        self._small.ran(job, report)
        return report

    def ask(self, probes: Sequence[Probe]) -> None:
        """Have a task in each of Spark's slots try every probe, as one small job; on a cluster, a task on each executor.

        Raises:
            MachineUnfit: a machine cannot run tasks (it cannot import the package, say); names it, and what to do.
            MachineUnavailable, StoreUnavailable: a machine lacks something that may come back.
            FatalError: the JVM is gone.
        """
        if not is_local(str(self._session.sparkContext.master)):
            within_s = self._start_timeout_s
            answers = ask_executors(self._session, probes, self._clock, start_s=within_s, answer_s=within_s)
            fault = first_fault_of(answers)
            if fault is not None:
                raise fault
            return
        slots = max(self._session.sparkContext.defaultParallelism, self._parallelism)
        asked = functools.partial(_answer, packed(tuple(probes)), self._worker_memory_mb)
        running = _RunningJob(f"stormproof-{uuid.uuid4().hex}")
        told = self._collect(self._planned(lambda: run_by(self._tasks(slots), asked)), running)
        faults = [fault_in(text.decode()) for text in told]
        found = [fault for fault in faults if fault is not None]
        if found:
            raise min(found, key=lambda fault: isinstance(fault, TransientError))  # one that no wait mends comes first

    def cancel(self, key: JobKey) -> None:
        """End the job with this key, from another thread; its `run` raises JobFailed. No effect where none runs."""
        with self._lock:
            running = self._running.get(key)
            if running is None:
                return
            running.cancelled = True
            try:
                self._session.sparkContext.cancelJobsWithTag(running.tag)
            except (Py4JError, OSError) as error:  # the JVM is gone, and its jobs with it: their `run` says so
                log.warning("a job could not be cancelled: %s", what_happened(str(error)))

    def close(self) -> None:
        """There is nothing to release: the session is not the engine's own."""

    def _planned(self, plan: Callable[[], RDD[Any]]) -> RDD[Any]:
        try:
            return plan()
        except (Py4JError, OSError) as error:  # no job runs yet, so Spark itself does not answer
            raise FatalError(
                f"Spark is gone: its JVM has died, or the session was stopped ({what_happened(str(error))}). No message is "
                "to blame, and nothing is lost or half written; start the run again. Where it dies again, look for the "
                "JVM's end in the machine's log (was it killed for its memory?)"
            ) from error

    def _plan(self, plan: Plan, parts: tuple[StageJob, ...], running: _RunningJob) -> RDD[Any]:
        rdd = self._tasks(parts[0].tasks[0])
        for part in parts:
            rdd = exchanged(rdd, part.tasks[part.stage]) if part.stage else rdd
            rdd = self._between(part.stage, rdd) if self._between and part.stage else rdd
            rdd = run_by(rdd, self._shipped(plan, part, _run, running))
        return rdd

    def _plan_of_small(self, plan: Plan, parts: tuple[StageJob, ...], running: _RunningJob) -> RDD[Any]:
        return run_by(self._tasks(1), self._shipped(plan, parts, _run_small, running))

    def _shipped(
        self,
        plan: Plan,
        parts: StageJob | tuple[StageJob, ...],
        run: Callable[[_Packed, int | None, int, Iterable[bytes]], Iterator[bytes]],
        running: _RunningJob,
    ) -> Task:
        """The function that Spark runs."""
        try:
            data = packed(parts)
        except Exception as error:
            raise unshippable(plan, error) from error
        if len(data) <= PACKED_MAX:
            return functools.partial(run, data, self._worker_memory_mb)
        running.broadcast.append(self._session.sparkContext.broadcast(data))
        return functools.partial(run, running.broadcast[-1], self._worker_memory_mb)

    def _collect(self, rdd: RDD[Any], running: _RunningJob) -> list[bytes]:
        context = self._session.sparkContext
        try:
            context.addJobTag(running.tag)
            try:
                if running.cancelled:  # before Spark knew of the job
                    raise JobFailed("the job was cancelled")
                return rdd.collect()
            finally:
                context.removeJobTag(running.tag)
        except (PySparkException, Py4JError, OSError) as error:
            if running.cancelled:
                raise JobFailed("the job was cancelled") from error
            raise raised_by_job(error) from error


def _answer(data: bytes, memory_mb: int | None, task: int, incoming: Iterable[bytes]) -> Iterator[bytes]:
    """One slot's answer to a preflight, inside a worker."""
    end_in_silence_when_idle()
    yield from incoming  # there is none; Spark uses a worker again that has read to its end
    try:
        limit_memory(memory_mb)
        fault = first_fault(unpickled(data))
    except StormproofError as error:
        fault = error
    if fault is not None:
        yield carried(fault).encode()
    _loaded.freeze()


def _run(data: _Packed, memory_mb: int | None, task: int, incoming: Iterable[bytes]) -> Iterator[bytes]:
    """One task, inside a worker."""
    yield from _in_worker(memory_mb, lambda: _run_part(_unpacked(data), task, incoming))


def _run_small(data: _Packed, memory_mb: int | None, task: int, incoming: Iterable[bytes]) -> Iterator[bytes]:
    """All tasks of a small job, inside a worker."""
    yield from incoming
    yield from _in_worker(memory_mb, lambda: (row.to_bytes() for row in run_in_turn(_unpacked(data))))


def _unpacked(data: _Packed) -> Any:
    return unpickled(data if isinstance(data, bytes) else data.value)


def _in_worker(memory_mb: int | None, run: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    try:
        end_in_silence_when_idle()
        limit_memory(memory_mb)
        yield from run()
    except Exception as error:
        raise RuntimeError(carried(classified(error, "a task"))) from error
    _loaded.freeze()


def _run_part(part: StageJob, task: int, incoming: Iterable[bytes]) -> Iterator[bytes]:
    last = part.stage == len(part.tasks) - 1
    for row in run_task(part, task, map(WireRow.from_bytes, incoming)):
        yield from (row.to_bytes(),) if last else keyed(row.dest, row.to_bytes())
    yield from incoming  # the first stage is given nothing; Spark uses a worker again that has read to its end


class _LoadedModules:
    """Takes the modules that this worker has imported out of the garbage collector's sight.

    PySpark's worker collects garbage after every task, before the next one can start: 30 to 70 ms over the objects of
    pyarrow, numpy and pandas, in each stage of each batch. None of those objects is ever garbage.
    """

    def __init__(self) -> None:
        self._count = 0

    def freeze(self) -> None:
        """Do so if a module was imported since the last call."""
        if len(sys.modules) != self._count:
            self._count = len(sys.modules)
            gc.collect()  # else a cycle that is garbage already would be kept for ever
            gc.freeze()


_loaded: Final = _LoadedModules()
