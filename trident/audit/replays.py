"""`audit replays`: what was tried again, why, how often, and which txid committed it in the end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.lifecycle import MESSAGE_EVENTS, MessageHistory, Records, history, traces
from stormproof.trident.audit.source import SourceReader, stored_source
from stormproof.trident.ledger.rows import Event
from stormproof.trident.transaction_states import EventKind, TxnCause, TxnState


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


def replays(ledger: AuditLedger, topology: str, *, source: SourceReader = stored_source) -> ReplaysReport:
    """What was replayed; raises UsageError where there is no such topology."""
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        txns = snapshot.txns(row.incarnation)
        records = Records.of(txns, source(snapshot, row), snapshot.rejects(row.incarnation))
        events = snapshot.events(row.incarnation, [*MESSAGE_EVENTS, EventKind.ATTEMPT_FAILED, EventKind.SUPPRESSED])
    given_back = (TxnState.ABORTED, TxnState.ABANDONED)
    return ReplaysReport(
        topology=topology,
        messages=tuple(
            history(trace, records)
            for trace in traces([e for e in events if e.kind in MESSAGE_EVENTS]).values()
            if trace.failures or trace.returns or trace.replays
        ),
        batches=tuple(
            ReturnedBatch(txn.txid, txn.state.value, txn.cause, txn.reason or "", txn.messages, txn.ended_at)
            for txn in txns
            if txn.state in given_back and txn.cause is not TxnCause.EVERY_MESSAGE_FAILED
        ),
        attempts=tuple(
            FailedAttempt(e.txid or 0, e.attempt or 0, e.reason or "", e.error or "", e.at)
            for e in events
            if e.kind is EventKind.ATTEMPT_FAILED
        ),
        suppressed=tuple(
            Suppressed(e.txid or 0, e.sink or "", e.at, _micro_batch(e), _key(e))
            for e in events
            if e.kind is EventKind.SUPPRESSED
        ),
    )


def _micro_batch(event: Event) -> str | None:
    detail = event.detail or {}
    return f"{detail['query']}:{detail['batch']}" if detail.keys() >= {"query", "batch"} else None


def _key(event: Event) -> str | None:
    key = (event.detail or {}).get("key")
    return None if key is None else str(key)
