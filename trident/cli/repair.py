"""What an operator does about a batch or a topology that cannot go on: `ledger skip`, `ledger prune` and their like."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final

from stormproof.core.clock import SystemClock
from stormproof.core.errors import Json, StormproofError, UsageError
from stormproof.core.message import storable_text
from stormproof.core.sink import PreparedFile
from stormproof.sinks.protocol import SinkIdentity
from stormproof.trident.audit import opener_for
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.cli.output import counted, emit, say
from stormproof.trident.cli.stores import Stores, opened, operator
from stormproof.trident.ledger import graphs, transactions
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.repair import RejectedRow, skip, skippable
from stormproof.trident.ledger.rows import Run
from stormproof.trident.transaction import TxnState

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import SinkBinding, TopologyRow
    from stormproof.trident.prune import PruneReport

REJECTS_LISTED_MAX: Final = 1_000
"""Rows of a skipped batch that are copied into the ledger; all others are counted, and stay in the prepared files."""

ROW_CHARACTERS_MAX: Final = 4_000


def the_ledger(stores: Stores) -> Ledger:
    """The ledger, for a command that starts no topology."""

    def no_incarnation() -> str:
        raise AssertionError("an operator's command starts no topology")

    return Ledger(stores.engine, SystemClock(), no_incarnation)


@dataclass(frozen=True, slots=True)
class SkipReport:
    """What was given up: `rows` are rejects now, of which `listed` are in the ledger."""

    topology: str
    txid: int
    sink: str
    state: str
    rows: int
    listed: int
    unreadable: tuple[str, ...]
    holds: str
    by: str
    why: str


def skip_sink(topology: str, txid: int, sink: str, *, by: str, why: str, as_json: bool) -> None:
    """Give a batch's rows at one sink up, on record; the topology's next start goes on with the other sinks."""
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
        holds = _require_not_held(stores, row, bindings.get(sink), sink, txid)
        rejected, unreadable = _listed(bindings.get(sink), work.files)
        with ledger.transaction(run) as tx:
            skippable(tx, txid, sink)
            detail: dict[str, Json] = {"unreadable": [*unreadable], "sink_holds": holds}
            state = skip(tx, txid, work, rejected, by=by, why=storable_text(why), detail=detail)
    report = SkipReport(topology, txid, sink, state.value, work.rows, len(rejected), tuple(unreadable), holds, by, why)
    emit(report, as_json=as_json, text=lambda: _skip_text(report))


def _skip_text(report: SkipReport) -> None:
    are = "is a reject" if report.rows == 1 else "are rejects"
    say(
        f"txid {report.txid} of {report.topology}: its {counted(report.rows, 'row')} for sink {report.sink} {are} now, "
        f"{report.listed} of them listed (stormproof audit txn {report.topology} {report.txid}); sink: {report.holds}"
    )
    for text in report.unreadable:
        say(f"not listed: {text}")
    say(f"the next start of {report.topology} commits it to its other sinks, if any, and confirms its messages")


def require_no_driver(row: TopologyRow, txid: int) -> None:
    """A batch that is prepared and not blocked may be on its way into the sink at this moment."""
    if driver_state(row) in (DriverState.RUNNING, DriverState.UNKNOWN):
        raise UsageError(
            f"txid {txid} of topology {row.name!r} is prepared, and its driver {row.driver_host}:{row.driver_pid} may be "
            f"committing it: stop the driver first (stormproof status)",
            txid=txid,
        )


def _require_not_held(stores: Stores, row: TopologyRow, binding: SinkBinding | None, sink: str, txid: int) -> str:
    """Refuse where the sink's own evidence says that it holds the batch; returns what was found, for the records.

    A sink that cannot be asked is most often the very reason to skip it.
    """
    if binding is None:
        return "not known to the ledger"
    identity = SinkIdentity(row.name, row.incarnation, sink)
    try:
        with closing(opener_for(stores.database)(identity, binding)) as session:
            found = session.evidence(txid, txid)
    except StormproofError as error:
        return f"could not be asked: {error.message}"
    if any(entry.txid == txid for entry in found.entries):
        raise UsageError(
            f"txid {txid} of topology {row.name!r}: sink {sink!r} holds it by its own record, so there is nothing to skip; "
            f"inspect with: stormproof audit verify {row.name}",
            txid=txid,
            sink=sink,
        )
    return "holds no txid" if found.last_txid is None else f"holds txid {found.last_txid}"


def _listed(binding: SinkBinding | None, files: Sequence[PreparedFile]) -> tuple[list[RejectedRow], list[str]]:
    folder = None if binding is None or binding.description is None else binding.description.get("files")
    if not isinstance(folder, str):
        return [], [f"{file.path}: the ledger does not say in which folder it lies" for file in files]
    listed: list[RejectedRow] = []
    unreadable: list[str] = []
    for file in files:
        try:
            listed += islice(_rows(os.path.join(folder, file.path)), REJECTS_LISTED_MAX - len(listed))
        except (OSError, ValueError) as error:
            unreadable.append(storable_text(f"{file.path}: {error}"))
    return listed, unreadable


def _rows(path: str) -> Iterator[RejectedRow]:
    import pyarrow.parquet as pq

    number = 0
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(batch_size=REJECTS_LISTED_MAX):
            for row in batch.to_pylist():
                text = json.dumps(row, default=str, ensure_ascii=True)
                yield RejectedRow(os.path.basename(path), number, text[:ROW_CHARACTERS_MAX])
                number += 1


def accept_change(topology: str, fingerprint: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology whose graph has changed go on; the refused start said which change has this fingerprint."""
    by = by or operator()
    if len(fingerprint) != SHOWN_CHARACTERS or not set(fingerprint) <= set("0123456789abcdef"):
        raise UsageError(
            f"{fingerprint!r} is no fingerprint of a graph; the refused start of {topology!r} names it",
            fingerprint=fingerprint,
        )
    with opened() as stores:
        with stores.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
        ledger = the_ledger(stores)
        with ledger.transaction(Run(topology, row.incarnation, row.epoch)) as tx:
            graphs.accept(tx, fingerprint, by=by, why=storable_text(why))
    report = {"topology": topology, "incarnation": row.incarnation, "accepted": fingerprint, "by": by, "why": why}
    emit(
        report,
        as_json=as_json,
        text=lambda: say(f"{topology} may start with the graph {fingerprint}; what its tables hold stays as it is"),
    )


