"""`status`: every topology, its driver, its batches, and its backlog."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from statistics import fmean, quantiles
from typing import Final

import psutil

from stormproof.core.base.errors import Json
from stormproof.core.contract.source import Backlog
from stormproof.core.pending.journal import JournalCounts
from stormproof.trident.audit.evidence import SourceEvidence, StreamPlace, place_of
from stormproof.trident.audit.inspect import Has, Holding, Holdings, SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.source import SourceReader, open_losses, stored_source
from stormproof.trident.ledger.control import Control, JobProgress, SignOfLife, control_of, signs_of_life
from stormproof.trident.ledger.handed_in import JobKeys, summary
from stormproof.trident.ledger.missing import Missing
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.ledger.tables import Txn, record_of
from stormproof.trident.terms.observers import Figures
from stormproof.trident.terms.transaction_states import EventKind, OperatorAction, TxnState
from stormproof.trident.terms.wording import counted

LAST_BATCHES: Final = 20
_STEPS: Final = ("open", "job", "wait", "prepare", "commit", "held_up")


@dataclass(frozen=True, slots=True)
class Pace:
    """The last committed batches of the present epoch, at most `LAST_BATCHES`.

    `messages` is the mean of a batch. `messages_per_s` covers the time from the first batch's open to the last one's
    commit. Latency is from open to committed. `steps_ms` has means: `wait` is the time from ready to the batch's turn to
    commit; `held_up` is the time in which no further batch could be opened, because this one was being committed and
    the limit of batches in flight was reached (with one in flight, that is all of its commit). `back_pressure` is the
    share of the whole time that was held up.
    """

    batches: int
    messages: float
    messages_per_s: float
    latency_p50_ms: float
    latency_p90_ms: float
    steps_ms: dict[str, float]
    back_pressure: float


def pace_of(txns: Sequence[Txn]) -> Pace | None:
    """The pace of committed batches; None where there are none."""
    ended = sorted((txn for txn in txns if txn.ended_at is not None), key=lambda txn: txn.txid)[-LAST_BATCHES:]
    spans = [(txn.ended_at - txn.opened_at).total_seconds() for txn in ended if txn.ended_at is not None]
    if not spans:
        return None
    opened, last = min(txn.opened_at for txn in ended), max(txn.ended_at for txn in ended if txn.ended_at is not None)
    seconds = (last - opened).total_seconds()
    messages = sum(txn.messages for txn in ended)
    deciles = quantiles(spans, n=10, method="inclusive") if len(spans) > 1 else spans * 9
    steps = {step: fmean(txn.steps_ms.get(step, 0.0) for txn in ended) for step in _STEPS}
    return Pace(
        batches=len(ended),
        messages=messages / len(ended),
        messages_per_s=messages / seconds if seconds > 0 else 0.0,
        latency_p50_ms=deciles[4] * 1000,
        latency_p90_ms=deciles[8] * 1000,
        steps_ms=steps,
        back_pressure=min(1.0, steps["held_up"] * len(ended) / (seconds * 1000)) if seconds > 0 else 0.0,
    )


START_TOLERANCE_S: Final = 1.0
"""How far two readings of one process's start time may differ."""


class DriverState(StrEnum):
    """Whether a topology's driver is running."""

    RUNNING = "running"
    STOPPED = "stopped"
    """It ended in an orderly way."""
    DEAD = "dead"
    """It ended without an orderly end: the next start recovers."""
    UNKNOWN = "unknown"
    """It is on another host, and gives no sign of life."""


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """One sink: the last txid that it is known to hold, by ledger or store, and the earlier ones that it lacks."""

    sink: str
    target: str
    last_txid: int | None
    missing: tuple[Missing, ...] = ()
    superseded: int = 0
    """Rows of an upsert that changed nothing, over the batches that the ledger still has."""
    dropped: int = 0
    """Rows that the table's own triggers dropped."""
    committer: str | None = None
    """Who writes to its table, where that depends on the table's features."""


@dataclass(frozen=True, slots=True)
class UnresolvedTxn:
    """A batch that has not ended."""

    txid: int
    state: str
    since: datetime
    messages: int
    cause: str | None
    """Why it is blocked."""
    reason: str | None
    """The cause in words."""
    sinks: tuple[Holding, ...] = ()
    """What each sink holds of it, where it is blocked or no driver that answers is committing it."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the newest recovery did that found something to do; each list has txids, or pairs of txid and sink."""

    at: datetime | None
    epoch: int
    did: dict[str, Json]


