"""How Prometheus reads the values of books: its text format and OpenMetrics, over HTTP; and the ledger's own figures.

There is one HTTP server for each address that a process names, for all of its runs. A scrape copies numbers that lie in
memory: it touches no database, and holds no lock for longer than the copy takes. The ledger's figures need no driver: an
alert that a driver is gone must not depend on it.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler

import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer, generate_latest, make_wsgi_app
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from stormproof.core.base.errors import SettingsError
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.report import LastVerdict, newest_verdicts
from stormproof.trident.audit.status import DriverState, ProblemKind, TopologyStatus, status
from stormproof.trident.ledger import tables as t
from stormproof.trident.telemetry import catalogue as m
from stormproof.trident.telemetry.catalogue import BUCKETS_S, METRICS, Book, Distribution, Kind, Metric, MetricValue
from stormproof.trident.terms.transaction_states import RejectState, TxnState, Verdict


def registry_of(books: Callable[[], Sequence[Book]]) -> CollectorRegistry:
    """A registry of its own, with the values that the books have when it is read.

    Of two books of one topology the later one counts: a label set may be exported once.
    """

    def samples() -> Iterator[MetricValue]:
        newest = {book.topology: book for book in books()}
        seen: set[tuple[Metric, tuple[str, ...]]] = set()
        for book in newest.values():
            for sample in book.samples():
                if (sample.metric, sample.labels) not in seen:  # what is no topology's, all have
                    seen.add((sample.metric, sample.labels))
                    yield sample

    return registry_with(samples)


def registry_with(samples: Callable[[], Iterable[MetricValue]]) -> CollectorRegistry:
    """A registry of its own, with these values, asked for each time that it is read."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(samples))
    return registry


def text_of(registry: CollectorRegistry) -> str:
    """Prometheus' text format, which node exporter's textfile collector reads, too."""
    return generate_latest(registry).decode("utf-8")


