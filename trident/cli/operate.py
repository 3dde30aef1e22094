"""What an operator decides: `retry`, `dead-letters list|requeue|drop`; each is recorded with who and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Final

from stormproof.core.errors import CannotTell, Json, UsageError
from stormproof.core.message import storable_text
from stormproof.sinks.protocol import SinkIdentity
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.repair import the_ledger
from stormproof.trident.cli.stores import Stores, opened, operator
from stormproof.trident.ledger import events, lives, transactions
from stormproof.trident.ledger.rows import Event, Run
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.steps import to_prepared
from stormproof.trident.transaction import EventKind, OperatorAction, TxnState

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow


_LIFE: Final = re.compile(r"[^/\s]+/[A-Za-z0-9_.-]+|[0-9a-f]+(-[0-9a-f]+)*")
"""How a refused start names another life. A streaming query's has the query's id."""


def retry_txid(topology: str, txid: int, *, by: str, why: str, as_json: bool) -> None:
    """Blocked to prepared: the topology's next start tries the commit again."""
    by = by or operator()
    with opened() as stores:
        with stores.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
            found = snapshot.txns(row.incarnation, txid, txid)
        if not found or found[0].state is not TxnState.BLOCKED:
            now = f"is {found[0].state}" if found else "does not exist"
            raise UsageError(
                f"txid {txid} of topology {topology!r} {now}; only a blocked one can be retried", txid=txid
            )
        ledger = the_ledger(stores)
        with ledger.transaction(Run(topology, row.incarnation, row.epoch)) as tx:
            # First the sinks: killed in between, the batch is still blocked, and a further `retry` finds nothing lost.
            restored = _restore_lost(stores, tx, row, txid)
            transactions.unblock(tx, txid)
            action = OperatorAction.RETRY
            detail: dict[str, Json] = {
                "action": action.value,
                "by": by,
                "why": storable_text(why),
                "restored": {sink: storable_text(text) for sink, text in restored.items()},
            }
            events.record(tx, [Event(EventKind.OPERATOR, action, txid=txid, reason=f"retry by {by}", detail=detail)])
    report = {
        "topology": topology,
        "txid": txid,
        "state": TxnState.PREPARED.value,
        "by": by,
        "restored": restored,
    }
    emit(report, as_json=as_json, text=lambda: _retry_text(topology, txid, restored))


def _retry_text(topology: str, txid: int, restored: Mapping[str, str]) -> None:
    for sink, text in restored.items():
        say(f"sink {sink}: {text}")
    say(f"txid {txid} of {topology} is prepared again; the next start of {topology} commits it")


def _restore_lost(stores: Stores, tx: Tx, row: TopologyRow, txid: int) -> dict[str, str]:
    """Have each sink that holds the batch, and lost files of it to a power loss, go back to what it was before it.

    Raises:
        SinkRefused: a sink cannot go back; the batch stays blocked.
    """
    work, _ = transactions.owed_work(tx, txid)
    _, bindings = stores.bound(row.name)
    restored: dict[str, str] = {}
    for sink, item in work.items():
        binding = bindings.get(sink)
        if binding is None:
            continue
        try:
            described, input_ = described_sink(binding, stores.database)
        except CannotTell:
            continue  # of a kind that only its own code can open
        if not described.may_lose_files:
            continue
        with closing(described.inspect(SinkIdentity(row.name, row.incarnation, sink), input_)) as session:
            done = session.restore_lost(to_prepared(txid, item))
        if done is not None:
            restored[sink] = done
    return restored


def adopt_incarnation(topology: str, incarnation: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology write beside what another life of its name left in a table."""
    by = by or operator()
    with opened() as stores:
        with stores.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
        if not _LIFE.fullmatch(incarnation) or incarnation == row.incarnation:
            raise UsageError(
                f"{incarnation!r} is no other life than {topology}'s own ({row.incarnation}): give INCARNATION or "
                "NAME/INCARNATION as the refused start names it",
                incarnation=incarnation,
            )
        ledger = the_ledger(stores)
        with ledger.transaction(Run(topology, row.incarnation, row.epoch)) as tx:
            lives.adopt(tx, incarnation, by=by, why=storable_text(why))
    report = {"topology": topology, "incarnation": row.incarnation, "adopted": incarnation, "by": by}
    emit(
        report,
        as_json=as_json,
        text=lambda: say(f"{topology} may write beside what incarnation {incarnation} left; its rows stay as they are"),
    )
