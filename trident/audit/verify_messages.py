"""Checks that every message that was opened stands in exactly one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stormproof.core.pending.audit import Finding, Kept
from stormproof.core.source.dead_letter import Disposal
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.lifecycle import EndKind, Records, Trace, end_of, traces
from stormproof.trident.audit.report import Findings, NoticeKind, ViolationKind
from stormproof.trident.ledger.rows import Event, Reject, Txn
from stormproof.trident.transaction_states import RejectState, TxnState


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
    rejects: Sequence[Reject] = (),
    accepted: Mapping[str, str] | None = None,
) -> int:
    """Check slices and messages; returns the number of messages that ever failed or were rejected.

    `txns`, `events` and `rejects` are all that the ledger has of the topology. `whole`: every txid is to be checked. Batches
    up to `pruned` were kept by a prune because later ones depend on them. `accepted`: what of a server's losses operators
    accepted, and who.
    """

    def within(txid: int | None) -> bool:
        return txid is None or (txid >= first and (last is None or txid <= last))

    records = Records.of(txns.values(), source, rejects)
    failed = traces(events)
    for trace in failed.values():
        if any(within(txid) for txid in trace.txids):
            _message(trace, records, findings)
    if source is not None:
        kept = [txn for txid, txn in txns.items() if txid <= pruned]
        for finding in source.slice_findings([txn for txid, txn in txns.items() if txid > pruned], kept):
            if within(finding.txid):
                _found(finding, finding.text, findings)
        for loss in source.losses():
            if accepted and loss.text in accepted:
                findings.notice(NoticeKind.LOSS_ACCEPTED, f"{loss.text}; {accepted[loss.text]}")
            else:
                _found(loss, f"{loss.text}. Once it was looked into: stormproof ledger accept-loss", findings)
        for name in source.altered():
            text = f"message {name}: its payload is not the one that was set aside, as a retry or a dead letter"
            findings.violation(ViolationKind.PAYLOAD_CHANGED, text, message=name)
        if whole and last is None:
            _unknown(failed, records, findings)
            _dead_letters(failed, records, source, findings)
    for txn in txns.values():
        if txn.state is TxnState.ABANDONED and within(txn.txid):
            findings.notice(
                NoticeKind.LOSS_POSSIBLE,
                f"txid {txn.txid}: lost at most {txn.messages} messages: {txn.reason}",
                txid=txn.txid,
                messages=txn.messages,
            )
    return len(failed)


def _found(finding: Finding, text: str, findings: Findings) -> None:
    if finding.doubt:
        return findings.unknown(text, txid=finding.txid)
    kind = ViolationKind.UNREACHABLE if finding.unreachable else ViolationKind.SLICES
    return findings.violation(kind, text, txid=finding.txid)


def verify_kept(evidence: SourceEvidence, txns: Sequence[Txn], findings: Findings) -> Kept:
    """Compare the messages of committed batches with what their source still keeps of them.

    Raises:
        StormproofError: the source cannot be asked.
    """
    found = evidence.kept([txn for txn in txns if txn.state is TxnState.COMMITTED])
    for wrong in found.wrong:
        findings.violation(ViolationKind.PAYLOAD_CHANGED, f"source {evidence.name}: {wrong.text}", txid=wrong.txid)
    for text in found.left_out:
        findings.notice(NoticeKind.NOT_COMPARED, f"source {evidence.name}, not compared: {text}")
    return found


def _message(trace: Trace, records: Records, findings: Findings) -> None:
    name = trace.message
    limited = _only_for_some_sinks(name, trace, records)
    committed = [
        txid
        for txid in trace.txids
        if (txn := records.txns.get(txid)) is not None
        and txn.state is TxnState.COMMITTED
        and not trace.left_out_of(txn)
        and txid not in limited
    ]
    # In a batch in which one sink rejected it, the others hold it.
    succeeded = sorted({*committed, *(txid for txid in trace.rejected_in if txid not in limited)})
    others = [txid for txid in trace.txids if txid not in limited]

    def twice(text: str, txid: int) -> None:
        findings.violation(
            ViolationKind.MESSAGE_TWICE, f"message {name} was committed in {text}", txid=txid, message=name
        )

    if len(succeeded) > 1:
        twice(f"txid {succeeded[0]} and again in txid {succeeded[1]}", succeeded[1])
    elif succeeded and others[-1] > succeeded[0]:
        twice(f"txid {succeeded[0]} and opened again in txid {others[-1]}", others[-1])
    if succeeded and name in records.waiting and not records.rejected(name, RejectState.RETRYING):
        twice(f"txid {succeeded[0]} and waits for a retry", succeeded[0])
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


def _only_for_some_sinks(name: str, trace: Trace, records: Records) -> set[int]:
    """The batches in which the message was opened for the sinks alone that had rejected it before."""
    limited: set[int] = set()
    states = [RejectState.RETRYING, RejectState.RETRIED]
    letter = records.dead.get(name)
    if letter is not None and letter.disposal is Disposal.DROP:
        states.append(RejectState.DROPPED)  # it was retried, failed then, and was given up as a dead letter
    for one in records.rejected(name, *states):
        limited |= {
            txid for txid in trace.txids if txid > one.txid and (one.retried_in is None or txid <= one.retried_in)
        }
    return limited


def _waits(name: str, records: Records) -> bool:
    """Whether the source will hand the message out again: as a retry, or in a slice that was given back."""
    if records.source is None:
        return True  # there is no record to compare with
    return name in records.waiting or records.source.is_waiting_to_be_opened(name)


def _unknown(failed: Mapping[str, Trace], records: Records, findings: Findings) -> None:
    """The ledger must name a failure of each message that waits or died, and the txid in which a message died.

    The source keeps both in the ledger's own database, in one transaction with the ledger's record.
    """
    for kind, names in (("waits for a retry", records.waiting), ("is a dead letter", records.dead)):
        for name in names:
            trace = failed.get(name)
            if trace is None or not (trace.failures or trace.returns or trace.rejected_in):
                text = f"message {name} {kind} in the source, and the ledger names no failure of it"
                findings.violation(ViolationKind.MESSAGE_UNKNOWN, text, message=name)
    for name in records.dead:
        if name in failed and failed[name].failures and not failed[name].died_in:
            text = f"message {name} is a dead letter in the source, and the ledger does not say in which txid it died"
            findings.violation(ViolationKind.MESSAGE_UNKNOWN, text, message=name)


def _dead_letters(failed: Mapping[str, Trace], records: Records, source: SourceEvidence, findings: Findings) -> None:
    known = sum(end_of(trace, records).kind is EndKind.DEAD_LETTER for trace in failed.values())
    kept = source.backlog().dead
    if known != kept:
        text = f"the ledger knows {known} dead letters, source {source.name} has {kept}"
        findings.violation(ViolationKind.MESSAGE_LOST, text)
