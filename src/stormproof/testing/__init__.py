"""For tests of what you build on Stormproof: simulations of whole topologies, and suites for sources and states of your own.

`SourceConformance` and `MapStateConformance` need pytest; nothing here is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stormproof.testing.faults import Event, Fault, FaultKind, Faults
    from stormproof.testing.simulation import (
        End,
        MessageFailed,
        SimulatedMessage,
        Simulation,
        SimulationStatistics,
        Written,
        simulate,
    )
    from stormproof.testing.sources import Message, SourceConformance, SourceHarness, messages_of
    from stormproof.testing.states import MapStateConformance

_HOMES: Final[dict[str, str]] = {
    **dict.fromkeys(("Event", "Fault", "FaultKind", "Faults"), "stormproof.testing.faults"),
    **dict.fromkeys(
        ("End", "MessageFailed", "SimulatedMessage", "Simulation", "SimulationStatistics", "Written", "simulate"),
        "stormproof.testing.simulation",
    ),
    **dict.fromkeys(("Message", "SourceConformance", "SourceHarness", "messages_of"), "stormproof.testing.sources"),
    "MapStateConformance": "stormproof.testing.states",
}

__all__ = [
    "End",
    "Event",
    "Fault",
    "FaultKind",
    "Faults",
    "MapStateConformance",
    "Message",
    "MessageFailed",
    "SimulatedMessage",
    "Simulation",
    "SimulationStatistics",
    "SourceConformance",
    "SourceHarness",
    "Written",
    "messages_of",
    "simulate",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stormproof.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
