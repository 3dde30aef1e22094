"""Skips: a batch's rows at one sink are given up; or only those that the sink's table refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import Json, SinkRefused, StormproofError, UsageError
from stormproof.core.message import storable_text
from stormproof.core.sink import MESSAGE_COLUMNS, PreparedFile
from stormproof.sinks.abilities import SupportsOperate
from stormproof.sinks.protocol import RefusedRow, SinkIdentity
from stormproof.trident.audit.inspect import described_sink, open_for_inspection
from stormproof.trident.audit.status import may_be_running
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.repair import RejectedRow, decide_rows, rows_given_up, skip, skippable
from stormproof.trident.ledger.rows import SinkWork
from stormproof.trident.steps import to_prepared
from stormproof.trident.stores import Stores
from stormproof.trident.transaction_states import TxnState
from stormproof.trident.wording import counted

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import SinkBinding, TopologyRow

REJECTS_LISTED_MAX: Final = 1_000
"""Rows of a skipped batch that are copied into the ledger; the others are counted, and stay in the prepared files.

What `--rows` may give up is bounded in `stormproof.sinks.postgres.row_by_row`.
"""

ROW_CHARACTERS_MAX: Final = 4_000
ROWS_SHOWN: Final = 10


def _next(topology: str) -> str:
    return f"the next start of {topology} commits it to its other sinks, if any, and confirms its messages"


def require_skippable(stores: Stores, row: TopologyRow, txid: int, sink: str) -> SinkWork:
    """What the batch writes to the sink, where it may be given up there.

    Raises:
        UsageError: it cannot be skipped there, or a driver may be committing it: it is prepared, not blocked.
    """
    with stores.transaction(row) as tx:
        work, txn = skippable(tx, txid, sink), txns.find(tx, txid)
    if txn is not None and txn.state is TxnState.PREPARED and may_be_running(row):
        raise UsageError(
            f"txid {txid} of topology {row.name!r} is prepared, and its driver {row.driver_host}:{row.driver_pid} may be "
            f"committing it: stop the driver first (stormproof status {row.name})",
            txid=txid,
        )
    return work


# -- all rows ----------------------------------------------------------------------------------------------------------


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

    def lines(self) -> list[str]:
        """What was done, for people."""
        are = "is a reject" if self.rows == 1 else "are rejects"
        return [
            f"txid {self.txid} of {self.topology}: its {counted(self.rows, 'row')} for sink {self.sink} {are} now, "
            f"{self.listed} of them listed (stormproof audit txn {self.topology} {self.txid}); sink: {self.holds}",
            *(f"not listed: {text}" for text in self.unreadable),
            _next(self.topology),
        ]


def skip_sink(stores: Stores, topology: str, txid: int, sink: str, *, by: str, why: str) -> SkipReport:
    """Give up a batch's rows at one sink, on record; the topology's next start goes on with the other sinks.

    Raises:
        UsageError: there is no such batch or sink, a driver may be committing it, or the sink holds the batch.
    """
    row = stores.topology(topology)
    work = require_skippable(stores, row, txid, sink)
    binding = stores.bindings(row).get(sink)
    holds = _require_not_held(stores, row, binding, sink, txid)
    rejected, unreadable = _listed(binding, work.files)
    with stores.transaction(row) as tx:
        skippable(tx, txid, sink)
        detail: dict[str, Json] = {"unreadable": [*unreadable], "sink_holds": holds}
        state = skip(tx, txid, work, rejected, by=by, why=why, detail=detail)
    return SkipReport(topology, txid, sink, state.value, work.rows, len(rejected), tuple(unreadable), holds, by, why)


def _require_not_held(stores: Stores, row: TopologyRow, binding: SinkBinding | None, sink: str, txid: int) -> str:
    """Refuse if the sink's own evidence says that it holds the batch; returns what was found, for the records.

    A sink that cannot be asked is often the very reason to skip it.
    """
    if binding is None:
        return "not known to the ledger"
    identity = SinkIdentity(row.name, row.incarnation, sink)
    try:
        with closing(open_for_inspection(identity, binding, stores.database)) as session:
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
    """The batch's rows from its prepared files, up to the limit; and why files could not be read."""
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
        own = [name for name in parquet.schema_arrow.names if name not in MESSAGE_COLUMNS.names]
        for batch in parquet.iter_batches(batch_size=REJECTS_LISTED_MAX, columns=own):
            for row in batch.to_pylist():
                text = json.dumps(row, default=str, ensure_ascii=True)
                yield RejectedRow(os.path.basename(path), number, text[:ROW_CHARACTERS_MAX])
                number += 1


# -- only the refused rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SkipRowsReport:
    """The rows that were given up, how many rows the sink got, and how many its table's triggers dropped."""

    topology: str
    txid: int
    sink: str
    state: str
    rows: int
    refused: tuple[RefusedRow, ...]
    dropped: int
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people; of the refused rows the first."""
        refused = len(self.refused)
        found = [
            f"txid {self.txid} of {self.topology}: sink {self.sink} has {counted(self.rows, 'row')} of it; "
            f"{counted(refused, 'row')} that its table refuses {'is a reject' if refused == 1 else 'are rejects'} "
            f"(after its next start: stormproof rejects list {self.topology})"
        ]
        if self.dropped:
            found.append(f"the table's triggers dropped {counted(self.dropped, 'row')} of it without an error")
        found += [f"  {row.sqlstate or '-'} {row.error}: {row.text}" for row in self.refused[:ROWS_SHOWN]]
        if refused > ROWS_SHOWN:
            found.append(f"  and {refused - ROWS_SHOWN} more")
        return [*found, _next(self.topology)]


def skip_rows(stores: Stores, topology: str, txid: int, sink: str, *, by: str, why: str) -> SkipRowsReport:
    """Commit a batch to one sink without the rows that its table refuses, on record.

    The decision is recorded first, then the sink commits. If it is killed in between, call it again. The topology's next
    start records the rejects.

    Raises:
        UsageError: there is no such batch or sink, or the sink is no Postgres table.
        SinkRefused: the table refuses more than rows; nothing was written.
    """
    row = stores.topology(topology)
    work = require_skippable(stores, row, txid, sink)
    binding = stores.binding(row, sink)
    described, input_ = described_sink(binding, stores.database)
    files = (binding.description or {}).get("files")
    if not isinstance(described, SupportsOperate) or not isinstance(files, str):
        raise UsageError(
            f"sink {sink!r} ({binding.target}) is no Postgres table, and --rows works only for those. Repair the "
            f"cause, then: stormproof retry {topology} {txid}; or give up all of its rows: skip without --rows",
            sink=sink,
        )
    with stores.transaction(row) as tx:
        decide_rows(tx, txid, sink, by=by, why=why)
    identity = SinkIdentity(topology, row.incarnation, sink)
    with closing(described.operate(identity, input_, row.epoch, files)) as session:
        try:
            result = session.commit_without_refused(to_prepared(txid, work))
        except SinkRefused as error:
            raise SinkRefused(f"{error.message}. Nothing was given up", **error.details) from error
    with stores.transaction(row) as tx:
        state = rows_given_up(tx, txid)
    held = work.rows - len(result.refused) - result.dropped
    return SkipRowsReport(topology, txid, sink, state.value, held, result.refused, result.dropped, by, why)
