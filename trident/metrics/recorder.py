"""`Recorder` makes figures of what a run's steps tell; `RunMetrics` are those of one run, exported as the settings say."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Final

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import TransientError
from stormproof.core.base.message import FailureReason, Guarantee
from stormproof.core.contract.source import Backlog, Slice, Source
from stormproof.core.start.settings import Settings
from stormproof.trident.ledger.control import Doing, JobProgress
from stormproof.trident.ledger.tables import Run
from stormproof.trident.metrics import catalogue as m
from stormproof.trident.metrics.catalogue import LINEAGE_EVENTS, Book
from stormproof.trident.terms.observers import BatchResult, CommittedBatch, Figures, Observer, RecoveryReport
from stormproof.trident.terms.transaction_states import AttemptOutcome, TxnCause, TxnState

_CAUSES: Final = (
    TxnCause.EVERY_MESSAGE_FAILED,
    TxnCause.DRIVER_ENDED,
    TxnCause.JOB_FAILED,
    TxnCause.UNVERIFIED,
    TxnCause.MOOT,
)


class Recorder(Observer):
    """Writes what it is told into a book. Counters are there from the start, at 0, so that their first increase shows."""

    def __init__(self, book: Book, clock: Clock) -> None:
        self.book = book
        self._clock = clock
        self._opened_s: dict[int, float] = {}
        book.set(m.BUILD_INFO, 1, version=version("stormproof"), python=platform.python_version())
        for metric in (m.OPENED, m.MESSAGES_OPENED, m.MESSAGES_COMMITTED, m.MESSAGES_RETURNED, m.MESSAGES_REPLAYED):
            book.add(metric, 0)
        for metric in (m.DEAD_LETTERS, m.TUPLES, m.READ_BYTES, m.RECOVERIES):
            book.add(metric, 0)
        book.add(m.ENDED, 0, state=TxnState.COMMITTED.value, cause="")
        for cause in _CAUSES:
            book.add(m.ENDED, 0, state=TxnState.ABORTED.value, cause=cause.value)
        for event in m.LABEL_VALUES["event"]:
            book.add(m.LINEAGE_EVENTS, 0, event=event)
        for reason in FailureReason:
            book.add(m.MESSAGES_FAILED, 0, reason=reason.value)
        book.compute(m.IN_FLIGHT, lambda: {(): float(len(self._opened_s))})
        book.compute(m.OLDEST_IN_FLIGHT, lambda: {(): self._oldest_s()})

    def began(self, incarnation: str, epoch: int, guarantee: Guarantee, source: str, sinks: Sequence[str]) -> None:
        """A driver took its epoch."""
        book, now_s = self.book, self._now_s()
        self._opened_s.clear()
        book.forget(m.DRIVER_INFO)
        book.set(m.DRIVER_INFO, 1, guarantee=guarantee.value, incarnation=incarnation, source=source)
        book.set(m.DRIVER_EPOCH, epoch)
        book.set(m.DRIVER_STARTED, now_s)
        self.heard(Doing.RUNNING)
        for sink in sinks:
            for metric in (m.SUPPRESSED, m.REJECTS, m.SINK_ROWS, m.SINK_BYTES, m.SUPERSEDED):
                book.add(metric, 0, sink=sink)

    def heard(self, doing: Doing, job: JobProgress | None = None) -> None:
        """The driver left a sign of life."""
        self.book.set(m.JOB_PROGRESS, job.share if job is not None else 0)
        self.book.set(m.HEARTBEAT, self._now_s())
        for one in Doing:
            self.book.set(m.DOING, one is doing, doing=one.value)

    def opened(self, txid: int, guarantee: Guarantee, slice_: Slice) -> None:
        """See `Observer.opened`."""
        del guarantee
        self._opened_s[txid] = self._clock.monotonic_s()
        self.book.add(m.OPENED)
        self.book.add(m.MESSAGES_OPENED, slice_.expected.messages)
        self.book.add(m.MESSAGES_REPLAYED, len(slice_.replayed))
        self.book.add(m.READ_BYTES, slice_.bytes)

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """See `Observer.attempt_ended`."""
        del txid, attempt
        self.book.add(m.ATTEMPTS_FAILED, outcome=outcome.value)

    def committed(self, batch: CommittedBatch) -> None:
        """See `Observer.committed`."""
        book = self.book
        self._opened_s.pop(batch.txid, None)
        book.add(m.ENDED, state=TxnState.COMMITTED.value, cause="")
        book.add(m.MESSAGES_COMMITTED, batch.committed_messages)
        self._count_failed(batch.failed, batch.returned)
        book.add(m.DEAD_LETTERS, batch.dead)
        book.set(m.LAST_COMMIT, self._now_s())
        book.set(m.LAST_TXID, batch.txid)
        for sink, end in batch.sinks.items():
            book.add(m.SINK_ROWS, end.rows, sink=sink)
            book.add(m.SINK_BYTES, end.bytes, sink=sink)
            book.add(m.SUPERSEDED, end.superseded, sink=sink)
            book.add(m.REJECTS, end.rejects, sink=sink)
            book.add(m.SUPPRESSED, end.suppressed, sink=sink)

    def given_up(self, txid: int, state: TxnState, cause: TxnCause, reason: str) -> None:
        """See `Observer.given_up`."""
        del reason
        self._opened_s.pop(txid, None)
        self.book.add(m.ENDED, state=state.value, cause=cause.value)

    def failed(self, txid: int, failed: Mapping[str, int], returned: int) -> None:
        """See `Observer.failed`."""
        del txid
        self._count_failed(failed, returned)

    def dead_letters(self, txid: int, number: int) -> None:
        """See `Observer.dead_letters`."""
        del txid
        self.book.add(m.DEAD_LETTERS, number)

    def suppressed(self, sinks: Sequence[str]) -> None:
        """See `Observer.suppressed`."""
        for sink in sinks:
            self.book.add(m.SUPPRESSED, sink=sink)

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """See `Observer.blocked`."""
        del txid, reason
        self.book.add(m.BLOCKED, sink=sink, cause=cause.value)

    def recovered(self, report: RecoveryReport) -> None:
        """See `Observer.recovered`. What was in flight before, and of which nothing was told, is no more."""
        self._opened_s.clear()
        if report.did_something:
            self.book.add(m.RECOVERIES)
        for did in m.LABEL_VALUES["did"]:
            self.book.add(m.RECOVERED, len(getattr(report, did)), did=did)

    def timed(self, result: BatchResult) -> None:
        """See `Observer.timed`."""
        self.book.add(m.TUPLES, result.tuples)
        self.note_steps(result.steps_ms, committed=result.state == TxnState.COMMITTED.value)

    def note_steps(self, steps_ms: Mapping[str, float], *, committed: bool) -> None:
        """Take in the times of a batch's, or of a micro-batch's, steps; `total` is from its opening to its end."""
        for step in m.STEPS:
            if step in steps_ms:
                self.book.observe(m.STEP, steps_ms[step] / 1000, step=step)
        if committed and "total" in steps_ms:
            self.book.observe(m.LATENCY, steps_ms["total"] / 1000)

    def note_tuning(self, figures: Figures) -> None:
        """Take in how large batches are, and how many may be in flight."""
        self.book.set(m.BATCH_LIMIT, figures.messages)
        self.book.set(m.BATCH_BYTES_LIMIT, figures.bytes)
        self.book.set(m.IN_FLIGHT_LIMIT, figures.in_flight)
        if figures.latency_target_s is not None:
            self.book.set(m.LATENCY_TARGET, figures.latency_target_s)

    def note_backlog(self, backlog: Backlog) -> None:
        """Take in what the source has left."""
        for place in m.LABEL_VALUES["place"]:
            number = getattr(backlog, place)
            if number is None:
                self.book.forget(m.BACKLOG, place=place)
            else:
                self.book.set(m.BACKLOG, number, place=place)
        age_s = 0.0 if backlog.ready == 0 else backlog.oldest_ready_age_s
        if age_s is None:
            self.book.forget(m.LAG)
        else:
            self.book.set(m.LAG, age_s)
        self.book.set(m.BACKLOG_ASKED, self._now_s())

    def _count_failed(self, failed: Mapping[str, int], returned: int) -> None:
        for reason, number in failed.items():
            self.book.add(m.MESSAGES_FAILED, number, reason=reason)
        self.book.add(m.MESSAGES_RETURNED, returned)

    def _oldest_s(self) -> float:
        oldest = min(list(self._opened_s.values()), default=None)
        return 0.0 if oldest is None else self._clock.monotonic_s() - oldest

    def _now_s(self) -> float:
        return self._clock.now().timestamp()


log = logging.getLogger("stormproof.metrics")

BACKLOG_EVERY_S: Final = 15.0
"""Least seconds between two queries of the source's backlog."""
ASKING_SHARE: Final = 0.05
"""The largest part of a driver's time for asking its source for its backlog."""


