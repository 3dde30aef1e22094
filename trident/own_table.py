"""One table, one sink: refuses two sinks of a topology that have one table, however each of them calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from stormproof.core.graph.plan import Plan
from stormproof.core.sink import SinkSpec, TableKey, require_tables_apart, shared_table
from stormproof.sinks.protocol import Sink, SinkSession


def require_own_tables(plan: Plan) -> None:
    """Ask each sink's store which table it has; nothing is made, and nobody fenced.

    Not guaranteed:
        That a sink of one's own, which cannot tell, is told from another.

    Raises:
        TopologyError: two have one.
        StoreUnavailable: a store does not answer.
    """
    if len(plan.sink_specs) > 1:
        require_tables_apart(plan.topology, plan.sink_specs, _found)


def _found(sink: SinkSpec) -> TableKey | None:
    return cast("Sink", sink).find_table()


def require_own_stores(plan: Plan, sessions: Mapping[str, SinkSession]) -> None:
    """The same of what can only be told once it is open: a key-value store.

    Raises:
        TopologyError: two of these sessions have one.
    """
    targets = {sink.name: sink.target for sink in plan.sink_specs}
    first: dict[TableKey, str] = {}
    for name, session in sessions.items():
        key = session.store_key
        other = name if key is None else first.setdefault(key, name)
        if other != name:
            raise shared_table(plan.topology, other, name, (targets[other], targets[name]))
