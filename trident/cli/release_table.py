"""`ledger release-table`: a topology gives up a table that it claimed and never wrote to."""

from __future__ import annotations

from contextlib import closing

from stormproof.core.errors import SinkRefused, UsageError
from stormproof.core.message import storable_text
from stormproof.sinks.protocol import PROBLEM, SinkIdentity, SinkProblem
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.audit.ledger import SinkBinding, TopologyRow
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.cli.output import emit, say
from stormproof.trident.cli.repair import the_ledger
from stormproof.trident.cli.stores import Stores, opened, operator
from stormproof.trident.ledger import bindings as kept
from stormproof.trident.ledger import transactions
from stormproof.trident.ledger.rows import Run
from stormproof.trident.ledger.tx import Tx


def release_table(topology: str, sink: str, *, by: str, why: str, as_json: bool) -> None:
    """Take the claim off the table, and forget the table.

    Raises:
        UsageError: a driver may be running, or a batch was written to the sink or is about to be.
    """
    by, why = by or operator(), storable_text(why)
    with opened() as stores:
        row, bindings = stores.bound(topology)
        if sink not in bindings:
            names = ", ".join(bindings) or "none"
            raise UsageError(f"topology {topology!r} has no table behind sink {sink!r}; known: {names}", sink=sink)
        if driver_state(row) in (DriverState.RUNNING, DriverState.UNKNOWN):
            raise UsageError(
                f"topology {topology!r}: its driver {row.driver_host}:{row.driver_pid} may be running: stop it first "
                "(stormproof status)",
                sink=sink,
            )
        ledger, run = the_ledger(stores), Run(topology, row.incarnation, row.epoch)
        with ledger.transaction(run) as tx:
            _require_unused(tx, topology, sink)
        released = _release(stores, row, bindings[sink])
        with ledger.transaction(run) as tx:
            _require_unused(tx, topology, sink)
            kept.unbind(tx, sink, by=by, why=why)
    target = bindings[sink].target
    report = {"topology": topology, "sink": sink, "table": target, "claim_removed": released, "by": by, "why": why}
    emit(
        report,
        as_json=as_json,
        text=lambda: say(f"{topology}: sink {sink} has no table any more; {target} is free for another topology"),
    )


def _require_unused(tx: Tx, topology: str, sink: str) -> None:
    held = kept.last_held(tx, sink)
    if held is not None:
        raise UsageError(f"topology {topology!r}: sink {sink!r} holds txid {held[0]}: its table is in use", sink=sink)
    for txn in transactions.unresolved(tx):
        if sink in transactions.work(tx, txn.txid):
            raise UsageError(
                f"topology {topology!r}: txid {txn.txid} is {txn.state} and writes to sink {sink!r}: its table is in use",
                sink=sink,
                txid=txn.txid,
            )


def _release(stores: Stores, row: TopologyRow, binding: SinkBinding) -> bool:
    sink, input_ = described_sink(binding, stores.database)
    try:
        with closing(sink.inspect(SinkIdentity(row.name, row.incarnation, binding.sink), input_)) as session:
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
