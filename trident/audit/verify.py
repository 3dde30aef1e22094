"""`audit verify`: ledger, sinks and source must agree."""

from __future__ import annotations

from stormproof.core.errors import UsageError
from stormproof.core.failpoint import failpoint
from stormproof.core.source.spouts import sources_in
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.inspect import SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.report import Checked, Findings, NoticeKind, VerifyReport, ViolationKind
from stormproof.trident.audit.source import SourceReader, stored_source, unsubscribed_findings
from stormproof.trident.audit.streams import place_of
from stormproof.trident.audit.verify_ledger import LedgerRows, verify_ledger
from stormproof.trident.audit.verify_messages import verify_messages
from stormproof.trident.audit.verify_sinks import Later, verify_sinks
from stormproof.trident.transaction_states import TxnState


def verify(
    ledger: AuditLedger,
    topology: str,
    opener: SinkOpener,
    *,
    source: SourceReader = stored_source,
    first: int = 1,
    last: int | None = None,
) -> VerifyReport:
    """Check a topology's txids from `first` to `last` (None: the newest): ledger, each sink's evidence, each message.

    Guarantee:
        Reads only. A running driver is not disturbed, and what it does meanwhile is no violation: ledger and source are
        read at one instant, then each sink at an instant of its own, then the ledger again.

    Not guaranteed:
        That nobody changed a sink's table by other means: see the report's `proves`.

    Raises:
        UsageError: no such topology, or no such range.
        StoreUnavailable: the ledger's database does not answer. A sink that does not is "cannot tell" in the report.
    """
    if first < 1 or (last is not None and last < first):
        raise UsageError(
            f"txids from {first} to {last}: a range begins at 1 or later and does not end before it begins"
        )
    findings = Findings()
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        whole, pruned = first == 1 and last is None, snapshot.pruned_upto(row.incarnation)
        newest = snapshot.last_txid(row.incarnation) or pruned
        if first > max(newest, 1):
            raise UsageError(
                f"no txid of topology {topology!r} is {first} or later: the newest is {newest}",
                first=first,
                newest=newest,
            )
        _missing(snapshot, row, first, last, findings)
        first = _behind_prune(first, last, pruned, findings)
        stream = place_of(snapshot.connection, row.incarnation)
        if stream is not None and stream.missing is not None:
            findings.notice(NoticeKind.BEGAN_LATE, f"{topology} {stream.missing}")
        rows = LedgerRows.read(snapshot, row, first, last)
        last_held = {b.sink: snapshot.last_held(row.incarnation, b.sink) for b in rows.bindings}
        everything = rows if whole and not pruned else LedgerRows.read(snapshot, row, 1, None)
        evidence = _source(source, snapshot, topology, findings, opened=bool(everything.txns or pruned))
        failed = verify_messages(
            everything.txns,
            everything.events,
            evidence,
            first=first,
            last=last,
            findings=findings,
            whole=whole,
            pruned=pruned,
            rejects=everything.rejects,
        )
        for problem in {*snapshot.unreadable}:
            findings.violation(
                ViolationKind.UNREADABLE_ROW,
                f"table {problem.table}, txid {problem.txid}: {problem.text}",
                txid=problem.txid,
            )
        for stranger in snapshot.strangers():
            findings.violation(ViolationKind.ORPHAN_ROW, f"table {stranger.table}: {stranger.text}")
    verify_ledger(rows, first, last, findings)
    failpoint("audit.after_ledger")

    def read_later() -> Later:
        failpoint("audit.after_sinks")
        with ledger.snapshot() as snapshot:
            return Later.read(snapshot, rows.topology.incarnation, first, last)

    entries = verify_sinks(rows, opener, last_held, read_later, first=first, last=last, findings=findings)
    committed = [txn for txn in rows.txns.values() if txn.state is TxnState.COMMITTED]
    return VerifyReport(
        topology=topology,
        incarnation=rows.topology.incarnation,
        first=first,
        last=last if last is not None else max(rows.txns, default=None),
        violations=tuple(findings.violations),
        unknowns=tuple(findings.unknowns),
        notices=tuple(findings.notices),
        checked=Checked(
            txids=len(rows.txns),
            committed=len(committed),
            sinks=len(rows.bindings),
            evidence=entries,
            messages_opened=sum(txn.messages for txn in rows.txns.values()),
            failures=failed,
        ),
        pruned_upto=pruned,
    )


def _behind_prune(first: int, last: int | None, pruned: int, findings: Findings) -> int:
    """The first txid to check: the first one behind the last prune, if that is later than `first`."""
    if pruned < first:
        return first
    findings.notice(
        NoticeKind.PRUNED,
        f"pruned up to txid {pruned}: older batches are no longer in the ledger, and are not checked",
        txid=pruned,
    )
    if last is not None and last <= pruned:
        findings.unknown(f"txids {first} to {last} were pruned: the ledger no longer has a record of them", txid=last)
    return pruned + 1


def _missing(snapshot: LedgerSnapshot, row: TopologyRow, first: int, last: int | None, findings: Findings) -> None:
    """Note what a sink lacks that joined later or was away. No guarantee is broken, but an operator must know."""
    known = {binding.sink for binding in snapshot.sinks(row.incarnation)}
    for sink, found in snapshot.missing(row.incarnation).items():
        for missing in found:
            if sink in known and missing.last >= first and (last is None or missing.first <= last):
                findings.notice(
                    NoticeKind.SINK_LACKS,
                    f"sink {sink!r} does not have {missing}: it was not part of the topology then",
                    txid=missing.first,
                    sink=sink,
                    messages=missing.messages,
                    last_txid=missing.last,
                    txids=missing.txids,
                )


def _source(
    reader: SourceReader, snapshot: LedgerSnapshot, topology: str, findings: Findings, *, opened: bool
) -> SourceEvidence | None:
    row = snapshot.topology(topology)
    found = reader(snapshot, row)
    if found is None and snapshot.is_postgres:
        for finding in unsubscribed_findings(snapshot.connection, [row.source, *sources_in(row.source).values()]):
            findings.violation(ViolationKind.UNREACHABLE, finding.text)
    if found is None and opened:  # a driver that ended before it subscribed left nothing to compare
        findings.unknown(
            f"source {row.source!r} keeps nothing in the ledger's database: its messages were not compared"
        )
    return found
