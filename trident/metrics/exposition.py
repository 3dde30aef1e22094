"""The values of books as Prometheus reads them: its text format, and OpenMetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from stormproof.trident.metrics.book import Book, Distribution, Sample
from stormproof.trident.metrics.catalogue import BUCKETS_S, METRICS, Kind, Metric


def registry_of(books: Callable[[], Sequence[Book]]) -> CollectorRegistry:
    """A registry of its own, with the values that the books have when it is read.

    Of two books of one topology the later one counts: a label set may be exported once.
    """

    def samples() -> Iterator[Sample]:
        newest = {book.topology: book for book in books()}
        seen: set[tuple[Metric, tuple[str, ...]]] = set()
        for book in newest.values():
            for sample in book.samples():
                if (sample.metric, sample.labels) not in seen:  # what is no topology's, all have
                    seen.add((sample.metric, sample.labels))
                    yield sample

    return registry_with(samples)


def registry_with(samples: Callable[[], Iterable[Sample]]) -> CollectorRegistry:
    """A registry of its own, with these values, asked for each time that it is read."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Values(samples))
    return registry


def text_of(registry: CollectorRegistry) -> str:
    """Prometheus' text format, which node exporter's textfile collector reads, too."""
    return generate_latest(registry).decode("utf-8")


class _Values(Collector):
    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        """Every metric with its values, in the catalogue's order."""
        found: dict[Metric, list[Sample]] = {}
        for sample in self._samples():
            found.setdefault(sample.metric, []).append(sample)
        for metric in METRICS:
            if metric in found:
                yield _family(metric, sorted(found[metric], key=lambda one: one.labels))


def _family(metric: Metric, samples: Sequence[Sample]) -> Family:
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
