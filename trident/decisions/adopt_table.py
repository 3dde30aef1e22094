"""Which table is a sink's own: another one is made so, or one that was claimed and never written to is released."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final

from stormproof.core.base.errors import PositionMismatch, SinkRefused, UsageError
from stormproof.core.contract.sink import SinkMode
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import (
    PROBLEM,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    SinkSession,
    SupportsTakeTable,
    least_rows,
)
from stormproof.trident.audit.inspect import described_sink, open_for_inspection
from stormproof.trident.audit.ledger import TopologyRow
from stormproof.trident.audit.report import ranges
from stormproof.trident.audit.status import may_be_running
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.decisions import DecisionPreview
from stormproof.trident.ledger import sink_records as kept
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.sink_records import Loss, SinkBinding
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.wording import counted


@dataclass(frozen=True, slots=True)
class _Known:
    """What a sink holds by the ledger: the last txid, and the rows of each txid that were not given up.

    The sink may hold the txid that is `prepared`, too: its driver ended, or the stores were copied, between the sink's
    commit and the ledger's.
    """

    last: Held | None
    rows: Mapping[int, int]
    given_up: int
    prepared: Held | None = None
    prepared_rows: int = 0

    @staticmethod
    def of(tx: Tx, sink: str) -> _Known:
        last, given_up = kept.last_held(tx, sink), kept.given_up(tx, sink)
        rows = {txid: rows for txid, rows in kept.rows_held(tx, sink).items() if txid > given_up}
        found = kept.prepared(tx, sink)
        prepared, prepared_rows = (None, 0) if found is None else (Held(found[0], found[1]), found[2])
        return _Known(None if last is None else Held(*last), rows, given_up, prepared, prepared_rows)

    def beside(self, found: _Found) -> _Known:
        """The same; with the prepared txid, if the sink's own record ends with that."""
        if self.prepared is None or found.last != self.prepared:
            return self
        return replace(self, last=self.prepared, rows={**self.rows, self.prepared.txid: self.prepared_rows})


@dataclass(frozen=True, slots=True)
class _Found:
    """What the sink's own record says: the table's id (None: there is no table), the last txid, and each txid's rows."""

    table_id: str | None
    last: Held | None = None
    entries: Mapping[int, int] | None = None
    kept_from: int = 1
    """The first txid of the record; the table's retention removed the older ones."""
    gone: Mapping[int, str] = field(default_factory=dict[int, str])
    """Txids whose rows the table no longer holds by its own record, and why: a RESTORE, an overwrite, a DELETE."""
    counted: int = 0
    """Rows in the table, counted no further than needed."""


@dataclass(frozen=True, slots=True)
class TableAdopted:
    """The table `was` is the sink's no more, and the table `is_` is; `lost` is what was given up."""

    topology: str
    sink: str
    was: str
    is_: str
    lost: Loss | None
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        if self.lost is None and self.is_ == self.was:
            return [
                f"{self.topology}: table {self.is_} is that of sink {self.sink} already; there was nothing to adopt"
            ]
        if self.lost is None:
            return [
                f"{self.topology}: table {self.is_} is that of sink {self.sink} now. Its record agrees with the ledger, and "
                "it has enough rows; whether they are those of the old table was not checked"
            ]
        return [
            f"{self.topology}: table {self.is_} is that of sink {self.sink} now, with {counted(self.lost.found, 'row')}. "
            f"What {_named(self.lost)} wrote there ({counted(self.lost.rows, 'row')}) is given up, on record; their "
            "messages are not handed out again"
        ]


def look(stores: Stores, topology: str, sink: str, *, accept_loss: bool = False) -> DecisionPreview:
    """The table, and what its adoption would give up."""
    row = stores.topology(topology)
    binding = stores.binding(row, sink)
    loss = _examined(stores, row, binding, accept_loss=accept_loss)[2]
    facts = {"sink": sink, "table": binding.target, "known as": binding.table_id}
    if loss is None:
        return DecisionPreview(facts, said=("nothing is lost, as far as can be told",))
    facts = {**facts, "gives up txids": loss.txids}
    return DecisionPreview(facts, loss.rows, "row", said=(f"the table has {counted(loss.found, 'row')} now",))


def adopt_table(stores: Stores, topology: str, sink: str, *, accept_loss: bool, by: str, why: str) -> TableAdopted:
    """Make the table that has the sink's name now the sink's own.

    Raises:
        PositionMismatch: it holds another txid than the ledger says, other content, or too few rows.
        SinkRefused: there is no table, or it cannot hold the sink's rows.
    """
    row = stores.topology(topology)
    binding, run = stores.binding(row, sink), Run(topology, row.incarnation, row.epoch)
    before, found, loss = _examined(stores, row, binding, accept_loss=accept_loss)
    known = before.beside(found)
    if loss is not None:
        loss = replace(loss, by=by, why=why)
    makes = found.table_id is None or loss is not None or bool(found.gone)
    with closing(_opened(stores.database, run, binding, makes=makes)) as session, stores.transaction(row) as tx:
        if _Known.of(tx, sink) != before:
            raise UsageError(
                f"a driver of {topology!r} committed meanwhile: stop it, and run this command again", sink=sink
            )
        assert isinstance(session, SupportsTakeTable)
        session.take_table(_standing_in(known.last))
        kept.rebind(tx, sink, session.table_id, by=by, why=why, loss=loss)
        table_id = session.table_id
    return TableAdopted(topology, sink, binding.table_id, table_id, loss, by, why)


