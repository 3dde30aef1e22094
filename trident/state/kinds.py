"""The kinds of states that the ledger's descriptions name, for the registry of sinks. The one place to add one."""

from __future__ import annotations

from stormproof.sinks.registry import SinkAddress, register_sink
from stormproof.trident.state.protocol import StateFactory
from stormproof.trident.state.sink import StateSink


def register_states() -> None:
    """Have the registry know the states that can be opened without their topology's code; may be called again."""
    register_sink("delta-map", _delta_map)
    register_sink("postgres-map", _postgres_map)


def _delta_map(address: SinkAddress) -> StateSink:
    from stormproof.trident.state.delta import DeltaMap

    return _opened(address, DeltaMap(address.text("path"), address.text("state")))


def _postgres_map(address: SinkAddress) -> StateSink:
    from stormproof.trident.state.postgres import PostgresMap

    return _opened(address, PostgresMap(address.text("table"), address.text("state"), database=address.database))


def _opened(address: SinkAddress, state: StateFactory) -> StateSink:
    return StateSink(address.name, state, keys=address.input.keys, staging=address.files)