_AGE: Final = re.compile(r"(\d+)\s*([smhdw])")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_age(text: str) -> timedelta:
    """An age as `30d`, `12h`, `90m`, `45s` or `2w`."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no age; write a number and one of {', '.join(_UNITS_S)}, as in 30d")
    return timedelta(seconds=int(match[1]) * _UNITS_S[match[2]])


def prune_ledger(topology: str | None, *, older_than: str, dry_run: bool, by: str, as_json: bool) -> None:
    """Prune one topology, or all."""
    from stormproof.trident.prune import prune

    age = parse_age(older_than)
    by = by or operator()
    with opened() as stores:
        ledger, now = the_ledger(stores), SystemClock().now()
        with stores.audit.snapshot() as snapshot:
            names = [row.name for row in snapshot.topologies()] if topology is None else [topology]
        reports = [
            prune(ledger, stores.audit, name, ended_before=now - age, now=now, by=by, dry_run=dry_run) for name in names
        ]
    emit({"topologies": reports}, as_json=as_json, text=lambda: _prune_text(reports))


def _prune_text(reports: Sequence[PruneReport]) -> None:
    for report in reports:
        rows = (
            ", ".join(f"{counted(count, 'row')} of {table}" for table, count in report.removed.items() if count)
            or "nothing"
        )
        done, verb = ("would be pruned", "would remove") if report.dry_run else ("pruned", "removed")
        stay = (
            f"; of {report.kept_txids} of these txids something stays that is still needed" if report.kept_txids else ""
        )
        say(f"{report.topology}: {done} up to txid {report.upto} (before: {report.before}); {verb} {rows}{stay}")
