"""Metrics in this process: what is recorded, how it is exported, over HTTP, in a file, and to OpenTelemetry."""

from __future__ import annotations

import http.client
import os
import random
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry import metrics as otel_metrics
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as families

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.base.message import FailureReason, Guarantee
from stormproof.core.contract.source import Backlog, Expectation, Slice
from stormproof.core.start.settings import Settings
from stormproof.trident.ledger.control import Doing
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry.catalogue import Book
from stormproof.trident.telemetry.exposition import registry_of, serve, text_of
from stormproof.trident.telemetry.otel import BatchSpans, Instruments
from stormproof.trident.telemetry.recorder import Recorder, RunMetrics, exported_metrics
from stormproof.trident.terms.observers import (
    BatchResult,
    CommittedBatch,
    Figures,
    Observer,
    Observers,
    RecoveryReport,
    SinkEnd,
)
from stormproof.trident.terms.transaction_states import AttemptOutcome, TxnCause, TxnState

HOSTILE = 'a"b\\c\nd'


def a_run(recorder: Observer) -> None:
    """Everything that a run can tell, once."""
    slice_ = Slice({}, Expectation(5, 0), 100, replayed=((1, 0),))
    for txid in (1, 2, 3, 4):
        recorder.opened(txid, Guarantee.EXACTLY_ONCE, slice_)
    recorder.attempt_ended(1, 1, AttemptOutcome.MOOT)
    recorder.committed(
        CommittedBatch(
            1, Guarantee.EXACTLY_ONCE, 5, {"delta": SinkEnd(7, 70, 2, 1, suppressed=True)}, {"error": 1}, 1, 1, 1
        )
    )
    recorder.timed(BatchResult(1, "committed", 5, 1, False, 1, 9, {"open": 1.0, "job": 200.0, "total": 300.0}))
    recorder.given_up(2, TxnState.ABORTED, TxnCause.EVERY_MESSAGE_FAILED, "quotes a secret")
    recorder.failed(2, {"timeout": 5}, 0)
    recorder.dead_letters(2, 2)
    recorder.suppressed(("delta",))
    recorder.blocked(3, "delta", TxnCause.TABLE_GONE, "quotes a secret")
    recorder.recovered(RecoveryReport(2, rolled_forward=(3,)))


def a_recorder(topology: str = "words") -> Recorder:
    recorder = Recorder(Book(topology), ManualClock())
    recorder.began("life", 3, Guarantee.EXACTLY_ONCE, "lines", ("delta",))
    recorder.note_tuning(Figures(100, 1000, 2, 4, latency_target_s=0.5))
    recorder.note_backlog(Backlog(3, 2, 1, 4, oldest_ready_age_s=12.5))
    a_run(recorder)
    return recorder


def text(*recorders: Recorder) -> str:
    return text_of(registry_of(lambda: [one.book for one in recorders]))


def samples(exported: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families(exported)
        for sample in family.samples
    }


def scraped(url: str, accept: str = "") -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return answer.headers["Content-Type"], answer.read().decode()


def test_what_a_run_tells_is_what_is_exported() -> None:
    found = samples(text(a_recorder()))
    words = "words"
    assert found["stormproof_transactions_opened_total", words] == 4
    assert found["stormproof_transactions_total", "", "committed", words] == 1
    assert found["stormproof_transactions_total", "every_message_failed", "aborted", words] == 1
    assert found["stormproof_transactions_blocked_total", "table_gone", "delta", words] == 1
    assert found["stormproof_commits_suppressed_total", "delta", words] == 2
    assert found["stormproof_messages_opened_total", words] == 20
    assert found["stormproof_messages_committed_total", words] == 2
    assert found["stormproof_messages_failed_total", "timeout", words] == 5
    assert found["stormproof_messages_failed_total", "lost", words] == 0
    assert found["stormproof_dead_letters_total", words] == 3
    assert found["stormproof_sink_rows_total", "delta", words] == 7
    assert found["stormproof_backlog_messages", "waiting", words] == 1
    assert found["stormproof_lag_seconds", words] == 12.5
    assert found["stormproof_latency_target_seconds", words] == 0.5
    assert found["stormproof_driver_doing", "running", words] == 1
    assert found["stormproof_commit_latency_seconds_sum", words] == pytest.approx(0.3)
    assert found["stormproof_commit_latency_seconds_bucket", "0.25", words] == 0
    assert found["stormproof_commit_latency_seconds_bucket", "0.5", words] == 1
    assert found["stormproof_transactions_in_flight", words] == 0  # what recovery did not end, another driver has


def test_every_metric_of_a_driver_is_exported_with_its_labels_and_their_known_values() -> None:
    found = {sample.name: set(sample.labels) - {"le"} for f in families(text(a_recorder())) for sample in f.samples}
    suffix = {m.Kind.HISTOGRAM: "_count"}
    for metric in m.METRICS:
        if metric.where is m.Where.DRIVER:
            assert found[metric.exported + suffix.get(metric.kind, "")] == set(metric.label_names), metric.name
    for family in families(text(a_recorder())):
        for sample in family.samples:
            for label, value in sample.labels.items():
                known = m.STATES.get(family.name) if label == "state" else m.LABEL_VALUES.get(label)
                assert known is None or value in known, (sample.name, label, value)