def _examined(
    stores: Stores, row: TopologyRow, binding: SinkBinding, *, accept_loss: bool
) -> tuple[_Known, _Found, Loss | None]:
    run = Run(row.name, row.incarnation, row.epoch)
    with stores.transaction(row) as tx:
        known = _Known.of(tx, binding.sink)
    # Outside of the ledger's transaction, since counting rows may take long.
    found = _look(stores.database, run, binding, known)
    held = known.beside(found)
    loss = _loss_of(binding, held, found)
    _require_acceptable(run, binding, held, found, loss, accept_loss=accept_loss)
    return known, found, loss


def _opened(database: Database, run: Run, binding: SinkBinding, *, makes: bool) -> SinkSession:
    sink, input_ = described_sink(binding, database)
    identity = SinkIdentity(run.topology, run.incarnation, binding.sink)
    return sink.open(identity, input_, run.epoch) if makes else sink.inspect(identity, input_)


def _look(database: Database, run: Run, binding: SinkBinding, known: _Known) -> _Found:
    try:
        with closing(_opened(database, run, binding, makes=False)) as session:
            report = session.evidence(1, None)
            if not isinstance(session, SupportsTakeTable):
                raise UsageError(
                    f"sink {binding.sink!r} ({binding.target}) cannot take another table", sink=binding.sink
                )
            entries = {e.txid: e.rows for e in report.entries}
            digests = {e.txid: e.digest for e in report.entries}
            last = None if report.last_txid is None else Held(report.last_txid, digests.get(report.last_txid))
            kept_from = min(entries, default=1) if report.truncated else 1
            if report.table_id is None:
                return _Found(None, last, entries, kept_from)
            gone = {e.txid: e.problem or "" for e in report.entries if e.gone and e.txid > known.given_up}
            counted = session.count_rows(max(_least(binding, {**entries, **known.rows}), 1))
            return _Found(report.table_id, last, entries, kept_from, gone, counted)
    except SinkRefused as error:
        if error.details.get(PROBLEM) != SinkProblem.TABLE_GONE:
            raise
        return _Found(None)


def _least(binding: SinkBinding, rows: Mapping[int, int]) -> int:
    """How many rows a table has at least, to which the txids wrote so many, unless somebody deletes some."""
    description = binding.description or {}
    if str(description.get("kind")).endswith("-map"):
        return min(sum(rows.values()), 1)  # a txid may write a key several times
    return least_rows([*rows.values()], fold=description.get("mode") != SinkMode.APPEND.value)


def _loss_of(binding: SinkBinding, known: _Known, found: _Found) -> Loss | None:
    """The rows that are missing; None if none are, as far as can be told."""
    if known.last is None:
        return None
    entries = found.entries or {}
    # After a prune of the ledger the sink's own record goes back further.
    older = {txid: rows for txid, rows in entries.items() if known.given_up < txid <= known.last.txid}
    written = {**older, **known.rows}
    missing = {t: rows for t, rows in written.items() if (t not in entries and t >= found.kept_from) or t in found.gone}
    there = {txid: rows for txid, rows in written.items() if txid not in missing}
    if found.table_id is None or found.counted < _least(binding, there):
        missing = written
    if not any(missing.values()) and not (_is_behind(found, known) and missing):
        return None
    return Loss(known.last.txid, ranges(missing), sum(missing.values()), found.counted)


def _require_acceptable(
    run: Run, binding: SinkBinding, known: _Known, found: _Found, loss: Loss | None, *, accept_loss: bool
) -> None:
    where = f"sink {binding.sink!r} of topology {run.topology!r}"
    give_up = f"stormproof ledger adopt-table {run.topology} {binding.sink} --accept-loss"
    lost = "" if loss is None else f"what {_named(loss)} wrote there ({loss.rows} rows)"
    if found.table_id is None and not accept_loss:
        raise SinkRefused(
            f"{where}: there is no table {binding.target}. Put it back; or go on in an empty one"
            f"{f', and give up {lost}' if lost else ''}, on record: {give_up}",
            sink=binding.sink,
            problem=SinkProblem.TABLE_GONE,
        )
    behind = _is_behind(found, known)
    if (
        found.last != known.last
        and not (behind and accept_loss)
        and not (found.table_id is None and found.last is None)
    ):
        shown = [_shown(held) for held in (found.last, known.last)]
        way_on = f" Or give up {lost}, on record: {give_up}" if behind and lost else ""
        raise PositionMismatch(
            f"{where} holds {shown[0]}, the ledger says {shown[1]}: it is not the table as the ledger left it. Restore both "
            f"to one moment; inspect with: stormproof audit verify {run.topology}.{way_on}",
            sink=binding.sink,
            held=None if found.last is None else found.last.txid,
            ledger=None if known.last is None else known.last.txid,
        )
    if loss is not None and not accept_loss:
        text = (
            f"no longer holds {lost}: {found.gone[max(found.gone)]}. RESTORE it to before that; or give the rows up"
            if found.gone
            else f"has {found.counted} rows, which is too few for {lost}: it is not the table as the ledger left it. "
            "Put that in its place; or give them up"
        )
        raise PositionMismatch(
            f"{where}: the table {binding.target} {text}, on record: {give_up}",
            sink=binding.sink,
            txids=loss.txids,
            rows=loss.rows,
            found=loss.found,
        )


