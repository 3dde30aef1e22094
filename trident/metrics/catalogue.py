"""Every metric: its name, kind, unit, labels and meaning. `docs/metrics.md` is made of this table.

Labels have few values, all of them known before a message is read: names of the topology's own parts, and the words of
enums. Never an id of a message, never the text of an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from stormproof.core.message import FailureReason
from stormproof.trident.audit.status import DriverState, ProblemKind
from stormproof.trident.ledger.control import Doing
from stormproof.trident.transaction_states import AttemptOutcome, RejectState, TxnCause, TxnState, Verdict

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


BUILD_INFO: Final = _gauge("build_info", "1; the versions of what runs.", "version", "python")
DRIVER_INFO: Final = _gauge("driver_info", "1; what the driver runs, and how.", "guarantee", "incarnation", "source")
DRIVER_EPOCH: Final = _gauge("driver_epoch", "The driver's epoch: it grows by one with each start.")
DRIVER_STARTED: Final = _gauge(
    "driver_start_timestamp_seconds", "When the driver took its epoch, in seconds since 1970.", unit="s"
)
HEARTBEAT: Final = _gauge(
    "driver_heartbeat_timestamp_seconds",
    "When the driver last left a sign of life in the ledger. A driver that is cut off from the database, or is suspended, "
    "stands still here; one fed by a streaming query leaves one with each micro-batch.",
    unit="s",
)
JOB_PROGRESS: Final = _gauge(
    "job_progress_ratio",
    "Share of the messages of the lowest batch in flight that are through the slowest component that its job is in now; 0 "
    "where no job runs. A job that takes less than a second is not seen.",
)
DOING: Final = _gauge("driver_doing", "1 for what the driver does now, 0 for the other states.", "doing")

OPENED: Final = _counter("transactions_opened", "Transactions (batches) that were opened.", exact=True)
ENDED: Final = _counter(
    "transactions",
    "Transactions that ended, by their end. `cause` is why one was aborted or abandoned, and empty for committed ones.",
    "state",
    "cause",
    exact=True,
)
BLOCKED: Final = _counter(
    "transactions_blocked", "Prepared transactions that a sink refused for good.", "sink", "cause", exact=True
)
SUPPRESSED: Final = _counter(
    "commits_suppressed", "Commits that a sink held already, and that were not applied again.", "sink", exact=True
)
ATTEMPTS_FAILED: Final = _counter(
    "attempts_failed", "Attempts at a transaction that failed and were followed by another.", "outcome", exact=True
)
MESSAGES_OPENED: Final = _counter("messages_opened", "Messages that were opened, replays included.", exact=True)
MESSAGES_COMMITTED: Final = _counter("messages_committed", "Messages that every sink holds.", exact=True)
MESSAGES_FAILED: Final = _counter(
    "messages_failed", "Failures of messages; one that fails twice counts twice.", "reason", exact=True
)
MESSAGES_RETURNED: Final = _counter(
    "messages_returned", "Messages that went back with a failed one with which they share a tuple.", exact=True
)
MESSAGES_REPLAYED: Final = _counter(
    "messages_replayed", "Messages that were opened again after they had failed or been returned.", exact=True
)
DEAD_LETTERS: Final = _counter("dead_letters", "Messages that were given up.", exact=True)
REJECTS: Final = _counter(
    "rejects", "Messages that a sink does not hold, since its table refuses their rows.", "sink", exact=True
)
TUPLES: Final = _counter("tuples", "Tuples that components passed on, in batches that this driver ran to their end.")
READ_BYTES: Final = _counter("read_bytes", "Bytes of payload of the messages that were opened.", unit="By")
SINK_ROWS: Final = _counter(
    "sink_rows",
    "Rows that were prepared for the sink in committed transactions, refused and superseded ones included.",
    "sink",
    exact=True,
)
SINK_BYTES: Final = _counter(
    "sink_bytes", "Bytes of the files that these rows were prepared in.", "sink", unit="By", exact=True
)
SUPERSEDED: Final = _counter(
    "rows_superseded", "Rows of upserts that changed nothing, since a later one of their key was there.", "sink"
)
RECOVERIES: Final = _counter("recoveries", "Recoveries that found something to do.")
RECOVERED: Final = _counter("transactions_recovered", "What recoveries did with transactions.", "did")

LATENCY: Final = Metric(
    "stormproof_commit_latency_seconds",
    Kind.HISTOGRAM,
    "From the opening of a transaction to its commit; of those that this driver both opened and committed.",
    unit="s",
)
STEP: Final = Metric(
    "stormproof_step_seconds",
    Kind.HISTOGRAM,
    "The time of each step of a transaction. `job`: computing its rows. `wait`: for the commit of earlier ones. `held_up`: "
    "while no further transaction could be opened because this one was being committed (back-pressure of the sinks).",
    ("step",),
    "s",
)

IN_FLIGHT: Final = replace(_gauge("transactions_in_flight", "Transactions that are open or prepared."), computed=True)
OLDEST_IN_FLIGHT: Final = replace(
    _gauge("oldest_in_flight_age_seconds", "Age of the oldest transaction in flight; 0 where there is none.", unit="s"),
    computed=True,
)
IN_FLIGHT_LIMIT: Final = _gauge("transactions_in_flight_limit", "Transactions that may be in flight, as tuned now.")
BATCH_LIMIT: Final = _gauge("batch_messages_limit", "Messages that the next transaction may have, as tuned now.")
BATCH_BYTES_LIMIT: Final = _gauge(
    "batch_bytes_limit", "Bytes of payload that the next transaction may have.", unit="By"
)
LATENCY_TARGET: Final = _gauge(
    "latency_target_seconds", "The latency that the tuner aims at; absent without a target.", unit="s"
)
LAST_COMMIT: Final = _gauge(
    "last_commit_timestamp_seconds", "When the last transaction was committed; absent before the first.", unit="s"
)
LAST_TXID: Final = _gauge("last_committed_txid", "The number of the last transaction that was committed.")
BACKLOG: Final = _gauge(
    "backlog_messages",
    "Messages in the source: `ready` ones were never opened or were given back, `pending` ones are in transactions, "
    "`waiting` ones failed and wait for their retry, `dead` ones are undecided dead letters. `at_server` ones are with a "
    "server that delivers, and were not delivered when messages were last asked for; absent where the server does not tell.",
    "place",
)
LAG: Final = _gauge(
    "lag_seconds",
    "Age of the oldest message that is ready; absent where the source cannot tell, 0 if none is.",
    unit="s",
)
BACKLOG_ASKED: Final = _gauge(
    "backlog_asked_timestamp_seconds", "When the source was asked for its backlog; between two batches.", unit="s"
)
LINEAGE_EVENTS: Final = _counter(
    "lineage_events",
    "OpenLineage events: `sent`, `merged` into a later one by throttling, `dropped` because too many waited, or `failed` "
    "because the server did not take it.",
    "event",
)

LEDGER_READ: Final = _ledger("read_timestamp_seconds", "When the ledger was read; alert on its age, too.", unit="s")
LEDGER_DRIVER: Final = _ledger(
    "driver",
    "1 for the state of the topology's newest driver, 0 for the others: `running`; `stopped` in order; `dead`, which was "
    "seen from its own host; `unknown`, on another host and without a fresh sign of life.",
    "driver",
)
LEDGER_SIGN_AGE: Final = _ledger(
    "driver_sign_age_seconds",
    "Age of the newest sign of life of a driver that should be running, by the database's clock. Absent if it was stopped.",
    unit="s",
)
LEDGER_EPOCH: Final = _ledger("driver_epoch", "The newest epoch.")
LEDGER_PAUSED: Final = _ledger("paused", "1 if an operator paused the topology, else 0.")
LEDGER_PROBLEMS: Final = _ledger(
    "problems", "What keeps the topology from going on, or has cost it messages, by kind.", "problem"
)
LEDGER_TXNS: Final = _ledger(
    "transactions", "Transactions that the ledger has, by state; a prune removes old ones.", "state"
)
LEDGER_LAST_TXID: Final = _ledger("last_txid", "The highest number that was given to a transaction.")
LEDGER_LAST_COMMIT: Final = _ledger(
    "last_commit_timestamp_seconds", "When the topology last committed; absent before its first commit.", unit="s"
)
LEDGER_OLDEST: Final = _ledger(
    "oldest_pending_age_seconds",
    "Age of the oldest transaction that has not ended, blocked ones included; 0 where there is none.",
    unit="s",
)
LEDGER_BACKLOG: Final = _ledger(
    "backlog_messages", "As `stormproof_backlog_messages`; absent where only the source's server can tell.", "place"
)
LEDGER_LAG: Final = _ledger("lag_seconds", "As `stormproof_lag_seconds`.", unit="s")
LEDGER_REJECTS: Final = _ledger("rejects", "Rejects by state; the open ones wait for a decision.", "state")
LEDGER_SINK_TXID: Final = _ledger("sink_last_txid", "The last transaction that the sink is known to hold.", "sink")
LEDGER_VERDICT: Final = _ledger(
    "verify_verdict",
    "1 for the newest verdict of `audit verify`, 0 for the others; absent before the first.",
    "verdict",
)
LEDGER_VERDICT_AT: Final = _ledger(
    "verify_timestamp_seconds", "When `audit verify` last gave a verdict; absent before the first.", unit="s"
)

METRICS: Final = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of this file."""
BY_NAME: Final = {metric.name: metric for metric in METRICS}
