"""An operator's decisions that let a topology go on: `retry`, `ledger adopt`, `ledger accept-change`; each is recorded."""

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
from stormproof.trident.cli.stores import Stores, opened
from stormproof.trident.ledger import events, graphs, lives, txns
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.steps import to_prepared
from stormproof.trident.transaction_states import OperatorAction, TxnState

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow


_OTHER_LIFE: Final = re.compile(r"[^/\s]+/[A-Za-z0-9_.-]+|[0-9a-f]+(-[0-9a-f]+)*")
"""How a refused start names another incarnation; that of a streaming query contains the query's id."""


def retry_txid(topology: str, txid: int, *, by: str, why: str, as_json: bool) -> None:
    """Make a blocked batch prepared again: the topology's next start tries to commit it."""
    with opened() as stores:
        row = stores.topology(topology)
        with stores.audit.snapshot() as snapshot:
            found = snapshot.txns(row.incarnation, txid, txid)
        if not found or found[0].state is not TxnState.BLOCKED:
            now = f"is {found[0].state}" if found else "does not exist"
            raise UsageError(
                f"txid {txid} of topology {topology!r} {now}; only a blocked one can be retried", txid=txid
            )
        with stores.transaction(row) as tx:
            # The sinks come first: if this is killed in between, the batch is still blocked, and `retry` can be repeated.
            restored = _restore_lost(stores, tx, row, txid)
            txns.unblock(tx, txid)
            detail: dict[str, Json] = {"restored": {sink: storable_text(text) for sink, text in restored.items()}}
            events.decided(tx, OperatorAction.RETRY, by=by, why=why, txid=txid, detail=detail)
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


def adopt_incarnation(topology: str, incarnation: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology write to a table in which another incarnation left rows."""
    with opened() as stores:
        row = stores.topology(topology)
        if not _OTHER_LIFE.fullmatch(incarnation) or incarnation == row.incarnation:
            raise UsageError(
                f"{incarnation!r} names no incarnation other than that of {topology} ({row.incarnation}): give INCARNATION "
                "or NAME/INCARNATION, as the refused start names it",
                incarnation=incarnation,
            )
        with stores.transaction(row) as tx:
            lives.adopt(tx, incarnation, by=by, why=why)
    report = {"topology": topology, "incarnation": row.incarnation, "adopted": incarnation, "by": by}
    text = f"{topology} may write beside the rows of incarnation {incarnation}, which stay as they are"
    emit(report, as_json=as_json, text=lambda: say(text))


def accept_change(topology: str, fingerprint: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology go on with a changed graph; the refused start named the graph's fingerprint."""
    if len(fingerprint) != SHOWN_CHARACTERS or not set(fingerprint) <= set("0123456789abcdef"):
        raise UsageError(
            f"{fingerprint!r} is no fingerprint of a graph; the refused start of {topology!r} names it",
            fingerprint=fingerprint,
        )
    with opened() as stores:
        row = stores.topology(topology)
        with stores.transaction(row) as tx:
            graphs.accept(tx, fingerprint, by=by, why=why)
    report = {"topology": topology, "incarnation": row.incarnation, "accepted": fingerprint, "by": by, "why": why}
    text = f"{topology} may start with the graph {fingerprint}; what its tables hold stays as it is"
    emit(report, as_json=as_json, text=lambda: say(text))
