"""What a run tells others while it runs: its metrics, and its lineage, as the settings ask for them.

A run's metrics are written as its steps end, and exported. Events of lineage are sent from a thread of its own: a lineage
server that is slow or dead neither slows nor ends the driver.
"""

from __future__ import annotations

import logging
import platform
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from stormproof.core.base.clock import Clock
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import SettingsError, TransientError
from stormproof.core.base.extras import required
from stormproof.core.base.message import FailureReason, Guarantee
from stormproof.core.contract.source import Backlog, Slice, Source
from stormproof.core.graph.plan import Plan
from stormproof.core.start.settings import Settings
from stormproof.trident.ledger.control import Doing, JobProgress
from stormproof.trident.ledger.tables import Run
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry.catalogue import LINEAGE_EVENTS, Book
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
        self._opened_s[txid] = self._clock.monotonic_s()
        self.book.add(m.OPENED)
        self.book.add(m.MESSAGES_OPENED, slice_.expected.messages)
        self.book.add(m.MESSAGES_REPLAYED, len(slice_.replayed))
        self.book.add(m.READ_BYTES, slice_.bytes)

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """See `Observer.attempt_ended`."""
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
        self._opened_s.pop(txid, None)
        self.book.add(m.ENDED, state=state.value, cause=cause.value)

    def failed(self, txid: int, failed: Mapping[str, int], returned: int) -> None:
        """See `Observer.failed`."""
        self._count_failed(failed, returned)

    def dead_letters(self, txid: int, number: int) -> None:
        """See `Observer.dead_letters`."""
        self.book.add(m.DEAD_LETTERS, number)

    def suppressed(self, sinks: Sequence[str]) -> None:
        """See `Observer.suppressed`."""
        for sink in sinks:
            self.book.add(m.SUPPRESSED, sink=sink)

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """See `Observer.blocked`."""
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
            from stormproof.trident.telemetry.otel import BatchSpans, instruments

            book = Book(topology, [instruments()])
            instruments().follow(book)
            spans = BatchSpans(topology)
            stack.callback(spans.close)
            observers.append(spans)
        recorder = Recorder(book, clock)
        metrics = RunMetrics(recorder, clock, (recorder, *observers))
        if port is not None:
            from stormproof.trident.telemetry.exposition import serve

            metrics.url, end = serve(settings.metrics_host, port, book)
            stack.callback(end)
            log.info("metrics of topology %s are at %s", topology, metrics.url)
        yield metrics


# ---- lineage

lineage_log = logging.getLogger("stormproof.lineage")

WAITING_MAX: Final = 1_000
"""Events that may wait to be sent; a further one is dropped, and counted."""
CLOSE_S: Final = 5.0
"""How long the end of a run waits for the last events."""


class Transport(Protocol):
    """What takes an event somewhere; as OpenLineage's own client has them."""

    def emit(self, event: Any) -> Any:
        """Send it, or raise."""
        ...


class Emitter:
    """A bounded queue and the thread that empties it. `count` is told ``sent``, ``failed`` or ``dropped``, from any thread.

    Forks: the thread is not in a fork, whose events are nobody's.
    """

    def __init__(self, transport: Transport, count: Callable[[str], None], *, waiting_max: int = WAITING_MAX) -> None:
        self._transport = transport
        self._count = count
        self._waiting: queue.Queue[Any] = queue.Queue(waiting_max)
        self._is_failing = False
        self._drops = False
        self._done = threading.Event()
        self._counting = threading.Lock()
        self._is_given_up = False
        """Whether what was not sent is counted as dropped: what becomes of it later is not counted again."""
        self._thread = threading.Thread(target=self._keep, name="stormproof-lineage", daemon=True)
        self._thread.start()

    def emit(self, event: Any) -> None:
        """Have an event sent; returns at once."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._count("dropped")
            if not self._drops:
                lineage_log.warning("lineage events are dropped: %d wait to be sent already", self._waiting.maxsize)
            self._drops = True

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send what waits, but for no longer than this; what is left then counts as dropped, and is logged."""
        self._done.set()
        self._thread.join(within_s)
        with self._counting:
            self._is_given_up = True
            left = self._waiting.unfinished_tasks  # those that wait, and the one under way
        for _ in range(left):
            self._count("dropped")
        if left:
            lineage_log.warning(
                "%d lineage events were not sent within %g s of the end, and are dropped", left, within_s
            )

    def _keep(self) -> None:
        while True:
            try:
                event = self._waiting.get(timeout=0.1)
            except queue.Empty:
                if self._done.is_set():
                    return
                continue
            error = self._sent(event)
            with self._counting:
                if self._is_given_up:
                    return
                self._count("sent" if error is None else "failed")
                self._waiting.task_done()
            if error is not None and not self._is_failing:
                lineage_log.warning("a lineage event was not taken (%s); the run goes on", type(error).__name__)
            self._is_failing = error is not None
            if error is None:
                self._drops = False

    def _sent(self, event: Any) -> Exception | None:
        """Send an event; the error if it was not taken."""
        try:
            self._transport.emit(event)
        except Exception as error:  # noqa: BLE001 - whatever a transport raises, the driver goes on
            return error
        return None