@dataclass(frozen=True, slots=True)
class RefusedStart:
    """Why a topology's newest start ended before its first batch."""

    at: datetime | None
    sink: str | None
    reason: str


class ProblemKind(StrEnum):
    """What keeps a topology from going on, or has cost it messages; append-only, since monitoring matches on it."""

    BLOCKED = "blocked"
    """A sink refused a batch for good."""
    START_REFUSED = "start_refused"
    """The newest start ended before its first batch."""
    DRIVER_DEAD = "driver_dead"
    """The driver ended without an orderly end."""
    DRIVER_SILENT = "driver_silent"
    """The driver has given no sign of life for a while: it is suspended, or cut off from the database."""
    LOSS_OPEN = "loss_open"
    """The source's server removed messages before they were read, or it cannot be told, and nobody accepted that."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a person has to act on, and the next command; None if there is no single one."""

    kind: ProblemKind
    text: str
    command: str | None


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """What an operator asked of the driver; `heard_at` is None until it has taken note."""

    what: str
    """``pause``, ``drain`` or ``stop``."""
    by: str
    why: str
    at: datetime
    heard_at: datetime | None


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """The undecided dead letters of one class of error."""

    error_class: str
    reason: str
    number: int


@dataclass(frozen=True, slots=True)
class TopologyStatus:
    """One topology.

    `backlog` is None if the source is not in the ledger's database; `pace`, if the newest epoch has committed nothing yet.
    `in_flight` is the number of batches that a running driver has open or prepared. `tuning` has the limits that held
    when the newest batch was opened: messages and bytes of a batch, batches in flight; and with a latency target, the
    target and the tuner's last decision. It is None if the newest epoch has opened nothing yet.
    """

    name: str
    incarnation: str
    epoch: int
    guarantee: str
    driver: DriverState
    driver_host: str
    driver_pid: int
    started_at: datetime
    stopped_at: datetime | None
    source: str
    last_txid: int | None
    txns: dict[str, int]
    unresolved: tuple[UnresolvedTxn, ...]
    backlog: Backlog | None
    pace: Pace | None
    sinks: tuple[SinkStatus, ...]
    recovered: Recovered | None = None
    pruned_upto: int = 0
    refused: RefusedStart | None = None
    in_flight: int = 0
    tuning: Figures | None = None
    stream: StreamPlace | None = None
    """The place of the streaming query that feeds it."""
    jobs: JobKeys | None = None
    """The keys that were taken, where a program writes by keys."""
    journal: JournalCounts | None = None
    """If the source's server redelivers: the messages written down, owed to the server, and suppressed."""
    notes: tuple[str, ...] = ()
    """What holds some of the source's messages up, such as a producer's open transaction in Kafka."""
    problems: tuple[Problem, ...] = ()
    dead_letters: tuple[DeadLetterCount, ...] | None = None
    """The most frequent class first; None if they were not asked for, or the source cannot be reached."""
    rejects: dict[str, int] = field(default_factory=dict[str, int])
    """How many rejects there are, by state: open, retrying, retried, dropped."""
    doing: str | None = None
    """What the driver does by its newest sign of life: running, pausing, paused, draining, stopping; None: none runs."""
    job: JobProgress | None = None
    """How far the job of the lowest batch in flight is, by that sign; None: none runs, or it began just now."""
    last_sign_s: float | None = None
    """How old that sign is, in seconds."""
    last_heard_at: datetime | None = None
    """When the driver gave its newest sign of life, by the database's clock; None: it gave none."""
    asked: OperatorRequest | None = None
    """What an operator asked for, as long as it holds: a pause, or that the running driver ends."""

    @property
    def since(self) -> datetime:
        """Since when the driver is in its state: one that is dead, or not seen from here, since it was last heard."""
        if self.stopped_at is not None:
            return self.stopped_at
        heard = None if self.driver is DriverState.RUNNING else self.last_heard_at
        return self.started_at if heard is None else heard


@dataclass(frozen=True, slots=True)
class StatusReport:
    """All topologies, by name."""

    topologies: tuple[TopologyStatus, ...]


def status(
    ledger: AuditLedger,
    topology: str | None = None,
    *,
    source: SourceReader = stored_source,
    committer: Callable[[SinkBinding], str | None] = lambda _: None,
    opener: SinkOpener | None = None,
) -> StatusReport:
    """Every topology in the ledger; or one, with its dead letters counted by class of error, who commits to its tables, and,
    with an `opener`, what its sinks hold by their own record of batches that are blocked or whose driver is gone.

    Raises:
        UsageError: the ledger does not have this topology.
    """
    with ledger.snapshot() as snapshot:
        if topology is not None:
            return StatusReport(
                (_topology(snapshot, snapshot.topology(topology), source, committer, opener, counts_dead=True),)
            )
        return StatusReport(tuple(_topology(snapshot, row, source) for row in snapshot.topologies()))


