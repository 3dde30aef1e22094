"""Checks that every message that was opened stands in exactly one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stormproof.core.pending.audit import Finding
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.lifecycle import EndKind, Records, Trace, end_of, traces
from stormproof.trident.audit.report import Findings, NoticeKind, ViolationKind
from stormproof.trident.ledger.rows import Event, Txn
from stormproof.trident.transaction import TxnState


def verify_messages(
    txns: Mapping[int, Txn],
    events: Sequence[Event],
    source: SourceEvidence | None,
    *,
    first: int,
    last: int | None,
    findings: Findings,
    whole: bool = True,
    pruned: int = 0,
) -> int:
    """Check slices and messages; `txns` and `events` are all of the topology's. Returns how many failed messages.

    `whole`: all txids that the ledger has are asked for. What it has up to `pruned` was left for what came behind it.
    """

    def within(txid: int | None) -> bool:
        return txid is None or (txid >= first and (last is None or txid <= last))

    records = Records.of(txns.values(), source)
    failed = traces(events)
    for trace in failed.values():
        if any(within(txid) for txid in trace.txids):
            _message(trace, records, findings)
    if source is not None:
        for finding in _slice_findings(source, txns, pruned):
            if within(finding.txid):
                kind = ViolationKind.UNREACHABLE if finding.unreachable else ViolationKind.SLICES
                findings.violation(kind, finding.text, txid=finding.txid)
        if whole and last is None:
            _strangers(failed, records, findings)
            _unrecorded(failed, records, findings)
            _totals(failed, records, source, findings)
    for txn in txns.values():
        if txn.state is TxnState.ABANDONED and within(txn.txid):
            findings.notice(
                NoticeKind.LOSS_POSSIBLE,
                f"txid {txn.txid}: lost at most {txn.messages} messages: {txn.reason}",
                txid=txn.txid,
                messages=txn.messages,
            )
    return len(failed)


def _slice_findings(source: SourceEvidence, txns: Mapping[int, Txn], pruned: int) -> list[Finding]:
    kept = [txn for txid, txn in txns.items() if txid <= pruned]
    return source.slice_findings([txn for txid, txn in txns.items() if txid > pruned], kept)


def _message(trace: Trace, records: Records, findings: Findings) -> None:
    name = trace.message
    succeeded = [
        txid
        for txid in trace.txids
        if (txn := records.txns.get(txid)) is not None
        and txn.state is TxnState.COMMITTED
        and not trace.left_out_of(txn)
    ]
    if len(succeeded) > 1:
        findings.violation(
            ViolationKind.MESSAGE_TWICE,
            f"message {name} was committed in txid {succeeded[0]} and again in txid {succeeded[1]}",
            txid=succeeded[1],
            message=name,
        )
    if succeeded and trace.txids[-1] > succeeded[0] and len(succeeded) == 1:
        findings.violation(
            ViolationKind.MESSAGE_TWICE,
            f"message {name} was committed in txid {succeeded[0]} and opened again in txid {trace.txids[-1]}",
            txid=trace.txids[-1],
            message=name,
        )
    if succeeded and records.waiting is not None and name in records.waiting:
        findings.violation(
            ViolationKind.MESSAGE_TWICE,
            f"message {name} was committed in txid {succeeded[0]} and waits for a retry",
            txid=succeeded[0],
            message=name,
        )
    end = end_of(trace, records)
    owed = end.kind is EndKind.WAITING and not _waits(name, records)
    if end.kind is EndKind.UNKNOWN or owed:
        where = f"txid {end.txid}" if end.txid is not None else "a txid that is not there"
        findings.violation(
            ViolationKind.MESSAGE_LOST,
            f"message {name} failed in or was given back by {where}, and is nowhere since",
            txid=end.txid,
            message=name,
        )


def _waits(name: str, records: Records) -> bool:
    """Whether the source has it for another time: on its own as a retry, or in a slice that was given back."""
    if records.waiting is None or records.source is None:
        return True  # only the number can be compared
    return name in records.waiting or records.source.is_waiting_to_be_opened(name)


def _strangers(failed: Mapping[str, Trace], records: Records, findings: Findings) -> None:
    """What waits or died must have failed by the ledger, too."""
    for kind, names in (("waits for a retry", records.waiting or {}), ("is a dead letter", records.dead)):
        for name in names:
            trace = failed.get(name)
            if trace is None or not (trace.failures or trace.returns):
                findings.violation(
                    ViolationKind.MESSAGE_UNKNOWN,
                    f"message {name} {kind} in the source, and the ledger names no failure of it",
                    message=name,
                )


def _unrecorded(failed: Mapping[str, Trace], records: Records, findings: Findings) -> None:
    """A dead letter in the ledger's own database was written in one transaction with the ledger's record of it."""
    if records.waiting is None:
        return
    for name in records.dead:
        if name in failed and failed[name].failures and not failed[name].died_in:
            findings.violation(
                ViolationKind.MESSAGE_UNKNOWN,
                f"message {name} is a dead letter in the source, and the ledger does not say in which txid it died",
                message=name,
            )


def _totals(failed: Mapping[str, Trace], records: Records, source: SourceEvidence, findings: Findings) -> None:
    """Where the source cannot name what waits, the number must agree."""
    ends = [end_of(trace, records) for trace in failed.values()]
    dead = sum(end.kind is EndKind.DEAD_LETTER for end in ends)
    backlog = source.backlog()
    if dead != backlog.dead:
        findings.violation(
            ViolationKind.MESSAGE_LOST, f"the ledger knows {dead} dead letters, source {source.name} has {backlog.dead}"
        )
    waiting = sum(end.kind is EndKind.WAITING for end in ends)
    if records.waiting is None and waiting > backlog.waiting + backlog.pending:
        findings.violation(
            ViolationKind.MESSAGE_LOST,
            f"by the ledger {waiting} messages wait for a retry, source {source.name} has {backlog.waiting}",
        )
