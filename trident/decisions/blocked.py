"""`retry`: a blocked batch is made prepared again, so that the topology's next start tries to commit it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stormproof.core.errors import CannotTell, Json, UsageError
from stormproof.core.message import storable_text
from stormproof.sinks.protocol import SinkIdentity
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.batch_records import to_prepared
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.ledger import events, txns
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.stores import Stores
from stormproof.trident.transaction_states import OperatorAction, TxnState

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow


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


def look(stores: Stores, topology: str, txid: int) -> Look:
    """Where the batch stands, and why it is blocked."""
    row = require_blocked(stores, topology, txid)
    with stores.audit.snapshot() as snapshot:
        (txn,) = snapshot.txns(row.incarnation, txid, txid)
    facts = {"txid": str(txid), "state": txn.state.value, "messages": str(txn.messages)}
    return Look(facts, said=(f"it is blocked: {txn.reason}",))


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
        txns.unblock(tx, txid)
        detail: dict[str, Json] = {"restored": {sink: storable_text(text) for sink, text in restored.items()}}
        events.decided(tx, OperatorAction.RETRY, by=by, why=why, txid=txid, detail=detail)
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