def _topology(
    snapshot: LedgerSnapshot,
    row: TopologyRow,
    source: SourceReader,
    committer: Callable[[SinkBinding], str | None] = lambda _: None,
    opener: SinkOpener | None = None,
    *,
    counts_dead: bool = False,
) -> TopologyStatus:
    sign = sign_of(snapshot, row)
    driver = driver_state(row, sign)
    runs = driver in (DriverState.RUNNING, DriverState.UNKNOWN)
    unresolved, holdings = snapshot.unresolved(row.incarnation), holdings_of(snapshot, row, opener)
    held = {
        txn.txid: tuple(holdings.of(txn, item.work) for item in snapshot.work(row.incarnation, txn.txid, txn.txid))
        for txn in unresolved
        if txn.state is TxnState.BLOCKED or not holdings.driver_answers
    }
    newest = snapshot.newest_opened(row.incarnation, row.epoch)
    evidence = source(snapshot, row)
    missing = snapshot.missing(row.incarnation)
    refused = _refused(snapshot, row)
    return record_of(
        TopologyStatus,
        row,
        driver=driver,
        last_txid=snapshot.last_txid(row.incarnation),
        txns=snapshot.counts(row.incarnation),
        unresolved=tuple(
            record_of(
                UnresolvedTxn,
                txn,
                state=txn.state.value,
                since=txn.prepared_at or txn.opened_at,
                sinks=held.get(txn.txid, ()),
            )
            for txn in unresolved
        ),
        backlog=None if evidence is None else evidence.backlog(),
        pace=pace_of(snapshot.last_committed(row.incarnation, row.epoch, LAST_BATCHES)),
        sinks=tuple(
            SinkStatus(
                b.sink,
                b.target,
                _last_held(snapshot.last_held(row.incarnation, b.sink), b.sink, held),
                missing.get(b.sink, ()),
                snapshot.superseded(row.incarnation, b.sink),
                snapshot.dropped(row.incarnation, b.sink),
                committer=committer(b),
            )
            for b in snapshot.sinks(row.incarnation)
        ),
        recovered=_recovered(snapshot, row.incarnation),
        pruned_upto=snapshot.pruned_upto(row.incarnation),
        in_flight=0
        if driver in (DriverState.STOPPED, DriverState.DEAD)
        else sum(txn.state in (TxnState.OPEN, TxnState.PREPARED) for txn in unresolved),
        tuning=None if newest is None else Figures.of_json(newest.tuning),
        stream=place_of(snapshot.connection, row.incarnation),
        jobs=summary(snapshot.connection, row.incarnation),
        journal=None if evidence is None else evidence.journal(),
        notes=() if evidence is None else evidence.notes(),
        refused=refused,
        problems=tuple(problems_of(row, driver, sign, unresolved, refused, open_losses(snapshot, row, evidence))),
        doing=sign.doing if runs and sign is not None else None,
        job=sign.job if driver is DriverState.RUNNING and sign is not None and sign.is_fresh else None,
        last_sign_s=round(sign.age_s, 1) if runs and sign is not None else None,
        last_heard_at=None if sign is None else sign.at,
        asked=_asked(control_of(snapshot.connection, row.incarnation), row.epoch, runs=runs),
        rejects=snapshot.reject_counts(row.incarnation),
        dead_letters=None if evidence is None or not counts_dead else _dead_letters(evidence),
    )


def _last_held(known: int | None, sink: str, held: Mapping[int, Sequence[Holding]]) -> int | None:
    """The last txid that a sink holds: by the ledger, and of the batches that have not ended by what was found."""
    has = (txid for txid, found in held.items() for one in found if one.sink == sink and one.has is Has.HAS)
    return max(has if known is None else (known, *has), default=None)


def _asked(found: Control | None, epoch: int, *, runs: bool) -> OperatorRequest | None:
    if found is None:
        return None
    ending = found.ends(epoch) if runs else None
    if ending is None and not found.paused:
        return None
    what = OperatorAction.PAUSE.value if ending is None else ending.value
    return OperatorRequest(what, found.by, found.why, found.asked_at, found.heard_at)


