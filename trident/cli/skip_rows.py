"""`ledger skip --rows`: a batch is committed to a Postgres sink but for the rows that its table refuses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from stormproof.core.errors import SinkRefused, UsageError
from stormproof.core.message import storable_text
from stormproof.sinks.abilities import RefusedRow, SupportsOperate
from stormproof.sinks.protocol import SinkIdentity
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.repair import require_no_driver, the_ledger
from stormproof.trident.cli.stores import opened, operator
from stormproof.trident.ledger import transactions
from stormproof.trident.ledger.repair import decide_rows, rows_given_up, skippable
from stormproof.trident.ledger.rows import Event, Run
from stormproof.trident.steps import to_prepared
from stormproof.trident.transaction import EventKind, TxnState


@dataclass(frozen=True, slots=True)
class SkipRowsReport:
    """What was given up, row by row, and how many rows the sink got."""

    topology: str
    txid: int
    sink: str
    state: str
    rows: int
    refused: tuple[RefusedRow, ...]
    by: str
    why: str


def skip_rows(topology: str, txid: int, sink: str, *, by: str, why: str, as_json: bool) -> None:
    """Commit a batch to one sink without the rows that its table refuses, on record.

    The decision is recorded first, then the sink commits, then each row is listed: killed in between, it is called again.

    Raises:
        UsageError: there is no such batch or sink, or the sink is no Postgres table.
        SinkRefused: the table refuses more than rows; nothing was written.
    """
    by = by or operator()
    with opened() as stores:
        row, bindings = stores.bound(topology)
        ledger, run = the_ledger(stores), Run(topology, row.incarnation, row.epoch)
        with ledger.transaction(run) as tx:
            work = skippable(tx, txid, sink)
            txn = transactions.find(tx, txid)
        assert txn is not None
        if txn.state is TxnState.PREPARED:
            require_no_driver(row, txid)
        if sink not in bindings:
            raise UsageError(f"the ledger knows no table behind sink {sink!r}", sink=sink)
        described, input_ = described_sink(bindings[sink], stores.database)
        files = (bindings[sink].description or {}).get("files")
        if not isinstance(described, SupportsOperate) or not isinstance(files, str):
            raise UsageError(
                f"sink {sink!r} ({bindings[sink].target}) is no Postgres table: --rows is for those alone. Repair the "
                f"cause, then: stormproof retry {topology} {txid}; or give up all of its rows: skip without --rows",
                sink=sink,
            )
        with ledger.transaction(run) as tx:
            decide_rows(tx, txid, sink, by=by, why=storable_text(why))
        identity = SinkIdentity(topology, row.incarnation, sink)
        with closing(described.operate(identity, input_, row.epoch, files)) as session:
            try:
                refused = session.commit_without_refused(to_prepared(txid, work))
            except SinkRefused as error:
                raise SinkRefused(f"{error.message}. Nothing was given up", **error.details) from error
        with ledger.transaction(run) as tx:
            state = rows_given_up(tx, txid, sink, [_event(txid, sink, one) for one in refused])
    report = SkipRowsReport(topology, txid, sink, state.value, work.rows - len(refused), tuple(refused), by, why)
    emit(report, as_json=as_json, text=lambda: _text(report, report.refused))


def _event(txid: int, sink: str, row: RefusedRow) -> Event:
    return Event(
        EventKind.REJECT,
        txid=txid,
        sink=sink,
        number=row.row,
        reason="refused",
        error=row.error,
        input=row.text,
        detail={"file": row.file, "row": row.row, "sqlstate": row.sqlstate},
    )


def _text(report: SkipRowsReport, refused: Sequence[RefusedRow]) -> None:
    say(
        f"txid {report.txid} of {report.topology}: sink {report.sink} has {report.rows} of its rows, {len(refused)} that "
        f"its table refuses are rejects (stormproof audit txn {report.topology} {report.txid})"
    )
    for row in refused[:10]:
        say(f"  {row.sqlstate or 'dropped'} {row.error}: {row.text}")
    say(f"the next start of {report.topology} commits it to its other sinks, if any, and confirms its messages")