EXTRA: Final = "openlineage"
TIMEOUT_S: Final = 5.0


@contextmanager
def exported_lineage(
    transport: Any,
    settings: Settings,
    plan: Plan,
    source: Source,
    run: Run,
    guarantee: Guarantee,
    clock: Clock,
    *,
    streaming: bool,
    count: Callable[[str], None] | None = None,
) -> Generator[tuple[Observer, ...]]:
    """What tells of a run's batches inside the block, by a transport that `lineage_transport` made; nothing without one.

    `count` is told what became of each event.
    """
    if transport is None:
        yield ()
        return
    from stormproof.trident.telemetry.lineage import LineageReporter, OutputTable, Told

    outputs = {
        sink.name: OutputTable(
            sink.dataset or DatasetName("stormproof", f"{plan.topology}.{sink.name}"),
            tuple((column.name, str(column.type)) for column in plan.sinks[sink.name].schema),
        )
        for sink in plan.sink_specs
    }
    inputs = source.datasets() or (DatasetName("stormproof", source.name),)
    told = Told(
        settings.lineage_namespace,
        *(plan.topology, run.incarnation, run.epoch, guarantee.value, streaming, inputs, outputs),
    )
    counted: Callable[[str], None] = count or (lambda _: None)
    emitter = Emitter(transport, counted)
    reporter = LineageReporter(
        told,
        emitter.emit,
        clock,
        interval_s=settings.lineage_interval_s,
        error_texts=settings.lineage_error_texts,
        merged=lambda: counted("merged"),
    )
    try:
        yield (reporter,)
    finally:
        reporter.close()
        emitter.close()


def lineage_transport(settings: Settings) -> Any:
    """Where events go; None where no server and no file is named. Nothing is connected.

    Raises:
        MachineUnfit: OpenLineage's client is not installed; says what installs it.
        SettingsError: both a server and a file are named, the server's URL cannot be read, or the file cannot be written.
    """
    if settings.lineage_url is None and settings.lineage_file is None:
        return None
    required("openlineage.client", EXTRA, "lineage")
    if settings.lineage_url is not None and settings.lineage_file is not None:
        raise SettingsError("lineage_url and lineage_file are both set: name one of them", setting="lineage_file")
    if settings.lineage_file is not None:
        from openlineage.client.transport.file import FileConfig, FileTransport

        path = settings.lineage_file.absolute()
        try:
            path.open("ab").close()
        except OSError as error:
            raise SettingsError(
                f"lineage_file {path} cannot be written: {error.strerror}; nothing was started", setting="lineage_file"
            ) from error
        return FileTransport(FileConfig(str(path), append=True))
    import requests
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider

    assert settings.lineage_url is not None
    key = settings.lineage_api_key
    auth = TokenProvider({}) if key is None else ApiKeyTokenProvider({"api_key": key.get_secret_value()})
    url = urlsplit(settings.lineage_url.get_secret_value())
    session = requests.Session()
    if url.username is not None:  # the client logs its URL, and quotes it in errors
        session.auth = (unquote(url.username), unquote(url.password or ""))
    public = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    try:
        return HttpTransport(HttpConfig(public, timeout=TIMEOUT_S, auth=auth, session=session))
    except ValueError:  # whose text has the URL
        raise SettingsError(
            "lineage_url cannot be read; write https://HOST:PORT or https://USER:PASSWORD@HOST:PORT",
            setting="lineage_url",
        ) from None
