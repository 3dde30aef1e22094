"""Runs a topology: puts ledger, source, sinks and engine together, and takes them down again."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Final, Literal, TypeAlias, TypedDict, Unpack
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from stormproof.core.base.arguments import lacks, shown
from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import SettingsError, UsageError
from stormproof.core.base.machine_faults import own_faults
from stormproof.core.base.message import Guarantee, as_guarantee
from stormproof.core.base.process import kept_from_forks
from stormproof.core.contract.source import Limit, Source
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.graph.plan import compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.heartbeat.listener import LOOPBACK, HeartbeatListener
from stormproof.core.postgres.database import Database
from stormproof.core.source.group import SourceGroup
from stormproof.core.source.memory import MemorySource
from stormproof.core.start.preflight import DatabaseProbe
from stormproof.core.start.settings import Settings
from stormproof.sinks.contract.protocol import Sink
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.driver.control_line import BY_SIGNAL, ControlLine, Stopping
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.jobs import Watch
from stormproof.trident.driver.opening import Preflight, attached, placed, sinks_of
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.outages import outlasting_outages
from stormproof.trident.ledger.control import JobProgress
from stormproof.trident.ledger.database import ledger_engine, memory_ledger_engine, require_schema
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.telemetry.recorder import exported_lineage, exported_metrics, lineage_transport
from stormproof.trident.terms.observers import BatchResult, RunStatistics

_LEDGERS: Final[WeakKeyDictionary[Source, dict[str, sa.Engine]]] = WeakKeyDictionary()
"""By source and topology: as long as the source's object lives, more can be put into it and the topology run again."""


def ledger_in_memory(topology: str, source: Source, sinks: Iterable[Sink]) -> sa.Engine | None:
    """The ledger of a topology whose messages and rows all end with the process; None of any other."""
    sources = tuple(source.sources.values()) if isinstance(source, SourceGroup) else (source,)
    if not all(isinstance(one, MemorySource) for one in sources) or not all(
        isinstance(one, MemorySink) for one in sinks
    ):
        return None
    ledgers = _LEDGERS.setdefault(sources[0], {})
    if topology not in ledgers:
        ledgers[topology] = memory_ledger_engine()
    return ledgers[topology]


EngineChoice: TypeAlias = Literal["spark", "inline"] | Engine
INCARNATION_LENGTH: Final = 12


class RunArguments(TypedDict, total=False):
    """The keyword arguments of `run` and `Topology.run`; each may be left out."""

    settings: Settings | None
    """Default: read from the environment and the settings file."""
    engine: EngineChoice
    """``"spark"`` (the default), ``"inline"``, or an engine of your own, which the run does not close."""
    options: RunOptions | None
    """Default: as the settings say."""
    until_idle: bool
    """End the run once nothing is left to read and no retry is due. Default: wait for more messages."""
    max_batches: int | None
    """End the run after this many batches. Default: no limit."""
    on_batch: Callable[[BatchResult], None] | None
    """Called in the driver's thread after each batch."""
    on_ready: Callable[[Coordinator], None] | None
    """Called once, before the first batch: the place to install signal handlers of your own."""
    on_progress: Callable[[JobProgress], None] | None
    """Called about once a second while a batch's job runs, by a thread of its own. What it raises is logged."""
    stop: Event | None
    """Ends the run after the batches in flight, once it is set; outside the main thread no signal does."""
    accept_change: str | None
    """Take the changed topology of this fingerprint, which a refused start or a dry run showed. It may stay: a later start
    that has nothing to accept takes it as long as it was accepted once."""
    metrics_port: int | None
    """Serve the run's metrics to Prometheus there; 0: at a free port. Default: as the settings say."""


def new_incarnation() -> str:
    """The id of a new life of a topology's name; part of every transaction identifier and file name."""
    return uuid.uuid4().hex[:INCARNATION_LENGTH]


