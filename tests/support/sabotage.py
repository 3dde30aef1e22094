"""Broken variants of the code, for negative controls: each breaks this process for good, so use them in a child."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import sqlalchemy as sa
from deltalake import CommitProperties, DeltaTable

from stormproof.core.base.failpoint import failpoint
from stormproof.core.pending.rows import At, PendingRows, Subscriber
from stormproof.core.pending.source import PendingSource
from stormproof.core.storage.files import LocalFiles
from stormproof.sinks.contract.protocol import CommitDecision, Held, PreparedTransaction, SinkIdentity, SinkSession
from stormproof.sinks.delta import opening, power_loss
from stormproof.sinks.delta import transactional_table as delta
from stormproof.sinks.delta.log import Label
from stormproof.sinks.postgres import merge
from stormproof.sinks.postgres import transactional_table as postgres
from stormproof.sinks.postgres.connection import Fence
from stormproof.sinks.prepare import writer
from stormproof.trident.driver import recovery
from stormproof.trident.driver.batch_records import Finished, PreparedBatch, SinkAnswers
from stormproof.trident.driver.steps import Steps
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.tables import Run, SinkWork, Txn
from stormproof.trident.state.delta import MapTable
from stormproof.trident.state.map import StoredMap
from stormproof.trident.state.postgres import PostgresBacking
from stormproof.trident.state.sink import StateSession
from stormproof.trident.terms.transaction_states import TxnCause
from support.crashes import NOT_BROKEN


def no_fence() -> None:
    """Nobody looks at the epoch: not the ledger, not the queue, not the Postgres sink."""

    @contextmanager
    def transaction(ledger: Ledger, run: Run) -> Generator[Tx]:
        with ledger.unfenced() as tx:
            yield tx.of(run)

    def locked(_source: PendingSource, rows: PendingRows, _who: Subscriber, _epoch: int) -> At:
        found = rows.lock()
        assert found is not None
        return found[1]

    replace_in(Ledger, "transaction", transaction)
    replace_in(PendingSource, "_locked", locked)
    replace_in(Fence, "lock", lambda *_: None)


def confirm_before_commit() -> None:
    """The messages are confirmed, and `committed` is recorded, before the sinks hold the batch."""
    commit_sinks, finish, ended = Steps.commit_sinks, Steps.finish, dict[int, Finished]()

    def early(steps: Steps, batch: PreparedBatch) -> SinkAnswers:
        ended[batch.txid] = finish(steps, replace(batch, work={}), {})
        return commit_sinks(steps, batch)

    replace_in(Steps, "commit_sinks", early)
    replace_in(Steps, "finish", lambda _, batch, *rest: ended[batch.txid])


def take_nothing_for_everything() -> None:
    """Recovery commits whatever the ledger's rows say, be it nothing."""

    def roll_forward(steps: Steps, txn: Txn, *_: object) -> None:
        batch = steps.on_record(txn)
        steps.finish(batch, steps.settle(batch, steps.commit_sinks(batch)))

    def work(tx: Tx, txid: int) -> tuple[dict[str, SinkWork], bool]:
        return txns.work(tx, txid), True

    replace_in(txns, "owed_work", work)
    replace_in(recovery, "_roll_forward", roll_forward)


# What the checks of a sink rest on


def no_previous_check() -> None:
    """A Delta sink commits whatever it is given, without a look at what it holds.

    In Postgres the guard row, and the key of the evidence, would each say no.
    """
    replace_in(delta, "decide", lambda *_: CommitDecision.COMMIT)


def skip_by_number_alone() -> None:
    """A sink that holds N or more takes N for done, whatever is in it; nobody compares sinks and ledger at the start."""

    def decide(_: SinkIdentity, transaction: PreparedTransaction, held: Held | None) -> CommitDecision:
        return CommitDecision.SKIP if held is not None and held.txid >= transaction.txid else CommitDecision.COMMIT

    _decide(decide)
    believe_sinks()


def believe_sinks() -> None:
    """What a sink holds is taken as it is: nobody compares it with the ledger."""

    def compare(steps: Steps, session: SinkSession, _done: object) -> None:
        held = session.held()
        steps.previous[session.identity.sink] = None if held is None else held.txid

    replace_in(recovery, "_compare", compare)


def no_transaction_identifier() -> None:
    """A Delta commit names no transaction."""
    replace_in(Label, "identifiers", lambda _: [])


