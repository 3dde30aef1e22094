"""Opens a sink for inspection by the ledger's description of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from stormproof.core.errors import CannotTell
from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput
from stormproof.sinks import registry
from stormproof.sinks.protocol import Sink, SinkIdentity, SinkSession
from stormproof.sinks.registry import register_sink
from stormproof.trident.audit.ledger import SinkBinding


def register_states() -> None:
    """Register the states that can be opened without their topology's code; may be called again."""
    for kind, module in (("delta-map", "delta"), ("postgres-map", "postgres")):
        register_sink(kind, f"stormproof.trident.state.{module}:described")


SinkOpener: TypeAlias = Callable[[SinkIdentity, SinkBinding], SinkSession]
"""Opens a read-only session of a sink."""


def opener_for(ledger_database: Database) -> SinkOpener:
    """An opener for every registered kind of sink, by the ledger's descriptions."""
    return partial(open_for_inspection, ledger_database=ledger_database)


def open_for_inspection(identity: SinkIdentity, binding: SinkBinding, ledger_database: Database) -> SinkSession:
    """A read-only session: it creates nothing and fences no driver.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that is not registered.
        SinkRefused: the table is gone or cannot be what was written to.
        StoreUnavailable: it cannot be reached.
    """
    sink, input_ = described_sink(binding, ledger_database)
    return sink.inspect(identity, input_)


def described_sink(binding: SinkBinding, ledger_database: Database) -> tuple[Sink, SinkInput]:
    """A sink made from the ledger's description, and its input. The merge functions of a map are not in the description.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that is not registered.
    """
    register_states()
    return registry.described_sink(binding.sink, binding.target, binding.description, ledger_database)


def committer_of(binding: SinkBinding, ledger_database: Database) -> str | None:
    """Who writes to a sink's table, where that depends on the table; see `Sink.committed_by`."""
    try:
        sink, input_ = described_sink(binding, ledger_database)
    except CannotTell:
        return None
    return sink.committed_by(input_)
