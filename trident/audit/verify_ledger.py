"""Checks the ledger's rows against each other; and whether every opened message is in exactly one place."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stormproof.core.contract.dead_letter import Disposal
from stormproof.core.contract.sink import transaction_digest
from stormproof.core.pending.connector import Finding, Kept
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.ledger import AttemptRow, LedgerSnapshot, TopologyRow, Work
from stormproof.trident.audit.message import EndKind, Records, Trace, end_of, traces
from stormproof.trident.audit.report import Findings, NoticeKind, ViolationKind, ranges
from stormproof.trident.ledger.missing import Shape
from stormproof.trident.ledger.sink_records import Loss, SinkBinding
from stormproof.trident.ledger.tables import Event, Reject, SinkWork, Txn
from stormproof.trident.terms.transaction_states import (
    AttemptOutcome,
    EventKind,
    OperatorAction,
    RejectState,
    SinkOutcome,
    TxnState,
)

FIXED = (TxnState.PREPARED, TxnState.BLOCKED, TxnState.COMMITTED)
"""States of a batch whose content is fixed."""

_FOLLOWED = (AttemptOutcome.JOB_FAILED, AttemptOutcome.UNVERIFIED, AttemptOutcome.MOOT)
"""Outcomes of an attempt after which another attempt follows."""


@dataclass(frozen=True, slots=True)
class LedgerRows:
    """One topology's rows of a range of txids, from one snapshot."""

    topology: TopologyRow
    bindings: Sequence[SinkBinding]
    txns: Mapping[int, Txn]
    attempts: Sequence[AttemptRow]
    work: Sequence[Work]
    events: Sequence[Event]
    held_before: Mapping[str, int | None]
    """The last txid below the range that each sink holds."""
    graphs: Sequence[Shape]
    losses: Mapping[str, Loss] = field(default_factory=dict[str, Loss])
    """The rows that an operator gave up with a sink's table."""
    rejects: Sequence[Reject] = ()
    """What sinks rejected."""

    @staticmethod
    def read(ledger: LedgerSnapshot, topology: TopologyRow, first: int, last: int | None) -> LedgerRows:
        """Read the rows of the txids from `first` to `last`."""
        life = topology.incarnation
        bindings = ledger.sinks(life)
        return LedgerRows(
            topology=topology,
            bindings=bindings,
            txns={txn.txid: txn for txn in ledger.txns(life, first, last)},
            attempts=ledger.attempts(life, first, last),
            work=ledger.work(life, first, last),
            events=ledger.events(life, first=first, last=last),
            graphs=ledger.graphs(life),
            losses=ledger.losses(life),
            rejects=ledger.rejects(life, first=first, last=last),
            held_before={b.sink: ledger.held_before(life, b.sink, first) if first > 1 else None for b in bindings},
        )


def verify_ledger(rows: LedgerRows, first: int, last: int | None, findings: Findings) -> None:
    """Every check that needs only the ledger, and that its schema does not make: see its CHECKs and foreign keys."""
    _numbers(rows, first, last, findings)
    _orphans(rows, findings)
    attempts: dict[int, list[AttemptRow]] = defaultdict(list)
    for attempt in rows.attempts:
        attempts[attempt.txid].append(attempt)
    failed = Counter(e.txid for e in rows.events if e.kind is EventKind.FAILURE)
    returned = Counter(e.txid for e in rows.events if e.kind is EventKind.RETURNED)
    replays = Counter(e.txid for e in rows.events if e.kind is EventKind.REPLAY)
    rejected = Counter(txid for txid, message in {(r.txid, r.message) for r in rows.rejects} if message is not None)
    for txn in rows.txns.values():
        _state(txn, rows.topology, findings)
        _attempts(txn, attempts.get(txn.txid, []), findings)
        _counts(txn, failed[txn.txid], returned[txn.txid], replays[txn.txid], findings)
        if txn.rejected != rejected[txn.txid]:
            findings.violation(
                ViolationKind.COUNTS,
                f"txid {txn.txid}: sinks rejected {txn.rejected} messages in it, the ledger names {rejected[txn.txid]}",
                txid=txn.txid,
            )
    _sink_rows(rows, findings)
    for work in rows.work:
        _content(work, findings)
    for binding in rows.bindings:
        _chain(rows, binding.sink, findings)


