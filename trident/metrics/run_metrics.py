"""`RunMetrics`: the metrics of one run, or of one function for `foreachBatch`, exported as the settings say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Final

from stormproof.core.clock import Clock
from stormproof.core.errors import TransientError
from stormproof.core.guarantee import Guarantee
from stormproof.core.settings import Settings
from stormproof.core.source.protocol import Backlog, Source
from stormproof.trident.ledger.rows import Run
from stormproof.trident.metrics.book import Book
from stormproof.trident.metrics.catalogue import LINEAGE_EVENTS
from stormproof.trident.metrics.recorder import Recorder
from stormproof.trident.observers import Observer

log = logging.getLogger("stormproof.metrics")

ASKING_SHARE: Final = 0.05
"""The largest part of a driver's time for asking its source for its backlog."""


class RunMetrics:
    """The recorder of a run, where its figures are exported, and when its source is asked for its backlog.

    `url` is where they can be scraped, None without a port.
    """

    def __init__(self, recorder: Recorder, clock: Clock, interval_s: float, observers: tuple[Observer, ...]) -> None:
        self.recorder = recorder
        self.observers = observers
        self.url: str | None = None
        self._clock = clock
        self._interval_s = interval_s
        self._ask_at_s = clock.monotonic_s()
        self._is_failing = False

    def began(self, run: Run, guarantee: Guarantee, source: Source, sinks: Iterable[str]) -> None:
        """A driver took its epoch."""
        self.recorder.began(run.incarnation, run.epoch, guarantee, source.name, tuple(sinks))

    def lineage_event(self, event: str) -> None:
        """Count what became of an event of OpenLineage; any thread may call it."""
        self.recorder.book.add(LINEAGE_EVENTS, event=event)

    def ask(self, backlog: Callable[[], Backlog]) -> None:
        """Ask the source for its backlog, if it is time. An answer that takes long is asked for less often.

        A source that does not answer is left alone: the run finds out by itself what it cannot reach.
        """
        started_s = self._clock.monotonic_s()
        if started_s < self._ask_at_s:
            return
        try:
            found = backlog()
        except TransientError as error:
            if not self._is_failing:
                log.warning("the source does not say how much is left in it: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False
            self.recorder.note_backlog(found)
        ended_s = self._clock.monotonic_s()
        self._ask_at_s = ended_s + max(self._interval_s, (ended_s - started_s) / ASKING_SHARE)

    def answered(self, backlog: Backlog) -> None:
        """Take in an answer that the run asked for itself."""
        self.recorder.note_backlog(backlog)
        self._ask_at_s = self._clock.monotonic_s() + self._interval_s


@contextmanager
def exported_metrics(topology: str, settings: Settings, clock: Clock) -> Generator[RunMetrics | None]:
    """The metrics of a run, exported inside the block by HTTP, to a file, or to OpenTelemetry; None if nobody wants them.

    Raises:
        SettingsError: the port or the file cannot be had.
        MachineUnfit: OpenTelemetry is asked for and not installed.
    """
    port, file, otel = settings.metrics_port, settings.metrics_file, settings.metrics_opentelemetry
    if port is None and file is None and not otel:
        yield None
        return
    with ExitStack() as stack:
        book, observers = Book(topology), list[Observer]()
        if otel:
            from stormproof.trident.metrics.otel import BatchSpans, instruments

            book = Book(topology, [instruments()])
            instruments().follow(book)
            spans = BatchSpans(topology)
            stack.callback(spans.close)
            observers.append(spans)
        recorder = Recorder(book, clock)
        metrics = RunMetrics(recorder, clock, settings.metrics_interval_s, (recorder, *observers))
        if port is not None:
            from stormproof.trident.metrics.endpoint import serve

            metrics.url, end = serve(settings.metrics_host, port, book)
            stack.callback(end)
            log.info("metrics of topology %s are at %s", topology, metrics.url)
        if file is not None:
            from stormproof.trident.metrics.textfile import keep_written

            _, end = keep_written(file, settings.metrics_interval_s, book)
            stack.callback(end)
        yield metrics
