"""`audit verify`: ledger, sinks and source must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, Literal, TypeAlias

from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import Guarantee
from stormproof.core.pending.connector import Kept
from stormproof.core.source.spouts import sources_in
from stormproof.trident.audit.evidence import SourceEvidence, place_of
from stormproof.trident.audit.inspect import SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot, TopologyRow
from stormproof.trident.audit.report import (
    PROVES,
    PROVES_DEEP,
    Basis,
    Chain,
    Checked,
    Deep,
    Findings,
    LookAtAll,
    NoticeKind,
    RowsCompared,
    VerifyReport,
    ViolationKind,
    chain_of,
    find_basis,
    first_since,
    require_later,
    scope_of,
    settled,
)
from stormproof.trident.audit.source import SourceReader, stored_source, unsubscribed_findings
from stormproof.trident.audit.verify_ledger import LedgerRows, verify_kept, verify_ledger, verify_messages
from stormproof.trident.audit.verify_sinks import Later, verify_rows, verify_sinks
from stormproof.trident.ledger.tables import Txn
from stormproof.trident.terms.transaction_states import TxnState

LAST: Final = "last"
"""Since the last clean verdict of the same scope."""
Since: TypeAlias = Literal["last"] | int | datetime
"""From where on a check looks: the last clean verdict, a txid, or a time."""


def verify(
    ledger: AuditLedger,
    topology: str,
    opener: SinkOpener,
    *,
    source: SourceReader = stored_source,
    first: int = 1,
    last: int | None = None,
    deep: Deep | None = None,
    since: Since | None = None,
) -> VerifyReport:
    """Check a topology's txids from `first` to `last` (None: the newest): ledger, each sink's evidence, each message.

    Guarantee:
        Reads only. A running driver is not disturbed, and what it does meanwhile is no violation: ledger and source are
        read at one instant, then each sink at an instant of its own, then the ledger again.

    With `deep` the sinks' tables are read, too, and their rows are compared with what was written: changed, deleted, added
    and doubled rows are violations. What could not be compared is a notice for each sink.

    With `since`, in place of `first` and `last`, only what came since is checked: since the last clean verdict of the same
    scope (`LAST`), a txid or a time. Where there is no such verdict, or where what came since concerns earlier txids, too,
    everything is checked, and the report says so.

    Not guaranteed:
        That nobody changed a sink's table by other means, beyond what the report's `proves` and `tables` say.

    Raises:
        UsageError: no such topology, or no such range.
        StoreUnavailable: the ledger's database does not answer. A sink that does not is "cannot tell" in the report.
    """
    if first < 1 or (last is not None and last < first):
        raise UsageError(
            f"txids from {first} to {last}: a range begins at 1 or later and does not end before it begins"
        )
    if since is not None and (first != 1 or last is not None):
        raise UsageError("since names the first txid to check: give no other one, and no last one")
    basis, why = None, ""
    if since is not None:
        with ledger.snapshot() as snapshot:
            row = snapshot.topology(topology)
            if since == LAST:
                basis, why = _basis(snapshot, row, deep)
            else:
                first = since if isinstance(since, int) else first_since(snapshot.connection, row.incarnation, since)
                first = max(first, 1)
    if basis is not None:
        try:
            return _verified(ledger, topology, opener, source, basis.settled_upto + 1, None, deep, basis, since=True)
        except LookAtAll as reason:
            why = f"since verdict {basis.id}: {reason}"
    note = f"all txids were checked: {why}" if why else ""
    return _verified(ledger, topology, opener, source, first, last, deep, None, since=since is not None, note=note)


def _basis(snapshot: LedgerSnapshot, row: TopologyRow, deep: Deep | None) -> tuple[Basis | None, str]:
    """The verdict to continue; or why there is none."""
    pruned = snapshot.pruned_upto(row.incarnation)
    basis = find_basis(snapshot.connection, row.incarnation, deep, pruned=pruned)
    if basis is None:
        return None, "there is no clean verdict of this scope that it could continue"
    if pruned > basis.settled_upto:
        return None, f"the ledger was pruned up to txid {pruned}, beyond what verdict {basis.id} had settled"
    if row.guarantee != Guarantee.EXACTLY_ONCE:
        return None, f"under {row.guarantee} a batch may be committed late"
    return basis, ""


def _verified(
    ledger: AuditLedger,
    topology: str,
    opener: SinkOpener,
    source: SourceReader,
    first: int,
    last: int | None,
    deep: Deep | None,
    basis: Basis | None,
    *,
    since: bool,
    note: str = "",
) -> VerifyReport:
    """One check; with a `basis` of what came behind it alone.

    Raises:
        LookAtAll: what came behind the basis concerns what came before it, too.
    """
    findings = Findings()
    if note:
        findings.notice(NoticeKind.ALL_CHECKED, note)
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        whole, pruned = first == 1 and last is None, snapshot.pruned_upto(row.incarnation)
        newest = snapshot.last_txid(row.incarnation) or pruned
        if first > max(newest, 1) + since:
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
        if basis is not None:
            everything = _behind(snapshot, rows, basis)
        else:
            everything = rows if whole and not pruned else LedgerRows.read(snapshot, row, 1, None)
        evidence = _source(source, snapshot, topology, findings, opened=bool(everything.txns or pruned))
        if basis is not None and evidence is not None:
            require_later(evidence, basis, everything.txns)
        failed = verify_messages(
            everything.txns,
            everything.events,
            evidence,
            first=first,
            last=last,
            findings=findings,
            whole=whole,
            pruned=pruned if basis is None else basis.settled_upto,
            rejects=everything.rejects,
            accepted=snapshot.accepted(row.incarnation),
        )
        ends = None
        if last is None and not findings.violations:
            ends = settled(everything.txns, everything.events, everything.rejects, evidence)
        before = basis or find_basis(snapshot.connection, row.incarnation, deep, pruned=pruned)
        for number, txid, sink, message in snapshot.altered_rejects(row.incarnation):
            text = f"reject {number}: its payload or row is not what sink {sink!r} rejected in txid {txid}"
            findings.violation(ViolationKind.PAYLOAD_CHANGED, text, txid=txid, sink=sink, message=message)
        for problem in {*snapshot.unreadable}:
            findings.violation(
                ViolationKind.UNREADABLE_ROW,
                f"table {problem.table}, txid {problem.txid}: {problem.text}",
                txid=problem.txid,
            )
        if basis is None:
            for stranger in snapshot.strangers():
                findings.violation(ViolationKind.ORPHAN_ROW, f"table {stranger.table}: {stranger.text}")
    verify_ledger(rows, first, last, findings)
    failpoint("audit.after_ledger")

    def read_later() -> Later:
        failpoint("audit.after_sinks")
        with ledger.snapshot() as snapshot:
            return Later.read(snapshot, rows.topology.incarnation, first, last)

    looks_at_new = basis is not None
    entries = verify_sinks(
        rows, opener, last_held, read_later, first=first, last=last, findings=findings, since=looks_at_new
    )
    tables: tuple[RowsCompared, ...] = ()
    if deep is not None:
        tables = verify_rows(ledger, rows, opener, deep, first=first, last=last, findings=findings)
    kept: Kept | None = None
    if deep is not None and deep.sinks is None and evidence is not None:
        kept = _kept(ledger, topology, source, [t for t in rows.txns.values() if t.txid >= first], findings)
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
        proves=PROVES if deep is None else PROVES_DEEP,
        deep=deep is not None,
        scope=scope_of(deep),
        tables=tables,
        kept=kept,
        chain=Chain() if last is not None else chain_of(first, before, ends, continues=looks_at_new),
    )


def _kept(
    ledger: AuditLedger, topology: str, source: SourceReader, txns: Sequence[Txn], findings: Findings
) -> Kept | None:
    """Compare the messages in a look of its own, since it may take long."""
    try:
        with ledger.snapshot() as snapshot:
            evidence = source(snapshot, snapshot.topology(topology))
            return None if evidence is None else verify_kept(evidence, txns, findings)
    except StormproofError as error:
        findings.unknown(f"the messages that the source still keeps could not be compared: {error}")
        return None


def _behind(snapshot: LedgerSnapshot, rows: LedgerRows, basis: Basis) -> LedgerRows:
    """These rows, with what they depend on: the history of their messages, and the batches that had read furthest."""
    life = rows.topology.incarnation
    messages = {event.message for event in rows.events if event.message is not None}
    messages |= {one.message for one in rows.rejects if one.message is not None}
    events = snapshot.events_of(life, messages)
    rejects = [one for name in sorted(messages) for one in snapshot.rejects(life, message=name)]
    needed = {*basis.furthest, *(event.txid for event in events if event.txid is not None)} - rows.txns.keys()
    older = {txn.txid: txn for txn in snapshot.some_txns(life, needed)}
    return replace(rows, txns={**older, **rows.txns}, events=events, rejects=rejects)


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
