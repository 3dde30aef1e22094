"""The report of `audit verify`: violations, open questions, notices, and what a clean report proves; how it is kept.

A check continues a clean verdict of the same scope. It begins behind the last txid up to which, by then, every batch had
ended and no message waited for a retry. So the verdicts of a chain cover every txid from the first one's on, without a gap;
each says what held when it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Final, TypeAlias

import sqlalchemy as sa

from stormproof.core.base.errors import Json, StormproofError
from stormproof.core.pending.connector import Kept
from stormproof.sinks.rows import comparison
from stormproof.trident.audit.evidence import SourceEvidence
from stormproof.trident.audit.message import EndKind, Records, end_of, traces
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.database import LedgerDatabase
from stormproof.trident.ledger.tables import Event, Reject, Txn, record_of
from stormproof.trident.terms.transaction_states import Verdict
from stormproof.trident.terms.wording import counted

PROVES: Final = (
    "each txid that the ledger calls committed was applied once, in order, to every sink that the topology had then, by "
    "the sink's own record; every message that was opened ended in one place. It does not prove that nobody changed the "
    "tables since."
)


PROVES_DEEP: Final = (
    "each txid that the ledger calls committed was applied once, in order, to every sink that the topology had then, by "
    "the sink's own record; every message that was opened ended in one place; and the rows that are said to be compared are "
    "in the tables as they were written, each once. It says nothing of the rows that are said not to be compared."
)


_MESSAGES: Final = "the messages that the source keeps"


RowsProgress: TypeAlias = Callable[[str, int, int | None], None]
"""Told the sink, how many rows of its table were looked at by now, and of how many, where that is known."""


@dataclass(frozen=True, slots=True)
class Deep:
    """How tables are read: those of these sinks alone (None: all). With `others_write`, rows that other writers have added
    are no violation. `progress` is told as rows are read.
    """

    sinks: Collection[str] | None = None
    others_write: bool = False
    progress: RowsProgress = lambda sink, done, of: None


class ViolationKind(StrEnum):
    """What is wrong; append-only, since callers match on it."""

    UNREADABLE_ROW = "unreadable_row"
    ORPHAN_ROW = "orphan_row"
    TXID_MISSING = "txid_missing"
    STATE = "state"
    ATTEMPT = "attempt"
    COUNTS = "counts"
    SINK_ROW_MISSING = "sink_row_missing"
    DIGEST = "digest"
    CHAIN = "chain"
    SINK_UNREADABLE = "sink_unreadable"
    TABLE_REPLACED = "table_replaced"
    EVIDENCE = "evidence"
    EVIDENCE_MISSING = "evidence_missing"
    EVIDENCE_UNKNOWN_TXID = "evidence_unknown_txid"
    EVIDENCE_DIFFERS = "evidence_differs"
    EVIDENCE_ORDER = "evidence_order"
    REJECTS_DIFFER = "rejects_differ"
    """A sink left out rows that its table refuses, and the ledger does not name them; or the other way round."""
    GUARD = "guard"
    SLICES = "slices"
    MESSAGE_TWICE = "message_twice"
    MESSAGE_LOST = "message_lost"
    MESSAGE_UNKNOWN = "message_unknown"
    ROWS_CHANGED = "rows_changed"
    ROWS_MISSING = "rows_missing"
    ROWS_ADDED = "rows_added"
    FILE_CHANGED = "file_changed"
    STATISTICS_WRONG = "statistics_wrong"
    """These five by ``--deep``, as in `stormproof.sinks.rows.comparison.RowProblem`."""
    PAYLOAD_CHANGED = "payload_changed"
    """The payload, or the refused row, of a message that was set aside is not what it was then; by ``--deep`` also of one
    that was committed, and that its source still keeps.
    """
    UNREACHABLE = "unreachable"
    """Messages wait that no reader can open: the queue is from another server, and was not adopted."""


class NoticeKind(StrEnum):
    """What an operator should know although no guarantee is broken."""

    PENDING = "pending"
    BLOCKED = "blocked"
    PENDING_IN_LEDGER = "pending_in_ledger"
    DUPLICATE_POSSIBLE = "duplicate_possible"
    LOSS_POSSIBLE = "loss_possible"
    SINK_NO_LONGER_WRITTEN = "sink_no_longer_written"
    SINK_LACKS = "sink_lacks"
    """A sink joined the topology later, or came back: it lacks what was committed without it."""
    SKIPPED = "skipped"
    REJECTED = "rejected"
    """A sink does not hold messages of a batch, since its table refuses their rows."""
    PRUNED = "pruned"
    LOSS_ACCEPTED = "loss_accepted"
    BEGAN_LATE = "began_late"
    """A streaming query ran before it was joined to this topology: what it had read by then is not in the sinks."""
    DROPPED = "dropped"
    """The table's own triggers dropped rows without an error, as its owner wants it."""
    NOT_COMPARED = "not_compared"
    """Rows of a sink's table, or messages of the source, that ``--deep`` did not compare, and why."""
    ALL_CHECKED = "all_checked"
    """A check of what came since a verdict looked at everything, and why."""
    OTHERS_WRITE = "others_write"
    """Other writers' rows are in a sink's table, as the caller expects."""
    NOT_COUNTED = "not_counted"
    """The rows of a sink's table were not counted against its record."""
    SUPERSEDED_NOT_COMPARED = "superseded_not_compared"
    """How many rows of an upsert changed nothing was not compared with the rows that the sink was given, and why."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong."""

    kind: ViolationKind
    text: str
    txid: int | None = None
    sink: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class CannotTellItem:
    """One question that cannot be answered: its evidence is gone or out of reach."""

    text: str
    txid: int | None = None
    sink: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to know; `messages` is the number of messages concerned.

    If it concerns several txids, `txid` is the first, `last_txid` the last, and `txids` their number.
    """

    kind: NoticeKind
    text: str
    txid: int | None = None
    sink: str | None = None
    messages: int | None = None
    last_txid: int | None = None
    txids: int | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """How much was checked."""

    txids: int = 0
    committed: int = 0
    sinks: int = 0
    evidence: int = 0
    messages_opened: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """How a verdict continues others: it is of what came behind verdict `basis`, and together with the verdicts before it
    covers every txid from `chain_from` on. The next one may begin behind `settled_upto` (None: none may continue it), and
    builds on the batches that had read `furthest` into the source.
    """

    basis: int | None = None
    chain_from: int | None = None
    settled_upto: int | None = None
    furthest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowsCompared:
    """What ``--deep`` did with one sink's table: how many rows were compared, how, and what was not compared, and why."""

    sink: str
    rows: int
    compared: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The verdict on one topology, from txid `first` to `last`."""

    topology: str
    incarnation: str
    first: int
    last: int | None
    violations: tuple[Violation, ...]
    unknowns: tuple[CannotTellItem, ...]
    notices: tuple[Notice, ...]
    checked: Checked
    proves: str = PROVES
    deep: bool = False
    """Whether the sinks' tables were read, too."""
    scope: dict[str, Json] | None = None
    """How the tables were read; None: they were not."""
    tables: tuple[RowsCompared, ...] = ()
    """What was read of them."""
    kept: Kept | None = None
    """What was compared of the messages that the source still keeps; None: they were not looked at."""
    chain: Chain = Chain()
    """What the verdict covers together with those that it continues."""
    pruned_upto: int = 0
    """Batches up to here were no longer on record."""
    recorded: int | None = None
    """The number under which the verdict was kept."""
    not_recorded: str | None = None
    """Why it was not kept."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on what was looked at."""
        if self.violations:
            return Verdict.VIOLATION
        return Verdict.CANNOT_TELL if self.unknowns else Verdict.NOT_COMPARED if self.not_compared else Verdict.CLEAN

    @property
    def not_compared(self) -> tuple[str, ...]:
        """The sinks whose tables were read, and not all of their rows or values compared; and the source's messages."""
        sinks = [table.sink for table in self.tables if table.left_out]
        return (*sinks, *([_MESSAGES] if self.kept is not None and self.kept.left_out else []))

    @property
    def reach(self) -> str:
        """How far the verdict reaches, in a few words."""
        if self.verdict in (Verdict.VIOLATION, Verdict.CANNOT_TELL):
            return self.verdict.value.replace("_", " ")
        if not self.deep:
            return "records agree; rows not compared: --deep"
        asked = "" if len(self.tables) == self.checked.sinks else f", of {self.checked.sinks} in all"
        sinks = sum(bool(table.left_out) for table in self.tables)
        left = f"{sinks} of {counted(len(self.tables), 'sink')} not compared{asked}"
        if self.not_compared:
            return f"clean, {left} (or not in full): {', '.join(self.not_compared)}"
        return f"clean, the rows of {counted(len(self.tables), 'sink')} compared{asked}"

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong, everything could be told, and all that was to be compared was."""
        return self.verdict is Verdict.CLEAN

    @property
    def exit_status(self) -> int:
        """0: clean; 1: a violation; 4: cannot tell, or not all of it was compared."""
        return {Verdict.CLEAN: 0, Verdict.VIOLATION: 1}.get(self.verdict, 4)


@dataclass(slots=True)
class Findings:
    """Collects what the checks find."""

    violations: list[Violation] = field(default_factory=list[Violation])
    unknowns: list[CannotTellItem] = field(default_factory=list[CannotTellItem])
    notices: list[Notice] = field(default_factory=list[Notice])

    def violation(
        self,
        kind: ViolationKind,
        text: str,
        *,
        txid: int | None = None,
        sink: str | None = None,
        message: str | None = None,
    ) -> None:
        """Add something that is wrong."""
        self.violations.append(Violation(kind, text, txid, sink, message))

    def unknown(self, text: str, *, txid: int | None = None, sink: str | None = None) -> None:
        """Add a question that cannot be answered."""
        self.unknowns.append(CannotTellItem(text, txid, sink))

    def notice(
        self,
        kind: NoticeKind,
        text: str,
        *,
        txid: int | None = None,
        sink: str | None = None,
        messages: int | None = None,
        last_txid: int | None = None,
        txids: int | None = None,
    ) -> None:
        """Add something to know."""
        self.notices.append(Notice(kind, text, txid, sink, messages, last_txid, txids))


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 1-3, 7."""
    return ", ".join(comparison.ranges(numbers))