def make_engine(choice: EngineChoice, settings: Settings) -> tuple[Engine, bool]:
    """The engine, and whether the run made it and must close it.

    Raises:
        UsageError: the choice is no engine and names none.
    """
    if choice == "inline":
        return InlineEngine(settings.parallelism or 2), True
    if choice == "spark":
        spark_line()  # refuses what is no Spark before it is imported
        from stormproof.core.engine.spark import SparkEngine, spark_session

        engine = SparkEngine(
            spark_session(settings),
            settings.parallelism,
            worker_memory_mb=settings.worker_memory_mb,
            start_timeout_s=settings.start_timeout_s,
            small_job_ms=settings.small_job_ms,
        )
        return engine, True
    if lacks(choice, "name", "parallelism", "driver_address", "run", "ask", "cancel", "close"):
        raise UsageError(f"no engine {shown(choice)}; known: 'spark', 'inline', or an object such as InlineEngine(2)")
    return choice, False


def heartbeat_listener(engine: Engine, settings: Settings, options: RunOptions, clock: Clock) -> HeartbeatListener:
    """Where the tasks of this run report to.

    Raises:
        SettingsError: the driver cannot listen there.
    """
    address = engine.driver_address
    return HeartbeatListener(
        address or LOOPBACK, settings.heartbeat_port, root=options.heartbeat_root, direct=address is None, clock=clock
    )


def require_reachable(database: Database, source: Source, engine: Engine, settings: Settings) -> None:
    """Refuse the embedded Postgres where tasks on other machines read from it: it listens on this machine alone.

    Raises:
        SettingsError: says how to name another one.
    """
    address = engine.driver_address
    if not settings.uses_embedded or address is None or address.same_machine:
        return
    for probe in source.probes():
        if isinstance(probe, DatabaseProbe) and probe.database == database:
            raise SettingsError(
                f"{probe.what} is the embedded Postgres, which only this machine reaches, and tasks on other machines read "
                "from it. Name one that all of them reach: STORMPROOF_DATABASE_URL=postgresql://USER:PASSWORD@HOST:5432/"
                "DATABASE, or database_url in stormproof.toml",
                setting="database_url",
            )


