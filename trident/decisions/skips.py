"""What becomes of a batch that a sink refuses: it is tried again, or its rows there, or the refused ones, are given up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from stormproof.core.base.errors import CannotTell, Json, SinkRefused, StormproofError, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import PreparedFile, SinkInput
from stormproof.sinks.contract.protocol import (
    PreparedTransaction,
    RefusedRow,
    SinkIdentity,
    SinkSession,
    SupportsOperate,
)
from stormproof.sinks.prepare.staging import open_prepared
from stormproof.trident.audit.inspect import described_sink, open_for_inspection
from stormproof.trident.audit.status import may_be_running
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.decisions import DecisionPreview
from stormproof.trident.driver.batch_records import to_prepared
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.tables import SinkWork
from stormproof.trident.ledger.txns import RejectedRow, skip, skippable, unblock
from stormproof.trident.terms.transaction_states import OperatorAction, TxnState
from stormproof.trident.terms.wording import counted

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow
    from stormproof.trident.ledger.sink_records import SinkBinding


@dataclass(frozen=True, slots=True)
class Retried:
    """A batch that is prepared again; `restored` says what each sink did that had lost files of it."""

    topology: str
    txid: int
    state: str
    by: str
    restored: dict[str, str]

    def lines(self) -> list[str]:
        """What was done, for people."""
        return [
            *(f"sink {sink}: {text}" for sink, text in self.restored.items()),
            f"txid {self.txid} of {self.topology} is prepared again; the next start of {self.topology} commits it",
        ]


def require_blocked(stores: Stores, topology: str, txid: int) -> TopologyRow:
    """The topology of a blocked batch.

    Raises:
        UsageError: there is no such topology or batch, or the batch is not blocked.
    """
    row = stores.topology(topology)
    with stores.audit.snapshot() as snapshot:
        found = snapshot.txns(row.incarnation, txid, txid)
    if not found or found[0].state is not TxnState.BLOCKED:
        now = f"is {found[0].state}" if found else "does not exist"
        raise UsageError(f"txid {txid} of topology {topology!r} {now}; only a blocked one can be retried", txid=txid)
    return row


def look_at_blocked(stores: Stores, topology: str, txid: int) -> DecisionPreview:
    """Where the batch stands, and why it is blocked."""
    row = require_blocked(stores, topology, txid)
    with stores.audit.snapshot() as snapshot:
        (txn,) = snapshot.txns(row.incarnation, txid, txid)
    facts = {"txid": str(txid), "state": txn.state.value, "messages": str(txn.messages)}
    return DecisionPreview(facts, said=(f"it is blocked: {txn.reason}",))


def retry_txid(stores: Stores, topology: str, txid: int, *, by: str, why: str) -> Retried:
    """Make a blocked batch prepared again: the topology's next start tries to commit it.

    Raises:
        UsageError: it is not blocked.
        SinkRefused: a sink that lost files of it cannot go back; the batch stays blocked.
    """
    row = require_blocked(stores, topology, txid)
    with stores.transaction(row) as tx:
        # The sinks come first: if this is killed in between, the batch is still blocked, and `retry` can be repeated.
        restored = _restore_lost(stores, tx, row, txid)
        txns.move(tx, txid, TxnState.BLOCKED, TxnState.PREPARED)
        detail: dict[str, Json] = {"restored": {sink: storable_text(text) for sink, text in restored.items()}}
        tx.decided(OperatorAction.RETRY, by=by, why=why, txid=txid, detail=detail)
    return Retried(topology, txid, TxnState.PREPARED.value, by, restored)


def _restore_lost(stores: Stores, tx: Tx, row: TopologyRow, txid: int) -> dict[str, str]:
    """Take the batch back from each sink that holds it and lost files of it in a power loss; what each of them did.

    Raises:
        SinkRefused: a sink cannot go back; the batch stays blocked.
    """
    work, _ = txns.owed_work(tx, txid)
    bindings = stores.bindings(row)
    restored: dict[str, str] = {}
    for sink, item in work.items():
        binding = bindings.get(sink)
        if binding is None:
            continue
        try:
            described, input_ = described_sink(binding, stores.database)
        except CannotTell:
            continue  # a kind of sink that only the topology's code can open
        if not described.may_lose_files:
            continue
        with closing(described.inspect(SinkIdentity(row.name, row.incarnation, sink), input_)) as session:
            done = session.restore_lost(to_prepared(txid, item))
        if done is not None:
            restored[sink] = done
    return restored


REJECTS_LISTED_MAX: Final = 1_000
"""Rows of a skipped batch that are copied into the ledger; the others are counted, and stay in the prepared files.

What `--rows` may give up is bounded in `stormproof.sinks.postgres.judge`.
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