def _numbers(rows: LedgerRows, first: int, last: int | None, findings: Findings) -> None:
    """Txids are allotted without gaps, and a batch's row is removed only by a prune."""
    traces = {a.txid for a in rows.attempts} | {w.txid for w in rows.work}
    traces |= {e.txid for e in rows.events if e.txid is not None}
    newest = max([*rows.txns, *traces], default=0)
    if last is not None:
        newest = min(newest, last)
    missing = [txid for txid in range(first, newest + 1) if txid not in rows.txns]
    for txid in missing[:100]:
        findings.violation(ViolationKind.TXID_MISSING, f"txid {txid}: the ledger has no row for it", txid=txid)
    if len(missing) > 100:
        findings.violation(ViolationKind.TXID_MISSING, f"the ledger has no rows for txids {ranges(missing[100:])}")


def _orphans(rows: LedgerRows, findings: Findings) -> None:
    known = {binding.sink for binding in rows.bindings}
    for work in rows.work:
        sink = work.work.sink
        if sink not in known:
            findings.violation(
                ViolationKind.ORPHAN_ROW,
                f"txid {work.txid} wrote to sink {sink!r}, which the ledger does not know",
                txid=work.txid,
                sink=sink,
            )
    for kind, txids in (
        ("txn_sink", {w.txid for w in rows.work}),
        ("event", {e.txid for e in rows.events if e.txid is not None}),
        ("reject", {r.txid for r in rows.rejects}),
    ):
        orphans = txids - rows.txns.keys()
        if orphans:
            findings.violation(
                ViolationKind.ORPHAN_ROW,
                f"rows of table {kind} belong to txids that have no row of their own: {ranges(orphans)}",
                txid=min(orphans),
            )


def _state(txn: Txn, topology: TopologyRow, findings: Findings) -> None:
    if txn.epoch > topology.epoch:
        findings.violation(
            ViolationKind.STATE,
            f"txid {txn.txid}: it was opened in epoch {txn.epoch}, the topology is at epoch {topology.epoch}",
            txid=txn.txid,
        )
    if txn.state is TxnState.BLOCKED:
        findings.notice(NoticeKind.BLOCKED, f"txid {txn.txid} is blocked: {txn.reason}", txid=txn.txid)
    elif not txn.state.ended:
        findings.notice(
            NoticeKind.PENDING,
            f"txid {txn.txid} is {txn.state} since {txn.opened_at.isoformat(timespec='seconds')}",
            txid=txn.txid,
            messages=txn.messages,
        )


def _attempts(txn: Txn, attempts: Sequence[AttemptRow], findings: Findings) -> None:
    def wrong(text: str) -> None:
        findings.violation(ViolationKind.ATTEMPT, f"txid {txn.txid}: {text}", txid=txn.txid)

    numbers = [a.attempt for a in attempts]
    if numbers != list(range(1, txn.attempt + 1)):
        wrong(f"its latest attempt is {txn.attempt}, the ledger has attempts {ranges(numbers) or 'none'}")
        return
    for a in attempts:
        if a.expected_messages + len(a.excluded) != txn.messages:
            wrong(
                f"attempt {a.attempt} expected {a.expected_messages} messages and left {len(a.excluded)} out, "
                f"the batch opened {txn.messages}"
            )
        if a.attempt < txn.attempt and a.outcome not in _FOLLOWED:
            wrong(f"attempt {a.attempt} ended as {a.outcome!r}, and another one followed it")
    outcome = attempts[-1].outcome
    allowed: tuple[str, ...]
    if txn.state in FIXED:
        allowed = (AttemptOutcome.COMPLETE,)
    elif txn.state is TxnState.OPEN:
        allowed = (AttemptOutcome.RUNNING, AttemptOutcome.COMPLETE)
    else:
        allowed = (AttemptOutcome.DEAD, AttemptOutcome.COMPLETE)
    if outcome not in allowed:
        wrong(f"it is {txn.state}, and its last attempt is {outcome!r}")


def _counts(txn: Txn, failures: int, returned: int, replays: int, findings: Findings) -> None:
    def wrong(text: str) -> None:
        findings.violation(ViolationKind.COUNTS, f"txid {txn.txid}: {text}", txid=txn.txid)

    if txn.failed != failures:
        wrong(f"{txn.failed} messages failed in it, the ledger names {failures}")
    if txn.returned != returned:
        wrong(f"{txn.returned} messages were returned with failed ones, the ledger names {returned}")
    if txn.retry and replays != txn.messages:
        wrong(f"it replayed {txn.messages} messages, the ledger names {replays}")
    if not txn.retry and replays:
        wrong(f"the ledger names {replays} replays in it, and it opened new messages")


