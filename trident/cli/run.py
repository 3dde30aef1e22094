"""`run`: loads a topology and drives it, with progress, a log line for each txid, and an orderly end on a signal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn, cast

from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import Guarantee, as_guarantee
from stormproof.core.start.settings import Settings
from stormproof.trident.cli.loading import load_topology
from stormproof.trident.cli.logs import RunProgress, logging_to_stderr, run_text
from stormproof.trident.cli.options import spark_options
from stormproof.trident.cli.output import Exit, emit, finish, say
from stormproof.trident.driver.control_line import BY_SIGNAL, Stopping, end_jvm
from stormproof.trident.driver.dry_run import DryRunOutcome, rehearsed_topology
from stormproof.trident.driver.run import EngineChoice, driver, options_of
from stormproof.trident.ledger.control import JobProgress
from stormproof.trident.terms.observers import BatchResult, RunStatistics

if TYPE_CHECKING:
    from types import ModuleType

    from stormproof.core.graph.topology import TopologyGraph

log = logging.getLogger("stormproof.run")

ENGINES: Final = ("spark", "inline")
_DRY_RUN_ENDS: Final = {DryRunOutcome.REFUSE: Exit.FAILED, DryRunOutcome.CANNOT_TELL: Exit.CANNOT_TELL}


def run_topology(
    target: str,
    *,
    param: Sequence[str] | None,
    guarantee: str | None,
    engine: str,
    conf: Sequence[str] | None,
    until_idle: bool,
    max_batches: int | None,
    dry_run: bool,
    accept_change: str | None,
    as_json: bool,
    **chosen: float | str | None,
) -> None:
    """Run a topology; end with status 130 if a signal stopped it. `chosen` are settings, those that are not None."""
    engine_choice = engine_named(engine)
    settings = Settings(**{name: value for name, value in chosen.items() if value is not None})
    settings = settings.with_spark(spark_options(conf or ()))
    topology, module = load_topology(target, param or ())
    if dry_run:
        rehearse(topology, None if guarantee is None else as_guarantee(guarantee), settings, as_json=as_json)
    promised = as_guarantee(guarantee or topology.guarantee or "exactly-once")
    statistics = drive(
        *(topology, module, promised, settings, engine_choice),
        until_idle=until_idle,
        max_batches=max_batches,
        accept_change=accept_change,
    )
    emit(statistics, as_json=as_json, text=lambda: say(run_text(statistics)))
    finish(ends_with(statistics))


def rehearse(topology: TopologyGraph, guarantee: Guarantee | None, settings: Settings, *, as_json: bool) -> NoReturn:
    """Say what a start and its first batch would do, and end."""
    told = rehearsed_topology(topology, guarantee, settings=settings)
    emit(told.to_json(), as_json=as_json, text=lambda: say(str(told)))
    finish(_DRY_RUN_ENDS.get(told.outcome, Exit.DONE))


def ends_with(statistics: RunStatistics) -> Exit:
    """The exit status after a run."""
    return Exit.INTERRUPTED if statistics.stopped == BY_SIGNAL else Exit.DONE


def drive(
    topology: TopologyGraph,
    module: ModuleType,
    promised: Guarantee,
    settings: Settings,
    engine: EngineChoice,
    *,
    until_idle: bool,
    max_batches: int | None = None,
    accept_change: str | None = None,
    on_batch: Callable[[BatchResult], None] = lambda _: None,
) -> RunStatistics:
    """Run a topology of this module with progress and log lines; signals end it in order."""
    with (
        logging_to_stderr(settings.log_level, settings.log_format) as progress,
        Stopping(at_once=_end_process) as stopping,
    ):
        if engine == "spark":
            _ship_by_value(module)
            log.info("starting Spark (%s) and reaching Postgres for topology %r ...", settings.master, topology.name)
        live = Live(topology.name, progress)

        def noted(result: BatchResult) -> None:
            on_batch(result)
            live.on_batch(result)

        with driver(
            topology,
            promised,
            settings=settings,
            engine=engine,
            options=options_of(settings, promised),
            until_idle=until_idle,
            max_batches=max_batches,
            on_batch=noted,
            on_progress=live.on_progress,
            on_ready=stopping.attach,
            accept_change=accept_change,
        ) as coordinator:
            log.info("running %r %s on %s; Ctrl-C stops it in order", topology.name, promised, engine)
            if coordinator.metrics_url is not None:
                log.info("metrics: %s", coordinator.metrics_url)
            progress("waiting for the first batch ...")
            return coordinator.run()


def engine_named(name: str) -> EngineChoice:
    """What `--engine` names."""
    if name == "spark":
        return "spark"
    if name == "inline":
        return "inline"
    raise UsageError(f"--engine {name}: known are {', '.join(ENGINES)}")


def _ship_by_value(module: ModuleType) -> None:
    """Pickle the module's functions whole: executors cannot import a file that was loaded by its path."""
    from pyspark import cloudpickle

    register = cast("Callable[[ModuleType], None]", cloudpickle.register_pickle_by_value)
    register(module)


class Live:
    """The line of progress: what is committed, and how far the job that runs is."""

    def __init__(self, topology: str, show: Callable[[str], None]) -> None:
        self._total, self._show = RunProgress(RunStatistics(topology, "", 0)), show
        self._jobs: dict[int, JobProgress] = {}

    def on_batch(self, result: BatchResult) -> None:
        """Show what is committed now."""
        self._total = self._total.after(result)
        self._jobs.pop(result.txid, None)
        self._show(self._total.text)

    def on_progress(self, job: JobProgress) -> None:
        """Show the job of the lowest txid, the next that commits; it comes first, since a narrow terminal cuts the end."""
        self._jobs[job.txid] = job
        lowest = min(self._jobs.copy().values(), key=lambda one: one.txid)
        self._show(f"{lowest.bar} {lowest}; {self._total.text}".lstrip())


def _end_process() -> None:
    """End as a crash does. An embedded Postgres keeps running for its other users."""
    end_jvm()
    os._exit(Exit.INTERRUPTED)
