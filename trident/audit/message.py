"""`audit message`: what became of one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from stormproof.core.errors import UsageError
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.ledger import AuditLedger
from stormproof.trident.audit.lifecycle import (
    MESSAGE_EVENTS,
    EndKind,
    EndState,
    Failure,
    Records,
    Trace,
    end_in,
    end_of,
    traces,
)
from stormproof.trident.audit.source import SourceReader, stored_source
from stormproof.trident.ledger.rows import Txn
from stormproof.trident.transaction import EventKind


@dataclass(frozen=True, slots=True)
class Opening:
    """One batch that had the message, and whether it failed there, or was returned with one that did."""

    txid: int
    state: str
    retry: bool
    failed: bool
    returned: bool = False


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """What an operator decided about the message as a dead letter; of an edit, the SHA-256 of both payloads."""

    action: str
    by: str | None
    why: str | None
    at: datetime | None = None
    payload_sha256: str | None = None
    new_payload_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class MessageReport:
    """One message: every batch that opened it, its failures, and where it stands."""

    topology: str
    message: str
    openings: tuple[Opening, ...]
    failures: tuple[Failure, ...]
    operator: tuple[OperatorAction, ...]
    end: EndState
    returned: tuple[Failure, ...] = ()


def message(
    ledger: AuditLedger, topology: str, shown_id: str, *, source: SourceReader = stored_source
) -> MessageReport:
    """What became of a message, by its id as people see it (`XID-N` in a Postgres queue).

    Raises:
        UsageError: no such topology, not an id of its source, or neither ledger nor source knows the message.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        evidence = source(snapshot, row)
        txns = {txn.txid: txn for txn in snapshot.txns(row.incarnation)}
        events = snapshot.events(row.incarnation, MESSAGE_EVENTS, message=shown_id)
        trace = traces(events).get(shown_id, Trace(shown_id))
        opened = _openings(shown_id, trace, txns, evidence)
        records = Records.of(txns.values(), evidence)
        end = _end(shown_id, trace, opened, records, evidence)
        dead = () if evidence is None else [d for d in evidence.dead() if d.message == shown_id]
    if end is None:
        raise UsageError(
            f"message {shown_id}: neither the ledger of topology {topology!r} nor its source {row.source!r} knows it",
            topology=topology,
            message=shown_id,
        )
    return MessageReport(
        topology=topology,
        message=shown_id,
        openings=tuple(
            Opening(
                txid=t.txid,
                state=t.state.value,
                retry=t.retry,
                failed=trace.failed_in(t),
                returned=trace.left_out_of(t) and not trace.failed_in(t),
            )
            for t in opened
        ),
        failures=tuple(Failure.of(event) for event in events if event.kind is EventKind.FAILURE),
        operator=tuple(
            OperatorAction(d.disposal, d.by, d.why, d.disposed_at, d.payload_sha256, d.new_payload_sha256)
            for d in dead
            if d.disposal is not None
        ),
        end=end,
        returned=tuple(Failure.of(event) for event in events if event.kind is EventKind.RETURNED),
    )


def _openings(shown_id: str, trace: Trace, txns: Mapping[int, Txn], evidence: SourceEvidence | None) -> list[Txn]:
    """Batches that had it: by their slices, and by the replays and failures that name it."""
    named = set(trace.txids)
    return [
        txn
        for txid, txn in txns.items()
        if txid in named or (evidence is not None and not txn.retry and evidence.contains(txn.position, shown_id))
    ]


def _end(
    shown_id: str, trace: Trace, opened: list[Txn], records: Records, evidence: SourceEvidence | None
) -> EndState | None:
    if not opened:
        is_there = evidence is not None and evidence.is_waiting_to_be_opened(shown_id)
        return EndState(EndKind.NOT_OPENED) if is_there else None
    if trace.txids and trace.txids[-1] == opened[-1].txid:
        return end_of(trace, records)
    return end_in(opened[-1])