class _Values(Collector):
    def __init__(self, samples: Callable[[], Iterable[MetricValue]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        """Every metric with its values, in the catalogue's order."""
        found: dict[Metric, list[MetricValue]] = {}
        for sample in self._samples():
            found.setdefault(sample.metric, []).append(sample)
        for metric in METRICS:
            if metric in found:
                yield _family(metric, sorted(found[metric], key=lambda one: one.labels))


def _family(metric: Metric, samples: Sequence[MetricValue]) -> Family:
    names = metric.label_names
    match metric.kind:
        case Kind.COUNTER:
            counter = CounterMetricFamily(metric.name, metric.help, labels=names)
            for sample in samples:
                assert not isinstance(sample.value, Distribution)
                counter.add_metric(sample.labels, sample.value)
            return counter
        case Kind.GAUGE:
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=names)
            for sample in samples:
                assert not isinstance(sample.value, Distribution)
                gauge.add_metric(sample.labels, sample.value)
            return gauge
        case Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
            for sample in samples:
                assert isinstance(sample.value, Distribution)
                histogram.add_metric(sample.labels, _buckets(sample.value), sample.value.sum)
            return histogram


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    """Upper bounds and how many values were at most so large, as Prometheus has them."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), values.counts, strict=True):
        total += count
        found.append((bound, total))
    return found


PATH: Final = "/metrics"
CLIENT_TIMEOUT_S: Final = 10.0
"""A client that is slower loses its connection."""
CLIENTS_MAX: Final = 16
"""Requests at one time; one more is turned away, so that they cannot use up the process's threads."""

_servers: dict[tuple[str, int], Endpoint] = {}
_lock = threading.Lock()
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Endpoint:
    """One address and the books that are served there. Made by `serve`."""

    def __init__(self, host: str, port: int) -> None:
        self.books: list[Book] = []
        try:
            self._server = _server_class(host)((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise _refused(host, port, error) from error
        self._server.set_app(_only_here(make_wsgi_app(registry_of(lambda: tuple(self.books)))))
        self.key = (host, port or int(self._server.server_port))
        _open.add(self._server.socket)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="stormproof-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is scraped."""
        host, port = self.key
        shown = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        return f"http://{shown}:{port}{PATH}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve(host: str, port: int, book: Book) -> tuple[str, Callable[[], None]]:
    """Serve a book at an address; with port 0, at one that is free. Returns the URL, and what ends it.

    Runs of one process that name the same address share it. Of two runs of one topology the later one is shown.

    Raises:
        SettingsError: the address cannot be listened on: it is taken, needs a right, or is not this machine's.
    """
    with _lock:
        endpoint = _servers.get((host, port)) if port else None
        if endpoint is None:
            endpoint = Endpoint(host, port)
            _servers[endpoint.key] = endpoint
        endpoint.books.append(book)

    def end() -> None:
        with _lock:
            endpoint.books.remove(book)
            if endpoint.books:
                return
            del _servers[endpoint.key]
        endpoint.close()

    return endpoint.url, end


def _refused(host: str, port: int, error: OSError | OverflowError) -> SettingsError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SettingsError(
        f"metrics_port {port} on {host or 'every address'} cannot be listened on: {why}; nothing was started. Name another "
        "port, or 0 for one that is free (--metrics-port, STORMPROOF_METRICS_PORT), or another metrics_host",
        setting="metrics_port",
        port=port,
        host=host,
    )


def _server_class(host: str) -> type[ThreadingWSGIServer]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return type("_Server", (_Server,), {"address_family": family})


class _Server(ThreadingWSGIServer):
    """A thread a request, a bounded number of them; closed in forks, which would keep the port."""

    allow_reuse_address = True  # a driver that is started again finds its port free
    block_on_close = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(CLIENTS_MAX)
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        """As the library's, without a look-up of the host's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()  # no thread was started
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and leave the place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there is a request every few seconds."""


def _only_here(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The app at its path, and nothing elsewhere."""

    def found(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == PATH:
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"the metrics are at {PATH}\n".encode()]

    return found


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text; a reader sees the old one or the new one, whole. Not durable: a power loss may take it.

    Raises:
        OSError: it cannot be written.
    """
    # Not `.prom` at its end, so that the collector does not read it.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _in_fork() -> None:
    """A fork has copies of the listening sockets, and no thread that answers: the port is the parent's alone."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()
    for one in list(_open):
        with suppress(OSError):
            os.close(one.detach())


os.register_at_fork(after_in_child=_in_fork)


# ---- the ledger's own figures


def ledger_figures(ledger: AuditLedger, names: tuple[str, ...], now: datetime) -> list[MetricValue]:
    """The values of all `stormproof_ledger_*` metrics, of these topologies, or of all.

    Raises:
        UsageError: the ledger does not have a topology of such a name.
        StoreUnavailable: the database does not answer.
    """
    if names:
        found = [one for name in dict.fromkeys(names) for one in status(ledger, name).topologies]
    else:
        found = list(status(ledger).topologies)
    with ledger.snapshot() as snapshot:
        verdicts, last = newest_verdicts(snapshot.connection), _last_commits(snapshot.connection)
    samples = [MetricValue(m.BUILD_INFO, (version("stormproof"), platform.python_version()), 1.0)]
    for one in found:
        samples += _of_topology(one, now, verdicts.get(one.incarnation), last.get(one.incarnation))
    return samples


def _of_topology(
    one: TopologyStatus, now: datetime, verdict: LastVerdict | None, last_commit: datetime | None
) -> Iterator[MetricValue]:
    def of(metric: m.Metric, value: float, *labels: str) -> MetricValue:
        return MetricValue(metric, (one.name, *labels), float(value))

    yield of(m.LEDGER_READ, now.timestamp())
    for driver in DriverState:
        yield of(m.LEDGER_DRIVER, one.driver is driver, driver.value)
    if one.last_sign_s is not None:
        yield of(m.LEDGER_SIGN_AGE, one.last_sign_s)
    yield of(m.LEDGER_EPOCH, one.epoch)
    yield of(m.LEDGER_PAUSED, one.asked is not None and one.asked.what == "pause")
    problems = Counter(problem.kind for problem in one.problems)
    for kind in ProblemKind:
        yield of(m.LEDGER_PROBLEMS, problems[kind], kind.value)
    for state in TxnState:
        yield of(m.LEDGER_TXNS, one.txns.get(state.value, 0), state.value)
    yield of(m.LEDGER_LAST_TXID, one.last_txid or 0)
    if last_commit is not None:
        yield of(m.LEDGER_LAST_COMMIT, last_commit.timestamp())
    oldest = min((txn.since for txn in one.unresolved), default=None)
    yield of(m.LEDGER_OLDEST, 0 if oldest is None else max(0.0, (now - oldest).total_seconds()))
    if one.backlog is not None:
        for place in m.LABEL_VALUES["place"]:
            number = getattr(one.backlog, place)
            if number is not None:
                yield of(m.LEDGER_BACKLOG, number, place)
        age_s = 0.0 if one.backlog.ready == 0 else one.backlog.oldest_ready_age_s
        if age_s is not None:
            yield of(m.LEDGER_LAG, age_s)
    for reject in RejectState:
        yield of(m.LEDGER_REJECTS, one.rejects.get(reject.value, 0), reject.value)
    for sink in one.sinks:
        yield of(m.LEDGER_SINK_TXID, sink.last_txid or 0, sink.sink)
    if verdict is not None:
        for known in Verdict:
            yield of(m.LEDGER_VERDICT, verdict.verdict == known, known.value)
        yield of(m.LEDGER_VERDICT_AT, verdict.at.timestamp())


def _last_commits(connection: sa.Connection) -> Mapping[str, datetime]:
    """When each incarnation last committed: the end of its highest committed batch."""
    c = t.txn.c
    last = (
        sa.select(c.ended_at)
        .where(c.incarnation == t.topology.c.incarnation, c.state == TxnState.COMMITTED.value)
        .order_by(c.txid.desc())
        .limit(1)
        .scalar_subquery()
    )
    rows = connection.execute(sa.select(t.topology.c.incarnation, last.label("at")))
    return {row.incarnation: row.at for row in rows if row.at is not None}