def keep(engine: sa.Engine, report: VerifyReport, *, at: datetime, by: str, took_ms: int) -> VerifyReport:
    """Record a verdict. The report is given back with the record's number, or with the reason why there is none.

    A role that may only read, or a standby, keeps none; the verdict itself is the same.
    """
    kinds = Counter(one.kind.value for one in report.violations) + Counter(one.kind.value for one in report.notices)
    values = {
        "incarnation": report.incarnation,
        "at": at,
        "by": by,
        "verdict": report.verdict.value,
        "first_txid": report.first,
        "last_txid": report.last,
        "pruned_upto": report.pruned_upto,
        "violations": len(report.violations),
        "unknowns": len(report.unknowns),
        "notices": len(report.notices),
        "kinds": dict(sorted(kinds.items())),
        "txids": report.checked.txids,
        "sinks": report.checked.sinks,
        "evidence": report.checked.evidence,
        "messages": report.checked.messages_opened,
        "took_ms": took_ms,
        "deep": report.deep,
        "tables": report.scope,
        "basis": report.chain.basis,
        "chain_from": report.chain.chain_from,
        "settled_upto": report.chain.settled_upto,
        "furthest": [*report.chain.furthest],
    }
    try:
        with LedgerDatabase(engine, on_lost=lambda: None).begin() as connection:
            number = connection.execute(sa.insert(t.verdict).values(values).returning(t.verdict.c.id)).scalar_one()
    except StormproofError as error:
        return replace(report, not_recorded=error.message)
    return replace(report, recorded=int(number))


