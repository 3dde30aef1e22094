"""`run`: loads a topology and drives it, with progress, one log line a txid, and an orderly end on a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from stormproof.core.errors import UsageError
from stormproof.core.graph.checks import as_guarantee
from stormproof.core.settings import Settings
from stormproof.trident.cli.loading import load_topology
from stormproof.trident.cli.logs import logging_to_stderr
from stormproof.trident.cli.output import Exit, emit, finish, note, say
from stormproof.trident.cli.run_text import Progress, run_text
from stormproof.trident.run import EngineChoice, driver, options_of
from stormproof.trident.statistics import BatchResult

if TYPE_CHECKING:
    from types import FrameType, ModuleType

ENGINES: Final = ("spark", "inline")
STOPPED_BY_SIGNAL: Final = "signal"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL_S: Final = 0.3
"""Who ends a process group often signals process and group: that is one wish, not two."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The command's options."""

    target: str
    guarantee: str | None = None
    until_idle: bool = False
    parameters: tuple[str, ...] = ()
    max_messages: int | None = None
    max_bytes: int | None = None
    interval_s: float | None = None
    in_flight: int | None = None
    latency_target_s: float | None = None
    engine: str = "spark"
    max_batches: int | None = None
    log_format: str | None = None
    as_json: bool = False


def run_topology(request: RunRequest) -> None:
    """Run, and end with status 130 where a signal ended it."""
    engine = _engine(request.engine)
    settings = _settings(request)
    topology, module = load_topology(request.target, request.parameters)
    guarantee = as_guarantee(request.guarantee or topology.guarantee or "exactly-once")
    with logging_to_stderr(settings.log_level, settings.log_format) as progress, Stopping() as stopping:
        if engine == "spark":
            _ship_by_value(module)
            note(f"starting Spark ({settings.master}) and reaching Postgres for topology {topology.name!r} ...")
        with driver(
            topology,
            guarantee,
            settings=settings,
            engine=engine,
            options=options_of(settings, guarantee),
            until_idle=request.until_idle,
            max_batches=request.max_batches,
            on_batch=_progress_of(topology.name, progress),
            on_ready=stopping.attach,
        ) as coordinator:
            note(f"running {topology.name!r} {guarantee} on {request.engine}; Ctrl-C stops after what is in flight")
            progress("waiting for the first batch ...")
            statistics = coordinator.run()
    emit(statistics, as_json=request.as_json, text=lambda: say(run_text(statistics)))
    finish(Exit.INTERRUPTED if statistics.stopped == STOPPED_BY_SIGNAL else Exit.DONE)


def _engine(name: str) -> EngineChoice:
    if name == "spark":
        return "spark"
    if name == "inline":
        return "inline"
    raise UsageError(f"--engine {name}: known are {', '.join(ENGINES)}")


def _settings(request: RunRequest) -> Settings:
    chosen = {
        "batch_messages": request.max_messages,
        "batch_bytes": request.max_bytes,
        "poll_interval_s": request.interval_s,
        "max_batches_in_flight": request.in_flight,
        "latency_target_s": request.latency_target_s,
        "log_format": request.log_format,
    }
    return Settings(**{name: value for name, value in chosen.items() if value is not None})


def _ship_by_value(module: ModuleType) -> None:
    """Executors cannot import a file that was loaded by its path: its functions travel whole."""
    from pyspark import cloudpickle

    register = cast("Callable[[ModuleType], None]", cloudpickle.register_pickle_by_value)
    register(module)


def _progress_of(topology: str, progress: Callable[[str], None]) -> Callable[[BatchResult], None]:
    total = Progress(topology)

    def on_batch(result: BatchResult) -> None:
        nonlocal total
        total = total.after(result)
        progress(total.text)

    return on_batch


class Stoppable(Protocol):
    """What can be asked to stop."""

    def request_stop(self) -> None:
        """End after the batches in flight."""
        ...


class Stopping:
    """SIGINT and SIGTERM stop after the batches in flight, a second one at once: a crash, which the next start recovers.

    One that comes while everything starts is kept until then: a JVM whose Python dies before it has said where it
    listens stays for ever.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._running: Stoppable | None = None
        self._asked_at_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopping:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, running: Stoppable) -> None:
        """Everything stands: from here on a signal reaches the run. PySpark put a handler of its own there meanwhile."""
        self._running = running
        for number in SIGNALS:
            signal.signal(number, self._handle)
        if self._asked_at_s is not None:
            running.request_stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now_s = self._now_s()
        if self._asked_at_s is not None:
            if now_s - self._asked_at_s < ONE_SIGNAL_S:
                return
            os.write(sys.stderr.fileno(), b"stormproof: stopped at once; the next start recovers\n")
            _end_jvm()
            os._exit(Exit.INTERRUPTED)
        self._asked_at_s = now_s
        when = "as soon as everything has started" if self._running is None else "after the batches in flight"
        os.write(
            sys.stderr.fileno(),
            f"stormproof: {signal.Signals(number).name}: stopping {when}; once more stops at once\n".encode(),
        )
        if self._running is not None:
            self._running.request_stop()


def _end_jvm() -> None:
    """End Spark's JVM, which may not have begun to watch for our end. An embedded Postgres stays for its other users."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            if child.name() == "java":
                child.kill()
        except psutil.Error:
            continue
