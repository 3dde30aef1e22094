"""The way back from a sink's name to its evidence: a session made of what the ledger says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stormproof.core.postgres.database import Database
from stormproof.core.sink import SinkInput
from stormproof.sinks import registry
from stormproof.sinks.protocol import Sink, SinkIdentity, SinkSession
from stormproof.trident.audit.ledger import SinkBinding
from stormproof.trident.state.kinds import register_states

SinkOpener: TypeAlias = Callable[[SinkIdentity, SinkBinding], SinkSession]
"""Opens a sink for reading only."""


def opener_for(ledger_database: Database) -> SinkOpener:
    """An opener for every registered kind of sink, by the ledger's descriptions."""

    def open_sink(identity: SinkIdentity, binding: SinkBinding) -> SinkSession:
        return open_for_inspection(identity, binding, ledger_database)

    return open_sink


def open_for_inspection(identity: SinkIdentity, binding: SinkBinding, ledger_database: Database) -> SinkSession:
    """A session for reading only: makes nothing, fences nobody.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that is not registered.
        SinkRefused: the table is gone or cannot be what was written to.
        StoreUnavailable: it cannot be reached.
    """
    sink, input_ = described_sink(binding, ledger_database)
    return sink.inspect(identity, input_)


def described_sink(binding: SinkBinding, ledger_database: Database) -> tuple[Sink, SinkInput]:
    """A sink as the ledger describes it, and what it is given; how a map's values are merged only its code knows.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that is not registered.
    """
    register_states()
    return registry.described_sink(binding.sink, binding.target, binding.description, ledger_database)
