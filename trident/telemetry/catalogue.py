"""Every metric: its name, kind, unit, labels and meaning. `docs/metrics.md` is made of this table. `Book` has their values.

Labels have few values, all of them known before a message is read: names of the topology's own parts, and the words of
enums. Never an id of a message, never the text of an error. A run's threads write a book; whoever exports it reads it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from stormproof.core.base.message import FailureReason
from stormproof.trident.audit.status import DriverState, ProblemKind
from stormproof.trident.ledger.control import Doing
from stormproof.trident.terms.transaction_states import AttemptOutcome, RejectState, TxnCause, TxnState, Verdict

PREFIX: Final = "stormproof_"


class Kind(StrEnum):
    """What a metric's numbers mean."""

    COUNTER = "counter"
    """Begins at 0 with a run of the driver, and only grows."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Where(StrEnum):
    """Who exports a metric."""

    DRIVER = "driver"
    """A running driver."""
    LEDGER = "ledger"
    """`stormproof metrics`, which needs no driver."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` has no suffix of its kind: a counter is exported with `_total`. `unit` is OpenTelemetry's."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = "1"
    where: Where = Where.DRIVER
    exact: bool = False
    """Over all lives of a topology's drivers it sums up to what the ledger says, wherever they were killed."""
    computed: bool = False
    """Its value is computed when it is read."""

    @property
    def exported(self) -> str:
        """The name in a query; of a histogram without `_bucket`, `_sum`, `_count`."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels; the topology is one of nearly every metric."""
        return self.labels if self.name == "stormproof_build_info" else ("topology", *self.labels)


BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of all histograms, in seconds."""

STEPS: Final = (
    "open",
    "job",
    "wait",
    "held_up",
    "prepare",
    "commit",
    "recount",
    "finish",
    "stage",
    "register",
    "run",
    "read_in_vain",
)
"""The values of `step`. The last four are steps of a micro-batch."""

LABEL_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "reason": tuple(FailureReason),
    "cause": ("", *TxnCause),
    "step": STEPS,
    "outcome": tuple(AttemptOutcome),
    "did": ("rolled_forward", "aborted", "abandoned", "confirms_repeated", "late_commits"),
    "doing": tuple(Doing),
    "place": ("ready", "pending", "waiting", "dead", "at_server"),
    "driver": tuple(DriverState),
    "problem": tuple(ProblemKind),
    "verdict": tuple(Verdict),
    "event": ("sent", "merged", "dropped", "failed"),
}
"""The values that a label can have, where they are words of the program. `state`: see each metric."""

STATES: Final[dict[str, tuple[str, ...]]] = {
    "stormproof_transactions": (TxnState.COMMITTED, TxnState.ABORTED, TxnState.ABANDONED),
    "stormproof_ledger_transactions": tuple(TxnState),
    "stormproof_ledger_rejects": tuple(RejectState),
}
"""The values of `state`, by metric."""


def _counter(name: str, help_: str, *labels: str, unit: str = "1", exact: bool = False) -> Metric:
    return Metric(PREFIX + name, Kind.COUNTER, help_, labels, unit, exact=exact)


def _gauge(name: str, help_: str, *labels: str, unit: str = "1", where: Where = Where.DRIVER) -> Metric:
    return Metric(PREFIX + name, Kind.GAUGE, help_, labels, unit, where)


def _ledger(name: str, help_: str, *labels: str, unit: str = "1") -> Metric:
    return _gauge(f"ledger_{name}", help_, *labels, unit=unit, where=Where.LEDGER)


BUILD_INFO: Final = _gauge("build_info", "1; versions.", "version", "python")
DRIVER_INFO: Final = _gauge("driver_info", "1; what the driver runs.", "guarantee", "incarnation", "source")
DRIVER_EPOCH: Final = _gauge("driver_epoch", "The driver's epoch, one more with each start.")
DRIVER_STARTED: Final = _gauge(
    "driver_start_timestamp_seconds", "When the driver took its epoch (Unix time, as all timestamps).", unit="s"
)
HEARTBEAT: Final = _gauge(
    "driver_heartbeat_timestamp_seconds",
    "The driver's last sign of life in the ledger. Stands still if the driver is suspended or cut off from the database; "
    "with a streaming query, one per micro-batch.",
    unit="s",
)
JOB_PROGRESS: Final = _gauge(
    "job_progress_ratio",
    "Share of the lowest batch's messages that are through the slowest running component; 0 without a job. Jobs below a "
    "second are not seen.",
)
DOING: Final = _gauge("driver_doing", "1 for what the driver does now, else 0.", "doing")

OPENED: Final = _counter("transactions_opened", "Opened transactions (batches).", exact=True)
ENDED: Final = _counter(
    "transactions",
    "Ended transactions. `cause`: why one was aborted or abandoned; empty for committed ones.",
    "state",
    "cause",
    exact=True,
)
BLOCKED: Final = _counter(
    "transactions_blocked", "Prepared transactions that a sink refused for good.", "sink", "cause", exact=True
)
SUPPRESSED: Final = _counter(
    "commits_suppressed", "Commits that a sink already had, and that were not repeated.", "sink", exact=True
)
ATTEMPTS_FAILED: Final = _counter(
    "attempts_failed", "Failed attempts that were followed by another.", "outcome", exact=True
)
MESSAGES_OPENED: Final = _counter("messages_opened", "Opened messages, replays included.", exact=True)
MESSAGES_COMMITTED: Final = _counter("messages_committed", "Messages that every sink has.", exact=True)
MESSAGES_FAILED: Final = _counter(
    "messages_failed", "Failures of messages; two failures of one count twice.", "reason", exact=True
)
MESSAGES_RETURNED: Final = _counter(
    "messages_returned", "Messages returned with a failed one that shares a tuple.", exact=True
)
MESSAGES_REPLAYED: Final = _counter("messages_replayed", "Messages opened again after a failure or return.", exact=True)
DEAD_LETTERS: Final = _counter("dead_letters", "Messages that became dead letters.", exact=True)
REJECTS: Final = _counter("rejects", "Messages whose rows a sink's table refuses.", "sink", exact=True)
TUPLES: Final = _counter("tuples", "Tuples that components emitted, in finished batches.")
READ_BYTES: Final = _counter("read_bytes", "Payload bytes of opened messages.", unit="By")
SINK_ROWS: Final = _counter(
    "sink_rows",
    "Rows prepared for the sink in committed transactions, refused and superseded ones included.",
    "sink",
    exact=True,
)
SINK_BYTES: Final = _counter("sink_bytes", "Bytes of these rows' prepared files.", "sink", unit="By", exact=True)
SUPERSEDED: Final = _counter(
    "rows_superseded", "Upserted rows without effect, since a later row of their key was there.", "sink"
)
RECOVERIES: Final = _counter("recoveries", "Recoveries that found something to do.")
RECOVERED: Final = _counter("transactions_recovered", "What recoveries did with transactions.", "did")

LATENCY: Final = Metric(
    "stormproof_commit_latency_seconds",
    Kind.HISTOGRAM,
    "From opening to commit, of transactions that this driver opened and committed.",
    unit="s",
)
STEP: Final = Metric(
    "stormproof_step_seconds",
    Kind.HISTOGRAM,
    "Time of each step. `job`: computing rows. `wait`: for earlier commits. `held_up`: while this commit kept further "
    "transactions from opening (back-pressure).",
    ("step",),
    "s",
)

IN_FLIGHT: Final = replace(_gauge("transactions_in_flight", "Open or prepared transactions."), computed=True)
OLDEST_IN_FLIGHT: Final = replace(
    _gauge("oldest_in_flight_age_seconds", "Age of the oldest of them; 0 without any.", unit="s"),
    computed=True,
)
IN_FLIGHT_LIMIT: Final = _gauge("transactions_in_flight_limit", "Most transactions in flight, as tuned now.")
BATCH_LIMIT: Final = _gauge("batch_messages_limit", "Most messages of the next transaction, as tuned now.")
BATCH_BYTES_LIMIT: Final = _gauge("batch_bytes_limit", "Most payload bytes of the next transaction.", unit="By")
LATENCY_TARGET: Final = _gauge("latency_target_seconds", "The tuner's target; absent without one.", unit="s")
LAST_COMMIT: Final = _gauge(
    "last_commit_timestamp_seconds", "Time of the last commit; absent before the first.", unit="s"
)
LAST_TXID: Final = _gauge("last_committed_txid", "Txid of the last commit.")
BACKLOG: Final = _gauge(
    "backlog_messages",
    "Messages in the source. `ready`: never opened, or returned. `pending`: in transactions. `waiting`: for a retry. "
    "`dead`: undecided dead letters. `at_server`: not yet delivered by the server at the last poll; absent if unknown.",
    "place",
)
LAG: Final = _gauge(
    "lag_seconds",
    "Age of the oldest ready message; 0 without any; absent if unknown.",
    unit="s",
)
BACKLOG_ASKED: Final = _gauge("backlog_asked_timestamp_seconds", "When the backlog was queried.", unit="s")
LINEAGE_EVENTS: Final = _counter(
    "lineage_events",
    "OpenLineage events: `sent`; `merged` into a later one; `dropped`, too many waited; `failed` at the server.",
    "event",
)

LEDGER_READ: Final = _ledger("read_timestamp_seconds", "When the ledger was read; alert on its age.", unit="s")
LEDGER_DRIVER: Final = _ledger(
    "driver",
    "1 for the newest driver's state, else 0: `running`; `stopped` in order; `dead`, as seen from its host; `unknown`: on "
    "another host, without a recent sign of life.",
    "driver",
)
LEDGER_SIGN_AGE: Final = _ledger(
    "driver_sign_age_seconds",
    "Age of the driver's last sign of life, by the database's clock; absent if it was stopped.",
    unit="s",
)
LEDGER_EPOCH: Final = _ledger("driver_epoch", "The newest epoch.")
LEDGER_PAUSED: Final = _ledger("paused", "1 if the topology is paused, else 0.")
LEDGER_PROBLEMS: Final = _ledger(
    "problems", "Problems that stop the topology, or have lost messages, by kind.", "problem"
)
LEDGER_TXNS: Final = _ledger("transactions", "Transactions in the ledger; a prune removes old ones.", "state")
LEDGER_LAST_TXID: Final = _ledger("last_txid", "The highest txid.")
LEDGER_LAST_COMMIT: Final = _ledger(
    "last_commit_timestamp_seconds", "Time of the last commit; absent before the first.", unit="s"
)
LEDGER_OLDEST: Final = _ledger(
    "oldest_pending_age_seconds",
    "Age of the oldest transaction that has not ended, blocked ones included; 0 without any.",
    unit="s",
)
LEDGER_BACKLOG: Final = _ledger(
    "backlog_messages", "As `stormproof_backlog_messages`; absent if only the server knows.", "place"
)
LEDGER_LAG: Final = _ledger("lag_seconds", "As `stormproof_lag_seconds`.", unit="s")
LEDGER_REJECTS: Final = _ledger("rejects", "Rejects; `open` ones wait for a decision.", "state")
LEDGER_SINK_TXID: Final = _ledger("sink_last_txid", "The last txid that the sink is known to have.", "sink")
LEDGER_VERDICT: Final = _ledger(
    "verify_verdict",
    "1 for the newest verdict of `audit verify`, else 0; absent before the first.",
    "verdict",
)
LEDGER_VERDICT_AT: Final = _ledger(
    "verify_timestamp_seconds", "Time of the newest verdict; absent before the first.", unit="s"
)

METRICS: Final = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of this file."""
BY_NAME: Final = {metric.name: metric for metric in METRICS}


# ---- the values

Labels: TypeAlias = tuple[str, ...]
Computed: TypeAlias = Callable[[], Mapping[Labels, float]]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values of a histogram: how many were in each bucket of `BUCKETS_S`, and above them all; and their sum."""

    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class MetricValue:
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

    def samples(self) -> list[MetricValue]:
        """All present values."""
        with self._lock:
            values = dict(self._values)
            buckets = {key: tuple(counts) for key, counts in self._buckets.items()}
            computed = tuple(self._computed)
        found: list[MetricValue] = []
        for (metric, labels), value in values.items():
            counts = buckets.get((metric, labels))
            found.append(MetricValue(metric, labels, value if counts is None else Distribution(counts, value)))
        for metric in computed:
            found += [MetricValue(metric, labels, value) for labels, value in self.computed(metric).items()]
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