class RunMetrics:
    """The recorder of a run, where its figures are exported, and when its source is asked for its backlog.

    `url` is where they can be scraped, None without a port.
    """

    def __init__(self, recorder: Recorder, clock: Clock, observers: tuple[Observer, ...]) -> None:
        self.recorder = recorder
        self.observers = observers
        self.url: str | None = None
        self._clock = clock
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
        self._ask_at_s = ended_s + max(BACKLOG_EVERY_S, (ended_s - started_s) / ASKING_SHARE)

    def answered(self, backlog: Backlog) -> None:
        """Take in an answer that the run asked for itself."""
        self.recorder.note_backlog(backlog)
        self._ask_at_s = self._clock.monotonic_s() + BACKLOG_EVERY_S


@contextmanager
def exported_metrics(topology: str, settings: Settings, clock: Clock) -> Generator[RunMetrics | None]:
    """The metrics of a run, exported inside the block by HTTP, or to OpenTelemetry; None if nobody wants them.

    Raises:
        SettingsError: the port cannot be had.
        MachineUnfit: OpenTelemetry is asked for and not installed.
    """
    port, otel = settings.metrics_port, settings.metrics_opentelemetry
    if port is None and not otel:
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
        metrics = RunMetrics(recorder, clock, (recorder, *observers))
        if port is not None:
            from stormproof.trident.metrics.exposition import serve

            metrics.url, end = serve(settings.metrics_host, port, book)
            stack.callback(end)
            log.info("metrics of topology %s are at %s", topology, metrics.url)
        yield metrics
