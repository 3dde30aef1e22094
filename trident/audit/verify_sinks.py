"""Compares each sink's own evidence with the ledger: exactly the committed txids, in order, with equal content.

And with ``--deep`` the rows of the tables with those that were written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass

from stormproof.core.base.errors import CannotTell, FatalError, StormproofError, TransientError, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.sink import SinkMode
from stormproof.sinks.contract.protocol import Evidence, EvidenceReport, SinkIdentity, least_rows
from stormproof.sinks.rows.comparison import Comparison, RowsOnRecord, SupportsCompareRows
from stormproof.trident.audit.inspect import SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, LedgerSnapshot
from stormproof.trident.audit.report import (
    Deep,
    Findings,
    LookAtAll,
    NoticeKind,
    RowsCompared,
    RowsProgress,
    ViolationKind,
    ranges,
)
from stormproof.trident.audit.verify_ledger import LedgerRows
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.ledger.tables import Event, SinkWork, Txn
from stormproof.trident.terms.transaction_states import OperatorAction, SinkOutcome, TxnState


@dataclass(frozen=True, slots=True)
class Later:
    """The ledger, read again after the sinks: a driver that runs may have gone on in between."""

    fixed: Collection[tuple[int, str]]
    """(txid, sink) of batches whose content for that sink is fixed."""

    pruned: int
    """The txid up to which the ledger had been pruned by then."""

    @staticmethod
    def read(snapshot: LedgerSnapshot, incarnation: str, first: int, last: int | None) -> Later:
        """Read the ledger again."""
        return Later(
            {(item.txid, item.work.sink) for item in snapshot.work(incarnation, first, last)},
            snapshot.pruned_upto(incarnation),
        )

    def may_be_held(self, txid: int, sink: str) -> bool:
        """Whether the sink may hold the batch: its content was fixed by then, or its record was pruned."""
        return (txid, sink) in self.fixed or txid <= self.pruned


def verify_sinks(
    rows: LedgerRows,
    opener: SinkOpener,
    last_held: Mapping[str, int | None],
    read_later: Callable[[], Later],
    *,
    first: int,
    last: int | None,
    findings: Findings,
    since: bool = False,
) -> int:
    """Compare every sink; returns the number of evidence entries. `last_held` has the ledger's last txid of each sink.

    Raises:
        LookAtAll: with `since`, a sink's table was changed in what an earlier check had looked at.
    """
    reports = {
        binding.sink: _evidence(rows, binding, opener, (first, last), findings, since=since)
        for binding in rows.bindings
    }
    for sink, report in reports.items():
        if since and report is not None and report.looks_back:
            raise LookAtAll(f"the table of sink {sink!r} was changed by other means, or its log does not reach back")
    # The ledger is read again after the sinks, so that what a driver does meanwhile is no violation.
    later = read_later()
    for binding in rows.bindings:
        report = reports[binding.sink]
        if report is not None:
            _Comparison(rows, binding, report, later, findings).run(last_held[binding.sink])
    return sum(len(report.entries) for report in reports.values() if report is not None)


def _evidence(
    rows: LedgerRows,
    binding: SinkBinding,
    opener: SinkOpener,
    span: tuple[int, int | None],
    findings: Findings,
    *,
    since: bool,
) -> EvidenceReport | None:
    identity = SinkIdentity(rows.topology.name, rows.topology.incarnation, binding.sink)
    try:
        with closing(opener(identity, binding)) as session:
            return session.evidence_since(span[0]) if since else session.evidence(*span)
    except (TransientError, CannotTell, UsageError) as error:
        findings.unknown(f"sink {binding.sink!r}: {error}", sink=binding.sink)
    except (FatalError, StormproofError) as error:
        findings.violation(ViolationKind.SINK_UNREADABLE, f"sink {binding.sink!r}: {error}", sink=binding.sink)
    return None


class _Comparison:
    """One sink against the ledger."""

    def __init__(
        self, rows: LedgerRows, binding: SinkBinding, report: EvidenceReport, later: Later, findings: Findings
    ) -> None:
        self._rows = rows
        self._sink = binding.sink
        self._binding = binding
        self._report = report
        self._later = later
        self._findings = findings
        self._work = {item.txid: item.work for item in rows.work if item.work.sink == binding.sink}
        self._held = {entry.txid for entry in report.entries}
        loss = rows.losses.get(binding.sink)
        self._given_up = 0 if loss is None else loss.upto
        self._not_told = list[int]()

    def run(self, last_held: int | None) -> None:
        """All comparisons."""
        if self._report.table_id != self._binding.table_id:
            self._wrong(
                ViolationKind.TABLE_REPLACED,
                f"the table behind it is {self._report.table_id or 'gone'}, the ledger knows {self._binding.table_id}",
            )
        self._loss()
        for problem in self._report.problems:
            self._wrong(ViolationKind.EVIDENCE, problem)
        self._count()
        self._order()
        for entry in self._report.entries:
            self._entry(entry)
        if self._not_told:
            self._findings.notice(
                NoticeKind.SUPERSEDED_NOT_COMPARED,
                f"sink {self._sink!r}: how many rows changed nothing, since a later one of their key was there, was not "
                f"compared with the rows of txids {ranges(self._not_told)}: its record does not say, or by Spark's figures, "
                "which count the rows of a task that ran again twice",
                txid=self._not_told[0],
                sink=self._sink,
            )
        for txid, work in self._work.items():
            self._require(txid, work)
        self._guard(last_held)

    def _loss(self) -> None:
        loss = self._rows.losses.get(self._sink)
        if loss is not None:
            self._findings.notice(
                NoticeKind.LOSS_ACCEPTED,
                f"sink {self._sink!r}: what txids {loss.txids} wrote ({loss.rows} rows) was given up with its table by "
                f"{loss.by}: {loss.why or 'no reason given'}; its record is compared behind txid {loss.upto}",
                txid=loss.upto,
                sink=self._sink,
            )

    def _where(self, txid: int | None) -> str:
        return f"sink {self._sink!r}" if txid is None else f"txid {txid}, sink {self._sink!r}"

    def _wrong(self, kind: ViolationKind, text: str, txid: int | None = None) -> None:
        self._findings.violation(kind, f"{self._where(txid)}: {text}", txid=txid, sink=self._sink)

    def _unknown(self, text: str, txid: int | None = None) -> None:
        self._findings.unknown(f"{self._where(txid)}: {text}", txid=txid, sink=self._sink)

    def _note(self, kind: NoticeKind, text: str, txid: int | None = None, messages: int | None = None) -> None:
        self._findings.notice(kind, f"{self._where(txid)}: {text}", txid=txid, sink=self._sink, messages=messages)

    def _order(self) -> None:
        before: int | None = None
        for entry in self._report.entries:
            if before is not None and entry.txid <= before and self._is_checked(entry.txid):
                text = (
                    "the sink's log has it twice"
                    if entry.txid == before
                    else f"the sink's log has it after txid {before}"
                )
                self._wrong(ViolationKind.EVIDENCE_ORDER, text, entry.txid)
            before = entry.txid if before is None else max(before, entry.txid)

    def _is_checked(self, txid: int) -> bool:
        txn = self._rows.txns.get(txid)
        return txn is None or txn.guarantee is Guarantee.EXACTLY_ONCE

    def _entry(self, entry: Evidence) -> None:
        txid = entry.txid
        if txid <= self._given_up:
            return  # an operator has accepted that these are gone
        if entry.problem is not None:
            self._wrong(ViolationKind.EVIDENCE, entry.problem, txid)
        if entry.doubt is not None:
            self._unknown(entry.doubt, txid)
        txn, work = self._rows.txns.get(txid), self._work.get(txid)
        if work is None:
            if not self._later.may_be_held(txid, self._sink) or (txn is not None and txn.state is not TxnState.OPEN):
                known = "knows no such txid" if txn is None else f"says it is {txn.state} and writes nothing there"
                self._wrong(ViolationKind.EVIDENCE_UNKNOWN_TXID, f"the sink holds it, the ledger {known}", txid)
            return
        if entry.digest != work.digest:
            self._wrong(
                ViolationKind.EVIDENCE_DIFFERS,
                f"the sink holds digest {entry.digest[:16]}, the ledger prepared {work.digest[:16]}",
                txid,
            )
        if entry.rows + entry.rejected + entry.dropped != work.rows + entry.reinstated:
            self._wrong(
                ViolationKind.EVIDENCE_DIFFERS,
                f"the sink holds {entry.rows} rows, the ledger prepared {work.rows}",
                txid,
            )
        self._rejected(entry)
        if txn is not None and txn.guarantee is Guarantee.EXACTLY_ONCE and work.committed_at is not None:
            self._superseded(entry, work)
        if entry.dropped:
            took = f"the table took {entry.rows} of {work.rows} rows"
            self._note(NoticeKind.DROPPED, f"{took}; its own triggers dropped the other {entry.dropped}", txid)
        if work.outcome is SinkOutcome.SKIPPED:
            self._wrong(ViolationKind.EVIDENCE_DIFFERS, "the sink holds it, though an operator skipped it there", txid)
        elif txn is not None:
            self._held_though(txn)

    def _superseded(self, entry: Evidence, work: SinkWork) -> None:
        """Rows that changed nothing: by the ledger as many as by the sink, and as many as can be of those it was given.

        Of the rows that a task superseded, whose numbers the prepared files say, none can change the table but those that
        took the place of a rejected one. Of the rows that the table took, each changed it or did not.
        """
        if entry.gone or work.outcome is SinkOutcome.SKIPPED:
            return
        before = sum(file.superseded for file in work.files) - entry.reinstated
        if entry.superseded is None:
            if before or work.superseded:
                self._not_told.append(entry.txid)
            return
        if entry.superseded != work.superseded:
            self._wrong(
                ViolationKind.EVIDENCE_DIFFERS,
                f"by the sink's record {entry.superseded} of its rows changed nothing, since a later one of their key was "
                f"there; by the ledger {work.superseded}",
                entry.txid,
            )
        elif entry.superseded_about:
            if before or entry.superseded:
                self._not_told.append(entry.txid)
        elif not before <= entry.superseded <= before + entry.rows:
            self._wrong(
                ViolationKind.EVIDENCE_DIFFERS,
                f"{entry.superseded} of its rows are said to have changed nothing; of {before} rows that later ones of the "
                f"batch superseded, and {entry.rows} that the table took, it can be {before} to {before + entry.rows}",
                entry.txid,
            )

    def _rejected(self, entry: Evidence) -> None:
        """Each row that the sink left out belongs to a reject in the ledger, and the other way round."""
        txid, txn = entry.txid, self._rows.txns.get(entry.txid)
        decided = next((e for e in self._rows.events if self._is_decision(e, txid)), None)
        if decided is not None:
            by = (decided.detail or {}).get("by")
            self._note(NoticeKind.SKIPPED, f"{entry.rejected} of its rows were given up by {by}", txid)
        mine = [one for one in self._rows.rejects if (one.txid, one.sink) == (txid, self._sink)]
        listed = sum(one.rows for one in mine)
        if txn is not None and txn.state is not TxnState.COMMITTED and not mine:
            return  # they are recorded with `committed`
        if listed != entry.rejected:
            self._wrong(
                ViolationKind.REJECTS_DIFFER,
                f"the sink left out {entry.rejected} rows that its table refuses, the ledger names {listed}",
                txid,
            )
        elif mine:
            messages = sum(one.message is not None for one in mine)
            self._note(
                NoticeKind.REJECTED,
                f"{entry.rejected} rows of {messages} messages are rejects: stormproof dead-letters list "
                f"{self._rows.topology.name}",
                txid,
                messages,
            )

    def _is_decision(self, event: Event, txid: int) -> bool:
        return event.action is OperatorAction.SKIP_ROWS and (event.txid, event.sink) == (txid, self._sink)

    def _count(self) -> None:
        """The table has at least as many rows as its evidence implies."""
        written = [entry.rows for entry in self._report.entries if entry.txid > self._given_up]
        description = self._binding.description or {}
        fold = description.get("mode", SinkMode.APPEND.value) != SinkMode.APPEND.value
        least, found = least_rows(written, fold=fold), self._report.rows_found
        if self._report.uncounted is not None and least:
            self._note(NoticeKind.NOT_COUNTED, f"the rows of its table were not counted: {self._report.uncounted}")
        if found is not None and found < least:
            self._unknown(
                f"its table holds {found} rows, its own record says that {least} or more were written: the others were "
                "deleted by another hand, or lost in a crash. Compare with a backup"
            )

    def _held_though(self, txn: Txn) -> None:
        """Judge a batch that the sink holds by its state in the ledger."""
        exactly = txn.guarantee is Guarantee.EXACTLY_ONCE

        def note(kind: NoticeKind, text: str) -> None:
            self._note(kind, text, txn.txid, txn.messages)

        match txn.state:
            case TxnState.COMMITTED:
                return
            case TxnState.PREPARED | TxnState.BLOCKED:
                note(NoticeKind.PENDING_IN_LEDGER, f"committed in the sink, pending in the ledger ({txn.state})")
            case TxnState.OPEN if not exactly or self._later.may_be_held(txn.txid, self._sink):
                note(NoticeKind.PENDING_IN_LEDGER, "written to the sink, still open in the ledger")
            case TxnState.ABORTED if not exactly:
                given_back = f"its {txn.messages} messages were given back"
                note(NoticeKind.DUPLICATE_POSSIBLE, f"duplicate possible: the sink holds it, and {given_back}")
            case TxnState.ABANDONED:
                return  # `verify_messages` notes how much may be lost
            case _:
                self._wrong(
                    ViolationKind.EVIDENCE_DIFFERS, f"the sink holds it, the ledger says it is {txn.state}", txn.txid
                )

    def _require(self, txid: int, work: SinkWork) -> None:
        """What the ledger says the sink holds must be in the sink's evidence."""
        txn = self._rows.txns.get(txid)
        if (
            txid in self._held
            or txid <= self._given_up
            or work.outcome is SinkOutcome.SKIPPED
            or (work.committed_at is None and (txn is None or txn.state is not TxnState.COMMITTED))
        ):
            return
        oldest = min(self._held, default=None)
        if self._report.truncated and (oldest is None or txid < oldest):
            self._unknown(
                f"the evidence begins {'after it' if oldest is None else f'with txid {oldest}'}: a log's retention has "
                "removed what was before, or the store keeps only the last",
                txid,
            )
            return
        self._wrong(
            ViolationKind.EVIDENCE_MISSING,
            "the ledger says that the sink holds it, the sink's own record does not",
            txid,
        )

    def _guard(self, last_held: int | None) -> None:
        """The sink's own last txid is the ledger's, or that of a batch which was being committed."""
        last = self._report.last_txid
        if last == last_held:
            return
        if last is None:
            self._wrong(ViolationKind.GUARD, f"the sink knows no last txid, the ledger says {last_held}")
            return
        txn = self._rows.txns.get(last)
        unchecked = txn is not None and txn.guarantee is not Guarantee.EXACTLY_ONCE and last in self._work
        if (last_held is None or last > last_held) and (self._later.may_be_held(last, self._sink) or unchecked):
            return
        self._wrong(ViolationKind.GUARD, f"its last txid is {last}, the ledger says {last_held}")


