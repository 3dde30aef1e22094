"""For tests of what you build on Stormproof: the suite for sources of your own.

`SourceConformance` needs pytest; nothing here is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stormproof.testing.sources import Message, SourceConformance, SourceHarness, messages_of

_HOMES: Final[dict[str, str]] = {
    "Message": "stormproof.testing.sources",
    "SourceConformance": "stormproof.testing.sources",
    "SourceHarness": "stormproof.testing.sources",
    "messages_of": "stormproof.testing.sources",
}

__all__ = ["Message", "SourceConformance", "SourceHarness", "messages_of"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stormproof.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
