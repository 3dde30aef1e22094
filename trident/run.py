"""Runs a topology: puts ledger, source, sinks and engine together, and takes them down again."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, cast

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from stormproof.core.arguments import lacks, shown
from stormproof.core.clock import Clock, SystemClock
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.errors import (
    Fenced,
    PositionMismatch,
    SettingsError,
    StoreUnavailable,
    StormproofError,
    TransientError,
    UsageError,
)
from stormproof.core.failpoint import failpoint
from stormproof.core.forks import kept_from_forks
from stormproof.core.graph.checks import as_guarantee
from stormproof.core.graph.compiler import compile_topology
from stormproof.core.graph.plan import Plan
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.guarantee import Guarantee
from stormproof.core.machine_faults import own_faults
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.rights import explained
from stormproof.core.settings import Settings
from stormproof.core.source.protocol import Limit, Source
from stormproof.migrations import migrate, state
from stormproof.sinks.files import files_at
from stormproof.sinks.protocol import Sink
from stormproof.sinks.registry import describe_sink
from stormproof.trident.coordinator import Coordinator
from stormproof.trident.ledger import bindings, lives
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.rows import Run
from stormproof.trident.opening import claim_table, open_bound, refusal_on_record
from stormproof.trident.options import RunOptions
from stormproof.trident.outages import outlasting_outages
from stormproof.trident.own_table import require_own_stores, require_own_tables
from stormproof.trident.preflight import Preflight
from stormproof.trident.sessions import Sessions, machine_errors
from stormproof.trident.statistics import BatchResult, RunStatistics

EngineChoice: TypeAlias = Literal["spark", "inline"] | Engine
INCARNATION_LENGTH: Final = 12
LOCK_TIMEOUT_S: Final = 15.0
IDLE_IN_TRANSACTION_S: Final = 60


def new_incarnation() -> str:
    """A new life of a topology's name; part of every transaction identifier and file name."""
    return uuid.uuid4().hex[:INCARNATION_LENGTH]


