"""A driver over stores in memory: the production coordinator, with its ledger in an SQLite database in memory."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable
from random import Random
from typing import Final, cast

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection

from stormproof.core.clock import Clock
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.source.protocol import Source
from stormproof.trident.coordinator import Coordinator
from stormproof.trident.job_runners import Jobs
from stormproof.trident.ledger import tables
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.opening import attached
from stormproof.trident.options import RunOptions
from stormproof.trident.statistics import BatchResult, RunStatistics
from stormproof.trident.watched_job import Watch

_STATEMENTS: Final[dict[object, object]] = {}
"""SQLAlchemy's compiled statements, shared by all of these databases: else each one would compile every statement."""


def memory_ledger_engine() -> sa.Engine:
    """A new database in memory with the ledger's tables. It lasts as long as the engine."""
    model, content = _model()

    def connect() -> DBAPIConnection:
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.deserialize(content)
        return cast("DBAPIConnection", connection)

    engine = sa.Engine(sa.pool.StaticPool(connect), model.dialect, model.url)
    return engine.execution_options(compiled_cache=_STATEMENTS)


@functools.cache
def _model() -> tuple[sa.Engine, bytes]:
    """An engine whose dialect the others share, and a database with the ledger's empty tables. Made once a process."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
    with engine.execution_options(schema_translate_map={tables.SCHEMA: None}).begin() as connection:
        tables.metadata.create_all(connection)
    with engine.connect() as connection:
        held: sqlite3.Connection | None = connection.connection.driver_connection
        assert held is not None
        return engine, held.serialize()


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