def problems_of(
    row: TopologyRow,
    driver: DriverState,
    sign: SignOfLife | None,
    unresolved: Sequence[Txn],
    refused: RefusedStart | None,
    losses: Sequence[str],
) -> Iterator[Problem]:
    """What a person has to act on; `unresolved` are the topology's batches that have not ended, `losses` those that nobody
    accepted.
    """
    for txn in unresolved:
        if txn.state is TxnState.BLOCKED:
            text = f"txid {txn.txid} is blocked: {txn.reason}"
            yield Problem(ProblemKind.BLOCKED, text, f"stormproof retry {row.name} {txn.txid}")
    if refused is not None:
        yield Problem(ProblemKind.START_REFUSED, f"epoch {row.epoch} did not start: {refused.reason}", None)
    elif driver is DriverState.DEAD:
        who = f"{row.driver_host}:{row.driver_pid}"
        heard = f"started {row.started_at:%F %T} UTC" if sign is None else f"last heard {sign.at:%F %T} UTC"
        text = f"the driver {who} ({heard}) is gone without an orderly end: start the topology again, which recovers"
        yield Problem(ProblemKind.DRIVER_DEAD, text, None)
    elif driver is not DriverState.STOPPED and sign is not None and not sign.is_fresh:
        who = f"{row.driver_host}:{row.driver_pid}"
        text = (
            f"the driver {who} has given no sign of life for {sign.age_s:.0f} s: it is suspended, cut off from the "
            "database, or its host is gone. Another start takes over from it, and fences it"
        )
        yield Problem(ProblemKind.DRIVER_SILENT, text, None)
    if losses:
        text = f"{counted(len(losses), 'loss', 'losses')} on record that nobody accepted, the last: {losses[-1]}"
        yield Problem(ProblemKind.LOSS_OPEN, text, f"stormproof ledger accept-loss {row.name}")


def _dead_letters(evidence: SourceEvidence) -> tuple[DeadLetterCount, ...]:
    found = Counter(evidence.dead_classes())
    return tuple(DeadLetterCount(*key, number) for key, number in found.most_common())


def _refused(snapshot: LedgerSnapshot, row: TopologyRow) -> RefusedStart | None:
    """The refusal of the newest start; an older start's refusal no longer matters."""
    event = snapshot.newest_event(row.incarnation, EventKind.START_REFUSED)
    if event is None or (event.detail or {}).get("epoch") != row.epoch:
        return None
    return RefusedStart(event.at, event.sink, event.error or "")


def _recovered(snapshot: LedgerSnapshot, incarnation: str) -> Recovered | None:
    event = snapshot.newest_event(incarnation, EventKind.RECOVERY)
    if event is None:
        return None
    detail = dict(event.detail or {})
    epoch = detail.pop("epoch", 0)
    return Recovered(event.at, epoch if isinstance(epoch, int) else 0, {key: did for key, did in detail.items() if did})


def sign_of(snapshot: LedgerSnapshot, row: TopologyRow) -> SignOfLife | None:
    """The newest sign of life of the newest epoch's driver."""
    sign = signs_of_life(snapshot.connection).get(row.incarnation)
    return sign if sign is not None and sign.epoch == row.epoch else None


def holdings_of(snapshot: LedgerSnapshot, row: TopologyRow, opener: SinkOpener | None) -> Holdings:
    """Tells what the sinks of a topology hold; see `Holdings`."""
    sign = sign_of(snapshot, row)
    answers = driver_state(row, sign) is DriverState.RUNNING and (sign is None or sign.is_fresh)
    return Holdings(row, snapshot.sinks(row.incarnation), opener, driver_answers=answers)


def driver_state(row: TopologyRow, sign: SignOfLife | None = None) -> DriverState:
    """Whether the newest epoch's driver is running; the start time tells a reused process id.

    `sign` is the sign of life of the newest epoch, if there is one: it tells of a driver on another host.
    """
    if row.stopped_at is not None:
        return DriverState.STOPPED
    if row.driver_host != socket.gethostname():
        return DriverState.RUNNING if sign is not None and sign.is_fresh else DriverState.UNKNOWN
    try:
        process = psutil.Process(row.driver_pid)
        alive = (
            abs(process.create_time() - row.driver_started) <= START_TOLERANCE_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        alive = False
    return DriverState.RUNNING if alive else DriverState.DEAD


def may_be_running(row: TopologyRow) -> bool:
    """Whether the newest epoch's driver is running, or is on another host, where that cannot be seen."""
    return driver_state(row) in (DriverState.RUNNING, DriverState.UNKNOWN)