def test_both_formats_say_the_same() -> None:
    registry = registry_of(lambda: [recorder.book])
    recorder = a_recorder()
    plain = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families(text_of(registry)) for s in f.samples}
    opened = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in openmetrics_families(generate_openmetrics(registry).decode())  # type: ignore[no-untyped-call]
        for s in f.samples
    }
    assert plain == opened
    assert len(plain) > 100


def test_nothing_that_may_quote_a_message_is_exported() -> None:
    assert "secret" not in text(a_recorder())


def test_hostile_names_are_escaped() -> None:
    recorder = Recorder(Book("words"), ManualClock())
    recorder.began("life", 1, Guarantee.EXACTLY_ONCE, HOSTILE, (HOSTILE,))
    assert samples(text(recorder))["stormproof_sink_rows_total", HOSTILE, "words"] == 0


def test_labels_do_not_grow_with_the_number_of_batches() -> None:
    recorder = a_recorder()
    before = len(recorder.book.samples())
    rng = random.Random(1)
    for _ in range(200):
        reason = rng.choice(list(FailureReason)).value
        recorder.committed(CommittedBatch(rng.getrandbits(40), Guarantee.EXACTLY_ONCE, 5, {}, {reason: 1}))
    assert len(recorder.book.samples()) == before


def test_a_label_that_the_catalogue_does_not_have_is_a_mistake() -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="has the labels"):
        Book("words").add(m.SINK_ROWS, sink="delta", message="1-7")
    with pytest.raises(AssertionError, match="is a gauge"):
        Book("words").add(m.LAG)


def test_an_observers_fault_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def dead_letters(self, txid: int, number: int) -> None:
            raise ZeroDivisionError

    recorder = a_recorder()
    Observers([Broken(), recorder]).dead_letters(7, 1)
    assert recorder.book.value(m.DEAD_LETTERS) == 4
    assert "Broken could not take in" in caplog.text


def test_an_observer_is_told_all_that_it_can_be_told(caplog: pytest.LogCaptureFixture) -> None:
    one, other = a_recorder(), a_recorder()
    a_run(one)
    a_run(Observers([other]))
    assert text(one) == text(other)
    assert not caplog.records


# ---- asking the source


class Asked:
    def __init__(self, clock: ManualClock, takes_s: float = 0.0) -> None:
        self.clock, self.takes_s, self.times, self.fails = clock, takes_s, 0, False

    def __call__(self) -> Backlog:
        self.times += 1
        self.clock.advance(self.takes_s)
        if self.fails:
            raise StoreUnavailable("away")
        return Backlog(self.times, 0, 0, 0)


def asking(takes_s: float = 0.0) -> tuple[RunMetrics, Asked, ManualClock]:
    clock = ManualClock()
    return RunMetrics(Recorder(Book("words"), clock), clock, ()), Asked(clock, takes_s), clock


def test_a_source_is_asked_no_more_often_than_the_interval() -> None:
    metrics, backlog, clock = asking()
    for _ in range(31):
        metrics.ask(backlog)
        clock.advance(1)
    assert backlog.times == 3


def test_a_slow_source_takes_a_twentieth_of_the_time_at_most() -> None:
    metrics, backlog, clock = asking(takes_s=3.0)
    while clock.monotonic_s() < 1_200:
        metrics.ask(backlog)
        clock.advance(1)
    assert backlog.times * 3.0 <= 1_200 * 0.06


def test_a_source_that_is_away_does_not_end_the_run_and_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    metrics, backlog, clock = asking()
    backlog.fails = True
    for _ in range(2):
        metrics.ask(backlog)
        clock.advance(20)
    assert len(caplog.records) == 1
    backlog.fails = False
    metrics.ask(backlog)
    assert metrics.recorder.book.value(m.BACKLOG, place="ready") == 3