def require_refusing(stores: Stores, row: TopologyRow, txid: int, sink: str) -> None:
    """Raise UsageError unless the batch is blocked at this sink: every other batch and sink goes on without a decision."""
    with stores.transaction(row) as tx:
        txn, refusing = txns.find(tx, txid), tx.blocking_sink(txid)
    if txn is None or txn.state is not TxnState.BLOCKED:
        why = (
            f"is not blocked: the next start of {row.name} commits it to sink {sink!r}. Only where that table is gone for "
            f"good, and no driver runs: stormproof ledger skip {row.name} {txid} {sink}"
        )
    elif refusing not in (None, sink):
        why = f"is blocked at sink {refusing!r}. Sink {sink!r} has not refused it, and gets it once that is decided"
    else:
        return
    raise UsageError(f"txid {txid} of topology {row.name!r} {why}", txid=txid, sink=sink)


def row_skipper(stores: Stores, row: TopologyRow, txid: int, sink: str) -> tuple[SupportsOperate, SinkInput, str]:
    """The sink, to be opened for a batch without the rows that its table refuses; its input, and its folder of files.

    Raises:
        UsageError: it is no Postgres table.
    """
    binding = stores.binding(row, sink)
    described, input_ = described_sink(binding, stores.database)
    files = (binding.description or {}).get("files")
    if not isinstance(described, SupportsOperate) or not isinstance(files, str):
        raise UsageError(
            f"sink {sink!r} ({binding.target}) is no Postgres table, and only those can be given the rows that they take "
            f"(--rows). Repair the cause, then: stormproof retry {row.name} {txid}; or give up all of its rows: skip "
            "without --rows",
            sink=sink,
        )
    return described, input_, files


def look(stores: Stores, topology: str, txid: int, sink: str, *, rows: bool = False) -> DecisionPreview:
    """The rows that would be given up; with `rows` the refused ones of them, of which only the sink knows how many."""
    row = stores.topology(topology)
    work = require_skippable(stores, row, txid, sink)
    require_refusing(stores, row, txid, sink)
    facts = {"txid": str(txid), "sink": sink}
    if not rows:
        return DecisionPreview(facts, work.rows, "row")
    row_skipper(stores, row, txid, sink)
    return DecisionPreview(
        {**facts, "rows of the batch": str(work.rows)},
        said=("how many of them its table refuses is known only when it commits the others",),
    )


def give_up(
    stores: Stores,
    topology: str,
    txid: int,
    sink: str,
    *,
    rows: bool = False,
    messages: bool = False,
    by: str,
    why: str,
) -> SkipReport | SkipRowsReport:
    """Give up a batch's rows at one sink: see `skip_sink`, and with `rows` `skip_rows`.

    Raises:
        UsageError: as these, or both are wanted.
    """
    if rows and messages:
        raise UsageError("give --rows or --messages: with --rows the messages of the given up rows are rejects anyway")
    if rows:
        return skip_rows(stores, topology, txid, sink, by=by, why=why)
    return skip_sink(stores, topology, txid, sink, messages=messages, by=by, why=why)


# -- all rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SkipReport:
    """What was given up: `rows` are rejects now, of which `listed` are in the ledger.

    `kept_out_from` is the version of a Delta table from which on a commit of the batch that may still be on its way is
    refused; None: nothing keeps it out.
    """

    topology: str
    txid: int
    sink: str
    state: str
    rows: int
    listed: int
    unreadable: tuple[str, ...]
    holds: str
    kept_out_from: int | None
    messages: bool
    by: str
    why: str

    def lines(self) -> list[str]:
        """What was done, for people."""
        kept_out = f"; version {self.kept_out_from} keeps out a commit of it that may still be on its way"
        are = "is a reject" if self.rows == 1 else "are rejects"
        return [
            f"txid {self.txid} of {self.topology}: its {counted(self.rows, 'row')} for sink {self.sink} {are} now, "
            f"{self.listed} of them listed (stormproof audit txn {self.topology} {self.txid}); sink: {self.holds}"
            f"{'' if self.kept_out_from is None else kept_out}",
            *(f"not listed: {text}" for text in self.unreadable),
            _next(self.topology),
            *(
                [
                    f"run them again for this sink, after that: stormproof dead-letters requeue {self.topology} "
                    f"--sink {self.sink}"
                ]
                if self.messages
                else []
            ),
        ]


