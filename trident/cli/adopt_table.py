"""`ledger adopt-table`: another table takes the place of a sink's own where it can hold its rows; or these are given up."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from stormproof.core.errors import PositionMismatch, SinkRefused, UsageError
from stormproof.core.message import storable_text
from stormproof.core.postgres.database import Database
from stormproof.sinks.abilities import SupportsTakeTable
from stormproof.sinks.protocol import PROBLEM, Held, PreparedTransaction, SinkIdentity, SinkProblem, SinkSession
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.audit.ledger import SinkBinding
from stormproof.trident.audit.report import ranges
from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.repair import the_ledger
from stormproof.trident.cli.stores import opened, operator
from stormproof.trident.ledger import bindings as kept
from stormproof.trident.ledger.bindings import Loss
from stormproof.trident.ledger.rows import Run
from stormproof.trident.ledger.tx import Tx


@dataclass(frozen=True, slots=True)
class _Known:
    """What a sink holds by the ledger: the last txid, and how many rows each one wrote that nobody gave up yet."""

    last: Held | None
    rows: Mapping[int, int]
    given_up: int

    @staticmethod
    def of(tx: Tx, sink: str) -> _Known:
        last, given_up = kept.last_held(tx, sink), kept.given_up(tx, sink)
        rows = {txid: rows for txid, rows in kept.rows_held(tx, sink).items() if txid > given_up}
        return _Known(None if last is None else Held(*last), rows, given_up)


@dataclass(frozen=True, slots=True)
class _Found:
    """What there is: the table (None: none), the last txid and each one's rows by its own record, and rows counted."""

    table_id: str | None
    last: Held | None = None
    entries: Mapping[int, int] | None = None
    kept_from: int = 1
    """Of older txids the record was removed by the table's retention."""
    gone: Mapping[int, str] = field(default_factory=dict[int, str])
    """Txids whose rows the table holds no longer by its own record, and why: a RESTORE, an overwrite, a DELETE."""
    counted: int = 0


def adopt_table(topology: str, sink: str, *, accept_loss: bool, by: str, why: str, as_json: bool) -> None:
    """Take the table that has the sink's name now for its own.

    Raises:
        PositionMismatch: it holds another txid than the ledger says, other content, or too few rows.
        SinkRefused: there is no table, or it cannot hold the sink's rows.
    """
    by, why = by or operator(), storable_text(why)
    with opened() as stores:
        row, bindings = stores.bound(topology)
        if sink not in bindings:
            names = ", ".join(bindings) or "none"
            raise UsageError(f"topology {topology!r} has no sink {sink!r}; known: {names}", sink=sink)
        ledger, run, binding = the_ledger(stores), Run(topology, row.incarnation, row.epoch), bindings[sink]
        with ledger.transaction(run) as tx:
            known = _Known.of(tx, sink)
        # Looked at outside of the ledger's transaction: counting may take long.
        found = _look(stores.database, run, binding, known)
        loss = _loss_of(binding, known, found)
        _require_acceptable(run, binding, known, found, loss, accept_loss=accept_loss)
        if loss is not None:
            loss = replace(loss, by=by, why=why)
        makes = found.table_id is None or loss is not None or bool(found.gone)
        with closing(_opened(stores.database, run, binding, makes=makes)) as session, ledger.transaction(run) as tx:
            if _Known.of(tx, sink) != known:
                raise UsageError(f"a driver of {topology!r} went on meanwhile: stop it, and run this again", sink=sink)
            assert isinstance(session, SupportsTakeTable)
            session.take_table(_standing_in(known.last))
            kept.rebind(tx, sink, session.table_id, by=by, why=why, loss=loss)
            table_id = session.table_id
    report = {
        "topology": topology,
        "sink": sink,
        "was": binding.table_id,
        "is": table_id,
        "lost": None if loss is None else loss.detail(),
        "by": by,
        "why": why,
    }
    emit(report, as_json=as_json, text=lambda: _text(topology, sink, table_id, loss, known_as=binding.table_id))


def _text(topology: str, sink: str, table_id: str, loss: Loss | None, *, known_as: str) -> None:
    if loss is None and table_id == known_as:
        say(f"{topology}: sink {sink} is table {table_id}, as the ledger has it already; there was nothing to adopt")
        return
    if loss is None:
        say(
            f"{topology}: sink {sink} is table {table_id} from here on. Its record agrees with the ledger, and it has rows "
            "enough; that they are those of the old table is your word alone"
        )
        return
    say(
        f"{topology}: sink {sink} is table {table_id} from here on, with {loss.found} rows. What {_named(loss)} wrote "
        f"there ({loss.rows} rows) is given up, on record; their messages do not come again"
    )


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
    """How many rows a table holds at least to which these were written, if nobody takes any out."""
    description = binding.description or {}
    if str(description.get("kind")).endswith("-map"):
        return min(sum(rows.values()), 1)  # a key may come several times in a txid
    if description.get("mode") == "fold":
        return max(rows.values(), default=0)  # a row a key, and each key once in a txid
    return sum(rows.values())


def _loss_of(binding: SinkBinding, known: _Known, found: _Found) -> Loss | None:
    """What is missing, as far as that can be told."""
    if known.last is None:
        return None
    entries = found.entries or {}
    # The sink's own record goes back further than a ledger that was pruned.
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
    if loss is not None and found.gone and not accept_loss:
        newest = max(found.gone)
        raise PositionMismatch(
            f"{where}: the table {binding.target} holds {lost} no longer: {found.gone[newest]}. RESTORE it to before that; "
            f"or give the rows up, on record: {give_up}",
            sink=binding.sink,
            txids=loss.txids,
            rows=loss.rows,
            found=loss.found,
        )
    if loss is not None and not accept_loss:
        raise PositionMismatch(
            f"{where}: the table {binding.target} has {found.counted} rows, which is too few for {lost}: it is not the "
            f"table as the ledger left it. Put that in its place; or give them up, on record: {give_up}",
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
    """An empty transaction in the place of one whose rows are gone."""
    return None if last is None else PreparedTransaction(last.txid, None, last.digest or "", 0, ())