def _sink_rows(rows: LedgerRows, findings: Findings) -> None:
    """Every batch whose content was fixed has a row for each sink that the topology had in the batch's epoch."""
    has = {(w.txid, w.work.sink): w.work for w in rows.work}
    for txn in rows.txns.values():
        graph = next((one for one in reversed(rows.graphs) if one.epoch <= txn.epoch), None)
        if graph is None:
            text = f"txid {txn.txid}: the ledger does not say which sinks the topology had in epoch {txn.epoch}"
            findings.violation(ViolationKind.STATE, text, txid=txn.txid)
            continue
        for sink in sorted(graph.sinks) if txn.state in FIXED else ():
            if (txn.txid, sink) not in has:
                text = f"txid {txn.txid} is {txn.state}, and the ledger does not say what it writes to sink {sink!r}"
                findings.violation(ViolationKind.SINK_ROW_MISSING, text, txid=txn.txid, sink=sink)
    _no_longer_written(rows, findings)
    for (txid, sink), work in has.items():
        owner = rows.txns.get(txid)
        if work.outcome is SinkOutcome.SKIPPED:
            _skipped(rows, txid, work, findings)
        elif owner is not None and owner.state is TxnState.COMMITTED and work.committed_at is None:
            findings.violation(
                ViolationKind.STATE,
                f"txid {txid} is committed, and the ledger does not say that sink {sink!r} holds it",
                txid=txid,
                sink=sink,
            )


def _no_longer_written(rows: LedgerRows, findings: Findings) -> None:
    for binding in rows.bindings:
        left = None
        for graph in rows.graphs:
            left = None if binding.sink in graph.sinks else (left or graph)
        if left is not None:
            findings.notice(
                NoticeKind.SINK_NO_LONGER_WRITTEN,
                f"sink {binding.sink!r} is not written since txid {left.after_txid + 1}, with which a new run began",
                txid=left.after_txid + 1,
                sink=binding.sink,
            )


def _skipped(rows: LedgerRows, txid: int, work: SinkWork, findings: Findings) -> None:
    """A skip must be recorded as an operator's decision; the batch's rows are rejects."""
    decided = [e for e in rows.events if e.action is OperatorAction.SKIP and (e.txid, e.sink) == (txid, work.sink)]
    if not decided:
        findings.violation(
            ViolationKind.STATE,
            f"txid {txid} was skipped for sink {work.sink!r}, and the ledger does not say by whom",
            txid=txid,
            sink=work.sink,
        )
        return
    detail = decided[-1].detail or {}
    findings.notice(
        NoticeKind.SKIPPED,
        f"txid {txid}, sink {work.sink!r}: its {work.rows} rows are rejects, skipped by {detail.get('by')}: "
        f"{detail.get('why') or 'no reason given'}",
        txid=txid,
        sink=work.sink,
    )


def _content(item: Work, findings: Findings) -> None:
    work, txid = item.work, item.txid

    def wrong(text: str) -> None:
        findings.violation(ViolationKind.DIGEST, f"txid {txid}, sink {work.sink!r}: {text}", txid=txid, sink=work.sink)

    if sum(f.rows for f in work.files) != work.rows:
        wrong(f"its files have {sum(f.rows for f in work.files)} rows, the ledger says {work.rows}")
    if sum(f.bytes for f in work.files) != work.bytes:
        wrong(f"its files have {sum(f.bytes for f in work.files)} bytes, the ledger says {work.bytes}")
    if any(f.sink != work.sink for f in work.files):
        wrong("one of its files belongs to another sink")
    digest = transaction_digest(work.files)
    if digest != work.digest:
        wrong(f"its files have digest {digest[:16]}, the ledger says {work.digest[:16]}")


def _chain(rows: LedgerRows, sink: str, findings: Findings) -> None:
    """Each batch follows the txid that the sink held before it."""
    held = rows.held_before[sink]
    for item in rows.work:
        work = item.work
        txn = rows.txns.get(item.txid)
        if work.sink != sink or txn is None:
            continue
        if work.outcome is SinkOutcome.SKIPPED or (
            work.committed_at is None and txn.state not in (TxnState.PREPARED, TxnState.BLOCKED)
        ):
            continue  # ended without it
        if work.previous != held:
            findings.violation(
                ViolationKind.CHAIN,
                f"txid {item.txid}, sink {sink!r}: it follows txid {work.previous}, the one before it there is {held}",
                txid=item.txid,
                sink=sink,
            )
        if work.committed_at is not None:
            held = item.txid


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