# ---- over HTTP


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def served(stack: ExitStack, recorder: Recorder, port: int = 0) -> str:
    url, end = serve("127.0.0.1", port, recorder.book)
    stack.callback(end)
    return url


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def test_a_scrape_gets_the_present_values_in_the_format_that_it_asks_for(stack: ExitStack) -> None:
    recorder = a_recorder()
    url = served(stack, recorder)
    kind, plain = scraped(url)
    assert kind.startswith("text/plain")
    assert plain == text(recorder)
    kind, opened = scraped(url, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert opened.endswith("# EOF\n")
    recorder.dead_letters(9, 1)
    assert samples(scraped(url)[1])["stormproof_dead_letters_total", "words"] == 4


def test_there_is_nothing_at_other_paths_and_nothing_can_be_sent(stack: ExitStack) -> None:
    url = urlsplit(served(stack, a_recorder()))
    for method, path, status in (("GET", "/", 404), ("GET", "/metrics/x", 404), ("POST", "/metrics", 405)):
        connection = http.client.HTTPConnection(url.netloc, timeout=30)
        connection.request(method, path)
        assert connection.getresponse().status == status
        connection.close()


def test_two_topologies_of_one_process_share_a_port(stack: ExitStack) -> None:
    url = served(stack, a_recorder("one"))
    with ExitStack() as inner:
        assert served(inner, a_recorder("two"), port_of(url)) == url
        found = samples(scraped(url)[1])
        assert found["stormproof_transactions_opened_total", "one"] == 4
        assert found["stormproof_transactions_opened_total", "two"] == 4
    assert '"two"' not in scraped(url)[1]


def test_of_two_runs_of_one_topology_the_later_one_is_shown(stack: ExitStack) -> None:
    recorder = a_recorder()
    url = served(stack, recorder)
    recorder.dead_letters(9, 100)
    with ExitStack() as inner:
        served(inner, a_recorder(), port_of(url))
        assert samples(scraped(url)[1])["stormproof_dead_letters_total", "words"] == 3


def test_a_port_that_is_taken_is_refused_by_name_before_anything_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(SettingsError, match=rf"metrics_port {port} on 127\.0\.0\.1 .* in use; nothing was started"),
            exported_metrics("words", Settings(metrics_port=port), ManualClock()),
        ):
            pytest.fail("it was started")


def test_a_port_is_free_again_after_the_run() -> None:
    with exported_metrics("words", Settings(metrics_port=0), ManualClock()) as metrics:
        assert metrics is not None
        assert metrics.url is not None
        port = port_of(metrics.url)
    with exported_metrics("words", Settings(metrics_port=port), ManualClock()) as again:
        assert again is not None
        assert again.url == metrics.url


def test_a_fork_does_not_keep_the_port() -> None:
    url, end = serve("127.0.0.1", 0, a_recorder().book)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    end()
    try:
        with socket.create_server(("127.0.0.1", port_of(url)), reuse_port=False):
            pass
    finally:
        os.write(done[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        for end_of_pipe in (*ready, *done):
            os.close(end_of_pipe)


def test_a_client_that_sends_nothing_holds_up_no_other(stack: ExitStack) -> None:
    url = served(stack, a_recorder())
    with socket.create_connection(("127.0.0.1", port_of(url))):
        assert "stormproof_build_info" in scraped(url)[1]


def test_scrapes_while_the_driver_writes_see_whole_numbers(stack: ExitStack) -> None:
    recorder = a_recorder()
    url = served(stack, recorder)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            recorder.note_steps({"job": 1.0, "total": 2.0}, committed=True)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            found = samples(scraped(url)[1])
            count = found["stormproof_commit_latency_seconds_count", "words"]
            assert found["stormproof_commit_latency_seconds_bucket", "+Inf", "words"] == count
    finally:
        done.set()
        thread.join()


def test_nobody_who_wants_no_metrics_gets_any() -> None:
    with exported_metrics("words", Settings(), ManualClock()) as metrics:
        assert metrics is None


# ---- OpenTelemetry


def test_opentelemetry_gets_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(otel_metrics, "get_meter", provider.get_meter)
    instruments = Instruments()
    book = Book("words", [instruments])
    instruments.follow(book)
    recorder = Recorder(book, ManualClock())
    recorder.began("life", 3, Guarantee.EXACTLY_ONCE, "lines", ("delta",))
    recorder.heard(Doing.RUNNING)
    a_run(recorder)
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found: dict[str, Any] = {one.name: one for one in scope.metrics}
    (latency,) = found["stormproof.commit_latency"].data.data_points
    assert (latency.sum, latency.count, latency.attributes) == (pytest.approx(0.3), 1, {"topology": "words"})
    assert found["stormproof.commit_latency"].unit == "s"
    failed = {p.attributes["reason"]: p.value for p in found["stormproof.messages_failed"].data.data_points}
    assert failed == {reason.value: {"timeout": 5, "error": 1}.get(reason.value, 0) for reason in FailureReason}
    (in_flight,) = found["stormproof.transactions_in_flight"].data.data_points
    assert in_flight.value == 0
    provider.shutdown()


def test_each_batch_is_a_span_with_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel_trace, "get_tracer", provider.get_tracer)
    a_run(BatchSpans("words"))
    spans = {span.attributes["stormproof.txid"]: span for span in exporter.get_finished_spans() if span.attributes}
    assert sorted(map(int, map(str, spans))) == [1, 2, 3, 4]
    events: list[Any] = [event for event in spans[1].events if event.name == "step"]
    steps = {event.attributes["step"]: event.attributes["duration_ms"] for event in events}
    assert steps == {"open": 1.0, "job": 200.0, "total": 300.0}
    assert spans[3].status.status_code is otel_trace.StatusCode.ERROR
    assert "secret" not in str([span.to_json() for span in spans.values()])
    provider.shutdown()
