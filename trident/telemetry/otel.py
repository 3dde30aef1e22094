"""The same figures through OpenTelemetry's API, and a span for each batch. The SDK, and where it sends them, is the user's.

Without an SDK in the process these calls do nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from stormproof.core.base.extras import required
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Slice
from stormproof.trident.telemetry.catalogue import BUCKETS_S, METRICS, Book, Kind, Metric, Where
from stormproof.trident.terms.observers import BatchResult, CommittedBatch, Observer, RecoveryReport
from stormproof.trident.terms.transaction_states import AttemptOutcome, TxnCause, TxnState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

EXTRA: Final = "otel"
SCOPE: Final = "stormproof"

_lock = threading.Lock()
_made: list[Instruments] = []


def otel_name(metric: Metric) -> str:
    """The instrument's name: `stormproof.commit_latency` of `stormproof_commit_latency_seconds`."""
    name = metric.name.removeprefix("stormproof_")
    return f"stormproof.{name.removesuffix('_seconds') if metric.unit == 's' else name}"


def instruments() -> Instruments:
    """The process's instruments; made once.

    Raises:
        MachineUnfit: OpenTelemetry's API is not installed; says what installs it.
    """
    with _lock:
        if not _made:
            _made.append(Instruments())
        return _made[0]


class Instruments:
    """An instrument for each metric of a driver, with the same labels as attributes."""

    def __init__(self) -> None:
        api = required("opentelemetry.metrics", EXTRA, "metrics_opentelemetry")
        meter = api.get_meter(SCOPE, version("stormproof"))
        self._observation = api.Observation
        self._books: weakref.WeakSet[Book] = weakref.WeakSet()
        self._by_metric: dict[Metric, Any] = {}
        for metric in METRICS:
            if metric.where is not Where.DRIVER:
                continue
            name, unit = otel_name(metric), metric.unit
            match metric.kind:
                case Kind.COUNTER:
                    self._by_metric[metric] = meter.create_counter(name, unit, metric.help)
                case Kind.GAUGE if metric.computed:
                    meter.create_observable_gauge(name, [partial(self._observe, metric)], unit, metric.help)
                case Kind.GAUGE:
                    self._by_metric[metric] = meter.create_gauge(name, unit, metric.help)
                case Kind.HISTOGRAM:
                    self._by_metric[metric] = meter.create_histogram(
                        name, unit, metric.help, explicit_bucket_boundaries_advisory=list(BUCKETS_S)
                    )

    def follow(self, book: Book) -> None:
        """Observe what this book computes, as long as it is used."""
        self._books.add(book)

    def added(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """See `Listener.added`."""
        self._by_metric[metric].add(value, dict(labels))

    def set_to(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """See `Listener.set_to`."""
        self._by_metric[metric].set(value, dict(labels))

    def observed(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """See `Listener.observed`."""
        self._by_metric[metric].record(value, dict(labels))

    def _observe(self, metric: Metric, _: object) -> Iterable[Any]:
        for book in list(self._books):
            for labels, value in book.computed(metric).items():
                yield self._observation(value, dict(zip(metric.label_names, labels, strict=True)))


class BatchSpans(Observer):
    """A span for each batch, from its opening to its end; what happened to it, and its steps' times, are events of it.

    A batch that an earlier driver opened, and that recovery ended, has a span without a length, with `recovered`.
    """

    def __init__(self, topology: str) -> None:
        api = required("opentelemetry.trace", EXTRA, "metrics_opentelemetry")
        self._tracer = api.get_tracer(SCOPE, version("stormproof"))
        self._error = api.Status(api.StatusCode.ERROR)
        self._topology = topology
        self._spans: dict[int, Span] = {}

    def opened(self, txid: int, guarantee: Guarantee, slice_: Slice) -> None:
        """See `Observer.opened`."""
        self._spans[txid] = self._begun(
            txid, {"guarantee": guarantee.value, "messages": slice_.expected.messages, "retry": slice_.retry}
        )

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """See `Observer.attempt_ended`."""
        self._of(txid).add_event("attempt failed", {"attempt": attempt, "outcome": outcome.value})

    def committed(self, batch: CommittedBatch) -> None:
        """See `Observer.committed`."""
        span = self._of(batch.txid)
        span.set_attribute("stormproof.state", TxnState.COMMITTED.value)
        for sink, end in batch.sinks.items():
            span.add_event(
                "committed", {"sink": sink, "rows": end.rows, "bytes": end.bytes, "suppressed": end.suppressed}
            )
        if batch.failed:
            span.add_event("messages failed", dict(batch.failed))

    def given_up(self, txid: int, state: TxnState, cause: TxnCause, reason: str) -> None:
        """See `Observer.given_up`. The reason's words may quote a message, and stay here."""
        span = self._of(txid)
        span.set_attribute("stormproof.state", state.value)
        span.set_attribute("stormproof.cause", cause.value)

    def failed(self, txid: int, failed: Mapping[str, int], returned: int) -> None:
        """See `Observer.failed`."""
        self._of(txid).add_event("messages failed", {**failed, "returned": returned})

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """See `Observer.blocked`."""
        span = self._of(txid)
        span.set_attribute("stormproof.state", TxnState.BLOCKED.value)
        span.set_attribute("stormproof.cause", cause.value)
        span.add_event("blocked", {"sink": sink})
        span.set_status(self._error)

    def recovered(self, report: RecoveryReport) -> None:
        """See `Observer.recovered`."""
        for span in self._spans.values():
            span.set_attribute("stormproof.recovered", True)
        self.close()

    def timed(self, result: BatchResult) -> None:
        """See `Observer.timed`."""
        span = self._spans.pop(result.txid, None)
        if span is None:
            return
        for step, took_ms in result.steps_ms.items():
            span.add_event("step", {"step": step, "duration_ms": took_ms})
        span.set_attribute("stormproof.attempts", result.attempts)
        span.end()

    def close(self) -> None:
        """End the spans of batches whose end this driver does not see."""
        for span in self._spans.values():
            span.end()
        self._spans.clear()

    def _of(self, txid: int) -> Span:
        if txid not in self._spans:
            self._spans[txid] = self._begun(txid, {})
        return self._spans[txid]

    def _begun(self, txid: int, attributes: Mapping[str, str | int | bool]) -> Span:
        named = {f"stormproof.{name}": value for name, value in attributes.items()}
        found: Span = self._tracer.start_span(
            f"batch of {self._topology}",
            attributes={"stormproof.topology": self._topology, "stormproof.txid": txid, **named},
        )
        return found