def ledger_engine(database: Database, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> sa.Engine:
    """SQLAlchemy's engine for the ledger: one connection, no check before use (a lost one is met by recovery).

    No statement waits for a lock for longer than `lock_timeout_s`, and a session that sits idle in a transaction is ended
    by the server: a paused process must not hold up a take-over for ever.
    """

    def connected() -> psycopg.Connection:
        connection = connect(database, application_name="stormproof ledger", autocommit=True)
        connection.execute(f"set lock_timeout = {int(lock_timeout_s * 1000)}".encode())
        connection.execute(f"set idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'".encode())
        connection.autocommit = False
        return connection

    def explain(context: Any) -> None:
        said = explained(context.original_exception, database, "the ledger", statement=context.statement)
        if said is not None:
            raise said from context.original_exception

    engine = sa.create_engine(database.sqlalchemy_url, creator=connected, pool_size=1, max_overflow=1)
    event.listen(engine, "handle_error", explain)
    return engine


def require_schema(engine: sa.Engine, database: Database, *, own: bool, makes: bool = True) -> None:
    """Make sure that the ledger's schema is the one that this version needs.

    Where there is none, it is made if this `makes` it: nothing is there that could be lost. `own` says that the database
    is the embedded one, where an old one is also migrated without a word.

    Raises:
        SettingsError: the schema of a user's own database is of another revision, or there is none and it is not to be made.
        StoreUnavailable: it does not answer.
        MissingRight: the role may not read it, or not make it.
    """
    try:
        found = state(engine)
    except OperationalError as error:
        reason = database.without_secrets(str(error.orig)).strip().splitlines()[0]
        raise StoreUnavailable(
            f"the database {database.redacted} does not answer: {reason}; check with: stormproof doctor"
        ) from error
    if found.up_to_date:
        return
    if found.current is None and not makes:
        where = "; an embedded Postgres belongs to one folder: is this the project's?" if own else ""
        raise SettingsError(
            f"the database {database.redacted} has no Stormproof schema yet: the first stormproof run or stormproof queue "
            f"put makes it, or, as a role that may: stormproof ledger migrate{where}",
            current=None,
            head=found.head,
        )
    if found.is_known and (own or found.current is None):
        migrate(engine)
        return
    raise SettingsError(
        f"the database {database.redacted} has schema revision {found.current}, this version needs {found.head}; "
        f"{found.advice}",
        current=found.current,
        head=found.head,
    )


def make_engine(choice: EngineChoice, settings: Settings) -> tuple[Engine, bool]:
    """The engine, and whether it is ours to close.

    Raises:
        UsageError: there is none of that name.
    """
    if choice == "inline":
        return InlineEngine(settings.parallelism or 2), True
    if choice == "spark":
        from stormproof.core.engine.spark import SparkEngine, spark_session

        session, memory_mb = spark_session(settings), settings.worker_memory_mb
        return SparkEngine(session, settings.parallelism, worker_memory_mb=memory_mb), True
    if lacks(choice, "name", "parallelism", "run", "ask", "cancel", "close"):
        raise UsageError(f"no engine {shown(choice)}; known: 'spark', 'inline', or an object such as InlineEngine(2)")
    return choice, False


def placed(plan: Plan, database: Database, settings: Settings) -> Plan:
    """The plan, with what its sinks were not told: the database and the folder of the settings."""
    sinks = [cast("Sink", spec).placed(database, settings.staging_path) for spec in plan.sink_specs]
    return replace(plan, sink_specs=tuple(sinks))


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
) -> Generator[Coordinator]:
    """Everything that one run of a topology needs, started in the order in which a failure costs least.

    The topology is compiled, the engine started and the database reached before the epoch is raised, so that a run that
    cannot start fences nobody. `guarantee` beats the topology's own, which beats exactly-once. `on_ready` is called once
    everything stands, before the first batch: the place to install signal handlers, since PySpark installs its own.

    Raises:
        TopologyError: the topology cannot be run so, or a function of it cannot be sent to a worker.
        SettingsError: a setting is missing or wrong.
        MachineUnfit: a machine cannot run tasks; names it, and what to do.
        MachineUnavailable: a machine lacks disk space or the like, and did for `outage_s`.
        StoreUnavailable: a store cannot be reached.
        PositionMismatch: source or sink are not those that the ledger knows.
    """
    chosen = as_guarantee(guarantee or topology.guarantee or Guarantee.EXACTLY_ONCE)
    plan = compile_topology(topology, chosen)
    functions = require_shippable(plan)
    settings = settings or Settings()
    clock = clock or SystemClock()
    rng = rng or random.Random()  # noqa: S311 - seeds need spread, not secrecy
    with ExitStack() as stack:
        running, ours = make_engine(engine, settings)
        if ours:
            stack.callback(running.close)
        database = settings.resolve_database()
        sql_engine = ledger_engine(database)
        stack.callback(sql_engine.dispose)
        require_schema(sql_engine, database, own=settings.uses_embedded)
        source = topology.source.for_run(database)
        plan = placed(plan, database, settings)
        ledger = Ledger(sql_engine, clock, new_incarnation)
        chosen_options = options or options_of(settings, chosen)
        preflight = Preflight(running, plan, functions, source, settings.staging_path)
        outlasting_outages(preflight, chosen_options, clock)
        # Postgres was reached just now: where it goes away again this early, it is waited for as in any later step.
        attach = partial(attached, plan, source, ledger, database)
        with own_faults():
            run, sessions = outlasting_outages(lambda: stack.enter_context(attach()), chosen_options, clock)
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
            preflight=preflight,
        )
        if on_ready is not None:
            with kept_from_forks():
                on_ready(coordinator)
        yield coordinator
        ledger.stop(run)


@contextmanager
def attached(
    plan: Plan, source: Source, ledger: Ledger, database: Database | None = None
) -> Generator[tuple[Run, Sessions]]:
    """Raise the topology's epoch, subscribe to its source and open its sinks under it; `database` is the ledger's.

    Raises:
        TopologyError: two sinks have one table.
        Fenced: another driver raised the epoch meanwhile.
        StoreUnavailable: a store did not answer; may be tried again, under a new epoch.
    """
    require_own_tables(plan)
    with ExitStack() as stack:
        failpoint("start.before_epoch")
        run = ledger.start(
            plan.topology,
            fingerprint=plan.fingerprint,
            guarantee=plan.guarantee,
            source=source.name,
            graph=graph_of(plan, source.name),
        )
        ended = stack.enter_context(_NotedEnd(ledger, run))
        failpoint("start.after_epoch")
        stack.callback(source.close)
        try:
            ended.sessions = sessions = _open_stores(plan, source, ledger, run, stack, database)
        except Fenced as error:
            raise _outrun(ledger, run, error) from error
        except TransientError:
            # A driver that took over has ended our connections: that is Fenced, and not to be tried again.
            with ledger.transaction(run):
                pass
            raise
        yield run, sessions