def recompute_prepared() -> None:
    """A batch that was prepared runs again after a crash, instead of being rolled forward from its files.

    Which is right where user code and source give the same each time, and the sink knows the number; here it is opened
    under a number of its own.
    """

    def run_again(steps: Steps, txn: Txn, done: recovery._Done, _: object) -> None:  # pyright: ignore[reportPrivateUsage]
        with steps.ledger.transaction(steps.run) as tx:
            for statement in (
                "delete from stormproof.txn_sink where incarnation = :incarnation and txid = :txid",
                "update stormproof.txn set state = 'open' where incarnation = :incarnation and txid = :txid",
                "update stormproof.pending_slice set state = 'open', expires_at = now() where owner = :owner",
            ):
                values = {
                    "incarnation": steps.run.incarnation,
                    "txid": txn.txid,
                    "owner": steps.lease(txn.txid).owner,
                }
                tx.connection.execute(sa.text(statement), {k: v for k, v in values.items() if f":{k}" in statement})
        steps.abort(txn.txid, TxnCause.DRIVER_ENDED, "to be computed again")
        done.aborted.append(txn.txid)

    replace_in(recovery, "_roll_forward", run_again)
    believe_sinks()


def _decide(value: Callable[[SinkIdentity, PreparedTransaction, Held | None], CommitDecision]) -> None:
    replace_in(delta, "decide", value)
    replace_in(postgres, "decide", value)


def replace_in(owner: object, name: str, value: object) -> None:
    """Put a broken part in the place of a whole one; a part that is not there ends this process by `NOT_BROKEN`."""
    if not hasattr(owner, name):
        print(f"{owner} has no {name} to break", file=sys.stderr)
        sys.exit(NOT_BROKEN)
    setattr(owner, name, value)


def late_rows_win() -> None:
    """An upsert replaces what is there, though it is later."""
    replace_in(merge, "later_condition", lambda *_: "true")


# What the checks of a state rest on


def guard_before_rows() -> None:
    """A map in Postgres moves its guard, with the evidence, in a transaction before the one with the rows."""
    begin = PostgresBacking.begin

    def begin_with_the_guard(backing: PostgresBacking, transaction: PreparedTransaction, *, checked: bool) -> None:
        begin(backing, transaction, checked=checked)
        backing.end()
        begin(backing, transaction, checked=checked)

    replace_in(PostgresBacking, "begin", begin_with_the_guard)


def identifier_before_rows() -> None:
    """A map in Delta puts its transaction identifier in a version before the one with the rows."""
    put = MapTable.put

    def put_in_two(
        rows: MapTable, table: DeltaTable, transaction: PreparedTransaction, properties: CommitProperties
    ) -> None:
        gathered, rows.gathered = rows.gathered, []
        put(rows, table, transaction, properties)
        failpoint("delta.after_log_entry")
        rows.gathered = gathered
        put(rows, DeltaTable(table.table_uri), transaction, CommitProperties())

    replace_in(MapTable, "put", put_in_two)


def no_txid_check() -> None:
    """A state takes whatever it is given, and no key's txid is looked at."""
    replace_in(StateSession, "_holding", lambda *_: None)
    no_txid_of_keys()


def no_txid_of_keys() -> None:
    """A map looks at the txid that it holds, and not at those of its keys, which may be ahead of it."""
    replace_in(StoredMap, "_same", lambda _, held: pa.repeat(pa.scalar(False), held.num_rows))


# What a power loss takes


def no_sync() -> None:
    """Nothing that is written to a folder is synced."""
    prepared_bytes_not_synced()
    replace_in(LocalFiles, "_sync", lambda *_: None)


def prepared_bytes_not_synced() -> None:
    """A task's files have their names on the disk, and no bytes."""
    replace_in(writer._HashingFile, "sync", lambda _: None)  # pyright: ignore[reportPrivateUsage]


def folders_not_synced() -> None:
    """New folders are not synced into those above them."""
    replace_in(LocalFiles, "make_folder", lambda _, folder, **__: Path(folder).mkdir(parents=True, exist_ok=True))
    replace_in(LocalFiles, "settle_folder", LocalFiles.make_folder)


def delta_commit_not_synced() -> None:
    """Nobody syncs a Delta commit's log entry and files."""
    replace_in(power_loss, "sync_version", lambda *_: None)


def frequent_checkpoints() -> None:
    """No harm: new Delta tables get a checkpoint with every second version."""
    replace_in(opening, "CHECKPOINT_INTERVAL", 2)
