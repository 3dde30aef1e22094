"""A topology gives up a table that it claimed and never wrote to."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from stormproof.core.errors import SinkRefused, UsageError
from stormproof.sinks.protocol import PROBLEM, SinkIdentity, SinkProblem
from stormproof.trident.audit.inspect import open_for_inspection
from stormproof.trident.audit.ledger import SinkBinding, TopologyRow
from stormproof.trident.audit.status import may_be_running
from stormproof.trident.declarations.decisions import Look
from stormproof.trident.ledger import bindings as kept
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.tx import Tx
from stormproof.trident.stores import Stores


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


def look(stores: Stores, topology: str, sink: str) -> Look:
    """The table that would be free."""
    _, binding = require_releasable(stores, topology, sink)
    return Look({"sink": sink, "table": binding.target, "known as": binding.table_id})


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
