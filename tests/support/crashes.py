"""Drivers that die: a topology is run in a child process, forked from one that has everything loaded."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from support.topologies import SinkMode

from stormproof.core import failpoint
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database

BATCH_MESSAGES = 5
DRIVER_TIMEOUT_S = 60
FAILED = 70


@dataclass(frozen=True, slots=True)
class Cell:
    """One topology over one queue into one sink (None: all four), under one guarantee."""

    name: str
    mode: SinkMode | None
    guarantee: Guarantee
    folder: Path
    database: Database
    queue: str
    batch_messages: int = BATCH_MESSAGES


PRELOADED = [
    "stormproof.trident.run",
    "stormproof.trident.stream",
    "stormproof.core.source.postgres_queue",
    "stormproof.sinks.delta",
    "stormproof.sinks.postgres",
    "adbc_driver_postgresql.dbapi",
    "pandas",
]
"""What the fork server imports before it forks: all that a driver without Spark needs; none of it starts a thread.

Installed modules only: the fork server of Python 3.11 does not get the tests' `sys.path`, and leaves out in silence what it
cannot import.
"""


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(cell: Cell, environment: Mapping[str, str]) -> multiprocessing.process.BaseProcess:
    """Start one driver; it runs until its queue is idle, or until a failpoint ends it."""
    child = _context().Process(target=_drive, args=(cell, dict(environment)), daemon=True)
    child.start()
    return child


def run_driver(cell: Cell, armed: str = "", log: Path | None = None) -> int:
    """Run one driver to its end; 0, the negative number of the signal that killed it, or `FAILED`."""
    environment = {failpoint.ENV: armed}
    if log is not None:
        environment[failpoint.ENV_LOG] = str(log)
    child = start(cell, environment)
    child.join(DRIVER_TIMEOUT_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError(f"the driver of {cell.name} did not end within {DRIVER_TIMEOUT_S} s (armed: {armed!r})")
    return child.exitcode


KILLED = -signal.SIGKILL


def _drive(cell: Cell, environment: dict[str, str]) -> None:
    import logging
    import random

    from support.topologies import topology

    from stormproof.core.settings import Settings
    from stormproof.trident.run import driver

    for key in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[key]
    settings = Settings(
        database_url=cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=cell.folder / "home",
        batch_messages=cell.batch_messages,
    )
    os.environ.update({k: v for k, v in environment.items() if v})
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    built = topology(cell.name, cell.mode, cell.folder, cell.database, cell.queue)
    with driver(
        built, cell.guarantee, settings=settings, engine="inline", until_idle=True, rng=random.Random(1)
    ) as coordinator:
        coordinator.run()