def skip_sink(
    stores: Stores, topology: str, txid: int, sink: str, *, messages: bool = False, by: str, why: str
) -> SkipReport:
    """Give up a batch's rows at one sink, on record; the topology's next start goes on with the other sinks.

    With `messages` that start keeps each of the batch's messages as a reject of the sink, with its payload from the source.

    Raises:
        UsageError: there is no such batch or sink, a driver may be committing it, or the sink holds the batch.
    """
    row = stores.topology(topology)
    work = require_skippable(stores, row, txid, sink)
    binding = stores.bindings(row).get(sink)
    holds, kept_out_from = _require_not_held(stores, row, binding, txid, work)
    rejected, unreadable = _listed(binding, work.files)
    with stores.transaction(row) as tx:
        skippable(tx, txid, sink)
        detail: dict[str, Json] = {
            "unreadable": [*unreadable],
            "sink_holds": holds,
            "messages": messages,
            **({} if kept_out_from is None else {"kept_out_from": kept_out_from}),
        }
        skip(tx, txid, work, rejected, by=by, why=why, detail=detail)
    return SkipReport(
        topology=topology,
        txid=txid,
        sink=sink,
        state=TxnState.PREPARED.value,
        rows=work.rows,
        listed=len(rejected),
        unreadable=tuple(unreadable),
        holds=holds,
        kept_out_from=kept_out_from,
        messages=messages,
        by=by,
        why=why,
    )


def _require_not_held(
    stores: Stores, row: TopologyRow, binding: SinkBinding | None, txid: int, work: SinkWork
) -> tuple[str, int | None]:
    """Have the sink's store refuse the batch from now on, and refuse to skip it if the sink holds it by its own evidence.

    Returns what was found, for the records, and the version that keeps the batch out. A sink that cannot be asked is often
    the very reason to skip it.
    """
    if binding is None:
        return "not known to the ledger", None
    identity = SinkIdentity(row.name, row.incarnation, work.sink)
    try:
        with closing(open_for_inspection(identity, binding, stores.database)) as session:
            kept_out_from, why_not = _keep_out(session, to_prepared(txid, work))
            found = session.evidence(txid, txid)  # afterwards: until then the batch could still arrive
    except StormproofError as error:
        return f"could not be asked: {error.message}", None
    if any(entry.txid == txid for entry in found.entries):
        raise UsageError(
            f"txid {txid} of topology {row.name!r}: sink {work.sink!r} holds it by its own record, so there is nothing to "
            f"skip; inspect with: stormproof audit verify {row.name}",
            txid=txid,
            sink=work.sink,
        )
    holds = "holds no txid" if found.last_txid is None else f"holds txid {found.last_txid}"
    return f"{holds}{why_not}", kept_out_from


def _keep_out(session: SinkSession, transaction: PreparedTransaction) -> tuple[int | None, str]:
    """The version that keeps it out, and why there is none."""
    try:
        return session.keep_out(transaction), ""
    except StormproofError as error:
        return None, f"; a commit of it that is still on its way is not kept out: {error.message}"


def _listed(binding: SinkBinding | None, files: Sequence[PreparedFile]) -> tuple[list[RejectedRow], list[str]]:
    """The batch's rows from its prepared files, up to the limit; and why files could not be read."""
    folder = None if binding is None or binding.description is None else binding.description.get("files")
    if not isinstance(folder, str):
        return [], [f"{file.path}: the ledger does not say in which folder it lies" for file in files]
    listed: list[RejectedRow] = []
    unreadable: list[str] = []
    for file in files:
        try:
            listed += islice(_rows(folder, file), REJECTS_LISTED_MAX - len(listed))
        except (OSError, ValueError, SinkRefused) as error:
            unreadable.append(storable_text(f"{file.path}: {error}"))
    return listed, unreadable


def _rows(folder: str, file: PreparedFile) -> Iterator[RejectedRow]:
    with open_prepared(folder, file) as prepared:
        number = prepared.superseded  # its first rows, which no table was to hold
        for batch in prepared.batches(batch_rows=REJECTS_LISTED_MAX):
            for row in batch.to_pylist():
                text = json.dumps(row, default=str, ensure_ascii=True)
                yield RejectedRow(os.path.basename(file.path), number, text[:ROW_CHARACTERS_MAX])
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
            f"(after its next start: stormproof dead-letters list {self.topology})"
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
    described, input_, files = row_skipper(stores, row, txid, sink)
    with stores.transaction(row) as tx:
        detail: dict[str, Json] = {"sink": sink}
        tx.decided(OperatorAction.SKIP_ROWS, by=by, why=why, txid=txid, sink=sink, detail=detail)
    identity = SinkIdentity(topology, row.incarnation, sink)
    with closing(described.operate(identity, input_, row.epoch, files)) as session:
        try:
            result = session.commit_without_refused(to_prepared(txid, work))
        except SinkRefused as error:
            raise SinkRefused(f"{error.message}. Nothing was given up", **error.details) from error
    with stores.transaction(row) as tx:
        unblock(tx, txid)
    held = work.rows - len(result.refused) - result.dropped
    return SkipRowsReport(topology, txid, sink, TxnState.PREPARED.value, held, result.refused, result.dropped, by, why)