def _is_behind(found: _Found, known: _Known) -> bool:
    return known.last is not None and (found.last is None or found.last.txid < known.last.txid)


def _named(loss: Loss) -> str:
    return f"txid{'' if loss.txids.isdecimal() else 's'} {loss.txids}"


def _shown(held: Held | None) -> str:
    return "no txid" if held is None else f"txid {held.txid} (digest {(held.digest or '')[:12]})"


def _standing_in(last: Held | None) -> PreparedTransaction | None:
    """An empty transaction in place of the last one, whose rows are gone."""
    return None if last is None else PreparedTransaction(last.txid, None, last.digest or "", 0, ())


@dataclass(frozen=True, slots=True)
class TableReleased:
    """A table that is free for another topology; `claim_removed`: the table itself had recorded the claim."""

    topology: str
    sink: str
    table: str
    claim_removed: bool
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [f"{self.topology}: sink {self.sink} no longer has a table; {self.table} is free for another topology"]


def require_releasable(stores: Stores, topology: str, sink: str) -> tuple[TopologyRow, SinkBinding]:
    """The sink's table, where no driver runs and nothing was written to it.

    Raises:
        UsageError: a driver may be running, or a batch was written to the sink or is about to be.
    """
    row = stores.topology(topology)
    binding = stores.binding(row, sink)
    if may_be_running(row):
        raise UsageError(
            f"topology {topology!r}: its driver {row.driver_host}:{row.driver_pid} may be running: stop it first "
            f"(stormproof status {topology})",
            sink=sink,
        )
    with stores.transaction(row) as tx:
        _require_unused(tx, topology, sink)
    return row, binding


def look_at_release(stores: Stores, topology: str, sink: str) -> DecisionPreview:
    """The table that would be free."""
    _, binding = require_releasable(stores, topology, sink)
    return DecisionPreview({"sink": sink, "table": binding.target, "known as": binding.table_id})


def release_table(stores: Stores, topology: str, sink: str, *, by: str, why: str) -> TableReleased:
    """Remove the topology's claim from the table, and the table from the ledger.

    Raises:
        UsageError: as `require_releasable`.
    """
    row, binding = require_releasable(stores, topology, sink)
    return release_unused(stores, row, binding, by=by, why=why)


def release_unused(stores: Stores, row: TopologyRow, binding: SinkBinding, *, by: str, why: str) -> TableReleased:
    """The same, of a topology whose driver is known to have ended.

    Raises:
        UsageError: something was written to the table, or is about to be.
    """
    released = _release(stores, row, binding)
    with stores.transaction(row) as tx:
        _require_unused(tx, row.name, binding.sink)
        kept.unbind(tx, binding.sink, by=by, why=why)
    return TableReleased(row.name, binding.sink, binding.target, released, by, why)


def _require_unused(tx: Tx, topology: str, sink: str) -> None:
    held = kept.last_held(tx, sink)
    if held is not None:
        raise UsageError(
            f"topology {topology!r}: sink {sink!r} holds txid {held[0]}: its table is in use; the sink is given "
            "another one by `stormproof ledger adopt-table`",
            sink=sink,
        )
    for txn in txns.unresolved(tx):
        if sink in txns.work(tx, txn.txid):
            raise UsageError(
                f"topology {topology!r}: txid {txn.txid} is {txn.state} and writes to sink {sink!r}: its table is in use",
                sink=sink,
                txid=txn.txid,
            )


def _release(stores: Stores, row: TopologyRow, binding: SinkBinding) -> bool:
    """Remove the claim from the table itself; whether there was one."""
    identity = SinkIdentity(row.name, row.incarnation, binding.sink)
    try:
        with closing(open_for_inspection(identity, binding, stores.database)) as session:
            held = session.held()
            if held is not None:
                raise UsageError(
                    f"topology {row.name!r}: by the table's own record sink {binding.sink!r} holds txid {held.txid}",
                    sink=binding.sink,
                )
            return session.release()
    except SinkRefused as error:
        if error.details.get(PROBLEM) != SinkProblem.TABLE_GONE:
            raise
        return False


PROVES: Final = (
    "ledger, sinks and queue agree: every message that is in a sink was read from the queue, once; and every message that "
    "was read is in the sinks, is a dead letter, was dropped, or waits. Nothing that is in the queue is skipped or doubled "
    "by the adoption"
)
NOT_PROVABLE: Final = (
    "messages that a producer put after this copy was made, and that no sink holds, left no trace here: compare the newest "
    "message with the producers' own record"
)
