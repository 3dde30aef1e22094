"""Every decision that the page offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stormproof.core.errors import UsageError
from stormproof.trident.web.decide import batches, driver, letters, starts, tables
from stormproof.trident.web.decide.action import Action

ACTIONS: Final[Mapping[str, Action]] = {
    action.name: action for module in (letters, driver, batches, starts, tables) for action in module.ACTIONS
}

ON_THE_COMMAND_LINE: Final[Mapping[str, str]] = {
    "compact": "it decides nothing about messages, and may run for minutes",
    "vacuum": "it decides nothing about messages, and may run for minutes",
    "repair": "it reads whole tables, and may run for minutes",
    "queue adopt": "it belongs to a restore, which is done at a shell, and reads every sink before it answers",
    "forget": "the page itself forgets the topology, and has nowhere to show what stays",
    "queue unsubscribe": "the page shows topologies, and the reader is none's",
    "ledger migrate": "the page needs a ledger to be there at all",
}
"""What a person decides by a command alone, and why."""


def action_of(name: str) -> Action:
    """A decision by its name.

    Raises:
        UsageError: there is none.
    """
    found = ACTIONS.get(name)
    if found is None:
        raise UsageError(f"there is no decision {name[:40]!r}; there are {', '.join(ACTIONS)}")
    return found