@contextmanager
def driver(
    topology: TopologyGraph,
    guarantee: Guarantee | str | None = None,
    *,
    settings: Settings | None = None,
    engine: EngineChoice = "spark",
    options: RunOptions | None = None,
    until_idle: bool = False,
    max_batches: int | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    on_batch: Callable[[BatchResult], None] | None = None,
    on_ready: Callable[[Coordinator], None] | None = None,
    on_progress: Callable[[JobProgress], None] | None = None,
    stop: Event | None = None,
    accept_change: str | None = None,
    metrics_port: int | None = None,
) -> Generator[Coordinator]:
    """Start everything that one run of a topology needs, and close it at the end: `run` with the coordinator in hand.

    The topology is compiled, the engine started and the database reached before the epoch is raised, so that a run that
    cannot start fences nobody. The arguments are those of `run`; `clock` and `rng` are injected by tests.

    Raises:
        TopologyError: the topology cannot run under this guarantee, or a function of it cannot be sent to a worker.
        SettingsError: a setting is missing or wrong, or the metrics' port cannot be had.
        MachineUnfit: a machine cannot run tasks; names it, and what to do.
        MachineUnavailable: a machine has lacked disk space or the like for `outage_s`.
        StoreUnavailable: a store cannot be reached.
        PositionMismatch: the source or a sink is not the one that the ledger knows, or is given other rows than before.
        UsageError: `accept_change` is the fingerprint of no change.
    """
    chosen = as_guarantee(guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    plan = compile_topology(topology, chosen)
    functions = require_shippable(plan)
    settings = (settings or Settings()).with_metrics(metrics_port)
    if stop is not None and lacks(stop, "is_set"):
        raise UsageError(f"argument stop: {shown(stop)} is no threading.Event", argument="stop")
    if accept_change is not None and not isinstance(accept_change, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"argument accept_change: {shown(accept_change)} is no fingerprint, as a refused start shows one",
            argument="accept_change",
        )
    clock = clock or SystemClock()
    rng = rng or random.Random()  # noqa: S311 - seeds need spread, not secrecy
    with ExitStack() as stack:
        running, ours = make_engine(engine, settings)
        if ours:
            stack.callback(running.close)
        database = settings.resolve_database()
        in_memory = ledger_in_memory(topology.name, topology.source, sinks_of(plan))
        sql_engine = in_memory or ledger_engine(database)
        if in_memory is None:
            stack.callback(sql_engine.dispose)
            require_schema(sql_engine, database, own=settings.uses_embedded)
        metrics = stack.enter_context(exported_metrics(topology.name, settings, clock))
        transport = lineage_transport(settings)
        source = topology.source.for_run(database)
        require_reachable(database, source, running, settings)
        source.begin(chosen)
        plan = placed(plan, database, settings)
        ledger = Ledger(sql_engine, clock, new_incarnation)
        chosen_options = options or options_of(settings, chosen)
        listener = stack.enter_context(heartbeat_listener(running, settings, chosen_options, clock))
        staging = settings.staging_address if running.driver_address is None else None
        preflight = Preflight(running, plan, functions, source, staging, listener)
        outlasting_outages(preflight, chosen_options, clock)
        # Postgres was reached just now; if it goes away again this early, the run waits for it as in any later step.
        attach = partial(attached, plan, source, ledger, database, accept_change)
        with own_faults():
            run, sessions = outlasting_outages(lambda: stack.enter_context(attach()), chosen_options, clock)
        if metrics is not None:
            metrics.began(run, chosen, source, sessions)
        lineage = stack.enter_context(
            exported_lineage(
                *(transport, settings, plan, source, run, chosen, clock),
                streaming=not until_idle,
                count=None if metrics is None else metrics.lineage_event,
            )
        )
        watch = Watch.of(plan, chosen_options, listener, on_progress)
        coordinator = Coordinator(
            plan,
            source,
            sessions,
            ledger,
            run,
            running,
            options=replace(chosen_options, until_idle=until_idle, max_batches=max_batches),
            clock=clock,
            rng=rng,
            on_batch=on_batch,
            watch=watch,
            preflight=preflight,
            metrics=metrics,
            observers=lineage,
            stop=stop,
        )
        if in_memory is None:  # one in memory is seen by no operator
            control_line = ControlLine(
                engine=ledger_engine(database),
                run=run,
                stop_requests=coordinator.stop_requests,
                in_flight=lambda: coordinator.in_flight,
                job=lambda: watch.lowest,
                heard=None if metrics is None else metrics.recorder.heard,
            )
            outlasting_outages(control_line.hear_first, chosen_options, clock)
            stack.enter_context(control_line)
        if on_ready is not None:
            with kept_from_forks():
                on_ready(coordinator)
        yield coordinator
        ledger.stop(run)


def options_of(settings: Settings, guarantee: Guarantee) -> RunOptions:
    """The options of a run as the settings say."""
    return RunOptions(
        guarantee=guarantee,
        limit=Limit(settings.batch_messages, settings.batch_bytes),
        max_batches_in_flight=settings.max_batches_in_flight,
        latency_target_s=settings.latency_target_s,
        lease_s=settings.lease_s,
        message_timeout_s=settings.message_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        heartbeat_root=settings.heartbeat_path,
        outage_s=settings.outage_s,
        poll_interval_s=settings.poll_interval_s,
        rejects_max_share=settings.rejects_max_share,
    )


def run(
    topology: TopologyGraph, guarantee: Guarantee | str | None = None, **arguments: Unpack[RunArguments]
) -> RunStatistics:
    """Run a topology until it is stopped, idle (`until_idle`) or at `max_batches`; `RunArguments` has all arguments.

    In the main thread SIGINT and SIGTERM end it after the batches in flight, and its statistics are returned; a second one
    ends it at once. See `Stopping`.

    `guarantee` beats the topology's own, which beats exactly-once. See `driver` for the errors before the first batch, and
    `Coordinator.run` for those after it.
    """
    unknown = sorted(arguments.keys() - RunArguments.__annotations__.keys())
    if unknown:  # type checkers know `RunArguments`, Python does not
        known = ", ".join(RunArguments.__annotations__)
        raise TypeError(f"run() got an unexpected keyword argument {unknown[0]!r}; known: {known}")
    theirs = arguments.pop("on_ready", None)
    with Stopping() as stopping:

        def ready(coordinator: Coordinator) -> None:
            stopping.attach(coordinator)
            if theirs is not None:
                theirs(coordinator)

        arguments["on_ready"] = ready
        with driver(topology, guarantee, **arguments) as coordinator:
            found = coordinator.run()
    return replace(found, stopped=BY_SIGNAL) if stopping.asked else found  # also where it came when all was done
