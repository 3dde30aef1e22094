"""Drivers that die or stand still: a topology is run in a child process, forked from one that has everything loaded."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal, Protocol

from stormproof import Topology
from stormproof.core.base import failpoint
from stormproof.core.base.errors import Fenced, StoreUnavailable
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import driver, options_of
from support.topologies import SinkMode, topology

BATCH_MESSAGES = 5
DRIVER_TIMEOUT_S = 60
FENCED = 3
"""The exit status of a driver that stopped with `Fenced`; as of the command line."""
UNAVAILABLE = 69
"""The exit status of a driver that gave up with `StoreUnavailable`."""
FAILED = 1
"""The exit status of a driver that stopped with any other error."""
KILLED = -signal.SIGKILL
NOT_BROKEN = 98
"""The exit status of a driver whose sabotage found nothing to break: it must not look like one that failed of it."""


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
    outage_s: float = 60.0
    in_flight: int = 1
    """So many batches run while the lowest commits; from 2 on each job has a thread of its own."""
    rejects_max_share: float = 0.1
    sabotage: Callable[[], None] | None = None
    """Breaks the code in the child, for a negative control: see `support.sabotage`."""
    build: Callable[[Cell], Topology] | None = None
    """Another topology than `support.topologies` has; a function of a module."""


PRELOADED = [
    "stormproof.trident.driver.run",
    "stormproof.trident.driver.opening",
    "stormproof.trident.cli.output",
    "stormproof.trident.topology.stream",
    "stormproof.core.source.postgres_queue",
    "stormproof.sinks.delta.sink",
    "stormproof.sinks.postgres.sink",
    "stormproof.core.engine.frame",
    "stormproof.trident.streaming.foreach_batch",
    "stormproof.trident.streaming.sinks",
    "stormproof.trident.streaming.api",
    "stormproof.trident.state.query",
    "stormproof.trident.state.delta",
    "stormproof.trident.state.key_value",
    "stormproof.trident.state.postgres",
    "adbc_driver_postgresql.dbapi",
    "pandas",
    "pyarrow.acero",
    "sqlglot.dialects.spark",
]
"""What the fork server imports before it forks: all that a driver without Spark needs; none of it starts a thread.

Installed modules only: the fork server of Python 3.11 does not get the tests' `sys.path`, and leaves out in silence what it
cannot import.
"""


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Driver(Protocol):
    """A driver's process, as `multiprocessing` shows it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


def start(cell: Cell, environment: Mapping[str, str]) -> Driver:
    """Start one driver; it runs until its queue is idle, or until a failpoint ends it."""
    return child_of(drive_and_exit, (cell, "inline", dict(environment)))


def child_of(target: Callable[..., None], args: tuple[object, ...]) -> Driver:
    """A process that runs a module's function, forked with everything loaded."""
    child = _context().Process(target=target, args=args, daemon=True)
    child.start()
    return child


def run_driver(cell: Cell, armed: str = "", log: Path | None = None) -> int:
    """Run one driver to its end; its exit status, or the negative number of the signal that killed it."""
    environment = {failpoint.ENV: armed}
    if log is not None:
        environment[failpoint.ENV_LOG] = str(log)
    return ended(start(cell, environment), f"{cell.name} (armed: {armed!r})")


def ended(child: Driver, what: str, within_s: float = DRIVER_TIMEOUT_S) -> int:
    """How a driver ended; killed, and an error, where it does not end in time."""
    child.join(within_s)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError(f"the driver of {what} did not end within {within_s} s")
    if child.exitcode == NOT_BROKEN:
        raise RuntimeError(f"the sabotage of {what} breaks nothing any more: see its standard error")
    return child.exitcode


@contextmanager
def paused_driver(cell: Cell, point: str) -> Generator[Driver]:
    """A driver that stands still at a failpoint (``NAME`` or ``NAME=pause@K``); it never outlives the block."""
    child = start(cell, {failpoint.ENV: point if "=" in point else f"{point}=pause"})
    try:
        wait_paused(child, point)
        yield child
    finally:
        child.kill()
        child.join()


def wait_paused(child: Driver, point: str) -> None:
    """Return once the driver stands still; an error where it ended instead."""
    stands = stood_still(child, point)
    assert stands, f"the driver never stood still at {point}: it ended with {child.exitcode}"


def stood_still(child: Driver, what: str, within_s: float = DRIVER_TIMEOUT_S) -> bool:
    """Return once the driver stands still (True) or has ended (False)."""
    until_s = time.monotonic() + within_s
    while not is_paused(child):
        if child.exitcode is not None:
            return False
        assert time.monotonic() < until_s, f"the driver of {what} neither ended nor stood still within {within_s} s"
        child.join(0.01)  # returns at once where it ends
    return True


def is_paused(child: Driver) -> bool:
    """Whether the kernel says that it was stopped by a signal."""
    try:
        return Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except (FileNotFoundError, ProcessLookupError):  # gone, before or while it was read
        return False


def resume(child: Driver) -> None:
    """Let it go on from where it stands."""
    assert child.pid is not None
    os.kill(child.pid, signal.SIGCONT)


def arming(point: failpoint.Failpoint, *, twice: bool) -> list[str]:
    """What is armed at the starts that kill a driver at a place, one text a start; the last start is unarmed."""
    kill = f"{point.name}=kill"
    again = [kill] if twice else []  # mostly in recovery
    match point.scope:
        case "recovery" | "abort":
            return ["task.after_file=kill", kill, *again]  # a batch in hand, with files
        case "retry":
            return [f"task.after_file=error;{kill}", *again]
        case _:
            # The first start dies in its second batch where there is one more than once a start.
            return [f"{kill}@2" if point.name.startswith(("open.", "finish.", "prepare.")) else kill, *again]


def drive(cell: Cell, engine: Literal["inline", "spark"], armed: Mapping[str, str]) -> None:
    """Run one driver in this process, as a child does; nothing of the environment but `armed` counts."""
    for key in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[key]
    settings = Settings(
        database_url=cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=cell.folder / "home",
        batch_messages=cell.batch_messages,
        master="local[2,4]",
    )
    os.environ.update({k: v for k, v in armed.items() if v})
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    if cell.sabotage is not None:
        cell.sabotage()
    if cell.build is None:
        built = topology(cell.name, cell.mode, cell.folder, cell.database, cell.queue)
    else:
        built = cell.build(cell)
    options = replace(
        options_of(settings, cell.guarantee),
        outage_s=cell.outage_s,
        max_batches_in_flight=cell.in_flight,
        rejects_max_share=cell.rejects_max_share,
    )
    with driver(
        built, cell.guarantee, settings=settings, engine=engine, options=options, until_idle=True, rng=random.Random(1)
    ) as coordinator:
        coordinator.run()


def drive_and_exit(cell: Cell, engine: Literal["inline", "spark"], environment: Mapping[str, str]) -> None:
    """As `drive`, with an exit status for each way to end."""
    try:
        drive(cell, engine, environment)
    except Fenced:
        sys.exit(FENCED)
    except StoreUnavailable as error:
        print(f"unavailable: {error}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
