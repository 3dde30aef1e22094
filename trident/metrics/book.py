"""`Book`: the present values of one run's metrics. Written by the run's threads, read by whoever exports them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from stormproof.trident.metrics.catalogue import BUCKETS_S, Kind, Metric

Labels: TypeAlias = tuple[str, ...]
Computed: TypeAlias = Callable[[], Mapping[Labels, float]]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values of a histogram: how many were in each bucket of `BUCKETS_S`, and above them all; and their sum."""

    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric; `labels` are in the order of `Metric.label_names`."""

    metric: Metric
    labels: Labels
    value: float | Distribution


class Listener(Protocol):
    """Takes in each change of a book, at once: another library's instruments."""

    def added(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """A counter grew."""
        ...

    def set_to(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """A gauge changed."""
        ...

    def observed(self, metric: Metric, labels: Mapping[str, str], value: float) -> None:
        """A histogram got a value."""
        ...


class Book:
    """The values of one topology's metrics in this process.

    Threads: any number may write and read; a lock is held for the time of one assignment or one copy. Forks: a fork has a
    copy of its own, which nobody reads.
    """

    def __init__(self, topology: str, listeners: Sequence[Listener] = ()) -> None:
        self.topology = topology
        self._listeners = tuple(listeners)
        self._lock = threading.Lock()
        self._values: dict[tuple[Metric, Labels], float] = {}
        self._buckets: dict[tuple[Metric, Labels], list[int]] = {}
        self._computed: dict[Metric, Computed] = {}

    def add(self, metric: Metric, value: float = 1, **labels: str) -> None:
        """Let a counter grow; by 0, it is exported as it is."""
        key = metric, self._labels(metric, Kind.COUNTER, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value
        for listener in self._listeners:
            listener.added(metric, self._named(key), value)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        key = metric, self._labels(metric, Kind.GAUGE, labels)
        with self._lock:
            self._values[key] = float(value)
        for listener in self._listeners:
            listener.set_to(metric, self._named(key), float(value))

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        key = metric, self._labels(metric, Kind.HISTOGRAM, labels)
        with self._lock:
            counts = self._buckets.setdefault(key, [0] * (len(BUCKETS_S) + 1))
            counts[bisect_left(BUCKETS_S, value)] += 1
            self._values[key] = self._values.get(key, 0.0) + value
        for listener in self._listeners:
            listener.observed(metric, self._named(key), value)

    def forget(self, metric: Metric, **labels: str) -> None:
        """Export a gauge no more, until it is set again; with labels, its values with these alone."""
        with self._lock:
            for key in [key for key in self._values if key[0] is metric and labels.items() <= self._named(key).items()]:
                del self._values[key]

    def compute(self, metric: Metric, values: Computed) -> None:
        """Have a gauge's values computed when they are read, by their labels without the topology.

        `values` must not block: it is called by whoever exports.
        """
        assert metric.computed, f"{metric.name} is not computed"
        with self._lock:
            self._computed[metric] = values

    def computed(self, metric: Metric) -> dict[Labels, float]:
        """The values of a computed gauge, computed now."""
        with self._lock:
            values = self._computed.get(metric)
        return {} if values is None else {(self.topology, *labels): value for labels, value in values().items()}

    def samples(self) -> list[Sample]:
        """All present values."""
        with self._lock:
            values = dict(self._values)
            buckets = {key: tuple(counts) for key, counts in self._buckets.items()}
            computed = tuple(self._computed)
        found: list[Sample] = []
        for (metric, labels), value in values.items():
            counts = buckets.get((metric, labels))
            found.append(Sample(metric, labels, value if counts is None else Distribution(counts, value)))
        for metric in computed:
            found += [Sample(metric, labels, value) for labels, value in self.computed(metric).items()]
        return found

    def value(self, metric: Metric, **labels: str) -> float:
        """The present value of a counter or gauge; 0 where there is none."""
        with self._lock:
            return self._values.get((metric, self._labels(metric, metric.kind, labels)), 0.0)

    def _labels(self, metric: Metric, kind: Kind, labels: Mapping[str, str]) -> Labels:
        assert metric.kind is kind, f"{metric.name} is a {metric.kind}"
        found = {"topology": self.topology, **labels} if "topology" in metric.label_names else dict(labels)
        assert found.keys() == set(metric.label_names), f"{metric.name} has the labels {metric.label_names}: {labels}"
        return tuple(found[name] for name in metric.label_names)

    def _named(self, key: tuple[Metric, Labels]) -> dict[str, str]:
        return dict(zip(key[0].label_names, key[1], strict=True))