@dataclass(frozen=True, slots=True)
class LastVerdict:
    """The newest verdict of a topology."""

    verdict: str
    at: datetime
    last_txid: int | None
    deep: bool
    """Whether the rows of tables were compared, too."""


_NEWEST: Final = sa.text(
    """
    select t.incarnation, v.verdict, v.at, v.last_txid, v.deep
    from stormproof.topology t
    cross join lateral (
      select verdict, at, last_txid, deep from stormproof.verdict where incarnation = t.incarnation order by id desc limit 1
    ) v
    """
)


def newest_verdicts(connection: sa.Connection) -> dict[str, LastVerdict]:
    """The newest verdict of each topology, by its incarnation, where there is one on record."""
    return {row.incarnation: record_of(LastVerdict, row) for row in connection.execute(_NEWEST)}


class LookAtAll(Exception):
    """What came since a verdict concerns what came before it, too: everything is to be looked at again."""


@dataclass(frozen=True, slots=True)
class Basis:
    """A clean verdict that a check continues; see the table's columns."""

    id: int
    settled_upto: int
    chain_from: int
    furthest: tuple[int, ...]


def scope_of(deep: Deep | None) -> dict[str, Json] | None:
    """How tables are read, as a verdict keeps it: only a verdict of the same scope is continued."""
    if deep is None:
        return None
    names: list[Json] = [*sorted(deep.sinks or ())]
    return {"sinks": None if deep.sinks is None else names, "others_write": deep.others_write}


