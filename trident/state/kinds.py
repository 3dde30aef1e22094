"""The kinds of states that the ledger's descriptions name, for the registry of sinks. The one place to add one."""

from __future__ import annotations

from stormproof.sinks.registry import register_sink


def register_states() -> None:
    """Register the states that can be opened without their topology's code; may be called again."""
    for kind, module in (("delta-map", "delta"), ("postgres-map", "postgres")):
        register_sink(kind, f"stormproof.trident.state.{module}:described")
