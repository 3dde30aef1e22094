"""`audit replays`: what was tried again, why, how often, and which txid committed it in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot
from stormproof.trident.audit.lifecycle import MESSAGE_EVENTS, MessageHistory, Records, history, traces
from stormproof.trident.audit.questions import Asked, answered
from stormproof.trident.audit.source import SourceReader, server_ids, stored_source
from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.ledger.rows import Event
from stormproof.trident.transaction_states import EventKind, TxnCause, TxnState

_ALL_FAILED: Final = TxnCause.EVERY_MESSAGE_FAILED


@dataclass(frozen=True, slots=True)
class ReturnedBatch:
    """A batch that ended without an effect: its messages were given back, or it was abandoned."""

    txid: int
    state: str
    cause: str | None
    reason: str
    """The cause in words."""
    messages: int
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt at a batch that was followed by another one."""

    txid: int
    attempt: int
    outcome: str
    error: str
    at: datetime | None


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A commit that found its batch in the sink already: a duplicate that was not applied."""

    txid: int
    sink: str
    at: datetime | None
    micro_batch: str | None = None
    """QUERY:BATCH, if a streaming query handed a micro-batch out again; fed to a topology, that has no one txid: 0."""
    key: str | None = None
    """The key of a job that was run again."""


@dataclass(frozen=True, slots=True)
class ReplaysReport:
    """All that was tried more than once."""

    topology: str
    messages: tuple[MessageHistory, ...]
    batches: tuple[ReturnedBatch, ...]
    attempts: tuple[FailedAttempt, ...]
    suppressed: tuple[Suppressed, ...]
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """How many of each a limit left out."""
    server_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """What their server calls messages, by their ids here, where that is on record."""


@dataclass(frozen=True, slots=True)
class ReplaysAnswer:
    """The answer of `audit replays`: in one shape, whatever was asked.

    The first five are those of every question that a view answers: rows of the view, or with `group` their counts. With a
    topology, and neither filter nor group, `histories` has more than a row holds: each failed message with its failures
    and its end, and the duplicates that were suppressed. Else it is None.
    """

    question: str
    view: str
    asked: Asked
    rows: tuple[dict[str, Any], ...]
    left_out: int
    histories: ReplaysReport | None


def answered_replays(ledger: AuditLedger, asked: Asked) -> ReplaysAnswer:
    """What was replayed, from one instant.

    Raises:
        UsageError: no such topology, or a filter or group that the question does not have.
        StoreUnavailable: the database does not answer.
    """
    with ledger.snapshot() as snapshot:
        answer = answered(snapshot, QUESTIONS["replays"], asked)
        whole = asked.topology is not None and asked == Asked(asked.topology, limit=asked.limit)
        histories = replays_in(snapshot, asked.topology, limit=asked.limit) if whole and asked.topology else None
    return ReplaysAnswer(answer.question, answer.view, answer.asked, answer.rows, answer.left_out, histories)


def replays(
    ledger: AuditLedger, topology: str, *, source: SourceReader = stored_source, limit: int | None = None
) -> ReplaysReport:
    """What was replayed: the newest `limit` of each kind, or all.

    Raises:
        UsageError: there is no such topology.
    """
    with ledger.snapshot() as snapshot:
        return replays_in(snapshot, topology, source=source, limit=limit)


def replays_in(
    snapshot: LedgerSnapshot, topology: str, *, source: SourceReader = stored_source, limit: int | None = None
) -> ReplaysReport:
    """The same from an instant that other questions are asked of, too."""
    row = snapshot.topology(topology)
    names, more_messages = snapshot.failing_messages(row.incarnation, limit)
    among = None if limit is None else names
    told = traces(snapshot.events(row.incarnation, MESSAGE_EVENTS, messages=among))
    wanted = set(names)
    found = {name: trace for name, trace in told.items() if name in wanted}
    batches, more_batches = snapshot.given_back(row.incarnation, limit)
    attempts, more_attempts = snapshot.newest_events(row.incarnation, EventKind.ATTEMPT_FAILED, limit)
    suppressed, more_suppressed = snapshot.newest_events(row.incarnation, EventKind.SUPPRESSED, limit)
    txids = {txid for trace in found.values() for txid in trace.txids}
    txns = snapshot.txns(row.incarnation) if limit is None else snapshot.some_txns(row.incarnation, txids)
    last = {txn.txid: txn for txn in txns}
    back = [last[trace.txids[-1]] for trace in found.values() if trace.txids and trace.txids[-1] in last]
    searched = [txn.txid for txn in back if txn.state is TxnState.ABORTED and txn.cause is not _ALL_FAILED]
    if searched:  # the batches that opened their slices again are known by their slices alone
        txns = [*txns, *snapshot.txns(row.incarnation, min(searched))]
    rejects = snapshot.rejects(row.incarnation, messages=among)
    records = Records.of(txns, source(snapshot, row), rejects, snapshot.skipped(row.incarnation))
    messages = tuple(history(trace, records) for trace in found.values())
    left_out = {
        "messages": more_messages,
        "batches": more_batches,
        "attempts": more_attempts,
        "suppressed": more_suppressed,
    }
    return ReplaysReport(
        topology=topology,
        messages=messages,
        batches=tuple(
            ReturnedBatch(txn.txid, txn.state.value, txn.cause, txn.reason or "", txn.messages, txn.ended_at)
            for txn in batches
        ),
        attempts=tuple(
            FailedAttempt(e.txid or 0, e.attempt or 0, e.reason or "", e.error or "", e.at) for e in attempts
        ),
        suppressed=tuple(Suppressed(e.txid or 0, e.sink or "", e.at, _micro_batch(e), _key(e)) for e in suppressed),
        left_out=left_out,
        server_ids=server_ids(snapshot, row, wanted),
    )


def _micro_batch(event: Event) -> str | None:
    detail = event.detail or {}
    return f"{detail['query']}:{detail['batch']}" if detail.keys() >= {"query", "batch"} else None


def _key(event: Event) -> str | None:
    key = (event.detail or {}).get("key")
    return None if key is None else str(key)