def find_basis(connection: sa.Connection, incarnation: str, deep: Deep | None, *, pruned: int) -> Basis | None:
    """The newest clean verdict that a check of this scope may continue: with those that it continues, it covers every txid
    that the ledger has, from the one behind `pruned` on.
    """
    c = t.verdict.c
    query = sa.select(c.id, c.settled_upto, c.chain_from, c.furthest, c.tables).where(
        c.incarnation == incarnation,
        c.verdict.in_([Verdict.CLEAN.value, Verdict.NOT_COMPARED.value]),
        c.settled_upto.is_not(None),
        c.chain_from <= pruned + 1,
        *([c.deep] if deep is not None else []),
    )
    for row in connection.execute(query.order_by(c.id.desc())):
        if deep is None or row.tables == scope_of(deep):
            return Basis(row.id, row.settled_upto, row.chain_from, tuple(row.furthest or ()))
    return None


def first_since(connection: sa.Connection, incarnation: str, moment: datetime) -> int:
    """The first txid that had not ended before a time; the one behind the newest, where all had."""
    c = t.txn.c
    mine = c.incarnation == incarnation
    found: int | None = connection.scalar(
        sa.select(sa.func.min(c.txid)).where(mine, sa.or_(c.ended_at.is_(None), c.ended_at >= moment))
    )
    if found is not None:
        return found
    newest: int | None = connection.scalar(sa.select(sa.func.max(c.txid)).where(mine))
    return (newest or 0) + 1


def require_later(source: SourceEvidence, basis: Basis, txns: Mapping[int, Txn]) -> None:
    """Whether each new batch of new messages reads further than all that the basis knows of.

    Raises:
        LookAtAll: one does not, as one that reads again what an earlier batch had given back.
    """
    anchors = [txns[txid] for txid in basis.furthest if txid in txns]
    if len(anchors) < len(basis.furthest):
        raise LookAtAll("a batch that the verdict builds on is no longer on record")
    for txn in txns.values():
        if txn.txid > basis.settled_upto and not txn.retry and not source.continues(anchors, txn):
            raise LookAtAll(f"txid {txn.txid} reads what an earlier batch had read")


def settled(
    txns: Mapping[int, Txn], events: Sequence[Event], rejects: Sequence[Reject], source: SourceEvidence | None
) -> tuple[int, tuple[int, ...]] | None:
    """Up to which txid every batch has ended and no message waits for a retry; and which of them read furthest.

    None: a later check cannot build on it, as where a slice was given back and not opened again.
    """
    if source is None or not txns:
        return None
    records = Records.of(txns.values(), source, rejects)
    waiting = [
        min(trace.txids)
        for trace in traces(events).values()
        if end_of(trace, records).kind in (EndKind.WAITING, EndKind.PENDING) and trace.txids
    ]
    open_ = [txn.txid for txn in txns.values() if txn.ended_at is None]
    upto = min([max(txns) + 1, *open_, *waiting]) - 1
    before = [txn for txn in txns.values() if txn.txid <= upto]
    furthest = source.furthest(before)
    known = [txn for txn in before if txn.txid in furthest]
    later = [txn for txn in txns.values() if txn.txid > upto]
    if not furthest or source.gives_back() or source.slice_findings(later, known):
        return None
    if not all(txn.retry or source.continues(known, txn) for txn in later):
        return None
    return upto, furthest


def chain_of(first: int, basis: Basis | None, ends: tuple[int, tuple[int, ...]] | None, *, continues: bool) -> Chain:
    """What the next check may build on. `continues`: this one looked at what came behind the basis only."""
    joined = basis is not None and first <= basis.settled_upto + 1 and basis.chain_from < first
    chain_from = basis.chain_from if joined and basis is not None else first
    number = basis.id if continues and basis is not None else None
    if ends is None or (continues and basis is not None and ends[0] < basis.settled_upto):
        if not continues or basis is None:
            return Chain(number, chain_from)
        return Chain(number, chain_from, basis.settled_upto, basis.furthest)  # the next one looks at the same again
    return Chain(number, chain_from, *ends)