def verify_rows(
    ledger: AuditLedger,
    rows: LedgerRows,
    opener: SinkOpener,
    deep: Deep,
    *,
    first: int,
    last: int | None,
    findings: Findings,
) -> tuple[RowsCompared, ...]:
    """Compare the sinks' tables, one after another.

    Raises:
        UsageError: the topology has no sink of a name that was given.
    """
    known = [binding.sink for binding in rows.bindings]
    for name in deep.sinks or ():
        if name not in known:
            raise UsageError(
                f"topology {rows.topology.name!r} has no sink {name!r}; known: {', '.join(known)}", sink=name
            )
    done: list[RowsCompared] = []
    for binding in rows.bindings:
        if deep.sinks is not None and binding.sink not in deep.sinks:
            _left_out(binding.sink, "it was not asked for (--sink)", findings)
            continue
        try:
            found = _compared(ledger, rows, binding, opener, first, last, deep.progress)
        except StormproofError as error:
            findings.unknown(f"sink {binding.sink!r}: its rows could not be compared: {error}", sink=binding.sink)
            continue
        for wrong in found.wrong:
            text = f"sink {binding.sink!r}: {wrong.text}"
            if wrong.by_others and deep.others_write:
                findings.notice(NoticeKind.OTHERS_WRITE, text, txid=wrong.txid, sink=binding.sink)
            else:
                findings.violation(ViolationKind(wrong.problem.value), text, txid=wrong.txid, sink=binding.sink)
        for text in found.left_out:
            _left_out(binding.sink, text, findings)
        done.append(RowsCompared(binding.sink, found.rows, found.compared, found.left_out))
    return tuple(done)


def _left_out(sink: str, text: str, findings: Findings) -> None:
    findings.notice(NoticeKind.NOT_COMPARED, f"sink {sink!r}, not compared: {text}", sink=sink)


def _compared(
    ledger: AuditLedger,
    rows: LedgerRows,
    binding: SinkBinding,
    opener: SinkOpener,
    first: int,
    last: int | None,
    progress: RowsProgress,
) -> Comparison:
    life = rows.topology.incarnation
    names = [one.sink for one in rows.bindings if one.table_id == binding.table_id]  # several: the sink was renamed
    given_up = max((rows.losses[name].upto for name in names if name in rows.losses), default=0)

    def read() -> RowsOnRecord:
        with ledger.snapshot() as snapshot:
            files = snapshot.files(life, binding.sink, first, last)
            return RowsOnRecord(files, snapshot.pruned_upto(life), given_up)

    with closing(opener(SinkIdentity(rows.topology.name, life, binding.sink), binding)) as session:
        if not isinstance(session, SupportsCompareRows):
            return Comparison(left_out=("its rows: a sink of its kind cannot read them back",))
        return session.compare_rows(read, first, last, lambda done, of: progress(binding.sink, done, of))
