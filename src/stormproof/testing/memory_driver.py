"""A driver over stores in memory: the production coordinator, with its ledger in an SQLite database in memory."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from stormproof.core.base.clock import Clock
from stormproof.core.contract.source import Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.jobs import Jobs, Watch
from stormproof.trident.driver.opening import attached
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.terms.observers import BatchResult, RunStatistics


def run_driver(
    plan: Plan,
    source: Source,
    ledger: Ledger,
    engine: Engine,
    options: RunOptions,
    *,
    clock: Clock,
    rng: Random,
    jobs: Jobs | None = None,
    watch: Watch | None = None,
    on_batch: Callable[[BatchResult], None] | None = None,
) -> RunStatistics:
    """Run one driver, from taking its epoch to an orderly stop. What ends it otherwise is raised, as by a production run.

    Raises:
        StormproofError: whatever `Coordinator.run` raises.
    """
    with attached(plan, source, ledger) as (run, sessions):
        coordinator = Coordinator(
            plan,
            source,
            sessions,
            ledger,
            run,
            engine,
            options=options,
            clock=clock,
            rng=rng,
            jobs=jobs,
            watch=watch,
            on_batch=on_batch,
        )
        statistics = coordinator.run()
        ledger.stop(run)
    return statistics