class _NotedEnd:
    """Notes in the ledger that a run has ended where it raised: its process may live on, as a notebook does.

    *Not guaranteed*: where another driver took over, the ledger is away, or a sink still commits after a second interrupt,
    nothing is noted.
    """

    def __init__(self, ledger: Ledger, run: Run) -> None:
        self._ledger = ledger
        self._run = run
        self.sessions: Sessions | None = None

    def __enter__(self) -> _NotedEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        commits = self.sessions is not None and self.sessions.is_adopting
        if isinstance(error, Exception | KeyboardInterrupt) and not commits:
            with suppress(StormproofError):
                self._ledger.stop(self._run)


def _outrun(ledger: Ledger, run: Run, error: Fenced) -> Fenced | PositionMismatch:
    """What it means that a store knows a newer epoch: another driver took over, or the ledger was set back."""
    with ledger.transaction(run):
        # The ledger's own fence is still ours: nobody took over by this ledger.
        return PositionMismatch(
            f"topology {run.topology!r}: {error.message}. By the ledger epoch {run.epoch} is the newest: the ledger was "
            f"restored from an older backup, or another ledger has this incarnation. Nothing was written. Inspect with: "
            f"stormproof audit verify {run.topology}; then restore the stores to the ledger's moment, or the ledger to "
            f"theirs",
            topology=run.topology,
            ledger=run.epoch,
            **{key: value for key, value in error.details.items() if key != "topology"},
        )


def _open_stores(
    plan: Plan, source: Source, ledger: Ledger, run: Run, stack: ExitStack, database: Database | None
) -> Sessions:
    source.subscribe(run.incarnation, run.epoch)
    sessions = stack.enter_context(closing(Sessions()))
    for spec in plan.sink_specs:
        sink = cast("Sink", spec)
        with refusal_on_record(ledger, run, sink.name):
            with ledger.transaction(run) as tx:
                bound = bindings.bound(tx, sink.name)
            sessions[sink.name] = session = open_bound(sink, plan.sinks[sink.name], run, bound)
            require_own_stores(plan, sessions)
            with ledger.transaction(run) as tx:
                if bound is None:
                    lives.require_known(tx, sink.name, sink.target, session.other_incarnations())
                    claim_table(session, sink.target, lives.adopted(tx))
                folder = session.writer().files_in()
                if folder is not None:
                    with machine_errors(f"sink {sink.name!r}, the folder for its files"):
                        files_at(folder).settle_folder(folder, private=True)
                description = describe_sink(sink, plan.sinks[sink.name], files=folder, ledger_database=database)
                bindings.bind(tx, sink.name, sink.target, session.table_id, description)
    return sessions


def options_of(settings: Settings, guarantee: Guarantee) -> RunOptions:
    """The run's options as the settings have them."""
    return RunOptions(
        guarantee=guarantee,
        limit=Limit(settings.batch_messages, settings.batch_bytes),
        max_batches_in_flight=settings.max_batches_in_flight,
        latency_target_s=settings.latency_target_s,
        lease_s=settings.lease_s,
        message_timeout_s=settings.message_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        pulse_root=settings.staging_path / "pulse",
        outage_s=settings.outage_s,
        poll_interval_s=settings.poll_interval_s,
    )


def run(
    topology: TopologyGraph,
    guarantee: Guarantee | str | None = None,
    *,
    settings: Settings | None = None,
    engine: EngineChoice = "spark",
    options: RunOptions | None = None,
    until_idle: bool = False,
    max_batches: int | None = None,
    on_batch: Callable[[BatchResult], None] | None = None,
    on_ready: Callable[[Coordinator], None] | None = None,
) -> RunStatistics:
    """Run a topology until nothing is left to read (`until_idle`), or for `max_batches`, or for ever.

    See `driver` for the errors before the first batch, and `Coordinator.run` for those after it.
    """
    with driver(
        topology,
        guarantee,
        settings=settings,
        engine=engine,
        options=options,
        until_idle=until_idle,
        max_batches=max_batches,
        on_batch=on_batch,
        on_ready=on_ready,
    ) as coordinator:
        return coordinator.run()
