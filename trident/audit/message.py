"""`audit message`: what became of one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from stormproof.core.errors import UsageError
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.sinks.registry import lineage_of
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.ledger import AuditLedger, SinkBinding, Work
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
from stormproof.trident.ledger.rows import Reject, Txn
from stormproof.trident.transaction_states import EventKind, RejectState, TxnState
from stormproof.trident.transaction_states import OperatorAction as Action


@dataclass(frozen=True, slots=True)
class HeldIn:
    """A sink that holds a batch: its table, when it held it, and the table's version that has it.

    `version` is None where the table has no versions, or the ledger does not know it.
    """

    sink: str
    target: str
    at: datetime | None
    version: int | None


@dataclass(frozen=True, slots=True)
class Opening:
    """One batch that opened the message, and whether the message failed in it or was returned from it."""

    txid: int
    state: str
    retry: bool
    failed: bool
    returned: bool = False
    held: tuple[HeldIn, ...] = ()
    """The sinks that hold what the batch wrote of the message: none if it failed there, or before the batch is committed."""


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """An operator's decision about the message: as a dead letter, or as a reject of a sink. Of an edit, the SHA-256 of
    both payloads.
    """

    action: str
    by: str | None
    why: str | None
    at: datetime | None = None
    payload_sha256: str | None = None
    new_payload_sha256: str | None = None
    sink: str | None = None
    """The sink that rejected it."""

    @staticmethod
    def of_reject(reject: Reject) -> OperatorAction | None:
        """The decision about a reject; None if there is none."""
        if reject.state is RejectState.OPEN:
            return None
        action = Action.DROP_REJECT if reject.state is RejectState.DROPPED else Action.RETRY_REJECT
        return OperatorAction(action.value, reject.by, reject.why, reject.decided_at, sink=reject.sink)

    @staticmethod
    def of(letter: DeadLetter) -> OperatorAction | None:
        """The decision about a dead letter; None if there is none."""
        if letter.disposal is None:
            return None
        hashes: tuple[str | None, str | None] = (None, None)
        if letter.new_payload is not None:
            hashes = sha256(letter.payload).hexdigest(), sha256(letter.new_payload).hexdigest()
        return OperatorAction(letter.disposal.value, letter.by, letter.why, letter.disposed_at, *hashes)


@dataclass(frozen=True, slots=True)
class StoredIn:
    """A sink that stores messages' ids: rows of the message have its id in this column."""

    sink: str
    target: str
    column: str


@dataclass(frozen=True, slots=True)
class MessageReport:
    """One message: every batch that opened it, its failures, and its state."""

    topology: str
    message: str
    openings: tuple[Opening, ...]
    failures: tuple[Failure, ...]
    operator: tuple[OperatorAction, ...]
    end: EndState
    returned: tuple[Failure, ...] = ()
    in_source: bool = True
    """Whether the source still has it, or that is not known. If not, it was removed after it was read, or never existed:
    its id lies in an opened slice, and that is all that is known."""
    stored_in: tuple[StoredIn, ...] = ()
    """Where its rows can be looked up; only sinks with lineage columns."""


def message(
    ledger: AuditLedger, topology: str, shown_id: str, *, source: SourceReader = stored_source
) -> MessageReport:
    """What became of a message, by its shown id (`XID-N` in a Postgres queue).

    Raises:
        UsageError: no such topology, not an id of its source, or neither ledger nor source knows the message.
    """
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        evidence = source(snapshot, row)
        events = snapshot.events(row.incarnation, MESSAGE_EVENTS, message=shown_id)
        trace = traces(events).get(shown_id, Trace(shown_id))
        holding = list[int]()
        if evidence is not None:
            slices = snapshot.new_slices(row.incarnation, evidence.number_of(shown_id))
            holding = evidence.opened_in(slices, shown_id)
        opened = snapshot.some_txns(row.incarnation, {*trace.txids, *holding})
        rejects = snapshot.rejects(row.incarnation, message=shown_id)
        records = Records.of(opened, evidence, rejects)
        end = _end(shown_id, trace, opened, records, evidence)
        in_source = evidence is None or bool(trace.txids) or evidence.has(shown_id)
        sinks = snapshot.sinks(row.incarnation)
        stored_in = _stored_in(sinks)
        targets = {binding.sink: binding.target for binding in sinks}
        held = {
            txn.txid: _held(snapshot.work(row.incarnation, txn.txid, txn.txid), targets, rejects)
            for txn in opened
            if txn.state is TxnState.COMMITTED and not trace.left_out_of(txn)
        }
        dead = () if evidence is None else [d for d in evidence.dead() if d.shown_id == shown_id]
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
                held=held.get(t.txid, ()),
            )
            for t in opened
        ),
        failures=tuple(Failure.of(event) for event in events if event.kind is EventKind.FAILURE),
        operator=_decisions(dead, rejects),
        end=end,
        returned=tuple(Failure.of(event) for event in events if event.kind is EventKind.RETURNED),
        in_source=in_source,
        stored_in=stored_in,
    )


def _decisions(dead: Sequence[DeadLetter], rejects: Sequence[Reject]) -> tuple[OperatorAction, ...]:
    found = (*map(OperatorAction.of, dead), *map(OperatorAction.of_reject, rejects))
    return tuple(sorted((one for one in found if one is not None), key=lambda one: str(one.at)))


def _held(work: Sequence[Work], targets: Mapping[str, str], rejects: Sequence[Reject]) -> tuple[HeldIn, ...]:
    refused = {(one.txid, one.sink) for one in rejects}
    return tuple(
        HeldIn(one.work.sink, targets.get(one.work.sink, ""), one.work.committed_at, one.work.version)
        for one in work
        if one.work.committed_at is not None and (one.txid, one.work.sink) not in refused
    )


def _stored_in(sinks: Sequence[SinkBinding]) -> tuple[StoredIn, ...]:
    found = list[StoredIn]()
    for sink in sinks:
        lineage = None if sink.description is None else lineage_of(sink.description)
        if lineage is not None and lineage.message is not None:
            found.append(StoredIn(sink.sink, sink.target, lineage.message))
    return tuple(found)


def _end(
    shown_id: str, trace: Trace, opened: list[Txn], records: Records, evidence: SourceEvidence | None
) -> EndState | None:
    if not opened:
        is_there = evidence is not None and evidence.is_waiting_to_be_opened(shown_id)
        return EndState(EndKind.NOT_OPENED) if is_there else None
    if trace.txids and trace.txids[-1] == opened[-1].txid:
        return end_of(trace, records)
    return end_in(opened[-1])
