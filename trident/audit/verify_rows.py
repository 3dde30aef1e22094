"""`audit verify --deep`: the rows of the sinks' tables, compared with what is on record of each txid."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

from stormproof.core.errors import StormproofError, UsageError
from stormproof.sinks.comparison import Comparison, RowsOnRecord, SupportsCompareRows
from stormproof.sinks.protocol import SinkIdentity
from stormproof.trident.audit.inspect import SinkOpener
from stormproof.trident.audit.ledger import AuditLedger, SinkBinding
from stormproof.trident.audit.report import Findings, NoticeKind, RowsCompared, ViolationKind
from stormproof.trident.audit.verify_ledger import LedgerRows

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
